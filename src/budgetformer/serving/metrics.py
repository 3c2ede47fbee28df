"""The metrics that Prometheus scrapes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AUDITED, _DISAGREED = "budgetformer_audited", "budgetformer_audit_disagreed"
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The service's figures; with several workers, the sum over them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("budgetformer_requests", "Requests answered.", ["path", "code"], registry=registry)
        self.latency = Histogram(
            "budgetformer_request_seconds", "From the first byte to the answer.", ["path"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.queue = Gauge(
            "budgetformer_queue_texts", "Texts that were taken in and not yet answered.", registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.batch = Histogram("budgetformer_batch_texts", "Texts in a batch.", buckets=_ROWS, registry=registry)
        self.texts = Counter("budgetformer_texts", "Texts that the model read.", registry=registry)
        self.cut = Counter("budgetformer_texts_cut", "Texts longer than the model reads.", registry=registry)
        self.tokens = Counter("budgetformer_tokens", "Tokens that the model read.", registry=registry)
        self.used = Counter("budgetformer_heads_used", "Attention heads computed.", registry=registry)
        self.possible = Counter("budgetformer_heads_possible", "Heads of a model without budgets.", registry=registry)
        self.exits = Counter(
            "budgetformer_exits", "Texts by the stage that they left at.", ["stage"], registry=registry
        )
        self.deadline = Counter(
            "budgetformer_deadline_cut", "Texts that a deadline ended, by the stage that answered.", ["stage"],
            registry=registry,
        )  # fmt: skip
        self.audited = Counter(
            _AUDITED, "Early answers that were run to the end in idle time.", ["stage"], registry=registry
        )
        self.disagreed = Counter(
            _DISAGREED, "Those of them that got another answer there.", ["stage"], registry=registry
        )
        self.refused = Counter("budgetformer_refusals", "Requests not answered with 200.", ["code"], registry=registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        registry: Any = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry) + generate_latest(_Shares(registry))


class _Shares:
    """The share of audited answers that were different at the end, by stage: from the counts of all workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        counts: dict[str, dict[str, float]] = {_AUDITED: {}, _DISAGREED: {}}
        for metric in self._registry.collect():
            for sample in metric.samples if metric.name in counts else ():
                if sample.name.endswith("_total"):
                    counts[metric.name][sample.labels["stage"]] = sample.value
        shares = GaugeMetricFamily(
            "budgetformer_audit_disagreement", "Disagreed, as a share of audited.", labels=["stage"]
        )
        for stage, audited in counts[_AUDITED].items():
            shares.add_metric([stage], counts[_DISAGREED].get(stage, 0.0) / audited)
        yield shares

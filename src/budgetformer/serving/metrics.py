"""The metrics that Prometheus scrapes."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
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
        by_stage: dict[str, Any] = {"labelnames": ["stage"], "registry": registry}
        self.exits = Counter("budgetformer_exits", "Texts by the stage that they left at.", **by_stage)
        self.deadline = Counter("budgetformer_deadline_cut", "Texts that a deadline ended, by stage.", **by_stage)
        self.audited = Counter("budgetformer_audited", "Early answers that were run to the end.", **by_stage)
        self.disagreed = Counter("budgetformer_audit_disagreed", "Of those, other answers there.", **by_stage)
        self.disagreement = Gauge(
            "budgetformer_audit_disagreement", "Disagreed of audited.", multiprocess_mode="liveall", **by_stage
        )
        self.refused = Counter("budgetformer_refusals", "Requests not answered with 200.", ["code"], registry=registry)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

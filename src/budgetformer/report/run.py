"""A finished run as its report and card see it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from budgetformer.evaluate import Evaluation
from budgetformer.report.numbers import METRIC_NAMES, format_score
from budgetformer.runs.files import JsonObject, read_json, read_json_lines

_REMEDY = "restore it or train again"


@dataclass(frozen=True)
class Run:
    """run.json, history.jsonl and evaluation.json of a run, with its dense twin's where one was trained."""

    record: JsonObject
    final: Evaluation  # of the test split, or of validation where there is none
    dials: list[JsonObject]
    twin: Evaluation | None
    verdict: str | None  # of the paired test against the twin
    history: list[JsonObject]
    twin_history: list[JsonObject]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read what training wrote; a missing or damaged file or key is named."""
        results = read_json(folder / "evaluation.json", _REMEDY)
        split = "test" if results["test"] else "validation"
        baseline, versus = results["baseline"], results["versus_baseline"]
        twin_history = folder / "baseline" / "history.jsonl"
        return cls(
            record=read_json(folder / "run.json", _REMEDY),
            final=_evaluation(results[split]),
            dials=results["dials"],
            twin=_evaluation(baseline[split]) if baseline else None,
            verdict=versus["verdict"] if versus else None,
            history=read_json_lines(folder / "history.jsonl", _REMEDY),
            twin_history=read_json_lines(twin_history, _REMEDY) if twin_history.exists() else [],
        )

    @property
    def metric_name(self) -> str:
        return METRIC_NAMES[self.final.metric]

    def format_score(self, value: float) -> str:
        """A score in the unit of the run's metric."""
        return format_score(value, self.final.metric)


def _evaluation(item: JsonObject) -> Evaluation:
    return Evaluation(**{field.name: item[field.name] for field in fields(Evaluation)})

"""From finished cells to the parts of a result: measured figures, tables, claims, provenance."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.errors import DataError
from budgetformer.evaluate import proportion
from budgetformer_reproduction.cells import REMEDY, Plan
from budgetformer_reproduction.schema import Claim, Column, Figure, Measured, Provenance, Result, Table, Verdict
from budgetformer_reproduction.statistics import Estimate, over_rows, student_interval
from budgetformer_reproduction.store import Done

NAMES = {"dbpedia_14": "DBpedia", "ag_news": "AG News", "imdb": "IMDB", "snli": "SNLI", "yelp_review_full": "Yelp Full"}


@dataclass
class Findings:
    """What one experiment found, before it is known where from."""

    title: str
    summary: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def result(self, name: str, plan: Plan, cells: Sequence[Done]) -> Result:
        known = tomllib.loads((Path(__file__).parent / "explanations.toml").read_text(encoding="utf-8"))
        explanations = known.get(plan.scale.name, {})
        for claim in self.claims:
            claim.explanation = " ".join(explanations.get(claim.verdict, {}).get(claim.key, "").split())
        if not cells:  # a claim is not tested then; what the paper prints alone is no result
            self.tables, self.figures = [table for table in self.tables if _has_values(table)], []
        return Result(id=name, scale=plan.scale.name, **vars(self), provenance=_provenance(plan, cells))


def measured(values: Sequence[float], published: float | str | None = None, rows: int | None = None) -> Measured:
    """The mean over seeds with Student's interval, or Wilson's for one seed's accuracy on `rows`."""
    known: dict[str, Any] = {"mean": float(np.mean(values)), "n": len(values)} if len(values) else {"mean": None}
    if len(values) > 1:
        _, known["low"], known["high"] = student_interval(values)
    elif len(values) == 1 and rows:
        bounds = proportion(round(values[0] * rows), rows)
        known["low"], known["high"] = bounds["low"], bounds["high"]
    if published is not None:
        known["published"] = published
    return Measured(**known)


def over_seeds(cells: Sequence[Done], figure: Callable[[Done], float], published: float | None = None) -> Measured:
    """A figure of the same cell with several seeds, one that is no accuracy."""
    return measured([figure(done) for done in cells], published)


def accuracy(cells: Sequence[Done], published: float | None = None) -> Measured:
    """The test accuracy."""
    return measured([done.accuracy for done in cells], published, len(cells[0].correct) if cells else None)


def probed(cells: Sequence[Done], *path: str, published: float | None = None) -> Measured:
    """The accuracy under the probe at this path of probes.json."""
    values = []
    for done in cells:
        probe: Any = done.probes
        for key in path:
            probe = probe.get(key, {})
        if "accuracy" in probe:
            values.append(float(probe["accuracy"]))
    return measured(values, published, cells[0].probes["rows"] if values else None)


def table(name: str, title: str, rows: Sequence[Mapping[Any, Any]], note: str = "") -> Table:
    """A table of rows, each a value (None: none) per column; a column is (key, title) or (key, title, digits)."""
    columns = dict.fromkeys(column for row in rows for column in row)
    heads = [Column(**dict(zip(("key", "title", "digits"), column, strict=False))) for column in columns]
    values = [{column[0]: value for column, value in row.items() if value is not None} for row in rows]
    return Table(name=name, title=title, note=note, columns=heads, rows=values)


def _has_values(table: Table) -> bool:
    """Whether a table has a number of its own, not only the paper's."""
    values = [value.mean if isinstance(value, Measured) else value for row in table.rows for value in row.values()]
    return any(isinstance(value, int | float) for value in values)


def claim(key: str, words: str, holds: bool | None, evidence: str) -> Claim:
    """A claim of the paper with its verdict; None means that it was not tested."""
    verdict: Verdict = "not tested" if holds is None else "holds" if holds else "does not hold"
    return Claim(key=key, claim=words, verdict=verdict, evidence=evidence, explanation="")


def paired(ours: Sequence[Done], others: Sequence[Done]) -> Estimate | None:
    """The difference in accuracy, seed by seed on the same test rows, with its interval over rows."""
    gains = [_gain(done, other) for done, other in pairs(ours, others)]
    return over_rows(np.mean(gains, axis=0)) if gains else None


def pairs(ours: Sequence[Done], others: Sequence[Done]) -> list[tuple[Done, Done]]:
    """Cells of the same seed; one without a seed of its own stands against every seed."""
    by_seed = {done.cell.seed: done for done in others}
    return [(done, by_seed.get(done.cell.seed, others[0])) for done in ours] if others else []


def _gain(ours: Done, other: Done) -> NDArray[np.float64]:
    for name in ("lines", "labels"):
        if not np.array_equal(ours.rows[name], other.rows[name]):
            raise DataError(
                f"{ours.folder} and {other.folder} have other test rows, so they cannot be compared: {REMEDY}"
            )
    return ours.correct.astype(np.float64) - other.correct


def points(estimate: Estimate) -> str:
    """A difference of accuracies in words."""
    return f"{100 * estimate.value:+.2f} points [{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}]"


def _provenance(plan: Plan, cells: Sequence[Done]) -> Provenance:
    """Commit, machine, versions, seeds, data and cost of the cells behind a result."""
    if not cells:
        return Provenance(seeds=list(plan.seeds), cells=0)
    environments: list[Any] = [done.run["environment"] for done in cells]
    first = environments[0]
    machines = {made["gpu"] or f"{made['cpu']} ({made.get('cpu_flags', '')})": None for made in environments}
    precisions = {done.run["recipe"]["precision"] for done in cells if "recipe" in done.run}  # TF-IDF has no recipe
    return Provenance(
        commit=", ".join(sorted({str(made["commit"]) for made in environments})),
        version=first["budgetformer"],
        machine="; ".join(machines),
        threads=first["threads"],
        torch=first["torch"],
        python=first["python"],
        precision=" and ".join(sorted(precisions)) or plan.precision,
        seeds=list(plan.seeds),
        data={done.cell.dataset: done.run["data_fingerprint"] for done in cells},
        cells=len(cells),
        seconds=sum(float(done.run["training"]["seconds"]) for done in cells),
    )

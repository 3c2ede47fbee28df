"""The pieces of a result: measured figures, tables, claims, and where they come from. All of it is plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.evaluate import proportion
from budgetformer.paper.cells import Cell, Plan
from budgetformer.paper.explanations import EXPLANATIONS
from budgetformer.paper.statistics import Estimate, over_rows, over_seeds
from budgetformer.paper.store import Done, Store
from budgetformer.runs.provenance import environment

NAMES = {"dbpedia_14": "DBpedia", "ag_news": "AG News", "imdb": "IMDB", "snli": "SNLI", "yelp_review_full": "Yelp Full"}


@dataclass
class Result:
    """What one experiment found."""

    title: str
    summary: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, str]] = field(default_factory=list)


def measured(values: Sequence[float], published: float | str | None = None, rows: int | None = None) -> dict[str, Any]:
    """A cell of a table: the mean over seeds, Student's interval, or Wilson's for one seed's accuracy on `rows`."""
    cell: dict[str, Any] = {"mean": float(np.mean(values)) if len(values) else None}
    if len(values):
        cell["n"] = len(values)
    if len(values) > 1:
        _, cell["low"], cell["high"] = over_seeds(values)
    elif len(values) == 1 and rows:
        bounds = proportion(round(values[0] * rows), rows)
        cell["low"], cell["high"] = bounds["low"], bounds["high"]
    if published is not None:
        cell["published"] = published
    return cell


def of(found: Sequence[Done], figure: Callable[[Done], float], published: float | str | None = None) -> dict[str, Any]:
    """A measured figure of some finished cells that is no accuracy."""
    return measured([figure(done) for done in found], published)


def accuracy(found: Sequence[Done], published: float | str | None = None) -> dict[str, Any]:
    """The test accuracy of some finished cells."""
    return measured([d.accuracy for d in found], published, len(found[0].right) if found else None)


def probed(found: Sequence[Done], *path: str, published: float | str | None = None) -> dict[str, Any]:
    """The accuracy under a probe."""
    values = []
    for done in found:
        probe: Any = done.probes
        for key in path:
            probe = probe.get(key, {})
        if "accuracy" in probe:
            values.append(float(probe["accuracy"]))
    return measured(values, published, found[0].probes["rows"] if values else None)


def table(
    name: str,
    title: str,
    columns: Sequence[tuple[Any, ...]],
    rows: list[dict[str, Any]],
    note: str = "",
) -> dict[str, Any]:
    """A table; a column is (key, title) or (key, title, digits)."""
    heads = [{"key": c[0], "title": c[1], **({"digits": c[2]} if len(c) > 2 else {})} for c in columns]
    return {"name": name, "title": title, "note": note, "columns": heads, "rows": rows}


def claim(key: str, words: str, holds: bool | None, evidence: str) -> dict[str, str]:
    """A claim of the paper with its verdict; None means that it was not tested."""
    verdict = "not tested" if holds is None else "holds" if holds else "does not hold"
    explanation = EXPLANATIONS.get(key, "") if verdict == "does not hold" else ""
    return {"claim": words, "verdict": verdict, "evidence": evidence, "explanation": explanation}


def paired(ours: Sequence[Done], theirs: Sequence[Done]) -> Estimate | None:
    """The difference in accuracy, seed by seed on the same test rows, with its interval over rows."""
    rival = {done.cell.seed: done for done in theirs}
    # A control without a seed of its own stands against every seed.
    rows = [_gain(done, rival.get(done.cell.seed) or theirs[0]) for done in ours] if theirs else []
    return over_rows(np.mean(rows, axis=0)) if rows else None


def _gain(ours: Done, theirs: Done) -> NDArray[np.float64]:
    assert np.array_equal(ours.rows["lines"], theirs.rows["lines"]), f"{ours.folder} and {theirs.folder}: other rows"
    return ours.right.astype(np.float64) - theirs.right


def points(estimate: Estimate) -> str:
    """A difference of accuracies in words."""
    return f"{100 * estimate.value:+.2f} points [{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}]"


def provenance(plan: Plan, store: Store, cells: Sequence[Cell]) -> dict[str, Any]:
    """Commit, machine, versions, seeds, data and cost of the cells behind a result."""
    here, found = environment(), store.get(cells)
    made_by: list[Mapping[str, Any]] = [done.run["environment"] for done in found] or [here]
    there = made_by[0]
    return {
        "commit": ", ".join(sorted({str(made["commit"]) for made in made_by})),
        "version": there["budgetformer"],
        "machine": there["cpu"] if not there["gpu"] else there["gpu"],
        "threads": there["threads"],
        "torch": there["torch"],
        "python": there["python"],
        "seeds": list(plan.seeds),
        "data": {done.cell.dataset: done.run["data_fingerprint"] for done in found},
        "cells": len(found),
        "seconds": sum(float(done.run["training"]["seconds"]) for done in found),
    }

"""Does the graph say what the model says? Every row, label and number of heads is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from budgetformer.data.batches import collate
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.answers import predicted
from budgetformer.engine.scores import Scores
from budgetformer.errors import ModelError
from budgetformer.evaluate import cost_of, summarize
from budgetformer.nn.allocation import Allocation, GatedHeads, Selection
from budgetformer.spec import ModelSpec

if TYPE_CHECKING:
    from budgetformer.models.model import BudgetFormerForSequenceClassification

TOLERANCE = 1e-4  # of logits; relative to those above 1
_UNDECIDED = 1e-4  # a budget or relevance nearer than this to another choice may round either way
_MOST_UNDECIDED = 0.01  # of all rows


class CheckRows(NamedTuple):
    """The rows on which a graph is compared with the model, and where they come from in words."""

    table: TokenTable
    source: str


def check_equal(
    model: BudgetFormerForSequenceClassification, dial: Dial, rows: CheckRows, theirs: Scores, ours: Scores
) -> dict[str, Any]:
    """Figures for export.json; ModelError at the first row on which graph and model differ.

    A row is let pass whose number or choice of heads hangs on the last bits of a budget or a relevance: there the
    model itself decides one way or the other from batch to batch. Such rows must be few.
    """
    before, after = (_all_logits(scores) for scores in (theirs, ours))
    difference = np.abs(after - before) / np.maximum(1, np.abs(before))
    same_heads = (ours.heads == theirs.heads).all(1)
    equal = (difference <= TOLERANCE).all(1) & same_heads & ~labels_changed(theirs, ours)
    wrong = np.flatnonzero(~equal)
    undecided = np.array([_undecided(model, rows.table, int(row), dial) for row in wrong[: len(equal) // 10 + 1]])
    if not undecided.all() or len(wrong) > max(1, _MOST_UNDECIDED * len(equal)):
        row = wrong[int(undecided.argmin())]
        raise ModelError(
            f"the graph does not agree with the model on {len(wrong)} of {rows.source}, first on row {row + 1} (line "
            f"{rows.table.lines[row]}): logits {_shown(ours.logits[row])} and {_shown(theirs.logits[row])}, heads by "
            f"layer {ours.heads[row].tolist()} and {theirs.heads[row].tolist()}. Nothing was written; try another "
            "version of the runtime, and please report it"
        )
    return {
        "rows": len(equal),
        "source": rows.source,
        "largest_difference": float(difference[equal].max(initial=0.0)),
        "undecided_rows": len(wrong),
        "k_over_h": float(ours.heads.mean() / model.config.num_attention_heads),
    }


def labels_changed(theirs: Scores, ours: Scores) -> NDArray[np.bool_]:
    """Which rows are answered otherwise; none where the answer is a number."""
    if ours.task == "regression":
        return np.zeros(len(ours.logits), bool)
    changed = predicted(ours.probabilities, ours.task) != predicted(theirs.probabilities, ours.task)
    return np.asarray(changed.reshape(len(changed), -1).any(1))


def changes(
    rows: CheckRows, before: Scores, after: Scores, config: ModelSpec, *, without: int | None = None
) -> dict[str, Any]:
    """What another precision or leaving early changes, with the score where labels are known.

    `without` leaves every so many rows out: those that scales were fitted to.
    """
    chosen = np.arange(len(rows.table)) % (without or 1) > 0 if without and len(rows.table) > 1 else slice(None)
    result: dict[str, Any] = {
        "rows": int(np.ones(len(rows.table), bool)[chosen].sum()),
        "labels_changed": int(labels_changed(before, after)[chosen].sum()),
        "largest_difference": float(np.abs(after.logits - before.logits)[chosen].max()),
        "flops_ratio": cost_of(after, config)["flops_ratio"],
    }
    if rows.table.labels is not None:
        scored = [summarize(scores, config, split="", dial="learned") for scores in (before, after)]
        result |= {"metric": scored[1].metric, "score": scored[1].score, "score_before": scored[0].score}
    return result


def _all_logits(scores: Scores) -> NDArray[np.float32]:
    """The answers, and those of every stage where they are known. (P, C or (1 + S) C)."""
    if scores.stage_logits is None:
        return scores.logits
    return np.concatenate([scores.logits, scores.stage_logits.reshape(len(scores.logits), -1)], axis=1)


def _undecided(model: BudgetFormerForSequenceClassification, table: TokenTable, row: int, dial: Dial) -> bool:
    if not issubclass(model.config.gate, GatedHeads):
        return False
    batch = collate(table, np.array([row]), 0)
    with torch.inference_mode():
        inputs = batch.tensors()
        out = model(inputs["input_ids"], token_type_ids=inputs.get("token_type_ids"), budget=dial)
    selection = model.config.part(Selection)
    return any(_margin(allocation, selection) < _UNDECIDED for allocation in out.allocations)


def _margin(allocation: Allocation, selection: Selection) -> float:
    """How far one sample's budget and relevance are from another number or choice of heads."""
    H, k = allocation.relevance.shape[-1], int(allocation.heads)
    heads = float(allocation.budget) * H - (0.5 if selection.rounding == "round" else 0.0)
    count = abs(heads - round(heads))
    best = allocation.relevance[0].sort(descending=True).values
    return min(count, float(best[k - 1] - best[k]) if 0 < k < H else 1.0)


def _shown(values: NDArray[Any]) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values[:6]) + (", ..." if len(values) > 6 else "") + "]"

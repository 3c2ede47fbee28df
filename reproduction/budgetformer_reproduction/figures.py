"""The paper's figures: training dynamics, budget by difficulty, heat maps and attention maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from budgetformer.data.locate import locate
from budgetformer.data.sources import BadRow, FileTable
from budgetformer.data.tokenizer import load_tokenizer
from budgetformer.errors import DataError
from budgetformer.runs.run import Run
from budgetformer_reproduction import schema
from budgetformer_reproduction.cells import REMEDY, Plan
from budgetformer_reproduction.results import NAMES, Findings, claim, over_seeds, table
from budgetformer_reproduction.statistics import (
    Estimate,
    difference,
    partial_spearman,
    rank_correlation,
    spearman,
    thirds,
)
from budgetformer_reproduction.store import Done, Store

_ENDS = 0.05  # of the logged steps: what counts as the beginning and the end of training
GRADES = ("Simple", "Hard", "Very hard")
_SHOWN = 4  # heads per layer, as in the paper's figure


def dynamics(plan: Plan, store: Store) -> Findings:
    """Figure 2: mean s in training and validation, and accuracy, over the epochs."""
    figures: list[Any] = []
    rows, rises, lines = [], [], []
    for name in plan.datasets:
        if not (cells := store.get(plan.learned(name))):
            continue
        figures.append(_curves(name, cells))
        first, last = over_seeds(cells, lambda d: _ends(d)[0]), over_seeds(cells, lambda d: _ends(d)[1])
        rises += [] if all(end < start for start, end in map(_ends, cells)) else [NAMES[name]]
        lines.append(f"{NAMES[name]} {first.mean:.3f} to {last.mean:.3f}")
        rows.append({
            ("dataset", "Data set"): NAMES[name],
            ("first", "mean s, first steps", 3): first,
            ("last", "mean s, last steps", 3): last,
            ("validation", "validation, last epoch", 3): over_seeds(cells, lambda d: _last(d)["s_mean"]),
            ("gap", "train minus validation, last epoch", 3): over_seeds(
                cells, lambda d: _last(d, "train")["s_mean"] - _last(d)["s_mean"]),
            ("accuracy", "validation accuracy", 4): over_seeds(cells, lambda d: _last(d)["score"]),
        })  # fmt: skip
    return Findings(
        "Figure 2: the budget during training",
        tables=[table("dynamics", "Mean s at the beginning and the end", rows,
                      "First and last: the first and last 5 % of the logged training steps.")],
        figures=figures,
        claims=[claim(
            "dynamics", "s falls during training", not rises if rows else None,
            f"Mean s of the training batches, first to last steps: {'; '.join(lines) or 'no cells'}. Rule: it falls in "
            f"every seed of every data set.{' It does not on ' + ', '.join(rises) + '.' if rises else ''}",
        )],
    )  # fmt: skip


def _last(done: Done, split: str = "validation") -> dict[str, Any]:
    return dict(done.history("epoch")[-1][split])


def _ends(done: Done) -> tuple[float, float]:
    values = [record["s_mean"] for record in done.history("step")]
    edge = max(1, round(_ENDS * len(values)))
    return float(np.mean(values[:edge])), float(np.mean(values[-edge:]))


def _curves(name: str, cells: Sequence[Done]) -> schema.Lines:
    """Seeds averaged. Training by step (x in epochs), validation at each epoch's end, accuracy on the right."""
    steps, epochs = [done.history("step") for done in cells], [done.history("epoch") for done in cells]
    total = epochs[0][-1]["step"] / epochs[0][-1]["epoch"]
    logged, ended = min(map(len, steps)), min(map(len, epochs))  # seeds may stop early, each at its own epoch
    numbers = [epoch["epoch"] for epoch in epochs[0][:ended]]

    def at_epochs(key: str) -> list[float | None]:
        values = [[epoch["validation"][key] for epoch in records[:ended]] for records in epochs]
        return [float(value) for value in np.mean(values, axis=0)]

    train = np.array([[record["s_mean"] for record in records[:logged]] for records in steps]).mean(0)
    return schema.Lines(
        name=name,
        kind="lines",
        title=f"{NAMES[name]}: mean s and accuracy, seeds averaged",
        x_title="epoch",
        y_title="mean s",
        series=[
            schema.Series(name="train", x=[record["step"] / total for record in steps[0][:logged]], y=train.tolist()),
            schema.Series(name="validation", x=numbers, y=at_epochs("s_mean")),
        ],
        y2=[schema.Series(name="validation accuracy", x=numbers, y=at_epochs("score"))],
        y2_title="accuracy",
    )


def complexity(plan: Plan, store: Store) -> Findings:
    """Figure 3: s by difficulty, and what is left of it at equal length."""
    panels: list[schema.BoxPanel] = []
    rows: list[dict[Any, Any]] = []
    plain: dict[str, Estimate] = {}
    at_equal_length: dict[str, Estimate] = {}
    for name in plan.datasets:
        cells, dense = store.get(plan.learned(name)), store.get(plan.dense(name))
        for grading in gradings(plan, name, dense) if cells else ():
            graded = grading.grade >= 0
            s = np.mean([done.rows["budget"].mean(1, dtype=np.float64) for done in cells], axis=0)[graded]
            sure = np.mean([done.rows["confidence"] for done in cells], axis=0)[graded]
            hard, length, grade = grading.difficulty[graded], cells[0].rows["lengths"][graded], grading.grade[graded]
            groups = [_group(words, s[grade == g]) for g, words in enumerate(GRADES)]
            panels.append(schema.BoxPanel(title=f"{NAMES[name]}, by {grading.words.split()[-1]}", groups=groups))
            with_hard, held = spearman(s, hard), partial_spearman(s, hard, length)
            plain.setdefault(name, with_hard)  # the claims are about the first grading
            at_equal_length.setdefault(name, held)
            rows.append({
                ("dataset", "Data set"): NAMES[name],
                ("grading", "Graded by"): grading.words,
                **{(f"g{i}", f"mean s, {group.name}", 4): group.mean for i, group in enumerate(groups)},
                ("hard", "Spearman of s with difficulty", 3): _measured(with_hard),
                ("length", "with length", 3): _measured(spearman(s, length)),
                ("held", "with difficulty at equal length (partial)", 3): _measured(held),
                ("sure", "with the model's own confidence", 3): _measured(spearman(s, sure)),
                ("held_sure", "with difficulty at equal confidence (partial)", 3): _measured(
                    partial_spearman(s, hard, sure)),
            })  # fmt: skip
    note = (
        "s: mean over layers and seeds. Intervals: Fisher's, over rows. SNLI is graded by the five annotators (all "
        "agree: Simple; four: Hard; three: Very hard), the others by the loss of the dense models on test rows, which "
        "none of them was trained on. Confidence: the BudgetFormer models' highest probability, averaged over seeds."
    )
    return Findings(
        "Figure 3: the budget by difficulty",
        tables=[table("complexity", "s, difficulty and length", rows, note)],
        figures=[schema.Boxes(name="complexity", kind="boxes", title="s by difficulty", y_title="s", panels=panels)]
        if panels else [],
        claims=[
            _grows("complexity", "s grows with difficulty", plain),
            _grows("complexity-length", "s grows with difficulty among texts of equal length", at_equal_length),
        ],
    )  # fmt: skip


def _group(name: str, values: NDArray[Any]) -> schema.Group:
    if not len(values):
        return schema.Group(name=name, n=0, mean=None, q=None)
    quantiles = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    return schema.Group(name=name, n=len(values), mean=float(np.mean(values, dtype=np.float64)), q=quantiles)


def _measured(estimate: Estimate) -> schema.Measured:
    return schema.Measured(mean=estimate.value, low=estimate.low, high=estimate.high)


def _grows(key: str, words: str, estimates: Mapping[str, Estimate]) -> schema.Claim:
    against = [NAMES[name] for name, estimate in estimates.items() if estimate.low <= 0]
    lines = "; ".join(f"{NAMES[name]} {estimate}" for name, estimate in estimates.items())
    return claim(
        key, words, not against if estimates else None,
        f"Rank correlation of s with difficulty: {lines or 'no cells'}. Rule: every interval lies above zero."
        f"{' It does not on ' + ', '.join(against) + '.' if against else ''}",
    )  # fmt: skip


@dataclass(frozen=True)
class Grading:
    """Test rows by difficulty: a figure that grows with it, and a grade from 0 to 2. NaN and -1 are not graded."""

    words: str
    difficulty: NDArray[np.float64]
    grade: NDArray[np.int64]


def gradings(plan: Plan, dataset: str, dense: Sequence[Done]) -> list[Grading]:
    """The gradings of a data set's test rows, people's first; none without dense cells."""
    if not dense:
        return []
    # Test rows: no dense model was trained on them, so no loss is low because its row was learned by heart.
    losses: NDArray[np.float64] = np.mean([done.rows["losses"].astype(np.float64) for done in dense], axis=0)
    by_loss = Grading("thirds of the dense models' loss", losses, thirds(losses))
    if dataset != "snli" or not (agreement := annotators_agreement(plan)):
        return [by_loss]
    values = np.array([agreement.get(int(line), np.nan) for line in dense[0].rows["lines"]])
    grade = np.select([values > 0.9, values > 0.7, values > 0], [0, 1, 2], -1)
    return [Grading("annotators' disagreement", 1 - values, grade), by_loss]


def annotators_agreement(plan: Plan) -> dict[int, float]:
    """The share of annotators who chose the majority label, by the line of a SNLI test row; empty if unknown.

    It is read from the test rows themselves if they have `annotator_labels`, or from a file beside them,
    test_annotators.jsonl (also .gz, .xz), with a row for each test row.
    """
    table = locate(plan.source("snli"))["test"]
    rows = [row for row in table.rows() if not isinstance(row, BadRow)]
    if rows and "annotator_labels" in rows[0].fields:
        return {row.line: share for row in rows if (share := _majority(row.fields["annotator_labels"]))}
    files = Path(table.path).parent.glob("test_annotators.jsonl*") if isinstance(table, FileTable) else ()
    if (path := min(files, default=None)) is None:
        return {}
    beside = [row for row in FileTable(path, str(path)).rows() if not isinstance(row, BadRow)]
    if len(beside) != len(rows):
        counts = f"{len(beside)} rows for the {len(rows)} rows of {table.name}"
        raise DataError(f"{path}: has {counts}: they must correspond")
    both = zip(rows, beside, strict=True)
    return {row.line: share for row, other in both if (share := _majority(other.fields.get("annotator_labels")))}


def _majority(labels: Any) -> float | None:
    votes = [label for label in labels or () if label not in (None, "", "-", -1)]
    return Counter(votes).most_common(1)[0][1] / len(votes) if len(votes) > 1 else None


def heatmaps(plan: Plan, store: Store) -> Findings:
    """Figure 4: mean s, its spread and the entropy of p on SNLI, by layer and label."""
    title = "SNLI by layer and label"
    if not (cells := store.get(plan.learned("snli"))):
        return Findings(f"Figure 4: {title}", claims=_heat_claims([]))
    labels, names = cells[0].rows["labels"], cells[0].run["labels"]
    layers = [f"layer {layer + 1}" for layer in range(cells[0].rows["budget"].shape[1])]

    def panel(title: str, key: str, statistic: Callable[[NDArray[Any]], NDArray[Any]]) -> schema.MapPanel:
        by_label = (labels == label for label in range(len(names)))
        values = [np.mean([statistic(done.rows[key][rows]) for done in cells], axis=0) for rows in by_label]
        return schema.MapPanel(title=title, rows=layers, columns=names, values=np.stack(values, axis=1).tolist())

    panels = [
        panel("mean s", "budget", lambda values: values.mean(0, dtype=np.float64)),
        panel("standard deviation of s", "budget", lambda values: values.std(0, dtype=np.float64)),
        panel("entropy of p, nats", "entropy", lambda values: values.mean(0, dtype=np.float64)),
    ]
    figure = schema.Heatmap(name="heatmaps", kind="heatmap", title=title, panels=panels)
    return Findings(f"Figure 4: {title}", figures=[figure], claims=_heat_claims(cells))


def _heat_claims(cells: Sequence[Done]) -> list[schema.Claim]:
    words = {
        "neutral": "Neutral pairs need more heads than entailed ones",
        "entropy": "The entropy of p falls with depth",
    }
    if not cells or not {"neutral", "entailment"} <= set(cells[0].run["labels"]):
        return [claim(key, text, None, "no cells") for key, text in words.items()]
    labels, names = cells[0].rows["labels"], cells[0].run["labels"]
    s = np.mean([done.rows["budget"].mean(1, dtype=np.float64) for done in cells], axis=0)
    gap = difference(s[labels == names.index("neutral")], s[labels == names.index("entailment")])
    entropies = [done.rows["entropy"].mean(0, dtype=np.float64) for done in cells]
    trends = [rank_correlation(np.arange(len(values)), values) for values in entropies]
    by_layer = ", ".join(f"{value:.3f}" for value in np.mean(entropies, axis=0))
    return [
        claim("neutral", words["neutral"], gap.low > 0,
              f"Mean s of neutral minus entailed test pairs: {gap}. Rule: the interval over rows lies above zero."),
        claim("entropy", words["entropy"], all(trend < 0 for trend in trends),
              f"Mean entropy by layer: {by_layer} nats; rank correlation with depth by seed: "
              f"{', '.join(f'{trend:+.2f}' for trend in trends)}. Rule: it is negative in every seed."),
    ]  # fmt: skip


def attention_maps(plan: Plan, store: Store) -> Findings:
    """Figure 5: the most relevant heads' attention on one pair."""
    title = "Figure 5: attention of the most relevant heads on one SNLI pair"
    if not (cells := store.get(plan.learned("snli"))):
        return Findings(title)
    if not (cells[0].folder / "model.safetensors").exists():
        return Findings(title, f"The cell is here without its weights: {REMEDY}.")
    opened = Run.open(cells[0].folder)
    model, tokenizer, record = opened.model, load_tokenizer(opened.folder, offline=True), opened.record
    length = plan.scale.training["snli"].max_length
    batch = tokenizer(*plan.pair, return_tensors="pt", truncation=True, max_length=length)
    with torch.inference_mode():
        out = model(batch["input_ids"], token_type_ids=batch.get("token_type_ids"), output_attentions=True)
    tokens = list(tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist()))
    panels = []
    for layer, allocation in enumerate(out.allocations):
        relevance = allocation.relevance[0]
        for head in relevance.argsort(descending=True, stable=True)[:_SHOWN].tolist():
            run = f"w {float(allocation.weights[0, head]):.2f}" if bool(allocation.active[0, head]) else "not run"
            panels.append(
                schema.AttentionPanel(
                    title=f"layer {layer + 1} head {head + 1} (p {float(relevance[head]):.2f}, {run})",
                    query_tokens=tokens,
                    key_tokens=tokens,
                    values=[[round(v, 4) for v in row] for row in out.attentions[layer][0, head].tolist()],
                )
            )
    figure = schema.Attention(name="attention", kind="attention", title=" / ".join(plan.pair), panels=panels)
    summary = (
        f"The model (seed {cells[0].cell.seed}) answers {record['labels'][int(out.logits.argmax())]}. Shown are the "
        f"{_SHOWN} heads of each layer with the highest p; those marked 'not run' lie beyond k and have no effect."
    )
    return Findings(title, summary, figures=[figure])

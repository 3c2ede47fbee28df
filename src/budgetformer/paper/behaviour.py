"""The paper's figures: training dynamics, budget by difficulty, heat maps and attention maps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from budgetformer.paper.cells import Plan
from budgetformer.paper.difficulty import GRADES, gradings
from budgetformer.paper.results import NAMES, Result, claim, of, table
from budgetformer.paper.statistics import (
    Estimate,
    box,
    difference,
    partial_spearman,
    pearson,
    ranks,
    spearman,
)
from budgetformer.paper.store import Done, Store
from budgetformer.runs.run import Run

_ENDS = 0.05  # of the logged steps: what counts as the beginning and the end of training
_SHOWN = 4  # heads a layer, as in the paper's figure


def dynamics(plan: Plan, store: Store) -> Result:
    """Figure 2: mean s in training and validation, and accuracy, over the epochs."""
    figures, fell = [], {}
    rows: list[dict[str, Any]] = []
    for name in plan.datasets:
        found = store.get(plan.learned(name))
        if not found:
            continue
        figures.append(_curves(name, found))
        ends = [_ends(done) for done in found]
        fell[name] = all(last < first for first, last in ends)
        rows.append(
            {
                "dataset": NAMES[name],
                "first": of(found, lambda d: _ends(d)[0]),
                "last": of(found, lambda d: _ends(d)[1]),
                "validation": of(found, lambda d: d.epochs[-1]["validation"]["s_mean"]),
                "gap": of(found, lambda d: d.epochs[-1]["train"]["s_mean"] - d.epochs[-1]["validation"]["s_mean"]),
                "accuracy": of(found, lambda d: d.epochs[-1]["validation"]["score"]),
            }
        )
    columns = [
        ("dataset", "Data set"), ("first", "mean s, first steps", 3), ("last", "mean s, last steps", 3),
        ("validation", "validation, last epoch", 3), ("gap", "train minus validation, last epoch", 3),
        ("accuracy", "validation accuracy", 4),
    ]  # fmt: skip
    rises = [NAMES[name] for name, falls in fell.items() if not falls]
    evidence = "; ".join(f"{r['dataset']} {r['first']['mean']:.3f} to {r['last']['mean']:.3f}" for r in rows)
    return Result(
        "Figure 2: the budget during training",
        tables=[table("dynamics", "Mean s at the beginning and the end", columns, rows,
                      "First and last: the first and last 5 % of the logged training steps.")],
        figures=figures,
        claims=[claim(
            "dynamics", "s falls during training", not rises if fell else None,
            f"Mean s of the training batches, first to last steps: {evidence or 'no cells'}. Rule: it falls in every "
            f"seed of every data set.{' It does not on ' + ', '.join(rises) + '.' if rises else ''}",
        )],
    )  # fmt: skip


def _steps(done: Done) -> list[dict[str, Any]]:
    lines = (done.folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "step"]


def _ends(done: Done) -> tuple[float, float]:
    values = [record["s_mean"] for record in _steps(done)]
    few = max(1, round(_ENDS * len(values)))
    return float(np.mean(values[:few])), float(np.mean(values[-few:]))


def _curves(name: str, found: list[Done]) -> dict[str, Any]:
    """Seeds averaged. Training by step (x in epochs), validation at each epoch's end, accuracy on the right."""
    steps = [_steps(done) for done in found]
    total = found[0].epochs[-1]["step"] / found[0].epochs[-1]["epoch"]
    logged = min(map(len, steps))
    epochs = [epoch["epoch"] for epoch in found[0].epochs]

    def at_epochs(key: str) -> list[float]:
        values = [[epoch["validation"][key] for epoch in done.epochs] for done in found]
        return [float(value) for value in np.mean(values, axis=0)]

    train = np.array([[record["s_mean"] for record in mine[:logged]] for mine in steps]).mean(0)
    return {
        "name": name,
        "kind": "lines",
        "title": f"{NAMES[name]}: mean s and accuracy, seeds averaged",
        "x_title": "epoch",
        "y_title": "mean s",
        "series": [
            {"name": "train", "x": [r["step"] / total for r in steps[0][:logged]], "y": train.tolist()},
            {"name": "validation", "x": epochs, "y": at_epochs("s_mean")},
        ],
        "y2": [{"name": "validation accuracy", "x": epochs, "y": at_epochs("score")}],
        "y2_title": "accuracy",
    }


def complexity(plan: Plan, store: Store) -> Result:
    """Figure 3: s by difficulty, and what is left of it at equal length."""
    panels, rows, plain, equal = [], [], {}, {}
    for name in plan.datasets:
        found = store.get(plan.learned(name))
        for number, grading in enumerate(gradings(plan, store, name) if found else ()):
            s = np.mean([done.rows["budget"].mean(1) for done in found], axis=0)
            graded = grading.grade >= 0
            s, hard = s[graded], grading.difficulty[graded]
            length, grade = found[0].rows["lengths"][graded], grading.grade[graded]
            sure = np.mean([_confidence(done.rows["logits"]) for done in found], axis=0)[graded]
            groups = [{"name": words, **box(s[grade == g])} for g, words in enumerate(GRADES)]
            panels.append({"title": f"{NAMES[name]}, by {grading.words.split()[-1]}", "groups": groups})
            with_hard, held = spearman(s, hard), partial_spearman(s, hard, length)
            rows.append(
                {
                    "dataset": NAMES[name],
                    "grading": grading.words,
                    **{f"g{i}": g["mean"] for i, g in enumerate(groups)},
                    "hard": _cell(with_hard),
                    "length": _cell(spearman(s, length)),
                    "held": _cell(held),
                    "sure": _cell(spearman(s, sure)),
                    "held_sure": _cell(partial_spearman(s, hard, sure)),
                }
            )
            if number == 0:
                plain[name], equal[name] = with_hard, held
    columns = [
        ("dataset", "Data set"), ("grading", "Graded by"),
        *((f"g{i}", f"mean s, {w}", 4) for i, w in enumerate(GRADES)),
        ("hard", "Spearman of s with difficulty", 3), ("length", "with length", 3),
        ("held", "with difficulty at equal length (partial)", 3), ("sure", "with the model's own confidence", 3),
        ("held_sure", "with difficulty at equal confidence (partial)", 3),
    ]  # fmt: skip
    note = (
        "s: mean over layers and seeds. Intervals: Fisher's, over rows. SNLI is graded by the five annotators (all "
        "agree: Simple; four: Hard; three: Very hard), the others by the loss of the dense models on test rows, which "
        "none of them was trained on. Confidence: the BudgetFormer models' highest probability, averaged over seeds."
    )
    figure = {"name": "complexity", "kind": "boxes", "title": "s by difficulty", "y_title": "s", "panels": panels}
    return Result(
        "Figure 3: the budget by difficulty",
        tables=[table("complexity", "s, difficulty and length", columns, rows, note)],
        figures=[figure] if panels else [],
        claims=[
            _grows("complexity", "s grows with difficulty", plain),
            _grows("complexity-length", "s grows with difficulty among texts of equal length", equal),
        ],
    )


def _confidence(logits: Any) -> Any:
    """The highest probability of each row."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return 1 / odds.sum(axis=1)


def _cell(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.value, "low": estimate.low, "high": estimate.high}


def _grows(key: str, words: str, found: dict[str, Estimate]) -> dict[str, str]:
    against = [NAMES[name] for name, estimate in found.items() if estimate.low <= 0]
    told = "; ".join(f"{NAMES[name]} {estimate}" for name, estimate in found.items())
    return claim(
        key, words, not against if found else None,
        f"Rank correlation of s with difficulty: {told or 'no cells'}. Rule: every interval lies above zero."
        f"{' It does not on ' + ', '.join(against) + '.' if against else ''}",
    )  # fmt: skip


def heatmaps(plan: Plan, store: Store) -> Result:
    """Figure 4: mean s, its spread and the entropy of p on SNLI, by layer and label."""
    found = store.get(plan.learned("snli"))
    if not found:
        return Result("Figure 4: SNLI by layer and label", claims=_heat_claims([]))
    labels, names = found[0].rows["labels"], found[0].run["labels"]
    s = np.mean([done.rows["budget"] for done in found], axis=0)
    layers = [f"layer {layer + 1}" for layer in range(s.shape[1])]

    def panel(title: str, values: Any) -> dict[str, Any]:
        grid = np.stack([values(labels == i) for i in range(len(names))], axis=1)
        return {"title": title, "rows": layers, "columns": names, "values": grid.tolist()}

    def mean(key: str) -> Any:
        return lambda rows: np.mean([done.rows[key][rows].mean(0, dtype=np.float64) for done in found], axis=0)

    panels = [
        panel("mean s", mean("budget")),
        panel("standard deviation of s", lambda rows: np.mean([d.rows["budget"][rows].std(0) for d in found], axis=0)),
        panel("entropy of p, nats", mean("entropy")),
    ]
    figure = {"name": "heatmaps", "kind": "heatmap", "title": "SNLI by layer and label", "panels": panels}
    return Result("Figure 4: SNLI by layer and label", figures=[figure], claims=_heat_claims(found))


def _heat_claims(found: list[Done]) -> list[dict[str, str]]:
    words = ("Neutral pairs need more heads than entailed ones", "The entropy of p falls with depth")
    if not found or not {"neutral", "entailment"} <= set(found[0].run["labels"]):
        return [claim(key, text, None, "no cells") for key, text in zip(("neutral", "entropy"), words, strict=True)]
    labels, names = found[0].rows["labels"], found[0].run["labels"]
    s = np.mean([done.rows["budget"].mean(1) for done in found], axis=0)
    neutral, entailed = labels == names.index("neutral"), labels == names.index("entailment")
    gap = difference(s[neutral], s[entailed])
    depth = np.arange(found[0].rows["entropy"].shape[1], dtype=float)
    entropies = [done.rows["entropy"].mean(0, dtype=np.float64) for done in found]
    trends = [pearson(ranks(depth), ranks(values)) for values in entropies]
    told = ", ".join(f"{value:.3f}" for value in np.mean(entropies, axis=0))
    return [
        claim("neutral", words[0], gap.low > 0,
              f"Mean s of neutral minus entailed test pairs: {gap}. Rule: the interval over rows lies above zero."),
        claim("entropy", words[1], all(trend < 0 for trend in trends),
              f"Mean entropy by layer: {told} nats; rank correlation with depth by seed: "
              f"{', '.join(f'{t:+.2f}' for t in trends)}. Rule: it is negative in every seed."),
    ]  # fmt: skip


def attention_maps(plan: Plan, store: Store) -> Result:
    """Figure 5: the most relevant heads' attention on one pair."""
    found = store.get(plan.learned("snli"))
    title = "Figure 5: attention of the most relevant heads on one SNLI pair"
    if not found:
        return Result(title)
    opened = Run.open(found[0].folder)
    model, tokenizer = opened.model, opened.tokenizer
    batch = tokenizer(
        *plan.pair, return_tensors="pt", truncation=True, max_length=plan.scale.training["snli"].max_length
    )
    with torch.inference_mode():
        out = model(batch["input_ids"], token_type_ids=batch.get("token_type_ids"), output_attentions=True)
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    panels = []
    for layer, allocation in enumerate(out.allocations):
        order = allocation.relevance[0].argsort(descending=True, stable=True)[:_SHOWN].tolist()
        for head in order:
            weight = float(allocation.weights[0, head])
            run = f"w {weight:.2f}" if bool(allocation.active[0, head]) else "not run"
            panels.append(
                {
                    "title": f"layer {layer + 1} head {head + 1} (p {float(allocation.relevance[0, head]):.2f}, {run})",
                    "query_tokens": tokens,
                    "key_tokens": tokens,
                    "values": [[round(v, 4) for v in row] for row in out.attentions[layer][0, head].tolist()],
                }
            )
    answer = found[0].run["labels"][int(out.logits.argmax())]
    figure = {"name": "attention", "kind": "attention", "title": f"{plan.pair[0]} / {plan.pair[1]}", "panels": panels}
    summary = (
        f"The model (seed {found[0].cell.seed}) answers {answer}. Shown are the {_SHOWN} heads of each layer with the "
        "highest p; those marked 'not run' lie beyond k and have no effect."
    )
    return Result(title, summary, figures=[figure])

"""The paper's tables: the main results, both ablations, both scales, the model sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from budgetformer.cost.flops import Shape
from budgetformer.cost.paper import PUBLISHED_MIB, attention_flops, carbon_grams, parameters
from budgetformer.paper.cells import Plan
from budgetformer.paper.published import DATA_SCALE, FIXED, MAIN, MODEL_SCALE, RANDOM
from budgetformer.paper.results import (
    NAMES,
    Result,
    accuracy,
    claim,
    measured,
    of,
    paired,
    points,
    probed,
    table,
)
from budgetformer.paper.scale import BUDGETS, FRACTIONS
from budgetformer.paper.statistics import Z95, Estimate, pearson, ranks
from budgetformer.paper.store import Done, Store

_MIB = 2**20
_ROWS_RULE = "95 % interval over test rows (not over training runs), seeds averaged"


def main(plan: Plan, store: Store) -> Result:
    """Table 2: accuracy, s, executed heads and cost of both models."""
    rows, costs, lines, worse = [], [], [], []
    for name in plan.datasets:
        dense, ours = store.get(plan.dense(name)), store.get(plan.learned(name))
        printed = MAIN[name]
        rows.append(
            {
                "dataset": NAMES[name],
                "dense": accuracy(dense, printed.accuracy[0]),
                "topk": accuracy(ours, printed.accuracy[1]),
                "soft": of(ours, lambda d: d.soft_accuracy),
                "s": of(ours, lambda d: d.s_mean, printed.budget),
                "k": of(ours, lambda d: d.k_over_h),
                "flops_dense": of(dense, lambda d: d.test["cost"]["flops_per_text"] / 1e6),
                "flops": of(ours, lambda d: d.test["cost"]["flops_per_text"] / 1e6),
                "ratio": of(ours, lambda d: d.test["cost"]["flops_ratio"]),
            }
        )
        costs.append({"dataset": NAMES[name], **_papers_count(plan, name, ours)})
        gap = paired(ours, dense)
        if gap:
            lines.append(f"{NAMES[name]} {points(gap)}")
            worse += [name] if gap.high < 0 else []
    columns = [
        ("dataset", "Data set"), ("dense", "Transformer accuracy", 4), ("topk", "BudgetFormer accuracy (top-k)", 4),
        ("soft", "the same model, all heads weighted (soft)", 4), ("s", "mean s", 3), ("k", "executed k/H", 3),
        ("flops_dense", "Transformer MFLOPs a text", 3), ("flops", "BudgetFormer MFLOPs a text", 3),
        ("ratio", "FLOPs ratio", 3),
    ]  # fmt: skip
    matched = claim(
        "accuracy", "BudgetFormer's accuracy matches or beats the Transformer's", not worse if lines else None,
        f"BudgetFormer minus Transformer, {_ROWS_RULE}: {'; '.join(lines) or 'no cells'}. "
        "Rule: it fails where a whole interval lies below zero.",
    )  # fmt: skip
    return Result(
        "Table 2: Transformer and BudgetFormer on five data sets",
        f"Worse than the Transformer beyond noise on {len(worse)} of {len(lines)} data sets." if lines else "",
        [
            table("main", "Accuracy, budget and FLOPs", columns, rows,
                  "FLOPs are counted: two per multiply-accumulate, the whole model, real lengths, executed heads."),
            _papers_table(costs),
        ],
        claims=[matched],
    )  # fmt: skip


def _papers_count(plan: Plan, name: str, ours: Sequence[Done]) -> dict[str, Any]:
    """The paper's formula with our mean s, at our shape and rows and at the paper's."""
    printed, training = MAIN[name], plan.scale.training[name]
    model = {**plan.scale.model, **training.model}
    shape = Shape(
        model.get("num_hidden_layers", 4), model.get("num_attention_heads", 8), model.get("hidden_size", 768),
        model.get("intermediate_size", 3072),
    )  # fmt: skip
    if not ours:
        return {}
    rows = len(ours[0].right)

    def here(s: float, gated: bool) -> float:
        return rows * attention_flops(training.max_length, s, gated=gated, shape=shape)

    there = [printed.test_rows * attention_flops(printed.tokens, d.s_mean, gated=True) for d in ours]
    dense = printed.test_rows * attention_flops(printed.tokens)
    return {
        "dense": here(1.0, False),
        "ours": measured([here(d.s_mean, True) for d in ours]),
        "ratio": measured([here(d.s_mean, True) / here(1.0, False) for d in ours], printed.flops[1] / printed.flops[0]),
        "paper_dense": {"mean": dense, "published": printed.flops[0]},
        "paper_ours": measured(there, printed.flops[1]),
        "carbon_dense": {"mean": carbon_grams(dense), "published": printed.carbon[0]},
        "carbon": measured([carbon_grams(f) for f in there], printed.carbon[1]),
    }


def _papers_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = [
        ("dataset", "Data set"), ("dense", "Transformer, our shape and rows"),
        ("ours", "BudgetFormer, our shape and rows"),
        ("ratio", "ratio", 3), ("paper_dense", "Transformer, the paper's shape and rows"),
        ("paper_ours", "BudgetFormer, the paper's shape and rows, our s"), ("carbon_dense", "Transformer gCO2", 4),
        ("carbon", "BudgetFormer gCO2", 4),
    ]  # fmt: skip
    note = (
        "The paper's count: one per multiply-accumulate, attention only, all projections, the predicted s, padded "
        "length, over the whole test set; carbon is modelled as FLOPs / 3e14. Not comparable with the table above."
    )
    return table("papers-count", "The paper's own count of FLOPs and carbon", columns, rows, note)


def fixed(plan: Plan, store: Store) -> Result:
    """Ablation 1: a fixed budget, trained so and overridden at evaluation."""
    keys = [f"{s:g}" for s in BUDGETS]
    trained, overridden = [], []
    gaps: dict[str, list[str]] = {"trained": [], "overridden": []}
    as_good: dict[str, list[str]] = {"trained": [], "overridden": []}
    for name in plan.datasets:
        ours = store.get(plan.learned(name))
        printed = dict(zip(keys, FIXED[name], strict=True))
        row = {key: probed(ours, "override", key, published=printed[key]) for key in keys}
        overridden.append({"dataset": NAMES[name], **row, "learned": probed(ours, "learned")})
        for key in keys:
            _judge(
                f"{NAMES[name]} s={key}", _unpaired(ours, "override", key), gaps["overridden"], as_good["overridden"]
            )
        if name not in plan.scale.retrained:
            continue
        cells = {key: store.get(plan.fixed(name, s)) for key, s in zip(keys, BUDGETS, strict=True)}
        row = {key: accuracy(cells[key], printed[key]) for key in keys}
        trained.append({"dataset": NAMES[name], **row, "learned": accuracy(ours, MAIN[name].accuracy[1])})
        for key in keys:
            _judge(f"{NAMES[name]} s={key}", paired(ours, cells[key]), gaps["trained"], as_good["trained"])
    columns: list[Any] = [
        ("dataset", "Data set"),
        *((key, f"s = {key}", 4) for key in keys),
        ("learned", "learned s", 4),
    ]
    return Result(
        "Table 3: a fixed budget in place of the learned one",
        tables=[
            table("trained", "Trained with the fixed budget", columns, trained, "f is removed, g is trained."),
            table("overridden", "The learned model, s overridden at evaluation", columns, overridden,
                  f"{_probe_words(plan)} The learned column is the same model on the same rows."),
        ],
        claims=[
            _worse(f"fixed-{key}", f"A fixed budget, {words}, is worse than the learned one", gaps[key], as_good[key])
            for key, words in (("trained", "trained so"), ("overridden", "set at evaluation"))
        ],
    )  # fmt: skip


def _probe_words(plan: Plan) -> str:
    most = plan.scale.probe_rows
    return f"On at most {most:,} test rows, drawn once." if most else "On all test rows."


def _unpaired(ours: Sequence[Done], *path: str) -> Estimate | None:
    """Learned minus probed accuracy with the interval of two proportions, which is wide for the same rows."""
    as_is, other = probed(ours, "learned")["mean"], probed(ours, *path)["mean"]
    if as_is is None or other is None:
        return None
    rows = int(ours[0].probes["rows"])
    half = Z95 * float(np.sqrt((as_is * (1 - as_is) + other * (1 - other)) / rows))
    return Estimate(as_is - other, as_is - other - half, as_is - other + half)


def _judge(name: str, gap: Estimate | None, lines: list[str], as_good: list[str]) -> None:
    if gap is not None:
        lines.append(f"{name} {points(gap)}")
        as_good += [name] if gap.low <= 0 else []


def _worse(key: str, words: str, lines: list[str], as_good: list[str]) -> dict[str, str]:
    exceptions = f" Not worse: {', '.join(as_good)}." if as_good else ""
    return claim(
        key, words, not as_good if lines else None,
        f"Learned minus the other, {_ROWS_RULE}: {'; '.join(lines) or 'no cells'}.{exceptions} "
        "Rule: every interval must lie above zero.",
    )  # fmt: skip


def random(plan: Plan, store: Store) -> Result:
    """Ablation 2: random heads, at evaluation and trained so."""
    rows = []
    lines: dict[str, list[str]] = {"at": [], "in": []}
    as_good: dict[str, list[str]] = {"at": [], "in": []}
    for name in plan.datasets:
        ours = store.get(plan.learned(name))
        row = {
            "dataset": NAMES[name],
            "evaluated": probed(ours, "random", published=RANDOM[name]),
            "as_is": probed(ours, "learned"),
            "learned": accuracy(ours, MAIN[name].accuracy[1]),
        }
        _judge(NAMES[name], _unpaired(ours, "random"), lines["at"], as_good["at"])
        if name in plan.scale.retrained:
            cells = store.get(plan.each(name, "random", {"allocator": "random"}))
            row["trained"] = accuracy(cells, RANDOM[name])
            _judge(NAMES[name], paired(ours, cells), lines["in"], as_good["in"])
        rows.append(row)
    columns = [
        ("dataset", "Data set"), ("evaluated", "random heads at evaluation", 4), ("as_is", "learned, the same rows", 4),
        ("trained", "trained with random heads", 4), ("learned", "learned, all test rows", 4),
    ]  # fmt: skip
    return Result(
        "Table 4: random heads in place of the learned ones",
        tables=[table("random", "Random heads, each input's own s", columns, rows, _probe_words(plan))],
        claims=[
            _worse("random-evaluated", "Random heads at evaluation are worse", lines["at"], as_good["at"]),
            _worse("random-trained", "A model trained with random heads is worse", lines["in"], as_good["in"]),
        ],
    )


def _falling(key: str, words: str, steps: list[tuple[str, list[Done]]]) -> dict[str, str]:
    """Whether s falls from each step to the next: by rank correlation, in every seed."""
    steps = [(name, found) for name, found in steps if found]
    if len(steps) < 2:
        return claim(key, words, None, "fewer than two sizes were trained")
    seeds = sorted(set.intersection(*({d.cell.seed for d in found} for _, found in steps)))
    order = np.arange(len(steps), dtype=float)
    found = [[next(d.s_mean for d in cells if d.cell.seed == seed) for _, cells in steps] for seed in seeds]
    trends = [pearson(ranks(order), ranks(np.array(values))) for values in found]
    means = ", ".join(f"{name} {np.mean([d.s_mean for d in cells]):.3f}" for name, cells in steps)
    told = ", ".join(f"{trend:+.2f}" for trend in trends)
    evidence = f"Mean s: {means}. Rank correlation by seed: {told}. Rule: it is negative in every seed."
    return claim(key, words, all(trend < 0 for trend in trends) if trends else None, evidence)


def model_scale(plan: Plan, store: Store) -> Result:
    """Table 5: depth and heads on SNLI."""
    rows, steps = [], []
    for shape in plan.scale.shapes if "snli" in plan.datasets else ():
        ours, dense = store.get(plan.shaped(shape, "learned")), store.get(plan.shaped(shape, "all"))
        printed = MODEL_SCALE.get(shape, (None, None, None))
        rows.append(_scaled(shape, dense, ours, printed))
        steps.append((shape, ours))
    own = {**plan.scale.model_scale, **plan.scale.model_scale_recipe}
    told = ", ".join(f"{key} {value:g}" for key, value in own.items())
    note = f"All sizes of this table have {told}, unlike the other tables: look at the accuracies too." if own else ""
    return Result(
        "Table 5: model size on SNLI",
        tables=[table("model-scale", "Layers (L) and heads (H)", _SCALE_COLUMNS, rows, note)],
        claims=[_falling("model-scale", "s falls as the model grows", steps)],
    )


def data_scale(plan: Plan, store: Store) -> Result:
    """Table 6: the share of SNLI's training rows."""
    rows, steps = [], []
    for share in FRACTIONS if "snli" in plan.datasets else ():
        ours, dense = store.get(plan.learned("snli", share)), store.get(plan.dense("snli", share))
        rows.append(_scaled(f"{100 * share:g} %", dense, ours, DATA_SCALE[share]))
        steps.append((f"{100 * share:g} %", ours))
    return Result(
        "Table 6: training rows on SNLI",
        tables=[table("data-scale", "Share of the scale's training rows", _SCALE_COLUMNS, rows,
                      "The number of epochs is the same, so fewer rows mean fewer steps.")],
        claims=[_falling("data-scale", "s falls as the training rows grow", steps)],
    )  # fmt: skip


_SCALE_COLUMNS = [
    ("size", "Size"), ("dense", "Transformer accuracy", 4), ("topk", "BudgetFormer accuracy", 4), ("s", "mean s", 3),
    ("k", "executed k/H", 3),
]  # fmt: skip


def _scaled(size: str, dense: Sequence[Done], ours: Sequence[Done], printed: Sequence[float | None]) -> dict[str, Any]:
    return {
        "size": size,
        "dense": accuracy(dense, printed[0]),
        "topk": accuracy(ours, printed[1]),
        "s": of(ours, lambda d: d.s_mean, printed[2]),
        "k": of(ours, lambda d: d.k_over_h),
    }


def sizes(plan: Plan, store: Store) -> Result:
    """The model sizes that the paper states, recomputed, and those of our cells."""
    printed = [
        {"model": words, "parameters": parameters(3, gated=gated),
         "mib": {"mean": 4 * parameters(3, gated=gated) / _MIB, "published": PUBLISHED_MIB[key]}}
        for words, key, gated in (("Transformer", "transformer", False), ("BudgetFormer", "budgetformer", True))
    ]  # fmt: skip
    ours = [
        {"model": f"{NAMES[name]}, {words}", "parameters": found[0].run["model"]["parameters"],
         "mib": 4 * found[0].run["model"]["parameters"] / _MIB}
        for name in plan.datasets
        for words, cells in (("Transformer", plan.dense(name)), ("BudgetFormer", plan.learned(name)))
        if (found := store.get(cells))
    ]  # fmt: skip
    columns = [("model", "Model"), ("parameters", "Parameters", 0), ("mib", "MiB in fp32", 2)]
    return Result(
        "Model sizes",
        tables=[
            table("published", "The paper's models (SNLI, three labels)", columns, printed, "Counted from the shapes."),
            table("ours", f"The models of the {plan.scale.name} scale", columns, ours),
        ],
    )

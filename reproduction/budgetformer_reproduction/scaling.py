"""The paper's tables of model size and training rows on SNLI, and the learning curve beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from budgetformer_reproduction import schema
from budgetformer_reproduction.cells import Cell, Plan
from budgetformer_reproduction.results import Findings, accuracy, claim, over_seeds, table
from budgetformer_reproduction.scale import FRACTIONS, FULL_ROWS
from budgetformer_reproduction.schema import Claim, Table
from budgetformer_reproduction.statistics import rank_correlation
from budgetformer_reproduction.store import Done, Store
from budgetformer_reproduction.tables import Twins

# Published, on SNLI: Transformer accuracy, BudgetFormer accuracy, mean s.
_MODEL_SCALE = {
    "4L-8H": (0.7835, 0.8106, 0.364), "4L-12H": (0.7847, 0.8080, 0.310), "6L-12H": (0.7922, 0.8065, 0.260),
    "12L-12H": (0.7808, 0.8193, 0.105),
}  # fmt: skip
_DATA_SCALE = {
    "10 %": (0.6151, 0.6158, 0.445), "25 %": (0.6814, 0.7075, 0.427), "50 %": (0.7243, 0.7738, 0.388),
    "100 %": (0.7835, 0.8106, 0.364),
}  # fmt: skip


def model_scale(plan: Plan, store: Store) -> Findings:
    """Table 5: depth and heads on SNLI."""
    dense, learned = (cells("snli", plan.scale.model_scale_fraction) for cells in (plan.dense, plan.learned))
    sizes = [
        Twins(shape, store.get(_shaped(plan, shape, dense) if shape in plan.scale.dense_shapes else []),
              store.get(_shaped(plan, shape, learned)))
        for shape in plan.scale.shapes if "snli" in plan.datasets
    ]  # fmt: skip
    changes = {**plan.scale.model_scale, **plan.scale.model_scale_recipe}
    words = [f"{key} {value:g}" for key, value in changes.items()]
    if plan.scale.model_scale_fraction != 1:
        words.append(f"{100 * plan.scale.model_scale_fraction:g} % of the scale's training rows")
    note = f"All sizes of this table have {', '.join(words)}, unlike the other tables: look at the accuracies too."
    return Findings(
        "Table 5: model size on SNLI",
        tables=[_scaled("model-scale", "Layers (L) and heads (H)", sizes, _MODEL_SCALE, note if words else "")],
        claims=[_falling("model-scale", "s falls as the model grows", sizes)],
    )


def _shaped(plan: Plan, shape: str, ordinary: list[Cell]) -> list[Cell]:
    """Cells at another depth and number of heads; the paper's own shape is the ordinary cell."""
    layers, heads = plan.scale.shapes[shape]
    options = {"num_hidden_layers": layers, "num_attention_heads": heads, **plan.scale.model_scale}
    usual = {"num_hidden_layers": 4, "num_attention_heads": 8, **plan.scale.model}
    if not plan.scale.model_scale_recipe and all(usual.get(key) == value for key, value in options.items()):
        return ordinary
    model, variant = {**options, **ordinary[0].model}, f"{ordinary[0].variant}-{shape}"
    return plan.each("snli", variant, model, ordinary[0].fraction, plan.scale.model_scale_recipe)


def data_scale(plan: Plan, store: Store) -> Findings:
    """Table 6: the share of SNLI's training rows."""
    sizes = [
        Twins(f"{100 * share:g} %", store.get(plan.dense("snli", share) if share in plan.scale.dense_fractions else []),
              store.get(plan.learned("snli", share)))
        for share in FRACTIONS if "snli" in plan.datasets
    ]  # fmt: skip
    note = "The number of epochs is the same, so fewer rows mean fewer steps."
    tables = [_scaled("data-scale", "Share of the scale's training rows", sizes, _DATA_SCALE, note)]
    asked = {width: store.get(_wide(plan, width)) for width in plan.scale.widths if "snli" in plan.datasets}
    widths = {width: cells for width, cells in asked.items() if cells}
    series = [*_learning_curve(plan, sizes, widths), *_PAPERS_CURVE]
    figure = schema.Lines(
        name="learning-curve", kind="lines", title="SNLI: accuracy by training rows, here and in the paper",
        x_title="training rows", y_title="test accuracy", series=series, log_x=True,
    )  # fmt: skip
    return Findings(
        "Table 6: training rows on SNLI",
        f"{rows_needed(series[0])} {_gained_by_width(plan, widths)}".strip(),
        tables=[*tables, *([_widths(plan, widths)] if len(widths) > 1 else [])],
        figures=[figure] if sizes else [],
        claims=[_falling("data-scale", "s falls as the training rows grow", sizes)],
    )


_SNLI_ROWS = FULL_ROWS["snli"][0]
_PAPERS_CURVE = [
    schema.Series(name=f"{model}, the paper's", x=[round(share * _SNLI_ROWS) for share in FRACTIONS],
                  y=[printed[place] for printed in _DATA_SCALE.values()])
    for place, model in enumerate(("Transformer", "BudgetFormer"))
]  # fmt: skip


def _learning_curve(plan: Plan, sizes: list[Twins], widths: Mapping[int, list[Done]]) -> list[schema.Series]:
    """Accuracy by training rows: both models at the scale's width, and dense models of other widths on one share."""
    usual = plan.scale.model.get("hidden_size", 768)
    rows = [plan.rows("snli", share) for share in FRACTIONS[: len(sizes)]]

    def series(name: str, x: list[int], every: list[list[Done]]) -> schema.Series:
        known = [(n, accuracy(cells)) for n, cells in zip(x, every, strict=True) if cells]
        return schema.Series(
            name=name, x=[n for n, _ in known], y=[value.mean for _, value in known],
            low=[value.low for _, value in known], high=[value.high for _, value in known],
        )  # fmt: skip

    share = plan.rows("snli", plan.scale.width_fraction)
    others = [series(f"Transformer, width {width}", [share], [cells]) for width, cells in widths.items()
              if width != usual]  # fmt: skip
    return [series(f"Transformer, width {usual}", rows, [size.dense for size in sizes]),
            series(f"BudgetFormer, width {usual}", rows, [size.ours for size in sizes]), *others]  # fmt: skip


def rows_needed(dense: schema.Series) -> str:
    """Our Transformer beside the paper's at the same rows, and how many rows would make it as good, if it goes on."""
    if not dense.x:
        return ""
    rows, values = np.array(dense.x, float), np.array(dense.y, float)
    theirs, their_values = np.array(_PAPERS_CURVE[0].x, float), np.array(_PAPERS_CURVE[0].y, float)
    words = f"With {rows[-1]:,.0f} training rows our Transformer has {values[-1]:.4f}; the paper's has "
    if theirs[0] <= rows[-1] <= theirs[-1]:
        there = np.interp(np.log(rows[-1]), np.log(theirs), their_values)
        words += f"{there:.4f} with as many (between its own points, by the logarithm of rows) and "
    words += f"{their_values[-1]:.4f} with {theirs[-1]:,.0f}."
    if len(rows) < 2:
        return words
    doubling = float(np.polyfit(np.log2(rows), values, 1)[0])
    words += f" Twice the rows gain ours {100 * doubling:+.1f} points"
    if doubling <= 0 or values[-1] >= their_values[-1]:
        return f"{words}."
    needed = rows[-1] * 2 ** ((their_values[-1] - values[-1]) / doubling)
    return f"{words}: if that goes on, it takes about {float(f'{needed:.2g}'):,.0f} rows to be as good."


def _gained_by_width(plan: Plan, widths: Mapping[int, list[Done]]) -> str:
    """How much width changes, beside what rows gain."""
    if len(widths) < 2:
        return ""
    means = [float(np.mean([done.accuracy for done in cells])) for cells in widths.values()]
    return (
        f"Widths from {min(widths)} to {max(widths)} differ by at most {100 * (max(means) - min(means)):.1f} points "
        f"with {plan.rows('snli', plan.scale.width_fraction):,} rows."
    )


def _wide(plan: Plan, width: int) -> list[Cell]:
    """Dense cells of another width, whose learning rate falls as the width grows; the scale's own is the usual cell.

    At four times the medium scale's rate one of three models of width 32 did not learn: twice is the most.
    """
    usual, fraction = plan.scale.model["hidden_size"], plan.scale.width_fraction
    if width == usual:
        return plan.dense("snli", fraction)
    options = {"gates": {"kind": "all"}, "hidden_size": width, "intermediate_size": 4 * width}
    recipe = {"learning_rate": plan.scale.recipe["learning_rate"] * min(2, usual / width)}
    return plan.each("snli", f"dense-width{width}", options, fraction, recipe=recipe)


def _widths(plan: Plan, widths: Mapping[int, list[Done]]) -> Table:
    """Dense models of several widths on the same rows."""
    rows = [{
        ("width", "Width"): width,
        ("dense", "Transformer accuracy", 4): accuracy(cells),
        ("epochs", "best epoch", 1): over_seeds(cells, lambda d: d.run["training"]["kept_epoch"]),
        ("parameters", "parameters"): over_seeds(cells, lambda d: d.run["model"]["parameters"]),
    } for width, cells in widths.items()]  # fmt: skip
    title = f"SNLI: the width of a dense model, {100 * plan.scale.width_fraction:g} % of the scale's training rows"
    note = "Learning rate times width is the same in all, but no rate is above twice the usual one."
    return table("widths", title, rows, note)


def _scaled(
    name: str, title: str, sizes: list[Twins], published: Mapping[str, tuple[float, float, float]], note: str
) -> Table:  # fmt: skip
    rows = []
    for size, dense, ours in sizes:
        printed = published.get(size, (None, None, None))
        rows.append({
            ("size", "Size"): size,
            ("dense", "Transformer accuracy", 4): accuracy(dense, printed[0]),
            ("topk", "BudgetFormer accuracy", 4): accuracy(ours, printed[1]),
            ("s", "mean s", 3): over_seeds(ours, lambda d: d.s_mean, printed[2]),
            ("k", "executed k/H", 3): over_seeds(ours, lambda d: d.k_over_h),
        })  # fmt: skip
    return table(name, title, rows, note)


def _falling(key: str, words: str, sizes: list[Twins]) -> Claim:
    """Whether s falls from each size to the next: by rank correlation, in every seed."""
    trained = [t for t in sizes if t.ours]
    if len(trained) < 2:
        return claim(key, words, None, "fewer than two sizes were trained")
    by_seed = [{done.cell.seed: done.s_mean for done in t.ours} for t in trained]
    seeds, order = sorted(set.intersection(*map(set, by_seed))), np.arange(len(trained))
    trends = [rank_correlation(order, np.array([s[seed] for s in by_seed])) for seed in seeds]
    means = ", ".join(f"{t.name} {np.mean([done.s_mean for done in t.ours]):.3f}" for t in trained)
    evidence = (
        f"Mean s: {means}. Rank correlation by seed: {', '.join(f'{trend:+.2f}' for trend in trends)}. "
        "Rule: it is negative in every seed."
    )
    return claim(key, words, all(trend < 0 for trend in trends) if trends else None, evidence)

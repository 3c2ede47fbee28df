"""What the paper does not show: its open choices tried, controls without per-input budgets, and what a model needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from budgetformer.cost.flops import count
from budgetformer.evaluate import mcnemar
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.training.recipe import PRESETS
from budgetformer_reproduction.cells import TFIDF, Cell, Plan
from budgetformer_reproduction.results import NAMES, Findings, accuracy, claim, over_seeds, pairs, probed, table
from budgetformer_reproduction.store import Done, Store
from budgetformer_reproduction.tables import twins

# SNLI, learned: what the paper leaves open or says twice, and what we do otherwise.
_ABLATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": ("base: entropy as intended, soft training, as printed otherwise", {}),
    "entropy-printed": ("entropy as printed", {"gates": {"entropy": "printed"}}),
    "entropy-off": ("no entropy term", {"gates": {"entropy": "off"}}),
    "topk-training": ("top-k in training (Algorithm 1)", {"gates": {"topk_from": 0.0}}),
    "topk-from-half": ("top-k from half of training on", {"gates": {"topk_from": 0.5}}),
    "renormalized": ("weights renormalised over the kept heads", {"gates": {"renormalize": True}}),
    "topk-renormalized": ("top-k in training, renormalised", {"gates": {"topk_from": 0.0, "renormalize": True}}),
    "price": ("a price on s (cost_weight 0.005)", {"gates": {"cost_weight": 0.005}}),
    "pool-padding": ("gates pool padding too, as printed", {"gates": {"pool_padding": True}}),
    "ours": ("the small preset's model options (s counts heads, target 0.375)", dict(PRESETS["small"].model)),
}


def ablation(plan: Plan, store: Store) -> Findings:
    """SNLI: every choice that the paper leaves open."""
    rows = []
    for name, (words, options) in _ABLATIONS.items():
        recipe = {"gate_rate": PRESETS["small"].gate_rate} if name == "ours" else None
        cells = store.get(plan.each("snli", name, options, recipe=recipe))
        if not cells:
            continue
        rows.append({
            ("variant", "Variant"): words,
            ("soft", "accuracy, all heads weighted", 4): over_seeds(cells, lambda d: d.soft_accuracy),
            ("topk", "accuracy, top-k", 4): accuracy(cells),
            ("gap", "lost to top-k", 4): over_seeds(cells, lambda d: d.soft_accuracy - d.accuracy),
            ("s", "mean s", 3): over_seeds(cells, lambda d: d.s_mean),
            ("k", "executed k/H", 3): over_seeds(cells, lambda d: d.k_over_h),
        })  # fmt: skip
    tables = [table("ablation", "Variants of the method", rows)] if len(rows) > 1 else []
    return Findings("SNLI: what the paper leaves open", tables=tables)


def controls(plan: Plan, store: Store) -> Findings:
    """Does the learned budget for each input do what cheaper things cannot?"""
    rows, matched, tried = [], [], 0
    for name in (name for name in plan.scale.controlled if name in plan.datasets):
        ours = store.get(plan.learned(name))
        rivals: dict[str, list[Cell]] = {
            "dense Transformer": plan.dense(name),
            "static heads: one learned s and p for all inputs": plan.each(
                name, "static", {"gates": {"kind": "static"}}
            ),
            "fixed budget of the same mean number of heads": same_heads(plan, name, ours),
            "narrower dense Transformer of the same FLOPs": same_flops(plan, name, ours),
            "TF-IDF and logistic regression": plan.each(name, TFIDF),
        }
        if name in plan.scale.staged:
            rivals["dense Transformer with words and exits"] = plan.staged(name)
        rows.append(_row(name, "BudgetFormer (learned)", ours))
        for words, cells in rivals.items():
            done, versus = store.get(cells), None
            if not done:
                continue
            if ours:
                versus, as_good = _versus(done, ours)
                tried += 1
                matched += [f"{NAMES[name]}: {words}"] if as_good else []
            rows.append({**_row(name, words, done), ("versus", "against learned, on the same test rows"): versus})
    note = (
        "Against learned: McNemar's exact test, seed by seed; 'no clear difference' unless every seed finds one of "
        "the same sign at p < 0.05. The dense model of the same FLOPs has a narrower feed-forward; the fixed budget is "
        "the learned cells' mean k, rounded up."
    )
    summary = f"Better, or not clearly worse: {'; '.join(matched) or 'none'} ({len(matched)} of {tried} comparisons)."
    return Findings(
        "Controls without a budget for each input",
        summary if tried else "",
        [table("controls", "Controls", rows, note)],
        claims=[claim("controls", "A learned budget for each input beats controls without one",
                      not matched if tried else None, f"{summary} Rule: every control is clearly worse.")],
    )  # fmt: skip


def _row(name: str, model: str, cells: Sequence[Done]) -> dict[Any, Any]:
    network = bool(cells) and cells[0].cell.variant != TFIDF
    return {
        ("dataset", "Data set"): NAMES[name],
        ("model", "Model"): model,
        ("accuracy", "accuracy", 4): accuracy(cells),
        ("k", "executed k/H", 3): over_seeds(cells, lambda d: d.k_over_h) if network else None,
        ("flops", "MFLOPs a text", 3): over_seeds(cells, lambda d: d.megaflops) if network else None,
    }


def same_heads(plan: Plan, dataset: str, learned: Sequence[Done]) -> list[Cell]:
    """A fixed budget of the learned cells' mean number of executed heads, rounded up to a head.

    A few texts with one head more must not double it: up to a hundredth of a head is rounded down.
    """
    if not learned:
        return []
    heads = int(learned[0].run["model"]["heads"])
    k = math.ceil(heads * float(np.mean([done.k_over_h for done in learned])) - 0.01)
    return plan.fixed(dataset, min(heads, max(1, k)) / heads)


def same_flops(plan: Plan, dataset: str, learned: Sequence[Done]) -> list[Cell]:
    """A dense model whose feed-forward is narrowed until it counts as many FLOPs as the learned cells on average."""
    if not learned:
        return []
    config = BudgetFormerConfig.from_pretrained(learned[0].folder)
    config.gates = {"kind": "all"}
    lengths, rows = np.unique(learned[0].rows["lengths"], return_counts=True)

    def flops(inner: int) -> float:
        config.intermediate_size = inner
        counts = [count(config.spec.shape, int(length), [], "dense").total for length in lengths]
        return float(np.average(counts, weights=rows))

    target = float(np.mean([done.test["cost"]["flops_per_text"] for done in learned]))
    inner = max(1, round((target - flops(0)) / (flops(1) - flops(0))))
    return plan.each(dataset, f"dense-ffn{inner}", {"gates": {"kind": "all"}, "intermediate_size": inner})


def _versus(rivals: Sequence[Done], ours: Sequence[Done]) -> tuple[str, bool]:
    """The control against the learned cells: words, and whether it is at least as good."""
    tests = [mcnemar(rival.correct, learned.correct) for learned, rival in pairs(ours, rivals)]
    gap = float(np.mean([test["difference"] for test in tests]))
    p_values = ", ".join(f"{test['p_value']:.2g}" for test in tests)
    clear = all(test["p_value"] < 0.05 and test["difference"] * gap > 0 for test in tests)
    kind = "no clear difference" if not clear else "better" if gap > 0 else "worse"
    return f"{kind} ({100 * gap:+.2f} points, p = {p_values})", kind != "worse"


def needs(plan: Plan, store: Store) -> Findings:
    """What a trained model needs: heads taken from it, attention removed layer by layer."""
    rows: list[dict[Any, Any]] = []
    for name, dense, ours in twins(plan, store):
        for words, cells in (("BudgetFormer", ours), ("Transformer", dense)):
            if not cells:
                continue
            gated = words == "BudgetFormer"
            rows.append({
                ("dataset", "Data set"): NAMES[name],
                ("model", "Model"): words,
                ("as_is", "as it is", 4): probed(cells, "learned"),
                ("one", "one head a layer", 4): probed(cells, "one_head") if gated else None,
                ("static", "the same best heads for all", 4): probed(cells, "static_heads") if gated else None,
                **{(f"layer{i}", f"without attention in layer {i}", 4): probed(cells, "removed", i)
                   for i in cells[0].probes["removed"]},
                ("first", "attention in layer 1 only", 4): probed(cells, "removed_from_second"),
                ("none", "no attention at all", 4): probed(cells, "removed_all"),
            })  # fmt: skip
    most = plan.scale.probe_rows
    note = (
        f"Accuracy on {f'at most {most:,}' if most else 'all'} test rows, nothing retrained. The same best heads: in "
        "each layer the heads with most weight on validation rows, as many as the model's mean k rounded, at their "
        "mean weights. Where attention is removed, its output bias stays."
    )
    return Findings("What the trained models need", tables=[table("needs", "Accuracy with less", rows, note)])

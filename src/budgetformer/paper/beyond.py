"""What the paper does not show: its open choices tried, controls without per-input budgets, and what a model needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from budgetformer.evaluate import mcnemar
from budgetformer.paper.cells import ABLATIONS, TFIDF, Cell, Plan
from budgetformer.paper.needed import same_flops, same_heads
from budgetformer.paper.results import NAMES, Result, accuracy, claim, of, probed, table
from budgetformer.paper.store import Done, Store

_WORDS = {
    "learned": "base: entropy as intended, soft training, as printed otherwise",
    "entropy-printed": "entropy as printed",
    "entropy-off": "no entropy term",
    "topk-training": "top-k in training (Algorithm 1)",
    "topk-from-half": "top-k from half of training on",
    "renormalized": "weights renormalised over the kept heads",
    "topk-renormalized": "top-k in training, renormalised",
    "price": "a price on s (cost_weight 0.005)",
    "pool-padding": "gates pool padding too, as printed",
    "ours": "the small preset's model options (s counts heads, target 0.375)",
}


def ablation(plan: Plan, store: Store) -> Result:
    """SNLI: every choice that the paper leaves open."""
    rows = []
    for name in ("learned", *ABLATIONS):
        cells = plan.learned("snli") if name == "learned" else plan.ablated(name)
        found = store.get(cells)
        rows.append(
            {
                "variant": _WORDS[name],
                "soft": of(found, lambda d: d.soft_accuracy),
                "topk": accuracy(found),
                "gap": of(found, lambda d: d.soft_accuracy - d.accuracy),
                "s": of(found, lambda d: d.s_mean),
                "k": of(found, lambda d: d.k_over_h),
            }
        )
    columns = [
        ("variant", "Variant"), ("soft", "accuracy, all heads weighted", 4), ("topk", "accuracy, top-k", 4),
        ("gap", "lost to top-k", 4), ("s", "mean s", 3), ("k", "executed k/H", 3),
    ]  # fmt: skip
    return Result(
        "SNLI: what the paper leaves open", tables=[table("ablation", "Variants of the method", columns, rows)]
    )


def controls(plan: Plan, store: Store) -> Result:
    """Does the learned budget for each input do what cheaper things cannot?"""
    rows, matched, tried = [], [], 0
    for name in plan.scale.controlled:
        if name not in plan.datasets:
            continue
        ours = store.get(plan.learned(name))
        rivals: list[tuple[str, list[Cell]]] = [
            ("BudgetFormer (learned)", plan.learned(name)),
            ("dense Transformer", plan.dense(name)),
            ("static heads: one learned s and p for all inputs", plan.each(name, "static", {"allocator": "static"})),
            ("fixed budget of the same mean number of heads", same_heads(plan, store, name)),
            ("narrower dense Transformer of the same FLOPs", same_flops(plan, store, name)),
            ("TF-IDF and logistic regression", plan.each(name, TFIDF)),
        ]
        for words, cells in rivals:
            found = store.get(cells)
            row = {"dataset": NAMES[name], "model": words, "accuracy": accuracy(found)}
            if found and found[0].cell.variant != TFIDF:
                row["k"] = of(found, lambda d: d.k_over_h)
                row["flops"] = of(found, lambda d: d.test["cost"]["flops_per_text"] / 1e6)
            if found and ours and cells is not rivals[0][1]:
                row["versus"], as_good = _versus(found, ours)
                tried += 1
                matched += [f"{NAMES[name]}: {words}"] if as_good else []
            rows.append(row)
    columns = [
        ("dataset", "Data set"), ("model", "Model"), ("accuracy", "accuracy", 4), ("k", "executed k/H", 3),
        ("flops", "MFLOPs a text", 3), ("versus", "against learned, on the same test rows"),
    ]  # fmt: skip
    note = (
        "Against learned: McNemar's exact test, seed by seed; 'no clear difference' unless every seed finds one of "
        "the same sign at p < 0.05. The dense model of the same FLOPs has a narrower feed-forward; the fixed budget is "
        "the learned cells' mean k, rounded up."
    )
    told = f"Better, or not clearly worse: {'; '.join(matched) or 'none'} ({len(matched)} of {tried} comparisons)."
    return Result(
        "Controls without a budget for each input",
        told if tried else "",
        [table("controls", "Controls", columns, rows, note)],
        claims=[claim("controls", "A learned budget for each input beats controls without one",
                      not matched if tried else None, f"{told} Rule: every control is clearly worse.")],
    )  # fmt: skip


def _versus(found: Sequence[Done], ours: Sequence[Done]) -> tuple[str, bool]:
    """The control against the learned cells: words, and whether it is at least as good."""
    rival = {done.cell.seed: done for done in found}
    tests = [mcnemar((rival.get(d.cell.seed) or found[0]).right, d.right) for d in ours]
    gap = float(np.mean([test["difference"] for test in tests]))
    ps = ", ".join(f"{test['p_value']:.2g}" for test in tests)
    clear = all(test["p_value"] < 0.05 and test["difference"] * gap > 0 for test in tests)
    kind = "no clear difference" if not clear else "better" if gap > 0 else "worse"
    return f"{kind} ({100 * gap:+.2f} points, p = {ps})", kind != "worse"


def needs(plan: Plan, store: Store) -> Result:
    """What a trained model needs: heads taken from it, attention removed layer by layer."""
    rows: list[dict[str, Any]] = []
    layers = 0
    for name in plan.datasets:
        for words, cells in (("BudgetFormer", plan.learned(name)), ("Transformer", plan.dense(name))):
            if not (found := store.get(cells)):
                continue
            layers = max(layers, len(found[0].probes["removed"]))
            row = {"dataset": NAMES[name], "model": words, "as_is": probed(found, "learned")}
            if words == "BudgetFormer":
                row |= {"one": probed(found, "one_head"), "static": probed(found, "static_heads")}
            row |= {f"layer{i}": probed(found, "removed", i) for i in found[0].probes["removed"]}
            row |= {"first": probed(found, "removed_from_second"), "none": probed(found, "removed_all")}
            rows.append(row)
    columns: list[Any] = [
        ("dataset", "Data set"), ("model", "Model"), ("as_is", "as it is", 4), ("one", "one head a layer", 4),
        ("static", "the same best heads for all", 4),
        *((f"layer{i + 1}", f"without attention in layer {i + 1}", 4) for i in range(layers)),
        ("first", "attention in layer 1 only", 4), ("none", "no attention at all", 4),
    ]  # fmt: skip
    most = plan.scale.probe_rows
    note = (
        f"Accuracy on {f'at most {most:,}' if most else 'all'} test rows, nothing retrained. The same best heads: in "
        "each layer the heads with most weight on validation rows, as many as the model's mean k rounded, at their "
        "mean weights. Where attention is removed, its output bias stays."
    )
    return Result("What the trained models need", tables=[table("needs", "Accuracy with less", columns, rows, note)])

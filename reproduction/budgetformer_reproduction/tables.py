"""The paper's tables, each with the numbers that the paper prints: main results, ablations, model sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from budgetformer.cost.flops import Shape, papers_count
from budgetformer_reproduction.cells import Plan
from budgetformer_reproduction.published import MAIN_TABLE, PUBLISHED_MIB, carbon_grams, parameters
from budgetformer_reproduction.results import (
    NAMES,
    Findings,
    accuracy,
    claim,
    over_seeds,
    paired,
    points,
    probed,
    table,
)
from budgetformer_reproduction.scale import BUDGETS
from budgetformer_reproduction.schema import OVER_ROWS, Claim, Measured
from budgetformer_reproduction.statistics import Z95, Estimate, over_rows
from budgetformer_reproduction.store import Done, Store

_MAIN = {row.dataset: row for row in MAIN_TABLE}
_MIB = 2**20


class Twins(NamedTuple):
    """Both models on one data set, or at one size."""

    name: str
    dense: list[Done]
    ours: list[Done]


def twins(plan: Plan, store: Store) -> list[Twins]:
    """The Transformer and the BudgetFormer of every data set."""
    return [Twins(name, store.get(plan.dense(name)), store.get(plan.learned(name))) for name in plan.datasets]


def main(plan: Plan, store: Store) -> Findings:
    """Table 2: accuracy, s, executed heads and cost of both models."""
    rows, costs = list[dict[Any, Any]](), list[dict[Any, Any]]()
    gaps, stages = dict[str, Estimate](), dict[str, Estimate]()
    for name, dense, ours in twins(plan, store):
        printed = _MAIN[name]
        rows.append({
            ("dataset", "Data set"): NAMES[name],
            ("dense", "Transformer accuracy", 4): accuracy(dense, printed.accuracy[0]),
            ("topk", "BudgetFormer accuracy (top-k)", 4): accuracy(ours, printed.accuracy[1]),
            ("soft", "the same model, all heads weighted (soft)", 4): over_seeds(ours, lambda d: d.soft_accuracy),
            ("s", "mean s", 3): over_seeds(ours, lambda d: d.s_mean, printed.budget),
            ("k", "executed k/H", 3): over_seeds(ours, lambda d: d.k_over_h),
            ("flops_dense", "Transformer MFLOPs a text", 3): over_seeds(dense, lambda d: d.megaflops),
            ("flops", "BudgetFormer MFLOPs a text", 3): over_seeds(ours, lambda d: d.megaflops),
            ("ratio", "FLOPs ratio", 3): over_seeds(ours, lambda d: d.test["cost"]["flops_ratio"]),
        })  # fmt: skip
        if plan.scale.staged:
            staged = store.get(plan.staged(name))
            rows[-1][("staged", "words and exits, accuracy", 4)] = accuracy(staged)
            rows[-1][("staged_ratio", "words and exits, FLOPs ratio", 3)] = over_seeds(
                staged, lambda d: d.test["cost"]["flops_ratio"]
            )
            stages |= {name: gap} if (gap := paired(staged, dense)) else {}
        costs += [_papers_count(plan, name, ours)] if ours else []
        if gap := paired(ours, dense):
            gaps[name] = gap
    worse = [name for name, gap in gaps.items() if gap.high < 0]
    lines = "; ".join(f"{NAMES[name]} {points(gap)}" for name, gap in gaps.items())
    note = "FLOPs are counted: two per multiply-accumulate, the whole model, real lengths, executed heads."
    if stages:
        gains = "; ".join(f"{NAMES[name]} {points(gap)}" for name, gap in stages.items())
        note += f" Words and exits in the Transformer (docs/stages.md), minus the Transformer, {OVER_ROWS}: {gains}."
        read = ", ".join(f"{plan.scale.training[name].max_length} of {NAMES[name]}" for name in stages)
        note += f" Words read whole texts, all layers at most so many tokens: {read}."
    return Findings(
        "Table 2: Transformer and BudgetFormer on five data sets",
        f"Worse than the Transformer beyond noise on {len(worse)} of {len(gaps)} data sets." if gaps else "",
        [
            table("main", "Accuracy, budget and FLOPs", rows, note),
            table("papers-count", "The paper's own count of FLOPs and carbon", costs,
                  "The paper's count: one per multiply-accumulate, attention only, all projections, the predicted s, "
                  "padded length, over the whole test set; carbon is modelled as FLOPs / 3e14. Not comparable with the "
                  "table above."),
        ],
        claims=[claim(
            "accuracy", "BudgetFormer's accuracy matches or beats the Transformer's", not worse if gaps else None,
            f"BudgetFormer minus Transformer, {OVER_ROWS}: {lines or 'no cells'}. "
            "Rule: it fails where a whole interval lies below zero.",
        )],
    )  # fmt: skip


def _papers_count(plan: Plan, name: str, ours: Sequence[Done]) -> dict[Any, Any]:
    """The paper's formula with our mean s, at our shape and rows and at the paper's."""
    printed, training = _MAIN[name], plan.scale.training[name]
    model = {**plan.scale.model, **training.model}
    keys = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    shape = Shape(*(model.get(key, usual) for key, usual in zip(keys, (4, 8, 768, 3072), strict=True)))

    def here(s: float, *, gated: bool) -> float:
        return float(len(ours[0].correct) * papers_count(training.max_length, s, gated=gated, shape=shape))

    def there(done: Done) -> float:
        return float(printed.test_rows * papers_count(printed.tokens, done.s_mean, gated=True))

    dense, dense_there = here(1.0, gated=False), printed.test_rows * papers_count(printed.tokens)
    return {
        ("dataset", "Data set"): NAMES[name],
        ("dense", "Transformer, our shape and rows"): dense,
        ("ours", "BudgetFormer, our shape and rows"): over_seeds(ours, lambda d: here(d.s_mean, gated=True)),
        ("ratio", "ratio", 3): over_seeds(
            ours, lambda d: here(d.s_mean, gated=True) / dense, printed.flops[1] / printed.flops[0]
        ),
        ("paper_dense", "Transformer, the paper's shape and rows"): Measured(
            mean=dense_there, published=printed.flops[0]
        ),
        ("paper_ours", "BudgetFormer, the paper's shape and rows, our s"): over_seeds(ours, there, printed.flops[1]),
        ("carbon_dense", "Transformer gCO2", 4): Measured(mean=carbon_grams(dense_there), published=printed.carbon[0]),
        ("carbon", "BudgetFormer gCO2", 4): over_seeds(ours, lambda d: carbon_grams(there(d)), printed.carbon[1]),
    }


_FIXED = {  # published accuracy at a fixed budget s of 0.1, 0.25, 0.5, 0.75, 1.0
    "dbpedia_14": (0.9846, 0.9478, 0.6202, 0.3245, 0.1670),
    "ag_news": (0.8905, 0.8974, 0.8675, 0.8139, 0.7554),
    "imdb": (0.7296, 0.8036, 0.8246, 0.8289, 0.8162),
    "snli": (0.6704, 0.7598, 0.5838, 0.3541, 0.3190),
    "yelp_review_full": (0.5818, 0.5813, 0.2737, 0.1013, 0.0743),
}


def fixed(plan: Plan, store: Store) -> Findings:
    """Table 3: a fixed budget, trained so and overridden at evaluation."""
    trained, overridden = [], []
    gaps: dict[str, dict[str, Estimate | None]] = {"trained": {}, "overridden": {}}
    for name in plan.datasets:
        ours = store.get(plan.learned(name))
        first = {("dataset", "Data set"): NAMES[name]}
        as_trained: dict[Any, Any] = dict(first)
        as_overridden: dict[Any, Any] = dict(first)
        printed = dict(zip(BUDGETS, _FIXED[name], strict=True))
        for s in BUDGETS:
            as_overridden[_column(s)] = probed(ours, "override", f"{s:g}", published=printed[s])
            gaps["overridden"][f"{NAMES[name]} s={s:g}"] = probe_gap(ours, "override", f"{s:g}")
        for s in plan.scale.fixed_budgets if name in plan.scale.retrained else ():
            cells = store.get(plan.fixed(name, s))
            as_trained[_column(s)] = accuracy(cells, printed.get(s))
            gaps["trained"][f"{NAMES[name]} s={s:g}"] = paired(ours, cells)
        overridden.append({**as_overridden, ("learned", "learned s", 4): probed(ours, "learned")})
        if name in plan.scale.retrained:
            trained.append({**as_trained, ("learned", "learned s", 4): accuracy(ours, _MAIN[name].accuracy[1])})
    return Findings(
        "Table 3: a fixed budget in place of the learned one",
        tables=[
            table("trained", "Trained with the fixed budget", trained, "f is removed, g is trained."),
            table("overridden", "The learned model, s overridden at evaluation", overridden,
                  f"{_probe_words(plan)} The learned column is the same model on the same rows."),
        ],
        claims=[
            _worse(f"fixed-{key}", f"A fixed budget, {words}, is worse than the learned one", gaps[key])
            for key, words in (("trained", "trained so"), ("overridden", "set at evaluation"))
        ],
    )  # fmt: skip


def _column(s: float) -> tuple[str, str, int]:
    return f"{s:g}", f"s = {s:g}", 4


def _probe_words(plan: Plan) -> str:
    most = plan.scale.probe_rows
    return f"On at most {most:,} test rows, drawn once." if most else "On all test rows."


def probe_gap(ours: Sequence[Done], *path: str) -> Estimate | None:
    """Learned minus probed accuracy on the same rows; with several seeds the mean of their intervals, which is wide."""
    as_is, other = probed(ours, "learned").mean, probed(ours, *path).mean
    if as_is is None or other is None:
        return None
    half = float(np.mean([_half(done, as_is, other, path) for done in ours]))
    return Estimate(as_is - other, as_is - other - half, as_is - other + half)


def _half(done: Done, as_is: float, other: float, path: Sequence[str]) -> float:
    """Half the interval of one seed: of pairs, or wider, of two proportions, where a cell did not count pairs yet."""
    probe, n = functools.reduce(dict.__getitem__, path, done.probes), int(done.probes["rows"])
    if "lost" not in probe:
        return Z95 * math.sqrt((as_is * (1 - as_is) + other * (1 - other)) / n)
    lost, gained = probe["lost"], probe["gained"]
    gap = over_rows(np.repeat([1, -1, 0], [lost, gained, n - lost - gained]))
    return gap.high - gap.value


def _worse(key: str, words: str, gaps: Mapping[str, Estimate | None]) -> Claim:
    """Whether every gap, learned minus the other, lies above zero; None is a gap without cells."""
    known = {name: gap for name, gap in gaps.items() if gap is not None}
    as_good = [name for name, gap in known.items() if gap.low <= 0]
    lines = "; ".join(f"{name} {points(gap)}" for name, gap in known.items())
    exceptions = f" Not worse: {', '.join(as_good)}." if as_good else ""
    return claim(
        key, words, not as_good if known else None,
        f"Learned minus the other, {OVER_ROWS}: {lines or 'no cells'}.{exceptions} "
        "Rule: every interval must lie above zero.",
    )  # fmt: skip


_RANDOM = {"dbpedia_14": 0.7511, "ag_news": 0.8180, "imdb": 0.7493, "snli": 0.3370, "yelp_review_full": 0.3244}


def random(plan: Plan, store: Store) -> Findings:
    """Table 4: random heads, at evaluation and trained so."""
    rows = []
    evaluated: dict[str, Estimate | None] = {}
    trained: dict[str, Estimate | None] = {}
    for name in plan.datasets:
        ours, retrained = store.get(plan.learned(name)), name in plan.scale.retrained
        cells = store.get(plan.each(name, "random", {"gates": {"kind": "random"}})) if retrained else []
        rows.append({
            ("dataset", "Data set"): NAMES[name],
            ("evaluated", "random heads at evaluation", 4): probed(ours, "random", published=_RANDOM[name]),
            ("as_is", "learned, the same rows", 4): probed(ours, "learned"),
            ("trained", "trained with random heads", 4): accuracy(cells, _RANDOM[name]) if retrained else None,
            ("learned", "learned, all test rows", 4): accuracy(ours, _MAIN[name].accuracy[1]),
        })  # fmt: skip
        evaluated[NAMES[name]], trained[NAMES[name]] = probe_gap(ours, "random"), paired(ours, cells)
    return Findings(
        "Table 4: random heads in place of the learned ones",
        tables=[table("random", "Random heads, each input's own s", rows, _probe_words(plan))],
        claims=[
            _worse("random-evaluated", "Random heads at evaluation are worse", evaluated),
            _worse("random-trained", "A model trained with random heads is worse", trained),
        ],
    )


def sizes(plan: Plan, store: Store) -> Findings:
    """The model sizes that the paper states, recomputed, and those of our cells."""

    def row(model: str, count: int, published: float | None = None) -> dict[Any, Any]:
        mib = 4 * count / _MIB
        return {
            ("model", "Model"): model,
            ("parameters", "Parameters", 0): count,
            ("mib", "MiB in fp32", 2): Measured(mean=mib, published=published) if published else mib,
        }

    words = ("Transformer", "BudgetFormer")
    printed = [row(name, parameters(3, gated=name == words[1]), PUBLISHED_MIB[name.lower()]) for name in words]
    ours = [
        row(f"{NAMES[t.name]}, {name}", cells[0].run["model"]["parameters"])
        for t in twins(plan, store)
        for name, cells in zip(words, (t.dense, t.ours), strict=True)
        if cells
    ]
    return Findings(
        "Model sizes",
        tables=[
            table("published", "The paper's models (SNLI, three labels)", printed, "Counted from the shapes."),
            table("ours", f"The models of the {plan.scale.name} scale", ours),
        ],
    )

"""Fit the constants by which nn/selective.py chooses its way, and say what choosing by them costs.

Times blocks, pairs and the dense layer on many cases, then searches the constants whose choices lose least against
always choosing right. Print JSON; put the constants into `_CPU` of nn/selective.py.

    python benchmarks/fit_costs.py [--threads 2] [--seconds 0.15]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from functools import partial

import torch

from budgetformer.bench import random_heads
from budgetformer.cost.measure import take_turns
from budgetformer.nn import selective
from budgetformer.nn.allocation import AllHeads, Allocation
from budgetformer.nn.attention import BudgetedAttention

CASES = list(itertools.product((128, 384, 768), (1, 8, 32), (16, 64, 256), (1, 2, 4, 6)))
BLOCK = [m * 10**e for e in (6, 7) for m in (1, 2, 3, 5, 7)]
RUN = [m * 10**e for e in (5, 6) for m in (1, 2, 3, 5, 7)]
MOVE = [10, 20, 30, 50, 70, 100, 150, 200, 300, 500]
HEADS = 8


def timed(width: int, batch: int, length: int, k: int, seconds: float) -> dict[str, object]:
    """The time of each way on one case, and what the estimate reads."""
    layer = BudgetedAttention(width, AllHeads(HEADS)).eval()
    x, active = torch.randn(batch, length, width), random_heads(batch, HEADS, k)
    weights = torch.rand(batch, HEADS) * active
    spans = selective.real_tokens(None, batch, length)
    assert spans is not None
    blocks = selective.blocks_of(active.tolist(), spans)
    allocation = Allocation(weights[:, 0], weights, active.sum(1), active, weights)
    flat = x.view(batch * length, width)
    with torch.inference_mode():
        ms = take_turns(
            {
                "blocks": partial(selective.evaluate_blocks, flat, blocks, HEADS, weights, layer.qkv, layer.out),
                "pairs": partial(selective.evaluate_pairs, x, None, active, weights, layer.qkv, layer.out),
                "dense": partial(layer.evaluate, x, None, allocation),
            },
            seconds=seconds,
            most=60,
        )
    return {"case": (blocks, batch, length, width, HEADS), "ms": ms}


def lost(cases: list[dict[str, object]], costs: selective.Costs) -> list[float]:
    """For each case, how much longer the chosen way takes than the best one."""
    selective._CPU = costs
    result = []
    for case in cases:
        ms: dict[str, float] = case["ms"]  # type: ignore[assignment]
        result.append(ms[selective.cheapest(*case["case"])] / min(ms.values()) - 1)  # type: ignore[misc]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.15, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = [timed(*case, seconds=options.seconds) for case in CASES]
    now = selective._CPU
    choices = {"in use": now} | {"fitted": min(
        (selective.Costs(*c) for c in itertools.product(BLOCK, RUN, MOVE)), key=lambda c: sum(lost(cases, c))
    )}  # fmt: skip
    figures = {
        name: {
            **costs._asdict(),
            "mean_lost": statistics.mean(lost(cases, costs)),
            "most_lost": max(lost(cases, costs)),
        }
        for name, costs in choices.items()
    }
    print(json.dumps({"threads": options.threads, "cases": len(cases), **figures}, indent=1))


if __name__ == "__main__":
    main()

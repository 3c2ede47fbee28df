"""Where the time of a layer goes, measured part by part, and drawn: docs/layer.svg and docs/layer.json.

    python benchmarks/layer_picture.py [-o docs]

Width 768, 8 heads, feed-forward 3072, batch 8. The last bar of each length shows what remains at one head of eight.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from budgetformer.bench import random_heads, selective
from budgetformer.cost.measure import take_turns
from budgetformer.nn import AllHeads, Allocation, BudgetedAttention, Exploration, LearnedHeads, Selection
from budgetformer.nn.encoder import Block
from budgetformer.runs.provenance import environment

LENGTHS = (64, 256, 512)
PARTS = ("projections", "scores", "feed-forward", "gate")
COLOURS = {"projections": "#3b7dd8", "scores": "#7fb2f0", "feed-forward": "#b9b9b9", "gate": "#d9793b"}


def measure(length: int, batch: int = 8, width: int = 768, heads: int = 8) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    layer = BudgetedAttention(width, AllHeads(heads)).eval()
    block = Block(layer, width, 4 * width, 0.0, "relu").eval()
    gate = LearnedHeads(width, heads, Exploration(), Selection()).eval()
    x = torch.randn(batch, length, width)
    everything = layer.allocator(x, None, 1.0)
    active = random_heads(batch, heads, 1)
    one = Allocation(everything.budget, everything.relevance, active.sum(1), active, active.float())
    q = torch.randn(batch, heads, length, width // heads)
    with torch.inference_mode():
        ms = take_turns(
            {
                "attention": partial(layer.evaluate, x, None, everything),
                "scores": partial(torch.nn.functional.scaled_dot_product_attention, q, q, q),
                "feed-forward": partial(block.feedforward, x),
                "gate": partial(gate, x, None, 1.0),
                "one head": partial(selective, layer, x, one),
            },
            seconds=8,
        )
    dense = {"projections": ms["attention"] - ms["scores"], "scores": ms["scores"], "feed-forward": ms["feed-forward"]}
    share = ms["one head"] / ms["attention"]
    remaining = {part: dense[part] * share for part in ("projections", "scores")}
    return {"dense": dense, "one head of eight": {**remaining, "feed-forward": ms["feed-forward"], "gate": ms["gate"]}}


def draw(result: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "layer", "font.size": 10}):
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, (length, bars) in enumerate(result.items()):
            complete = sum(bars["dense"].values())
            for side, (name, parts) in enumerate(bars.items()):
                left, at = 0.0, -(place * 2.6 + side)
                for part in PARTS:
                    value = 100 * parts.get(part, 0.0) / complete
                    label = part if place == 0 and side == 1 else None
                    axes.barh(at, value, left=left, color=COLOURS[part], label=label, height=0.85)
                    left += value
                axes.text(left + 1, at, f"{left:.0f} %", va="center")
                axes.text(-1, at, f"{length} tokens, {name}", va="center", ha="right")
        axes.set_yticks([])
        axes.set_xlim(0, 112)
        axes.set_xlabel("time of one layer, dense = 100 %")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.18), frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs"))
    output = parser.parse_args().output
    result = {length: measure(length) for length in LENGTHS}
    (output / "layer.json").write_text(json.dumps({"ms": result, "environment": environment()}, indent=2) + "\n")
    draw(result, output / "layer.svg")
    for length, bars in result.items():
        for name, parts in bars.items():
            print(length, name, {part: round(value, 2) for part, value in parts.items()})


if __name__ == "__main__":
    main()

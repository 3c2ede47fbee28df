"""Do the guarantees of `calibrate` hold? Rows are split again and again: one half calibrates, the other checks.

python benchmarks/guarantee.py RUN DATA [--resamplings 200]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

import budgetformer
from budgetformer.calibrate import Guarantees
from budgetformer.engine.scores import score
from budgetformer.exits import LIMITS
from budgetformer.runs.provenance import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("data", help="labelled rows that the run was not trained on")
    parser.add_argument("--resamplings", type=int, default=200)
    parser.add_argument("--limit", type=float, default=0.5, help="percent of other labels, and points of accuracy")
    parser.add_argument("--confidence", type=float, default=0.95)
    options = parser.parse_args()
    run = budgetformer.load(options.run)
    table = run.encode(run.rows.held_out(options.data, unseen=True))
    scores, stages = score(run.engine(), table, "exit:0"), run.config.stages
    assert scores.stage_logits is not None, "the run has no exits"
    limits = [0.0, *LIMITS, np.inf]
    exits = np.stack([stages.leave(scores.stage_logits, limit) for limit in limits])
    answers = scores.stage_logits[np.arange(len(table)), exits].argmax(-1)
    full, labels = answers[0], np.asarray(table.labels)
    counted = {
        "disagreements": answers != full,
        "only_full_right": (full == labels) & (answers != labels),
        "only_ours_right": (answers == labels) & (full != labels),
    }
    layers = np.array(stages.depths)[exits].mean(1) / stages.depths[-1]
    rng, broken, spent = np.random.default_rng(0), {"disagreement": 0, "drop": 0}, {"disagreement": [], "drop": []}
    for _ in range(options.resamplings):
        halves = np.array_split(rng.permutation(len(table)), 2)
        here, there = ({name: rows[:, half].sum(1) for name, rows in counted.items()} for half in halves)
        walked: list[dict[str, Any]] = [
            {"place": place, **{name: int(values[place]) for name, values in here.items()}}
            for place in range(len(limits))
        ]
        guarantees = Guarantees(len(halves[0]), True, run.task, options.confidence)
        allowed = options.limit / 100 * len(halves[1])
        for kind in broken:
            place = getattr(guarantees, kind)(walked, options.limit)["place"]
            lost = there["only_full_right"][place] - there["only_ours_right"][place]
            broken[kind] += (there["disagreements"][place] if kind == "disagreement" else lost) > allowed
            spent[kind].append(float(layers[place]))
    result = {
        "run": options.run, "rows": len(table), "resamplings": options.resamplings, "limit": options.limit,
        "confidence": options.confidence,
        "violated": {kind: int(count) / options.resamplings for kind, count in broken.items()},
        "layers_run": {kind: float(np.mean(values)) for kind, values in spent.items()},
        "environment": environment(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

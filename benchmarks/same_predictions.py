"""Does selective execution answer as the definition does, on every row of a run's test set?

The definition computes all heads and multiplies by their weights; the selective path computes the active ones alone.
Exits with 1 if a label differs.

    python benchmarks/same_predictions.py RUN [DIAL ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.runs.run import Run


def main(folder: Path, dials: list[str]) -> int:
    run = Run.open(folder)
    held_out, engine = run.held_out(), TorchEngine(run.model)
    table, figures = run.encode(held_out), {}
    for dial in dials or ("learned", "fixed:0.125", "fixed:0.5", "full"):
        ours = score(engine, table, dial)
        with mock.patch("budgetformer.nn.attention.evaluate_active", return_value=None):
            defined = score(engine, table, dial)
        figures[dial] = {
            "k_over_h": float(ours.heads.mean() / ours.num_heads),
            "labels_that_differ": int((ours.logits.argmax(1) != defined.logits.argmax(1)).sum()),
            "largest_difference_of_a_logit": float(np.abs(ours.logits - defined.logits).max()),
        }
    print(json.dumps({"split": held_out.split, "rows": len(table), "dials": figures}, indent=1))
    return int(any(dial["labels_that_differ"] for dial in figures.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

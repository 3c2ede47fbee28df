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

from budgetformer.data import DataSource, encode, open_data
from budgetformer.evaluate import run_model
from budgetformer.runs.run import load_run


def main(folder: Path, dials: list[str]) -> int:
    model, tokenizer, record = load_run(folder)
    data = open_data(DataSource(**record["data"]))
    split = "test" if "test" in data.splits else "validation"
    rows = encode(data.splits[split], data, tokenizer, record["max_length"])
    found = {}
    for dial in dials or ("learned", "fixed:0.125", "fixed:0.5", "full"):
        ours = run_model(model, rows, dial)
        with mock.patch("budgetformer.nn.attention.evaluate_active", return_value=None):
            defined = run_model(model, rows, dial)
        found[dial] = {
            "k_over_h": float(ours.heads.mean() / model.config.num_attention_heads),
            "labels_that_differ": int((ours.logits.argmax(1) != defined.logits.argmax(1)).sum()),
            "largest_difference_of_a_logit": float(np.abs(ours.logits - defined.logits).max()),
        }
    print(json.dumps({"split": split, "rows": len(rows), "dials": found}, indent=1))
    return int(any(dial["labels_that_differ"] for dial in found.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

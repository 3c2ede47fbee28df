"""Draw accuracy against the share of heads that run, from what `eval --json` printed.

budgetformer eval RUN DATA --budget learned --budget fixed:0.25 --budget full --json > evaluations.json
python benchmarks/curve.py evaluations.json -o docs/curve.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from budgetformer.paper.drawing import standalone
from budgetformer.report.figures import Mark, dial_curve
from budgetformer.runs.files import write_text


def mark(found: dict[str, Any]) -> Mark:
    interval = found["quality"][found["metric"]]
    kind = found["dial"].partition(":")[0].replace("full", "fixed")
    return Mark(kind, found["budget"]["k_over_h"], interval["value"], interval["low"], interval["high"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    result = json.loads(options.evaluations.read_text(encoding="utf-8"))
    marks = [mark(found) for found in result["evaluations"]]
    twin = result.get("baseline")
    learned = next((m for m in marks if m.kind == "learned"), None)
    others = [m for m in marks if m is not learned]
    dense = twin["score"] if twin else None
    write_text(options.output, standalone(dial_curve(others, learned, dense, "test accuracy", percent=True)))


if __name__ == "__main__":
    main()

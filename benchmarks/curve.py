"""Draw accuracy against the share of heads that run, from what `eval --json` printed.

budgetformer eval RUN DATA --budget learned --budget fixed:0.25 --budget full --json > evaluations.json
python benchmarks/curve.py evaluations.json -o docs/curve.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from budgetformer.report.figures import dial_curve
from budgetformer.runs.files import write_text
from budgetformer_reproduction.drawing import standalone


def point(evaluation: dict[str, Any]) -> dict[str, Any]:
    interval = evaluation["quality"][evaluation["metric"]]
    return {"dial": evaluation["dial"], "score": interval["value"], **evaluation["budget"], **interval}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    result = json.loads(options.evaluations.read_text(encoding="utf-8"))
    points = [point(evaluation) for evaluation in result["evaluations"]]
    twin = result.get("baseline")
    dense = twin["score"] if twin else None
    write_text(options.output, standalone(dial_curve(points, dense, "test accuracy", percent=True)))


if __name__ == "__main__":
    main()

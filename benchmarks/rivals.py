"""What people would use instead, against this, from the same rows: one JSON a cell, resumable.

    python benchmarks/rivals.py run --base DIR [--data-dir DIR] [--datasets ag_news ...] [--seeds 0 1 2]
    python benchmarks/rivals.py run --base DIR --part score     # train and score alone; `--part time` later, when quiet
    python benchmarks/rivals.py plot

`run` writes docs/results/rivals/DATASET-RIVAL-SEED.json and skips what is there; `plot` prints README's table and the
long one, and writes rivals.svg and rivals.json. Encoders are trained by benchmarks/stages.py, in its folders: what is
there is taken.
  tfidf       TF-IDF of words and pairs of them, logistic regression
  static      the method of model2vec: each word piece through the encoder alone, PCA to 256, SIF weights by rank; the
              mean over a text's pieces, logistic regression
  frozen      the encoder as it is, mean of the last layer's states, logistic regression
  dense       the encoder fine-tuned (Hugging Face, torch, SDPA); dense-int8: its ONNX graph by `quantize_dynamic`
  ours        words and exits, exported in int8, at two points that `calibrate` guarantees for that export, from the
              run's held-out rows; the percentages that so few rows cannot promise are recorded as refused
Pairs are u, v, |u - v|, u * v for static and frozen, one text for tfidf. Every clock runs in a process of its own with
two threads; cold start is from its start to the first label, memory the most that was resident until the end.
Training seconds of encoders are those of their steps by the clock, of `start` too; of the others the processor's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rival_models import FITTED, fit, opened, rows_of

from budgetformer.cost.measure import in_fresh_process, peak
from budgetformer.data.splits import sample_rows
from budgetformer.errors import UsageError
from budgetformer.runs.files import write_text
from budgetformer.speed import rows_per_second, write_dense

EPOCHS = {"ag_news": 1, "imdb": 1, "rotten_tomatoes": 2, "snli": 2, "dbpedia_14": 1, "yelp_review_full": 5}
MOST_ROWS = {"yelp_review_full": 1000}  # the data set of few rows
RIVALS = {"tfidf": "TF-IDF", "static": "static embeddings", "frozen": "frozen encoder", "dense": "fine-tuned, torch",
          "dense-int8": "fine-tuned, ONNX int8", "ours": "budgetformer, ONNX int8"}  # fmt: skip
PERCENT = (1.0, 3.0, 5.0)  # of texts with another label than the full model's: the first two that can be promised
BATCHES = (1, 32)


def trained(options: Namespace, dataset: str, method: str, seed: int) -> tuple[Path, float]:
    """A run of benchmarks/stages.py, trained unless it is there; and the seconds of it and of what it started from."""
    from stages import train

    folder, seconds = Path(options.runs) / dataset / Path(options.base).name / str(seed), 0.0
    for name in ("start", method):
        file = folder / name / "run.json"
        if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["status"] != "done":
            train(options, dataset, name, folder)
        seconds += json.loads(file.read_text(encoding="utf-8"))["training"]["seconds"]
    return folder / method, seconds


def guaranteed(run: Any, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The export, calibrated by its own answers: two points with a guarantee, and what was refused."""
    from budgetformer.runs.run import Run

    if not folder.exists():
        run.export(folder, budget="full" if not run.config.exits else "exit:0", int8=True)
    asked, refused, result = list[float](), list[str](), dict[str, Any]()
    for percent in PERCENT:
        try:
            result = Run.open(folder).calibrate(max_disagreement=[*asked, percent])
            asked.append(percent)
        except UsageError as error:
            refused.append(str(error))
        if len(asked) == 2:
            break
    keys = ("dial", "flops_ratio", "exits", "guarantee")
    points = [{"point": f"at most {percent:g} % other labels", "budget": name, **{key: place[key] for key in keys}}
              for percent, (name, place) in zip(asked, result.get("points", {}).items(), strict=True)]  # fmt: skip
    return points, refused


def made(options: Namespace, dataset: str, rival: str, seed: int) -> dict[str, Any]:
    """A rival, trained and written to where it is opened from: its points, without figures yet."""
    from budgetformer.runs.run import Run

    base = Path(options.runs) / dataset / Path(options.base).name
    if rival in FITTED:
        folder, began = base / "rivals" / rival, time.process_time()
        folder.mkdir(parents=True, exist_ok=True)
        fit(options, dataset, rival, folder)
        return {"points": [{"point": "", "model": folder}], "training_seconds": time.process_time() - began}
    run, seconds = trained(options, dataset, "staged" if rival == "ours" else "dense", seed)
    folder = base / str(seed) / "rivals"
    if rival == "ours":
        points, refused = guaranteed(Run.open(run), folder / "staged-int8")
        points = [{**point, "model": folder / "staged-int8"} for point in points]
        return {"points": points, "refused": refused, "training_seconds": seconds}
    if not (folder / "dense-int8" / "export.json").exists():
        write_dense(Run.open(run), Run.open(run), folder)
    model = folder / ("plain" if rival == "dense" else "dense-int8")
    return {"points": [{"point": "", "model": model}], "training_seconds": seconds}


def score(options: Namespace, dataset: str, rival: str, seed: int) -> dict[str, Any]:
    """A cell: the rival's points, each with its accuracy on the test rows."""
    import retrofit

    from budgetformer.evaluate import proportion

    cell = made(options, dataset, rival, seed)
    texts, pairs, labels = rows_of(retrofit.opened(options, dataset), "test")
    rows = np.arange(len(texts)) if options.test_rows is None else sample_rows(len(texts), options.test_rows)
    texts, pairs, labels = [texts[r] for r in rows], None if pairs is None else [pairs[r] for r in rows], labels[rows]

    def answers(point: dict[str, Any], budget: str | None) -> Any:
        return opened(rival, point["model"], budget)(texts, pairs, 32)

    full = answers(cell["points"][0], "exit:0") if rival == "ours" and cell["points"] else None
    for point in cell["points"]:
        labelled = answers(point, point.get("budget"))
        point |= {"rows": len(labels), **proportion(int((labelled == labels).sum()), len(labels))}
        point |= {} if full is None else {"other_label": float((labelled != full).mean())}
        point["model"] = point["model"].relative_to(options.runs).as_posix()
    return cell


def measure(rows: str, rival: str, folder: str, budget: str | None, seconds: float, began: float) -> dict[str, Any]:
    """One point by the clock, from the moment that its process was started."""
    data = json.loads(Path(rows).read_text(encoding="utf-8"))
    texts, pairs = data["texts"], data["pairs"]
    answers = opened(rival, Path(folder), budget)
    answers(texts[:1], pairs and pairs[:1], 1)
    cold = time.time() - began
    rates = rows_per_second(answers, texts, pairs, seconds, BATCHES)
    return {"cold_start": cold, "rows_per_second": rates, "mb": peak() / 1e6}


def clock(options: Namespace, dataset: str, files: Sequence[Path]) -> None:
    """Time the points of a data set in turns, each in a new process, and write the figures into its cells."""
    import retrofit

    from budgetformer.runs.provenance import environment

    cells = {file: json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()}
    cells = {file: cell for file, cell in cells.items() if any("timing" not in p for p in cell["points"])}
    points = [(cell["rival"], point) for cell in cells.values() for point in cell["points"]]
    if not points:
        return
    texts, pairs, _ = rows_of(retrofit.opened(options, dataset), "test")
    rows = sample_rows(len(texts), options.texts)
    os.environ.update(OMP_NUM_THREADS="2", RAYON_NUM_THREADS="2")
    times: list[list[dict[str, Any]]] = [[] for _ in points]
    with tempfile.TemporaryDirectory() as folder:
        timed = {"texts": [texts[r] for r in rows], "pairs": None if pairs is None else [pairs[r] for r in rows]}
        write_text(file := Path(folder, "rows.json"), json.dumps(timed))
        for _, (measured, (rival, point)) in itertools.product(range(options.rounds), zip(times, points, strict=True)):
            asked = [str(file), rival, str(Path(options.runs, point["model"])), point.get("budget"), options.seconds]
            measured.append(in_fresh_process([__file__], [*asked, time.time()]))
    for (_, point), measured in zip(points, times, strict=True):
        rates = {str(b): max(m["rows_per_second"][str(b)] for m in measured) for b in BATCHES}
        point["timing"] = {"rows_per_second": rates, "cold_start": min(m["cold_start"] for m in measured),
                           "mb": max(m["mb"] for m in measured), "texts": len(rows), "threads": 2,
                           "environment": environment("onnxruntime")}  # fmt: skip
    for file, cell in cells.items():
        write_text(file, json.dumps(cell, indent=2) + "\n")
        print(f"{file} timed", flush=True)


def run(options: Namespace) -> None:
    from budgetformer.runs.provenance import environment

    results, name = Path(options.results), Path(options.base).name
    results.mkdir(parents=True, exist_ok=True)
    for seed, dataset in itertools.product(options.seeds, options.datasets):
        few = min(options.rows, MOST_ROWS.get(dataset, options.rows))
        chosen = Namespace(**{**vars(options), "rows": few, "epochs": options.epochs or EPOCHS.get(dataset, 1)})
        rivals = [rival for rival in options.rivals if rival not in FITTED or seed == options.seeds[0]]
        files = {rival: results / f"{dataset}-{rival}-{seed}.json" for rival in rivals}
        for rival, file in files.items():
            if options.part != "time" and not file.exists():
                facts = {"dataset": dataset, "encoder": name, "rival": rival, "seed": seed, "train_rows_limit": few}
                cell = {**facts, **score(chosen, dataset, rival, seed), "environment": environment("onnxruntime")}
                write_text(file, json.dumps(cell, indent=2) + "\n")
                print(file, flush=True)
        if options.part != "score":
            clock(chosen, dataset, list(files.values()))


def spread(values: Sequence[float], decimals: int) -> str:
    """The mean, and the least and the most where seeds differ."""
    shown = f"{np.mean(values):,.{decimals}f}"
    return shown if len(values) == 1 else f"{shown} [{min(values):,.{decimals}f}, {max(values):,.{decimals}f}]"


def plot(options: Namespace) -> None:
    """The table, mean over seeds; accuracy against rows/s in rivals.svg, and all cells in rivals.json."""
    results = Path(options.results)
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in results.glob("*-[0-9].json")]
    known = list(EPOCHS)
    cells.sort(key=lambda c: (*((c[k] not in v, v.index(c[k]) if c[k] in v else c[k]) for k, v in
                                (("dataset", known), ("rival", list(RIVALS)))), c["seed"]))  # fmt: skip
    rows: dict[str, dict[tuple[str, str], list[tuple[dict[str, Any], float]]]] = {}
    for cell in cells:
        for point in cell["points"]:
            key = (cell["rival"], point["point"])
            rows.setdefault(cell["dataset"], {}).setdefault(key, []).append((point, cell["training_seconds"]))
    print_short(rows)
    head = ("data set", "", "accuracy, % (95 % interval)", "rows/s, batch 1", "32", "MB", "cold start, s")
    print("|", " | ".join((*head, "training, s (the least)")), "|")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dataset, rivals in rows.items():
        for (rival, name), seeds in rivals.items():
            low, high = (100 * np.mean([point[end] for point, _ in seeds]) for end in ("low", "high"))
            accuracy = spread([100 * point["value"] for point, _ in seeds], 2) + f" ({low:.2f} to {high:.2f})"
            timed = [point["timing"] for point, _ in seeds if "timing" in point]
            columns = [([t["rows_per_second"][str(batch)] for t in timed], 0) for batch in BATCHES]
            columns += [([t["mb"] for t in timed], 0), ([t["cold_start"] for t in timed], 2)]
            figures = [spread(values, decimals) if values else "" for values, decimals in columns]
            label = RIVALS[rival] + (f", {name}" if name else "")
            print("|", " | ".join([dataset, label, accuracy, *figures, f"{min(s for _, s in seeds):,.0f}"]), "|")
    for cell in cells:
        for line in cell.get("refused", ()):
            print(f"{cell['dataset']}, seed {cell['seed']}, refused: {line}")
    write_text(results / "rivals.json", json.dumps(cells, indent=1) + "\n")
    draw(rows, results / "rivals.svg")


def print_short(rows: dict[str, dict[tuple[str, str], list[tuple[dict[str, Any], float]]]]) -> None:
    """A line a data set, a column a rival: accuracy in %, and rows/s in batches of 32; means over seeds."""
    names = [*list(RIVALS.values())[:-1], "budgetformer, stricter", "budgetformer, looser"]
    print("|", " | ".join(["data set", *names]), "|\n|" + " --- |" * (len(names) + 1))
    for dataset, rivals in rows.items():
        shown = []
        for rival in RIVALS:
            points = [seeds for (name, _), seeds in rivals.items() if name == rival]
            for seeds in [*points, None, None][: 2 if rival == "ours" else 1]:
                rates = [p["timing"]["rows_per_second"]["32"] for p, _ in seeds or () if "timing" in p]
                value = f"{100 * np.mean([p['value'] for p, _ in seeds]):.1f}" if seeds else "refused"
                shown.append(value + (f" ({np.mean(rates):,.0f}/s)" if rates else ""))
        print("|", " | ".join([dataset, *shown]), "|")
    print()


def draw(rows: dict[str, Any], file: Path) -> None:
    """A panel per data set: accuracy against rows/s in batches of 32, means over seeds."""
    from budgetformer.report.figures import BLUE, GREEN, GREY, ORANGE, canvas
    from budgetformer_reproduction.drawing import standalone

    styles = dict(
        zip(RIVALS, zip((GREY, "#b59020", "#b065b8", GREEN, ORANGE, BLUE), "sPv^Do", strict=True), strict=True)
    )
    across = min(3, len(rows))
    down = -(-len(rows) // across)
    with canvas("rivals", "accuracy against rows per second", (3.6 * across, 2.9 * down + 0.6)) as (figure, svg):
        shown: dict[str, Any] = {}
        for place, (dataset, rivals) in enumerate(rows.items(), 1):
            axes = figure.add_subplot(down, across, place)
            for rival, (colour, marker) in styles.items():
                points = [[p for p, _ in seeds] for key, seeds in rivals.items() if key[0] == rival]
                xy = [(np.mean([p["timing"]["rows_per_second"]["32"] for p in seeds if "timing" in p]),
                       100 * np.mean([p["value"] for p in seeds]))
                      for seeds in points if any("timing" in p for p in seeds)]  # fmt: skip
                if xy:
                    style = {"color": colour, "marker": marker, "markersize": 8 if rival == "ours" else 6}
                    shown[RIVALS[rival]] = axes.plot(*zip(*sorted(xy), strict=True), **style)[0]
            axes.set(title=dataset, xscale="log", xlabel="rows/s", ylabel="test accuracy, %")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter("")
            axes.margins(0.12)
        if shown:
            figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3)
    write_text(file, standalone(svg[0]))


def main() -> None:
    import stages

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, verb in (("run", run), ("plot", plot)):
        sub = verbs.add_parser(name)
        sub.set_defaults(verb=verb)
        sub.add_argument("--results", default="docs/results/rivals")
        if name == "run":
            sub.add_argument("--part", choices=("score", "time"), help="train and score, or time (default: both)")
            stages.add_training_options(sub, EPOCHS, epochs=None)
            sub.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
            sub.add_argument("--test-rows", type=int, help="so many, drawn once (default: all)")
            sub.add_argument("--texts", type=int, default=1000, help="to time")
            sub.add_argument("--seconds", type=float, default=5.0, help="to time a batch size, or one pass")
            sub.add_argument("--rounds", type=int, default=2, help="new processes for each time; the best is taken")
    options = parser.parse_args()
    options.verb(options)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):  # the process of one time
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        main()

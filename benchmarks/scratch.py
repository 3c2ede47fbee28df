"""From scratch: the preset `small` with words and exits against its dense twin and TF-IDF, on the same rows.

    python benchmarks/scratch.py run --data-dir DIR [--datasets ag_news ...] [--seeds 0 1 2] [--rows N] [--epochs N]
    python benchmarks/scratch.py table

`run` writes docs/results/scratch/DATASET-SEED.json, a cell each, and skips what is there; a run that was interrupted
goes on. Test sets are whole. TF-IDF: words and pairs of words that two rows have, sublinear, with logistic regression
(C = 10), on the training rows of the run. `table` prints what `run` has written, mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from budgetformer.data.dataset import DataSet, open_data
from budgetformer.data.locate import DataSource
from budgetformer.engine.scores import score
from budgetformer.evaluate import is_correct, paired_difference, proportion
from budgetformer.runs.files import read_json, write_json
from budgetformer.runs.provenance import environment
from budgetformer.runs.run import Run
from budgetformer.training.recipe import Recipe
from budgetformer.training.record import has_begun
from budgetformer.training.run import train_run

DATASETS = ("ag_news", "imdb", "dbpedia_14", "snli", "yelp_review_full")
LENGTH = {"snli": 64}
MODELS = ("tfidf", "words", "dense twin", "learned", "full")
BELOW, COST = -0.003, 0.5  # the aim: at most so far below TF-IDF, at no more than this share of the dense twin's cost


def texts(data: DataSet, split: str) -> tuple[list[str], list[Any]]:
    """The texts of a split, of a pair both in one, and their labels."""
    rows = list(data.splits[split].examples())
    return [r.text if r.text_pair is None else f"{r.text} {r.text_pair}" for r in rows], [r.label for r in rows]


def tfidf(data: DataSet) -> tuple[np.ndarray[Any, Any], float]:
    """Which test rows scikit-learn's usual pipeline gets right, and the seconds that it takes to fit."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    (train_texts, train_labels), (test_texts, test_labels) = (texts(data, split) for split in ("train", "test"))
    began = time.perf_counter()
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    model = LogisticRegression(C=10, max_iter=1000).fit(vectorizer.fit_transform(train_texts), train_labels)
    seconds = time.perf_counter() - began
    return model.predict(vectorizer.transform(test_texts)) == np.array(test_labels), seconds


def cell(options: argparse.Namespace, dataset: str, seed: int) -> dict[str, Any]:
    """Train a run with its twin, or finish it, and compare."""
    source = DataSource(dataset, data_dir=options.data_dir, offline=options.data_dir is not None, limit=options.rows)
    recipe = Recipe.make("small", max_length=LENGTH.get(dataset, 128), epochs=options.epochs)
    folder = Path(options.runs) / f"{dataset}-{seed}"
    result = train_run(source, recipe, folder, seed=seed, with_baseline=True, resume=has_begun(folder), examples=False)
    data, run = open_data(source), Run.open(folder)
    right, seconds = tfidf(data)
    table = run.encode(run.held_out(source, "test"))
    ours = is_correct(score(run.engine(), table))
    assert ours is not None, "the figures are for classification"
    assert len(ours) == len(right), "both must answer the same rows"
    record = read_json(folder / "run.json", "run the cell again")
    points = {entry["model"]: entry for entry in result["comparison"]}
    return {
        "dataset": dataset, "seed": seed, "training_rows": record["splits"]["train"], "test_rows": len(right),
        "recipe": record["recipe"], "cut": record["cut"],
        "models": {"tfidf": {"score": float(right.mean()), **proportion(int(right.sum()), len(right))}, **points},
        "learned_versus_tfidf": paired_difference(ours, right),
        "versus_dense_twin": result["versus_baseline"],
        "seconds": {"tfidf": seconds, "training": record["training"]["seconds"]},
        "environment": environment(),
    }  # fmt: skip


def run_cells(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        for dataset in options.datasets:
            file = Path(options.results) / f"{dataset}-{seed}.json"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, cell(options, dataset, seed))
            print_table(options)


def print_table(options: argparse.Namespace) -> None:
    """One line a data set: accuracies, the difference from TF-IDF, the cost, and whether the aim is reached."""
    cells = [json.loads(file.read_text()) for file in sorted(Path(options.results).glob("*.json"))]
    print(
        "| data set | rows | seeds | " + " | ".join(MODELS) + " | learned - TF-IDF | cost | left at each stage | aim |"
    )
    print("| --- |" + " ---: |" * (len(MODELS) + 5) + " --- |")
    for dataset in dict.fromkeys(cell["dataset"] for cell in cells):
        of_dataset = [cell for cell in cells if cell["dataset"] == dataset]
        scores = {model: fmean(cell["models"].get(model, cell["models"]["learned"])["score"] for cell in of_dataset)
                 for model in MODELS}  # fmt: skip
        learned = [cell["models"]["learned"] for cell in of_dataset]
        cost, exits = fmean(p["flops_ratio"] for p in learned), np.mean([p["exits"] for p in learned], axis=0)
        difference = scores["learned"] - scores["tfidf"]
        figures = " | ".join(f"{value:.4f}" for value in scores.values())
        shares = ", ".join(f"{share:.0%}" for share in exits)
        verdict = "reached" if difference >= BELOW and cost <= COST else "missed"
        rows = of_dataset[0]["training_rows"]
        print(f"| {dataset} | {rows:,} | {len(of_dataset)} | {figures} | {100 * difference:+.2f} | {cost:.1%} | "
              f"{shares} | {verdict} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data-dir", help="the folder with the named data sets (default: the hub)")
    parser.add_argument("--datasets", nargs="+", default=DATASETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, help="training rows (default: all)")
    parser.add_argument("--epochs", type=int, help="as many as the preset has by default")
    parser.add_argument("--runs", default="runs/scratch", help="where the runs are kept")
    parser.add_argument("--results", default="docs/results/scratch")
    options = parser.parse_args()
    run_cells(options) if options.what == "run" else print_table(options)


if __name__ == "__main__":
    main()

"""Pretrained encoders with head budgets against dense, pruned and random heads: one JSON a cell, resumable.

    python benchmarks/retrofit.py run --base DIR --data-dir DIR [--datasets ag_news imdb snli] [--seeds 2]
    python benchmarks/retrofit.py time --base DIR [--length 128]
    python benchmarks/retrofit.py plot

`run` writes docs/results/retrofit/DATASET-METHOD-SEED.json and skips what is there; runs themselves go on where they
were interrupted. All methods start from the same fine-tuned dense model and are trained on for equally long:
  start     the fine-tuned dense model
  dense     the same trained on with all heads
  budgeted  heads ranked across layers, from which each input may depart
  static    the same without what the input adds
  paper     the paper's gates, w = s H p
  random    a random order that is not learned
  michel    the order by gradient importance, applied to a dense model; and `michel-tuned`, trained on with that order
  untrained a random order applied to a dense model
  frozen    `budgeted` frozen at a share of the heads
  tfidf     TF-IDF of words and pairs with logistic regression
`time` compares the whole model and its attention blocks with Hugging Face's own, which uses SDPA, in one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budgetformer.cli.show import quiet_libraries
from budgetformer.cost.timing import take_turns
from budgetformer.data import DataSource, encode, load_tokenizer, open_data
from budgetformer.evaluation import run_model, summarize, wilson
from budgetformer.paper.probes import rows_of, some_rows
from budgetformer.paper.render_figures import standalone
from budgetformer.paper.statistics import over_rows
from budgetformer.report import write_whole
from budgetformer.report.figures import canvas
from budgetformer.retrofit import BudgetedClassifier, load_base, load_model, rank_heads, retrofit
from budgetformer.retrofit.freezing import freeze
from budgetformer.training.provenance import environment
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import train

VALIDATION_ROWS = 1000
LENGTH = {"ag_news": 128, "imdb": 256, "snli": 64}
TRAINED: dict[str, dict[str, Any]] = {
    "dense": {"model": {"allocator": "all"}},
    "budgeted": {"model": {"allocator": "ranked"}},
    "static": {"model": {"allocator": "order"}},
    "paper": {"model": {"allocator": "learned"}},
    "random": {"model": {"allocator": "order", "learn_order": False}, "ranking": "random"},
    "michel-tuned": {"model": {"allocator": "order", "learn_order": False}},
}
SAID = {
    "start": "dense, fine-tuned",
    "dense": "dense, trained on",
    "budgeted": "budgeted, by input",
    "static": "learned order, same for all",
    "paper": "the paper's gates",
    "random": "random heads, trained",
    "michel-tuned": "gradient importance, trained",
    "michel": "gradient importance",
    "untrained": "random heads",
    "frozen": "budgeted, frozen",
    "tfidf": "TF-IDF",
}
METHODS = tuple(SAID)
COSTS = ("k_over_h", "attention_flops_ratio", "flops_ratio")


def source(options: argparse.Namespace, dataset: str) -> DataSource:
    """The training rows and some validation rows, in files: the test rows are for `points` alone."""
    folder = Path(options.runs) / dataset / "data"
    if not folder.exists():
        data = open_data(DataSource(dataset, data_dir=options.data_dir, limit=options.rows, offline=True))
        part = folder.with_name("data.part")
        part.mkdir(parents=True, exist_ok=True)
        for split, most in (("train", None), ("validation", VALIDATION_ROWS)):
            with (part / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                for e in itertools.islice(data.splits[split].examples(), most):
                    pair = {} if e.text_pair is None else {"text_pair": e.text_pair}
                    file.write(json.dumps({"text": e.text, **pair, "label": e.label}) + "\n")
        part.rename(folder)
    return DataSource(str(folder))


def recipe(options: argparse.Namespace, dataset: str, base: Path | str, **changes: Any) -> Recipe:
    words = {
        "max_length": LENGTH.get(dataset, 128), "epochs": options.epochs, "learning_rate": options.lr,
        "precision": options.precision, **changes,
    }  # fmt: skip
    words["model"] = {**words["model"], "dropout": options.dropout, "attention_dropout": options.dropout}
    return Recipe.make(base=str(base), **words)


class TestRows:
    """The test rows, all or so many drawn once, and which of them each dense model got right."""

    def __init__(self, options: argparse.Namespace, dataset: str, seed: int) -> None:
        self.runs = Path(options.runs) / dataset / str(seed)
        self.precision = options.precision
        self.tokenizer = load_tokenizer(self.runs / "start", offline=True)
        labels = open_data(source(options, dataset)).labels
        data = replace(open_data(DataSource(dataset, data_dir=options.data_dir, offline=True)), labels=labels)
        whole = encode(data.splits["test"], data, self.tokenizer, LENGTH.get(dataset, 128))
        self.rows = some_rows(whole, options.test_rows)
        self.all, self.encoded = len(whole), rows_of(whole, self.rows)

    def point(self, model: Any, dial: str, name: str | None = None) -> dict[str, Any]:
        """What the model scored and executed, and its differences from the dense models, row by row."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            outcome = run_model(model, self.encoded, dial)
        e = summarize(outcome, self.encoded, model.config, split="test", dial=dial)
        cost = {k: e.cost[k] for k in ("flops_ratio", "attention_flops_ratio", "flops_per_text")}
        k_over_h = e.budget["k_over_h"]
        point = {"dial": dial, "rows": len(self.rows), **e.quality["accuracy"], "k_over_h": k_over_h, **cost}
        right = np.full(self.all, np.nan)
        right[self.rows] = outcome.logits.argmax(1) == self.encoded.labels
        if name is not None:
            np.save(self.runs / f"right-{name}.npy", right)
        for other in ("start", "dense"):
            file = self.runs / f"right-{other}.npy"
            if other != name and file.exists():
                differences = right - np.load(file)
                gain = over_rows(differences[~np.isnan(differences)])
                point[f"versus_{other}"] = {"value": gain.value, "low": gain.low, "high": gain.high}
        return point


def cell(options: argparse.Namespace, dataset: str, method: str, seed: int) -> dict[str, Any]:
    """One method on one data set with one seed."""
    runs = Path(options.runs) / dataset / str(seed)
    if method == "tfidf":
        return {"points": [tfidf(options, dataset)]}
    data, began = source(options, dataset), time.monotonic()
    if method == "start":
        chosen = recipe(options, dataset, options.base, dense_epochs=0, model={"allocator": "all", "distill_weight": 0})
        train(data, chosen, runs / "start", seed=seed, resume=True, evaluate=False)
    elif method in TRAINED:
        tuned = recipe(options, dataset, runs / "start", dense_epochs=0, **TRAINED[method])
        train(data, tuned, runs / method, seed=seed, resume=True, evaluate=False)
    trained = time.monotonic() - began
    test = TestRows(options, dataset, seed)
    shares = [f"{share:g}" for share in options.shares]
    if method in ("start", "dense"):
        found = [test.point(load_model(runs / method), "full", method)]
    elif method == "frozen":
        model = load_model(runs / "budgeted")
        found = [test.point(freeze(model, float(s)), "learned") | {"dial": f"frozen:{s}"} for s in shares]
    elif method in ("michel", "untrained"):
        start = load_model(runs / ("dense" if (runs / "dense").exists() else "start"))
        assert isinstance(start, BudgetedClassifier)
        pruned, rows = retrofit(start.plain().eval(), allocator="order"), open_data(data)
        seen = encode(rows.splits["train"], rows, test.tokenizer, LENGTH.get(dataset, 128))
        rank_heads(pruned, seen, ranking="random" if method == "untrained" else "importance", seed=seed)
        found = [test.point(pruned, f"mean:{s}") for s in shares]
    else:
        mode = "fixed" if method == "paper" else "mean"
        model = load_model(runs / method)
        found = [test.point(model, dial) for dial in (*(f"{mode}:{s}" for s in shares), *options.also)]
    return {"points": found, "training_seconds": trained}


def tfidf(options: argparse.Namespace, dataset: str) -> dict[str, Any]:
    """The floor that any encoder must pass."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    data = open_data(DataSource(dataset, data_dir=options.data_dir, limit=options.rows, offline=True))

    def rows(split: str) -> tuple[list[str], list[Any]]:
        examples = list(data.splits[split].examples())
        return [f"{e.text} {e.text_pair or ''}" for e in examples], [e.label for e in examples]

    texts, labels = rows("train")
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=300).fit(vectorizer.fit_transform(texts), labels)
    texts, labels = rows("test")
    right = int((model.predict(vectorizer.transform(texts)) == labels).sum())
    low, high = wilson(right, len(labels))
    return {"dial": "tfidf", "value": right / len(labels), "low": low, "high": high}


def run(options: argparse.Namespace) -> None:
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for dataset in options.datasets:
            for method in options.methods:
                file = results / f"{dataset}-{method}-{seed}.json"
                if file.exists():
                    continue
                began = time.monotonic()
                found = cell(options, dataset, method, seed)
                facts = {
                    "dataset": dataset,
                    "method": method,
                    "seed": seed,
                    "train_rows": options.rows,
                    "epochs": options.epochs,
                    "precision": options.precision,
                    "dropout": options.dropout,
                }
                more = {"seconds": time.monotonic() - began, "environment": environment()}
                write_whole(file, json.dumps({**facts, **found, **more}, indent=2) + "\n")
                print(file, flush=True)


def clock(options: argparse.Namespace) -> None:
    """Times of the whole model and of one attention block, in turns, at shares of the heads."""
    plain, _ = load_base(options.base)
    model = retrofit(load_base(options.base)[0], allocator="order", training_progress=1.0)
    torch.manual_seed(0)
    with torch.no_grad():  # the times do not depend on which heads matter
        for gate in model.gates:
            gate.score.copy_(torch.rand(gate.num_heads))
    plain.eval(), model.eval()
    rows = []
    with torch.inference_mode():
        for batch in options.batches:
            ids = torch.randint(1000, 20000, (batch, options.length))
            mask = torch.ones_like(ids)
            rivals: dict[str, Any] = {"dense": lambda ids=ids, mask=mask: plain(ids, attention_mask=mask)}
            for share in options.shares:
                frozen = freeze(model, share)
                rivals[f"mean:{share:g}"] = lambda s=share, i=ids, m=mask: model(i, m, budget=f"mean:{s}")
                rivals[f"frozen:{share:g}"] = lambda f=frozen, i=ids, m=mask: f(i, m)
            ms = take_turns(rivals, seconds=options.seconds)
            rows += [{"what": "model", "batch": batch, "ways": ms, **speedups(ms)}]
            rows += [{"what": "attention", "batch": batch, **blocks(plain, model, batch, options)}]
    out = {"base": Path(options.base).name, "length": options.length, "rows": rows, "environment": environment()}
    file = Path(options.results) / "time.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(out, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def blocks(plain: Any, model: BudgetedClassifier, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """All attention blocks of a BERT one after the other, on the same hidden states."""
    from budgetformer.nn.allocation import Dial
    from budgetformer.nn.ranking import make_cuts
    from budgetformer.retrofit.attention import Budgets

    x = torch.randn(batch, options.length, model.config.hidden_size)
    theirs = [layer.attention for layer in plain.bert.encoder.layer]
    ours = [layer.attention for layer in model.model.bert.encoder.layer]

    def mine(share: float) -> None:
        budgets = Budgets(None, 1.0, make_cuts(Dial("mean", share), model.order, None))
        for block in ours:
            block(x, budgets=budgets)

    rivals: dict[str, Any] = {"dense": lambda: [block(x) for block in theirs]}
    rivals |= {f"mean:{share:g}": lambda s=share: mine(s) for share in options.shares}
    ms = take_turns(rivals, seconds=options.seconds)
    return {"ways": ms, **speedups(ms)}


def speedups(ms: dict[str, float]) -> dict[str, Any]:
    return {"speedup": {name: ms["dense"] / value for name, value in ms.items() if name != "dense"}}


def cells(results: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(results.glob("*-*-*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def plot(options: argparse.Namespace) -> None:
    """All data sets in one figure, accuracy against the executed share of attention's FLOPs; and a table."""
    found = list(cells(Path(options.results)))
    names = [name for name in LENGTH if any(c["dataset"] == name for c in found)]
    with canvas("curve", "accuracy against executed attention FLOPs", (4.2 * len(names), 3.6)) as (figure, svg):
        for panel, dataset in enumerate(names):
            axes = figure.add_subplot(1, len(names), panel + 1)
            for method in METHODS:
                mine = [c["points"] for c in found if c["dataset"] == dataset and c["method"] == method]
                at = list(zip(*mine, strict=True))
                y = [100 * mean(p["value"] for p in same) for same in at]
                if method in ("dense", "tfidf") and y:
                    axes.axhline(y[0], color="0.4", linestyle="--" if method == "dense" else ":", label=SAID[method])
                elif y:
                    x = [mean(p["attention_flops_ratio"] for p in same) for same in at]
                    axes.plot(x, y, marker="o", markersize=4, label=SAID[method])
            axes.set_title(dataset)
            axes.set_xlabel("attention FLOPs, share of dense")
            axes.set_ylabel("test accuracy, %")
        axes.legend(fontsize="small")
    file = Path(options.results) / "curve.svg"
    write_whole(file, standalone(svg[0]))
    print(file)
    print(
        "| data set | method | dial | accuracy by seed, % | minus dense, points | k/H | attention FLOPs | all FLOPs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dataset, method in itertools.product(names, METHODS):
        mine = [c["points"] for c in found if c["dataset"] == dataset and c["method"] == method]
        for same in zip(*mine, strict=True):
            values = ", ".join(f"{100 * p['value']:.2f}" for p in same)
            gains = ", ".join(f"{100 * p['versus_dense']['value']:+.2f}" for p in same if "versus_dense" in p)
            costs = [f"{mean(p[k] for p in same):.3f}" if k in same[0] else "" for k in COSTS]
            print("|", " | ".join([dataset, SAID[method], same[0]["dial"], values, gains, *costs]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, verb in (("run", run), ("time", clock), ("plot", plot)):
        sub = verbs.add_parser(name)
        sub.set_defaults(verb=verb)
        sub.add_argument("--results", default="docs/results/retrofit")
        sub.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.375, 0.5, 0.75])
        if name != "plot":
            sub.add_argument("--base", required=True)
        if name == "run":
            sub.add_argument("--data-dir")
            sub.add_argument("--runs", default="runs/retrofit")
            sub.add_argument("--datasets", nargs="+", default=list(LENGTH))
            sub.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
            sub.add_argument("--seeds", type=int, default=2)
            sub.add_argument("--rows", type=int, default=10000)
            sub.add_argument("--test-rows", type=int, help="so many, drawn once (default: all)")
            sub.add_argument("--epochs", type=int, default=2)
            sub.add_argument("--lr", type=float, default=1e-4)
            sub.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of training and tests")
            sub.add_argument("--dropout", type=float, help="of encoder and attention (default: the base's own)")
            sub.add_argument("--also", nargs="*", default=["full"], help="more dials for the trained methods")
        if name == "time":
            sub.add_argument("--length", type=int, default=128)
            sub.add_argument("--batches", type=int, nargs="+", default=[1, 32])
            sub.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    quiet_libraries()
    options.verb(options)


if __name__ == "__main__":
    main()

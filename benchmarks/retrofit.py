"""Pretrained encoders with head budgets against dense, pruned and random heads: one JSON a cell, resumable.

    python benchmarks/retrofit.py run --base DIR --data-dir DIR [--datasets ag_news imdb snli] [--seeds 2]
    python benchmarks/retrofit.py time --base DIR [--length 128]
    python benchmarks/retrofit.py plot

`run` writes docs/results/retrofit/DATASET-METHOD-SEED.json and skips what is there; runs themselves go on where they
were interrupted. All methods start from the same fine-tuned dense model and are trained on for equally long:
  dense     the fine-tuned model (`start`), and the same trained on with all heads
  budgeted  heads ranked across layers, from which each input may depart
  static    the same without what the input adds
  paper     the paper's gates, w = s H p
  random    a random order that is not learned
  michel    the order by gradient importance, applied to `dense`; and `michel-tuned`, trained on with that order
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
from budgetformer.data import DataSource, Encoded, encode, load_tokenizer, open_data
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
    "budgeted": {"model": {"allocator": "ranked"}},
    "static": {"model": {"allocator": "order"}},
    "paper": {"model": {"allocator": "learned"}},
    "random": {"model": {"allocator": "order", "learn_order": False}, "ranking": "random"},
    "michel-tuned": {"model": {"allocator": "order", "learn_order": False}},
}
SAID = {
    "dense": "dense",
    "budgeted": "budgeted, by input",
    "static": "learned order, same for all",
    "paper": "the paper's gates",
    "random": "random heads, trained",
    "michel-tuned": "gradient importance, trained",
    "michel": "gradient importance",
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


def test_rows(options: argparse.Namespace, dataset: str, labels: list[str], tokenizer: Any) -> Encoded:
    """All test rows, or so many drawn once."""
    data = replace(open_data(DataSource(dataset, data_dir=options.data_dir, offline=True)), labels=labels)
    whole = encode(data.splits["test"], data, tokenizer, LENGTH.get(dataset, 128))
    return rows_of(whole, some_rows(whole, options.test_rows))


def recipe(options: argparse.Namespace, dataset: str, base: Path | str, **changes: Any) -> Recipe:
    words = {"max_length": LENGTH.get(dataset, 128), "epochs": options.epochs, "learning_rate": options.lr, **changes}
    return Recipe.make(base=str(base), **words)


def points(model: Any, encoded: Encoded, dials: list[str], dense: Path) -> list[dict[str, Any]]:
    """The curve on the test rows: what it scored, what it executed, and its difference from `dense`, row by row."""
    found = []
    for dial in dials:
        outcome = run_model(model, encoded, dial)
        e = summarize(outcome, encoded, model.config, split="test", dial=dial)
        cost = {k: e.cost[k] for k in ("flops_ratio", "attention_flops_ratio", "flops_per_text")}
        point = {"dial": dial, **e.quality["accuracy"], "k_over_h": e.budget["k_over_h"], **cost}
        right = outcome.logits.argmax(1) == encoded.labels
        if dense.exists():
            gain = over_rows(right - np.load(dense).astype(float))
            point["versus_dense"] = {"value": gain.value, "low": gain.low, "high": gain.high}
        else:
            np.save(dense, right)
        found.append(point)
    return found


def cell(options: argparse.Namespace, dataset: str, method: str, seed: int) -> dict[str, Any]:
    """One method on one data set with one seed."""
    runs = Path(options.runs) / dataset / str(seed)
    if method == "tfidf":
        return {"points": [tfidf(options, dataset)]}
    if method == "dense":
        begun = recipe(options, dataset, options.base, dense_epochs=options.epochs, model={"allocator": "all"})
        resumed(source(options, dataset), begun, runs / "dense", seed)
    elif method in TRAINED:
        tuned = recipe(options, dataset, runs / "dense" / "baseline", dense_epochs=0, **TRAINED[method])
        resumed(source(options, dataset), tuned, runs / method, seed)
    tokenizer, dense = load_tokenizer(runs / "dense", offline=True), runs / "dense-right.npy"
    labels = open_data(source(options, dataset)).labels
    test = test_rows(options, dataset, labels, tokenizer)
    shares = [f"{share:g}" for share in options.shares]
    if method == "dense":
        trained = points(load_model(runs / "dense"), test, ["full"], dense)
        return {"points": trained, "start": points(load_model(runs / "dense" / "baseline"), test, ["full"], dense)}
    if method == "frozen":
        budgeted = load_model(runs / "budgeted")
        found = [points(freeze(budgeted, float(s)), test, ["learned"], dense)[0] for s in shares]
        return {"points": [point | {"dial": f"frozen:{s}"} for s, point in zip(shares, found, strict=True)]}
    if method == "michel":
        start = load_model(runs / "dense")
        assert isinstance(start, BudgetedClassifier)
        model = retrofit(start.plain().eval(), allocator="order")
        data = open_data(source(options, dataset))
        rank_heads(model, encode(data.splits["train"], data, tokenizer, LENGTH.get(dataset, 128)))
        return {"points": points(model, test, [f"mean:{s}" for s in shares], dense)}
    mode = "fixed" if method == "paper" else "mean"
    dials = [*(f"{mode}:{s}" for s in shares), "full"]
    return {"points": points(load_model(runs / method), test, dials, dense)}


def resumed(data: DataSource, chosen: Recipe, folder: Path, seed: int) -> None:
    train(data, chosen, folder, seed=seed, resume=True)


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
                facts = {"dataset": dataset, "method": method, "seed": seed, "train_rows": options.rows}
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
        if name == "time":
            sub.add_argument("--length", type=int, default=128)
            sub.add_argument("--batches", type=int, nargs="+", default=[1, 32])
            sub.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    quiet_libraries()
    options.verb(options)


if __name__ == "__main__":
    main()

"""Pretrained encoders with head budgets against dense, pruned and random heads: one JSON a cell, resumable.

    python benchmarks/retrofit.py run --base DIR [--data-dir DIR] [--datasets ag_news imdb snli] [--seeds 0 1]
    python benchmarks/retrofit.py time [--data-dir DIR] [--batches 1 32]
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
`time` compares whole models and their attention blocks with Hugging Face's own, which uses SDPA, in one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from budgetformer.cost.measure import take_turns
from budgetformer.data.batches import collate
from budgetformer.data.dataset import DataSet, open_data
from budgetformer.data.locate import DEMOS, NAMED, DataSource
from budgetformer.data.tokenizer import load_tokenizer
from budgetformer.data.tokens import TokenTable, encode_split
from budgetformer.dial import Dial
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.evaluate import is_correct, proportion, summarize
from budgetformer.models.importance import rank_heads
from budgetformer.models.model import BudgetFormerForSequenceClassification as Model
from budgetformer.models.model import retrofit
from budgetformer.models.sites import Budgets
from budgetformer.nn.ranking import resolve_budget
from budgetformer.report.figures import canvas
from budgetformer.runs.files import write_text
from budgetformer.runs.provenance import environment
from budgetformer.training.pretrained import sample_batches
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import train_run
from budgetformer_reproduction.drawing import standalone
from budgetformer_reproduction.probes import some_rows
from budgetformer_reproduction.statistics import over_rows

VALIDATION_ROWS = 1000
LENGTH = {"ag_news": 128, "imdb": 256, "snli": 64}
TARGET = {"target_budget": 0.25}
ORDER = {"kind": "order", **TARGET}
TRAINED: dict[str, dict[str, Any]] = {
    "dense": {"gates": {"kind": "all"}, "distill_weight": 0, "distill_layers": 0},
    "budgeted": {"gates": {"kind": "ranked", **TARGET}},
    "static": {"gates": ORDER},
    "paper": {"gates": {"kind": "learned", **TARGET}},
    "random": {"gates": {**ORDER, "learn_order": False}},
    "michel-tuned": {"gates": {**ORDER, "learn_order": False}},
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
LINES = {"start": "--", "dense": "-.", "tfidf": ":"}
CURVES = [method for method in METHODS if method not in LINES]
COLORS = dict(zip(CURVES, ("C0", "C2", "C3", "C4", "C5", "C1", "C6", "C8"), strict=True))
COSTS = ("k_over_h", "attention_flops_ratio", "flops_ratio")


def opened(options: argparse.Namespace, dataset: str, limit: int | None = None) -> DataSet:
    """A named data set, from the folder that was given or from the hub; or a demo's, from its package."""
    folder, demo = options.data_dir, f"demo:{dataset}"
    name = demo if demo in DEMOS and dataset not in NAMED else dataset
    return open_data(DataSource(name, data_dir=folder, limit=limit, offline=folder is not None))


def source(options: argparse.Namespace, dataset: str) -> DataSource:
    """The training rows and some validation rows, in files: the test rows are for `points` alone."""
    folder = Path(options.runs) / dataset / "data"
    if not folder.exists():
        data = opened(options, dataset, options.rows)
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
    dropout = {"dropout": options.dropout, "attention_dropout": options.dropout}
    words["model"] = {**words["model"], **dropout, "exits": None}
    return Recipe.make(base=str(base), **words)


class TestRows:
    """The test rows, all or so many drawn once, and which of them each dense model got right."""

    def __init__(self, options: argparse.Namespace, dataset: str, seed: int) -> None:
        self.runs = Path(options.runs) / dataset / str(seed)
        self.precision = options.precision
        self.tokenizer = load_tokenizer(self.runs / "start", offline=True).backend_tokenizer
        labels = open_data(source(options, dataset)).labels
        data = replace(opened(options, dataset), labels=labels)
        complete = encode_split(data.splits["test"], data, self.tokenizer, LENGTH.get(dataset, 128))
        self.rows = some_rows(complete, options.test_rows)
        self.all, self.encoded = len(complete), complete.select(self.rows)

    def point(self, model: Any, dial: str, name: str | None = None) -> dict[str, Any]:
        """What the model scored and executed, and its differences from the dense models, row by row."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            scores = score(TorchEngine(model), self.encoded, dial)
        e = summarize(scores, model.config.spec, split="test", dial=dial)
        cost = {k: e.cost[k] for k in ("flops_ratio", "attention_flops_ratio", "flops_per_text")}
        k_over_h = e.budget["k_over_h"]
        point = {"dial": dial, "rows": len(self.rows), **e.quality["accuracy"], "k_over_h": k_over_h, **cost}
        right = np.full(self.all, np.nan)
        right[self.rows] = is_correct(scores)
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
        dense = {"gates": {"kind": "all"}, "distill_weight": 0}
        chosen = recipe(options, dataset, options.base, dense_epochs=0, model=dense)
        train_run(data, chosen, runs / "start", seed=seed, resume=True, evaluate=False)
    elif method in TRAINED:
        ranking = "random" if method == "random" else "importance"
        model = {"distill_layers": 1.0, **TRAINED[method]}
        chosen = recipe(options, dataset, runs / "start", dense_epochs=0, ranking=ranking, model=model)
        train_run(data, chosen, runs / method, seed=seed, resume=True, evaluate=False)
    trained = time.monotonic() - began
    test = TestRows(options, dataset, seed)
    shares = [f"{share:g}" for share in options.shares]
    if method in ("start", "dense"):
        result = [test.point(Model.from_pretrained(runs / method), "full", method)]
    elif method == "frozen":
        model = Model.from_pretrained(runs / "budgeted")
        result = [test.point(model.freeze(float(s)), "learned") | {"dial": f"frozen:{s}"} for s in shares]
    elif method in ("michel", "untrained"):
        start = Model.from_pretrained(runs / ("dense" if (runs / "dense").exists() else "start"))
        pruned, rows = retrofit(start.plain().eval(), gates={"kind": "order"}), open_data(data)
        seen = encode_split(rows.splits["train"], rows, test.tokenizer, LENGTH.get(dataset, 128))
        sample = sample_batches(seen, pruned, rows=1024)
        rank_heads(pruned, sample, ranking="random" if method == "untrained" else "importance", seed=seed)
        result = [test.point(pruned, f"mean:{s}") for s in shares]
    else:
        mode = "fixed" if method == "paper" else "mean"
        model = Model.from_pretrained(runs / method)
        result = [test.point(model, dial) for dial in (*(f"{mode}:{s}" for s in shares), *options.also)]
    return {"points": result, "training_seconds": trained}


def fit_tfidf(texts: list[str], labels: list[Any]) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    return make_pipeline(vectorizer, LogisticRegression(C=10, max_iter=300)).fit(texts, labels)


def tfidf(options: argparse.Namespace, dataset: str) -> dict[str, Any]:
    """The floor that any encoder must pass."""
    data = opened(options, dataset, options.rows)

    def rows(split: str) -> tuple[list[str], list[Any]]:
        examples = list(data.splits[split].examples())
        return [f"{e.text} {e.text_pair or ''}" for e in examples], [e.label for e in examples]

    model = fit_tfidf(*rows("train"))
    texts, labels = rows("test")
    right = int((model.predict(texts) == labels).sum())
    return {"dial": "tfidf", **proportion(right, len(labels))}


def run_cells(options: argparse.Namespace, cell: Any, **facts: Any) -> None:
    """Compute each cell that has no file yet, and write it with what it was made of; another such file is refused."""
    results, encoder = Path(options.results), [facts["encoder"]] if "encoder" in facts else []
    results.mkdir(parents=True, exist_ok=True)
    for seed, dataset, method in itertools.product(options.seeds, options.datasets, options.methods):
        file = results / f"{'-'.join([dataset, *encoder, method, str(seed)])}.json"
        about = {"dataset": dataset, "method": method, "seed": seed, "train_rows": options.rows, **facts}
        about |= {name: getattr(options, name) for name in ("epochs", "precision", "dropout")}
        if file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            for name, value in about.items():
                if known.get(name, value) != value:
                    sys.exit(f"{file} has {name} {known[name]}, not {value}: give another --results")
            continue
        began = time.monotonic()
        about |= cell(options, dataset, method, seed)
        about |= {"seconds": time.monotonic() - began, "environment": environment()}
        write_text(file, json.dumps(about, indent=2) + "\n")
        print(file, flush=True)


def run(options: argparse.Namespace) -> None:
    run_cells(options, cell)


def clock(options: argparse.Namespace) -> None:
    """Times of the trained models of seed 0 and of their attention blocks, in turns, on texts of the median length."""
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    for dataset in options.datasets:
        runs, rows = Path(options.runs) / dataset / "0", []
        start, model = Model.from_pretrained(runs / "start"), Model.from_pretrained(runs / "budgeted")
        plain, tokenizer = start.plain().eval(), load_tokenizer(runs / "start", offline=True)
        data = opened(options, dataset)
        test = encode_split(data.splits["test"], data, tokenizer.backend_tokenizer, LENGTH.get(dataset, 128))
        frozen = {f"frozen:{share:g}": model.freeze(share) for share in options.shares}
        for batch in options.batches:
            ids, types = median_texts(test, batch)
            tokens = ids.shape[1]
            with torch.inference_mode():
                executed = {}
                for share in options.shares:
                    out = model(ids, token_type_ids=types, budget=f"mean:{share}")
                    heads = torch.stack([a.heads for a in out.allocations]).float().mean()
                    executed[f"mean:{share:g}"] = float(heads / model.config.num_attention_heads)
                ways = {"model": complete(plain, model, frozen, ids, types, options.shares),
                        "attention": blocks(plain, model, ids, types, options.shares)}  # fmt: skip
                for what, rivals in ways.items():
                    ms = take_turns(rivals, seconds=options.seconds)
                    speedup = {name: ms["dense"] / value for name, value in ms.items() if name != "dense"}
                    rows.append(
                        {
                            "what": what,
                            "batch": batch,
                            "tokens": tokens,
                            "ms": ms,
                            "speedup": speedup,
                            "k_over_h": executed,
                        }
                    )
                    print(dataset, what, batch, tokens, {k: round(v, 2) for k, v in speedup.items()}, flush=True)
        out = {"dataset": dataset, "threads": torch.get_num_threads(), "rows": rows, "environment": environment()}
        write_text(results / f"time-{dataset}.json", json.dumps(out, indent=2) + "\n")


def median_texts(test: TokenTable, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and segments of texts of the median length, cut to one length: no padding on either side."""
    by_length = np.argsort(test.lengths, kind="stable")
    first = (len(by_length) - batch) // 2
    inputs = collate(test, by_length[first : first + batch], 0).tensors()
    tokens = int(inputs["attention_mask"].sum(dim=1).min())
    ids = inputs["input_ids"][:, :tokens]
    return ids, inputs["token_type_ids"][:, :tokens] if "token_type_ids" in inputs else torch.zeros_like(ids)


def complete(
    plain: Any, model: Any, frozen: dict[str, Any], ids: torch.Tensor, types: torch.Tensor, shares: list[float]
) -> dict[str, Any]:
    """The ways to run the whole model: Hugging Face's own, which uses SDPA, and ours."""
    ways: dict[str, Any] = {"dense": lambda: plain(ids, token_type_ids=types)}
    for share in shares:
        ways[f"mean:{share:g}"] = lambda s=share: model(ids, token_type_ids=types, budget=f"mean:{s}")
    return ways | {name: lambda m=small: m(ids, token_type_ids=types) for name, small in frozen.items()}


def blocks(plain: Any, model: Model, ids: torch.Tensor, types: torch.Tensor, shares: list[float]) -> dict[str, Any]:
    """All attention blocks of a BERT one after the other, each on the states that its model hands it."""
    theirs = [layer.attention for layer in plain.bert.encoder.layer]
    ours = [layer.attention for layer in model.base.bert.encoder.layer]
    states = inputs_of(theirs, lambda: plain(ids, token_type_ids=types))

    def way(share: float) -> Any:
        block_inputs = inputs_of(ours, lambda: model(ids, token_type_ids=types, budget=f"mean:{share}"))
        scores = [gate.score for gate in model.ranked_gates]
        cuts = resolve_budget(Dial("mean", share), scores, None, model.config.gates["threshold_offsets"])

        def run() -> None:
            budgets = Budgets(None, 1.0, cuts)
            for block, x in zip(ours, block_inputs, strict=True):
                block(x, budgets=budgets)

        return run

    ways: dict[str, Any] = {"dense": lambda: [block(x) for block, x in zip(theirs, states, strict=True)]}
    return ways | {f"mean:{share:g}": way(share) for share in shares}


def inputs_of(modules: list[Any], call: Any) -> list[torch.Tensor]:
    """What each module is given first while `call` runs."""
    result: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, inputs: result.append(inputs[0])) for m in modules]
    call()
    for hook in hooks:
        hook.remove()
    return result


def cells(results: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(results.glob("*-*-[0-9].json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def relative_times(results: Path, dataset: str) -> dict[str, float]:
    """The time of each way to run the whole model as a share of dense, in the largest batch that was timed."""
    file = results / f"time-{dataset}.json"
    if not file.exists():
        return {}
    timed = [row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if row["what"] == "model"]
    return {name: 1 / gain for name, gain in max(timed, key=lambda row: row["batch"])["speedup"].items()}


def dials(method: str, at: list[Any]) -> list[str]:
    """The timed way that each point of a method runs in: static orders are as fast as a frozen model."""
    way = {"budgeted": "mean", "paper": "not timed"}.get(method, "frozen")
    return [f"{way}:{same[0]['dial'].partition(':')[2]}" for same in at]


def plot(options: argparse.Namespace) -> None:
    """All data sets in one figure, accuracy against executed attention FLOPs and against time; and two tables."""
    results = Path(options.results)
    result = list(cells(results))
    names = [name for name in LENGTH if any(c["dataset"] == name for c in result)]
    with canvas("curve", "accuracy against executed FLOPs and time", (4.2 * len(names), 6.8)) as (figure, svg):
        for panel, dataset in enumerate(names):
            above, below = (figure.add_subplot(2, len(names), panel + 1 + row * len(names)) for row in (0, 1))
            times = relative_times(results, dataset)
            for method in METHODS:
                points = [c["points"] for c in result if c["dataset"] == dataset and c["method"] == method]
                at = list(zip(*points, strict=True))
                y = [100 * mean(p["value"] for p in same) for same in at]
                if method in LINES and y:
                    for axes in (above, below):
                        axes.axhline(y[0], color="0.5", linestyle=LINES[method], label=SAID[method])
                elif y:
                    x = [mean(p["attention_flops_ratio"] for p in same) for same in at]
                    color = COLORS[method]
                    above.plot(x, y, marker="o", markersize=4, label=SAID[method], color=color)
                    clocked = [(times[d], v) for d, v in zip(dials(method, at), y, strict=True) if d in times]
                    if clocked:
                        below.plot(*zip(*clocked, strict=True), marker="o", markersize=4, color=color)
            above.set_title(dataset)
            below.locator_params(axis="x", nbins=5)
            above.set_xlabel("attention FLOPs, share of dense")
            below.set_xlabel("time of the whole model, share of dense")
            for axes in (above, below):
                axes.set_ylabel("test accuracy, %")
        legends = (axes.get_legend_handles_labels() for axes in figure.axes)
        shown = {label: handle for pair in legends for handle, label in zip(*pair, strict=True)}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4)
    file = results / "curve.svg"
    write_text(file, standalone(svg[0]))
    print(file)
    print("| data set | method | dial | accuracy, % | minus start, points | k/H | attention FLOPs | all FLOPs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dataset, method in itertools.product(names, METHODS):
        points = [c["points"] for c in result if c["dataset"] == dataset and c["method"] == method]
        for same in zip(*points, strict=True):
            values = ", ".join(f"{100 * p['value']:.2f}" for p in same)
            gains = ", ".join(f"{100 * p['versus_start']['value']:+.2f}" for p in same if "versus_start" in p)
            costs = [f"{mean(p[k] for p in same):.3f}" if k in same[0] else "" for k in COSTS]
            print("|", " | ".join([dataset, SAID[method], same[0]["dial"], values, gains, *costs]), "|")
    print("\n| data set | what | batch x tokens | by input, 1/4 | by input, 1/2 | frozen, 1/4 | frozen, 1/2 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for file in sorted(results.glob("time-*.json")):
        timed = json.loads(file.read_text(encoding="utf-8"))
        for row in timed["rows"]:
            gains = [row["speedup"].get(way) for way in ("mean:0.25", "mean:0.5", "frozen:0.25", "frozen:0.5")]
            shown = ["" if gain is None else f"{gain:.2f}x" for gain in gains]
            print("|", " | ".join([timed["dataset"], row["what"], f"{row['batch']} x {row['tokens']}", *shown]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, verb in (("run", run), ("time", clock), ("plot", plot)):
        sub = verbs.add_parser(name)
        sub.set_defaults(verb=verb)
        sub.add_argument("--results", default="docs/results/retrofit")
        sub.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.375, 0.5, 0.75])
        if name != "plot":
            sub.add_argument("--data-dir", help="a folder with a folder for each data set (default: the hub)")
            sub.add_argument("--runs", default="runs/retrofit")
            sub.add_argument("--datasets", nargs="+", default=list(LENGTH))
        if name == "run":
            sub.add_argument("--base", required=True)
            sub.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
            sub.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
            sub.add_argument("--rows", type=int, default=10000)
            sub.add_argument("--test-rows", type=int, help="so many, drawn once (default: all)")
            sub.add_argument("--epochs", type=int, default=2)
            sub.add_argument("--lr", type=float, default=1e-4)
            sub.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of training and tests")
            sub.add_argument("--dropout", type=float, help="of encoder and attention (default: the base's own)")
            sub.add_argument("--also", nargs="*", default=["full"], help="more dials for the trained methods")
        if name == "time":
            sub.add_argument("--batches", type=int, nargs="+", default=[1, 32])
            sub.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    options.verb(options)


if __name__ == "__main__":
    main()

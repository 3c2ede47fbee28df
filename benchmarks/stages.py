"""Words and exits in pretrained encoders against the dense model trained equally long: one JSON a cell, resumable.

    python benchmarks/stages.py run --base DIR [--data-dir DIR] [--datasets ag_news imdb snli] [--seeds 0 1 2]
                                        [--widths 0.4 0.5]
    python benchmarks/stages.py time --base DIR [--data-dir DIR] [--method both] [--widths 0.4 0.5]
    python benchmarks/stages.py plot

`run` writes docs/results/stages/DATASET-ENCODER-METHOD-SEED.json and skips what is there, whatever --widths says; runs
themselves go on where they were interrupted. Trained methods start from the same fine-tuned dense model and are trained
on for equally long:
  start     the fine-tuned dense model (not scored)
  dense     the same, trained on: the model to compare with
  staged    words and exits added; scored at `learned`, at shares of the dense cost, in full, and with every text
            stopped at one stage (static truncation, words included)
  short     a smaller dense model: the encoder's first third of layers, fine-tuned for as many steps as `dense`
  heads     no words and exits, but heads in a learned order, distilled from `start`; scored at shares of their cost
  groups    the same with groups of feed-forward neurons alone
  narrow    the same with heads and groups in one order
  untrained the order of `narrow` before training, applied to `start`
  chosen    `narrow`, each text with heads and groups of its own
  both      `narrow` with words and exits: half as wide, and each text as far as it must; scored as `staged` at that
            width, and with every text to the end at several widths
  taught    `both`, with the data set's other training rows as unlabelled ones: one epoch
  dense-taught  `dense` with those rows, for as many steps as `taught`
  short-distilled  a smaller dense model: the first half of the layers of `start`, trained on with labels and its logits
  tfidf     TF-IDF of words and pairs of them with logistic regression
Every point is compared with `dense` of its seed row by row, where --runs has it.
`time` compares a method's model, frozen at some widths, every text through all layers, with Hugging Face's own, which
uses SDPA, on texts of the median length. Speed from text to label is `budgetformer bench RUN --what engines`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from retrofit import median_texts, opened, run_cells, source, tfidf
from transformers import AutoConfig, AutoModelForSequenceClassification

from budgetformer.cost.measure import take_turns
from budgetformer.data.dataset import open_data
from budgetformer.data.tokenizer import load_tokenizer
from budgetformer.data.tokens import encode_split
from budgetformer.dial import Dial
from budgetformer.engine.scores import Scores, cost_shares, leave_early, score, stop_at
from budgetformer.engine.torch import TorchEngine
from budgetformer.evaluate import cost_of, is_correct, proportion
from budgetformer.exits import same_answer
from budgetformer.models.importance import rank_heads
from budgetformer.models.model import BudgetFormerForSequenceClassification as Model
from budgetformer.models.model import retrofit
from budgetformer.report.figures import canvas
from budgetformer.runs.files import locked, write_text
from budgetformer.runs.provenance import environment
from budgetformer.training.loop import Fit
from budgetformer.training.prepare import prepare
from budgetformer.training.pretrained import build_dense, sample_batches
from budgetformer.training.recipe import Recipe
from budgetformer.training.record import identity_of
from budgetformer.training.run import make_accelerator, train_run
from budgetformer_reproduction.drawing import standalone
from budgetformer_reproduction.statistics import over_rows

GROUPS: dict[str, Any] = {"kind": "order", "group_size": 64}
NARROW: dict[str, dict[str, Any]] = {
    "heads": {"kind": "order"}, "groups": {**GROUPS, "keep_heads": True}, "narrow": GROUPS,
    "untrained": GROUPS, "chosen": {**GROUPS, "kind": "ranked"}, "both": GROUPS, "taught": GROUPS,
}  # fmt: skip
METHODS = ("start", "dense", "staged", "short", *NARROW, "dense-taught", "short-distilled", "tfidf")
EXITS, TAUGHT = ("staged", "both", "taught"), ("taught", "dense-taught")
LENGTH = {"ag_news": 128, "imdb": 128, "snli": 64}  # 128 is the default of --base
SHARES = (0.05, 0.1, 0.13, 0.15, 0.2, 0.3, 0.43, 0.5, 0.65, 0.8)
WIDTHS = (0.3, 0.4, 0.5, 0.75)


def recipe(options: argparse.Namespace, dataset: str, base: Path | str, epochs: int, **model: Any) -> Recipe:
    dropout = {"dropout": options.dropout, "attention_dropout": options.dropout}
    return Recipe.make(
        base=str(base), max_length=LENGTH.get(dataset, 128), epochs=epochs, learning_rate=options.lr, dense_epochs=0,
        precision=options.precision, model={"distill_weight": 0, **dropout, **model},
    )  # fmt: skip


def shortened(base: Path, target: Path, part: int) -> Path:
    """An encoder with the first `1 / part` of its layers, in a directory of its own."""
    if not target.exists():
        model: Any = AutoModelForSequenceClassification.from_pretrained(base)
        model = model.plain() if isinstance(model, Model) else model
        layers = max(1, model.config.num_hidden_layers // part)
        model.bert.encoder.layer = model.bert.encoder.layer[:layers]
        model.config.num_hidden_layers = layers
        unfinished = target.with_name(f"{target.name}.part")
        model.save_pretrained(unfinished)
        for file in base.glob("*token*"):
            shutil.copy(file, unfinished)
        unfinished.rename(target)
    return target


class TestRows:
    """All test rows, and which of them the dense model got right."""

    def __init__(self, options: argparse.Namespace, dataset: str, runs: Path) -> None:
        self.runs, self.precision = runs, options.test_precision
        tokenizer = load_tokenizer(options.base, offline=True)
        data = replace(opened(options, dataset), labels=open_data(source(options, dataset)).labels)
        self.table = encode_split(data.splits["test"], data, tokenizer.backend_tokenizer, LENGTH.get(dataset, 128))

    def score(self, model: Model, dial: str) -> Scores:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            return score(TorchEngine(model), self.table, dial)

    def point(self, name: str, scores: Scores, cost: float, **more: Any) -> dict[str, Any]:
        """Accuracy and cost, and the difference from the dense model that was trained as long."""
        right = is_correct(scores)
        assert right is not None
        point = {"point": name, **proportion(int(right.sum()), len(right)), "cost": cost, **more}
        if name == "dense":
            np.save(self.runs / "right-dense.npy", right)
        elif (file := self.runs / "right-dense.npy").exists():
            gain = over_rows(right.astype(float) - np.load(file))
            point["versus_dense"] = {"value": gain.value, "low": gain.low, "high": gain.high}
        return point

    def staged(self, model: Model, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Every budget, from one pass through all stages; `prefix` goes before its name."""
        config, stages = model.config.spec, model.config.stages
        scores = self.score(model, "exit:0")
        assert scores.stage_logits is not None
        full = scores.stage_logits[:, -1]
        budgets = {"learned": "learned", **{f"{share:g}": f"{share:g}" for share in SHARES}}
        budgets |= {} if model.config.groups else {"full": "full"}  # in full it is wider than what was scored
        ways = {name: leave_early(scores, stages, stages.limit(Dial.parse(dial))) for name, dial in budgets.items()}
        for stage, name in enumerate(stages.names):
            ways[f"everyone at {name}"] = stop_at(scores, stages, np.full(len(full), stage))
        for name, chosen in ways.items():
            assert chosen.exits is not None
            shares = [float((chosen.exits == stage).mean()) for stage in range(len(stages.names))]
            differs = float((~same_answer(chosen.logits, full, config.task)).mean())
            cost = float(cost_shares(chosen, config).mean())
            yield self.point(
                prefix + name, chosen, cost, exits=dict(zip(stages.names, shares, strict=True)), disagreement=differs
            )


def cell(options: argparse.Namespace, dataset: str, method: str, seed: int) -> dict[str, Any]:
    """One method on one data set with one seed."""
    if method == "tfidf":
        return {"points": [{**tfidf(options, dataset), "point": "tfidf"}]}
    began, runs = time.monotonic(), Path(options.runs) / dataset / Path(options.base).name / str(seed)
    model = ranked(options, dataset, runs / "start") if method == "untrained" else train(options, dataset, method, runs)
    trained = time.monotonic() - began
    if method == "start":
        return {"points": [], "training_seconds": trained}
    test = TestRows(options, dataset, runs)
    points = list(test.staged(model, "" if method == "staged" else f"{method} ")) if method in EXITS else []
    if method in NARROW:
        scored = ((share, test.score(model, f"mean:{share}")) for share in options.widths)
        points += [test.point(f"{method}, width {share:g}", scores, cost_of(scores, model.config.spec)["flops_ratio"])
                   for share, scores in scored]  # fmt: skip
    elif not points:
        layers = model.config.num_hidden_layers / AutoConfig.from_pretrained(options.base).num_hidden_layers
        points = [test.point(method, test.score(model, "full"), layers)]
    return {"points": points, "training_seconds": trained}


def ranked(options: argparse.Namespace, dataset: str, start: Path) -> Model:
    """A dense model with its units in the order of their importance."""
    model, rows = retrofit(Model.from_pretrained(start).plain(), gates=GROUPS), open_data(source(options, dataset))
    tokenizer = load_tokenizer(start, offline=True).backend_tokenizer
    table = encode_split(rows.splits["train"], rows, tokenizer, LENGTH.get(dataset, 128))
    model.config.gates["price_tokens"] = round(float(table.lengths.mean()))
    rank_heads(model.eval(), sample_batches(table, model, rows=1024))
    return model


def train(options: argparse.Namespace, dataset: str, method: str, runs: Path) -> Model:
    """Train a method, or go on with it."""
    data, dense, epochs = source(options, dataset), {"gates": {"kind": "all"}}, options.epochs
    if method == "start":
        chosen = recipe(options, dataset, options.base, epochs, **dense, exits=None)
    elif method == "short":
        base = shortened(Path(options.base), Path(options.runs) / f"{Path(options.base).name}-short", 3)
        chosen = recipe(options, dataset, base, 2 * epochs, **dense, exits=None)
    elif method == "short-distilled":
        return distilled(options, dataset, runs)
    else:
        of_model: dict[str, Any] = {**dense, "exits": {"start": 0.0} if method in EXITS else None}
        if method in NARROW:
            of_model["gates"] = {"target_budget": 0.5, "budget_low": 0.4, **NARROW[method]}
            of_model |= {"distill_weight": 1.0, "distill_layers": 1.0}
        if method in TAUGHT:
            of_model["distill_weight"] = 1.0
            data, epochs = replace(data, unlabelled=str(unlabelled(options, dataset))), 1
        chosen = recipe(options, dataset, runs / "start", epochs, **of_model)
    train_run(data, chosen, runs / method, seed=int(runs.name), resume=True, evaluate=False)
    return Model.from_pretrained(runs / method)


def unlabelled(options: argparse.Namespace, dataset: str) -> Path:
    """All training rows of a data set, without their labels."""
    file = Path(options.runs) / dataset / "unlabelled.jsonl"
    if not file.exists():
        rows = ({"text": e.text} | ({} if e.text_pair is None else {"text_pair": e.text_pair})
                for e in opened(options, dataset).splits["train"].examples())  # fmt: skip
        write_text(file, lines(rows))
    return file


def distilled(options: argparse.Namespace, dataset: str, runs: Path) -> Model:
    """The first half of the layers of `start`, trained on from labels and its logits, or gone on with.

    Other runs learn from their own base, this one from a larger model: there are checkpoints, but no run directory.
    """
    base, folder, seed = shortened(runs / "start", runs / "start-short", 2), runs / "short-distilled", int(runs.name)
    chosen = recipe(options, dataset, base, options.epochs, gates={"kind": "all"}, exits=None, distill_weight=1.0)
    prepared = prepare(source(options, dataset), chosen, folder, partial(print, file=sys.stderr))
    teacher = Model.from_pretrained(runs / "start")
    teacher.config.temperatures = []
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
        logits = score(TorchEngine(teacher), prepared.splits["train"]).logits
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    with locked(folder, "training"):
        fit = Fit(
            build_dense(prepared, chosen).model, prepared.splits["train"], prepared.splits["validation"], chosen,
            folder, identity_of(prepared, chosen, seed), seed=seed, accelerator=make_accelerator(chosen),
            teacher=logits,
        )  # fmt: skip
        fit.run(resume=True)
    return fit.model


def lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def run(options: argparse.Namespace) -> None:
    facts = {"encoder": Path(options.base).name, "lr": options.lr, "test_precision": options.test_precision}
    run_cells(options, cell, **facts)


def clock(options: argparse.Namespace) -> None:
    """Times of the first seed's model, frozen, and of Hugging Face's, in turns."""
    for dataset in options.datasets:
        runs = Path(options.runs) / dataset / Path(options.base).name / str(options.seeds[0])
        plain = Model.from_pretrained(runs / "start").plain().eval()
        model, test, rows = Model.from_pretrained(runs / options.method), TestRows(options, dataset, runs), []
        frozen = {f"{width:g}": model.freeze(width) for width in options.widths}
        for batch in options.batches:
            ids, types = median_texts(test.table, batch)
            all_stages = {"budget": "exit:0", "words_logits": torch.zeros(batch, model.config.labels)}
            inputs = {"input_ids": ids, "token_type_ids": types}
            ways = {"dense": partial(plain, **inputs)}
            ways |= {n: partial(m, **inputs, **(all_stages if m.config.exits else {})) for n, m in frozen.items()}
            with torch.inference_mode():
                ms = take_turns(ways, seconds=options.seconds)
            speedup = {name: ms["dense"] / value for name, value in ms.items() if name != "dense"}
            rows.append({"batch": batch, "tokens": ids.shape[1], "ms": ms, "speedup": speedup})
            print(dataset, batch, ids.shape[1], {k: round(v, 2) for k, v in speedup.items()}, flush=True)
        out = {"dataset": dataset, "method": options.method, "rows": rows, "environment": environment()}
        write_text(Path(options.results) / f"time-{dataset}.json", json.dumps(out, indent=2) + "\n")


def plot(options: argparse.Namespace) -> None:
    """The table of all points, seeds side by side, and accuracy against cost in curve.svg."""
    results = Path(options.results)
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*-[0-9].json"))]
    order = {method: place for place, method in enumerate(METHODS)}
    points: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for one in sorted(cells, key=lambda c: (c["dataset"], c["encoder"], order[c["method"]], c["seed"])):
        for point in one["points"]:
            encoders = points.setdefault((one["dataset"], one["encoder"]), {})
            encoders.setdefault(point["point"], []).append({**point, "seed": one["seed"]})
    print("| data set | encoder | point | accuracy, % | minus dense, points | cost | other label than full, % |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for names, rows in points.items():
        dense = {p["seed"]: p["value"] for p in rows.get("dense", [])}
        for name, seeds in rows.items():
            values = ", ".join(f"{100 * p['value']:.2f}" for p in seeds)
            minus = [p["value"] - dense[p["seed"]] for p in seeds if name != "dense" and p["seed"] in dense]
            gains = ", ".join(f"{100 * gain:+.2f}" for gain in minus)
            cost = ", ".join(f"{p['cost']:.3f}" for p in seeds if "cost" in p)
            other = ", ".join(f"{100 * p['disagreement']:.2f}" for p in seeds if "disagreement" in p)
            print("|", " | ".join([*names, name, values, gains, cost, other]), "|")
    write_text(results / "curve.svg", draw(points))


def draw(points: dict[tuple[str, str], dict[str, list[dict[str, Any]]]]) -> str:
    """One panel per data set and encoder: accuracy against cost, means over seeds."""
    columns = min(3, len(points))
    lines = -(-len(points) // columns)
    with canvas("curve", "accuracy against cost", (3.6 * columns, 3.2 * lines + 0.6)) as (figure, svg):
        for place, ((dataset, encoder), rows) in enumerate(points.items()):
            axes = figure.add_subplot(lines, columns, place + 1)

            def line(names: list[str], rows: dict[str, Any] = rows) -> list[tuple[float, float]]:
                seeds = [rows[name] for name in names if name in rows]
                mean = [(np.mean([p["cost"] for p in s]), 100 * np.mean([p["value"] for p in s])) for s in seeds]
                return sorted((float(x), float(y)) for x, y in mean)

            shares = [f"{share:g}" for share in SHARES]
            budgets = line([*shares, "learned", "full"])
            both, taught = (line([f"{name} {share}" for share in (*shares, "learned")]) for name in ("both", "taught"))
            static = line([name for name in rows if name.startswith("everyone at")])
            narrow = {method: line([name for name in rows if name.startswith(f"{method}, width")]) for method in NARROW}
            for number, (curve, label, style) in enumerate((
                (budgets, "exits", "o-"), (static, "all texts to one stage", "s--"),
                (line(["short", "short-distilled"]), "a smaller dense model", "*"),
                (narrow["heads"], "fewer heads", "v:"), (narrow["groups"], "fewer neurons", ">:"),
                (narrow["narrow"], "fewer heads and neurons", "^:"),
                (narrow["chosen"], "fewer, by text", "<:"), (narrow["untrained"], "fewer, not trained", "x:"),
                (both, "fewer, and exits", "P-"), (taught, "fewer, exits, unlabelled rows", "d-"),
            )):  # fmt: skip
                if curve:
                    axes.plot(*zip(*curve, strict=True), style, color=f"C{number}", markersize=4, label=label)
            for name, label, style in (("dense", "dense", "-"), ("tfidf", "TF-IDF", ":")):
                if name in rows:
                    value = 100 * np.mean([p["value"] for p in rows[name]])
                    axes.axhline(float(value), color="0.5", linestyle=style, label=label)
            if any(narrow.values()) and "dense" in rows:  # some widths are useless: they must not flatten the others
                dense = 100 * np.mean([p["value"] for p in rows["dense"]])
                axes.set_ylim(bottom=max(axes.get_ylim()[0], float(dense) - 14))
            axes.set_title(f"{dataset}, {encoder}")
            axes.set_xlabel("FLOPs, share of dense")
            axes.set_ylabel("test accuracy, %")
        legends = (axes.get_legend_handles_labels() for axes in figure.axes)
        shown = {label: handle for pair in legends for handle, label in zip(*pair, strict=True)}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(4, columns + 1))
    return standalone(svg[0])


def add_training_options(sub: argparse.ArgumentParser, datasets: Iterable[str], epochs: int | None) -> None:
    """What `train` needs to know."""
    sub.add_argument("--base", required=True)
    sub.add_argument("--data-dir", help="a folder with a folder for each data set (default: the hub)")
    sub.add_argument("--runs", default="runs/stages")
    sub.add_argument("--datasets", nargs="+", default=list(datasets))
    sub.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    sub.add_argument("--rows", type=int, default=10000, help="to train on")
    sub.add_argument("--epochs", type=int, default=epochs, help="of `start`, and of what is trained on from it")
    sub.add_argument("--lr", type=float, default=1e-4)
    sub.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of training")
    sub.add_argument("--dropout", type=float, help="of encoder and attention (default: the base's own)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, verb in (("run", run), ("time", clock), ("plot", plot)):
        sub = verbs.add_parser(name)
        sub.set_defaults(verb=verb)
        sub.add_argument("--results", default="docs/results/stages")
        if name != "plot":
            add_training_options(sub, LENGTH, epochs=2)
            sub.add_argument("--test-precision", choices=("fp32", "bf16"), default="fp32")
        if name == "run":
            sub.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
            sub.add_argument(
                "--widths", type=float, nargs="+", default=list(WIDTHS), help="shares of the cost to score models at"
            )
        if name == "time":
            sub.add_argument("--method", choices=sorted(NARROW.keys() - {"untrained"}), default="both")
            sub.add_argument("--widths", type=float, nargs="+", default=[0.4, 0.5])
            sub.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
            sub.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    options.verb(options)


if __name__ == "__main__":
    main()

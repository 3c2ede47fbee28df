"""The sections of a report: how the model learned, how right it is, which heads it runs, what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from budgetformer.evaluate import Evaluation
from budgetformer.report import figures as draw
from budgetformer.report import numbers
from budgetformer.report.kit import Cell, Section, Table
from budgetformer.report.numbers import format_count, format_decimal, format_flops, format_percent
from budgetformer.runs.files import JsonObject, read_json, read_json_lines

_REMEDY = "restore it or train again"
_MATRIX = 20  # classes in a confusion matrix, and pairs where there are more
_HEAT_ROWS = 30  # classes in the heat map
_EXCERPT = 600  # characters of one text that are shown
_PAPERS_COUNT = (
    "One per multiply-accumulate, attention only, projections in full, the predicted s instead of the heads that ran: "
    "comparable with the paper's tables, not with the table above."
)


@dataclass(frozen=True)
class Results:
    """run.json, history.jsonl and evaluation.json of a run, with its dense twin's where one was trained."""

    record: JsonObject
    final: Evaluation  # of the test split, or of validation where there is none
    comparison: list[JsonObject]
    depth: JsonObject | None  # of a model with exits
    dials: list[JsonObject]
    twin: Evaluation | None
    verdict: str | None  # of the paired test against the twin
    history: list[JsonObject]
    twin_history: list[JsonObject]
    dense_training: JsonObject | None  # of a pretrained base: how it was fine-tuned with all heads before

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read what training wrote; a missing or damaged file or key is named."""
        results = read_json(folder / "evaluation.json", _REMEDY)
        split = "test" if results["test"] else "validation"
        evaluations = [
            Evaluation(**{f.name: models[split][f.name] for f in fields(Evaluation)})
            for models in (results, results["baseline"])
            if models
        ]
        record, dense = read_json(folder / "run.json", _REMEDY), folder / "baseline" / "run.json"
        from_base = record["recipe"].get("base") is not None
        versus, twin_history = results["versus_baseline"], folder / "baseline" / "history.jsonl"
        return cls(
            record=record,
            final=evaluations[0],
            comparison=results["comparison"],
            depth=results["depth"],
            dials=results["dials"],
            twin=evaluations[1] if results["baseline"] else None,
            verdict=versus["verdict"] if versus else None,
            history=read_json_lines(folder / "history.jsonl", _REMEDY),
            twin_history=read_json_lines(twin_history, _REMEDY) if twin_history.exists() else [],
            dense_training=read_json(dense, _REMEDY)["training"] if dense.exists() and from_base else None,
        )

    @property
    def metric_name(self) -> str:
        return numbers.METRIC_NAMES[self.final.metric]

    @property
    def is_percent(self) -> bool:
        return self.final.metric in numbers.PERCENT_METRICS

    def format_score(self, value: float) -> str:
        """A score in the unit of the run's metric."""
        return numbers.format_score(value, self.final.metric)


def training(run: Results) -> Section:
    """Loss, validation score and mean budget while training."""
    steps, epochs = ([line for line in run.history if line["kind"] == kind] for kind in ("step", "epoch"))
    twin = [line for line in run.twin_history if line["kind"] == "epoch"]
    if not epochs:
        return Section("training", "How it learned", "No history was recorded for this run, so there are no curves.")
    svgs = [
        draw.curves("loss", "Loss by step", "step", "loss", [
            draw.Curve("training, step", _points(steps, "step", "loss"), draw.GREY, marker=""),
            draw.Curve("training, epoch mean", _points(epochs, "step", "train", "loss"), draw.BLUE),
            draw.Curve("validation", _points(epochs, "step", "validation", "loss"), draw.ORANGE),
        ]),
        draw.curves("score", "Validation score by epoch", "epoch", f"validation {run.metric_name}", [
            draw.Curve("learned budget", _points(epochs, "epoch", "validation", "score"), draw.ORANGE),
            draw.Curve("all heads", _points(epochs, "epoch", "validation", "score_full"), draw.BLUE, ":", "s"),
            draw.Curve("dense twin", _points(twin, "epoch", "validation", "score"), draw.GREY, "--"),
        ], percent=run.is_percent),
        draw.curves("budget", "Mean head budget by epoch", "epoch", "mean budget s", [
            draw.Curve("training", _points(epochs, "epoch", "train", "s_mean"), draw.BLUE),
            draw.Curve("validation", _points(epochs, "epoch", "validation", "s_mean"), draw.ORANGE),
        ]),
    ]  # fmt: skip
    best = [line for line in epochs if line["best"]][-1]
    first, last = (format_decimal(line["validation"]["s_mean"], 2) for line in (epochs[0], epochs[-1]))
    moved = f"went from {first} to {last}" if len(epochs) > 1 else f"was {last}"
    lead = (
        f"The validation {run.metric_name} was best after epoch {best['epoch']} "
        f"({run.format_score(best['validation']['score'])}); meanwhile the mean budget s that the model asks "
        f"for (0 = as few heads as possible, 1 = all) {moved}."
    )
    return Section("training", "How it learned", lead, svgs)


def _points(lines: Sequence[Any], x: str, *keys: str) -> draw.Points:
    values = lines
    for key in keys:
        values = [value[key] for value in values]
    return [line[x] for line in lines], values


def dials(run: Results) -> Section | None:
    """Score against head budget, without retraining."""
    title = "Score against head budget"
    curve = sorted(run.dials, key=lambda point: (point["k_over_h"], point["dial"] == "learned"))
    if not curve:
        if run.depth is not None:  # its budgets are of depth
            return None
        return Section("dials", title, "This model was evaluated at one budget only, so there is no curve.")
    cells = [
        [p["dial"], format_percent(p["k_over_h"]), format_percent(p["flops_ratio"]), run.format_score(p["score"]),
         numbers.format_interval(p["low"], p["high"], run.final.metric) or "not computed"]
        for p in curve
    ]  # fmt: skip
    learned = next(at for at, point in enumerate(curve) if point["dial"] == "learned")
    low, *_, high = (row for at, row in enumerate(cells) if at != learned)
    rows = curve[0]["rows"]
    sample = "the" if rows == run.final.rows else "a sample of"
    note = f"Measured on {sample} {format_count(rows)} rows of the {run.final.split} split."
    if any(point["flops_ratio"] > 1 for point in curve):
        note += " Choosing heads costs a little too, so running all of them exceeds 100\N{NO-BREAK SPACE}%."
    head = ["dial", "heads run", "FLOPs, share of dense", run.metric_name, "95\N{NO-BREAK SPACE}% interval"]
    table = Table("lrrrr", head, cells, note=note, marked=learned)
    svg = draw.dial_curve(
        curve,
        run.twin.score if run.twin and run.twin.rows == rows else None,  # of the same rows
        f"{run.final.split} {run.metric_name}",
        percent=run.is_percent,
        by="flops_ratio" if "groups" in run.final.budget else "k_over_h",  # heads may not be all that is left out
    )
    lead = (
        f"The budget can be changed when predicting, without training again: from {low[1]} of the heads "
        f"({run.metric_name} {low[3]}) to {high[1]} ({high[3]}); left to itself the model runs {cells[learned][1]} and "
        f"scores {cells[learned][3]}."
    )
    return Section("dials", title, lead, [svg], [table], beside=True)


def heads(run: Results) -> Section:
    """Executed heads by layer and class, and the budget asked for."""
    budget = run.final.budget
    layers, s_mean, s_std = (budget[f"{key}_per_layer"] for key in ("k_over_h", "s", "s_std"))
    classes = {c["label"]: c for c in budget.get("by_class", []) if c["rows"]}
    shares = {label: c["k_over_h_per_layer"] for label, c in classes.items()}
    largest = sorted(classes, key=lambda label: -classes[label]["rows"])[:_HEAT_ROWS]
    rows = [_heat("all texts", layers), *(_heat(label, shares[label]) for label in shares if label in largest)]
    left_out = f" Of {len(classes)} classes, the {_HEAT_ROWS} largest." if len(classes) > _HEAT_ROWS else ""
    columns = [f"layer {number}" for number in range(1, len(layers) + 1)]
    note = f"Share of the {budget['heads']} heads that ran (k/H), the mean over texts.{left_out}"
    asked = [
        ["mean s", *(format_decimal(s, 2) for s in s_mean)],
        ["spread between texts (std)", *(format_decimal(s, 2) for s in s_std)],
    ]
    meaning = "s is what the budget net asks for, from 0 to 1; rounding it to whole heads, with a minimum, gives k."
    if "groups" in budget:
        rows.append(_heat("feed-forward groups", budget["groups_run_per_layer"]))
        note += f" Groups: those of {budget['groups']} in each feed-forward layer that ran."
    tables = [
        Table("l" + "c" * (len(layers) + 1), ["", *columns, "mean"], rows, "Heads run", note, marked=0),
        Table("l" + "r" * len(layers), ["", *columns], asked, "Budget asked for", meaning),
    ]
    return Section("heads", "Heads used by layer and class", _most_and_fewest(layers, shares), [], tables)


def _heat(name: str, values: Sequence[float]) -> list[str | Cell]:
    return [name, *(Cell(format_percent(v, 0), v) for v in [*values, fmean(values)])]


def _most_and_fewest(layers: Sequence[float], shares: Mapping[str, Sequence[float]]) -> str:
    ranked = sorted((share, layer) for layer, share in enumerate(layers, 1))
    (bottom, idle), (top, busy) = ranked[0], ranked[-1]
    fewest, most = format_percent(bottom), format_percent(top)
    lead = f"Layer {busy} runs the most heads ({most}) and layer {idle} the fewest ({fewest})"
    if top == bottom:
        lead = f"Every layer runs the same share of its heads ({most})"
    if len(shares) > 1:
        means = {label: fmean(share) for label, share in shares.items()}
        frugal, *_, greedy = sorted(means, key=lambda label: means[label])
        fewest, most = format_percent(means[frugal]), format_percent(means[greedy])
        lead += f"; by class the mean goes from {fewest} (“{frugal}”) to {most} (“{greedy}”)"
    return lead + "."


def mistakes(run: Results) -> Section:
    """The confusion matrix, or the most confused pairs, and the figures of each class."""
    quality, tables = run.final.quality, []
    lead = "This task has no classes to confuse; see the hardest examples below."
    if "per_class" in quality:
        lead = "Each class has its own row below; precision and recall tell false alarms from misses."
    if "confusion" in quality:
        names, confusion = quality["labels"], quality["confusion"]
        pairs = _confused_pairs(names, confusion)
        correct = format_count(sum(row[i] for i, row in enumerate(confusion)))
        lead = f"{correct} of {format_count(run.final.rows)} {run.final.split} texts were answered right"
        if pairs:
            true, answer, n, _ = pairs[0]
            lead += f"; the most common mistake is “{true}” taken for “{answer}” ({n} of them)"
        lead += "."
        head = ["true class", "answer", "texts", "share of the class"]
        note = f"A matrix of {len(names)} classes would not be legible."
        worst = Table("llrr", head, pairs[:_MATRIX], "The most confused pairs", note)
        tables.append(_matrix(names, confusion) if len(names) <= _MATRIX else worst)
    if "per_class" in quality:
        rows = [
            [c["label"], format_count(c["rows"]), format_percent(c["precision"]), format_percent(c["recall"]),
             format_decimal(c["f1"])]
            for c in quality["per_class"]
        ]  # fmt: skip
        tables.append(Table("lrrrr", ["class", "texts", "precision", "recall", "F1"], rows, "Class by class"))
    if "calibration" in quality:
        fitted = quality["calibration"]
        rows = [
            ["as trained", "1", format_percent(fitted["error_before"])],
            ["as given out", numbers.format_value(fitted["temperatures"]), format_percent(fitted["error"])],
        ]
        note = "How far a probability is from the share of such answers that is right, on average. No answer differs."
        tables.append(
            Table("lrr", ["probabilities", "temperature by stage", "calibration error"], rows, "How sure it is", note)
        )
    return Section("mistakes", "Where it goes wrong", lead, [], tables)


def _confused_pairs(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> list[tuple[str, str, str, str]]:
    """(true, predicted, count, share of the true class), most frequent first."""
    cells = [(n, i, j) for i, row in enumerate(confusion) for j, n in enumerate(row) if i != j and n]
    cells.sort(key=lambda cell: -cell[0])
    return [(names[i], names[j], format_count(n), format_percent(n / sum(confusion[i]))) for n, i, j in cells]


def _matrix(names: Sequence[str], confusion: Sequence[Sequence[int]]) -> Table:
    cells = ([Cell(format_count(n) if n else "·", n / max(1, sum(row))) for n in row] for row in confusion)
    rows: list[list[str | Cell]] = [[name, *row] for name, row in zip(names, cells, strict=True)]
    note = "A row is the true class, a column the answer; the stronger the shade, the larger its share of the row."
    return Table("l" + "c" * len(names), ["true \\ answer", *names], rows, "Confusion matrix", note)


def flops(run: Results) -> Section:
    """FLOPs against the dense twin, the ceiling, and the paper's own count."""
    cost = run.final.cost
    ours, dense = cost["flops_per_text"], cost["flops_per_text_dense"]
    share, attention = cost["attention_share_of_dense"], cost["attention_share_of_dense"] * dense
    rows = [
        _against("whole model", ours, dense),
        _against("attention only, gates included", cost["attention_flops_ratio"] * attention, attention),
        _against("same heads, but every projection computed", cost["flops_per_text_paper_style"], dense),
    ]
    if "groups" not in run.final.budget:
        rows.insert(2, _against("ceiling: if attention cost nothing", (1 - share) * dense, dense))
    tokens = format_decimal(cost["mean_tokens"], 1)
    note = f"Counted, two FLOPs per multiply-accumulate, at the real lengths (mean {tokens} tokens)."
    lead = (
        f"A text costs {format_flops(ours)} FLOPs instead of {format_flops(dense)}, {format_percent(ours / dense)} of "
        f"the dense twin; attention is {format_percent(share)} of a dense text's cost at these lengths"
        + (
            "."
            if "groups" in run.final.budget
            else f", so head budgets alone could not go below {format_percent(1 - share)}."
        )
    )
    head = ["this model", "dense twin", "ratio"]
    twin = run.twin.cost["papers_count_per_text"] if run.twin else None
    printed = [_against("the paper's count", cost["papers_count_per_text"], twin)]
    tables = [
        Table("lrrr", ["FLOPs per text", *head], rows, note=note, marked=0),
        Table("lrrr", ["per text", *head], printed, "The paper's own count (counted, not timed)", _PAPERS_COUNT),
    ]
    return Section("cost", "Cost against the dense twin", lead, [], tables)


def _against(name: str, ours: float, dense: float | None) -> list[str]:
    return [name, format_flops(ours), format_flops(dense), format_percent(ours / dense if dense else None)]


def hardest(run: Results) -> Section:
    """The texts with the highest loss."""
    answer = format_decimal if run.final.task == "regression" else numbers.format_value
    rows = [
        [_excerpt(row), answer(row["label"]), answer(row["predicted"]), format_decimal(row["loss"], 2)]
        for row in run.final.hardest
    ]
    lead = (
        f"The {len(rows)} {run.final.split} texts with the highest loss, the worst first: look for wrong labels in the "
        "data before blaming the model."
    )
    table = Table("lllr", ["text", "label", "predicted", "loss"], rows)
    return Section("hardest", "Hardest examples", lead, [], [table])


def _excerpt(row: Mapping[str, Any]) -> str:
    """The text or the pair, at most so long, and the place where it stands."""
    texts = [text for text in (row["text"], row["text_pair"]) if text]
    place = f"{row['file']}, line {row['line']}" if row["file"] else f"line {row['line']}"
    return "\n".join([*(t if len(t) <= _EXCERPT else f"{t[:_EXCERPT].rstrip()} …" for t in texts), f"({place})"])


def provenance(run: Results) -> Section:
    """Recipe, data and environment: what it takes to make the same run again."""
    record, trained = run.record, run.record["training"]
    model = {**record["model"], "parameters": format_count(record["model"]["parameters"])}
    data = {
        **{key: value for key, value in record["data"].items() if value is not None},
        "columns": record["columns"],
        **{f"{split} rows": format_count(rows) for split, rows in record["splits"].items()},
        "cut at": f"{record['max_length']} tokens",
        **{f"{split} texts cut": format_count(rows) for split, rows in record["cut"].items() if rows},
        "fingerprint": record["data_fingerprint"],
    }
    training = {
        "steps": f"{format_count(trained['steps'])} of {format_count(trained['planned_steps'])} planned",
        **({"epochs with all heads": run.dense_training["epochs"]} if run.dense_training else {}),
        "epochs": f"{trained['epochs']}, best {trained['best_epoch']}",
        "stopped early": trained["stopped_early"],
        "time": numbers.format_seconds(trained["seconds"]),
        "tokens per second": format_count(trained["tokens_per_second"]),
    }
    groups = {
        "Data": [*numbers.flatten(data), *(["warning", warning] for warning in record["warnings"])],
        "Model": numbers.flatten(model),
        "Training": numbers.flatten(training),
        "Recipe": numbers.flatten({"seed": record["seed"], **record["recipe"]}),
        "Environment": numbers.flatten(record["environment"]),
    }
    version = record["environment"].get("commit") or record["budgetformer"]
    lead = f"The same data, recipe, seed ({record['seed']}) and version ({version}) make this run again."
    tables = [Table("ll", [], rows, name) for name, rows in groups.items()]
    return Section("made", "How it was made", lead, [], tables, beside=True)


SECTIONS = (training, dials, heads, mistakes, flops, hardest, provenance)

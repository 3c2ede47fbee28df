"""The files of a run beside its model: run.json, evaluation.json, card and report; and the directory that it takes."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.calibrate import depth_report
from budgetformer.cost.measure import take_turns
from budgetformer.data.splits import sample_rows
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Scores, leave_early, score, stop_at
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import UsageError
from budgetformer.evaluate import CHEAPER, Evaluation, evaluate, summarize, versus_twin, with_texts
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.report import write_card, write_report
from budgetformer.runs.files import LOCK, locked, named_write_errors, read_json, write_json
from budgetformer.runs.provenance import environment
from budgetformer.runs.record import FORMAT_VERSION, check_format
from budgetformer.runs.run import Run
from budgetformer.training.prepare import Prepared
from budgetformer.training.recipe import Recipe

# What an attempt that fails before training begins may leave beside its run.json, which marks it as ours.
_LEFTOVERS = {"run.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", ".staged",
              "..staged.tmp", ".run.json.tmp"}  # fmt: skip
_PREPARING = "preparing"
DIALS = ("fixed:0.125", "fixed:0.25", "fixed:0.5", "fixed:0.75", "max:0.25", "max:0.5", "full")
RANKED_DIALS = ("mean:0.125", "mean:0.25", "mean:0.5", "mean:0.75", "fixed:0.25", "fixed:0.5", "full")
_CURVE_ROWS = 2000  # of the final split, for each position of the dial
_HARDEST = 12
_EXAMPLES = 5
_COMPARED = ("words", "dense twin", CHEAPER, "learned", "full")


def begun_record(folder: Path) -> dict[str, Any] | None:
    """run.json of a model whose training began; None before."""
    if not (file := folder / "run.json").exists():
        return None
    record = read_json(file, "restore it, or give another directory with -o")
    check_format(folder, record)
    return None if record["status"] == _PREPARING else record


def has_begun(folder: Path) -> bool:
    """Whether training began in a run's directory; the dense model of a base comes first, in baseline/."""
    return any(begun_record(place) is not None for place in (folder, folder / "baseline"))


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """The directory of a run, made or gone on with, and locked. One that holds something else is left as it is."""
    _begins(folder, resume)
    with named_write_errors(folder, "Give another directory with -o"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "training"):
        if _begins(folder, resume):  # again, now that nobody else changes it
            for path in (path for path in folder.iterdir() if path.name != LOCK):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_json(folder / "run.json", {"format_version": FORMAT_VERSION, "status": _PREPARING})
        yield


def _begins(folder: Path, resume: bool) -> bool:
    """Whether a run begins in a directory, or goes on there; a directory with anything else is refused."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a directory for the run with -o")
    if has_begun(folder):
        if not resume:
            remedy = "continue it with --resume, or give another directory with -o"
            raise UsageError(f"{folder} holds a run already: {remedy}")
        return False
    names = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if names - (_LEFTOVERS if "run.json" in names else set()):
        raise UsageError(f"{folder} is not empty and holds no run: give another directory with -o")
    return True


def identity_of(prepared: Prepared, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What must be the same for a run to go on. Where the data lies does not matter, only what is in it."""
    places = ("data", "validation", "test", "unlabelled", "data_dir", "offline", "quarantine")
    source = {k: v for k, v in asdict(prepared.data.source).items() if k not in places}
    if prepared.data.source.validation == "test":
        source["validation"] = "test"
    more = prepared.unlabelled
    idle = ("checkpoint_minutes", *(("base", "dense_epochs", "delta", "ranking") if recipe.base is None else ()))
    return {
        "recipe": {k: v for k, v in recipe.to_json().items() if k not in idle},
        "source": source,
        "data": prepared.data.fingerprint,
        "seed": seed,
        **({} if more is None else {"unlabelled": hashlib.sha256(more.hashes.tobytes()).hexdigest()}),
    }


def record_of(
    prepared: Prepared, recipe: Recipe, model: BudgetFormerForSequenceClassification, folder: Path
) -> dict[str, Any]:
    """run.json as training begins."""
    data, config, place, provenance = prepared.data, model.config, Path(prepared.data.source.data), environment()
    return {
        "format_version": FORMAT_VERSION,
        "budgetformer": provenance["budgetformer"],
        "name": folder.resolve().name,
        "status": "running",
        "data": asdict(data.source),
        "data_path": str(place.resolve()) if place.exists() else None,
        "data_fingerprint": data.fingerprint,
        "data_digests": data.digests,
        "task": config.task,
        "labels": data.labels,
        "pairs": data.is_pair,
        "splits": {name: len(split) for name, split in prepared.splits.items()},
        **({} if prepared.unlabelled is None else {"unlabelled_rows": len(prepared.unlabelled.table)}),
        "cut": {name: int(split.truncated.sum()) for name, split in prepared.splits.items()},
        "columns": data.columns_chosen,
        "text_columns": [column for column in (data.schema.text, data.schema.text_pair) if column],
        "warnings": data.warnings,
        "max_length": recipe.max_length,
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "allocator": config.kind,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "width": config.hidden_size,
        },
        "recipe": recipe.to_json(),
        "environment": provenance,
    }


def write_examples(prepared: Prepared, folder: Path) -> None:
    """A few validation texts, for the page that explains the run."""
    split = prepared.data.splits["validation"]
    rows = split.select(sample_rows(split.rows, _EXAMPLES)).examples()
    examples = [{"text": row.text, "text_pair": row.text_pair} for row in rows]
    write_json(folder / "examples.json", {"examples": examples})


def evaluate_run(prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification) -> Scores:
    """Write evaluation.json: the final split and validation as learned, and the dial's curve on the final split."""
    final = prepared.final
    engine = TorchEngine(model)
    outcomes = {name: score(engine, prepared.splits[name]) for name in dict.fromkeys(("validation", final))}
    results = {}
    for name, outcome in outcomes.items():
        rows = _HARDEST if name == final else 0
        results[name] = summarize(outcome, model.config.spec, split=name, dial="learned", hardest=rows)
    results[final] = with_texts(results[final], prepared.data.splits[final])
    dials = ("learned", *(RANKED_DIALS if model.config.gate.ranks_layers else DIALS))
    sample = prepared.splits[final].select(sample_rows(results[final].rows, _CURVE_ROWS))
    curve = [evaluate(engine, sample, split=final, dial=d) for d in (dials if model.config.gate.can_dial else ())]
    evaluation: dict[str, Any] = {"test": None, **{name: asdict(result) for name, result in results.items()}}
    stages = score(engine, prepared.splits[final], "exit:0") if model.config.exits else None
    evaluation |= {"comparison": comparison(engine, prepared.splits[final], results[final], stages)}
    evaluation |= {"dials": [dial_point(e) for e in curve]}
    evaluation |= {"depth": None if stages is None else depth_report(stages, engine.config, final)}
    evaluation |= {"baseline": None, "versus_baseline": None}
    write_json(folder / "evaluation.json", evaluation)
    return outcomes[final]


def comparison(
    engine: TorchEngine, table: TokenTable, learned: Evaluation, stages: Scores | None
) -> list[dict[str, Any]]:
    """The words alone, the learned budget and the full model on the same rows; `add_twin` puts the dense twin between.

    `stages` are the answers of all stages, where the model has some. Where the learned budget is dear, there is a
    cheaper one beside it.
    """
    config, split, entries = engine.config, learned.split, {"learned": learned}
    if stages is not None and config.stages.words:
        words = stop_at(stages, config.stages, np.zeros(len(table), np.int64))
        entries["words"] = summarize(words, config, split=split, dial=str(Dial("exit", math.inf)))
    if stages is not None and config.stages.options.limit and learned.cost["flops_ratio"] > float(CHEAPER):
        limit = config.stages.limit(Dial.parse(CHEAPER))
        cheaper = leave_early(stages, config.stages, limit)
        entries[CHEAPER] = summarize(cheaper, config, split=split, dial=CHEAPER)
    if stages is not None and (config.gate.selects or config.stages.options.limit):
        full = score(engine, table, "full") if config.gate.selects else stages
        entries["full"] = summarize(full, config, split=split, dial="full")
    return [{"model": name, **dial_point(entries[name])} for name in _COMPARED if name in entries]


def dial_point(evaluation: Evaluation) -> dict[str, Any]:
    """One position of the dial, for the curve of score against cost."""
    return {
        **{name: getattr(evaluation, name) for name in ("dial", "split", "rows", "metric", "score")},
        **dict(zip(("low", "high"), evaluation.interval, strict=True)),
        **{name: evaluation.budget[name] for name in ("s_mean", "k_over_h")},
        **{name: evaluation.cost[name] for name in ("flops_per_text", "flops_ratio")},
        "exits": None if evaluation.exits is None else evaluation.exits["share"],
    }


def add_twin(folder: Path, ours: Scores | None, twin: Scores | None) -> dict[str, Any]:
    """Put the twin's figures, if there is one, beside ours in evaluation.json, and return the evaluation."""
    result: dict[str, Any] = read_json(folder / "evaluation.json", "delete run.json and resume")
    if ours is not None and twin is not None:
        baseline = read_json(folder / "baseline" / "evaluation.json", "delete baseline and resume")
        result["baseline"] = {name: baseline[name] for name in ("test", "validation")}
        dense = dial_point(Evaluation(**(baseline["test"] or baseline["validation"])))
        entries = {entry["model"]: entry for entry in (*result["comparison"], {"model": "dense twin", **dense})}
        result["comparison"] = [entries[name] for name in _COMPARED if name in entries]
        recipe = read_json(folder / "run.json", "train it again")["recipe"]
        result["versus_baseline"] = versus_twin(ours, twin, recipe)
        write_json(folder / "evaluation.json", result)
    return result


def publish(folder: Path, *, with_twin: bool) -> None:
    """Write model card and report of a run, and of its dense twin."""
    for place in (folder / "baseline", folder) if with_twin else (folder,):
        write_card(place)
        write_report(place)


def time_points(prepared: Prepared, run: Run, points: Sequence[dict[str, Any]], texts: int = 64) -> dict[str, float]:
    """Rows per second of a run, or of its dense twin, at the points of its comparison, by their names.

    From text to label on a sample of rows, in batches of 32, by torch in this process, in turns. They are to be
    compared with each other: where freed memory is kept, as in `budgetformer train`, all are up to a tenth faster.
    """
    split = prepared.data.splits[prepared.final]
    examples = list(split.select(sample_rows(split.rows, texts)).examples())
    firsts, pairs = [e.text for e in examples], [e.text_pair or "" for e in examples] if run.pairs else None
    twin = {"dense twin": run.baseline}
    scorers = {p["model"]: (twin.get(p["model"]) or run).scorer(p["dial"]) for p in points}
    calls = {name: partial(scorer.answer, firsts, pairs, 32) for name, scorer in scorers.items()}
    return {name: 1000 * len(examples) / ms for name, ms in take_turns(calls, least=3, most=9).items()}


def summarize_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, standard deviation and values of the figures of several runs, for our model and the dense twin."""
    models = {}
    for model in ("budgetformer", "baseline"):
        evaluations = [r["baseline"] if model == "baseline" else r for r in results]
        finals = [e["test"] or e["validation"] for e in evaluations if e]
        if finals:
            models[model] = {
                "metric": finals[0]["metric"],
                "score": _spread([f["score"] for f in finals]),
                "k_over_h": _spread([f["budget"]["k_over_h"] for f in finals]),
                "flops_ratio": _spread([f["cost"]["flops_ratio"] for f in finals]),
            }
    return models


def _spread(values: list[float]) -> dict[str, Any]:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": deviation, "values": values}

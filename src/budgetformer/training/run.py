"""A run from data to a finished directory: tokenizer, model, training, reload check, evaluation, report.

A run directory is Hugging Face-shaped: config.json, model.safetensors, tokenizer.json, README.md, evaluation.json,
history.jsonl, run.json, report.html, checkpoints/, and baseline/ with the dense twin.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from budgetformer.data import DataSource, load_tokenizer
from budgetformer.data.splits import evenly
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import Evaluation, is_correct, mcnemar, summarize, with_texts
from budgetformer.models import BudgetedClassifier, load_model, read_base, settle_order
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.report import write_report
from budgetformer.runs.files import check_identity, named_write_errors, read_json, write_directory, write_json
from budgetformer.runs.provenance import environment
from budgetformer.runs.run import FORMAT_VERSION
from budgetformer.training.accelerator import make_accelerator
from budgetformer.training.card import write_card
from budgetformer.training.loop import Fit, Interrupted
from budgetformer.training.prepare import Prepared, make_config, prepare, save_tokenizer
from budgetformer.training.pretrained import Built, build_budgeted, build_dense, dense_recipe
from budgetformer.training.recipe import Recipe

DIALS = ("fixed:0.125", "fixed:0.25", "fixed:0.5", "fixed:0.75", "max:0.25", "max:0.5", "full")
RANKED_DIALS = ("mean:0.125", "mean:0.25", "mean:0.5", "mean:0.75", "fixed:0.25", "fixed:0.5", "full")
_CURVE_ROWS = 2000  # of the final split, for each position of the dial
_HARDEST = 12
_LOOKED_AT = 64  # rows whose predictions must be the same after saving and loading

# Called with the finished model, before the run counts as done: data, folder, model, what it did on the final split.
Look = Callable[[Prepared, Path, BudgetFormerForSequenceClassification, Scores], None]


def train(
    source: DataSource,
    recipe: Recipe,
    folder: Path,
    *,
    seed: int | None = None,
    with_baseline: bool = False,
    resume: bool = False,
    tensorboard: bool = False,
    look: Look | None = None,
    quiet: bool = False,
    evaluate: bool = True,
) -> dict[str, Any]:
    """Train into `folder` and return its evaluation. A finished run that is resumed is only read.

    Without `evaluate` it ends with the saved model: no evaluation.json, model card or report, and nothing is returned.
    """
    seed = source.seed if seed is None else seed
    if recipe.base is not None:
        read_base(recipe.base, offline=source.offline, **recipe.model)
    _claim(folder, resume)
    accelerator = make_accelerator(recipe)
    say = _teller(accelerator, quiet)
    with accelerator.main_process_first():
        prepared = prepare(source, recipe, folder, say)
    fitting: dict[str, Any] = {"resume": resume, "tensorboard": tensorboard, "quiet": quiet, "evaluate": evaluate}

    def fit(recipe: Recipe, folder: Path, **options: Any) -> Scores | None:
        return _train_one(prepared, recipe, folder, seed, accelerator, say, **fitting, **options)

    if recipe.base is not None:
        ours, twin = _train_base(prepared, recipe, folder, fit, say)
    else:
        ours, twin = fit(recipe, folder, look=look), None
    if with_baseline and recipe.base is None and recipe.model.get("allocator") != "all":
        say("the dense twin, on the same data in the same order:")
        twin = fit(replace(recipe, model={**_without_gates(recipe.model), "allocator": "all"}), folder / "baseline")
    result: dict[str, Any] = {}
    if accelerator.is_main_process and evaluate:
        result = _compare(prepared, folder, ours, twin)
    accelerator.wait_for_everyone()
    return result


def _train_base(
    prepared: Prepared, recipe: Recipe, folder: Path, fit: Callable[..., Scores | None], say: Any
) -> tuple[Scores | None, Scores | None]:
    """Fine-tune the base with all heads into baseline/, then train budgets from there: both outcomes, ours first."""
    dense, twin = None, None
    if recipe.dense_epochs:
        say(f"{recipe.base} with all heads:")
        dense, plain = folder / "baseline", dense_recipe(recipe)
        twin = fit(plain, dense, build=lambda: build_dense(prepared, plain))
        say("with head budgets, from there:")
    return fit(recipe, folder, build=lambda: build_budgeted(prepared, recipe, dense)), twin


def _without_gates(options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("allocator", "fixed_budget")}


def _begun(folder: Path) -> bool:
    return any((folder / place / "run.json").exists() for place in (".", "baseline"))  # a base's dense model is first


def _claim(folder: Path, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a directory for the run with -o")
    begun = _begun(folder)
    if begun and not resume:
        raise UsageError(f"{folder} holds a run already: continue it with --resume, or give another directory with -o")
    if folder.is_dir() and not begun:  # what an attempt left that failed before it began is not worth keeping
        left = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", ".tokenizer", "..tokenizer.tmp"}
        if any(path.name not in left for path in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no run: give another directory with -o")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made ({error.strerror}): give another directory with -o") from None


def _teller(accelerator: Accelerator, quiet: bool) -> Any:
    def say(line: str) -> None:
        if accelerator.is_main_process and not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _train_one(
    prepared: Prepared,
    recipe: Recipe,
    folder: Path,
    seed: int,
    accelerator: Accelerator,
    say: Any,
    *,
    resume: bool,
    tensorboard: bool,
    quiet: bool,
    evaluate: bool,
    look: Look | None = None,
    build: Callable[[], Built] | None = None,
) -> Scores | None:
    """Train the recipe's model, or what `build` gives, and finish its directory: its outcome, on the main process."""
    record_file = folder / "run.json"
    identity = _identity(prepared, recipe, seed)
    if resume and record_file.exists():
        begun = read_json(record_file, "delete it and resume")
        check_identity(begun.get("identity", {}), identity)
        if begun["status"] == "done":
            say(f"{folder} is finished")
            return _outcome_again(prepared, folder) if accelerator.is_main_process and evaluate else None
    with named_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model, teacher = build() if build else (BudgetFormerForSequenceClassification(make_config(prepared, recipe)), None)
    fit = Fit(
        model, prepared.splits["train"], prepared.splits["validation"], recipe, folder, identity,
        seed=seed, accelerator=accelerator, tensorboard=tensorboard, quiet=quiet, teacher=teacher,
    )  # fmt: skip
    record = {**_record(prepared, recipe, model, seed, folder), "identity": identity}
    if accelerator.is_main_process:
        write_json(record_file, record)
    try:
        fit.run(resume=resume)
    except Interrupted:
        if accelerator.is_main_process:
            write_json(record_file, {**record, "status": "interrupted"})
        say(f"saved at step {fit.state.step} of {fit.planned}; continue with --resume")
        raise
    outcome = None
    if accelerator.is_main_process:
        _keep(prepared, recipe, folder, fit)
        outcome = evaluate_run(prepared, folder, fit.model) if evaluate else None
        if look is not None and outcome is not None:
            look(prepared, folder, fit.model, outcome)
        write_json(record_file, {**record, "training": fit.facts, "status": "done"})
    accelerator.wait_for_everyone()
    return outcome


def _identity(prepared: Prepared, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What must be the same for a run to go on. Where the data lies does not matter, only what is in it."""
    elsewhere = ("data", "test", "data_dir", "offline", "quarantine")
    idle = ("checkpoint_minutes", *(("base", "dense_epochs", "delta", "ranking") if recipe.base is None else ()))
    return {
        "recipe": {k: v for k, v in recipe.to_json().items() if k not in idle},
        "source": {k: v for k, v in asdict(prepared.data.source).items() if k not in elsewhere},
        "data": prepared.data.fingerprint,
        "seed": seed,
    }


def _keep(prepared: Prepared, recipe: Recipe, folder: Path, fit: Fit) -> None:
    """Keep the chosen model, and check that it loads and predicts the same."""
    write_directory(fit.checkpoints.folder / "last", fit.save_model)
    if recipe.keep == "best":
        best = fit.checkpoints.best(fit.state)
        partial = getattr(fit.model.config, "delta", False)  # the rest of the weights never changed
        fit.model.load_state_dict(load_file(best / "model.safetensors"), strict=not partial)
        fit.model.config.training_progress = type(fit.model.config).from_pretrained(best).training_progress
    if isinstance(fit.model, BudgetedClassifier):
        settle_order(fit.model, prepared.splits["train"])
    kept = fit.checkpoints.folder / "kept"
    write_directory(kept, fit.model.save_pretrained)
    for file in ("model.safetensors", "config.json"):  # the config last: it makes the directory a model
        with named_write_errors(folder / file):
            (kept / file).replace(folder / file)
    shutil.rmtree(kept)
    if not (folder / "tokenizer.json").exists():  # the dense twin's directory
        save_tokenizer(prepared.tokenizer, folder)
    _check_reload(prepared, folder, fit.model)


def _check_reload(prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification) -> None:
    """The saved directory alone must give the same predictions, from text to logits."""
    loaded = load_model(folder)
    loaded.to(model.device)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(folder, offline=True)
    validation = prepared.splits["validation"]
    rows = np.arange(min(_LOOKED_AT, len(validation)))
    few = validation.select(rows)
    examples = prepared.data.splits["validation"].examples()
    for row, example in zip(rows, examples, strict=False):
        limit = int(validation.lengths.max())
        again = tokenizer(example.text, example.text_pair, truncation=True, max_length=limit)["input_ids"]
        start, end = validation.offsets[row], validation.offsets[row + 1]
        if again[: end - start] != validation.tokens[start:end].tolist():
            raise ModelError(f"{folder}: the saved tokenizer does not give the ids that the model was trained on")
    if not np.array_equal(score(TorchEngine(loaded), few).logits, score(TorchEngine(model), few).logits):
        raise ModelError(f"{folder}: the reloaded model predicts differently from the one that was trained")


def evaluate_run(prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification) -> Scores:
    """Write evaluation.json: the final split and validation as learned, and the dial's curve on the final split."""
    final = prepared.final
    outcomes = {name: score(TorchEngine(model), prepared.splits[name]) for name in dict.fromkeys(("validation", final))}
    results = {
        name: summarize(o, model.config, split=name, dial="learned", hardest=_HARDEST) for name, o in outcomes.items()
    }
    results[final] = with_texts(results[final], prepared.data.splits[final].examples())
    dials = []
    if model.config.allocator != "all":
        final_table = prepared.splits[final]
        few = final_table.select(evenly(len(final_table), _CURVE_ROWS))
        for dial in ("learned", *(RANKED_DIALS if model.config.allocator in ("ranked", "order") else DIALS)):
            dials.append(_point(summarize(score(TorchEngine(model), few, dial), model.config, split=final, dial=dial)))
    write_json(
        folder / "evaluation.json",
        {
            "test": asdict(results["test"]) if "test" in results else None,
            "validation": asdict(
                replace(results["validation"], hardest=[] if final == "test" else results[final].hardest)
            ),
            "dials": dials,
            "baseline": None,
            "versus_baseline": None,
        },
    )
    return outcomes[final]


def _outcome_again(prepared: Prepared, folder: Path) -> Scores:
    model = load_model(folder)
    return score(TorchEngine(model), prepared.splits[prepared.final])


def _point(evaluation: Evaluation) -> dict[str, Any]:
    low, high = evaluation.interval
    return {
        "dial": evaluation.dial,
        "split": evaluation.split,
        "rows": evaluation.rows,
        "metric": evaluation.metric,
        "score": evaluation.score,
        "low": low,
        "high": high,
        "s_mean": evaluation.budget["s_mean"],
        "k_over_h": evaluation.budget["k_over_h"],
        "flops_per_text": evaluation.cost["flops_per_text"],
        "flops_ratio": evaluation.cost["flops_ratio"],
    }


def _compare(prepared: Prepared, folder: Path, ours: Scores | None, twin: Scores | None) -> dict[str, Any]:
    """Put the twin's figures beside ours, and write the report."""
    result: dict[str, Any] = read_json(folder / "evaluation.json", "delete run.json and resume")
    if ours is not None and twin is not None:
        other = read_json(folder / "baseline" / "evaluation.json", "delete baseline and resume")
        result["baseline"] = {name: other[name] for name in ("test", "validation")}
        a, b = is_correct(ours), is_correct(twin)
        result["versus_baseline"] = mcnemar(a, b) if a is not None and b is not None else None
        write_json(folder / "evaluation.json", result)
        _publish(folder / "baseline", other)
    _publish(folder, result)
    return result


def _publish(folder: Path, result: dict[str, Any]) -> None:
    write_card(folder, read_json(folder / "run.json", "resume the run"), result)
    write_report(folder)


def _record(
    prepared: Prepared, recipe: Recipe, model: BudgetFormerForSequenceClassification, seed: int, folder: Path
) -> dict[str, Any]:
    data, config = prepared.data, model.config
    columns = data.splits["train"].reading.columns
    return {
        "format_version": FORMAT_VERSION,
        "budgetformer": environment()["budgetformer"],
        "name": folder.resolve().name,
        "status": "running",
        "data": asdict(data.source),
        "data_fingerprint": data.fingerprint,
        "task": config.task,
        "labels": data.labels,
        "pairs": data.is_pair,
        "splits": {name: len(split) for name, split in prepared.splits.items()},
        "cut": {name: int(split.truncated.sum()) for name, split in prepared.splits.items()},
        "columns": data.columns_chosen,
        "text_columns": [columns.text, columns.text_pair] if columns.text_pair else [columns.text],
        "warnings": data.warnings,
        "max_length": recipe.max_length,
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "allocator": config.allocator,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "width": config.hidden_size,
        },
        "recipe": recipe.to_json(),
        "seed": seed,
        "environment": environment(),
    }


def train_seeds(
    source: DataSource, recipe: Recipe, folder: Path, seeds: int, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Repeat with several training seeds on the same splits; each in its own directory, the spread in seeds.json."""
    results = []
    for number in range(seeds):
        seed = source.seed + number
        mine = {**options, "resume": options.get("resume", False) and _begun(folder / f"seed-{seed}")}
        results.append(train(source, recipe, folder / f"seed-{seed}", seed=seed, **mine))
    if not results[0]:
        return results, {}
    summary: dict[str, Any] = {"seeds": [source.seed + n for n in range(seeds)], "models": {}}
    for model in ("budgetformer", "baseline"):
        rows = [r["baseline"] if model == "baseline" else r for r in results]
        finals = [r["test"] or r["validation"] for r in rows if r]
        if finals:
            summary["models"][model] = {
                "metric": finals[0]["metric"],
                "score": _spread([f["score"] for f in finals]),
                "k_over_h": _spread([f["budget"]["k_over_h"] for f in finals]),
                "flops_ratio": _spread([f["cost"]["flops_ratio"] for f in finals]),
            }
    write_json(folder / "seeds.json", summary)
    return results, summary


def _spread(values: Sequence[float]) -> dict[str, Any]:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": deviation, "values": list(values)}

"""A run from data to a finished directory: tokenizer, model, training, reload check, evaluation, report.

A run directory is Hugging Face-shaped: config.json, model.safetensors, tokenizer.json, README.md, evaluation.json,
history.jsonl, run.json, examples.json, report.html, checkpoints/, and baseline/ with the dense twin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from safetensors.torch import load_file as load_weights

from budgetformer.calibrate import exit_curve
from budgetformer.data.locate import DataSource
from budgetformer.data.tokens import TokenTable, encode_split
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import fit_temperatures
from budgetformer.exits import DISAGREEMENT, fit_rule, mix_words
from budgetformer.models.bases import read_base
from budgetformer.models.importance import calibrate_thresholds, sort_units
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import (
    check_identity,
    hash_files,
    named_read_errors,
    named_write_errors,
    write_bytes,
    write_directory,
    write_files,
    write_json,
)
from budgetformer.runs.provenance import multiplies_bf16
from budgetformer.runs.rows import TRAINING_ROWS
from budgetformer.runs.run import Run
from budgetformer.training import record as records
from budgetformer.training.loop import Fit, Interrupted
from budgetformer.training.prepare import Prepared, make_config, prepare, save_tokenizer
from budgetformer.training.pretrained import Built, build_budgeted, build_dense, dense_recipe, sample_batches
from budgetformer.training.recipe import Recipe, check_known
from budgetformer.words import Words, fit_words

_CHECKED_ROWS = 64  # rows whose predictions must be the same after saving and loading
_BF16_PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"
_WORDS = ("idf", "weights", "bias")
_SOURCE = {field.name for field in fields(DataSource)} - {"data", "seed"}
_RECIPE = {field.name for field in fields(Recipe)} - {"base", "preset"}

# Called with the finished model, before the run counts as done: data, folder, model, what it did on the final split.
OnFinished = Callable[[Prepared, Path, BudgetFormerForSequenceClassification, Scores], None]


def train(
    data: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] = "run",
    base: str | os.PathLike[str] | None = None,
    preset: str | None = None,
    seed: int = 0,
    with_baseline: bool = False,
    resume: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train a classifier on `data` into the directory `output`, as `budgetformer train` does, and open it.

    `base` is a pretrained encoder, by directory or hub name, that gets head budgets; else a preset says what is trained
    from scratch. Options are those of DataSource, such as text="review", label="verdict", validation="held_out.csv",
    and those of Recipe, such as epochs=3, learning_rate=5e-5, max_length=128, class_weights="balanced".
    """
    check_known(options, _SOURCE | _RECIPE, "train: option")
    source = DataSource(os.fspath(data), seed=seed, **{k: v for k, v in options.items() if k in _SOURCE})
    recipe = Recipe.make(preset, base=None if base is None else os.fspath(base))
    recipe = recipe.changed({k: v for k, v in options.items() if k in _RECIPE}, where="train")
    train_run(source, recipe, Path(output), with_baseline=with_baseline, resume=resume, quiet=quiet)
    return Run.open(Path(output))


def train_run(
    source: DataSource,
    recipe: Recipe,
    folder: Path,
    *,
    seed: int | None = None,
    with_baseline: bool = False,
    resume: bool = False,
    tensorboard: bool = False,
    on_finished: OnFinished | None = None,
    quiet: bool = False,
    evaluate: bool = True,
    examples: bool = True,
    report: bool = True,
) -> dict[str, Any]:
    """Train into `folder` and return its evaluation. A finished run that is resumed is only read.

    Without `evaluate` it ends with the saved model: no evaluation.json, model card or report, and nothing is returned.
    Without `report` it ends with evaluation.json: no model card, no report, and nothing is timed.
    With `examples` a few validation texts are stored, for the page of the service.
    """
    recipe = recipe.with_default_gates()
    if recipe.base is not None:
        read_base(recipe.base, offline=source.offline, **recipe.model)
    accelerator = make_accelerator(recipe)

    def log(line: str) -> None:
        if accelerator.is_main_process and not quiet:
            print(line, file=sys.stderr, flush=True)

    with ExitStack() as stack:
        with accelerator.main_process_first():  # the others must not claim what the first has begun to fill
            if accelerator.is_main_process:
                stack.enter_context(records.claimed(folder, resume))
            prepared = prepare(source, recipe, folder, log)
        on_cpu = accelerator.device.type == "cpu"
        if recipe.base is not None and recipe.precision == "fp32" and on_cpu and multiplies_bf16():
            log("this processor multiplies bf16: --set precision=bf16 trains an encoder faster")
        seed = source.seed if seed is None else seed
        session = _Session(prepared, seed, accelerator, log, resume, tensorboard, quiet, evaluate, examples)
        if recipe.base is not None:
            ours, twin = session.fit_base(recipe, folder)
        else:
            ours, twin = session.fit(recipe, folder, on_finished=on_finished), None
            if with_baseline and (recipe.selects_heads or recipe.model.get("exits")):
                log("the dense twin, on the same data in the same order:")
                twin = session.fit(recipe.without_gates(), folder / "baseline")
        result = {}
        if accelerator.is_main_process and evaluate:
            result = records.add_twin(folder, ours, twin)
            if report:
                records.publish(folder, with_twin=twin is not None)
            if report and not quiet:
                result["rows_per_second"] = records.time_points(prepared, Run.open(folder), result["comparison"])
        accelerator.wait_for_everyone()
    return result


def make_accelerator(recipe: Recipe) -> Accelerator:
    """accelerate with the recipe's precision; fp32 unless asked."""
    cpu = not torch.accelerator.is_available()
    if cpu and recipe.precision == "fp16":
        raise UsageError("precision=fp16 needs a GPU: use fp32 on a CPU")
    if cpu and recipe.precision == "bf16":  # some CPUs advertise instructions that their host forbids, and die
        probe = subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True)
        if probe.returncode:
            raise UsageError(
                "precision=bf16: a bf16 product ends the process on this CPU; use fp32, or try "
                "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
            )
    patient = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait while one evaluates and reports
    precision = "no" if recipe.precision == "fp32" else recipe.precision
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()  # a run before this one, in the same process, had another precision
    return Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=[patient])


def train_seeds(
    source: DataSource, recipe: Recipe, folder: Path, seeds: int, *, resume: bool = False, **options: Any
) -> dict[str, Any]:
    """Repeat with several training seeds on the same splits; each in its own directory, the spread in seeds.json."""
    results, numbers = [], list(range(source.seed, source.seed + seeds))
    for seed in numbers:
        place = folder / f"seed-{seed}"
        again = resume and records.has_begun(place)
        results.append(train_run(source, recipe, place, seed=seed, resume=again, **options))
    if not results[0]:  # not the main process
        return {}
    summary = {"seeds": numbers, "models": records.summarize_seeds(results)}
    write_json(folder / "seeds.json", summary)
    return summary


@dataclass(frozen=True, eq=False)
class _Session:
    """What the models of one run share, and how each of them is trained."""

    prepared: Prepared
    seed: int
    accelerator: Accelerator
    log: Callable[[str], None]
    resume: bool
    tensorboard: bool
    quiet: bool
    evaluate: bool
    examples: bool

    def fit_base(self, recipe: Recipe, folder: Path) -> tuple[Scores | None, Scores | None]:
        """Fine-tune the base with all heads in baseline/, then train budgets from there: both outcomes, ours first."""
        dense, twin = None, None
        if recipe.dense_epochs:
            dense, plain = folder / "baseline", dense_recipe(recipe)
            self.log(f"{recipe.base} with all heads, epochs: {plain.epochs} (dense_epochs)")
            twin = self.fit(plain, dense, lambda: build_dense(self.prepared, plain))
            self.log(f"with budgets, from there, epochs: {recipe.epochs}")
        return self.fit(recipe, folder, lambda: build_budgeted(self.prepared, recipe, dense)), twin

    def fit(
        self,
        recipe: Recipe,
        folder: Path,
        build: Callable[[], Built] | None = None,
        on_finished: OnFinished | None = None,
    ) -> Scores | None:
        """Train the recipe's model, or what `build` gives, and finish its directory.

        Returns what it did on the final split, on the main process.
        """
        prepared, record_file, main = self.prepared, folder / "run.json", self.accelerator.is_main_process
        identity = records.identity_of(prepared, recipe, self.seed)
        if begun := records.begun_record(folder) if self.resume else None:
            check_identity(begun["identity"], identity)
            if begun["status"] == "done":
                self.log(f"{folder} is finished")
                again = main and self.evaluate
                return score(Run.open(folder).engine(), prepared.splits[prepared.final]) if again else None
        with named_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(self.seed)
        built = build() if build else Built(BudgetFormerForSequenceClassification(make_config(prepared, recipe)))
        model, rows = built.model, prepared.splits["train"] if built.rows is None else built.rows
        with self.accelerator.main_process_first():  # it fits, the others read
            fit_words_stage(model, prepared.splits["train"], folder / "checkpoints" / "words.safetensors")
        fit = Fit(
            model, rows, prepared.splits["validation"], recipe, folder, identity, seed=self.seed,
            accelerator=self.accelerator, tensorboard=self.tensorboard, quiet=self.quiet, teacher=built.teacher,
        )  # fmt: skip
        record = {**records.record_of(prepared, recipe, model, folder), "seed": self.seed, "identity": identity}
        if main:
            more = {} if prepared.unlabelled is None else {"unlabelled": prepared.unlabelled.hashes}
            write_bytes(folder / TRAINING_ROWS, save({"hashes": prepared.data.splits["train"].hashes, **more}))
            if self.examples and begun is None:
                records.write_examples(prepared, folder)
            write_json(record_file, record)
        try:
            fit.run(resume=self.resume)
        except Interrupted:
            if main:
                write_json(record_file, {**record, "status": "interrupted"})
            self.log(f"saved at step {fit.state.step} of {fit.planned}; continue with --resume")
            raise
        outcome = None
        if main:
            _save_model(prepared, recipe, folder, fit)
            outcome = records.evaluate_run(prepared, folder, fit.model) if self.evaluate else None
            if on_finished is not None and outcome is not None:
                on_finished(prepared, folder, fit.model, outcome)
            write_json(record_file, {**record, "training": fit.facts, "sha256": hash_files(folder), "status": "done"})
        self.accelerator.wait_for_everyone()
        self.accelerator.free_memory()  # it holds on to models and optimisers, and another model may follow
        return outcome


def fit_words_stage(model: BudgetFormerForSequenceClassification, table: TokenTable, file: Path) -> None:
    """Fit the stage of words to the training rows.

    It is written to `file`, and read from it where an interrupted run, or another process, has left it.
    """
    stage, config = model.stages.words, model.config
    if stage is None:
        return
    assert table.labels is not None
    if file.exists():
        with named_read_errors(file, "delete it and resume"):
            saved = load_file(file)
    else:
        task = (table, np.asarray(table.labels), config.labels, config.task)
        bits = config.stages.options.word_bits
        words = fit_words(*task, bits=bits)
        saved = {name: getattr(words, name) for name in _WORDS}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, save(saved))
    stage.fill(Words(*(saved[name] for name in _WORDS)))


def fit_exit_rule(model: BudgetFormerForSequenceClassification, validation: TokenTable) -> None:
    """Add to each stage what the words know better; then fit P(disagree) of each stage, the curve that budgets are read
    from, and the limit of `learned`.

    Every other validation row is used: the rest is left for `calibrate`, which needs rows that the rule has not seen.
    """
    exits, config = model.config.exits, model.config
    if not exits:
        return
    exits.update(words_shares=(), rule=(), curve=(), limit=0.0)
    scores = score(TorchEngine(model), validation.select(np.arange(0, len(validation), 2)), "exit:0")
    if scores.stage_logits is None:
        return
    logits: NDArray[Any] = scores.stage_logits
    if model.stages.words is not None:
        shares, logits = mix_words(logits, np.asarray(scores.table.labels), config.task)
        _scale_stages(model, shares[:, 0])
        exits["words_shares"] = shares[:, 1].tolist()
    if config.task == "regression":
        return
    scores = replace(scores, stage_logits=logits.astype(np.float32))
    exits["rule"] = fit_rule(logits, config.task)
    curve = exit_curve(scores, config.spec)
    exits["curve"] = [(point["cost"], point["limit"]) for point in curve if point["limit"] < np.inf]
    safe = [point["limit"] for point in curve if point["disagreement"] <= DISAGREEMENT]
    exits["limit"] = max(safe, default=0.0)


@torch.no_grad()
def _scale_stages(model: BudgetFormerForSequenceClassification, factors: NDArray[np.float64]) -> None:
    """Fold a factor for every stage after the words into the last linear map of its head, or of the classifier."""
    heads: list[Any] = [head.outer for head in model.stages.heads]
    classifier = [module for module in model.base.classifier.modules() if isinstance(module, torch.nn.Linear)][-1]
    for linear, factor in zip([*heads, classifier], factors.tolist(), strict=True):
        for parameter in linear.parameters():
            parameter.mul_(factor)


def _save_model(prepared: Prepared, recipe: Recipe, folder: Path, fit: Fit) -> None:
    """Keep the chosen model, and check that it loads and predicts the same."""
    write_directory(fit.checkpoints.folder / "last", fit.save_model)
    if recipe.keep == "best":
        best = fit.checkpoints.best(fit.state)
        complete = not fit.model.config.delta  # the rest of a delta's weights never changed
        fit.model.load_state_dict(load_weights(best / "model.safetensors"), strict=complete)
        fit.model.config.training_progress = type(fit.model.config).from_pretrained(best).training_progress
    if fit.model.config.gate.ranks_layers:
        sort_units(fit.model)
        calibrate_thresholds(fit.model, sample_batches(prepared.splits["train"], fit.model, rows=256))
    fit_exit_rule(fit.model, prepared.splits["validation"])
    if recipe.fit_temperature:
        budget = "exit:0" if fit.model.config.exits else "learned"
        scores = score(TorchEngine(fit.model), prepared.splits["validation"], budget)
        fit.model.config.temperatures = fit_temperatures(scores)
    write_files(folder, fit.model.save_pretrained, last="config.json")  # which makes the directory a model
    if not (folder / "tokenizer.json").exists():  # the dense twin's directory
        save_tokenizer(prepared.tokenizer, folder)
    _check_reload(prepared, folder, fit.model)


def _check_reload(prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification) -> None:
    """The saved directory alone must give the same predictions, from text to logits."""
    run, rows = Run.open(folder), np.arange(min(_CHECKED_ROWS, len(prepared.splits["validation"])))
    expected = prepared.splits["validation"].select(rows)
    examples = prepared.data.splits["validation"].select(rows)
    table = encode_split(examples, prepared.data, run.tokenizer, run.max_length)
    if not np.array_equal(table.tokens, expected.tokens):
        raise ModelError(f"{folder}: the saved tokenizer does not give the ids that the model was trained on")
    engine = run.engine(str(model.device))
    if not np.array_equal(score(engine, table).logits, score(TorchEngine(model), expected).logits):
        raise ModelError(f"{folder}: the reloaded model predicts differently from the one that was trained")

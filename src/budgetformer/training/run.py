"""A run from data to a finished directory: tokenizer, model, training, reload check, evaluation, report.

A run directory is Hugging Face-shaped: config.json, model.safetensors, tokenizer.json, README.md, evaluation.json,
history.jsonl, run.json, examples.json, report.html, checkpoints/, and baseline/ with the dense twin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from budgetformer.data import DataSource, encode_split
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError
from budgetformer.evaluate import fit_temperatures
from budgetformer.models.bases import read_base
from budgetformer.models.importance import calibrate_thresholds
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import (
    check_identity,
    hash_files,
    named_write_errors,
    write_directory,
    write_files,
    write_json,
)
from budgetformer.runs.run import Run
from budgetformer.training import record as records
from budgetformer.training.accelerator import make_accelerator
from budgetformer.training.depth import fit_exit_rule, fit_words_stage
from budgetformer.training.loop import Fit, Interrupted
from budgetformer.training.prepare import Prepared, make_config, prepare, save_tokenizer
from budgetformer.training.pretrained import Built, build_budgeted, build_dense, dense_recipe, sample_batches
from budgetformer.training.recipe import Recipe

_CHECKED_ROWS = 64  # rows whose predictions must be the same after saving and loading

# Called with the finished model, before the run counts as done: data, folder, model, what it did on the final split.
OnFinished = Callable[[Prepared, Path, BudgetFormerForSequenceClassification, Scores], None]


def train(
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
) -> dict[str, Any]:
    """Train into `folder` and return its evaluation. A finished run that is resumed is only read.

    Without `evaluate` it ends with the saved model: no evaluation.json, model card or report, and nothing is returned.
    With `examples` a few validation texts are stored, for the page of the service.
    """
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
        seed = source.seed if seed is None else seed
        session = _Session(prepared, seed, accelerator, log, resume, tensorboard, quiet, evaluate, examples)
        if recipe.base is not None:
            ours, twin = session.fit_base(recipe, folder)
        else:
            ours, twin = session.fit(recipe, folder, on_finished=on_finished), None
            if with_baseline and recipe.selects_heads:
                log("the dense twin, on the same data in the same order:")
                twin = session.fit(recipe.without_gates(), folder / "baseline")
        result = records.publish(folder, ours, twin) if accelerator.is_main_process and evaluate else {}
        accelerator.wait_for_everyone()
    return result


def train_seeds(
    source: DataSource, recipe: Recipe, folder: Path, seeds: int, *, resume: bool = False, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Repeat with several training seeds on the same splits; each in its own directory, the spread in seeds.json."""
    results, numbers = [], list(range(source.seed, source.seed + seeds))
    for seed in numbers:
        place = folder / f"seed-{seed}"
        results.append(train(source, recipe, place, seed=seed, resume=resume and records.has_begun(place), **options))
    if not results[0]:  # not the main process
        return results, {}
    summary = {"seeds": numbers, "models": records.summarize_seeds(results)}
    write_json(folder / "seeds.json", summary)
    return results, summary


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
        model, teacher = (
            build() if build else (BudgetFormerForSequenceClassification(make_config(prepared, recipe)), None)
        )
        with self.accelerator.main_process_first():  # it fits, the others read
            rows = fit_words_stage(
                model, prepared.splits["train"], folder / "checkpoints" / "words.safetensors", self.seed
            )
        fit = Fit(
            model, rows, prepared.splits["validation"], recipe, folder, identity, seed=self.seed,
            accelerator=self.accelerator, tensorboard=self.tensorboard, quiet=self.quiet, teacher=teacher,
        )  # fmt: skip
        record = {**records.record_of(prepared, recipe, model, folder), "seed": self.seed, "identity": identity}
        if main:
            records.write_training_rows(prepared, folder)
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


def _save_model(prepared: Prepared, recipe: Recipe, folder: Path, fit: Fit) -> None:
    """Keep the chosen model, and check that it loads and predicts the same."""
    write_directory(fit.checkpoints.folder / "last", fit.save_model)
    if recipe.keep == "best":
        best = fit.checkpoints.best(fit.state)
        complete = not fit.model.config.delta  # the rest of a delta's weights never changed
        fit.model.load_state_dict(load_file(best / "model.safetensors"), strict=complete)
        fit.model.config.training_progress = type(fit.model.config).from_pretrained(best).training_progress
    if fit.model.config.gate.ranks_layers:
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

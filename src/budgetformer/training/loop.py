"""The training loop, visible: plan, step, validate, keep, checkpoint. On accelerate, under torchrun or alone.

t counts optimiser steps and T is their planned number; progress is t/T. A batch holds the rows of one optimiser step:
every process and every accumulated piece computes its share, weighted so that the gradient is the mean over the batch
(but for a target budget, which looks at the mean of each accumulated piece).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from budgetformer.data.batches import Batch, collate, plan_epoch
from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError
from budgetformer.evaluate import Evaluation, summarize
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.progress import View
from budgetformer.runs.files import named_write_errors, recover_directories, write_directory
from budgetformer.training.checkpoint import Checkpoints, History, State
from budgetformer.training.pretrained import Teacher
from budgetformer.training.recipe import Recipe

_LOG_EVERY = 20  # steps between two lines of history


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came; a checkpoint was saved."""


def make_optimizer(model: BudgetFormerForSequenceClassification, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; gates and exits may have rates of their own. Matrices decay; biases, norms and head scores do not."""
    parts: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        rate = recipe.gate_rate if ".allocator." in name else recipe.exit_rate if name.startswith("stages.") else 1.0
        parts.setdefault((rate, recipe.weight_decay if parameter.ndim > 1 else 0.0), []).append(parameter)
    groups = [{"params": p, "scale": rate, "weight_decay": decay} for (rate, decay), p in parts.items()]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)


def rate_at(step: int, planned: int, recipe: Recipe) -> float:
    """The learning rate of a step as a share of the recipe's: warm-up, then constant or falling to zero."""
    warmup = min(recipe.warmup, planned // 10)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    fall = (planned - step) / max(1, planned - warmup) if recipe.schedule == "linear" else 1.0
    return min(rise, fall)


class Fit:
    """One model being trained on one data set into one folder."""

    def __init__(
        self,
        model: BudgetFormerForSequenceClassification,
        train: TokenTable,
        validation: TokenTable,
        recipe: Recipe,
        folder: Path,
        identity: dict[str, Any],
        *,
        seed: int,
        accelerator: Accelerator,
        tensorboard: bool = False,
        quiet: bool = False,
        teacher: Teacher = None,
    ) -> None:
        self.accelerator, self.teacher = accelerator, teacher
        if isinstance(teacher, BudgetFormerForSequenceClassification):
            teacher.to(accelerator.device)
        self.model, self.train, self.validation = model.to(accelerator.device), train, validation
        self.recipe, self.folder, self.seed = recipe, folder, seed
        self.optimizer = make_optimizer(model, recipe)
        self.wrapped, self.stepper = accelerator.prepare(model, self.optimizer)
        self.rank, self.world, self.main = (
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.is_main_process,
        )
        self.quiet = quiet or not self.main
        self.checkpoints = Checkpoints(folder / "checkpoints", identity)
        self.state = State()
        self.planned = sum(len(self._plan(epoch)) for epoch in range(recipe.epochs))
        self.history = History(folder, tensorboard=tensorboard) if self.main else None
        torch.manual_seed(seed + self.rank)

    def _plan(self, epoch: int) -> list[Any]:
        rows, tokens = self.recipe.batch_size, self.recipe.token_budget
        return plan_epoch(self.train.lengths, batch_size=rows, token_budget=tokens, seed=self.seed, epoch=epoch)

    @property
    def progress(self) -> float:
        return self.state.step / self.planned

    @property
    def facts(self) -> dict[str, Any]:
        """How training went, for the run's record."""
        state, recipe = self.state, self.recipe
        return {
            "steps": state.step,
            "planned_steps": self.planned,
            "progress": self.progress,
            "epochs": state.epoch,
            "best_epoch": state.best_epoch,
            "kept_epoch": state.best_epoch if recipe.keep == "best" else state.epoch,
            "stopped_early": state.epoch < recipe.epochs,
            "seconds": state.seconds,
            "tokens_per_second": state.tokens / max(1e-9, state.seconds),
            "processes": self.world,
        }

    def run(self, *, resume: bool = False) -> State:
        """Train to the end, or to an early stop; raises Interrupted after saving when a signal asks to stop."""
        if self.main:
            with named_write_errors(self.checkpoints.folder):
                self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
            recover_directories(self.checkpoints.folder)
        if resume:
            self._restore()
        if self.history:
            self.history.truncate(self.state.history_bytes)
        view, patience = View(self.planned, self.state.step, quiet=self.quiet), self.recipe.patience or math.inf
        try:
            with _signals() as stop:
                while self.state.epoch < self.recipe.epochs and self.state.stale_epochs < patience:
                    self._epoch(view, stop)
                    if self._any_process(stop.is_set()):  # the signal came while validating; the epoch's end was saved
                        raise Interrupted
        finally:
            view.close()
            if self.history:
                self.history.close()
        self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)  # its own forward, without autocast
        return self.state

    def _epoch(self, view: View, stop: threading.Event) -> None:
        state, batches = self.state, self._plan(self.state.epoch)
        self.wrapped.train()
        saved_at = began = time.monotonic()
        while state.batch < len(batches):
            figures = self._step(batches[state.batch])
            state.step, state.batch = state.step + 1, state.batch + 1
            now = time.monotonic()
            state.seconds, began = state.seconds + now - began, now
            if state.step % _LOG_EVERY == 0 or state.step == 1:
                self._log_step(figures, view)
            if self._any_process(stop.is_set()):
                self._save()
                raise Interrupted
            if self._any_process(now - saved_at > 60 * self.recipe.checkpoint_minutes):
                self._save()
                saved_at = began = time.monotonic()
        self._close_epoch(view)

    def _any_process(self, here: bool) -> bool:
        """Whether any process says yes; all processes get the same answer."""
        return here if self.world == 1 else bool(self._reduced({"yes": float(here)})["yes"])

    def _step(self, rows: Any) -> dict[str, Tensor]:
        """One optimiser step on a batch of rows. Returns this process's sums for the record."""
        factor = rate_at(self.state.step, self.planned, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * group["scale"] * factor
        pieces = [p for p in np.array_split(rows, min(self.recipe.accumulate, len(rows))) if len(p)]
        sums: dict[str, Tensor] = {}
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                self._backward(piece, len(rows), sums)
        limit = math.inf if self.recipe.clip is None else self.recipe.clip  # no limit: the norm is only measured
        norm = float(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), limit))
        # A scaler leaves gradients that are no numbers out by itself.
        fine = math.isfinite(norm) or self.accelerator.scaler is not None
        if self._any_process(not (fine and torch.isfinite(sums["loss"]))):
            loss = self._means(sums)["loss"]
            raise self._diverged(self.state.step + 1, f"the loss is {loss:g} and the norm of its gradient {norm:g}")
        self.stepper.step()
        self.stepper.zero_grad()
        self.model.update_centres(self.accelerator.reduce)
        self.state.tokens += int(self.train.lengths[rows].sum())
        for name, value in sums.items():
            self.state.sums[name] = self.state.sums.get(name, 0.0) + value
        return sums

    def _diverged(self, step: int, what: str) -> ModelError:
        """The error for what is no number, before it reaches a checkpoint."""
        rate, saved = self.optimizer.param_groups[0]["lr"], self.checkpoints.complete()
        before = f"{saved[-1]} holds the run as it was before" if saved else "nothing was saved before"
        return ModelError(
            f"training diverged at step {step} of {self.planned}: {what} at a learning rate of {rate:g}. Start anew in "
            f"another directory with a lower --lr, with --set clip=1, or with --set precision=fp32; {before}"
        )

    def _backward(self, piece: Any, of: int, sums: dict[str, Tensor]) -> None:
        share = piece[self.rank :: self.world]
        rows = share if len(share) else piece[:1]  # every process must take part; a borrowed row weighs nothing
        batch = collate(self.train, rows, self.model.config.pad_token_id or 0)
        inputs = batch.tensors(self.accelerator.device)
        out = self.wrapped(**inputs, progress=self.progress, **self._teacher_targets(batch, inputs))
        self.accelerator.backward(out.loss * (len(share) * self.world / of))
        with torch.no_grad():
            record = {"loss": out.loss.detach(), **{f"loss.{k}": v.detach() for k, v in out.loss_parts.items()}}
            record["s"] = torch.stack([a.budget.mean() for a in out.allocations])
            record["k"] = torch.stack([a.heads.float().mean() for a in out.allocations])
            record["rows"] = torch.ones((), device=out.loss.device)
            flat = torch.cat([value.float().reshape(-1) for value in record.values()]).cpu().double() * len(share)
            parts = torch.split(flat, [value.numel() for value in record.values()])  # all with one transfer
            for (name, value), part in zip(record.items(), parts, strict=True):
                sums[name] = sums.get(name, 0.0) + part.reshape(value.shape)

    def _teacher_targets(self, batch: Batch, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """What the teacher says of these rows: its logits, or all that it can tell."""
        if self.teacher is None:
            return {}
        if isinstance(self.teacher, BudgetFormerForSequenceClassification):
            with self.accelerator.autocast():
                return self.teacher.teacher_targets(
                    inputs["input_ids"], inputs["attention_mask"], inputs.get("token_type_ids")
                )
        return {"teacher_logits": torch.from_numpy(self.teacher[batch.rows]).to(self.accelerator.device)}

    def _reduced(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The sums over all processes."""
        tensors = {name: torch.as_tensor(value).to(self.accelerator.device) for name, value in values.items()}
        return {name: value.cpu() for name, value in self.accelerator.reduce(tensors).items()}

    def _means(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        """Sums over rows, from all processes, as means: numbers, or one for each layer."""
        total = self._reduced(sums)
        return {name: (value / total["rows"]).tolist() for name, value in total.items() if name != "rows"}

    def _log_step(self, sums: Mapping[str, Tensor], view: View) -> None:
        means, state = self._means(sums), self.state
        shown = {"epoch": state.epoch + 1, "loss": means["loss"], "s": float(np.mean(means["s"]))}
        speed = state.tokens / max(1e-9, state.seconds)
        self._record(
            {
                "kind": "step",
                "step": state.step,
                "epoch": state.epoch + 1,
                "progress": self.progress,
                "loss": means["loss"],
                "parts": {k[5:]: v for k, v in means.items() if k.startswith("loss.")},
                "lr": self.optimizer.param_groups[0]["lr"],
                "s_mean": shown["s"],
                "tokens_per_second": speed,
            }
        )
        heads = " ".join(f"{k:.1f}" for k in means["k"])
        shown["heads by layer"] = f"{heads} of {self.model.config.num_attention_heads}"
        if state.best_score is not None:
            shown["best"] = state.best_score
        view.step(state.step, {**shown, "tokens/s": round(speed)})

    def _close_epoch(self, view: View) -> None:
        """Validate, keep the model if it is the best, write the record and a checkpoint."""
        state = self.state
        self._check_weights()
        evaluation = self._validate("learned")
        full = self._validate("full") if self.model.config.gate.selects else evaluation
        loss = evaluation.quality["loss"]
        better = state.best_score is None or (evaluation.score, -loss) > (state.best_score, -state.best_loss)
        state.epoch, state.batch = state.epoch + 1, 0
        if better:
            state.best_score, state.best_loss = evaluation.score, loss
            state.best_epoch, state.stale_epochs = state.epoch, 0
        else:
            state.stale_epochs += 1
        means, H = self._means(state.sums), self.model.config.num_attention_heads
        state.sums = {}
        record = {
            "kind": "epoch",
            "epoch": state.epoch,
            "step": state.step,
            "progress": self.progress,
            "seconds": state.seconds,
            "best": better,
            "train": {
                "loss": means["loss"],
                "s_mean": float(np.mean(means["s"])),
                "s_per_layer": means["s"],
                "k_over_h_per_layer": [k / H for k in means["k"]],
            },
            "validation": {
                "metric": evaluation.metric,
                "score": evaluation.score,
                "score_full": full.score,
                "loss": loss,
                **{k: evaluation.budget[k] for k in ("s_mean", "s_per_layer", "k_over_h", "k_over_h_per_layer")},
            },
        }
        self._record(record)
        if self.main and better:
            write_directory(self.checkpoints.best(state), self.save_model)
        self._save()
        view.log(
            f"epoch {state.epoch}/{self.recipe.epochs}: loss {means['loss']:.4f}, validation {evaluation.metric} "
            f"{evaluation.score:.4f} ({full.score:.4f} with all heads), mean s {evaluation.budget['s_mean']:.3f}, "
            f"k/H {evaluation.budget['k_over_h']:.3f}{' *' if better else ''}"
        )

    def _validate(self, dial: str) -> Evaluation:
        engine = TorchEngine(self.model, progress=self.progress)
        scores: Scores | None = None
        with suppress(ModelError):  # answers that are no numbers, perhaps to the rows of one process alone
            scores = score(engine, self.validation, dial, share=(self.rank, self.world))
        if self._any_process(scores is None):
            raise self._diverged(self.state.step, "the answers to validation rows are no numbers")
        assert scores is not None
        # Rows that other processes evaluated are zero here; not every back end can sum int16.
        names, counts = ("logits", "budget", "entropy", "exits", "heads", "groups"), ("heads", "groups")
        every = {name: getattr(scores, name) for name in names}
        parts = {n: v.astype(np.int32) if n in counts else v for n, v in every.items() if v is not None}
        merged: Any = {name: value.numpy() for name, value in self._reduced(parts).items()}
        return summarize(replace(scores, **merged), self.model.config.spec, split="validation", dial=dial)

    def _record(self, record: dict[str, Any]) -> None:
        if self.history:
            self.state.history_bytes += self.history.write(record)

    def save_model(self, folder: Path) -> None:
        """Weights and config as they are now, with the progress that evaluation needs."""
        self.model.config.training_progress = self.progress
        self.model.save_pretrained(folder)

    def _check_weights(self) -> None:
        if self._any_process(not all(torch.isfinite(weight).all() for weight in self.model.parameters())):
            raise self._diverged(self.state.step, "a weight is no number")

    def _save(self) -> None:
        self._check_weights()
        random, sums = self._random_state(), self._reduced(self.state.sums)
        if self.main:
            saved = replace(self.state, sums={name: value.tolist() for name, value in sums.items()})
            self.checkpoints.save(saved, self.model, self.optimizer, random)
        self.accelerator.wait_for_everyone()

    def _random_state(self) -> dict[str, Tensor]:
        """The random number generators of all processes, one row each."""
        states = {"cpu": torch.get_rng_state()}
        if self.accelerator.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        if self.accelerator.scaler is not None:
            scaler = self.accelerator.scaler.state_dict()
            states["scaler"] = torch.tensor([float(scaler.get("scale", 0)), float(scaler.get("_growth_tracker", 0))])
        gathered = self.accelerator.gather({k: v[None].to(self.accelerator.device) for k, v in states.items()})
        return {name: value.cpu().contiguous() for name, value in gathered.items()}

    def _restore(self) -> None:
        if (loaded := self.checkpoints.load(self.model, self.optimizer)) is None:
            return
        self.state, random = loaded
        sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.state.sums.items()}
        self.state.sums = sums if self.main else {name: torch.zeros_like(value) for name, value in sums.items()}
        if random["cpu"].shape[0] != self.world:  # another number of processes: exactness is lost, training goes on
            torch.manual_seed(self.seed + 1000 * self.state.step + self.rank)
            return
        torch.set_rng_state(random["cpu"][self.rank])
        if "cuda" in random and self.accelerator.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"][self.rank])
        if "scaler" in random and self.accelerator.scaler is not None:
            scale, growth = random["scaler"][self.rank].tolist()
            state = self.accelerator.scaler.state_dict()
            self.accelerator.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(growth)})


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The loop: schedule, accumulation, resuming bit for bit, early stopping, and files that are whole or absent."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from budgetformer import BudgetFormerForSequenceClassification
from budgetformer.data.locate import DataSource
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.training.loop import Fit, Interrupted, rate_at
from budgetformer.training.prepare import Prepared, make_config, prepare
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import make_accelerator
from tests.training.toy import write_reviews

RECIPE = Recipe.make("tiny", None, ["epochs=2", "batch_size=16", "vocab_size=200", "max_length=32", "model.exits=none"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data")
    source = DataSource(str(write_reviews(folder / "reviews.csv")))
    return prepare(source, RECIPE, folder, lambda line: None)


def fit(prepared: Prepared, folder: Path, recipe: Recipe = RECIPE, **options: Any) -> Fit:
    torch.manual_seed(0)
    model = BudgetFormerForSequenceClassification(make_config(prepared, recipe))
    identity = {"recipe": recipe.to_json(), "data": prepared.data.fingerprint, "seed": 0}
    folder.mkdir(parents=True, exist_ok=True)
    rows = (prepared.splits[name] for name in ("train", "validation"))
    options = {"seed": 0, "quiet": True, "accelerator": make_accelerator(recipe), **options}
    return Fit(model, *rows, recipe, folder, identity, **options)


def weights(run: Fit) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines(folder)]


@pytest.fixture(scope="module")
def complete(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run = fit(prepared, folder)
    run.run()
    return folder, weights(run)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("linear", 0, 1 / 10), ("linear", 4, 0.5), ("linear", 9, 1.0), ("linear", 10, 1.0), ("linear", 55, 0.5),
        ("linear", 99, 1 / 90), ("constant", 0, 1 / 10), ("constant", 50, 1.0), ("constant", 99, 1.0),
    ],
)  # fmt: skip
def test_learning_rate_by_hand(schedule: Any, step: int, rate: float) -> None:
    recipe = Recipe(schedule=schedule, warmup=1000)  # at most a tenth of the run: 10 steps of 100
    assert rate_at(step, 100, recipe) == pytest.approx(rate)


def test_history_tells_what_happened(complete: tuple[Path, Any]) -> None:
    epochs = [line for line in lines(complete[0]) if line["kind"] == "epoch"]
    assert [e["epoch"] for e in epochs] == [1, 2]
    assert epochs[-1]["progress"] == 1.0
    assert epochs[-1]["step"] == 20  # 160 rows in batches of 16, twice
    assert set(epochs[0]["validation"]) >= {"metric", "score", "score_full", "loss", "s_mean", "k_over_h_per_layer"}
    steps = [line for line in lines(complete[0]) if line["kind"] == "step"]
    assert steps[0]["step"] == 1
    assert steps[0]["progress"] == pytest.approx(1 / 20)
    assert set(steps[0]["parts"]) == {"task", "budget", "entropy", "target"}
    assert sum(steps[0]["parts"].values()) == pytest.approx(steps[0]["loss"], abs=1e-6)


def at_step(run: Fit, number: int, act: Callable[[], None]) -> None:
    """Have something happen in the middle of a run's n-th step from now."""
    steps = itertools.count(1)

    def count(model: torch.nn.Module, inputs: Any) -> None:
        if model.training and next(steps) == number:
            act()

    run.model.register_forward_pre_hook(count)


@pytest.mark.parametrize("at", [1, 7, 10, 13, 19])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    prepared: Prepared, complete: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, at: int
) -> None:
    first = fit(prepared, tmp_path)
    at_step(first, at, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        first.run()
    assert first.state.step == at
    second = fit(prepared, tmp_path)
    second.run(resume=True)
    assert_same(weights(second), complete[1])
    assert untimed(tmp_path) == untimed(complete[0])


@pytest.mark.parametrize("where", ["loss", "gradient", "gradient, not clipped", "weights"])
def test_a_run_that_diverges_stops_at_once_and_keeps_what_was_good(
    prepared: Prepared, complete: tuple[Path, Any], tmp_path: Path, where: str
) -> None:
    changes = {"clip": None} if "not clipped" in where else {}
    run = fit(prepared, tmp_path, RECIPE.changed(changes, where="test"))
    step, weight = 13, run.model.base.classifier.weight

    def spoil() -> None:
        if where == "loss":
            run.model.base.classifier.bias.data[0] = float("nan")
        else:
            weight.register_hook(lambda gradient: gradient * float("inf"))

    if where == "weights":  # after a step that looked well, at which a checkpoint is due
        step = 20
        at_step(run, step, lambda: run.optimizer.register_step_post_hook(lambda *_: weight.data.fill_(float("inf"))))
    else:
        at_step(run, step, spoil)
    with pytest.raises(ModelError) as stopped:
        run.run()
    message = str(stopped.value)
    assert f"training diverged at step {step} of 20: " in message
    assert "learning rate of 0.00" in message
    assert "lower --lr" in message
    assert f"{run.checkpoints.complete()[-1]} holds the run as it was before" in message
    assert [p.name for p in run.checkpoints.complete()] == ["step-00000010"]
    again = fit(prepared, tmp_path, RECIPE.changed(changes, where="test"))
    again.run(resume=True)
    assert again.state.step == 20
    if not changes:
        assert_same(weights(again), complete[1])


def test_a_run_that_diverges_before_its_first_checkpoint_says_that_nothing_was_saved(
    prepared: Prepared, tmp_path: Path
) -> None:
    run = fit(prepared, tmp_path, RECIPE.changed({"learning_rate": 1e30, "clip": None}, where="test"))
    with pytest.raises(ModelError, match=r"training diverged at step \d of 20: .* nothing was saved before"):
        run.run()
    assert run.checkpoints.complete() == []


class Crash(BaseException):
    """Stands for the process ending at this very instruction."""


@pytest.mark.parametrize("call", range(1, 26, 4))
def test_a_crash_in_any_write_loses_nothing_before_it(
    prepared: Prepared,
    complete: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: int,
) -> None:
    """The process ends at the n-th flush or rename of its first run; the resumed run ends the same."""
    real_fsync, real_rename = os.fsync, Path.rename
    calls = 0

    def crashing(real: Any) -> Any:
        def wrapper(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise Crash
            return real(*arguments)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crashing(real_fsync))
        patch.setattr(Path, "rename", crashing(real_rename))
        patch.setattr("shutil.rmtree", lambda *a, **k: None)  # a dead process tidies nothing up
        with pytest.raises(Crash):
            fit(prepared, tmp_path).run()
    again = fit(prepared, tmp_path)
    again.run(resume=True)
    assert_same(weights(again), complete[1])
    assert untimed(tmp_path) == untimed(complete[0])
    assert list((tmp_path / "checkpoints").glob(".*.tmp")) == []


def test_a_full_disk_is_named_and_loses_nothing(
    prepared: Prepared, complete: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fit(prepared, tmp_path)

    def full(tensors: Any, path: Path) -> None:
        if "step-00000020" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr("budgetformer.training.checkpoint.save_file", full)
        with pytest.raises(ModelError, match=r"step-00000020: the disk is full.*intact.*--resume"):
            run.run()
    assert [p.name for p in run.checkpoints.complete()] == ["step-00000010"]
    again = fit(prepared, tmp_path)
    again.run(resume=True)
    assert_same(weights(again), complete[1])


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_with_the_way_on(
    prepared: Prepared, complete: tuple[Path, Any], tmp_path: Path, file: str
) -> None:
    run = fit(prepared, tmp_path)
    run.run()
    newest = run.checkpoints.complete()[-1]
    broken = newest / file
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"step-00000020.*damaged; delete .*to continue from step-00000010"):
        fit(prepared, tmp_path).run(resume=True)


def test_a_flipped_bit_in_a_checkpoint_is_noticed(prepared: Prepared, tmp_path: Path) -> None:
    run = fit(prepared, tmp_path)
    run.run()
    weights_file = run.checkpoints.complete()[-1] / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-2] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors was damaged or changed after it was written"):
        fit(prepared, tmp_path).run(resume=True)


def test_a_changed_recipe_or_data_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    fit(prepared, tmp_path).run()
    other = RECIPE.changed({"learning_rate": 0.5}, where="test")
    with pytest.raises(ModelError, match=r"recipe\.learning_rate was 0\.003 when the run began and is 0\.5 now"):
        fit(prepared, tmp_path, other).run(resume=True)
    run = fit(prepared, tmp_path)
    run.checkpoints.identity["data"] = "other"
    with pytest.raises(ModelError, match="cannot resume: data was"):
        run.run(resume=True)


def test_accumulation_changes_memory_not_the_weights(prepared: Prepared, tmp_path: Path) -> None:
    still = {"dropout": 0.0, "gates": {"sigma_max": 0.0}}
    results = []
    for pieces in (1, 3):
        changes = {"accumulate": pieces, "model": still, "epochs": 1, "learning_rate": 3e-4}
        run = fit(prepared, tmp_path / str(pieces), RECIPE.changed(changes, where="test"))
        run.run()
        results.append(weights(run))
    for name, value in results[0].items():
        if not name.endswith("qkv.bias"):  # the bias of keys has no gradient but rounding, which Adam blows up
            torch.testing.assert_close(results[1][name], value, atol=2e-4, rtol=1e-3, msg=name)


def test_early_stopping_records_where_it_stopped(prepared: Prepared, tmp_path: Path) -> None:
    recipe = RECIPE.changed({"epochs": 6, "patience": 1, "learning_rate": 1e-9}, where="test")
    run = fit(prepared, tmp_path, recipe)
    with torch.no_grad():  # what cannot get better
        run.model.base.classifier.weight.zero_()
        run.model.base.classifier.bias.zero_()
    run.model.base.classifier.requires_grad_(False)
    state = run.run()
    assert state.epoch == 2
    assert state.best_epoch == 1
    assert run.progress == pytest.approx(2 / 6)
    saved = tmp_path / "model"
    saved.mkdir()
    run.save_model(saved)
    assert BudgetFormerForSequenceClassification.from_pretrained(saved).config.training_progress == pytest.approx(1 / 3)


def test_the_best_model_is_kept_and_old_checkpoints_are_not(complete: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder = complete[0] / "checkpoints"
    names = sorted(p.name for p in folder.iterdir())
    best = [e["epoch"] for e in lines(complete[0]) if e["kind"] == "epoch" and e["best"]][-1]
    assert names == [f"best-{best:04d}", "step-00000010", "step-00000020"]
    assert_same(load_file(folder / "step-00000020" / "model.safetensors"), complete[1])
    assert not [p for p in complete[0].rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]


def test_token_budget_batches_train(prepared: Prepared, tmp_path: Path) -> None:
    recipe = RECIPE.changed({"token_budget": 256, "epochs": 1}, where="test")
    run = fit(prepared, tmp_path, recipe)
    state = run.run()
    assert state.step == run.planned > 1


def test_gates_can_have_their_own_rate(prepared: Prepared, tmp_path: Path) -> None:
    run = fit(prepared, tmp_path, RECIPE.changed({"gate_rate": 1e-9, "epochs": 1}, where="test"))
    before = weights(run)
    run.run()
    moved = {name: float((value - before[name]).abs().max()) for name, value in weights(run).items()}
    gates = {name for name in moved if ".allocator." in name}
    assert gates
    assert max(moved[name] for name in gates) < 1e-6
    assert min(moved[name] for name in moved.keys() - gates if name.endswith("weight")) > 1e-3


def test_matrices_decay_and_biases_norms_and_scores_of_heads_do_not(prepared: Prepared, tmp_path: Path) -> None:
    for kind in ("learned", "static"):
        run = fit(
            prepared, tmp_path / kind, RECIPE.changed({"weight_decay": 0.5, "model": {"gates": {"kind": kind}}}, "")
        )
        before = weights(run)
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()
        shrunk = {name for name, value in weights(run).items() if not torch.equal(value, before[name])}
        assert shrunk == {name for name, p in run.model.named_parameters() if p.ndim > 1 and p.any()}
        assert any("bias" in name for name in before.keys() - shrunk)


def test_tensorboard_on_request(prepared: Prepared, tmp_path: Path) -> None:
    fit(prepared, tmp_path, RECIPE.changed({"epochs": 1}, where="test"), tensorboard=True).run()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_half_precision_on_a_cpu_is_probed_before_it_can_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(UsageError, match="precision=fp16 needs a GPU"):
        make_accelerator(Recipe(precision="fp16"))
    died = subprocess.CompletedProcess([], -signal.SIGILL)
    monkeypatch.setattr("budgetformer.training.run.subprocess.run", lambda *a, **k: died)
    with pytest.raises(UsageError, match=r"precision=bf16: a bf16 product ends the process.*ONEDNN_MAX_CPU_ISA"):
        make_accelerator(Recipe(precision="bf16"))


def test_a_half_precision_run_ends_with_the_models_own_forward(prepared: Prepared, tmp_path: Path) -> None:
    recipe = RECIPE.changed({"epochs": 1, "precision": "bf16"}, where="test")
    try:
        make_accelerator(recipe)
    except UsageError:
        pytest.skip("bf16 ends the process on this CPU")
    run = fit(prepared, tmp_path, recipe)
    run.run()
    few = prepared.splits["validation"].select(np.arange(8))
    fresh = type(run.model)(run.model.config)
    fresh.load_state_dict(run.model.state_dict())
    np.testing.assert_array_equal(score(TorchEngine(fresh), few).logits, score(TorchEngine(run.model), few).logits)

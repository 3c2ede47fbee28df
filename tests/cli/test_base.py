"""A pretrained encoder's way as a user types it: train --base, eval, calibrate, export; and every wrong one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.conftest import TINY_BASE
from tests.models.tiny import save_base, tiny
from tests.processes import command
from tests.training.toy import write_reviews
from transformers import AutoConfig, AutoModelForSequenceClassification

from budgetformer import calibrate as calibration
from budgetformer.data.dataset import open_data
from budgetformer.data.locate import DataSource
from budgetformer.data.tokens import encode_split
from budgetformer.engine.scores import score
from budgetformer.runs.run import Run

FAST = list(TINY_BASE)


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(tiny_base, tmp_path_factory.mktemp("runs") / "first")


def test_a_run_from_a_base_has_a_dense_model_and_a_budgeted_one(run: Path) -> None:
    result = json.loads((run / "evaluation.json").read_text())
    assert result["test"]["score"] >= 0.8
    assert 0.3 < result["test"]["budget"]["k_over_h"] < 0.7  # the target is a half
    assert result["baseline"]["test"]["budget"]["k_over_h"] == 1.0
    assert [d["dial"] for d in result["dials"]][:3] == ["learned", "mean:0.125", "mean:0.25"]
    assert "import budgetformer.models" in (run / "README.md").read_text()
    model, record = Run.open(run).model, Run.open(run).record
    assert model.config.kind == "ranked"
    assert record["recipe"]["base"]
    assert Run.open(run / "baseline").model.config.kind == "all"


def test_both_phases_are_announced_and_on_the_card(
    reviews: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("budgetformer.training.run.multiplies_bf16", lambda: True)
    words = ["--base", base, "--epochs", "1", "--set", "dense_epochs=2", "--max-length", "16", "--exits", "none"]
    assert command("train", reviews, "-o", tmp_path / "run", *words) == 0
    out, err = capsys.readouterr()
    assert f"{base} with all heads, epochs: 2 (dense_epochs)" in err
    assert "with budgets, from there, epochs: 1" in err
    assert "this processor multiplies bf16: --set precision=bf16 trains an encoder faster\n" in err
    assert "heads by layer " in err
    assert f"next:\n  budgetformer predict {tmp_path / 'run'} DATA" in out
    assert "rows/s" in out
    assert "; it was trained on from the twin, for 1 more epoch." in out
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| training with all heads | 2 epochs, 10 steps, " in card
    assert "| training with budgets, from there | 1 epochs, 5 steps, " in card
    assert "| training | 2 epochs" in (tmp_path / "run" / "baseline" / "README.md").read_text()


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_dial_is_settled_on_the_model_that_is_kept(keep: str, reviews: Path, base: Path, tmp_path: Path) -> None:
    """mean:X executes X of all heads once the run is loaded, whichever epoch's weights it keeps."""
    contrary = write_reviews(tmp_path / "v.csv", rows=40, seed=3)  # what is learnt makes it worse
    swap = {",pos": ",neg", ",neg": ",pos"}
    contrary.write_text(re.sub(",pos|,neg", lambda label: swap[label[0]], contrary.read_text()))
    few = ["--epochs", "3", "--set", "dense_epochs=0", "--set", "model.distill_weight=0", "--max-length", "16"]
    few += ["--exits", "none", "--set", "model.gates.kind=ranked"]
    few += ["--lr", "0.003", "--batch-size", "16", "--set", f"keep={keep}", "--validation", contrary]
    assert command("train", reviews, "--base", base, "-o", tmp_path / "run", *few) == 0
    opened = Run.open(tmp_path / "run")
    model, record = opened.model, opened.record
    remaining, best = (record["training"][name] for name in ("kept_epoch", "best_epoch"))
    assert best < 3
    assert remaining == (best if keep == "best" else 3)
    assert model.config.training_progress == remaining / 3
    data = open_data(DataSource(str(reviews), validation=str(tmp_path / "v.csv")))
    table = encode_split(data.splits["train"], data, opened.tokenizer, 16)
    for share in (0.25, 0.5, 0.75):
        heads = score(opened.engine(), table, f"mean:{share}").heads
        assert heads.mean() / model.config.num_attention_heads == pytest.approx(share, abs=0.03)
    last = load_file(tmp_path / "run" / "checkpoints" / "last" / "model.safetensors")
    same = all(last[name].equal(value) for name, value in model.state_dict().items() if "allocator" not in name)
    assert same == (keep == "last")


def test_a_finished_run_resumes_to_itself(run: Path, reviews: Path, base: Path) -> None:
    before = (run / "model.safetensors").read_bytes()
    assert command("train", reviews, "--base", base, "-o", run, *FAST, "--resume") == 0
    assert (run / "model.safetensors").read_bytes() == before


def test_calibrated_points_are_names_for_eval(
    run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    asked = ("--max-drop", "50", "--max-cost", "0.9", "--target-ms", "10000")
    assert command("calibrate", run, reviews, *asked, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["points"]) == {"max-drop-50", "max-cost-0.9", "target-ms-10000"}
    assert result == json.loads((run / "calibration.json").read_text())
    assert (dial := result["points"]["max-drop-50"]["dial"]) != "full"
    assert result["points"]["max-drop-50"]["guarantee"]["bound"] <= 0.5
    assert result["split"] == "validation"
    assert result["curve"][0]["dial"] == "full"
    assert result["curve"][0]["versus_full"]["value"] == 0.0
    held_out = write_reviews(tmp_path / "more.csv", rows=40, seed=5)
    assert command("eval", run, held_out, "--budget", "max-drop-50", "--json") == 0
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["dial"] == dial
    page = tmp_path / "page.html"
    assert command("explain", run, "--text", "a fine film", "--budget", "max-drop-50", "-o", page, "--json") == 0
    assert json.loads(capsys.readouterr().out)["dial"] == dial
    assert f'"{dial}"' in page.read_text()
    assert command("calibrate", run, held_out) == 0
    assert "mean:0.25" in capsys.readouterr().out
    assert command("calibrate", run, held_out, "--max-drop", "1") == 2
    assert "--max-drop 1 at a confidence of 0.95 needs at least 368 rows" in capsys.readouterr().err
    assert command("calibrate", run, held_out, "--max-drop", "40") == 0
    assert command("eval", run, held_out, "--budget", "cheap") == 2
    assert "or one of this run's points: max-drop-40" in capsys.readouterr().err


def test_wrong_calibrations_are_named(run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (("--max-cost", "0.01"), "--max-cost 0.01: no position of the dial reaches it; the least is"),
        (("--max-cost", "2"), "--max-cost 2: give a share"),
        (("--max-drop", "-1"), "--max-drop -1: give a number above 0 and below 100"),
        (("--max-disagreement", "0"), "--max-disagreement 0: give a number above 0 and below 100"),
        (("--max-disagreement", "0.5"), "needs at least 598 rows that the model was not trained on, and there are 20"),
        (("--confidence", "1"), "--confidence 1: give a probability from 0.5 to below 1"),
        (("--target-ms", "0"), "--target-ms 0: give milliseconds above 0"),
    ):
        assert command("calibrate", run, reviews, *flags) == 2
        assert message in capsys.readouterr().err
    assert command("calibrate", run / "baseline", reviews) == 2
    assert "'all' has no budget to calibrate" in capsys.readouterr().err


def test_frozen_models(run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("export", run, "--format", "torch", "--budget", "0.5", "-o", tmp_path / "half") == 0
    assert "6 of 12 heads" in (said := capsys.readouterr().out)
    assert "loads with budgetformer only" in said
    assert command("eval", tmp_path / "half", reviews, "--json") == 0
    result = json.loads(capsys.readouterr().out)["evaluations"][0]
    assert result["budget"]["k_over_h"] == pytest.approx(0.5)
    assert command("export", run, "--format", "torch", "--budget", "1", "-o", tmp_path / "whole") == 0
    assert "an ordinary bert" in capsys.readouterr().out
    ordinary = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert ordinary.config.id2label == {0: "neg", 1: "pos"}
    assert command("export", run, "--format", "torch", "--budget", "1.2", "-o", tmp_path / "x") == 2
    assert "budget 1.2 is outside [0, 1]" in capsys.readouterr().err
    assert command("export", run, "--format", "torch", "-o", tmp_path / "half") == 2
    assert "exists already" in capsys.readouterr().err
    assert command("export", run, "--format", "torch", "--budget", "fixed:0.5", "-o", tmp_path / "x") == 2
    assert "budget fixed:0.5: give the share of all heads that are kept" in capsys.readouterr().err
    assert command("export", run, "--format", "torch", "--int8", "-o", tmp_path / "x") == 2
    assert "--int8 and --rows are for --format onnx" in capsys.readouterr().err


def test_a_delta_run_needs_its_base(reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = save_base(tmp_path / "base"), tmp_path / "run"
    short = [*FAST, "--epochs", "1", "--set", "dense_epochs=1", "--set", "delta=true"]
    assert command("train", reviews, "--base", base, "-o", folder, *short) == 0
    names = load_file(folder / "model.safetensors")
    assert all(".allocator." in name or "classifier" in name for name in names)
    assert command("eval", folder, reviews) == 0
    base.rename(tmp_path / "away")
    capsys.readouterr()
    assert command("eval", folder, reviews) == 4
    assert "is a delta on the base" in capsys.readouterr().err


def test_budgets_on_a_fine_tuned_base(run: Path, reviews: Path, base: Path, tmp_path: Path) -> None:
    once = ["--set", "dense_epochs=0", "--lr", "0.001", "--epochs", "1", "--max-length", "32"]
    more = ["--set", "model.gates.kind=order", "--set", "ranking=random", "--set", "model.gates.learn_order=false"]
    assert command("train", reviews, "--base", run / "baseline", "-o", tmp_path / "again", *once, *more) == 0
    assert not (tmp_path / "again" / "baseline").exists()


def test_the_dense_models_layers_teach_and_the_run_resumes(run: Path, reviews: Path, tmp_path: Path) -> None:
    taught = ["--set", "dense_epochs=0", "--set", "model.distill_layers=1", "--set", "model.dropout=0"]
    few = ["--base", run / "baseline", "-o", tmp_path / "again", "--epochs", "1", "--max-length", "32"]
    assert command("train", reviews, *few, *taught) == 0
    steps = [json.loads(line) for line in (tmp_path / "again" / "history.jsonl").read_text().splitlines()]
    assert {"task", "distill", "layers"} <= set(steps[0]["parts"])
    assert command("train", reviews, *few, *taught, "--resume") == 0


def test_a_base_is_only_fine_tuned_with_all_heads(reviews: Path, base: Path, tmp_path: Path) -> None:
    plain = ["--set", "dense_epochs=0", "--set", "model.gates.kind=all", "--set", "model.distill_weight=0"]
    few = ["--epochs", "1", "--max-length", "32"]
    fresh = save_base(tmp_path / "base", id2label={0: "x", 1: "y", 2: "z"})
    assert command("train", reviews, "--base", fresh, "-o", tmp_path / "dense", *few, *plain) == 0
    assert Run.open(tmp_path / "dense").model.config.kind == "all"


def test_wrong_bases_are_named(
    run: Path, reviews: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=99)
    )
    gpt.save_pretrained(tmp_path / "gpt")
    for file in base.glob("tokenizer*"):
        (tmp_path / "gpt" / file.name).write_bytes(file.read_bytes())
    tiny("bert", max_position_embeddings=16).save_pretrained(tmp_path / "short")
    for file in base.glob("tokenizer*"):
        (tmp_path / "short" / file.name).write_bytes(file.read_bytes())
    lines = (reviews.read_text()).replace(",pos", ",good")
    (tmp_path / "other.csv").write_text(lines)
    for number, (data, words, code, message) in enumerate((
        (reviews, ["--base", tmp_path / "gpt"], 4, "the architecture 'gpt2' is not supported: retrofit takes bert"),
        (reviews, ["--base", tmp_path / "none"], 4, "none' cannot be loaded"),
        (reviews, ["--base", tmp_path / "short"], 2, "the base has 16 positions: lower --max-length"),
        (reviews, ["--base", base, "--preset", "tiny"], 2, "the preset base is for --base, and only it"),
        (reviews, ["--preset", "base"], 2, "the preset base is for --base, and only it"),
        (reviews, ["--set", "delta=true"], 2, "goes with --base"),
        (reviews, ["--base", base, "--set", "dense_epochs=-1"], 2, "dense_epochs=-1: give a whole number"),
        (reviews, ["--base", base, "--set", "ranking=best"], 2, "ranking='best': give one of importance, random"),
        (reviews, ["--base", base, "--set", "model.gates={kind='ranked',target_budget=2}"], 2, "target_budget=2"),
        (reviews, ["--base", base, "--set", "model.hidden_size=8"], 2, "hidden_size=8: it is the base's, 32"),
        (tmp_path / "other.csv", ["--base", run / "baseline"], 4, "has the labels neg, pos, and these are wanted"),
    )):  # fmt: skip
        assert command("train", data, *words, "-o", tmp_path / f"run{number}") == code, words
        assert message in capsys.readouterr().err, words


def test_an_encoder_without_a_classifier_is_not_fine_tuned(
    reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base")
    tensors = {k: v for k, v in load_file(base / "model.safetensors").items() if "classifier" not in k}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    words = ["--set", "dense_epochs=0", "--max-length", "32"]
    assert command("train", reviews, "--base", base, "-o", tmp_path / "run", *words) == 2
    assert "dense_epochs=0 is for a base that is fine-tuned already" in capsys.readouterr().err


def test_a_run_that_stopped_in_its_dense_part_goes_on(reviews: Path, base: Path, tmp_path: Path) -> None:
    folder, short = tmp_path / "run", [*FAST, "--epochs", "1", "--set", "dense_epochs=1"]
    assert command("train", reviews, "--base", base, "-o", folder, *short) == 0
    finished = (folder / "model.safetensors").read_bytes()
    for path in [p for p in folder.iterdir() if p.name != "baseline" and not p.name.startswith("tokenizer")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert command("train", reviews, "--base", base, "-o", folder, *short) == 2  # it holds a run already
    assert command("train", reviews, "--base", base, "-o", folder, *short, "--resume") == 0
    assert (folder / "model.safetensors").read_bytes() == finished

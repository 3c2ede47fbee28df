"""The main job as a user types it: train, look, evaluate, resume; and every wrong way with its message and code."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from tests.processes import command, forked
from tests.training.toy import write_reviews

import budgetformer
from budgetformer import BudgetFormerForSequenceClassification
from budgetformer.data.splits import text_hash
from budgetformer.runs.record import FORMAT_VERSION
from budgetformer.runs.rows import TRAINING_ROWS
from budgetformer.training.loop import Fit

SMALL = ["--exits", "none", "--preset", "tiny", "--epochs", "2", "--set", "vocab_size=200", "--max-length", "32"]


@pytest.fixture(scope="module")
def run(tiny_run: Path) -> Path:
    return tiny_run


def test_a_run_is_a_complete_directory(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "README.md", "evaluation.json", "history.jsonl",
        "run.json", "report.html", "checkpoints", "baseline", "examples.json",
    }  # fmt: skip
    assert not [p for p in run.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth") or p.name.endswith(".tmp")]


def test_it_learns_and_says_so(run: Path) -> None:
    result = json.loads((run / "evaluation.json").read_text())
    assert result["test"]["score"] >= 0.9
    assert result["test"]["quality"]["labels"] == ["neg", "pos"]
    assert [d["dial"] for d in result["dials"]][:2] == ["learned", "fixed:0.125"]
    assert result["baseline"]["test"]["budget"]["k_over_h"] == 1.0
    assert "the dense twin" in result["versus_baseline"]["verdict"]
    assert result["test"]["hardest"][0]["text"]
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "done"
    assert record["text_columns"] == ["review"]
    assert record["training"]["progress"] == 1.0
    assert record["environment"]["torch"] == torch.__version__


def test_a_few_validation_texts_are_stored_as_examples(run: Path, tiny_pairs: Path, reviews: Path) -> None:
    examples = json.loads((run / "examples.json").read_text())["examples"]
    rows, trained = reviews.read_text(encoding="utf-8"), set(load_arrays(run / TRAINING_ROWS)["hashes"].tolist())
    assert len(examples) == 5
    for example in examples:
        assert example["text"] in rows
        assert example["text_pair"] is None
        assert text_hash(example["text"], None) not in trained
    assert json.loads((tiny_pairs / "examples.json").read_text())["examples"][0]["text_pair"] in ("red", "blue")


def test_the_card_and_the_report_carry_the_figures(run: Path) -> None:
    score = json.loads((run / "evaluation.json").read_text())["test"]["score"]
    assert f"{score:.4f}" in (run / "README.md").read_text()
    assert "<svg" in (run / "report.html").read_text()


def test_the_directory_works_in_a_pipeline(run: Path) -> None:
    from transformers import pipeline

    classify = pipeline("text-classification", model=str(run), device="cpu")
    assert [a["label"] for a in classify(["a superb story of town", "the dull film of people"])] == ["pos", "neg"]


def test_eval_sweeps_the_dial(run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", str(run), str(reviews), "--split", "train", "--budget", "learned", "--budget", "fixed:0.25"]
    assert command(*arguments, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "warning: 160 of 200 rows were seen in training\n" in err
    assert [e["dial"] for e in result["evaluations"]] == ["learned", "fixed:0.25"]
    assert result["evaluations"][0]["rows"] == 200
    assert result["evaluations"][1]["budget"]["k_over_h"] == 0.25
    assert result["versus_baseline"]["p_value"] <= 1
    assert command("eval", str(run), str(reviews)) == 0
    out, err = capsys.readouterr()
    assert "on 20 test rows" in " ".join(out.split())
    assert "dense twin" in out
    assert "warning" not in err


def test_a_finished_run_is_only_shown_again(run: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "model.safetensors").read_bytes()
    again = ["train", str(reviews), "-o", str(run), *SMALL, "--epochs", "6", "--with-baseline", "--resume"]
    assert command(*again) == 0
    out, err = capsys.readouterr()
    assert "is finished" in err
    assert "report.html" in out
    assert (run / "model.safetensors").read_bytes() == before


def test_seeds_report_mean_and_spread(reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command("train", str(reviews), "-o", str(tmp_path / "s"), *SMALL, "--seeds", "2", "--json", "--no-examples")
        == 0
    )
    summary = json.loads(capsys.readouterr().out)
    scores = summary["models"]["budgetformer"]["score"]
    assert summary["seeds"] == [0, 1]
    assert scores["mean"] == pytest.approx(sum(scores["values"]) / 2)
    assert (tmp_path / "s" / "seed-1" / "report.html").exists()
    assert list(tmp_path.rglob("examples.json")) == []


@pytest.mark.parametrize(("kind", "metric"), [("pairs", "accuracy"), ("multi", "micro_f1"), ("regression", "r2")])
def test_multi_label_regression_and_pairs_train_too(kind: str, metric: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"tiny_{kind}")
    assert json.loads((folder / "evaluation.json").read_text())["test"]["metric"] == metric
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "{missing}.csv"], 3, "missing"),
        (["train", "{reviews}", "-o", "{run}"], 2, "holds a run already: continue it with --resume"),
        (["train", "{reviews}", "-o", "{reviews}"], 2, "is a file"),
        (["train", "{reviews}", "-o", "{full}"], 2, "is not empty and holds no run"),
        (["train", "{reviews}", "-o", "{new}", "--preset", "huge"], 2, "preset 'huge' is not known"),
        (["train", "{reviews}", "-o", "{new}", "--epochs", "0"], 2, "epochs=0"),
        (["train", "{reviews}", "-o", "{new}", "--set", "model.gates.min_head=0"], 2, "did you mean 'min_heads'"),
        (["train", "{reviews}", "-o", "{new}", "--recipe", "{missing}.toml"], 2, "does not exist"),
        (["train", "{reviews}", "-o", "{new}", "--max-length", "9999"], 2, "exceeds max_position_embeddings"),
        (["train", "{reviews}", "-o", "{new}", "--label", "sentimental"], 3, "sentimental"),
        (["train", "{reviews}", "-o", "{new}", "--tokenizer", "{missing}"], 4, "missing"),
        (["train", "{reviews}", "-o", "{new}", "--task", "several"], 2, "several"),
        (["train", "{reviews}", "-o", "{new}", "--speed", "9"], 2, "--speed"),
        (
            ["train", "{reviews}", "-o", "{run}", "--resume", "--preset", "tiny"],
            4,
            "cannot resume: recipe.epochs was 6",
        ),
        (["eval", "{missing}", "{reviews}"], 4, "does not exist: give the directory of a run"),
        (["eval", "{full}", "{reviews}"], 4, "give the directory of a run"),
        (["eval", "{run}", "{reviews}", "--budget", "half"], 2, "budget 'half' is not known"),
        (["eval", "{run}", "{reviews}", "--split", "test"], 2, "has no split 'test'"),
        (["eval", "{run}", "{strange}"], 3, "strange"),
        (["train", "hub:nobody/nothing", "-o", "{new}", "--offline"], 3, "nobody/nothing"),
        (["train", "ag_news", "-o", "{new}", "--offline"], 3, "ag_news"),
    ],
)
def test_wrong_commands(
    arguments: list[str],
    code: int,
    message: str,
    run: Path,
    reviews: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "strange.csv").write_text("review,sentiment\na film,strange\n")
    places = {
        "missing": tmp_path / "missing", "reviews": reviews, "run": run, "full": tmp_path / "full",
        "new": tmp_path / "new", "strange": tmp_path / "strange.csv",
    }  # fmt: skip
    assert command(*(word.format(**places) for word in arguments)) == code
    assert message in capsys.readouterr().err
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def ending(signal_number: int, at: int) -> Callable[[], None]:
    """Makes a process send itself a signal before it takes the step that follows `at` steps."""

    def arrange() -> None:
        step = Fit._step

        def signalled(self: Fit, rows: Any) -> Any:
            if self.state.step == at:
                os.kill(os.getpid(), signal_number)
            return step(self, rows)

        Fit._step = signalled  # type: ignore[method-assign]

    return arrange


def test_killed_or_interrupted_runs_resume_to_the_same_weights(reviews: Path, tmp_path: Path) -> None:
    arguments = ["train", str(reviews), *SMALL, "--exits", "1", "--set", "checkpoint_minutes=0.0001"]
    complete, broken = tmp_path / "whole", tmp_path / "broken"
    assert forked(*arguments, "-o", complete).returncode == 0
    killed = forked(*arguments, "-o", broken, before=ending(signal.SIGKILL, 7))
    assert killed.returncode == -signal.SIGKILL
    stopped = forked(*arguments, "-o", broken, "--resume", before=ending(signal.SIGINT, 13))
    assert stopped.returncode == 130, stopped.stderr
    assert "saved at step 14 of 20; continue with --resume" in stopped.stderr
    assert json.loads((broken / "run.json").read_text())["status"] == "interrupted"
    finished = forked(*arguments, "-o", broken, "--resume")
    assert finished.returncode == 0, finished.stderr
    a, b = (load_file(folder / "model.safetensors") for folder in (complete, broken))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    for file in ("evaluation.json", "tokenizer.json", "config.json"):  # which has the exit rule
        assert (complete / file).read_text() == (broken / file).read_text()


def test_a_changed_data_file_is_refused_on_resume(reviews: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(reviews.read_text())
    arguments = ["train", str(data), *SMALL, "-o", str(tmp_path / "run")]
    assert forked(*arguments, before=ending(signal.SIGTERM, 3)).returncode == 130
    data.write_text(data.read_text().replace("superb", "decent"))
    refused = forked(*arguments, "--resume")
    assert refused.returncode == 4
    assert "cannot resume: data was" in refused.stderr


def test_a_run_goes_on_when_its_files_have_moved(reviews: Path, tmp_path: Path) -> None:
    held_out = write_reviews(tmp_path / "held_out.csv", rows=20, seed=1)
    arguments = ["train", reviews, *SMALL, "-o", tmp_path / "run", "--validation"]
    assert forked(*arguments, held_out, before=ending(signal.SIGTERM, 3)).returncode == 130
    moved = held_out.rename(tmp_path / "moved.csv")
    assert command(*arguments, moved, "--resume") == 0


def test_a_tokenizer_that_is_there_is_not_deleted(
    run: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in run.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = (tmp_path / "tokenizer.json").read_bytes()
    assert command("train", reviews, "--tokenizer", tmp_path, "-o", tmp_path, *SMALL) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_an_attempt_that_failed_before_training_makes_way(reviews: Path, tmp_path: Path) -> None:
    arguments = ["train", reviews, "-o", tmp_path / "run", *SMALL]
    assert command(*arguments, "--set", "model.min_head=0") == 2  # after the tokenizer was written
    assert (tmp_path / "run" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preparing"
    assert command("eval", tmp_path / "run", reviews) == 4
    assert command(*arguments) == 0


def test_the_record_tells_the_training_rows_from_others(run: Path, reviews: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["data_path"] == str(reviews.resolve())
    assert set(record["data_digests"]) == {"train"}
    assert record["format_version"] == FORMAT_VERSION
    hashes = load_arrays(run / TRAINING_ROWS)["hashes"]
    lines = [line.rsplit(",", 1)[0] for line in reviews.read_text().splitlines()[1:]]
    assert hashes.dtype == np.uint64
    assert len(hashes) == record["splits"]["train"]
    assert set(hashes.tolist()) < {text_hash(text, None) for text in lines}


def test_the_first_model_is_gone_when_the_second_trains(
    reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = []

    class Counting(Fit):
        def run(self, *, resume: bool = False) -> Any:
            gc.collect()
            alive.append(sum(isinstance(thing, BudgetFormerForSequenceClassification) for thing in gc.get_objects()))
            return super().run(resume=resume)

    monkeypatch.setattr("budgetformer.training.run.Fit", Counting)
    assert command("train", reviews, "-o", tmp_path / "run", *SMALL, "--epochs", "1", "--with-baseline") == 0
    assert alive[1] == alive[0]


SEEDS = """
import os, sys, time
from pathlib import Path
from budgetformer.cli import main
from budgetformer.training import run
train = run.train_run
def late(source, recipe, folder, **options):
    shared = folder / "tokenizer.json"
    if os.environ.get("RANK") != "1":
        return train(source, recipe, folder, **options)
    while not shared.exists() and folder.name != "seed-0":
        time.sleep(0.05)
    before = shared.stat().st_ino if shared.exists() else None
    result = train(source, recipe, folder, **options)
    assert before in (None, shared.stat().st_ino), "the second process wrote what the first had written"
    return result
run.train_run = late
sys.argv[0] = "budgetformer"
main()
"""


def test_two_processes_do_the_work_of_one(reviews: Path, tmp_path: Path) -> None:
    """Under torchrun, the same global batch gives the same weights up to rounding (noise and dropout are off)."""
    still = ["--set", "model.dropout=0.0", "--set", "model.gates.sigma_max=0.0", "--set", "batch_size=15"]
    arguments = ["train", str(reviews), *SMALL, *still, "--set", "learning_rate=0.0003", "--exits", "1"]
    assert command(*arguments, "-o", tmp_path / "one") == 0
    (tmp_path / "seeds.py").write_text(SEEDS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "seeds.py"), *arguments, "--seeds", "2", "-o", str(tmp_path / "two")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    folders = (tmp_path / "one", tmp_path / "two" / "seed-0")
    records: list[Any] = [json.loads((folder / "run.json").read_text()) for folder in folders]
    assert [r["training"]["processes"] for r in records] == [1, 2]
    seeds = json.loads((tmp_path / "two" / "seeds.json").read_text())
    assert len(seeds["models"]["budgetformer"]["flops_ratio"]["values"]) == 2
    one, two = (load_arrays(folder / "checkpoints" / "words.safetensors") for folder in folders)
    assert {name for name in one if not np.array_equal(one[name], two[name])} == set()  # fitted by one, read by both
    names = [budgetformer.load(folder).config.stages.names for folder in folders]
    assert names == [["words", "layer 1", "layer 2"]] * 2
    a, b = (load_file(folder / "checkpoints" / "last" / "model.safetensors") for folder in folders)
    for name in a:
        # The bias of keys has no gradient but rounding, which Adam blows up; everything else must agree.
        if not name.endswith("qkv.bias"):
            torch.testing.assert_close(a[name], b[name], atol=2e-4, rtol=1e-3, msg=name)


DIVERGING = """
import os, sys
from budgetformer.cli import main
from budgetformer.training.loop import Fit
backward = Fit._backward
def spoiled(self, piece, of, sums):
    backward(self, piece, of, sums)
    if self.state.step == 2 and os.environ["RANK"] == "1":
        sums["loss"] = sums["loss"] * float("nan")
Fit._backward = spoiled
sys.argv[0] = "budgetformer"
main()
"""


def test_every_process_stops_when_one_diverges(reviews: Path, tmp_path: Path) -> None:
    (tmp_path / "diverging.py").write_text(DIVERGING)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "diverging.py"), "train", str(reviews), *SMALL, "-o", str(tmp_path / "run")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "exitcode  : 4" in done.stderr, done.stderr
    assert "error: training diverged at step 3 of 20: the loss is nan" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_bench_times_a_run_from_text_to_label(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("bench", str(run), "--texts", "12", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["texts"] == 12
    assert [row["batch"] for row in result["rows"]] == [1, 8, 32]
    assert 0 < result["k_over_h"] <= 1
    assert result["energy"] is None
    assert command("bench", str(run / "baseline")) == 4
    assert "no dense twin to compare with" in capsys.readouterr().err

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from budgetformer.cli import app
from budgetformer.errors import BudgetFormerError, DataError, ModelError, UsageError
from budgetformer_reproduction.cell import make_tokenizer
from budgetformer_reproduction.cells import Cell, Plan
from budgetformer_reproduction.controls import same_flops, same_heads
from budgetformer_reproduction.dry_run import config_of, load_of
from budgetformer_reproduction.figures import annotators_agreement, dynamics, gradings
from budgetformer_reproduction.grid import GridError
from budgetformer_reproduction.pack import pack
from budgetformer_reproduction.published import parameters
from budgetformer_reproduction.reproduce import EXPERIMENTS, make_plan, needed, run
from budgetformer_reproduction.results import Findings, claim, paired
from budgetformer_reproduction.scale import DATASETS, SCALES
from budgetformer_reproduction.scaling import rows_needed
from budgetformer_reproduction.schema import IDS, Lines, Measured, Series
from budgetformer_reproduction.store import Store
from budgetformer_reproduction.tables import fixed
from tests.paper.made import make_data, smoke_plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_data(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def done(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything at smoke scale, once for all tests of this file."""
    folder = tmp_path_factory.mktemp("all")
    result = CliRunner().invoke(
        app, ["reproduce", "all", "--scale", "smoke", "-o", str(folder)], env={"BUDGETFORMER_DATA": data}
    )
    assert result.exit_code == 0, result.output
    return folder


def result_of(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / "results" / f"{name}.json").read_text()))


def test_every_artefact_is_written(done: Path) -> None:
    for name in EXPERIMENTS:
        result = result_of(done, name)
        assert (result["id"], result["scale"]) == (name, "smoke")
        assert result["tables"] or result["figures"]
        assert result["provenance"]["cells"] > 0
        for figure in result["figures"]:
            assert (done / "figures" / f"{name}-{figure['name']}.svg").stat().st_size > 0
    for suffix in ("md", "tex", "html"):
        assert (done / f"reproduction.{suffix}").stat().st_size > 0
    verdicts = {c["verdict"] for name in EXPERIMENTS for c in result_of(done, name)["claims"]}
    assert verdicts <= {"holds", "does not hold"}


def test_the_tables_say_what_the_cells_did(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    learned = Store(plan).get(plan.learned("snli"))[0]
    row = next(r for r in result_of(done, "main")["tables"][0]["rows"] if r["dataset"] == "SNLI")
    rows = learned.rows
    assert row["topk"]["mean"] == pytest.approx(learned.test["score"])
    assert row["topk"]["mean"] == float(rows["correct"].mean())
    assert row["topk"]["published"] == 0.8106
    assert row["s"]["mean"] == pytest.approx(float(rows["budget"].astype(float).mean()))
    assert row["s"]["mean"] == pytest.approx(learned.test["budget"]["s_mean"], abs=1e-3)
    assert row["k"]["mean"] == learned.test["budget"]["k_over_h"]
    assert rows["lines"].tolist() == list(range(1, 61))
    heat = result_of(done, "heatmaps")["figures"][0]["panels"][0]
    neutral = rows["budget"][rows["labels"] == heat["columns"].index("neutral")].astype(float)
    assert heat["values"][1][heat["columns"].index("neutral")] == pytest.approx(float(neutral[:, 1].mean()))
    maps = result_of(done, "attention-maps")["figures"][0]["panels"]
    assert len(maps) == 2 * 4
    assert np.allclose(np.sum(maps[0]["values"], axis=1), 1, atol=0.01)


def test_words_and_exits_and_other_widths_stand_beside(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    staged = Store(plan).get(plan.staged("snli"))[0]
    row = next(r for r in result_of(done, "main")["tables"][0]["rows"] if r["dataset"] == "SNLI")
    assert row["staged"]["mean"] == staged.accuracy
    assert row["staged_ratio"]["mean"] == staged.test["cost"]["flops_ratio"]
    assert plan.staged("imdb") == []
    models = [r["model"] for r in result_of(done, "controls")["tables"][0]["rows"]]
    assert models.count("dense Transformer with words and exits") == 1
    table = result_of(done, "data-scale")["tables"][1]
    assert table["title"].endswith("50 % of the scale's training rows")
    widths = table["rows"]
    assert [r["width"] for r in widths] == [8, 16]
    assert widths[0]["parameters"]["mean"] < widths[1]["parameters"]["mean"]
    gap = 100 * abs(widths[0]["dense"]["mean"] - widths[1]["dense"]["mean"])
    words = f"Widths from 8 to 16 differ by at most {gap:.1f} points with 100 rows."
    assert result_of(done, "data-scale")["summary"].endswith(words)
    rates = {d: json.loads((done / "cells" / f"snli-{d}-s0" / "run.json").read_text())["recipe"]["learning_rate"]
             for d in ("dense-50pct", "dense-width16-50pct")}  # fmt: skip
    assert rates == {"dense-50pct": 3e-3, "dense-width16-50pct": 1.5e-3}


def test_rates_fall_with_the_width_from_twice_the_usual_one(tmp_path: Path) -> None:
    cells = needed(make_plan("medium", tmp_path), ["data-scale"])
    rates = {w: cells[f"snli-dense-width{w}-25pct-s0"].recipe["learning_rate"] for w in (32, 64, 256)}
    assert rates == {32: 2e-3, 64: 2e-3, 256: 5e-4}


def test_the_table_of_sizes_says_what_is_other_in_it(done: Path) -> None:
    (table,) = result_of(done, "model-scale")["tables"]
    assert table["note"].startswith("All sizes of this table have hidden_size 8, 50 % of the scale's training rows, ")
    assert [row["topk"]["mean"] is not None for row in table["rows"]] == [True, True]


def test_the_learning_curve_stands_beside_the_papers(done: Path, data: str) -> None:
    (figure,) = result_of(done, "data-scale")["figures"]
    names = ["Transformer, width 8", "BudgetFormer, width 8", "Transformer, width 16"]
    names += ["Transformer, the paper's", "BudgetFormer, the paper's"]
    assert ([series["name"] for series in figure["series"]], figure["log_x"]) == (names, True)
    dense, ours, wide, paper, _ = figure["series"]
    plan = smoke_plan(done, data)
    assert (dense["x"], dense["y"]) == ([200], [Store(plan).get(plan.dense("snli"))[0].accuracy])
    assert (ours["x"], wide["x"]) == ([20, 50, 100, 200], [100])
    drawn = (done / "figures" / "data-scale-learning-curve.svg").read_text()
    assert "100,000" in drawn
    assert "mathdefault" not in drawn
    assert (paper["x"], paper["y"]) == ([54937, 137342, 274684, 549367], [0.6151, 0.6814, 0.7243, 0.7835])


@pytest.mark.parametrize(
    ("rows", "values", "words"),
    [
        ([], [], r"^$"),
        ([1000], [0.5], r"^With 1,000 training rows our Transformer has 0.5000; the paper's has 0.7835 with 549,367.$"),
        # halfway between the paper's first two points: sqrt(54,937 x 137,342) = 86,862 rows, (0.6151 + 0.6814) / 2
        ([86862], [0.7], r"has 0.7000; the paper's has 0.6482 with as many .* and 0.7835 with 549,367.$"),
        # 5 points a doubling, 3.35 points missing: 4,000 x 2^0.67 = 6,364
        ([1000, 2000, 4000], [0.65, 0.7, 0.75], r"gain ours \+5.0 points: if that goes on, it takes about 6,400 rows"),
        ([1000, 2000], [0.6, 0.5], r"gain ours -10.0 points.$"),
        ([1000, 2000], [0.7, 0.8], r"gain ours \+10.0 points.$"),
    ],
)
def test_the_rows_that_the_papers_accuracy_needs(rows: list[int], values: list[float], words: str) -> None:
    assert re.search(words, rows_needed(Series(name="dense", x=rows, y=values)))


def test_seeds_that_stop_early_are_drawn_as_far_as_all_go(done: Path, data: str, tmp_path: Path) -> None:
    plan = replace(smoke_plan(tmp_path, data, "imdb"), seeds=(0, 1))
    cells = plan.learned("imdb")
    for cell, epochs in zip(cells, (3, 2), strict=True):
        shutil.copytree(done / "cells" / "imdb-learned-s0", plan.cell(cell))
        file = plan.cell(cell) / "history.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        (epoch,) = (record for record in records if record["kind"] == "epoch")
        steps = [record for record in records if record["kind"] == "step"]
        more = [
            epoch | {"epoch": n, "validation": epoch["validation"] | {"score": n / 10}} for n in range(1, epochs + 1)
        ]
        file.write_text("".join(json.dumps(record) + "\n" for record in steps + more))
    (figure,) = dynamics(plan, Store(plan)).figures
    assert isinstance(figure, Lines)
    assert (figure.y2[0].x, figure.y2[0].y) == ([1, 2], [0.1, 0.2])


def test_an_explanation_is_of_one_scale_and_verdict(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    texts = {}
    for scale in ("cpu", "smoke"):
        for verdict in (False, True):
            findings = Findings("", claims=[claim("dynamics", "s falls during training", verdict, "")])
            result = findings.result("dynamics", replace(plan, scale=SCALES[scale]), [])
            texts[scale, verdict] = result.claims[0].explanation
    assert texts["cpu", False].startswith("Tried: how much was learned by then.")
    assert [texts[key] for key in (("cpu", True), ("smoke", False), ("smoke", True))] == ["", "", ""]


def test_the_second_wave_matches_the_first(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    store = Store(plan)
    learned = store.get(plan.learned("imdb"))[0]
    heads = same_heads(plan, "imdb", [learned])[0].model["gates"]["fixed_budget"] * 4
    assert heads == math.ceil(4 * learned.k_over_h - 1e-9)
    narrow = same_flops(plan, "imdb", [learned])[0]
    assert narrow.model["gates"]["kind"] == "all"
    assert 1 < narrow.model["intermediate_size"] < 16
    assert same_heads(plan, "imdb", []) == same_flops(plan, "imdb", []) == []


@pytest.mark.parametrize(
    ("heads", "budget"), [((1.0004, 1.001), 0.125), ((1.01, 1.02), 0.25), ((0.2, 0.4), 0.125), ((8.0,), 1)]
)
def test_the_same_heads_are_rounded_up_but_for_a_hundredth(heads: tuple[float, ...], budget: float) -> None:
    learned: Any = [SimpleNamespace(run={"model": {"heads": 8}}, k_over_h=k / 8) for k in heads]
    (cell,) = same_heads(make_plan("medium", Path("out")), "snli", learned)
    assert (cell.model["gates"], cell.name) == ({"kind": "fixed", "fixed_budget": budget}, f"snli-fixed-{budget:g}-s0")


def test_a_scale_says_which_fixed_budgets_are_trained(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    findings = fixed(replace(plan, scale=replace(plan.scale, fixed_budgets=(0.125, 0.5))), store := Store(plan))
    assert [name for name in store.asked if "fixed" in name] == ["snli-fixed-0.125-s0", "snli-fixed-0.5-s0"]
    trained, overridden = findings.tables
    assert [column.title for column in trained.columns[1:]] == ["s = 0.125", "s = 0.5", "learned s"]
    assert trained.rows[0]["0.125"] == Measured(mean=None)  # the smoke scale has no such cell, the paper no such number
    assert trained.rows[0]["0.5"].published == 0.5838
    assert [column.title for column in overridden.columns[1:3]] == ["s = 0.1", "s = 0.25"]


def test_snli_is_graded_by_its_annotators(done: Path, data: str, tmp_path: Path) -> None:
    plan = smoke_plan(done, data)
    people, loss = gradings(plan, "snli", Store(plan).get(plan.dense("snli")))
    votes = [json.loads(line) for line in (Path(data) / "snli" / "test_annotators.jsonl").read_text().splitlines()]
    expected = [max(map(v["annotator_labels"].count, (1, 2))) / 5 for v in votes]
    np.testing.assert_allclose(1 - people.difficulty, expected)
    assert people.grade.tolist() == [{1.0: 0, 0.8: 1, 0.6: 2}[share] for share in expected]
    assert np.bincount(loss.grade).tolist() == [20, 20, 20]
    other = make_data(tmp_path / "data", test=30)
    file = other / "snli" / "test_annotators.jsonl"
    file.write_text(file.read_text() + file.read_text())
    elsewhere = smoke_plan(tmp_path, str(other))
    with pytest.raises(DataError, match="has 60 rows for the 30 rows"):
        annotators_agreement(elsewhere)
    file.unlink()
    assert annotators_agreement(elsewhere) == {}
    lines = [json.loads(line) for line in (other / "snli" / "test.jsonl").read_text().splitlines()]
    rows = [{**row, "annotator_labels": [0, 0, 1, -1]} for row in lines]
    (other / "snli" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert set(annotators_agreement(elsewhere).values()) == {2 / 3}


def test_results_are_rendered_again_without_training(done: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "--from", str(done), "-o", str(tmp_path / "again")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again" / "reproduction.md").read_text() == (done / "reproduction.md").read_text()


def test_packed_cells_give_the_same_results_elsewhere_and_hold_no_text(done: Path, data: str, tmp_path: Path) -> None:
    packed, there = tmp_path / "packed", tmp_path / "there"
    rows = [json.loads(line) for line in (Path(data) / "snli" / "test.jsonl").read_text().splitlines()]
    texts = {row["text"] for row in rows}
    hardest = json.loads((done / "cells" / "snli-learned-s0" / "evaluation.json").read_text())["test"]["hardest"]
    assert hardest[0]["text"] in texts  # there is something to leave out
    result = CliRunner().invoke(app, ["reproduce", "pack", "--from", str(done), "-o", str(packed)])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(packed / f"{name}.zip") for name in DATASETS]
    first = (packed / "snli.zip").read_bytes()
    pack(done, packed)
    assert (packed / "snli.zip").read_bytes() == first
    for file in packed.iterdir():
        with zipfile.ZipFile(file) as archive:
            archive.extractall(there)
            for name in archive.namelist():
                content = archive.read(name).decode("utf-8", "replace")
                assert not [word for word in (str(done), data, *texts) if word in content], name
    assert not list(there.rglob("*.safetensors"))
    words = ["reproduce", "all", "--scale", "smoke", "-o", str(there)]
    result = CliRunner().invoke(app, words, env={"BUDGETFORMER_DATA": data})
    assert result.exit_code == 0, result.output
    assert not (there / "logs").exists()
    for name in set(EXPERIMENTS) - {"attention-maps"}:
        assert result_of(there, name) == result_of(done, name)
    assert "without its weights" in result_of(there, "attention-maps")["summary"]


def test_tables_of_the_finished_cells_without_training(done: Path, data: str, tmp_path: Path) -> None:
    plan, there, shown = smoke_plan(tmp_path / "there", data), tmp_path / "there", tmp_path / "shown"
    shutil.copytree(done, there)
    for file in there.rglob("model.safetensors"):
        file.unlink()
    for cell in (*plan.fixed("snli", 0.5), *plan.staged("snli")):
        shutil.rmtree(plan.cell(cell))
    shutil.rmtree(there / "logs")
    result = result_of(there, "main")
    (there / "results" / "main.json").write_text(json.dumps({**result, "title": "an earlier one"}))
    words = ["reproduce", "all", "--scale", "smoke", "--from", str(there), "-o", str(shown)]
    done_again = CliRunner().invoke(app, words, env={"BUDGETFORMER_DATA": data})
    assert done_again.exit_code == 0, done_again.output
    assert not (there / "logs").exists()
    assert not plan.cell(plan.staged("snli")[0]).exists()
    row = {row["dataset"]: row for row in result_of(shown, "main")["tables"][0]["rows"]}["SNLI"]
    assert row["staged"] == {"mean": None}
    assert row["dense"] == {r["dataset"]: r for r in result["tables"][0]["rows"]}["SNLI"]["dense"]
    assert result_of(shown, "main")["title"] == result["title"]
    assert result_of(shown, "needs") == result_of(done, "needs")
    assert result_of(shown, "attention-maps") == result_of(done, "attention-maps")  # its weights are gone: it stays


def test_a_cell_of_another_precision_counts_and_results_name_both(done: Path, data: str, tmp_path: Path) -> None:
    shutil.copytree(done, tmp_path / "there")
    plan = smoke_plan(tmp_path / "there", data)
    file = plan.cell(plan.dense("snli")[0]) / "run.json"
    record = json.loads(file.read_text())
    record["recipe"]["precision"], record["environment"]["cpu_flags"] = "bf16", "avx512_bf16"
    file.write_text(json.dumps(record))
    made = EXPERIMENTS["heatmaps"](plan, store := Store(plan)).result("heatmaps", plan, store.done).provenance
    assert made.precision == "fp32"
    made = EXPERIMENTS["main"](plan, store := Store(plan)).result("main", plan, store.done).provenance
    assert made.precision == "bf16 and fp32"
    assert made.machine.endswith("(avx512_bf16)") or "(avx512_bf16); " in made.machine
    assert len(made.machine.split("; ")) == 2


def test_cells_of_an_earlier_version_are_named(tmp_path: Path, data: str) -> None:
    plan = smoke_plan(tmp_path, data)
    cell = plan.learned("snli")[0]
    plan.cell(cell).mkdir(parents=True)
    for name in ("run", "probes"):
        (plan.cell(cell) / f"{name}.json").write_text('{"status": "done"}')
    with pytest.raises(ModelError, match=r"outcome\.npz"):
        plan.done(cell)
    np.savez(plan.cell(cell) / "outcome.npz", logits=np.zeros((2, 3)))
    with pytest.raises(ModelError, match=r"outcome\.npz was written by an earlier version: delete the cell's"):
        plan.done(cell)
    with pytest.raises(ModelError, match="earlier version"):
        pack(tmp_path, tmp_path / "packed")


def test_cells_of_other_test_rows_are_not_compared(done: Path, data: str) -> None:
    plan = smoke_plan(done, data)
    ours, other = Store(plan).get(plan.learned("snli")), Store(plan).get(plan.dense("snli"))
    other[0].rows["labels"][0] += 1
    with pytest.raises(
        DataError, match="have other test rows, so they cannot be compared: delete the cell's directory"
    ):
        paired(ours, other)


def test_the_list_tells_what_is_done(done: Path) -> None:
    listed = CliRunner().invoke(app, ["reproduce", "list", "--scale", "smoke", "-o", str(done)]).stdout
    assert "heatmaps: 1 of 1 cells done\n  snli-learned-s0\n" in listed
    assert "controls: 5 of 5 cells done, and more that depend on their results" in listed
    nothing = CliRunner().invoke(app, ["reproduce", "list", "--scale", "smoke", "-o", "nowhere"]).stdout
    assert "main: 0 of 11 cells done" in nothing


def test_the_dry_run_steps_every_model(tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["reproduce", "--dry-run", "--scale", "smoke", "-o", str(tmp_path / "none")])
    assert out.exit_code == 0, out.output
    assert "33 cells, " in out.stdout
    assert "snli-learned: 4 cells, 200 rows, 7 steps" in out.stdout
    assert "FLOPs (3 x forward, padded to full length)" in out.stdout
    assert not (tmp_path / "none").exists()
    plan = tmp_path / "plan.toml"
    plan.write_text('scale = "smoke"\nflop_rate = 1e9\n')
    planned = CliRunner().invoke(app, ["reproduce", "heatmaps", "--dry-run", "--scale", str(plan)])
    assert "at 1e+09 FLOPs a second, given" in planned.stdout


def test_the_paper_scale_is_the_papers() -> None:
    plan = make_plan("paper", Path("out"))
    learned, dense = plan.learned("snli")[0], plan.dense("imdb")[0]
    config, recipe = config_of(plan, learned), plan.recipe(learned)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (768, 3072, 4)
    assert (config.num_attention_heads, config.vocab_size, config.labels) == (8, 30522, 3)
    assert parameters(config.labels, gated=True) == 54_184_743
    assert (recipe.epochs, recipe.batch_size, recipe.learning_rate, recipe.keep) == (10, 16, 2e-5, "last")
    assert (recipe.tokenizer, recipe.max_length) == ("bert-base-uncased", 64)
    assert plan.recipe(dense).max_length == 512
    assert load_of(plan, learned).steps == 10 * math.ceil(549_367 / 16)
    assert load_of(plan, dense).rows == 22_500  # a tenth of the training rows is for validation
    # 3 x 10 epochs x rows x (layers x (projections + scores + feed-forward) + pooling and classifier)
    N, D = 512, 768
    text = 4 * (8 * N * D * D + 4 * N * N * D + 16 * N * D * D) + 2 * N * D + 2 * D * 2
    assert load_of(plan, dense).flops == pytest.approx(30 * 22_500 * text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce"], "which experiment? Give all, or some of main, fixed"),
        (["reproduce", "mian"], "experiment 'mian' is not known: did you mean main?"),
        (["reproduce", "all", "--scale", "huge"], "--scale huge: give one of paper, cpu, medium, smoke"),
        (["reproduce", "all", "--datasets", "snli,cola"], "--datasets cola: give some of dbpedia_14"),
        (["reproduce", "--from", "nowhere"], "nowhere holds no results"),
        (["reproduce", "pack", "--from", "nowhere"], "nowhere holds no finished cells"),
        (["reproduce", "pack"], "reproduce pack: say where the cells are with --from"),
        (["reproduce", "all", "--scale", "nowhere.toml"], "--scale nowhere.toml: it cannot be read"),
        (["reproduce", "main", "--json"], "--json is for reproduce cost"),
    ],
)
def test_usage_errors(words: list[str], message: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, BudgetFormerError)
    assert message in str(error)
    assert error.exit_code == 2


def test_data_that_is_not_there(tmp_path: Path, data: str) -> None:
    (Path(data) / "imdb").rename(Path(data) / "elsewhere")
    try:
        plan = smoke_plan(tmp_path, data, "imdb")
        with pytest.raises(BudgetFormerError, match="imdb"):
            run(plan, ["main"])
    finally:
        (Path(data) / "elsewhere").rename(Path(data) / "imdb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("premis = 'x'", "field premis"),
        ("flop_rate = -1.0", "field flop_rate must be greater than 0, not -1.0"),
        ("precision = 'fp8'", "field precision must be 'fp32' or 'bf16', not 'fp8'"),
        ("scale = 3", "field scale must be a valid string, not 3: a plan has scale, data_dir, premise"),
        ("scale = 'huge'", "--scale huge: give one of paper, cpu, medium, smoke"),
        ("scale =", "it cannot be read"),
    ],
)
def test_a_wrong_plan_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        make_plan(str(file), tmp_path)


def test_a_plan_gives_data_and_the_pair_of_the_attention_maps(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('scale = "smoke"\ndata_dir = "somewhere"\nhypothesis = "A man sleeps."\n')
    plan = make_plan(str(file), tmp_path, 2, "snli")
    assert plan.pair == ("A man is playing guitar on a stage.", "A man sleeps.")
    assert (plan.scale.name, plan.data_dir, plan.seeds, plan.datasets) == ("smoke", "somewhere", (0, 1), ("snli",))


def test_the_experiments_are_those_that_results_may_have() -> None:
    assert tuple(EXPERIMENTS) == IDS


def test_a_failed_control_is_named_and_the_rest_is_written(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: Plan, cell: Cell) -> None:
        raise DataError("no words")

    monkeypatch.setattr("budgetformer_reproduction.cell.fit_tfidf", fail)
    with pytest.raises(GridError, match=r"snli-tfidf-s0 \(no words; log: ") as error:
        run(smoke_plan(tmp_path, data, "snli"), ["controls"])
    assert error.value.exit_code == 3
    models = [row["model"] for row in result_of(tmp_path, "controls")["tables"][0]["rows"] if row["accuracy"]["mean"]]
    assert "dense Transformer" in models
    assert "TF-IDF and logistic regression" not in models


def test_an_empty_grade_of_difficulty_has_an_empty_box(data: str, tmp_path: Path) -> None:
    plan = smoke_plan(tmp_path / "out", str(make_data(tmp_path / "data")), "snli")
    file = tmp_path / "data" / "snli" / "test_annotators.jsonl"
    file.write_text('{"annotator_labels": [1, 1, 1, 1, 1]}\n' * 60)
    run(plan, ["complexity"])
    groups = result_of(plan.folder, "complexity")["figures"][0]["panels"][0]["groups"]
    assert [(group["name"], group["n"]) for group in groups] == [("Simple", 60), ("Hard", 0), ("Very hard", 0)]
    assert groups[1]["q"] is None
    assert len(groups[0]["q"]) == 5
    assert (plan.folder / "figures" / "complexity-complexity.svg").stat().st_size > 0


def test_the_smoke_scale_has_a_vocabulary_for_real_alphabets(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    file = data / "dbpedia_14" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    letters = [chr(0xE0 + n) for n in range(125)]  # in 200 of its rows the data set has 251 pieces of one character
    rows[0]["text"] += " " + " ".join(f"{a}{b}" for a, b in zip(letters, reversed(letters), strict=True))
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    plan = smoke_plan(tmp_path / "out", str(data), "dbpedia_14")
    make_tokenizer(plan, "dbpedia_14")
    assert (plan.tokenizer("dbpedia_14") / "tokenizer.json").exists()

"""Graphs by stage: every architecture, exits between them, int8, and what an export says of itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from tests.cli.test_train import command
from tests.models.tiny import HEADS, KINDS, LAYERS, VOCAB, tiny
from tests.runs.test_without_torch import ABSENT
from tests.tables import make_table
from tests.training.toy import review_rows

from budgetformer import retrofit, speed
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.graphs import GraphEngine, StageGraph
from budgetformer.engine.onnx import OnnxGraph
from budgetformer.engine.openvino import OpenVinoGraph
from budgetformer.engine.scores import leave_early, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import BudgetFormerWarning, ModelError, UsageError
from budgetformer.exits import StageResult
from budgetformer.export import run as export_module
from budgetformer.export.run import stage_graphs
from budgetformer.export.traced import heads_by_layer, same_heads
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import hash_files
from budgetformer.runs.run import Run
from budgetformer.serving.service import Engine as ServedEngine
from budgetformer.serving.settings import Settings

FROZEN = {"kind": "frozen", "heads": [[0, 2], [], [1]]}
RULE = {"rule": [[0.5, -1.0]], "curve": [[0.4, 1.0], [1.0, 0.0]], "limit": 0.5}


def model_with(kind: str, gates: dict[str, Any], **exits: Any) -> BudgetFormerForSequenceClassification:
    """A tiny encoder with an exit behind its first layer that says something."""
    model = retrofit(tiny(kind), gates=gates, exits={"layers": [1], "words": False, **exits}).eval()
    for head in model.stages.heads:
        torch.nn.init.normal_(head.outer.weight, std=3.0)
    for attention in model.attentions:
        if hasattr(attention.allocator, "scorer"):
            torch.nn.init.normal_(attention.allocator.scorer.weight, std=0.3)
    return model


def some_rows(count: int = 24) -> TokenTable:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 20, count).tolist()
    return make_table(rng.integers(5, VOCAB, sum(lengths)), lengths)


def engine_of(
    model: BudgetFormerForSequenceClassification,
    budget: str = "exit:0",
    load: type[OnnxGraph | OpenVinoGraph] = OnnxGraph,
) -> GraphEngine:
    dial = Dial.parse(budget)
    heads = heads_by_layer(model, dial) if same_heads(model, dial) else None
    graphs = stage_graphs(model, dial, fused=load is OnnxGraph)
    parts = [StageGraph(load(graph.SerializeToString(), 1), depth, heads and heads[first:depth])
             for graph, first, depth in zip(graphs, (0, 1), (1, LAYERS), strict=True)]  # fmt: skip
    return GraphEngine(parts, model.config.spec, Path("export"), dial)


@pytest.mark.parametrize("load", [OnnxGraph, OpenVinoGraph])
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_answers_as_torch_does_behind_every_stage(
    kind: str, load: type[OnnxGraph | OpenVinoGraph]
) -> None:
    model, rows = model_with(kind, {"kind": "all"}, **RULE), some_rows()
    engine = engine_of(model, load=load)
    for budget in ("exit:0", "learned", "0.6", "full"):
        ours, theirs = score(engine, rows, budget), score(TorchEngine(model), rows, budget)
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)
        np.testing.assert_array_equal(ours.exits, theirs.exits)
        np.testing.assert_array_equal(ours.heads, theirs.heads)
        if budget == "exit:0":
            assert ours.stage_logits is not None
            np.testing.assert_allclose(ours.stage_logits, theirs.stage_logits, atol=1e-4)
    assert 0 < (score(engine, rows, "learned").exits == 0).sum() < len(rows)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize(
    ("gates", "budget"),
    [(FROZEN, "learned"), ({"kind": "order"}, "mean:0.4"), ({"kind": "ranked"}, "full"),
     ({"kind": "ranked"}, "mean:0.6"), ({"kind": "ranked"}, "max:0.5"), ({"kind": "learned"}, "learned")],
)  # fmt: skip
def test_heads_of_every_kind_of_gate(kind: str, gates: dict[str, Any], budget: str) -> None:
    model, rows = model_with(kind, gates), some_rows()
    ours, theirs = score(engine_of(model, budget), rows, budget), score(TorchEngine(model), rows, budget)
    np.testing.assert_array_equal(ours.heads, theirs.heads)
    np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)


def test_heads_that_no_text_gets_are_not_in_the_graph() -> None:
    model = model_with("bert", FROZEN)
    first, second = stage_graphs(model, Dial())
    attentions = [[n for n in g.graph.node if n.op_type == "MultiHeadAttention"] for g in (first, second)]
    assert [[onnx.helper.get_node_attr_value(n, "num_heads") for n in stage] for stage in attentions] == [[2], [1]]
    ordered = model_with("bert", {"kind": "order"})
    dense, fewer = (sum(g.ByteSize() for g in stage_graphs(ordered, Dial.parse(b))) for b in ("full", "mean:0.25"))
    assert fewer < dense
    assert sum(heads_by_layer(ordered, Dial.parse("mean:0.25"))) == HEADS * LAYERS // 4


def test_whoever_watches_the_stages_sees_them_and_may_send_rows_out() -> None:
    model, rows, seen = model_with("bert", {"kind": "all"}), some_rows(6), []

    def after(result: StageResult) -> Any:
        seen.append((result.stage, len(result.rows), result.heads.shape[1]))
        return result.rows < 2

    scores = score(engine_of(model), rows, "exit:0", batch_size=6, after=after)
    assert seen == [(0, 6, 1)]
    assert sorted(scores.exits.tolist()) == [0, 0, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staged")


@pytest.fixture(scope="module")
def run(folder: Path, base: Path) -> Path:
    """An encoder with words and an exit, and every kind of export of it."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in review_rows(1200, noise=0.4)))
    options = ("--lr", "0.002", "--epochs", "1", "--set", "dense_epochs=1", "--max-length", "32", "--batch-size", "16",
               "--exits", "1", "--set", "model.exits.word_bits=12")  # fmt: skip
    assert command("train", folder / "rows.jsonl", "-o", folder / "run", "--base", base, *options) == 0
    assert command("calibrate", folder / "run", folder / "rows.jsonl", "--max-disagreement", "10") == 0
    assert command("export", folder / "run", "-o", folder / "fp32", "--budget", "max-disagreement-10") == 0
    assert command("export", folder / "run", "-o", folder / "static", "--int8") == 0
    openvino = ("export", folder / "run", "--format", "openvino")
    assert command(*openvino, "-o", folder / "openvino") == 0
    assert command(*openvino, "-o", folder / "openvino-static", "--int8") == 0
    return folder / "run"


@pytest.mark.parametrize("name", ["fp32", "openvino"])
def test_an_export_is_set_to_any_budget_of_depth(name: str, run: Path, folder: Path) -> None:
    texts = [row["text"] for row in review_rows(60, noise=0.4)]
    ours, theirs = Run.open(folder / name), Run.open(run)
    shares = []
    for budget in ("exit:0", "0.3", "learned", "exit:inf"):
        answers, torch_answers = ours.predict(texts, budget=budget), theirs.predict(texts, budget=budget)
        assert (answers.labels, answers.exits) == (torch_answers.labels, torch_answers.exits)
        np.testing.assert_allclose(answers.cost, torch_answers.cost)
        shares.append(answers.cost.mean())
    assert shares[0] > shares[1] >= shares[-1]


@pytest.mark.parametrize("name", ["fp32", "static", "openvino", "openvino-static"])
def test_the_fast_path_equals_the_definition(name: str, run: Path, folder: Path) -> None:
    scorer = Run.open(folder / name).scorer("exit:0")
    table = scorer.encode([row["text"] for row in review_rows(200, noise=0.4)])
    everything = scorer.run(table)
    for limit in (0.01, 0.1, 0.5, 2.0, np.inf):
        fast = scorer.run(table, Dial("exit", float(limit)))
        slow = leave_early(everything, scorer.config.stages, limit)
        np.testing.assert_array_equal(fast.exits, slow.exits)
        np.testing.assert_allclose(fast.logits, slow.logits, atol=0.05 if "static" in name else 1e-4)


@pytest.mark.parametrize(("name", "engine"), [("static", "onnx"), ("openvino-static", "openvino")])
def test_static_int8_gives_a_text_the_same_label_in_any_batch(name: str, engine: str, run: Path, folder: Path) -> None:
    scorer = Run.open(folder / name).scorer("full")
    assert scorer.engine.name == f"{engine} int8 static"
    texts = [row["text"] for row in review_rows(40, noise=0.4)]
    alone = np.concatenate([scorer.score([text]).logits for text in texts])

    @settings(max_examples=25)
    @given(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=16), st.sampled_from(["full", "learned"]))
    def check(chosen: list[int], budget: str) -> None:
        table = scorer.encode([texts[i] for i in chosen])
        together = score(scorer.engine, table, budget, batch_size=len(chosen))
        if budget == "full":
            np.testing.assert_array_equal(together.logits.argmax(1), alone[chosen].argmax(1))
            np.testing.assert_allclose(together.logits, alone[chosen], atol=0.02)
        else:
            np.testing.assert_array_equal(together.exits, score(scorer.engine, table, budget, batch_size=1).exits)

    check()


def test_int8_leaves_what_decides_in_full_precision(run: Path, folder: Path) -> None:
    record = json.loads((folder / "static" / "export.json").read_text())
    assert (record["precision"], record["int8"]["scales"]) == ("int8 static", "static")
    assert record["int8"]["rows"] < record["verification"]["rows"]  # scales were fitted to the others
    assert record["verification"]["exits"]["labels_changed"] >= 0
    for graph in record["graphs"]:
        model = onnx.load(folder / "static" / graph["file"]).graph
        layers = graph["depth"] - (1 if graph["depth"] > 1 else 0)
        kinds = [node.op_type for node in model.node]
        assert kinds.count("MatMulIntegerToFloat") == 4 * layers  # Q, K and V at once, back, and the feed-forward's two
        assert "DynamicQuantizeMatMul" not in kinds
        assert all(len(node.input) == 7 for node in model.node if node.op_type == "MatMulIntegerToFloat")  # with bias
        assert kinds.count("Gemm") >= 2  # the exit's head, or pooler and classifier
        weights = [t for t in model.initializer if t.data_type == onnx.TensorProto.INT8]
        steps = {t.name: numpy_helper.to_array(t) for t in model.initializer if t.name.endswith(".step")}
        for weight in weights:
            assert steps[weight.name.removesuffix(".int8") + ".step"].shape == (weight.dims[1],)
            assert np.abs(numpy_helper.to_array(weight)).max() == 2 ** (record["int8"]["bits"] - 1) - 1


def test_weights_have_a_bit_less_where_the_processor_saturates(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "saturates", lambda: True)
    assert command("export", run, "-o", folder / "seven", "--int8", "--dynamic") == 0
    model = onnx.load(folder / "seven" / "layers-1.onnx").graph
    weights = [numpy_helper.to_array(t) for t in model.initializer if t.data_type == onnx.TensorProto.INT8]
    assert len(weights) == 4
    assert {int(np.abs(w).max()) for w in weights} == {63}
    assert json.loads((folder / "seven" / "export.json").read_text())["int8"]["bits"] == 7


def test_int8_for_another_processor_gets_a_warning(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("budgetformer.engine.graphs.saturates", lambda: True)
    record = json.loads((folder / "static" / "export.json").read_text())
    static = changed(folder / "static", tmp_path / "static", int8={**record["int8"], "bits": 8})
    with pytest.warns(BudgetFormerWarning, match="of 8 bits do not overflow, and here they do: export it"):
        Run.open(static).engine()


def test_a_guarantee_is_made_with_the_engine_that_answers(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = folder / "copy"
    shutil.copytree(folder / "fp32", copy)
    one = ("--text", "a superb story")
    warning = "warning: the guarantee max-disagreement-10 was made with torch, and onnx fp32 answers here, whose labels"
    assert command("predict", copy, *one) == 0  # it is what was exported
    assert warning in capsys.readouterr().err
    assert command("eval", copy, folder / "rows.jsonl", "--budget", "max-disagreement-10") == 0
    assert f"make it again with budgetformer calibrate {copy} DATA" in capsys.readouterr().err
    with pytest.warns(BudgetFormerWarning, match="max-disagreement-10"):
        Run.open(copy).predict(["a superb story"], budget="max-disagreement-10")
    with pytest.warns(BudgetFormerWarning, match="max-disagreement-10 was made with torch"):
        ServedEngine(Settings(copy))
    assert command("calibrate", copy, folder / "rows.jsonl", "--max-disagreement", "10", "--max-cost", "0.9") == 0
    saved = json.loads((copy / "calibration.json").read_text())
    assert (saved["engine"], set(saved["points"])) == ("onnx fp32", {"max-disagreement-10", "max-cost-0.9"})
    assert "rows were seen in training and are left out" in capsys.readouterr().err or saved["split"] == "validation"
    assert command("predict", copy, *one, "--budget", "max-disagreement-10") == 0
    assert "warning" not in capsys.readouterr().err
    assert command("export", run, "-o", copy) == 0  # a calibration does not stand in the way


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--dynamic",), 2, "--dynamic is for --int8: give both, or leave it out"),
        (("--int8", "--dynamic", "--format", "openvino"), 2, "leave it out, or give --format onnx"),
        (("--budget", "random"), 2, "budget 'random' cannot be exported"),
        (("--budget", "nonsense"), 2, "budget 'nonsense' is not known"),
    ],
)
def test_wrong_ways_are_refused(
    words: tuple[str, ...], code: int, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("export", run, "-o", tmp_path / "out", *words) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_static_scales_need_heads_that_are_the_same_for_every_text(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="--int8 static: which heads run depends on the text here"):
        Run.open(tiny_run).export(tmp_path / "out", int8="static")
    with pytest.raises(Exception, match="--int8 'half': give static or dynamic"):
        Run.open(tiny_run).export(tmp_path / "out", int8="half")


def test_openvino_is_not_for_heads_that_depend_on_the_text(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--format openvino: which heads run depends on the text here"):
        Run.open(tiny_run).export(tmp_path / "out", format="openvino")


def test_openvino_has_files_of_its_own_which_are_checked(run: Path, folder: Path, tmp_path: Path) -> None:
    record = json.loads((folder / "openvino-static" / "export.json").read_text())
    assert (record["format"], [graph["file"] for graph in record["graphs"]]) == (
        "openvino", ["layers-1.xml", "layers-3.xml"])  # fmt: skip
    assert {"layers-1.bin", "layers-3.bin"} < record["sha256"].keys()
    graph = (folder / "openvino-static" / "layers-1.xml").read_text()
    assert graph.count('element_type="i8"') == 4  # Q, K and V at once, back, and the feed-forward's two
    copy = tmp_path / "copy"
    shutil.copytree(folder / "openvino", copy)
    (copy / "layers-1.bin").write_bytes(b"0" * (copy / "layers-1.bin").stat().st_size)
    with pytest.raises(ModelError, match=r"layers-1\.bin was damaged or changed after it was written"):
        Run.open(copy)
    (copy / "layers-1.xml").write_text("<net/>")
    damaged = {**json.loads((copy / "export.json").read_text()), "sha256": hash_files(copy)}
    (copy / "export.json").write_text(json.dumps(damaged))
    with pytest.raises(ModelError, match=r"layers-1\.xml cannot be loaded by OpenVINO \(.*\): export it again"):
        Run.open(copy).engine()


def test_an_openvino_export_answers_without_torch_and_onnx_runtime(run: Path, folder: Path) -> None:
    texts, place = [row["text"] for row in review_rows(20, noise=0.4)], str(folder / "openvino-static")
    code = f"import sys\nsys.modules.update(dict.fromkeys({(*ABSENT, 'onnxruntime')}))\nimport json, budgetformer\n"
    code += f"print(json.dumps(budgetformer.load({place!r}).predict({texts!r}).labels))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == Run.open(place).predict(texts).labels


def test_without_openvino_its_exports_name_the_extra(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert command("predict", folder / "openvino", "--text", "a superb story") == 5
    assert "'openvino', which is not installed: install" in capsys.readouterr().err


def test_engines_are_compared_in_openvino_too(run: Path, tmp_path: Path) -> None:
    engines = speed._prepare(Run.open(run), Run.open(run), None, tmp_path)
    assert list(engines)[-2:] == ["OpenVINO dense int8", "OpenVINO staged int8"]
    texts = [row["text"] for row in review_rows(30, noise=0.4)]
    labels = {name: np.array(Run.open(place).predict(texts).labels) for name, (place, _) in engines.items()
              if name.startswith(("OpenVINO", "ONNX"))}  # fmt: skip
    for kind in ("dense", "staged"):
        assert np.mean(labels[f"OpenVINO {kind} int8"] == labels[f"ONNX {kind} fp32"]) > 0.9
    # The dense graph in int8 runs as people run it.
    assert Run.open(engines["ONNX dense int8"][0]).record["session"] == "default"


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    record = json.loads((target / "export.json").read_text())
    (target / "export.json").write_text(json.dumps({k: v for k, v in (record | changes).items() if v is not None}))
    return target


def test_a_manifest_of_another_export_is_refused(run: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"export\.json has no key 'graphs': .*export it again"):
        Run.open(changed(folder / "fp32", tmp_path / "old", graphs=None))
    graphs = [{"file": "layers-1.onnx", "depth": 2, "heads": None}]
    with pytest.raises(ModelError, match=r"has graphs up to the layers \[2\], and its model has stages up to \[1, 3\]"):
        Run.open(changed(folder / "fp32", tmp_path / "depths", graphs=graphs)).engine()
    graphs = json.loads((folder / "fp32" / "export.json").read_text())["graphs"]
    swapped = [{**graphs[0], "file": graphs[1]["file"]}, graphs[1]]
    with pytest.raises(ModelError, match=r"layers-3.onnx has the outputs .* export it again"):
        Run.open(changed(folder / "fp32", tmp_path / "swapped", graphs=swapped)).engine()
    shutil.copytree(folder / "fp32", tmp_path / "foreign")
    shutil.copy(folder / "static" / "layers-1.onnx", tmp_path / "foreign")
    with pytest.raises(ModelError, match=r"layers-1\.onnx was damaged or changed after it was written"):
        Run.open(tmp_path / "foreign")


def test_an_engine_that_is_too_old_is_refused(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.9.0")
    with pytest.raises(ModelError, match=r"onnxruntime 1\.9\.0 is too old, exports need .*: pip install -U"):
        Run.open(folder / "fp32").engine()

"""From a finished run to a directory with a checked ONNX graph, its tokenizer and its labels."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.dial import Dial
from budgetformer.engine.onnx import OnnxEngine, runtime, save_words, session
from budgetformer.engine.scores import Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.export.builder import OPSET
from budgetformer.export.network import EXIT, GATE, build, check
from budgetformer.export.verify import CheckRows, check_equal, loss_of_quality
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import hash_files, named_read_errors, read_json, write_directory, write_json
from budgetformer.runs.provenance import environment

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def export_model(
    model: BudgetFormerForSequenceClassification,
    tokenizer: Mapping[str, bytes],
    record: Mapping[str, Any],
    target: Path,
    *,
    dial: Dial,
    int8: bool,
    rows: CheckRows,
) -> dict[str, Any]:
    """Write `target`, whole or not at all, once its graph agrees with the model on `rows`; what export.json says.

    `tokenizer` is its files by name, `record` what the run says of itself: format, name, labels, columns and weights.
    """
    spec = model.config.spec
    theirs = score(TorchEngine(model), rows.table, dial)
    result: dict[str, Any] = {}
    words = None if model.stages.words is None else model.stages.words.model

    def scored(graph: bytes | Path) -> Scores:
        return score(OnnxEngine(session(graph), spec, target, dial, words), rows.table, dial)

    def fill(staged: Path) -> None:
        graph = build(model, dial).SerializeToString()
        verification = check_equal(model, dial, rows, theirs, scored(graph))
        file = staged / "model.onnx"
        file.write_bytes(graph)
        quantized = None
        if int8:
            quantize(build(model, dial, separate=True), file)
            probe(file)
            quantized = {**loss_of_quality(rows, theirs, scored(file), spec), "bytes_full_precision": len(graph)}
        for name, content in tokenizer.items():
            (staged / name).write_bytes(content)
        if words is not None:
            save_words(staged, words)
        result.update({
            "format": "onnx", "opset": OPSET, "dial": str(dial), "precision": "int8" if int8 else "fp32",
            **record, "task": spec.task, "model": asdict(spec),
            "heads": spec.num_attention_heads, "layers": spec.num_hidden_layers,
            "bytes": file.stat().st_size,
            "sha256": hash_files(staged),
            "files": sorted({"export.json", *(path.name for path in staged.iterdir())}),
            "verification": verification, "int8": quantized, "environment": environment("onnx", "onnxruntime"),
        })  # fmt: skip
        write_json(staged / "export.json", result)

    write_directory(target, fill, "Give another directory with -o")
    return result


def check_target(model: BudgetFormerForSequenceClassification, target: Path, dial: Dial) -> None:
    """Refuse what cannot be exported, and a target that is not ours: an earlier export may be replaced, no more."""
    runtime()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: give a directory with -o")
    if target.is_dir() and any(target.iterdir()):
        if not (target / "export.json").exists():
            raise UsageError(f"{target} is not empty and holds no export: give another directory with -o")
        with named_read_errors(target / "export.json", "give another directory with -o"):
            record = read_json(target / "export.json", "give another directory with -o")
            others = sorted({path.name for path in target.iterdir()} - {"calibration.json", *record["files"]})
        if others:
            raise UsageError(f"{target} holds {others[0]!r} too, which no export wrote: give another directory with -o")
    if model.config.base is not None:
        raise UsageError(
            "this run is a pretrained encoder with head budgets, whose graph is not ours to write: run it with torch, "
            "or export a run that was trained without --base"
        )
    if model.config.spec.exit_limit(dial):
        raise UsageError(
            f"budget {dial}: texts leave early with torch only, an exported graph runs all layers: leave --budget out"
        )
    check(model.config, dial)


def quantize(graph: ModelProto, path: Path) -> None:
    """Write the graph with the weights of its linear layers in int8 and its gates as they are."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    add_pre_process_metadata(graph)  # there is nothing to tidy up, and no need to warn of it
    quantize_dynamic(
        graph, path, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8,
        nodes_to_exclude=[node.name for node in nodes(graph.graph) if any(f"/{n}" in node.name for n in (GATE, EXIT))],
        extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
    )  # fmt: skip


def nodes(graph: GraphProto) -> list[NodeProto]:
    """All nodes, those of branches too."""
    branches = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
    return [*graph.node, *(node for branch in branches for node in nodes(branch))]


_PROBE = """
import sys, numpy
from pathlib import Path
from budgetformer.engine.onnx import session
graph = session(Path(sys.argv[1]))
kinds = {"tensor(int64)": numpy.int64, "tensor(float)": numpy.float32}
sizes = {n.name: (2, n.shape[1] if isinstance(n.shape[1], int) else 1) for n in graph.get_inputs()}
graph.run(None, {n.name: numpy.ones(sizes[n.name], kinds[n.type]) for n in graph.get_inputs()})
"""


def probe(path: Path) -> None:
    """Run the graph once in a process of its own: kernels that this processor cannot run must not end ours."""
    done = subprocess.run([sys.executable, "-c", _PROBE, str(path)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = signal.Signals(-done.returncode).name if done.returncode < 0 else lines[-1]
        raise ModelError(
            f"the int8 graph does not run on this machine ({why}): export without --int8, or on the machine that will "
            "run it. Nothing was written"
        )

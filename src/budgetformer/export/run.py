"""From a finished run to a directory with checked graphs, one for each stage, its tokenizer and its labels."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from budgetformer.data.batches import collate, eval_plan
from budgetformer.dial import Dial
from budgetformer.engine import onnx, openvino
from budgetformer.engine.graphs import Graph, GraphEngine, StageGraph, save_words
from budgetformer.engine.scores import Scores, leave_early, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.export.builder import OPSET
from budgetformer.export.cut import cut_stages
from budgetformer.export.network import build, check
from budgetformer.export.quantize import fit_scales, quantize
from budgetformer.export.traced import heads_by_layer, same_heads, trace
from budgetformer.export.verify import CheckRows, changes, check_equal
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import hash_files, named_read_errors, read_json, write_directory, write_json
from budgetformer.runs.provenance import environment, saturates

if TYPE_CHECKING:
    from onnx import ModelProto

INT8 = ("static", "dynamic")
_SCALED = 8  # every so many rows set the scales of static int8; the others show what it changes


class Format(NamedTuple):
    """A kind of graphs: the ending of their files, how ONNX becomes one, and the packages that have a part in it."""

    ending: str
    fused: bool  # whether it may have operators that ONNX Runtime alone has
    load: Callable[[bytes], Graph]
    save: Callable[[bytes, Path], Any]
    packages: tuple[str, ...]


FORMATS = {
    "onnx": Format(
        "onnx", True, onnx.OnnxGraph, lambda source, file: file.write_bytes(source), ("onnx", "onnxruntime")
    ),
    "openvino": Format("xml", False, openvino.OpenVinoGraph, openvino.save_graph, ("onnx", "onnxruntime", "openvino")),
}


def export_model(
    model: BudgetFormerForSequenceClassification,
    tokenizer: Mapping[str, bytes],
    record: Mapping[str, Any],
    target: Path,
    *,
    dial: Dial,
    int8: str | None,
    rows: CheckRows,
    format: str = "onnx",
    beside: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write `target`, whole or not at all, once its graphs agree with the model on `rows`; what export.json says.

    `tokenizer` is its files by name, `record` what the run says of itself; the files `beside` go along.
    """
    ending, fused, load, save, packages = FORMATS[format]
    config, graphs = model.config.spec, stage_graphs(model, dial, fused=fused)
    depth = config.exits is not None and dial.mode in ("learned", "share", "exit")
    full, limit = Dial("exit", 0.0) if depth else dial, config.exit_limit(dial)
    words = None if model.stages.words is None else model.stages.words.model
    parts, result = _parts(model, dial, ending), dict[str, Any]()

    def scored(sources: Sequence[bytes]) -> Scores:
        loaded = [StageGraph(load(s), p["depth"], p["heads"]) for s, p in zip(sources, parts, strict=True)]
        return score(GraphEngine(loaded, config, target, dial, words), rows.table, full)

    def fill(staged: Path) -> None:
        sources = [graph.SerializeToString() for graph in graphs]
        ours, bits, bytes_before = scored(sources), 7 if saturates() else 8, sum(map(len, sources))
        verification = check_equal(model, full, rows, score(TorchEngine(model), rows.table, full), ours)
        early = leave_early(ours, config.stages, limit) if limit else None
        verification["exits"] = None if early is None else changes(rows, ours, early, config)
        files, quantized = [staged / part["file"] for part in parts], None
        if int8:
            sources = _quantized(model, dial, graphs, int8, rows, bits, fused)
        for file, source in zip(files, sources, strict=True):
            save(source, file)
        if int8:
            probe(files)
            changed = changes(rows, ours, scored(sources), config, without=_SCALED if int8 == "static" else None)
            quantized = {"scales": int8, "bits": bits, **changed, "bytes_full_precision": bytes_before}
        for name, content in tokenizer.items():
            (staged / name).write_bytes(content)
        if words is not None:
            save_words(staged, words)
        for file in beside:
            shutil.copy(file, staged)
        result.update({
            "format": format, "opset": OPSET, "dial": str(dial), "precision": f"int8 {int8}" if int8 else "fp32",
            **record, "task": config.task, "model": asdict(config), "graphs": parts,
            "heads": config.num_attention_heads, "layers": config.num_hidden_layers,
            "bytes": sum(file.stat().st_size for file in staged.glob("layers-*")), "sha256": hash_files(staged),
            "files": sorted({"export.json", *(path.name for path in staged.iterdir())}),
            "verification": verification, "int8": quantized, "environment": environment(*packages),
        })  # fmt: skip
        write_json(staged / "export.json", result)

    write_directory(target, fill, "Give another directory with -o")
    return result


def _parts(model: BudgetFormerForSequenceClassification, dial: Dial, ending: str) -> list[dict[str, Any]]:
    """Of each stage's graph the file, its last layer, and the heads of its layers where all texts run the same."""
    heads = heads_by_layer(model, dial) if same_heads(model, dial) else None
    depths = [depth for depth in model.config.stages.depths if depth]
    return [
        {"file": f"layers-{last}.{ending}", "depth": last, "heads": heads and heads[first:last]}
        for first, last in zip([0, *depths], depths, strict=False)
    ]


def narrowed(model: BudgetFormerForSequenceClassification, dial: Dial) -> BudgetFormerForSequenceClassification:
    """The model to export: where groups of neurons are ranked, one that has the budget's alone."""
    config, budget, prices = model.config, dial.heads, model.prices if model.ranked_gates else None
    if prices is None or budget.mode in ("full", "random"):
        return model
    if config.gate.per_input:
        raise UsageError(
            f"--budget {dial}: a graph cannot choose feed-forward groups by text, as gates of the kind {config.kind!r} "
            "do; give --budget full, freeze the run first (--format torch), or train with model.gates.kind=order"
        )
    dials, _ = model._dials(budget, 1, progress := config.training_progress)
    x_11D, gates = torch.zeros(1, 1, config.hidden_size), zip(model.ranked_gates, dials, strict=True)
    with torch.inference_mode():
        active_U = torch.cat([gate(x_11D, None, progress, dial).active[0] for gate, dial in gates])
    frozen = model.freeze(float(prices[active_U].double().sum() / prices.double().sum()))
    return frozen if isinstance(frozen, BudgetFormerForSequenceClassification) else model


def stage_graphs(
    model: BudgetFormerForSequenceClassification, dial: Dial, *, separate: bool = False, fused: bool = True
) -> list[ModelProto]:
    """A graph for each stage of layers."""
    depths = [depth for depth in model.config.stages.depths if depth]
    return cut_stages(layers_graph(model, dial, separate=separate, fused=fused), depths)


def layers_graph(
    model: BudgetFormerForSequenceClassification, dial: Dial, *, separate: bool = False, fused: bool = True
) -> ModelProto:
    """All stages in one graph: traced, or where heads depend on the text, of our own encoder, hand-written.

    `fused` operators are those that ONNX Runtime alone has.
    """
    return build(model, dial, separate=separate) if skips_heads(model, dial) else trace(model, dial, fused=fused)


def skips_heads(model: BudgetFormerForSequenceClassification, dial: Dial) -> bool:
    """Whether the graph chooses heads by text, and leaves the others out."""
    return model.config.base is None and not same_heads(model, dial)


def choose_scales(
    model: BudgetFormerForSequenceClassification, dial: Dial, int8: bool | str, format: str
) -> str | None:
    """static or dynamic, where int8 is asked for: static unless the graph chooses heads."""
    if int8 not in (True, False, *INT8):
        raise UsageError(f"--int8 {int8!r}: give static or dynamic")
    if int8 == "dynamic" and format == "openvino":
        raise UsageError("--dynamic: OpenVINO has no such operator: leave it out, or give --format onnx")
    if int8 == "static" and skips_heads(model, dial):
        raise UsageError(
            "--int8 static: which heads run depends on the text here, so that what they read has no fixed scale: give "
            "--int8 --dynamic"
        )
    return ("dynamic" if skips_heads(model, dial) else "static") if int8 is True else int8 or None


def check_target(model: BudgetFormerForSequenceClassification, target: Path, dial: Dial, format: str) -> None:
    """Refuse what cannot be exported, and a target that is not ours: an earlier export may be replaced, no more."""
    onnx.runtime()
    if format == "openvino":
        openvino.runtime()
        if skips_heads(model, dial):
            raise UsageError("--format openvino: which heads run depends on the text here, and OpenVINO would run all: "
                             "give --format onnx")  # fmt: skip
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
    model.config.spec.exit_limit(dial)
    check(model.config, dial)


def _quantized(
    model: BudgetFormerForSequenceClassification,
    dial: Dial,
    graphs: Sequence[ModelProto],
    int8: str,
    rows: CheckRows,
    bits: int,
    fused: bool,
) -> list[bytes]:
    """The graphs in int8, with scales from some of the rows where they are static."""
    if int8 == "dynamic":
        parts = stage_graphs(model, dial, separate=True)
        for part in parts:
            quantize(part, None, bits=bits)
        return [part.SerializeToString() for part in parts]
    table = rows.table.select(np.arange(0, len(rows.table), _SCALED))
    plan = eval_plan(table.lengths, token_budget=max(4096, int(table.lengths.max())))
    batches = [collate(table, batch, model.config.pad_token_id or 0) for batch in plan]
    feeds: list[dict[str, Any]] = [
        {"input_ids": b.input_ids, "attention_mask": b.attention_mask,
         "token_type_ids": np.zeros_like(b.input_ids) if b.token_type_ids is None else b.token_type_ids}
        for b in batches
    ]  # fmt: skip
    for graph in graphs:
        scales, outputs = fit_scales(graph, feeds)
        feeds = [{**feed, **output} for feed, output in zip(feeds, outputs, strict=True)]
        quantize(graph, scales, bits=bits, fused=fused)
    return [graph.SerializeToString() for graph in graphs]


_PROBE = """
import sys, numpy
from pathlib import Path
from budgetformer.engine.graphs import open_graph
feed = {name: numpy.ones((2, 3), numpy.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
for file in sys.argv[1:]:
    feed |= open_graph(Path(file)).run(feed)
"""


def probe(files: Sequence[Path]) -> None:
    """Run the graphs once in a process of their own: kernels that this processor cannot run must not end ours."""
    done = subprocess.run([sys.executable, "-c", _PROBE, *map(str, files)], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        why = signal.Signals(-done.returncode).name if done.returncode < 0 else lines[-1]
        raise ModelError(
            f"the int8 graphs do not run on this machine ({why}): export without --int8, or on the machine that will "
            "run them. Nothing was written"
        )

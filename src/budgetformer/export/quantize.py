"""Linear layers in int8: weights by column, activations by scales from held-out rows, or batch by batch.

    x W + b  ~  (q(x) - z) q(W) * scale_x * scale_W + b,  q(x) in uint8, q(W) in int8, symmetric

What decides stays in full precision: gates, exits, the classifier. So do embeddings, attention maps and norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from budgetformer.engine.onnx import run_graph, session
from budgetformer.export.cut import all_nodes
from budgetformer.export.network import EXIT, GATE

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Floats = NDArray[np.float32]
Scale = tuple[np.float32, np.uint8]  # of a tensor: the step between two numbers, and the number that means zero
_FULL_PRECISION = {GATE, EXIT, "allocator"}  # parts of the names of nodes
_CLIPS = np.linspace(0.3, 1, 29)  # of a tensor's range, that are tried
_VALUES = 1 << 18  # of a tensor, that a scale is fitted to


def linear_layers(graph: GraphProto) -> list[tuple[NodeProto, str]]:
    """The products of hidden states with weights: the nodes, and the names of their weights.

    What is computed of a text as a whole, such as its logits, is a Gemm, or in a part that decides.
    """
    same = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}
    weights = {tensor.name for tensor in graph.initializer}
    names = [(node, same.get(node.input[1], node.input[1])) for node in all_nodes(graph) if node.op_type == "MatMul"]
    return [(n, w) for n, w in names if w in weights and not _FULL_PRECISION & set(n.name.split("/"))]


def fit_scales(
    model: ModelProto, batches: Iterable[Mapping[str, Any]]
) -> tuple[dict[str, Scale], list[dict[str, Any]]]:
    """Scales of what the linear layers read, from batches of inputs; and the graph's outputs for each batch.

    Of some ranges up to all that occurred, the one with the least mean squared error.
    """
    tensors = sorted({node.input[0] for node, _ in linear_layers(model.graph)})
    watched = type(model)()
    watched.CopyFrom(model)
    watched.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in tensors)
    graph, outputs = session(watched.SerializeToString()), []
    values: dict[str, list[Floats]] = {name: [] for name in tensors}
    for batch in batches:
        result = run_graph(graph, batch)
        real = np.asarray(batch["attention_mask"]).astype(bool)
        for name in tensors:
            values[name].append(result.pop(name)[real].ravel())
        outputs.append(result)
    return {name: _scale(np.concatenate(parts)) for name, parts in values.items()}, outputs


def _scale(values: Floats) -> Scale:
    sample = values[:: max(1, len(values) // _VALUES)]
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    best: tuple[float, Scale] | None = None
    for clip in _CLIPS:
        step = np.float32(max((high - low) * clip / 255, 1e-9))
        zero = np.uint8(np.clip(np.rint(-low * clip / step), 0, 255))
        back = (np.clip(np.rint(sample / step) + zero, 0, 255) - zero) * step
        error = float(((back - sample) ** 2).mean())
        if best is None or error < best[0]:
            best = error, (step, zero)
    assert best is not None
    return best[1]


def quantize(model: ModelProto, scales: Mapping[str, Scale] | None, *, bits: int) -> None:
    """Change a graph's linear layers to int8 in place; without `scales` each batch gets its own.

    `bits` of weights: 7 where a processor adds products of 8 bits in 16, which saturate.
    """
    graph, largest, made = model.graph, 2 ** (bits - 1) - 1, set[str]()
    tensors = {tensor.name: tensor for tensor in graph.initializer}

    def constant(name: str, value: Any) -> str:
        if name not in made:
            made.add(name)
            graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    for node, weight in linear_layers(graph):
        if weight in tensors:
            w_IO = numpy_helper.to_array(tensors.pop(weight))
            step_O = (np.maximum(np.abs(w_IO).max(axis=0), 1e-12) / largest).astype(np.float32)
            constant(f"{weight}.int8", np.rint(w_IO / step_O).astype(np.int8))
            constant(f"{weight}.step", step_O)
        x = node.input[0]
        if scales is None:
            inputs = [x, f"{weight}.int8", f"{weight}.step"]
            node.op_type = "DynamicQuantizeMatMul"
        else:
            step, zero = constant(f"{x}.step", scales[x][0]), constant(f"{x}.zero", scales[x][1])
            if f"{x}.int8" not in made:
                made.add(f"{x}.int8")
                place = next(number for number, n in enumerate(graph.node) if n is node or n.name == node.name)
                graph.node.insert(place, helper.make_node("QuantizeLinear", [x, step, zero], [f"{x}.int8"]))
            inputs = [f"{x}.int8", f"{weight}.int8", step, f"{weight}.step", zero]
            node.op_type = "MatMulIntegerToFloat"
        node.domain = "com.microsoft"
        del node.input[:]
        node.input.extend(inputs)
    read = {name for node in all_nodes(graph) for name in node.input}
    remaining = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(remaining)
    if "com.microsoft" not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))

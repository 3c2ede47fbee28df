"""Linear layers in int8: weights by column, activations by scales from held-out rows, or batch by batch.

    x W + b  ~  (q(x / f) - z) q(f W) * scale_x * scale_W + b,  q(x) in uint8, q(W) in int8, symmetric

A few channels of hidden states are many times larger than the others, which one scale for all would round away. So each
channel is divided by a factor f, and its weights are multiplied by it (SmoothQuant, Xiao et al. 2023):
f = max|x|^a / max|W|^(1 - a). Without held-out rows f is 1.

What decides stays in full precision: gates, exits, the classifier. So do embeddings, attention maps and norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from budgetformer.engine.onnx import OnnxGraph
from budgetformer.export.cut import all_nodes
from budgetformer.export.network import EXIT, GATE

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Floats = NDArray[np.float32]
_FULL_PRECISION = {GATE, EXIT, "allocator"}  # parts of the names of nodes
_POWERS = (0.6, 0.7, 0.8, 0.9, 1.0)  # a, that are tried
_CLIPS = (0.8, 0.9, 1.0)  # of a tensor's range, that are tried
_TOKENS = 512  # that a scale is fitted to


class Scale(NamedTuple):
    """Of a tensor: what its channels are divided by, then the step between two numbers and the number of zero."""

    factor: Floats
    step: np.float32
    zero: np.uint8


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

    Of some factors and ranges, those with the least mean squared error of what the layers give out.
    """
    readers: dict[str, list[str]] = {}
    for node, weight in linear_layers(model.graph):
        readers.setdefault(node.input[0], []).append(weight)
    watched = type(model)()
    watched.CopyFrom(model)
    watched.graph.output.extend(helper.make_tensor_value_info(name, 1, None) for name in readers)
    graph, outputs = OnnxGraph(watched.SerializeToString()), []
    values: dict[str, list[Floats]] = {name: [] for name in readers}
    for batch in batches:
        result = graph.run(batch)
        real = np.asarray(batch["attention_mask"]).astype(bool)
        for name in readers:
            values[name].append(result.pop(name)[real])
        outputs.append(result)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    uses = Counter(weight for names in readers.values() for weight in names)
    scales = {}
    for name, names in readers.items():
        powers = _POWERS if all(uses[weight] == 1 for weight in names) else ()  # layers may share their weights
        scales[name] = _scale(
            np.concatenate(values.pop(name)), np.concatenate([weights[w] for w in names], axis=1), powers
        )
    return scales, outputs


def _scale(x_TI: Floats, w_IO: Floats, powers: Iterable[float]) -> Scale:
    sample, best = x_TI[:: max(1, len(x_TI) // _TOKENS)], list[tuple[float, Scale]]()
    expected, low_I, high_I = sample @ w_IO, x_TI.min(0), x_TI.max(0)
    largest_x, largest_w = (np.maximum(m, 1e-5) for m in (np.maximum(-low_I, high_I), np.abs(w_IO).max(1)))
    factors = [largest_x**power / largest_w ** (1 - power) for power in powers] or [np.ones_like(largest_x)]
    for factor_I in factors:
        q_IO, step_O = _rounded(w_IO * factor_I[:, None], 127)
        low, high = min(0.0, float((low_I / factor_I).min())), max(0.0, float((high_I / factor_I).max()))
        for clip in _CLIPS:
            step = np.float32(max((high - low) * clip / 255, 1e-9))
            zero = np.uint8(np.clip(np.rint(-low * clip / step), 0, 255))
            back = (np.clip(np.rint(sample / (factor_I * step)) + zero, 0, 255) - zero) * step
            error = float(((back @ q_IO * step_O - expected) ** 2).mean())
            best.append((error, Scale(factor_I, step, zero)))
    return min(best, key=lambda each: each[0])[1]


def _rounded(w_IO: Floats, largest: int) -> tuple[Floats, Floats]:
    """Whole numbers up to `largest`, and the step of each column."""
    step_O = (np.maximum(np.abs(w_IO).max(axis=0), 1e-12) / largest).astype(np.float32)
    return np.rint(w_IO / step_O), step_O


def quantize(model: ModelProto, scales: Mapping[str, Scale] | None, *, bits: int, fused: bool = True) -> None:
    """Change a graph's linear layers to int8 in place; without `scales` each batch gets its own.

    `bits` of weights: 7 where a processor adds products of 8 bits in 16, which saturate. A `fused` product is an
    operator that ONNX Runtime alone has; else it is one of rounded numbers in full precision, which a runtime replaces.
    """
    graph, largest, made = model.graph, 2 ** (bits - 1) - 1, set[str]()
    tensors = {tensor.name: tensor for tensor in graph.initializer}

    def constant(name: str, value: Any) -> str:
        if name not in made:
            made.add(name)
            graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def insert(before: NodeProto, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        if output not in made:
            made.add(output)
            place = next(number for number, node in enumerate(graph.node) if node.name == before.name)
            graph.node.insert(place, helper.make_node(kind, inputs, [output], **attributes))
        return output

    for node, weight in linear_layers(graph):
        x = node.input[0]
        w, w_step = f"{weight}.int8", f"{weight}.step"
        if weight in tensors:
            w_IO = numpy_helper.to_array(tensors.pop(weight))
            q_IO, step_O = _rounded(w_IO if scales is None else w_IO * scales[x].factor[:, None], largest)
            constant(w, q_IO.astype(np.int8))
            constant(w_step, step_O)
        if scales is None:
            _replace(graph, node, "DynamicQuantizeMatMul", [x, w, w_step])
            continue
        step, zero = constant(f"{x}.step", scales[x].step), constant(f"{x}.zero", scales[x].zero)
        inverse = constant(f"{x}.inverse", 1 / scales[x].factor)
        smooth = insert(node, "Mul", [x, inverse], f"{x}.smooth")
        q = insert(node, "QuantizeLinear", [smooth, step, zero], f"{x}.int8")
        if fused:
            _replace(graph, node, "MatMulIntegerToFloat", [q, w, step, w_step, zero])
        else:
            node.input[0] = insert(node, "DequantizeLinear", [q, step, zero], f"{x}.rounded")
            node.input[1] = insert(node, "DequantizeLinear", [w, w_step], f"{weight}.rounded", axis=1)
    read = {name for node in all_nodes(graph) for name in node.input}
    remaining = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(remaining)
    if "com.microsoft" not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _replace(graph: GraphProto, node: NodeProto, kind: str, inputs: Sequence[str]) -> None:
    """A product by an operator of ONNX Runtime's own set, which adds the bias too."""
    node.op_type, node.domain = kind, "com.microsoft"
    node.input[:] = inputs
    readers = [reader for reader in all_nodes(graph) if node.output[0] in reader.input]
    if len(readers) != 1 or readers[0].op_type != "Add" or readers[0] not in graph.node:
        return
    vectors = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    bias = [name for name in readers[0].input if name in vectors]
    if bias:
        node.input.extend(["", bias[0]])  # no zero of the weights
        node.output[0] = readers[0].output[0]
        graph.node.remove(readers[0])

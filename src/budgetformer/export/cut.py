"""A graph of all layers -> a graph for each stage, which takes the hidden states that the stage before gave out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx import helper

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def cut_stages(model: ModelProto, depths: Sequence[int]) -> list[ModelProto]:
    """One graph for the layers up to each depth, from a graph whose outputs are named KIND_DEPTH."""
    entries = [None, *(f"hidden_{depth}" for depth in depths[:-1])]
    return [_cut(model, entry, f"_{depth}") for entry, depth in zip(entries, depths, strict=True)]


def _cut(model: ModelProto, entry: str | None, ending: str) -> ModelProto:
    """What the outputs with this ending need, from the inputs and the tensor `entry`."""
    graph = model.graph
    makers = {name: number for number, node in enumerate(graph.node) for name in node.output}
    outputs = [output for output in graph.output if output.name.endswith(ending)]
    needed, names, waiting = set[int](), set[str](), [output.name for output in outputs]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            if name != entry and name in makers:
                needed.add(makers[name])
                waiting += _read(graph.node[makers[name]])
    inputs = [i for i in (*graph.input, *(o for o in graph.output if o.name == entry)) if i.name in names]
    part = helper.make_graph(
        [node for number, node in enumerate(graph.node) if number in needed], graph.name, inputs, outputs,
        [tensor for tensor in graph.initializer if tensor.name in names],
    )  # fmt: skip
    return helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version,
                             producer_name=model.producer_name, producer_version=model.producer_version)  # fmt: skip


def all_nodes(graph: GraphProto) -> list[NodeProto]:
    """All nodes, those of branches too."""
    branches = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
    return [*graph.node, *(node for branch in branches for node in all_nodes(branch))]


def _read(node: NodeProto) -> list[str]:
    """The tensors that a node reads, also within its branches."""
    inner = [name for a in node.attribute if a.HasField("g") for n in all_nodes(a.g) for name in n.input]
    return [name for name in (*node.input, *inner) if name]

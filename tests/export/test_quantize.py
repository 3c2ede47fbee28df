"""Static int8: factors take the load off channels that are much larger than the others, and change nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from budgetformer.engine.onnx import OnnxGraph
from budgetformer.export.quantize import fit_scales, quantize

WIDTH = 16


def model(*weights: np.ndarray) -> helper.ModelProto:
    """x times each of the weights, the same for a weight that comes twice."""
    names = {id(w): f"w{number}" for number, w in enumerate(weights)}
    nodes, read = [], "x"
    for number, w in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [read, names[id(w)]], [f"y{number}"], name=f"layer{number}/MatMul"))
        read = f"y{number}"
    floats = TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", floats, ["batch", "length", WIDTH]),
              helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "length"])]  # fmt: skip
    outputs = [helper.make_tensor_value_info(read, floats, ["batch", "length", WIDTH])]
    constants = [numpy_helper.from_array(w, names[id(w)]) for w in {id(w): w for w in weights}.values()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batch(outlier: float, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(128, 8, WIDTH)).astype(np.float32)
    x[..., 3] *= outlier
    return {"x": x, "attention_mask": np.ones((128, 8), np.int64)}


def error(weights: list[np.ndarray], outlier: float) -> float:
    """The relative error of int8 on rows that set no scale."""
    full = model(*weights)
    scales, (outputs,) = fit_scales(full, [batch(outlier, seed=1)])
    name = full.graph.output[0].name
    expected = OnnxGraph(full.SerializeToString()).run(batch(outlier, seed=2))[name]
    assert outputs[name].shape == expected.shape
    quantize(full, scales, bits=7)  # 8 saturate on some processors
    assert {node.op_type for node in full.graph.node} == {"Mul", "QuantizeLinear", "MatMulIntegerToFloat"}
    y = OnnxGraph(full.SerializeToString()).run(batch(outlier, seed=2))[name]
    return float(np.abs(y - expected).mean() / np.abs(expected).mean())


@pytest.fixture
def weight() -> np.ndarray:
    w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    w[3] /= 50  # as after training: what is large is weighted little
    return w


def test_a_large_channel_does_not_cost_the_others_their_digits(weight: np.ndarray) -> None:
    assert error([weight], outlier=1) < 0.02
    assert error([weight], outlier=50) < 0.02  # one scale for all channels: 0.3


def test_layers_that_share_weights_have_one_factor(weight: np.ndarray) -> None:
    shared = model(weight, weight)
    scales, _ = fit_scales(shared, [batch(1, seed=1)])
    assert all((scale.factor == 1).all() for scale in scales.values())
    assert error([weight, weight], outlier=1) < 0.05

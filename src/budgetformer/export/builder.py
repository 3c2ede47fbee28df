"""Writing an ONNX graph by hand: a call adds a node and returns the name of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import budgetformer
from budgetformer.errors import MissingExtraError

try:
    from onnx import TensorProto, helper, numpy_helper
except ImportError:
    raise MissingExtraError("onnx", "onnx") from None

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

OPSET = 20
_IR_VERSION = 10
BOOL, DOUBLE, FLOAT, INT64 = TensorProto.BOOL, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64


class Parts(NamedTuple):
    """Weights of all heads in one tensor, and head by head."""

    all: str
    by_head: list[str]


class Graph:
    """The nodes and constants of a graph in the making. Names of nodes begin with the part that they belong to.

    `separate` stores the parts of a tensor beside the whole; else the file holds the whole, and runtimes cut it once,
    when they load it.
    """

    def __init__(self, *, separate: bool = False) -> None:
        self.separate = separate
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, Any] = {}
        self._ints: dict[tuple[int, ...], str] = {}
        self._part = ""
        self._made = 0

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result."""
        return self.several(op, 1, *inputs, **attributes)[0]

    def several(self, op: str, results: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several results."""
        self._made += 1
        name = f"{self._part}{op}.{self._made}"
        names = [name if results == 1 else f"{name}.{number}" for number in range(results)]
        self._nodes.append(helper.make_node(op, inputs, names, name, **attributes))
        return names

    def constant(self, value: Any, name: str | None = None) -> str:
        """A tensor of the graph: weights under their own name."""
        name = name or f"constant.{len(self._constants)}"
        assert name not in self._constants
        self._constants[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def ints(self, *values: int) -> str:
        """A list of whole numbers, as axes and shapes are given."""
        if values not in self._ints:
            self._ints[values] = self.constant(np.array(values, np.int64))
        return self._ints[values]

    def split(self, value: str, parts: int, axis: int) -> list[str]:
        """Equal parts of a value."""
        return self.several("Split", parts, value, axis=axis, num_outputs=parts)

    def parts(self, value: NDArray[np.float32], heads: int, axis: int) -> Parts:
        """A tensor of weights, all of it and in equal parts."""
        name = self.constant(value)
        if self.separate:
            return Parts(name, [self.constant(part) for part in np.split(value, heads, axis)])
        return Parts(name, self.split(name, heads, axis))

    def linear(self, x: str, weight_IO: NDArray[np.float32], bias_O: NDArray[np.float32]) -> str:
        """x W + b."""
        return self("Add", self("MatMul", x, self.constant(weight_IO)), self.constant(bias_O))

    def choose(self, condition: str, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """One of two values, of which only the one that is needed is computed."""
        return self("If", condition, then_branch=self._branch(then), else_branch=self._branch(otherwise))

    def _branch(self, make: Callable[[], str]) -> GraphProto:
        outside, self._nodes = self._nodes, []
        result = helper.make_tensor_value_info(make(), FLOAT, None)
        nodes, self._nodes = self._nodes, outside
        return helper.make_graph(nodes, f"branch.{self._made}", [], [result])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Nodes made within are named after this part."""
        outside, self._part = self._part, f"{self._part}{name}/"
        yield
        self._part = outside

    def input(self, name: str, kind: int, shape: Sequence[str | int], default: Any = None) -> str:
        """An input, which may be left out where it has a default."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name if default is None else self.constant(default, name)

    def output(self, name: str, value: str, kind: int, shape: Sequence[str | int]) -> str:
        """Give a value out under a name of its own, under which later nodes may read it."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def finish(self) -> ModelProto:
        """The whole as an ONNX model."""
        graph = helper.make_graph(
            self._nodes, "budgetformer", self.inputs, self.outputs, list(self._constants.values())
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION,
            producer_name="budgetformer", producer_version=budgetformer.__version__,
        )  # fmt: skip

"""ONNX Runtime: it loads a graph and runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.errors import MissingExtraError, ModelError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

LEAST_RUNTIME = "1.22"  # of ONNX Runtime: it has all that the graphs use


def runtime() -> Any:
    """The package onnxruntime; an older one than exports need is refused.

    Its telemetry, which is on by default from 1.31 on, is off unless the environment says otherwise.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("onnx", "onnxruntime") from None
    has, least = ([int(part) for part in v.split(".")[:2]] for v in (onnxruntime.__version__, LEAST_RUNTIME))
    if has < least:
        raise ModelError(f"onnxruntime {onnxruntime.__version__} is too old, exports need {LEAST_RUNTIME}: "
                         "pip install -U onnxruntime")  # fmt: skip
    return onnxruntime


def session(model: bytes | Path, threads: int | None = None, *, tuned: bool = True) -> InferenceSession:
    """A graph, loaded; ModelError where it is damaged or asks for what this ONNX Runtime lacks.

    Not `tuned`, it has the library's own options.
    """
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4  # errors come back as exceptions
    more: dict[str, Any] = {}
    if tuned:
        # A graph's threads would go on spinning while those of the next stage's graph need the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        more["disabled_optimizers"] = ["SkipLayerNormFusion"]  # the fused operator takes four times as long on CPUs
    try:
        source = model if isinstance(model, bytes) else str(model)
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"], **more)
    except Exception as error:  # the library has its own classes for every kind of failure, under no common one
        name = "the graph" if isinstance(model, bytes) else str(model)
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} cannot be loaded by ONNX Runtime ({reason}): export it again") from None


class OnnxGraph:
    """A graph in ONNX Runtime; see graphs.Graph."""

    def __init__(self, model: bytes | Path, threads: int | None = None, *, tuned: bool = True) -> None:
        self._session = session(model, threads, tuned=tuned)
        self.version = f"onnxruntime {runtime().__version__}"
        inputs = (*self._session.get_inputs(), *self._session.get_overridable_initializers())
        self.inputs = frozenset(node.name for node in inputs)
        self.outputs = {output.name: output.shape[-1] for output in self._session.get_outputs()}

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name; what the graph does not take is left out of `feed`."""
        values = {n: np.asarray(v, np.int64) if v.dtype == bool else v for n, v in feed.items() if n in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, values), strict=True))

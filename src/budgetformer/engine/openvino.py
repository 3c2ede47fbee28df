"""OpenVINO: it loads a graph and runs it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.errors import MissingExtraError, ModelError


def runtime() -> Any:
    """The package openvino."""
    try:
        import openvino
    except ImportError:
        raise MissingExtraError("openvino", "openvino") from None
    return openvino


def save_graph(source: bytes, file: Path) -> None:
    """Write an ONNX graph as OpenVINO's FILE.xml, with its weights beside it in FILE.bin."""
    openvino = runtime()
    openvino.save_model(openvino.Core().read_model(source), file, compress_to_fp16=False)


class OpenVinoGraph:
    """A graph in OpenVINO, from its file or from ONNX; see graphs.Graph."""

    def __init__(self, model: bytes | Path, threads: int | None = None) -> None:
        openvino = runtime()
        options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}  # not bf16, which changes answers
        if threads:
            options["INFERENCE_NUM_THREADS"] = str(threads)
        try:
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(model), "CPU", options)
        except Exception as error:  # RuntimeError, of whatever kind
            name = "the graph" if isinstance(model, bytes) else str(model)
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(f"{name} cannot be loaded by OpenVINO ({reason}): export it again") from None
        self.version = f"openvino {openvino.__version__.split('-')[0]}"
        self.inputs = {port.any_name: port.element_type.to_dtype() for port in compiled.inputs}
        last = {port.any_name: port.partial_shape[-1] for port in compiled.outputs}
        self.outputs = {name: size.get_length() if size.is_static else None for name, size in last.items()}
        self._request, self._lock = compiled.create_infer_request(), threading.Lock()

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name; what the graph does not take is left out of `feed`."""
        values = {n: np.ascontiguousarray(feed[n], dtype) for n, dtype in self.inputs.items() if n in feed}
        with self._lock:  # a request holds the values of one batch
            results = self._request.infer(values, share_inputs=True)
            return dict(zip(self.outputs, map(np.array, results.values()), strict=True))

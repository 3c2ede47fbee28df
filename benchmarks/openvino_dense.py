"""Is OpenVINO ahead of ONNX Runtime anywhere? A dense Hugging Face classifier by the clock, from token ids to logits.

    pip install openvino nncf
    python benchmarks/openvino_dense.py MODEL [--length 64] [--seconds 3] [--repeat 2]

MODEL is a directory that transformers can load. Engines on two threads, one process each: transformers with SDPA, ONNX
Runtime in fp32 and in int8 (dynamic, as people make it), OpenVINO in fp32 and in int8 (NNCF, static scales from random
tokens, which is enough for the clock but says nothing about accuracy), each with what is left in fp32 or, by OpenVINO's
own choice, in bf16 where the processor has it. Batches of 1, 8 and 32 random rows of one length. Rates are the best of
the repeats, and given relative to transformers too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("torch", "ONNX fp32", "ONNX int8", "OpenVINO fp32", "OpenVINO bf16", "OpenVINO int8", "OpenVINO int8 bf16")
BATCHES = (1, 8, 32)
THREADS = 2
Inputs = dict[str, Any]


def rows(count: int, length: int, vocabulary: int, seed: int = 0) -> Inputs:
    ids = np.random.default_rng(seed).integers(5, vocabulary, (count, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def open_engine(name: str, model: Any, length: int, vocabulary: int, folder: Path) -> Callable[[Inputs], Any]:
    import torch

    if name == "torch":
        return lambda inputs: model(**{key: torch.from_numpy(value) for key, value in inputs.items()}).logits
    example = {key: torch.from_numpy(value) for key, value in rows(2, length, vocabulary).items()}
    if name.startswith("ONNX"):
        import onnxruntime

        file, free = folder / "model.onnx", {key: {0: "batch", 1: "length"} for key in example}
        torch.onnx.export(
            model, tuple(example.values()), file, dynamo=False, input_names=list(example), dynamic_axes=free
        )
        if name.endswith("int8"):
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(file, folder / "int8.onnx", weight_type=QuantType.QInt8)
            file = folder / "int8.onnx"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda inputs: session.run(None, inputs)
    import openvino

    converted = openvino.convert_model(model, example_input=example)
    converted.reshape({name: [-1, -1] for name in example})
    if "int8" in name:
        import nncf

        samples = nncf.Dataset([rows(8, length, vocabulary, seed) for seed in range(8)])
        converted = nncf.quantize(converted, samples, model_type=nncf.ModelType.TRANSFORMER)
    options = {"INFERENCE_NUM_THREADS": THREADS, "PERFORMANCE_HINT": "LATENCY"}
    if not name.endswith("bf16"):  # else it takes what the processor has
        options["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = openvino.Core().compile_model(converted, "CPU", options)
    return lambda inputs: compiled(inputs)


def measure(name: str, source: str, length: int, seconds: float, folder: Path) -> dict[str, float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(THREADS)
    model = AutoModelForSequenceClassification.from_pretrained(source, attn_implementation="sdpa").eval()
    vocabulary, rates = model.config.vocab_size, {}
    with torch.inference_mode():
        run = open_engine(name, model, length, vocabulary, folder)
        for batch in BATCHES:
            inputs = rows(batch, length, vocabulary)
            run(inputs)
            began, passes = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                run(inputs)
                passes += 1
            rates[str(batch)] = passes * batch / (time.perf_counter() - began)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            rates = measure(options.engine, options.model, options.length, options.seconds, Path(folder))
        print(json.dumps(rates))
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.repeat):
        for name in ENGINES:
            done = subprocess.run([sys.executable, *sys.argv, "--engine", name], stdout=subprocess.PIPE, check=True)
            rates = json.loads(done.stdout.splitlines()[-1])
            best[name] = {batch: max(rate, best.get(name, {}).get(batch, 0.0)) for batch, rate in rates.items()}
    print(f"rows/s at batch {', '.join(map(str, BATCHES))}; {options.length} tokens, {THREADS} threads")
    print("| engine | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |\n| --- | --- | --- | --- |")
    for name, rates in best.items():
        cells = (f"{rate:,.0f} ({rate / best['torch'][batch]:.1f}x)" for batch, rate in rates.items())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

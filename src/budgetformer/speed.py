"""Engines against each other, from text to label: one process each, since their threads would spin against each other.

torch dense (Hugging Face's model with SDPA), torch staged, ONNX dense in fp32 and in int8 as `quantize_dynamic` of ONNX
Runtime makes it, ONNX staged in fp32 and int8; where OpenVINO is installed, dense and staged in its int8, both by
`export`. Dense is the run's plain model, its dense twin, or another run. Beside them: what splitting the graph costs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.cost.measure import in_fresh_process, take_turns
from budgetformer.data.batches import Batch, collate, eval_plan
from budgetformer.data.splits import sample_rows
from budgetformer.dial import Dial
from budgetformer.engine.answers import predicted
from budgetformer.engine.graphs import GraphEngine, StageGraph, open_graph
from budgetformer.engine.scorer import Scorer
from budgetformer.engine.scores import Outputs, score
from budgetformer.errors import UsageError
from budgetformer.evaluate import cost_of, summarize
from budgetformer.runs.files import hash_files, read_json, write_json
from budgetformer.runs.run import Run
from budgetformer.spec import ModelSpec

if TYPE_CHECKING:
    from budgetformer.export.verify import CheckRows
    from budgetformer.models.model import BudgetFormerForSequenceClassification

BATCHES = (1, 8, 32)
_ROUNDS = 2  # of all engines, so that a slow moment of the machine does not hit one alone
_SECONDS = 5.0  # for a batch size in a round, or one pass
_READ_AHEAD = 64  # batches whose texts are tokenised and sorted together
_THREADS = "2"
_JOINED = "joined.onnx"  # all stages in one graph
Answer = Callable[[Sequence[str], Sequence[str] | None, int], NDArray[Any]]  # texts, second texts, batch size -> labels


def compare_engines(
    run: Run,
    data: str | None = None,
    *,
    dense: Run | None = None,
    texts: int,
    budget: str | None = None,
    seconds: float = _SECONDS,
) -> dict[str, Any]:
    """Rows per second by batch size on a sample of so many texts, and quality on all, of each engine.

    Texts are those of `data`, or the run's held-out rows.
    """
    from budgetformer.runs.provenance import environment

    held_out = run.held_out(data)
    examples = list(held_out.data.splits[held_out.split].examples())
    table = run.encode(held_out)
    labels = [] if table.labels is None else table.labels.tolist()
    rows = {"texts": [e.text for e in examples], "pairs": [e.text_pair or "" for e in examples] if run.pairs else None}
    timed = sample_rows(len(examples), texts).tolist()
    os.environ.setdefault("OMP_NUM_THREADS", _THREADS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps({**rows, "labels": labels, "timed": timed}), encoding="utf-8")
        engines = _prepare(run, dense or run.baseline or run, budget, folder)
        results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for number in range(_ROUNDS):
            for engine, place in engines.items():
                options = ["measure", str(folder / "rows.json"), *place, seconds, number == 0]
                results[engine].append(in_fresh_process(["-m", __name__], options))
        files = [str(folder / name) for name in ("rows.json", "staged", _JOINED)]
        splitting = in_fresh_process(["-m", __name__], ["splitting", *files, seconds])
    labels_of = {engine: np.array(measured[0].pop("labels")) for engine, measured in results.items()}
    compared = [_best(engine, measured) for engine, measured in results.items()]
    for each in compared:
        torch = labels_of["torch dense" if "dense" in each["engine"] else "torch staged"]
        each["other_labels"] = float((labels_of[each["engine"]] != torch).reshape(len(torch), -1).any(axis=1).mean())
    return {
        "run": str(run.folder), "split": held_out.split, "texts": len(timed), "rows": len(examples),
        "budget": str(run.budget(budget)),
        "threads": int(os.environ["OMP_NUM_THREADS"]), "engines": compared, "splitting": splitting,
        "environment": environment("onnxruntime"),
    }  # fmt: skip


def _best(engine: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    rates = {batch: max(m["rows_per_second"][str(batch)] for m in measured) for batch in BATCHES}
    return {"engine": engine, **measured[0], "rows_per_second": rates}


def _prepare(run: Run, dense: Run, budget: str | None, folder: Path) -> dict[str, tuple[str, str | None]]:
    """What to open and its budget, for each engine."""
    if run.exported or dense.exported:
        raise UsageError(f"{run.folder if run.exported else dense.folder} is an export: give the run itself")
    from budgetformer.export.run import layers_graph, narrowed, skips_heads

    dial, plain = run.budget(budget), write_dense(run, dense, folder)
    staged, int8 = folder / "staged", folder / "staged-int8"
    run.export(staged, budget=budget)
    (folder / _JOINED).write_bytes(layers_graph(narrowed(run.model, dial), dial).SerializeToString())
    run.export(int8, budget=budget, int8=True)
    engines = {
        "torch dense": (plain, None),
        "torch staged": (str(run.folder), str(run.budget(budget))),
        "ONNX dense fp32": (str(folder / "dense"), None),
        "ONNX dense int8": (str(folder / "dense-int8"), None),
        "ONNX staged fp32": (str(staged), None),
        "ONNX staged int8": (str(int8), None),
    }
    if find_spec("openvino") and not skips_heads(run.model, run.budget(budget)):
        dense_int8, int8 = (folder / f"{name}-openvino-int8" for name in ("dense", "staged"))
        rows = run.check_rows(None, lambda line: None)
        _export_dense(run, _dense_model(run, dense), dense_int8, rows, int8="static", format="openvino")
        run.export(int8, budget=budget, int8=True, format="openvino")
        engines |= {"OpenVINO dense int8": (str(dense_int8), None), "OpenVINO staged int8": (str(int8), None)}
    return engines


def write_dense(run: Run, dense: Run, folder: Path) -> str:
    """Into `folder`: the dense model's exports `dense` and `dense-int8`, and for a Hugging Face base `plain`, what its
    torch model is opened from. -> the place of that."""
    from budgetformer.data.tokens import TokenTable
    from budgetformer.export.verify import CheckRows

    model, plain = _dense_model(run, dense), str(dense.folder)
    if model.config.base is not None:
        model.plain().save_pretrained(folder / "plain")
        plain = str(folder / "plain")
    rows = CheckRows(TokenTable.random(model.config.vocab_size, run.max_length, run.pairs), "made-up rows")
    exported = _export_dense(run, model, folder / "dense", rows)
    _quantize_dense(exported, folder / "dense-int8")
    return plain


def _dense_model(run: Run, dense: Run) -> BudgetFormerForSequenceClassification:
    """The dense run's model, or where its heads are frozen the run's, without what budgets add to it."""
    from budgetformer.models.model import retrofit

    source = dense.model if dense.config.gate.kind != "frozen" else run.model
    if source.config.base is not None:
        model: BudgetFormerForSequenceClassification = retrofit(source.plain(), gates={"kind": "all"}).train(False)
        return model
    if dense.config.exits or dense.config.gate.selects:
        raise UsageError(f"{dense.folder} is not dense: train RUN with --with-baseline, or give a run with --dense")
    return source


def _export_dense(
    run: Run,
    model: BudgetFormerForSequenceClassification,
    target: Path,
    rows: CheckRows,
    *,
    int8: str | None = None,
    format: str = "onnx",
) -> Path:
    from budgetformer.data.tokenizer import tokenizer_files
    from budgetformer.export.run import export_model

    record = {key: run.record[key] for key in ("format_version", "name", "labels", "pairs", "max_length")}
    files = tokenizer_files(run.folder)
    export_model(model, files, record, target, dial=Dial("full"), int8=int8, rows=rows, format=format)
    return target


def _quantize_dense(exported: Path, target: Path) -> None:
    """As people do it: ONNX Runtime's own dynamic quantisation of the dense graph, run with its default options."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    shutil.copytree(exported, target)
    record = read_json(target / "export.json", "export it again")
    file = record["graphs"][0]["file"]
    add_pre_process_metadata(graph := onnx.load(exported / file))  # there is nothing to tidy up, nor to warn of
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # its shape inference does not know the attention
    quantize_dynamic(graph, target / file, weight_type=QuantType.QInt8, extra_options=options)
    write_json(
        target / "export.json",
        {**record, "precision": "int8 dense", "session": "default", "sha256": hash_files(target)},
    )


class _PlainEngine:
    """A Hugging Face classifier as it is."""

    details, name, batch_tokens, version = False, "transformers", 4096, "transformers"

    def __init__(self, folder: Path, config: ModelSpec) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.config, self._torch = config, torch
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa").eval()

    def logits(self, batch: Batch, budget: Dial, after: Any = None) -> Outputs:
        inputs = {name: value for name, value in batch.tensors().items() if name != "labels"}
        with self._torch.inference_mode():
            logits = self.model(**inputs).logits.float().numpy()
        layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
        return Outputs(logits, np.full((len(logits), layers), heads, np.int16))

    def check(self, budget: Dial) -> Dial:
        return budget

    def words(self, table: Any) -> None:
        return None

    def session(self, budget: Dial) -> Any:
        return nullcontext()


def open_scorer(folder: Path, budget: str | None) -> Scorer:
    """A run, an export, or what `write_dense` wrote."""
    if (folder / "run.json").exists() or (folder / "export.json").exists():
        return Run.open(folder).scorer(budget)
    beside = Run.open(folder.parent / "dense")  # the same model, exported
    return Scorer(_PlainEngine(folder, beside.config), beside.tokenizer, beside.max_length)


def rows_per_second(
    answer: Answer,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    limit: float,
    batches: Sequence[int] = BATCHES,
) -> dict[int, float]:
    """By batch size: the median of as many passes over the texts as begin within `limit` seconds.

    In batches of one, each text comes alone, as to a service; else the next batches are there to be sorted by length.
    """

    def passes(batch: int, count: int) -> Iterator[float]:
        size = 1 if batch == 1 else _READ_AHEAD * batch
        while True:
            began = time.perf_counter()
            for start in range(0, count, size):
                part = slice(start, min(count, start + size))
                answer(texts[part], None if pairs is None else pairs[part], batch)
            yield time.perf_counter() - began

    rates = {}
    for batch in batches:
        next(passes(batch, min(len(texts), 2 * batch)))  # libraries prepare themselves
        began, times = time.perf_counter(), []
        for seconds in passes(batch, len(texts)):
            times.append(seconds)
            if time.perf_counter() - began > limit:
                break
        rates[batch] = len(texts) / statistics.median(times)
    return rates


def measure(rows: str, folder: str, budget: str | None, limit: float, quality: bool) -> dict[str, Any]:
    """One engine by the clock: tokenise, sort by length, batch, pad, classify. Then all rows once, for the quality."""
    data, scorer = json.loads(Path(rows).read_text(encoding="utf-8")), open_scorer(Path(folder), budget)
    rates = rows_per_second(scorer.answer, *_timed(data), limit)
    if not quality:
        return {"rows_per_second": rates}
    table = scorer.encode(data["texts"], data["pairs"])
    table = replace(table, labels=np.array(data["labels"])) if data["labels"] else table
    scores = score(scorer.engine, table, scorer.budget)
    result = {"rows_per_second": rates, "flops_ratio": cost_of(scores, scorer.config)["flops_ratio"]}
    result["labels"] = predicted(scores.probabilities, scorer.task).tolist()
    if data["labels"]:
        summary = summarize(scores, scorer.config, split="", dial=str(scorer.budget))
        result |= {"metric": summary.metric, "score": summary.score}
    return result


def _timed(data: dict[str, Any]) -> tuple[list[str], list[str] | None]:
    texts, pairs = data["texts"], data["pairs"]
    return [texts[row] for row in data["timed"]], [pairs[row] for row in data["timed"]] if pairs else None


def splitting(rows: str, staged: str, joined: str, limit: float) -> dict[str, float]:
    """By batch size: how many times as long a graph for each stage takes, every text through all of them, as one graph
    with the same operators. Both engines take turns with each batch."""
    scorer = open_scorer(Path(staged), "exit:0")
    split, config = scorer.engine, scorer.config
    assert isinstance(split, GraphEngine)
    layers, graph = config.num_hidden_layers, open_graph(Path(joined), int(os.environ["OMP_NUM_THREADS"]))
    heads = None if split.graphs[0].heads is None else [h for stage in split.graphs for h in stage.heads or ()]
    plain = replace(config, exits=None, temperatures=[])
    one = GraphEngine([StageGraph(graph, layers, heads)], plain, split.folder, split.exported)
    table = scorer.encode(*_timed(json.loads(Path(rows).read_text(encoding="utf-8"))))
    table, ratios = replace(table, words_logits=split.words(table)), {}
    for size in BATCHES:
        plan, sums = eval_plan(table.lengths, batch_size=size), {"split": 0.0, "joined": 0.0}
        for some in plan:
            batch = collate(table, some, config.pad_token_id)
            rivals: dict[str, Callable[[], object]] = {
                "split": partial(split.logits, batch, scorer.budget), "joined": partial(one.logits, batch, Dial()),
            }  # fmt: skip
            for name, milliseconds in take_turns(rivals, seconds=limit / len(plan), least=3).items():
                sums[name] += milliseconds
        ratios[str(size)] = sums["split"] / sums["joined"]
    return ratios


if __name__ == "__main__":
    what, *arguments = json.loads(sys.argv[1])
    print(json.dumps(measure(*arguments) if what == "measure" else splitting(*arguments)))

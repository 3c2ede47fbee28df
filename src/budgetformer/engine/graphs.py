"""The engine of the directories that `budgetformer export` writes: one graph for each stage, run by ONNX Runtime or
OpenVINO.

Between two graphs rows that leave are taken out, and the others go on together; the rule is `exits.Exits`, outside the
graphs. Shapes: B samples, N tokens, D model width, C outputs, L layers, S stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.batches import Batch
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Outputs
from budgetformer.errors import BudgetFormerWarning, ModelError, UsageError
from budgetformer.exits import AfterStage, StageResult
from budgetformer.runs.files import named_read_errors
from budgetformer.runs.provenance import saturates
from budgetformer.spec import ModelSpec
from budgetformer.words import Words

WORDS = "words.safetensors"
_WORDS = ("idf", "weights", "bias")
Floats = NDArray[np.float32]


class Graph(Protocol):
    """A graph, loaded by a runtime."""

    version: str  # of the runtime

    @property
    def inputs(self) -> Collection[str]: ...

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Names, each with its last dimension."""
        ...

    def run(self, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Outputs by name; `feed` has the inputs, and may have more."""
        ...


def open_graph(file: Path, threads: int | None = None, *, tuned: bool = True) -> Graph:
    """A graph that an export has written, in the runtime that reads such files; not `tuned`, as it is by itself."""
    if file.suffix == ".xml":
        from budgetformer.engine.openvino import OpenVinoGraph

        return OpenVinoGraph(file, threads)
    from budgetformer.engine.onnx import OnnxGraph

    return OnnxGraph(file, threads, tuned=tuned)


def save_words(folder: Path, words: Words) -> None:
    """Write the linear model beside the graphs."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(getattr(words, name)) for name in _WORDS}, folder / WORDS)


def read_words(folder: Path) -> Words:
    """The linear model beside the graphs."""
    from safetensors.numpy import load_file

    with named_read_errors(folder / WORDS, "export the run again"):
        saved = load_file(folder / WORDS)
        return Words(*(saved[name] for name in _WORDS))


class StageGraph(NamedTuple):
    """The layers of a stage; `heads` says how many run in each of them, where a text changes nothing."""

    graph: Graph
    depth: int  # after which layer it ends
    heads: Sequence[int] | None


class GraphEngine:
    """An export. Any budget of depth will do; heads are those of the budget `exported`, or max:X where they vary."""

    details = False
    batch_tokens = 4096  # padded tokens: about what a CPU's caches hold

    def __init__(
        self,
        graphs: Sequence[StageGraph],
        config: ModelSpec,
        folder: Path,
        exported: Dial,
        words: Words | None = None,
        name: str = "onnx fp32",
    ) -> None:
        self.graphs, self.config, self.folder, self.exported, self._words = graphs, config, folder, exported, words
        self.name, self.version = name, graphs[0].graph.version

    @classmethod
    def load(
        cls, folder: Path, config: ModelSpec, record: Mapping[str, Any], threads: int | None = None
    ) -> GraphEngine:
        """The engine of a directory that `budgetformer export` wrote, by what it says of its model and itself."""
        depths, files = [depth for depth in config.stages.depths if depth], record["graphs"]
        if [file["depth"] for file in files] != depths:
            raise ModelError(f"{folder / 'export.json'} has graphs up to the layers {[f['depth'] for f in files]}, and "
                             f"its model has stages up to {depths}: export it again")  # fmt: skip
        graphs = []
        for file in files:
            graph = open_graph(folder / file["file"], threads, tuned=record.get("session") != "default")
            if graph.outputs.get(f"logits_{file['depth']}") != config.labels:
                raise ModelError(f"{folder / file['file']} has the outputs {graph.outputs!r:.80}, and export.json "
                                 "speaks of another model: export it again")  # fmt: skip
            graphs.append(StageGraph(graph, file["depth"], file["heads"]))
        words = read_words(folder) if config.stages.words else None
        if (record.get("int8") or {}).get("bits") == 8 and saturates():
            warnings.warn(f"{folder} was exported in int8 where products of 8 bits do not overflow, and here they do: "
                          "export it on this machine", BudgetFormerWarning, stacklevel=2)  # fmt: skip
        return cls(
            graphs, config, folder, Dial.parse(record["dial"]), words, f"{record['format']} {record['precision']}"
        )

    def check(self, budget: Dial) -> Dial:
        """Refuse a budget that the graphs cannot be set to."""
        adjustable = self.graphs[0].heads is None and self.exported.heads.mode in ("learned", "max")
        same = budget.heads == self.exported.heads or not self.config.gate.can_dial
        if not same and not (adjustable and budget.mode == "max" and self._may_limit):
            other = ", give max:X" if adjustable and self._may_limit else ""
            raise UsageError(f"{self.folder} was exported with the budget {self.exported}, not {budget}: leave --budget"
                             f" out{other}, or export it again")  # fmt: skip
        return budget

    @property
    def _may_limit(self) -> bool:
        """Whether the graphs take budget_max."""
        return "budget_max" in self.graphs[0].graph.inputs

    def logits(self, batch: Batch, budget: Dial, after: AfterStage | None = None) -> Outputs:
        """Answers where each sample left, and executed heads; predicted budgets are not among the graphs' outputs."""
        config, limit = self.config, self.config.exit_limit(self.check(budget))
        _check(batch, config, self.folder)
        B, stages, first = len(batch.input_ids), config.stages, 0
        logits = np.zeros((B, len(stages.depths), config.labels), np.float32)
        heads, exits = np.zeros((B, config.num_hidden_layers), np.int16), np.zeros(B, np.int64)
        rows, feed = np.arange(B), self._feed(batch, budget)
        here: Any = slice(None)  # the rows in the batch: as long as none has left, all of them, which indexes quickly
        if stages.words:
            assert batch.words_logits is not None
            logits[:, 0] = batch.words_logits

        def leave(stage: int) -> None:
            """Take rows out that leave after a stage, and columns that are padding for all others."""
            nonlocal rows, here, feed
            if not limit and after is None:
                return
            answers = logits[here, stage]
            leaves = stages.leaves(stage, answers, limit)
            if after is not None:
                leaves = after(StageResult(stage, rows, answers, heads[here, :first], leaves))
            if leaves.any():
                stay = np.flatnonzero(~leaves)
                columns = int(feed["attention_mask"][stay].any(axis=0).sum())  # padding is at the end
                rows = here = rows[stay]
                feed = {n: v[stay, :columns] if v.ndim else v for n, v in feed.items()}

        if stages.words:
            leave(0)
        for stage, (graph, depth, known) in enumerate(self.graphs, int(stages.words)):
            if not len(rows):
                break
            outputs = self._run(graph, feed)
            words = logits[here, 0] if stages.words else None
            logits[here, stage] = stages.add_words(stage, outputs[f"logits_{depth}"], words)
            heads[here, first:depth] = known or outputs[f"heads_{depth}"]
            exits[here], first = stage, depth
            if depth < config.num_hidden_layers:
                hidden = {name: value for name, value in outputs.items() if name.startswith("hidden")}
                feed = hidden | {name: feed[name] for name in ("attention_mask", "budget_max") if name in feed}
                leave(stage)
        everything = config.exits and not limit and after is None and len(stages.depths) > 1
        return Outputs(
            logits[np.arange(B), exits] / stages.temperatures[exits, None], heads,
            exits=exits if config.exits else None, stage_logits=logits if everything else None,
        )  # fmt: skip

    def _run(self, graph: Graph, feed: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        try:
            return graph.run(feed)
        except BaseException:
            with named_read_errors(self.folder, "export it again"):
                raise

    def _feed(self, batch: Batch, budget: Dial) -> dict[str, Any]:
        types = np.zeros_like(batch.input_ids) if batch.token_type_ids is None else batch.token_type_ids
        feed = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "token_type_ids": types}
        if budget.mode == "max" and budget.heads != self.exported.heads:
            feed["budget_max"] = np.array(budget.value, np.float64)
        return feed

    def words(self, table: TokenTable) -> Floats | None:
        """The logits of the stage of words; None where there is none."""
        return None if self._words is None else self._words.logits(table)

    @contextmanager
    def session(self, budget: Dial) -> Iterator[None]:
        """Nothing has to be prepared."""
        yield


def _check(batch: Batch, config: ModelSpec, folder: Path) -> None:
    ids, mask = batch.input_ids, batch.attention_mask
    if ids.ndim != 2 or not ids.size or ids.shape != mask.shape:
        raise UsageError(
            f"input_ids has shape {ids.shape} and attention_mask {mask.shape}: give (batch, tokens), both the same "
            "and at least 1"
        )
    if ids.shape[1] > (positions := config.max_position_embeddings):
        raise UsageError(f"the input has {ids.shape[1]} tokens but the model {positions} positions: cut it")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise UsageError(
            f"input_ids holds {ids.min()} to {ids.max()}, but the vocabulary has {config.vocab_size} pieces: "
            f"use the tokenizer in {folder}"
        )
    if not mask.any(axis=1).all():
        row = int(mask.any(axis=1).argmin())
        raise UsageError(f"attention_mask: sample {row} has no real token; give every text at least one")

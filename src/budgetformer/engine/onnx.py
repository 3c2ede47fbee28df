"""ONNX Runtime as an engine, for the directories that `budgetformer export` writes.

Shapes: B samples, N tokens, C outputs, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from budgetformer.data.batches import Batch
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Outputs
from budgetformer.errors import MissingExtraError, ModelError, UsageError
from budgetformer.exits import AfterStage
from budgetformer.runs.files import named_read_errors
from budgetformer.spec import ModelSpec
from budgetformer.words import Words

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_WORDS = ("idf", "weights", "bias")
Ints = NDArray[np.int64]


def runtime() -> Any:
    """The package onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("onnx", "onnxruntime") from None
    return onnxruntime


def session(model: bytes | Path, threads: int | None = None) -> InferenceSession:
    """A graph, loaded; ModelError where it is damaged or asks for what this ONNX Runtime lacks."""
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 4  # errors come back as exceptions
    try:
        source = model if isinstance(model, bytes) else str(model)
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library has its own classes for every kind of failure, under no common one
        name = "the graph" if isinstance(model, bytes) else str(model)
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} cannot be loaded by ONNX Runtime ({reason}): export it again") from None


def save_words(folder: Path, words: Words) -> None:
    """Write the linear model beside the graph."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(getattr(words, name)) for name in _WORDS}, folder / "words.safetensors")


def read_words(folder: Path) -> Words:
    """The linear model beside a graph."""
    from safetensors.numpy import load_file

    with named_read_errors(folder / "words.safetensors", "export the run again"):
        saved = load_file(folder / "words.safetensors")
        return Words(*(saved[name] for name in _WORDS))


class OnnxEngine:
    """An exported graph. The budget is what was exported, or max:X where that was learned or max."""

    details, name = False, "onnx"
    batch_tokens = 4096  # padded tokens: about what a CPU's caches hold

    def __init__(
        self,
        graph: InferenceSession,
        config: ModelSpec,
        folder: Path,
        exported: Dial,
        words: Words | None = None,
    ) -> None:
        self.graph, self.config, self.folder, self.exported, self._words = graph, config, folder, exported, words
        self.version = f"onnxruntime {runtime().__version__}"
        self._inputs = {node.name for node in (*graph.get_inputs(), *graph.get_overridable_initializers())}

    @classmethod
    def load(cls, folder: Path, config: ModelSpec, exported: Dial, threads: int | None = None) -> OnnxEngine:
        """The engine of a directory that `budgetformer export` wrote, with its config and budget."""
        file = folder / "model.onnx"
        graph = session(file, threads)
        outputs = {output.name: output.shape[-1:] for output in graph.get_outputs()}
        if outputs != {"logits": [config.labels], "heads": [config.num_hidden_layers]}:
            raise ModelError(f"{file} has the outputs {outputs!r:.80}, and export.json speaks of another model: "
                             "export it again")  # fmt: skip
        return cls(graph, config, folder, exported, read_words(folder) if config.stages.words else None)

    def check(self, budget: Dial) -> Dial:
        """Refuse a budget that the graph cannot be set to."""
        adjustable = self.exported.mode in ("learned", "max", "exit")
        if budget != self.exported and not (adjustable and budget.mode == "max"):
            remedy = f"leave --budget out{', give max:X' if adjustable else ''}"
            raise UsageError(f"{self.folder} was exported with the budget {self.exported}, not {budget}: {remedy}, or "
                             "export it again")  # fmt: skip
        return budget

    def logits(self, batch: Batch, budget: Dial, after: AfterStage | None = None) -> Outputs:
        """Logits and executed heads of one batch; the graph runs all layers at once, so `after` has nothing to see."""
        limit = None if self.check(budget) == self.exported else budget.value
        inputs = batch.input_ids, batch.attention_mask, batch.token_type_ids
        logits, heads = self.run(*inputs, batch.words_logits, budget_max=limit)
        last = np.full(len(logits), len(self.config.stages.depths) - 1) if self.config.exits else None
        return Outputs(logits, heads.astype(np.int16), exits=last)

    def words(self, table: TokenTable) -> NDArray[np.float32] | None:
        """The logits of the stage of words, which the graph takes as an input; None where there is none."""
        return None if self._words is None else self._words.logits(table)

    @contextmanager
    def session(self, budget: Dial) -> Iterator[None]:
        """Nothing has to be prepared."""
        yield

    def run(
        self,
        input_ids: Ints,
        attention_mask: NDArray[Any],
        token_type_ids: Ints | None = None,
        words_logits: NDArray[np.float32] | None = None,
        *,
        budget_max: float | None = None,
    ) -> tuple[NDArray[np.float32], Ints]:
        """Logits (B, C), and the number of heads that ran in each layer (B, L).

        `budget_max` turns the dial at run time as max:X does; None leaves what was exported. A model that knows no
        pairs ignores `token_type_ids`, one without gates `budget_max`.
        """
        self._check(input_ids, attention_mask)
        types = np.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        feed: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types}
        feed = {name: np.asarray(value, np.int64) for name, value in feed.items()}
        if words_logits is not None:
            feed["words_logits"] = words_logits
        if budget_max is not None:
            if not 0 <= budget_max <= 1:
                raise UsageError(f"budget_max={budget_max}: it is a fraction of the heads, give a number in [0, 1]")
            feed["budget_max"] = np.array(budget_max, np.float64)
        with named_read_errors(self.folder / "model.onnx", "export it again"):
            logits, heads = self.graph.run(["logits", "heads"], {n: v for n, v in feed.items() if n in self._inputs})
        return logits, heads

    def _check(self, ids: Ints, mask: NDArray[Any]) -> None:
        if ids.ndim != 2 or not ids.size or ids.shape != mask.shape:
            raise UsageError(
                f"input_ids has shape {ids.shape} and attention_mask {mask.shape}: give (batch, tokens), both the same "
                "and at least 1"
            )
        if ids.shape[1] > (positions := self.config.max_position_embeddings):
            raise UsageError(f"the input has {ids.shape[1]} tokens but the model {positions} positions: cut it")
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise UsageError(
                f"input_ids holds {ids.min()} to {ids.max()}, but the vocabulary has {self.config.vocab_size} pieces: "
                f"use the tokenizer in {self.folder}"
            )
        if not mask.any(axis=1).all():
            row = int(mask.any(axis=1).argmin())
            raise UsageError(f"attention_mask: sample {row} has no real token; give every text at least one")

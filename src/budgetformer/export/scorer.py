"""An exported graph that scores texts and files as a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from budgetformer.data import Batch, load_tokenizer
from budgetformer.engine.scorer import AnyScorer
from budgetformer.errors import UsageError
from budgetformer.evaluate import eval_tokens
from budgetformer.export.engine import OnnxModel, read_record
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.nn.allocation import Dial
from budgetformer.predict.job import Predictor, digest


class OnnxScorer(AnyScorer):
    """ONNX Runtime, scoring texts. The dial is what was exported, or max:X where that was learned or max."""

    def __init__(self, folder: Path, budget: str | None = None, long: str = "cut") -> None:
        self.graph = OnnxModel.load(folder, torch.get_num_threads())
        baked = Dial.parse(read_record(folder).get("dial"))
        dial = baked if budget is None else Dial.parse(budget)
        self._turned = dial != baked
        if self._turned and (dial.mode != "max" or baked.mode not in ("learned", "max")):
            turned = f"leave --budget out{', give max:X' if baked.mode in ('learned', 'max') else ''}"
            raise UsageError(f"{folder} was exported with the budget {baked}, not {dial}: {turned}, or export it again")
        config = BudgetFormerConfig.from_pretrained(folder)
        tokens, length = eval_tokens(torch.device("cpu")), self.graph.max_length
        super().__init__(
            config, load_tokenizer(folder, offline=True), length, dial=dial, long=long, batch_tokens=tokens
        )

    def _compute(self, batch: Batch, dial: Dial) -> tuple[torch.Tensor, NDArray[Any]]:
        types = None if batch.token_type_ids is None else batch.token_type_ids.numpy()
        most = dial.value if self._turned else None
        logits, heads = self.graph.run(batch.input_ids.numpy(), batch.attention_mask.numpy(), types, budget_max=most)
        return torch.from_numpy(logits), heads


def onnx_predictor(folder: Path, *, budget: str | None = None, long: str = "cut") -> Predictor:
    """The predictor of a directory that `budgetformer export` wrote."""
    return Predictor(OnnxScorer(folder, budget, long), read_record(folder).get("text_columns", []), digest(folder))

"""torch as an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from budgetformer.data.batches import Batch
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.scores import Floats, Outputs
from budgetformer.exits import AfterStage
from budgetformer.nn.objective import relevance_entropy
from budgetformer.spec import ModelSpec

if TYPE_CHECKING:
    from budgetformer.models.model import BudgetFormerForSequenceClassification


class TorchEngine:
    """A model where it is, on its device; `progress` is t/T for a model in training (default: the config's)."""

    details, name, version = True, "torch", f"torch {torch.__version__}"

    def __init__(self, model: BudgetFormerForSequenceClassification, *, progress: float | None = None) -> None:
        self.model, self.progress = model, progress
        # About what a CPU's caches hold, many more for a GPU.
        self.batch_tokens = 4096 if model.device.type == "cpu" else 65536

    @property
    def config(self) -> ModelSpec:
        """The model's, as it is now."""
        return self.model.config.spec

    def logits(self, batch: Batch, budget: Dial, after: AfterStage | None = None) -> Outputs:
        """All of an evaluation's figures of one batch."""
        inputs: dict[str, Any] = batch.tensors(self.model.device)
        inputs.pop("labels", None)
        with torch.inference_mode():
            out: Any = self.model(**inputs, progress=self.progress, budget=budget, after_stage=after)
            layers, has_groups = out.allocations, self.model.config.groups > 0
            return Outputs(
                logits=out.logits.float().cpu().numpy(),
                heads=torch.stack([a.active.sum(-1) for a in layers], 1).cpu().numpy(),
                budget=torch.stack([a.budget for a in layers], 1).cpu().numpy(),
                entropy=torch.stack([relevance_entropy(a.relevance) for a in layers], 1).cpu().numpy(),
                exits=None if out.exits is None else out.exits.cpu().numpy(),
                stage_logits=None if out.stage_logits is None else out.stage_logits.cpu().numpy(),
                groups=torch.stack([a.groups.sum(-1) for a in layers], 1).cpu().numpy() if has_groups else None,
            )

    def check(self, budget: Dial) -> Dial:
        """The budget; a share of the cost needs exits, and a rule for them."""
        self.config.exit_limit(budget)
        return budget

    def words(self, table: TokenTable) -> Floats | None:
        """The logits of the stage of words; None where the model has none."""
        stage = self.model.stages.words
        return None if stage is None else stage.model.logits(table)

    @contextmanager
    def session(self, budget: Dial) -> Iterator[None]:
        """Evaluation mode; random heads are the same each time, and the caller's random numbers are left alone."""
        was_training, device = self.model.training, self.model.device
        draws = self.model.config.gate.random or budget.mode == "random"
        if was_training:  # it visits every module, which takes as long as a layer of a small model
            self.model.train(False)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=draws):
                if draws:
                    torch.manual_seed(0)
                yield
        finally:
            if was_training:
                self.model.train()

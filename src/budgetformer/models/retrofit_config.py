"""What a retrofitted encoder is: its base, its gates, and how budgets are trained into it."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Literal

from transformers import AutoConfig, PreTrainedConfig

from budgetformer.errors import UsageError
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.sites import check_supported


class RetrofitConfig(BudgetFormerConfig):
    """The config of a BudgetedClassifier.

    `allocator` is `ranked` (heads ranked across layers, the input may depart from the order), `order` (the order
    alone), `learned` (the paper's gates), `all` (dense) or `given` (frozen: `kept_heads`). `base` is the encoder's own
    config. A model saved as `delta` holds gates and classifier only, and needs the base whose name and hash are here.
    """

    model_type: ClassVar[str] = "budgetformer-retrofit"
    optional: ClassVar[tuple[str, ...]] = ("dropout", "attention_dropout")
    allocators: ClassVar[tuple[str, ...]] = ("ranked", "order", "learned", "all", "given")

    base: dict[str, Any] | None = None
    base_name: str | None = None
    base_sha256: str | None = None
    base_fresh: list[str] = field(default_factory=list)  # encoder weights that the base lacked
    delta: bool = False
    kept_heads: list[list[int]] | None = None
    dial_shifts: list[tuple[int, float]] | None = None  # of thresholds, so that mean:X executes X; see settle_order

    allocator: Literal["ranked", "order", "learned", "all", "given"] = "ranked"  # type: ignore[assignment]
    learn_order: bool = True  # False keeps the static order that training began with
    budget_low: float = 0.1  # training draws budgets from here to 1 for half of the samples; 1: draws none
    ramp: float = 0.3  # the progress over which budgets fall from 1 to what is asked for
    distill_weight: float = 1.0  # of the distance to the dense model's logits, where they are given
    distill_layers: float = 0.0  # of the distance to the states behind its layers; training then runs both models
    distill_temperature: float = 2.0
    dropout: float | None = None  # type: ignore[assignment]  # None: the base's own, as for attention's
    attention_dropout: float | None = None  # type: ignore[assignment]

    target_budget: float | None = 0.5
    min_heads: int = 0
    rounding: Literal["floor", "round", "ceil"] = "round"
    sigma_max: float = 0.0
    tau_min: float = 1.0
    beta_max: float = 0.0

    def _check(self) -> None:
        super()._check()
        for name in ("budget_low", "ramp"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)}: give a number in [0, 1]")
        if min(self.distill_weight, self.distill_layers) < 0 or self.distill_temperature <= 0:
            raise UsageError(
                f"distill_weight={self.distill_weight}, distill_layers={self.distill_layers}, distill_temperature="
                f"{self.distill_temperature}: give weights that are not negative and a temperature above 0"
            )
        if (self.allocator == "given") != (self.kept_heads is not None):
            raise UsageError(f"allocator={self.allocator!r} and kept_heads go together: give both or neither")

    @property
    def base_config(self) -> PreTrainedConfig:
        """The encoder's own config."""
        if not self.base:
            raise UsageError("a retrofitted model's config has no base: make it with retrofit() or train --base")
        found: PreTrainedConfig = AutoConfig.for_model(**self.base)
        return found

    def reached(self, share: float, progress: float) -> float:
        """The budget at this progress on the way from 1 to `share`."""
        return 1 - (1 - share) * (min(1.0, progress / self.ramp) if self.ramp else 1.0)

    @classmethod
    def of(cls, base: PreTrainedConfig, **options: Any) -> RetrofitConfig:
        """The config for a base encoder; `options` change the gates, the labels and how budgets are trained."""
        check_supported(base)
        kind = base.model_type
        inner = getattr(base, "intermediate_size", None) or base.hidden_dim
        positions = base.max_position_embeddings
        if kind in ("roberta", "xlm-roberta"):  # the first places are the padding token's
            positions -= base.pad_token_id + 1
        settings = {
            "base": {**base.to_dict(), "model_type": kind},
            "vocab_size": base.vocab_size,
            "hidden_size": base.hidden_size,
            "num_hidden_layers": base.num_hidden_layers,
            "num_attention_heads": base.num_attention_heads,
            "intermediate_size": 3 * inner // 2 if kind == "modernbert" else inner,  # a gated feed-forward has three
            "hidden_act": "gelu",
            "max_position_embeddings": positions,
            "segment_embeddings": getattr(base, "type_vocab_size", 0) > 1,
            "pad_token_id": base.pad_token_id,
        }
        for key in options.keys() & settings.keys():
            raise UsageError(f"{key}={options[key]!r}: it is the base's, {settings[key]!r}; leave it out")
        labels = {
            "problem_type": base.problem_type,
            "id2label": dict(base.id2label or {}),
            "label2id": dict(base.label2id or {}),
        }
        return cls(**{**settings, **labels, **options})

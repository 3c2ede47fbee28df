"""Hugging Face's surface: BudgetFormerConfig and BudgetFormerForSequenceClassification.

Importing this module registers both with AutoConfig and AutoModelForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
)
from transformers.utils.generic import ModelOutput

from budgetformer.errors import ModelError, UsageError
from budgetformer.models.config import BudgetFormerConfig as BudgetFormerConfig
from budgetformer.nn.allocation import (
    AllHeads,
    Allocation,
    Dial,
    FixedBudget,
    HeadAllocator,
    LearnedHeads,
    RandomHeads,
    Selection,
    StaticHeads,
    pool,
)
from budgetformer.nn.encoder import BudgetedEncoder, Embedding, padding_mask, sinusoids
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.objective import Objective, allocation_losses, task_loss


def make_allocator(config: BudgetFormerConfig) -> HeadAllocator:
    """A new allocator for one layer, as the config asks."""
    width, heads = config.hidden_size, config.num_attention_heads
    gates = config.part(Exploration), config.part(Selection)
    match config.allocator:
        case "all":
            return AllHeads(heads)
        case "fixed":
            assert config.fixed_budget is not None
            return FixedBudget(width, heads, *gates, config.fixed_budget)
        case "random":
            return RandomHeads(width, heads, *gates)
        case "static":
            return StaticHeads(heads, *gates)
        case _:
            return LearnedHeads(width, heads, *gates)


@dataclass
class BudgetFormerOutput(ModelOutput):
    """Logits and everything that happened on the way.

    `loss_parts` holds each part of `loss` by name; `allocations` has one Allocation a layer; `attentions` maps a
    layer to the attention maps that were asked for.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    loss_parts: dict[str, Tensor] | None = None
    allocations: tuple[Allocation, ...] | None = None
    attentions: dict[int, Tensor] | None = None


class BudgetFormerForSequenceClassification(PreTrainedModel):
    """A Transformer encoder with head budgets, mean pooling and one linear classifier."""

    config: BudgetFormerConfig
    config_class = BudgetFormerConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it itself
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["allocator"]  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: BudgetFormerConfig) -> None:
        super().__init__(config)
        self.encoder = BudgetedEncoder(
            [make_allocator(config) for _ in range(config.num_hidden_layers)],
            vocab=config.vocab_size,
            width=config.hidden_size,
            inner=config.intermediate_size,
            positions=config.max_position_embeddings,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            activation=config.hidden_act,
            scale_embeddings=config.scale_embeddings,
            segments=config.segment_embeddings,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.labels)
        self.exploration = config.part(Exploration)
        self.objective = config.part(Objective)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        init = _initializers()
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            scaled = self.config.scale_embeddings and module.num_embeddings == self.config.vocab_size
            init.normal_(module.weight, std=self.config.initializer_range if scaled else 1.0)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, StaticHeads):
            init.zeros_(module.budget_logit)
            init.zeros_(module.score)
        elif isinstance(module, Embedding):
            init.copy_(module.positions, sinusoids(*module.positions.shape))

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embedding.tokens = cast("nn.Embedding", value)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        progress: float | None = None,
        budget: str | Dial | None = None,
        attention_heads: Mapping[int, Sequence[int]] | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BudgetFormerOutput | tuple[Any, ...]:
        """Classify a batch.

        `progress` is t/T (default: the progress stored in the config). `budget` is the dial, heeded at evaluation
        only. `attention_heads` names, by layer, the heads whose attention maps are wanted; `output_attentions`
        asks for all. `token_type_ids` is used where the model has `segment_embeddings` (the paper's has none).
        """
        mask_BN = padding_mask(attention_mask)
        self._check_ids(input_ids)
        progress = self.config.training_progress if progress is None else float(progress)
        if not 0 <= progress <= 1:
            raise UsageError(f"progress={progress}: it is t/T, give a number in [0, 1]")
        if output_attentions:
            attention_heads = {
                layer: range(self.config.num_attention_heads) for layer in range(self.config.num_hidden_layers)
            }
        hidden_BND, allocations, maps = self.encoder(
            input_ids, mask_BN, progress, Dial.parse(budget), attention_heads, token_type_ids
        )
        pooled_BD = pool(hidden_BND, mask_BN) if self.config.pooling == "mean" else hidden_BND[:, 0]
        logits = self.classifier(self.dropout(pooled_BD).to(self.classifier.weight.dtype))
        loss, parts = None, None
        if labels is not None:
            parts = self.losses(logits, labels, allocations, progress)
            loss = torch.stack(tuple(parts.values())).sum()
        output = BudgetFormerOutput(loss, logits, parts, allocations, maps or None)
        return output if return_dict is None or return_dict else output.to_tuple()

    def losses(
        self, logits: Tensor, labels: Tensor, allocations: Sequence[Allocation], progress: float
    ) -> dict[str, Tensor]:
        """Every part of the objective by name; their sum is the loss."""
        self._check_labels(labels)
        weights = self.config.class_weights
        task = task_loss(
            logits,
            labels,
            self.config.task,
            class_weights=None if weights is None else logits.new_tensor(weights, dtype=torch.float32),
            label_smoothing=self.config.label_smoothing,
        )
        beta = self.exploration.entropy_weight(progress)
        return {"task": task, **allocation_losses(allocations, self.objective, beta)}

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dim() != 2 or ids.numel() == 0:
            raise UsageError(f"input_ids has shape {tuple(ids.shape)}: give (batch, tokens), both at least 1")
        low, high = ids.aminmax()
        if int(low) < 0 or int(high) >= self.config.vocab_size:
            wrong = int(high) if int(low) >= 0 else int(low)
            raise UsageError(
                f"input_ids contains {wrong}, outside the vocabulary of {self.config.vocab_size}: "
                "use the tokenizer that the model was trained with"
            )

    def _check_labels(self, labels: Tensor) -> None:
        n, task = self.config.labels, self.config.task
        if task == "single_label_classification":
            low, high = labels.aminmax()
            if labels.is_floating_point() or int(low) < 0 or int(high) >= n:
                raise UsageError(
                    f"labels hold values from {low.item()} to {high.item()}, but the model has num_labels={n}: give "
                    f"whole numbers from 0 to {n - 1}, or set num_labels or problem_type"
                )
        elif task == "multi_label_classification" and labels.shape[-1] != n:
            raise UsageError(f"labels have shape {tuple(labels.shape)}: give one 0 or 1 for each of {n} labels")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load from a directory or the hub; safetensors only, and a damaged file is named."""
        if kwargs.get("use_safetensors") is False:
            raise ModelError("use_safetensors=False: pickled weights can run code and are never loaded")
        folder = Path(pretrained_model_name_or_path) if pretrained_model_name_or_path else None
        if folder is not None and folder.is_dir():
            check_weights(folder / kwargs.get("subfolder", ""))
        try:
            model: Self = super().from_pretrained(
                pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True}
            )
        except SafetensorError as error:
            raise ModelError(f"{pretrained_model_name_or_path}: the weights cannot be read ({error})") from error
        for parameter in model.parameters():  # the mapped file is not aligned, which changes the last bits of a GEMM
            parameter.data = parameter.data.clone()
        return model


def check_weights(folder: Path) -> None:
    """Refuse a model folder whose weights are missing, pickled, cut short or corrupt."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next((f for ending in ("*.bin", "*.pt", "*.pth", "*.pkl") for f in folder.glob(ending)), None)
        if pickled:
            raise ModelError(
                f"{pickled} is a pickle file, which can run code and is never loaded: convert it to "
                "model.safetensors on a machine that you can afford to lose"
            )
        raise ModelError(f"{folder} has no model.safetensors: give the directory of a saved model")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a readable safetensors file ({error}): it is corrupt or was cut short; copy or save "
                "it again"
            ) from error


class ProgressCallback(TrainerCallback):
    """Tells a model under `transformers.Trainer` how far it is; without it the gates stay at their first progress."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].config.training_progress = min(1.0, state.global_step / max(1, state.max_steps))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].config.training_progress = min(1.0, state.global_step / max(1, state.max_steps))


def _initializers() -> Any:
    from transformers import initialization  # guards against overwriting weights that were just loaded

    return initialization


AutoConfig.register(BudgetFormerConfig.model_type, BudgetFormerConfig)
AutoModelForSequenceClassification.register(BudgetFormerConfig, BudgetFormerForSequenceClassification)

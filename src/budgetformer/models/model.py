"""One model over a base, our own encoder or a pretrained one: BudgetFormerForSequenceClassification.

Importing this module registers it with AutoConfig and AutoModelForSequenceClassification.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback
from transformers.utils.generic import ModelOutput

from budgetformer.dial import Dial
from budgetformer.errors import ModelError, UsageError
from budgetformer.exits import AfterStage
from budgetformer.models.bases import align_weights, base_hash, check_weights, load_base
from budgetformer.models.checks import check_ids, check_labels
from budgetformer.models.config import BudgetFormerConfig as BudgetFormerConfig
from budgetformer.models.gates import first_budget, make_gate, make_groups_gate
from budgetformer.models.layers import Layers, PretrainedLayers
from budgetformer.models.native import NativeBase, init_native
from budgetformer.models.sites import BiasOnly, Budgets, replace_sites, restore_plain, set_dropout
from budgetformer.models.stages import Staged, Stages
from budgetformer.nn.allocation import Allocation, Budget, GatedHeads, LearnedHeads
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.encoder import padding_mask
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.feedforward import BudgetedFeedForward
from budgetformer.nn.objective import (
    Objective,
    allocation_losses,
    distillation_loss,
    hidden_state_distance,
    ranked_losses,
    task_loss,
)
from budgetformer.nn.ranking import FrozenHeads, RankedHeads, RankingOptions, ScoredHeads, draw_budgets, resolve_budget


@dataclass
class BudgetFormerOutput(ModelOutput):
    """Logits and everything that happened on the way.

    `loss_parts` holds each part of `loss` by name; `allocations` has one Allocation per layer; `attentions` maps a
    layer to the attention maps that were asked for. Of a model with exits, `exits` is the stage at which each sample
    left, and `stage_logits` (B, S, C) are the answers of all stages where no sample could leave early.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    loss_parts: dict[str, Tensor] | None = None
    allocations: tuple[Allocation, ...] | None = None
    attentions: dict[int, Tensor] | None = None
    exits: Tensor | None = None
    stage_logits: Tensor | None = None


class BudgetFormerForSequenceClassification(PreTrainedModel):
    """A sequence classifier whose attention has head budgets, over our own encoder or a Hugging Face one (`base`)."""

    config: BudgetFormerConfig
    config_class = BudgetFormerConfig
    base_model_prefix = "base"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer must scale it itself
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["allocator"]  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: BudgetFormerConfig, base: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if config.base is None:
            self.base: Any = NativeBase(config)
        else:
            self.base = _retrofitted(config, base)
            if base is not None or self.device.type != "meta":
                for module in self.modules():  # every weight has its first value
                    module._is_hf_initialized = True  # type: ignore[assignment]
        self.stages = Stages(config)
        self.attentions = [m for m in self.modules() if isinstance(m, BudgetedAttention | BiasOnly)]  # by layer
        self.feedforwards = [m for m in self.modules() if isinstance(m, BudgetedFeedForward)]  # where they have gates
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        init_native(module, self.config)

    @property
    def ranked_gates(self) -> list[ScoredHeads]:
        """The gates that rank units across layers: of heads, first layer first, then of groups; none of other kinds."""
        gates = [part.allocator for part in (*self.attentions, *self.feedforwards)]
        return [gate for gate in gates if isinstance(gate, ScoredHeads)]

    @property
    def order(self) -> Tensor:
        """The static scores of all units, gate by gate, comparable across layers. (U,)."""
        return torch.cat([gate.score for gate in self.ranked_gates])

    @property
    def prices(self) -> Tensor | None:
        """What each unit costs of a layer, gate by gate, (U,); None: all the same."""
        if not (price := self.config.groups_price):
            return None
        gates = [1 - price] * len(self.attentions) + [price] * len(self.feedforwards)
        sizes = [gate.num_heads for gate in self.ranked_gates]
        return torch.tensor([p / n for p, n in zip(gates, sizes, strict=True) for _ in range(n)], device=self.device)

    def update_centres(self, total: Callable[[Tensor], Tensor]) -> None:
        """Let the gates' mean inputs follow the layers below: for a training loop, once per step."""
        for gate in self.ranked_gates:
            if isinstance(gate, RankedHeads):
                gate.update_centre(total)

    def get_input_embeddings(self) -> nn.Module:
        return cast("nn.Module", self.base.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

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
        words_logits: Tensor | None = None,
        after_stage: AfterStage | None = None,
        teacher_logits: Tensor | None = None,
        teacher_states: Sequence[Tensor] = (),
        **kwargs: Any,
    ) -> BudgetFormerOutput | tuple[Any, ...]:
        """Classify a batch.

        `progress` is t/T (default: the progress stored in the config). `budget` is the dial, heeded at evaluation only.
        `attention_heads` names, by layer, the heads whose attention maps are wanted; `output_attentions` asks for all.
        `token_type_ids` is used where the model has `segment_embeddings` (the paper's has none). `words_logits` are the
        answers of the stage of words where they are known already. `after_stage` gets what every stage but the last
        came to, and says who leaves (evaluation only). The loss learns from a teacher (see `teacher_targets`).
        """
        mask_BN = padding_mask(attention_mask)
        check_ids(self.config, input_ids)
        progress = self.config.training_progress if progress is None else float(progress)
        if not 0 <= progress <= 1:
            raise UsageError(f"progress={progress}: it is t/T, give a number in [0, 1]")
        layers = range(self.config.num_hidden_layers)
        if output_attentions:
            attention_heads = {layer: range(self.config.num_attention_heads) for layer in layers}
        if wrong := [layer for layer in attention_heads or {} if layer not in layers]:
            raise UsageError(f"layer {wrong[0]} does not exist: layers are 0 to {len(layers) - 1}")
        dial = Dial.parse(budget)
        dials, share_B = self._dials(dial.heads, len(input_ids), progress)
        budgets = Budgets(mask_BN, progress, dials, attention_heads or {})
        staged = self._encode(input_ids, budgets, token_type_ids, states=bool(teacher_states), after=after_stage,
                              words_logits=words_logits, limit=self.config.spec.exit_limit(dial))  # fmt: skip
        loss, parts = None, None
        if labels is not None:
            parts = self.losses(staged.logits, labels, staged.allocations, progress)
            if self.config.exits and staged.stage_logits is not None:
                parts |= self.stages.losses(staged.stage_logits, labels, progress, **self._task_options(staged.logits))
            if share_B is not None:
                options, flops_B = self.config.part(RankingOptions), self._layer_flops(input_ids, mask_BN)
                price = self.config.groups_price
                parts |= ranked_losses(staged.allocations, share_B, flops_B, options, progress, price)
            parts |= self._distillation(staged, teacher_logits, teacher_states, mask_BN)
            loss = torch.stack(tuple(parts.values())).sum()
        exits = staged.exits if self.config.exits else None
        logits = staged.logits
        if self.config.temperatures:
            logits = logits / logits.new_tensor(self.config.temperatures)[staged.exits, None]
        output = BudgetFormerOutput(
            loss, logits, parts, staged.allocations, budgets.maps or None, exits, staged.stage_logits
        )
        return output if return_dict is None or return_dict else output.to_tuple()

    @torch.no_grad()
    def teacher_targets(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """What another model can learn from this one, with all heads: its logits and the states after each layer."""
        dials, _ = self._dials(Dial("full"), len(input_ids), 1.0)
        budgets = Budgets(padding_mask(attention_mask), 1.0, dials)
        staged = self._encode(input_ids, budgets, token_type_ids, states=True)
        return {"teacher_logits": staged.logits, "teacher_states": staged.states}

    def losses(
        self, logits: Tensor, labels: Tensor, allocations: Sequence[Allocation], progress: float
    ) -> dict[str, Tensor]:
        """The task's loss, and the paper's terms where the gates are the paper's, by name."""
        check_labels(self.config, labels)
        parts = {"task": task_loss(logits, labels, self.config.task, **self._task_options(logits))}
        if issubclass(self.config.gate, GatedHeads):
            beta = self.config.part(Exploration).entropy_weight(progress)
            parts |= allocation_losses(allocations, self.config.part(Objective), beta)
        return parts

    def _task_options(self, logits: Tensor) -> dict[str, Any]:
        weights = self.config.class_weights
        return {
            "class_weights": None if weights is None else logits.new_tensor(weights, dtype=torch.float32),
            "label_smoothing": self.config.label_smoothing,
        }

    def _distillation(
        self, staged: Staged, teacher_logits: Tensor | None, teacher_states: Sequence[Tensor], mask_BN: Tensor | None
    ) -> dict[str, Tensor]:
        config, parts = self.config, {}
        if teacher_logits is not None and config.distill_weight:
            distance = distillation_loss(staged.logits, teacher_logits, config.task, config.distill_temperature)
            parts["distill"] = config.distill_weight * distance
        if teacher_states:
            distance = hidden_state_distance(staged.states, teacher_states, mask_BN)
            parts["layers"] = config.distill_layers * distance
        return parts

    def _encode(self, ids_BN: Tensor, budgets: Budgets, segments_BN: Tensor | None, **options: Any) -> Staged:
        layers: Layers = self.base if self.config.base is None else PretrainedLayers(self.base)
        embedded = segments_BN if self.config.segment_embeddings else None
        return self.stages(layers, ids_BN, embedded, segments_BN, budgets, **options)  # type: ignore[no-any-return]

    def _dials(self, dial: Dial, batch: int, progress: float) -> tuple[Sequence[Budget], Tensor | None]:
        """Each gate's dial; where heads are ranked, in training, the shares that were drawn too."""
        layers = self.config.num_hidden_layers * (2 if self.config.groups else 1)
        if not self.config.gate.ranks_layers:
            return [dial] * layers, None
        options = self.config.part(RankingOptions)
        if self.training:
            threshold, share_B = draw_budgets(self.order, batch, options, progress, self.prices)
            return [threshold] * layers, share_B
        scores = [gate.score for gate in self.ranked_gates]
        return resolve_budget(dial, scores, options.target(progress), options.threshold_offsets, self.prices), None

    def _layer_flops(self, ids_BN: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Those of all units of one layer. -> (B,)."""
        (B, N), D = ids_BN.shape, self.config.hidden_size
        n_B = torch.full((B,), float(N), device=ids_BN.device) if mask_BN is None else mask_BN.sum(dim=1).float()
        groups_B = 4 * n_B * D * self.config.intermediate_size if self.config.groups else 0
        return 8 * n_B * D * D + 4 * n_B**2 * D + groups_B

    def keep_base(self, fresh: Sequence[str] = ()) -> None:
        """Train gates and classifier only, and save them only; `fresh` names encoder weights that the base lacks."""
        self.config.delta = True
        prefix = f"{self.base.base_model_prefix}."
        for name, parameter in self.base.named_parameters():
            if name.startswith(prefix) and ".allocator." not in name and name not in fresh:
                parameter.requires_grad_(False)

    def plain(self) -> PreTrainedModel:
        """An ordinary model of the base's architecture, with all heads and these weights."""
        if self.config.gate in (LearnedHeads, FrozenHeads):
            raise UsageError(f"gates of the kind {self.config.kind!r}: heads are not at weight 1, or not all there")
        base = self.config.base_config
        for name in ("id2label", "label2id", "problem_type"):
            setattr(base, name, getattr(self.config, name))
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(base)
        restore_plain(self.base, model)
        model.train(self.training)
        return model

    def freeze(self, budget: float) -> PreTrainedModel:
        """A static model with the units of the highest static scores that cost this share together: no gates.

        With all of them it is an ordinary model of the base's architecture. With fewer it is ours: these architectures
        fix the size of a head to width / heads and give all layers one width.
        """
        if not self.config.gate.ranks_layers:
            raise UsageError(
                f"gates of the kind {self.config.kind!r} have no order of heads to freeze: give a run that was trained "
                "with --base and gates of the kind ranked or order"
            )
        if not 0 <= budget <= 1:
            raise UsageError(f"budget {budget:g} is outside [0, 1]: it is the share of heads' cost that is kept")
        if budget == 1 and not self.config.exits:
            return self.plain()
        threshold = resolve_budget(Dial("mean", budget), [self.order], None, prices=self.prices)[0].threshold
        config, layers = copy.deepcopy(self.config), self.config.num_hidden_layers
        units = [(gate.score > threshold).nonzero().flatten().tolist() for gate in self.ranked_gates]
        size, config.delta = config.gates["group_size"], False
        config.gates = {"kind": "frozen", "heads": units[:layers], "groups": units[layers:] or None, "group_size": size}
        frozen = BudgetFormerForSequenceClassification(config, self.plain())
        for attention in frozen.attentions if self.config.gates["renormalize"] else ():
            if isinstance(attention, BudgetedAttention) and attention.held:
                attention.out.weight.data *= attention.num_heads / len(attention.held)
        frozen.stages.load_state_dict(self.stages.state_dict())
        frozen.train(self.training)
        return frozen

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the whole model, or the delta where the base was kept as it is."""
        if self.config.delta and "state_dict" not in kwargs:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            ours = (".allocator.", "stages.")
            state = {k: v for k, v in self.state_dict().items() if k in trained or any(name in k for name in ours)}
            kwargs["state_dict"] = state
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, base: Any = None, offline: bool = False, **kwargs: Any
    ) -> Self:
        """Load from a directory or, unless `offline`, the hub; safetensors only, and a damaged file is named.

        A delta is put on its base (`base` where it moved), whose hash is checked.
        """
        if kwargs.get("use_safetensors") is False:
            raise ModelError("use_safetensors=False: pickled weights can run code and are never loaded")
        kwargs["local_files_only"] = offline or kwargs.get("local_files_only", False)
        folder = Path(pretrained_model_name_or_path or "") / kwargs.get("subfolder", "")
        if pretrained_model_name_or_path and folder.is_dir():
            check_weights(folder)
            config = kwargs.get("config") or BudgetFormerConfig.from_pretrained(folder)
            if config.delta:
                return cls._load_delta(folder, config, str(base or config.base_name), kwargs["local_files_only"])
        try:
            model: Self = super().from_pretrained(
                pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True}
            )
        except SafetensorError as error:
            raise ModelError(f"{pretrained_model_name_or_path}: the weights cannot be read ({error})") from error
        align_weights(model)
        return model

    @classmethod
    def _load_delta(cls, folder: Path, config: BudgetFormerConfig, name: str, offline: bool) -> Self:
        labels = {key: getattr(config, key) for key in ("id2label", "label2id", "problem_type")}
        try:
            base, fresh = load_base(name, offline=offline, **labels)
        except ModelError as error:
            raise ModelError(
                f"{folder} is a delta on the base {name!r}, which cannot be loaded ({error}): put the base back, or "
                "give it with from_pretrained(..., base=...)"
            ) from None
        if (digest := base_hash(base, fresh)) != config.base_sha256:
            raise ModelError(
                f"{folder} is a delta on the base {name!r} with the hash {str(config.base_sha256)[:12]}, but that "
                f"base's weights have the hash {digest[:12]} now: give the base that it was trained on"
            )
        model = cls(config, base)
        model.keep_base(fresh)
        _, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if unexpected:
            raise ModelError(f"{folder}: the delta holds {unexpected[0]!r}, which its base has no place for")
        model.train(False)
        return model


def retrofit(model: PreTrainedModel, **options: Any) -> BudgetFormerForSequenceClassification:
    """Head budgets for a Hugging Face sequence classifier; at first it computes what the model did.

    The model itself is changed and becomes part of the result. `options` are those of BudgetFormerConfig.
    """
    config = BudgetFormerConfig.over(model.config, **options)
    if not type(model).__name__.endswith("ForSequenceClassification"):
        raise UsageError(
            f"{type(model).__name__} has no classifier: load it with AutoModelForSequenceClassification.from_pretrained"
        )
    budgeted = BudgetFormerForSequenceClassification(config, model)
    budgeted.train(model.training)
    return budgeted


def _retrofitted(config: BudgetFormerConfig, model: PreTrainedModel | None) -> PreTrainedModel:
    """The pretrained encoder with our attention; without one, an encoder of its shape."""
    if model is None:
        base = config.base_config
        base.num_labels = config.labels
        model = cast("PreTrainedModel", AutoModelForSequenceClassification.from_config(base))
    gain = first_budget(config.num_attention_heads) if config.gate is LearnedHeads else 1.0
    replace_sites(model, partial(make_gate, config), partial(make_groups_gate, config), gain)
    set_dropout(model, config.dropout, config.attention_dropout)
    return model


class ProgressCallback(TrainerCallback):
    """Tells a model under `transformers.Trainer` how far it is; without it the gates stay at their first progress."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].config.training_progress = min(1.0, state.global_step / max(1, state.max_steps))

    on_train_end = on_step_begin


AutoModelForSequenceClassification.register(BudgetFormerConfig, BudgetFormerForSequenceClassification)

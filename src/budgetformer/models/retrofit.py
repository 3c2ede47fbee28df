"""A pretrained encoder with head budgets, behind the same surface as our own model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from budgetformer.errors import ModelError, UsageError
from budgetformer.models.model import BudgetFormerForSequenceClassification, BudgetFormerOutput, check_weights
from budgetformer.models.retrofit_config import RetrofitConfig
from budgetformer.models.sites import (
    Budgets,
    RetrofitAttention,
    freeze_attention,
    replace_attention,
    restore_attention,
    set_dropout,
)
from budgetformer.nn.allocation import (
    AllHeads,
    Allocation,
    Dial,
    HeadAllocator,
    LearnedHeads,
    Selection,
)
from budgetformer.nn.encoder import padding_mask
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.objective import Objective, allocation_losses, task_loss
from budgetformer.nn.ranking import Cut, RankedHeads, make_cuts, threshold_at, thresholds


class BudgetedClassifier(BudgetFormerForSequenceClassification):
    """A Hugging Face encoder for sequence classification whose attention modules are ours."""

    config: RetrofitConfig
    config_class = RetrofitConfig  # type: ignore[assignment]
    base_model_prefix = "model"
    _no_split_modules: list[str] = []  # noqa: RUF012

    def __init__(self, config: RetrofitConfig, model: PreTrainedModel | None = None) -> None:
        super(BudgetFormerForSequenceClassification, self).__init__(config)  # not the parent's own encoder
        given = model is not None
        if model is None:
            base = config.base_config
            base.num_labels = config.labels
            model = AutoModelForSequenceClassification.from_config(base)
        gain = _first_budget(config.num_attention_heads) if config.allocator == "learned" else 1.0
        replace_attention(model, lambda layer: _make_gate(config), gain)
        set_dropout(model, config.dropout, config.attention_dropout)
        if config.kept_heads is not None:
            freeze_attention(model, config.kept_heads)
        self.model = model
        found = [m.core.allocator for m in model.modules() if isinstance(m, RetrofitAttention)]
        self.gates = [gate for gate in found if isinstance(gate, RankedHeads)]  # first layer first
        self.exploration = config.part(Exploration)
        self.objective = config.part(Objective)
        if given or self.device.type != "meta":
            for module in self.modules():  # every weight has its first value
                module._is_hf_initialized = True  # type: ignore[assignment]
        self.post_init()  # type: ignore[no-untyped-call]
        if not config.learn_order:
            for gate in self.gates:
                gate.score.requires_grad_(False)

    @property
    def order(self) -> Tensor:
        """The heads' static scores, comparable across layers. (L, H)."""
        return torch.stack([gate.score for gate in self.gates])

    def get_input_embeddings(self) -> nn.Module:
        return cast("nn.Module", self.model.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

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
        teacher_logits: Tensor | None = None,
        teacher_states: Sequence[Tensor] = (),
        **kwargs: Any,
    ) -> BudgetFormerOutput | tuple[Any, ...]:
        """Classify a batch, as our own model does; what a teacher gave (see `lessons`) is there to learn from."""
        mask_BN = padding_mask(attention_mask)
        self._check_ids(input_ids)
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise UsageError(
                f"the input has {input_ids.shape[1]} tokens but the model has {self.config.max_position_embeddings} "
                f"positions: truncate the text (truncation=True, max_length={self.config.max_position_embeddings})"
            )
        progress = self.config.training_progress if progress is None else float(progress)
        if not 0 <= progress <= 1:
            raise UsageError(f"progress={progress}: it is t/T, give a number in [0, 1]")
        layers = range(self.config.num_hidden_layers)
        if output_attentions:
            attention_heads = {layer: range(self.config.num_attention_heads) for layer in layers}
        if wrong := [layer for layer in attention_heads or {} if layer not in layers]:
            raise UsageError(f"layer {wrong[0]} does not exist: layers are 0 to {len(layers) - 1}")
        dials, share_B = self._dials(Dial.parse(budget), len(input_ids), progress)
        budgets = Budgets(mask_BN, progress, dials, attention_heads or {})
        inputs = self._inputs(mask_BN, token_type_ids)
        encoded = self.model(input_ids, budgets=budgets, output_hidden_states=bool(teacher_states), **inputs)
        logits = encoded.logits
        allocations = tuple(budgets.allocations[layer] for layer in layers)
        loss, parts = None, None
        if labels is not None:
            parts = self.losses(logits, labels, allocations, progress)
            parts |= self._budget_losses(allocations, mask_BN, input_ids.shape[1], share_B)
            if teacher_logits is not None and self.config.distill_weight:
                parts["distill"] = self.config.distill_weight * self._distance(logits, teacher_logits)
            if teacher_states:
                apart = _apart(encoded.hidden_states[1:], teacher_states, mask_BN)
                parts["layers"] = self.config.distill_layers * apart
            loss = torch.stack(tuple(parts.values())).sum()
        output = BudgetFormerOutput(loss, logits, parts, allocations, budgets.maps or None)
        return output if return_dict is None or return_dict else output.to_tuple()

    @torch.no_grad()
    def lessons(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """What another model can learn from this one, with all heads: its logits and the states behind each layer."""
        mask_BN = padding_mask(attention_mask)
        budgets = Budgets(mask_BN, 1.0, self._dials(Dial("full"), len(input_ids), 1.0)[0])
        inputs = self._inputs(mask_BN, token_type_ids)
        encoded = self.model(input_ids, budgets=budgets, output_hidden_states=True, **inputs)
        return {"teacher_logits": encoded.logits, "teacher_states": encoded.hidden_states[1:]}

    def _inputs(self, mask_BN: Tensor | None, segments_BN: Tensor | None) -> dict[str, Any]:
        """What the encoder takes beside the ids. Our attention has the mask already; only mean pooling asks for it."""
        inputs: dict[str, Any] = {}
        if self.config.segment_embeddings and segments_BN is not None:
            inputs["token_type_ids"] = segments_BN
        if getattr(self.model.config, "classifier_pooling", None) == "mean":
            inputs["attention_mask"] = mask_BN
        elif self.model.config.model_type == "modernbert":  # a mapping keeps it from making masks
            inputs["attention_mask"] = {"full_attention": None, "sliding_attention": None}
        return inputs

    def _dials(self, dial: Dial, batch: int, progress: float) -> tuple[Sequence[Dial | None], Tensor | None]:
        """Each layer's dial; in training the drawn shares of heads too, NaN where the price alone decides."""
        layers, config = self.config.num_hidden_layers, self.config
        if not self.gates:
            return [dial] * layers, None
        target = None if config.target_budget is None else config.reached(config.target_budget, progress)
        if not self.training:
            return make_cuts(dial, self.order, target, config.dial_shifts), None
        table = thresholds(self.order)
        low = config.reached(config.budget_low, progress)
        drawn_B = low + (1 - low) * torch.rand(batch, device=table.device) ** 2  # few heads are harder to learn
        own_B = torch.rand(batch, device=table.device) < 0.5
        share_B = torch.where(own_B, float("nan") if target is None else target, drawn_B)
        threshold_B1 = torch.where(share_B.isnan()[:, None], 0.0, threshold_at(share_B.nan_to_num(1.0), table))
        return [Cut("learned", None, threshold_B1)] * layers, share_B

    def losses(
        self, logits: Tensor, labels: Tensor, allocations: Sequence[Allocation], progress: float
    ) -> dict[str, Tensor]:
        """The task's loss, and the paper's terms where the gates are the paper's."""
        self._check_labels(labels)
        weights = self.config.class_weights
        parts = {
            "task": task_loss(
                logits,
                labels,
                self.config.task,
                class_weights=None if weights is None else logits.new_tensor(weights, dtype=torch.float32),
                label_smoothing=self.config.label_smoothing,
            )
        }
        if self.config.allocator == "learned":
            parts |= allocation_losses(allocations, self.objective, self.exploration.entropy_weight(progress))
        return parts

    def _budget_losses(
        self, allocations: Sequence[Allocation], mask_BN: Tensor | None, length: int, share_B: Tensor | None
    ) -> dict[str, Tensor]:
        """What holds ranked heads to the drawn budgets, and the price on executed FLOPs."""
        if share_B is None:
            return {}
        executed_B = torch.stack([a.budget for a in allocations]).mean(dim=0)
        parts = {}
        if (asked_B := ~share_B.isnan()).any():
            gap = (executed_B - share_B)[asked_B].mean()
            parts["target"] = self.objective.target_weight * gap**2
        if self.objective.cost_weight:
            D = self.config.hidden_size
            n_B = executed_B.new_full(executed_B.shape, length) if mask_BN is None else mask_BN.sum(dim=1).float()
            flops_B = 8 * n_B * D * D + 4 * n_B**2 * D  # of one layer's attention with all heads
            parts["cost"] = self.objective.cost_weight * (executed_B * flops_B).sum() / flops_B.sum()
        return parts

    def _distance(self, logits: Tensor, teacher: Tensor) -> Tensor:
        logits, teacher, T = logits.float(), teacher.float(), self.config.distill_temperature
        if self.config.task == "regression":
            return F.mse_loss(logits, teacher)
        if self.config.task == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, teacher.sigmoid())
        target = F.log_softmax(teacher / T, dim=-1)
        return T * T * F.kl_div(F.log_softmax(logits / T, dim=-1), target, log_target=True, reduction="batchmean")

    def keep_base(self, fresh: Sequence[str] = ()) -> None:
        """Train gates and classifier only, and save them only; `fresh` names encoder weights that the base lacks."""
        self.config.delta = True
        prefix = f"{self.model.base_model_prefix}."
        for name, parameter in self.model.named_parameters():
            if name.startswith(prefix) and ".allocator." not in name and name not in fresh:
                parameter.requires_grad_(False)

    def plain(self) -> PreTrainedModel:
        """An ordinary model of the base's architecture, with all heads and these weights."""
        if self.config.allocator in ("learned", "given"):
            raise UsageError(f"allocator={self.config.allocator!r}: its heads are not at weight 1, or not all there")
        base = self.config.base_config
        for name in ("id2label", "label2id", "problem_type"):
            setattr(base, name, getattr(self.config, name))
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(base)
        restore_attention(self.model, model)
        model.train(self.training)
        return model

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the whole model, or the delta where the base was kept as it is."""
        if self.config.delta and "state_dict" not in kwargs:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            state = {k: v for k, v in self.state_dict().items() if k in trained or ".allocator." in k}
            kwargs["state_dict"] = state
        super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a whole model, or a delta on its base (`base=` where it moved); the base's hash is checked."""
        moved = kwargs.pop("base", None)
        folder = Path(pretrained_model_name_or_path)
        if not (folder.is_dir() and (folder / "config.json").exists()):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        config = kwargs.get("config") or RetrofitConfig.from_pretrained(folder)
        if not config.delta:
            return super().from_pretrained(folder, *args, **{**kwargs, "config": config})
        check_weights(folder)
        name = str(moved or config.base_name)
        try:
            base, fresh = load_base(name, config)
        except ModelError as error:
            raise ModelError(
                f"{folder} is a delta on the base {name!r}, which cannot be loaded ({error}): put the base back, or "
                "give it with from_pretrained(..., base=...)"
            ) from None
        if (found := base_hash(base, fresh)) != config.base_sha256:
            raise ModelError(
                f"{folder} is a delta on the base {name!r} with the hash {str(config.base_sha256)[:12]}, but that "
                f"base's weights have the hash {found[:12]} now: give the base that it was trained on"
            )
        model = cls(config, base)
        model.keep_base(fresh)
        _, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if unexpected:
            raise ModelError(f"{folder}: the delta holds {unexpected[0]!r}, which its base has no place for")
        model.train(False)
        return model


def _apart(mine: Sequence[Tensor], teacher: Sequence[Tensor], mask_BN: Tensor | None) -> Tensor:
    """The squared distance between two models' states on real tokens, as a share of the teacher's: mean of texts."""
    shares = []
    for a_BND, b_BND in zip(mine, teacher, strict=True):
        squares = torch.stack([(a_BND.float() - b_BND.float()).square(), b_BND.float().square()]).sum(dim=-1)
        apart_B, size_B = (squares if mask_BN is None else squares * mask_BN).sum(dim=-1)
        shares.append((apart_B / size_B).mean())
    return torch.stack(shares).mean()


def _first_budget(heads: int) -> float:
    """The s that the paper's gates start with: all heads run when it is rounded, and it still has a gradient."""
    return 1 - 1 / (4 * heads)


def _make_gate(config: RetrofitConfig) -> HeadAllocator:
    width, heads = config.hidden_size, config.num_attention_heads
    match config.allocator:
        case "learned":
            gate = LearnedHeads(width, heads, config.part(Exploration), config.part(Selection))
            first = _first_budget(heads)
            last = cast("nn.Linear", gate.budget_net[2])
            nn.init.zeros_(last.weight)
            nn.init.constant_(last.bias, math.log(first / (1 - first)))
            nn.init.zeros_(gate.scorer.weight)
            nn.init.zeros_(gate.scorer.bias)
            return gate
        case "ranked" | "order":
            return RankedHeads(heads, width, per_input=config.allocator == "ranked", renormalize=config.renormalize)
        case _:
            return AllHeads(heads)


def retrofit(model: PreTrainedModel, **options: Any) -> BudgetedClassifier:
    """Head budgets for a Hugging Face sequence classifier; at first it computes what the model did.

    The model itself is changed and becomes part of the result. `options` are those of RetrofitConfig.
    """
    config = RetrofitConfig.of(model.config, **options)
    if not type(model).__name__.endswith("ForSequenceClassification"):
        raise UsageError(
            f"{type(model).__name__} has no classifier: load it with AutoModelForSequenceClassification.from_pretrained"
        )
    budgeted = BudgetedClassifier(config, model)
    budgeted.train(model.training)
    return budgeted


def read_base(name: str, *, offline: bool = False, **options: Any) -> PreTrainedConfig:
    """The config of a base; what is wrong with it, or with the options, is said before anything is loaded."""
    folder = Path(name).expanduser()
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder) if folder.is_dir() else name, local_files_only=offline or folder.is_dir()
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"base {name!r} cannot be loaded ({reason}): give a model directory or a hub name") from None
    if folder.is_dir():
        check_weights(folder)
    RetrofitConfig.of(found.base_config if isinstance(found, RetrofitConfig) else found, **options)
    return found


def load_base(
    name: str, config: RetrofitConfig | None = None, *, offline: bool = False, **labels: Any
) -> tuple[PreTrainedModel, list[str]]:
    """A pretrained encoder with a classifier for these labels, and the names of the weights it had to invent.

    The hub is asked only for a name that is no path here, and never if `offline`. A run of ours gives its plain model.
    """
    if config is not None:
        labels = {k: getattr(config, k) for k in ("id2label", "label2id", "problem_type")}
    found, folder = read_base(name, offline=offline), Path(name).expanduser()
    if isinstance(found, RetrofitConfig):
        mine, wanted = found.label_names, list(labels.get("id2label", found.id2label or {}).values())
        if mine != [str(name) for name in wanted]:
            raise ModelError(
                f"base {name!r} has the labels {', '.join(mine)}, and these are wanted: {', '.join(map(str, wanted))}; "
                f"give the encoder that it was made from ({found.base_name})"
            )
        return BudgetedClassifier.from_pretrained(folder).plain(), []
    model, info = AutoModelForSequenceClassification.from_pretrained(
        str(folder) if folder.is_dir() else name, local_files_only=offline or folder.is_dir(), **labels,
        use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    for parameter in model.parameters():  # the mapped file is not aligned, which changes the last bits of a GEMM
        parameter.data = parameter.data.clone()
    return model, sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})


def base_hash(model: PreTrainedModel, fresh: Sequence[str]) -> str:
    """The SHA-256 of an encoder's weights, without its classifier and what it had to invent."""
    digest, prefix = hashlib.sha256(), f"{model.base_model_prefix}."
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(prefix) and name not in fresh:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_model(folder: str | Path) -> BudgetFormerForSequenceClassification:
    """The model of a saved directory, our own or a retrofitted one."""
    if isinstance(AutoConfig.from_pretrained(folder), RetrofitConfig):
        return BudgetedClassifier.from_pretrained(folder)
    return BudgetFormerForSequenceClassification.from_pretrained(folder)


AutoConfig.register(RetrofitConfig.model_type, RetrofitConfig)
AutoModelForSequenceClassification.register(RetrofitConfig, BudgetedClassifier)

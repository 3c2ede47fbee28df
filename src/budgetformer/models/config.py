"""What a BudgetFormer is made of: its shape, how it allocates heads, and what it minimises."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar, cast

from transformers import PreTrainedConfig

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import Selection
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.objective import Objective, Task

Part = TypeVar("Part", Exploration, Selection, Objective)

# Keys that transformers itself writes into, or reads from, any model's config.
_FOREIGN_KEYS = frozenset(
    "num_labels name_or_path attn_implementation experts_implementation output_attentions torch_dtype model_type "
    "per_layer_config bos_token_id eos_token_id sep_token_id cls_token_id task_specific_params use_cache "
    "quantization_config tie_word_embeddings".split()
)
_SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
        "attention_dropout": 0.0,
    },
    "paper": {},
}
_SHAPES["recommended"] = _SHAPES["small"]


class BudgetFormerConfig(PreTrainedConfig):
    """The shape of a BudgetFormer, how it allocates heads, and what it minimises.

    The defaults are the paper's. `allocator` is `learned` (the paper), `all` (the standard Transformer), `fixed`
    (with `fixed_budget`), `random` or `static`. `training_progress` is the t/T at which the weights were saved: it
    sets the temperature of the gates at evaluation. Unknown keys are errors.
    """

    model_type: ClassVar[str] = "budgetformer"
    optional: ClassVar[tuple[str, ...]] = ()  # options that may be None
    allocators: ClassVar[tuple[str, ...]] = ("learned", "all", "fixed", "random", "static")
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["loss_parts", "allocations", "attentions"]

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int = 3072
    hidden_act: Literal["relu", "gelu"] = "relu"
    max_position_embeddings: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1
    initializer_range: float = 0.02
    scale_embeddings: bool = False
    segment_embeddings: bool = False
    pooling: Literal["mean", "first"] = "mean"
    pad_token_id: int | None = 0

    allocator: Literal["learned", "all", "fixed", "random", "static"] = "learned"
    fixed_budget: float | None = None
    training_progress: float = 0.0

    min_heads: int = Selection.min_heads
    rounding: Literal["floor", "round", "ceil"] = Selection.rounding
    budget_as: Literal["gain", "count"] = Selection.budget_as
    renormalize: bool = Selection.renormalize
    topk_from: float | None = Selection.topk_from
    pool_padding: bool = Selection.pool_padding

    tau_max: float = Exploration.tau_max
    tau_min: float = Exploration.tau_min
    gamma: float = Exploration.gamma
    sigma_max: float = Exploration.sigma_max
    beta_max: float = Exploration.beta_max

    s_min: float = Objective.s_min
    s_max: float = Objective.s_max
    alpha_base: float = Objective.alpha_base
    alpha_max: float = Objective.alpha_max
    entropy: Literal["intended", "printed", "off"] = Objective.entropy
    cost_weight: float = Objective.cost_weight
    target_budget: float | Sequence[float] | None = Objective.target_budget
    target_weight: float = Objective.target_weight
    label_smoothing: float = 0.0
    class_weights: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        known = {f.name for f in fields(self)}
        for key in kwargs:
            if key not in _FOREIGN_KEYS and not key.startswith("_"):
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise UsageError(f"config key {key!r} is not known: {hint}")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                     "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: give a whole number of at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                f"{self.num_attention_heads}: choose a number of heads that divides it"
            )
        if self.initializer_range <= 0:
            raise UsageError(f"initializer_range={self.initializer_range}: give a standard deviation above 0")
        for name in ("dropout", "attention_dropout", "label_smoothing"):
            value = getattr(self, name)
            if not (value is None and name in self.optional) and not 0 <= value < 1:
                raise UsageError(f"{name}={value}: give a number in [0, 1)")
        if self.pooling not in ("mean", "first"):
            raise UsageError(f"pooling={self.pooling!r}: give mean or first")
        if self.hidden_act not in ("relu", "gelu"):
            raise UsageError(f"hidden_act={self.hidden_act!r}: give relu or gelu")
        if not 0 <= self.training_progress <= 1:
            raise UsageError(f"training_progress={self.training_progress}: it is t/T, give a number in [0, 1]")
        if self.allocator not in self.allocators:
            raise UsageError(f"allocator={self.allocator!r}: give one of {', '.join(self.allocators)}")
        if (self.allocator == "fixed") != (self.fixed_budget is not None):
            raise UsageError(
                f"allocator={self.allocator!r} with fixed_budget={self.fixed_budget}: they go together, "
                "fixed_budget is the s of the allocator 'fixed'"
            )
        if self.class_weights is not None and len(self.class_weights) != self.num_labels:
            raise UsageError(f"class_weights has {len(self.class_weights)} values for {self.num_labels} labels")
        self.part(Exploration), self.part(Selection)
        self.part(Objective).targets(self.num_hidden_layers)

    def part(self, kind: type[Part]) -> Part:
        """The options of one part of the method, as that part's own dataclass."""
        return kind(**{f.name: getattr(self, f.name) for f in fields(kind)})

    @property
    def labels(self) -> int:
        """The number of outputs: `num_labels`, which is always set here."""
        return cast("int", self.num_labels)

    @property
    def label_names(self) -> list[str]:
        """The labels' names in the order of the outputs."""
        return [str(name) for _, name in sorted((self.id2label or {}).items())]

    @property
    def task(self) -> Task:
        """The problem type; where none was set, one label means regression and several mean a single choice."""
        if self.problem_type is not None:
            return self.problem_type
        return "regression" if self.num_labels == 1 else "single_label_classification"

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> BudgetFormerConfig:
        """A named shape (`tiny`, `small` or `paper`) with changes."""
        if name not in _SHAPES:
            raise UsageError(f"preset {name!r} is not known: give one of {', '.join(_SHAPES)}")
        return cls(**{**_SHAPES[name], **overrides})

    @classmethod
    def paper(cls, num_labels: int, **overrides: Any) -> BudgetFormerConfig:
        """The paper's model: 4 layers of 8 heads, width 768, BERT's uncased vocabulary."""
        return cls.preset("paper", num_labels=num_labels, **overrides)

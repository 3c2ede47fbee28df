"""What a BudgetFormer is made of: its shape or its base, its gates, and what it minimises."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, Literal, Self, cast

from transformers import AutoConfig, PreTrainedConfig

from budgetformer.errors import ModelError, UsageError
from budgetformer.exits import ExitOptions, Exits, complete_exits
from budgetformer.models.gates import KINDS, Part, complete, part
from budgetformer.models.sites import check_supported
from budgetformer.nn.allocation import HeadAllocator
from budgetformer.nn.objective import Objective, Task
from budgetformer.spec import GateSpec, ModelSpec

FORMAT_VERSION = 3
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
    """The shape of a BudgetFormer or the pretrained encoder that it stands on, its gates, and what it minimises.

    The defaults are the paper's. `gates` is a table of the `kind` and that kind's options: `learned` (the paper's),
    `all` (the standard Transformer), `fixed`, `random`, `static`; over a base `ranked` (heads ranked across layers, the
    input may depart from the order), `order` (the order alone), `learned`, `all`, `frozen`. `base` is the Hugging Face
    config of a pretrained encoder, None for our own. A model saved as `delta` holds gates and classifier only, and
    needs the base whose name and hash are here. `training_progress` is the t/T at which the weights were saved: it sets
    the temperature of the gates at evaluation. Unknown keys are errors.
    """

    model_type: ClassVar[str] = "budgetformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["loss_parts", "allocations", "attentions", "exits",
                                                         "stage_logits"]  # fmt: skip

    format_version: int = FORMAT_VERSION
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int = 3072
    hidden_act: Literal["relu", "gelu"] = "relu"
    max_position_embeddings: int = 512
    dropout: float | None = None  # None: 0.1, or what the base has
    attention_dropout: float | None = None
    initializer_range: float = 0.02
    scale_embeddings: bool = False
    segment_embeddings: bool = False
    pooling: Literal["mean", "first"] = "mean"
    pad_token_id: int | None = 0

    base: dict[str, Any] | None = None
    base_name: str | None = None
    base_sha256: str | None = None
    base_fresh: list[str] = field(default_factory=list)  # weights that the base lacked
    delta: bool = False

    gates: dict[str, Any] = field(default_factory=dict)
    exits: dict[str, Any] | None = None  # a table of ExitOptions; None: every text goes through all layers
    training_progress: float = 0.0
    # By stage: logits are given out divided by them, so that probabilities are as sure as they are right. None: by 1.
    temperatures: list[float] = field(default_factory=list)
    label_smoothing: float = 0.0
    class_weights: list[float] | None = None
    distill_weight: float = 1.0  # of the distance to a teacher's logits, where they are given
    distill_layers: float = 0.0  # of the distance to the states after its layers; training then runs both models
    distill_temperature: float = 2.0

    def __post_init__(self, **kwargs: Any) -> None:
        known = {f.name for f in fields(self)}
        for key in (key for key in kwargs if _unknown(key)):
            names = {option: f"gates.{option}" for kind in KINDS.values() for option in kind.options()}
            names |= {name: name for name in known}
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {names[near[0]]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UsageError(f"config key {key!r} is not known: {hint}")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        if self.base is None:
            self.dropout = 0.1 if self.dropout is None else self.dropout
            self.attention_dropout = 0.1 if self.attention_dropout is None else self.attention_dropout
        self.gates = complete(self.gates, over_base=self.base is not None)
        self.exits = complete_exits(self.exits, self.num_hidden_layers, self.task)
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
        if self.format_version != FORMAT_VERSION:
            raise UsageError(f"format_version={self.format_version}: leave it out, {FORMAT_VERSION} is what is written")
        if self.initializer_range <= 0:
            raise UsageError(f"initializer_range={self.initializer_range}: give a standard deviation above 0")
        for name in ("dropout", "attention_dropout", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UsageError(f"{name}={value}: give a number in [0, 1)")
        if self.pooling not in ("mean", "first"):
            raise UsageError(f"pooling={self.pooling!r}: give mean or first")
        if self.hidden_act not in ("relu", "gelu"):
            raise UsageError(f"hidden_act={self.hidden_act!r}: give relu or gelu")
        if not 0 <= self.training_progress <= 1:
            raise UsageError(f"training_progress={self.training_progress}: it is t/T, give a number in [0, 1]")
        stages, wrong = len(self.stages.depths), [t for t in self.temperatures if not 0 < t < math.inf]
        if wrong or len(self.temperatures) not in (0, stages):
            raise UsageError(f"temperatures={self.temperatures}: give {stages}, one for each stage, above 0; or none")
        if min(self.distill_weight, self.distill_layers) < 0 or self.distill_temperature <= 0:
            raise UsageError(
                f"distill_weight={self.distill_weight}, distill_layers={self.distill_layers}, distill_temperature="
                f"{self.distill_temperature}: give weights that are not negative and a temperature above 0"
            )
        if self.distill_layers and self.base is None:
            raise UsageError(f"distill_layers={self.distill_layers}: it is for a model with a base (train --base)")
        if self.class_weights is not None and len(self.class_weights) != self.num_labels:
            raise UsageError(f"class_weights has {len(self.class_weights)} values for {self.num_labels} labels")
        if Objective in KINDS[self.kind].parts:
            self.part(Objective).targets(self.num_hidden_layers)
        for name in ("heads", "groups"):
            lists = self.gates.get(name)
            if lists is not None and len(lists) != self.num_hidden_layers:
                raise UsageError(f"gates.{name}={lists}: give a list for each of {self.num_hidden_layers} layers")
        if (size := self.gates.get("group_size")) and self.neurons % size:
            raise UsageError(
                f"gates.group_size={size} with {self.neurons} feed-forward neurons: give a size that divides them, "
                "such as 64"
            )

    @property
    def kind(self) -> str:
        """The kind of the gates, for messages and records; what it can do is in `gate`."""
        return cast("str", self.gates["kind"])

    @property
    def gate(self) -> type[HeadAllocator]:
        """The class of the gates, which declares what they can do."""
        return KINDS[self.kind].gate

    @property
    def neurons(self) -> int:
        """Those of a feed-forward layer; `intermediate_size` counts a gated one as what it costs."""
        return cast("int", (self.base or {}).get("intermediate_size", self.intermediate_size))

    @property
    def groups(self) -> int:
        """The groups of feed-forward neurons in a layer that can be left out; 0: all neurons run."""
        size = self.gates.get("group_size")
        return self.neurons // size if size else 0

    @property
    def frozen_groups(self) -> list[int] | None:
        """How many groups each layer has, where that is settled."""
        lists = self.gates.get("groups")
        return None if lists is None else [len(groups) for groups in lists]

    @property
    def groups_price(self) -> float:
        """What a layer's groups cost of all that budgets can leave out there: as set, or in FLOPs at `price_tokens`."""
        if not self.groups:
            return 0.0
        if (price := self.gates.get("groups_price")) is not None:
            return float(price)
        attention, inner = 2 * self.hidden_size + self.gates.get("price_tokens", 0), self.intermediate_size
        return float(inner / (inner + attention))

    def part(self, options: type[Part]) -> Part:
        """The gates' options of one part of the method, as that part's own dataclass."""
        return part(self.gates, options)

    @property
    def spec(self) -> ModelSpec:
        """What engines and answers need to know, at this moment."""
        gate = {f.name: getattr(self.gate, f.name) for f in fields(GateSpec) if hasattr(self.gate, f.name)}
        gate |= {"kind": self.kind, "pool_padding": self.gates.get("pool_padding", False)}
        changed: dict[str, Any] = {"pad_token_id": self.pad_token_id or 0, "gate": GateSpec(**gate)}
        changed["exits"] = None if self.exits is None else ExitOptions(**self.exits)
        return ModelSpec(**{**{f.name: getattr(self, f.name) for f in fields(ModelSpec)}, **changed})

    @property
    def stages(self) -> Exits:
        """The stages of the model; only the last layer where it has no exits."""
        return self.spec.stages

    @property
    def base_config(self) -> PreTrainedConfig:
        """The pretrained encoder's own config."""
        if not self.base:
            raise UsageError("this config has no base: make it with retrofit() or train --base")
        config: PreTrainedConfig = AutoConfig.for_model(**self.base)
        return config

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
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """What config.json holds. Another format is refused; a key that is not known is left out with a warning."""
        if (version := config_dict.get("format_version")) != FORMAT_VERSION:
            kind = config_dict.get("model_type")
            raise ModelError(
                f"config.json (model_type {kind!r}) has format_version {version!r}, and {FORMAT_VERSION} is read: it "
                "is not a model of this version of budgetformer; train again"
            )
        known = {f.name for f in fields(cls)}
        for key in (foreign := [key for key in config_dict if key not in known and _unknown(key)]):
            warnings.warn(f"config.json has the key {key!r}, which is not known here and is ignored", stacklevel=2)
        return super().from_dict({k: v for k, v in config_dict.items() if k not in foreign}, **kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> BudgetFormerConfig:
        """A named shape (`tiny`, `small`, `recommended` or `paper`) with changes."""
        if name not in _SHAPES:
            raise UsageError(f"preset {name!r} is not known: give one of {', '.join(_SHAPES)}")
        return cls(**{**_SHAPES[name], **overrides})

    @classmethod
    def paper(cls, num_labels: int, **overrides: Any) -> BudgetFormerConfig:
        """The paper's model: 4 layers of 8 heads, width 768, BERT's uncased vocabulary."""
        return cls.preset("paper", num_labels=num_labels, **overrides)

    @classmethod
    def over(cls, base: PreTrainedConfig, **options: Any) -> BudgetFormerConfig:
        """The config over a pretrained encoder; `options` change the gates, the labels and how budgets are trained."""
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
        for key in options.keys() & {*settings, "initializer_range", "scale_embeddings", "pooling"}:
            value = f", {settings[key]!r}" if key in settings else ""
            raise UsageError(f"{key}={options[key]!r}: it is the base's{value}; leave it out")
        if isinstance(gates := options.get("gates"), Mapping) and gates.get("group_size") == "auto":
            options["gates"] = {**gates, "group_size": _group_size(inner)}
        labels = {
            "problem_type": base.problem_type,
            "id2label": dict(base.id2label or {}),
            "label2id": dict(base.label2id or {}),
        }
        return cls(**{**settings, **labels, **options})


def _group_size(neurons: int) -> int:
    """64, or where that does not divide the neurons of a layer into eight groups or more, the next size that does."""
    return max(size for size in range(1, max(1, min(64, neurons // 8)) + 1) if neurons % size == 0)


def _unknown(key: str) -> bool:
    return key not in _FOREIGN_KEYS and not key.startswith("_")


AutoConfig.register(BudgetFormerConfig.model_type, BudgetFormerConfig)

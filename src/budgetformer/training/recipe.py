"""How a model is trained: presets, recipes in TOML, and changes on top. Unknown keys are errors."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from budgetformer.data.locate import DEMO_ENCODER, demo_encoder
from budgetformer.errors import UsageError

_TOGETHER = "the preset base is for --base, and only it"


def _field(default: Any, words: str, holds: Callable[[Any], bool]) -> Any:
    """A field with the rule for its values, and what to say of one that breaks it."""
    return field(default=default, metadata={"words": words, "holds": holds})


def _integer(default: int | None, least: int = 1, *, or_none: bool = False) -> Any:
    words = f"a whole number of at least {least}{', or none' * or_none}"
    return _field(default, words, lambda v: (or_none and v is None) or (type(v) is int and v >= least))


def _above_zero(default: float, *, or_none: bool = False) -> Any:
    words = f"a number above 0{', or none' * or_none}"
    return _field(default, words, lambda v: (or_none and v is None) or (type(v) in (int, float) and v > 0))


def _choice(*allowed: str) -> Any:
    return _field(allowed[0], f"one of {', '.join(allowed)}", allowed.__contains__)


@dataclass(frozen=True)
class Recipe:
    """Everything about training that is not the data. `model` holds changes to BudgetFormerConfig."""

    preset: str = "small"
    epochs: int = _integer(4)
    # Rows of one optimiser step, whatever the processes and accumulation.
    batch_size: int | None = _integer(64, or_none=True)
    token_budget: int | None = _integer(None, or_none=True)  # or: padded tokens of one optimiser step
    accumulate: int = _integer(1)  # pieces that a step's batch is computed in, to save memory
    learning_rate: float = _above_zero(1e-3)
    gate_rate: float = _above_zero(1.0)  # the gates' learning rate as a multiple
    exit_rate: float = _above_zero(1.0)  # the exits' learning rate as a multiple
    schedule: Literal["linear", "constant"] = _choice("linear", "constant")
    warmup: int = _integer(200, least=0)  # steps; at most a tenth of the run
    weight_decay: float = _field(0.01, "a number that is not negative", lambda v: type(v) in (int, float) and v >= 0)
    clip: float | None = _above_zero(1.0, or_none=True)
    precision: Literal["fp32", "bf16", "fp16"] = _choice("fp32", "bf16", "fp16")
    class_weights: Literal["none", "balanced"] = _choice("none", "balanced")
    patience: int | None = _integer(None, or_none=True)  # stop after this many epochs without a better validation score
    keep: Literal["best", "last"] = _choice("best", "last")
    max_length: int = _integer(256, least=8)
    tokenizer: str | None = None  # a name, directory or vocabulary file; none: trained on the training texts
    vocab_size: int = _integer(16000, least=32)  # of the tokenizer that is trained
    fit_temperature: bool = _field(True, "true or false", lambda v: isinstance(v, bool))  # to the validation rows
    checkpoint_minutes: float = _above_zero(5.0)
    base: str | None = None  # a pretrained encoder, by directory or name, that gets head budgets
    dense_epochs: int = _integer(
        2, least=0
    )  # fine-tuning of the base with all heads before budgets; 0: it is fine-tuned
    delta: bool = False  # keep the base's weights as they are; train and save gates and classifier only
    ranking: Literal["importance", "random"] = _choice("importance", "random")  # what orders heads at the beginning
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in fields(self):
            value = getattr(self, rule.name)
            if rule.metadata and not rule.metadata["holds"](value):
                raise UsageError(f"{rule.name}={value!r}: give {rule.metadata['words']}")
        if (self.batch_size is None) == (self.token_budget is None):
            sizes = f"batch_size={self.batch_size} and token_budget={self.token_budget}"
            raise UsageError(f"{sizes}: give one of the two (and 'none' for the other)")
        if (self.base is None) == (self.preset == "base"):
            raise UsageError(f"preset={self.preset!r} with base={self.base!r}: {_TOGETHER}")
        if not isinstance(self.delta, bool) or (self.delta and self.base is None):
            raise UsageError(f"delta={self.delta!r}: it is true or false, and goes with --base")

    @classmethod
    def make(
        cls, preset: str | None = None, file: Path | None = None, changes: Iterable[str] = (), **flags: Any
    ) -> Recipe:
        """A preset, changed by a TOML file, by KEY=VALUE words, and by flags that are not None, in that order."""
        written = _read_toml(file) if file else {}
        base = flags.get("base") or written.get("base")
        named = preset or ("base" if base is not None else written.get("preset", "small"))
        if (base is None) == (named == "base"):
            raise UsageError(f"preset={named!r} with base={base!r}: {_TOGETHER}")
        if named != "base" and named not in PRESETS:
            raise UsageError(f"preset {named!r} is not known: give one of {', '.join(PRESETS)}")
        recipe = PRESETS.get(named, _BASE).changed({k: v for k, v in written.items() if k != "preset"}, str(file))
        for word in changes:
            key, equals, value = word.partition("=")
            if not equals:
                raise UsageError(f"--set {word!r}: write KEY=VALUE, for example epochs=5 or model.gates.min_heads=0")
            nested = _value(value.strip())
            for name in reversed(key.strip().split(".")):  # a.b=1 changes {"a": {"b": 1}}
                nested = {name: nested}
            recipe = recipe.changed(nested, where="--set")
        recipe = recipe.changed({key: value for key, value in flags.items() if value is not None}, where="the flags")
        return replace(recipe, base=str(demo_encoder())) if recipe.base == DEMO_ENCODER else recipe

    def changed(self, changes: Mapping[str, Any], where: str) -> Recipe:
        """This recipe with some keys changed; `model` is merged."""
        check_known(changes, {f.name for f in fields(self)}, f"{where}: key")
        merged = dict(changes)
        if "model" in merged:
            merged["model"] = self._merged_model(merged["model"], where)
        for size, other in (("token_budget", "batch_size"), ("batch_size", "token_budget")):
            if merged.get(size) is not None:
                merged.setdefault(other, None)
        return replace(self, **merged)

    def _merged_model(self, changes: Any, where: str) -> dict[str, Any]:
        if not isinstance(changes, Mapping):
            raise UsageError(f"{where}: model={changes!r} must be a table of model options")
        model = {**self.model, **changes}
        if "gates" in changes:
            from budgetformer.models.gates import merge

            if not isinstance(changes["gates"], Mapping):
                raise UsageError(f"{where}: model.gates={changes['gates']!r} must be a table of the gates' options")
            preset = PRESETS.get(self.preset, _BASE).model.get("gates", {})
            model["gates"] = merge(self.model.get("gates", {}), changes["gates"], preset)
        if changes.get("exits"):
            if not isinstance(changes["exits"], Mapping):
                raise UsageError(f"{where}: model.exits={changes['exits']!r} must be a table of the exits' options")
            model["exits"] = {**(self.model.get("exits") or {}), **changes["exits"]}
        return model

    def with_default_gates(self) -> Recipe:
        """The recipe with the gates that an encoder gets where no kind was asked for: to be called when it is complete.

        A delta, whose base cannot learn to do with less, keeps all units unless gates were asked for.
        """
        gates = self.model.get("gates", {})
        if self.base is None or "kind" in gates:
            return self
        if self.delta and not gates:
            return replace(self, model={**self.model, "gates": {"kind": "all"}})
        return replace(self, model={"distill_layers": 1.0, **self.model, "gates": {**_NARROW, **gates}})

    @property
    def selects_heads(self) -> bool:
        """Whether the model may leave heads out."""
        from budgetformer.models.gates import KINDS

        kind = KINDS.get(self.model.get("gates", {}).get("kind", "learned"))
        return kind is None or kind.gate.selects

    def without_gates(self) -> Recipe:
        """The recipe of the dense model: all heads, all layers, no words."""
        return replace(self, model={**self.model, "gates": {"kind": "all"}, "exits": None})

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain data."""
        return {**asdict(self), "model": dict(self.model)}


# What our own presets do otherwise than the paper, and why, is in docs/training.md.
_OURS = {
    "scale_embeddings": True,
    "gates": {
        "budget_as": "count",
        "rounding": "round",
        "topk_from": 0.25,
        "tau_min": 1.0,
        "beta_max": 0.01,
        "target_budget": 0.375,
    },
    "exits": {"start": 0.25},
}

PRESETS = {
    "tiny": Recipe(
        preset="tiny", epochs=8, batch_size=16, learning_rate=3e-3, gate_rate=0.3, warmup=20, max_length=64,
        vocab_size=2000, model={**_OURS, "exits": {"start": 0.25, "word_bits": 14}},
    ),
    "small": Recipe(gate_rate=0.3, model=_OURS),
    # The paper's gates with a price on s: the cheapest variant that was as good as any (docs/reproduction.md).
    "recommended": Recipe(preset="recommended", model={"scale_embeddings": True, "gates": {"cost_weight": 0.005}}),
    "paper": Recipe(
        preset="paper", epochs=10, batch_size=16, learning_rate=2e-5, schedule="constant", warmup=0, clip=None,
        keep="last", max_length=512, vocab_size=30522, fit_temperature=False,
    ),
}  # fmt: skip

# For a pretrained encoder. The last model is kept, because earlier ones were asked to save less.
_BASE = Recipe(
    preset="base", base="", epochs=2, batch_size=32, learning_rate=5e-5, gate_rate=20.0, exit_rate=20.0, warmup=100,
    max_length=128, keep="last", model={"exits": {"start": 0.0}},
)  # fmt: skip
_NARROW = {"kind": "order", "group_size": "auto", "budget_low": 0.4}  # half of the cost of its layers, for every text


def check_known(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuse the first name that is not known, with the nearest one that is."""
    for name in (name for name in names if name not in known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        raise UsageError(f"{what} {name!r} is not known: {hint}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"recipe {file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"recipe {file} cannot be read: {error}") from None


def _value(text: str) -> Any:
    """A TOML value where it is one; `none` is None; anything else is a string."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

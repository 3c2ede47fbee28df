"""How a model is trained: presets, recipes in TOML, and changes on top. Unknown keys are errors."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from budgetformer.errors import UsageError


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Recipe:
    """Everything about training that is not the data. `model` holds changes to BudgetFormerConfig."""

    preset: str = "small"
    epochs: int = 4
    batch_size: int | None = 64  # rows of one optimiser step, whatever the processes and accumulation
    token_budget: int | None = None  # or: padded tokens of one optimiser step
    accumulate: int = 1  # pieces that a step's batch is computed in, to save memory
    learning_rate: float = 1e-3
    gate_rate: float = 1.0  # the gates' learning rate as a multiple
    schedule: Literal["linear", "constant"] = "linear"
    warmup: int = 200  # steps; at most a tenth of the run
    weight_decay: float = 0.01
    clip: float | None = 1.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    class_weights: Literal["none", "balanced"] = "none"
    patience: int | None = None  # stop after this many epochs without a better validation score
    keep: Literal["best", "last"] = "best"
    max_length: int = 256
    tokenizer: str | None = None  # a name, directory or vocabulary file; none: trained on the training texts
    vocab_size: int = 16000  # of the tokenizer that is trained
    checkpoint_minutes: float = 5.0
    base: str | None = None  # a pretrained encoder, by directory or name, that gets head budgets
    dense_epochs: int = 2  # that the base is fine-tuned for with all heads before budgets come; 0: it is already
    delta: bool = False  # keep the base's weights as they are; train and save gates and classifier only
    ranking: Literal["importance", "random"] = "importance"  # the order of heads that budgets begin with
    model: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("accumulate", 1), ("warmup", 0), ("max_length", 8), ("vocab_size", 32),
                          ("dense_epochs", 0)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UsageError(f"{name}={value!r}: give a whole number of at least {low}")
        if (self.batch_size is None) == (self.token_budget is None):
            raise UsageError(
                f"batch_size={self.batch_size} and token_budget={self.token_budget}: give one of the two "
                "(and 'none' for the other)"
            )
        for name in ("batch_size", "token_budget", "patience"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: give a whole number of at least 1, or none")
        for name in ("learning_rate", "gate_rate", "checkpoint_minutes"):
            if not _is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            raise UsageError(f"weight_decay={self.weight_decay!r}: give a number that is not negative")
        if self.clip is not None and (not _is_number(self.clip) or self.clip <= 0):
            raise UsageError(f"clip={self.clip!r}: give a number above 0, or none for no clipping")
        if (self.base is None) == (self.preset == "base"):
            raise UsageError(
                f"preset={self.preset!r} with base={self.base!r}: the preset base is for --base, and only it"
            )
        if not isinstance(self.delta, bool) or (self.delta and self.base is None):
            raise UsageError(f"delta={self.delta!r}: it is true or false, and goes with --base")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}: give one of {', '.join(known)}")

    @classmethod
    def make(
        cls, preset: str | None = None, file: Path | None = None, changes: Iterable[str] = (), **flags: Any
    ) -> Recipe:
        """A preset, changed by a TOML file, by KEY=VALUE words, and by flags that are not None, in that order."""
        written = _read_toml(file) if file else {}
        name = preset or written.pop("preset", None) or "small"
        written.pop("preset", None)
        base = flags.get("base") or written.get("base")
        if name == "base" or base is not None:
            if base is None or preset not in (None, "base"):
                raise UsageError(f"preset={name!r} with base={base!r}: {_TOGETHER}")
            return cls._finish(_BASE.changed({"base": base}, where="the flags"), written, file, changes, flags)
        if name not in PRESETS:
            raise UsageError(f"preset {name!r} is not known: give one of {', '.join(PRESETS)}")
        return cls._finish(PRESETS[name], written, file, changes, flags)

    @staticmethod
    def _finish(
        recipe: Recipe, written: dict[str, Any], file: Path | None, changes: Iterable[str], flags: dict[str, Any]
    ) -> Recipe:
        recipe = recipe.changed(written, where=str(file))
        for word in changes:
            key, equals, value = word.partition("=")
            if not equals:
                raise UsageError(f"--set {word!r}: write KEY=VALUE, for example epochs=5 or model.min_heads=0")
            recipe = recipe.changed(_nested(key.strip(), _value(value.strip())), where="--set")
        return recipe.changed({key: value for key, value in flags.items() if value is not None}, where="the flags")

    def changed(self, changes: Mapping[str, Any], where: str) -> Recipe:
        """This recipe with some keys changed; `model` is merged."""
        known = {f.name for f in fields(self)}
        for key in changes:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise UsageError(f"{where}: key {key!r} is not known: {hint}")
        merged = dict(changes)
        if "model" in merged:
            if not isinstance(merged["model"], Mapping):
                raise UsageError(f"{where}: model={merged['model']!r} must be a table of model options")
            merged["model"] = {**self.model, **merged["model"]}
        if merged.get("token_budget") is not None and "batch_size" not in merged:
            merged["batch_size"] = None
        if merged.get("batch_size") is not None and "token_budget" not in merged:
            merged["token_budget"] = None
        return replace(self, **merged)

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain data."""
        return {**asdict(self), "model": dict(self.model)}


_TOGETHER = "the preset base is for --base, and only it"
_CHOICES = {
    "schedule": ("linear", "constant"),
    "precision": ("fp32", "bf16", "fp16"),
    "class_weights": ("none", "balanced"),
    "keep": ("best", "last"),
    "ranking": ("importance", "random"),
}

# What our own presets do otherwise than the paper, and why, is in docs/training.md.
_OURS = {
    "scale_embeddings": True,
    "budget_as": "count",
    "rounding": "round",
    "topk_from": 0.25,
    "tau_min": 1.0,
    "beta_max": 0.01,
    "target_budget": 0.375,
}

PRESETS = {
    "tiny": Recipe(
        preset="tiny", epochs=8, batch_size=16, learning_rate=3e-3, gate_rate=0.3, warmup=20, max_length=64,
        vocab_size=2000, model=_OURS,
    ),
    "small": Recipe(gate_rate=0.3, model=_OURS),
    # The paper's gates with a price on s: the cheapest variant that was as good as any (docs/reproduction.md).
    "recommended": Recipe(preset="recommended", model={"scale_embeddings": True, "cost_weight": 0.005}),
    "paper": Recipe(
        preset="paper", epochs=10, batch_size=16, learning_rate=2e-5, schedule="constant", warmup=0, clip=None,
        keep="last", max_length=512, vocab_size=30522,
    ),
}  # fmt: skip

# For a pretrained encoder; the last model is kept, because earlier ones were asked to save less.
_BASE = Recipe(
    preset="base", base="", epochs=2, batch_size=32, learning_rate=5e-5, gate_rate=20.0, warmup=100, max_length=128,
    keep="last",
)  # fmt: skip


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"recipe {file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"recipe {file} cannot be read: {error}") from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    head, dot, rest = key.partition(".")
    return {head: {rest: value}} if dot else {key: value}


def _value(text: str) -> Any:
    """A TOML value where it is one; `none` is None; anything else is a string."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text

"""Kinds of gates: the options that act for each, and how a layer's gate is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from torch import nn

from budgetformer.errors import UsageError
from budgetformer.nn.allocation import (
    AllHeads,
    FixedBudget,
    GatedHeads,
    HeadAllocator,
    LearnedHeads,
    RandomHeads,
    Selection,
    StaticHeads,
)
from budgetformer.nn.exploration import Exploration
from budgetformer.nn.objective import Objective
from budgetformer.nn.ranking import FrozenHeads, OrderedHeads, RankedHeads, RankingOptions, ScoredHeads

if TYPE_CHECKING:
    from budgetformer.models.config import BudgetFormerConfig


@dataclass(frozen=True)
class FixedShare:
    """The s of the kind `fixed`."""

    fixed_budget: float


@dataclass(frozen=True)
class HeadsPerLayer:
    """The heads of each layer that a frozen model has, and its groups of feed-forward neurons (None: all)."""

    heads: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]] | None = None
    group_size: int = 0


class Kind(NamedTuple):
    """A kind of gate: its class, its options, and who takes it: our encoder (`no_base`), pretrained ones (`base`)."""

    gate: type[HeadAllocator]
    parts: tuple[type[Any], ...] = ()  # dataclasses whose fields are the options
    no_base: bool = True
    base: bool = False

    def options(self) -> dict[str, Any]:
        """Every option with its default; MISSING where it must be given."""
        return {f.name: f.default for part in self.parts for f in fields(part)}


_PAPER = (Exploration, Selection, Objective)
KINDS = {
    "learned": Kind(LearnedHeads, _PAPER, base=True),
    "all": Kind(AllHeads, base=True),
    "fixed": Kind(FixedBudget, (FixedShare, *_PAPER)),
    "random": Kind(RandomHeads, _PAPER),
    "static": Kind(StaticHeads, _PAPER),
    "ranked": Kind(RankedHeads, (RankingOptions,), no_base=False, base=True),
    "order": Kind(OrderedHeads, (RankingOptions,), no_base=False, base=True),
    "frozen": Kind(FrozenHeads, (HeadsPerLayer,), no_base=False, base=True),
}
# Over a pretrained encoder the paper's gates begin with all heads, without noise, and go to a target.
_OVER_BASE = {
    "learned": {"min_heads": 0, "rounding": "round", "sigma_max": 0.0, "tau_min": 1.0, "beta_max": 0.0,
                "target_budget": 0.5},
}  # fmt: skip
Part = TypeVar("Part")


def complete(gates: Mapping[str, Any] | None, *, over_base: bool) -> dict[str, Any]:
    """The gates' table with every option of its kind; unknown kinds and options are errors."""
    if not isinstance(gates, Mapping | None):
        raise UsageError(f"gates={gates!r}: give a table such as {{'kind': 'learned'}}")
    changes = dict(gates or {})
    name = changes.pop("kind", "ranked" if over_base else "learned")
    names = [n for n, kind in KINDS.items() if (kind.base if over_base else kind.no_base)]
    if name not in names:
        whose = "a pretrained encoder" if over_base else "a model without a base"
        raise UsageError(f"gates.kind={name!r}: give one of {', '.join(names)} for {whose}{_near(name, names)}")
    known = KINDS[name].options()
    for key in changes.keys() - known.keys():
        others = [n for n in names if key in KINDS[n].options()]
        whose = f" (it is one of the kind{'s' * (len(others) > 1)} {', '.join(others)})" if others else ""
        hint = _near(key, known) or f"; it takes {', '.join(sorted(known)) or 'none'}"
        raise UsageError(f"gates.{key} is not an option of the kind {name!r}{whose}{hint}")
    options = {**known, **(_OVER_BASE.get(name, {}) if over_base else {}), **changes}
    for key in (key for key, value in options.items() if value is MISSING):
        raise UsageError(f"gates of the kind {name!r} need {key}: give gates.{key}")
    for part in KINDS[name].parts:
        for key, hint in get_type_hints(part).items():
            if not _fits(options[key], hint):
                raise UsageError(f"gates.{key}={options[key]!r}: give {_said(hint)}")
        part(**{f.name: options[f.name] for f in fields(part)})
    return {"kind": name, **options}


def merge(gates: Mapping[str, Any], changes: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's gates with changes; with another kind, what the preset says of options that it lacks is dropped."""
    merged = {**gates, **changes}
    if (kind := KINDS.get(merged.get("kind", ""))) is not None:
        known = {"kind", *kind.options()}
        idle = {key for key, value in merged.items() if key not in known and key not in changes}
        merged = {key: value for key, value in merged.items() if key not in idle or value != preset.get(key)}
    return merged


def part(gates: Mapping[str, Any], options: type[Part]) -> Part:
    """The options of one part of the method, as that part's own dataclass."""
    return options(**{f.name: gates[f.name] for f in fields(options)})  # type: ignore[arg-type]


def first_budget(heads: int) -> float:
    """The s that the paper's gates start with over a base: all heads run when it is rounded, with a gradient left."""
    return 1 - 1 / (4 * heads)


def make_groups_gate(config: BudgetFormerConfig, layer: int) -> HeadAllocator | None:
    """A new gate for the groups of a layer's feed-forward neurons; None where they all run."""
    if not config.groups:
        return None
    if config.kind == "frozen":
        return FrozenHeads(config.groups, config.gates["groups"][layer])
    # Not quite where heads of the same place are: no two units of a model begin with the same score.
    place = {"layer": layer - 0.19, "layers": config.num_hidden_layers, "learn": config.gates["learn_order"]}
    if config.kind == "ranked":
        return RankedHeads(config.groups, config.hidden_size, **place)
    return OrderedHeads(config.groups, **place)


def make_gate(config: BudgetFormerConfig, layer: int) -> HeadAllocator:
    """A new gate for the heads of one layer."""
    gates, width, heads = config.gates, config.hidden_size, config.num_attention_heads
    if issubclass(config.gate, ScoredHeads):
        place = {"layer": layer, "layers": config.num_hidden_layers, "renormalize": gates["renormalize"],
                 "learn": gates["learn_order"], "keep": gates["keep_heads"]}  # fmt: skip
    if issubclass(config.gate, GatedHeads):
        paper = part(gates, Exploration), part(gates, Selection)
    match config.kind:
        case "all":
            return AllHeads(heads)
        case "fixed":
            return FixedBudget(width, heads, *paper, gates["fixed_budget"])
        case "random":
            return RandomHeads(width, heads, *paper)
        case "static":
            return StaticHeads(heads, *paper)
        case "ranked":
            return RankedHeads(heads, width, **place)
        case "order":
            return OrderedHeads(heads, **place)
        case "frozen":
            return FrozenHeads(heads, gates["heads"][layer])
    gate = LearnedHeads(width, heads, *paper)
    if config.base is not None:
        start = first_budget(heads)
        last = cast("nn.Linear", gate.budget_net[2])
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, math.log(start / (1 - start)))
        nn.init.zeros_(gate.scorer.weight)
        nn.init.zeros_(gate.scorer.bias)
    return gate


def _near(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; choices are left to the part's own check."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return isinstance(value, str)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(_fits(v, args[0]) for v in value)
    return isinstance(value, int | float if hint is float else hint) and (hint is bool or not isinstance(value, bool))


def _said(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint)).replace("collections.abc.", "").replace(" | ", " or ")

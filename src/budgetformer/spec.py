"""What engines and answers need to know of a model, without torch: a config gives it, an export's manifest holds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from budgetformer.cost.flops import Shape
from budgetformer.dial import Dial
from budgetformer.errors import UsageError
from budgetformer.exits import ExitOptions, Exits


@dataclass(frozen=True)
class GateSpec:
    """What the gates of a model can do; see `HeadAllocator`, which declares it."""

    kind: str  # for messages and records
    selects: bool
    can_dial: bool
    per_input: bool
    ranks_layers: bool
    has_budget_net: bool
    has_scorer: bool
    pool_padding: bool  # padding counts in their mean, so a text must not be padded by its neighbours


@dataclass(frozen=True)
class ModelSpec:
    """Names as in the config. `label_names` are in the order of the outputs."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"strict": False}  # it is read from JSON

    task: str
    label_names: list[str]
    vocab_size: int
    pad_token_id: int
    max_position_embeddings: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    gate: GateSpec
    exits: ExitOptions | None  # None: every text goes through all layers
    temperatures: list[float]  # by stage; none: 1
    groups: int = 0  # of feed-forward neurons in a layer that can be left out
    frozen_groups: list[int] | None = None  # that each layer has, where that is settled

    @property
    def labels(self) -> int:
        """The number of outputs."""
        return len(self.label_names)

    @cached_property
    def stages(self) -> Exits:
        """The stages of the model; only the last layer where it has no exits."""
        options = self.exits or ExitOptions(layers=[], words=False)
        return Exits(options, self.num_hidden_layers, self.task, self.temperatures)

    def exit_limit(self, dial: Dial) -> float:
        """The limit of the exit rule that a budget means; a share of the cost needs exits."""
        if self.exits is None and dial.mode in ("share", "exit"):
            heads = "mean:X" if self.gate.ranks_layers else "max:X" if self.gate.can_dial else "full"
            raise UsageError(
                f"budget {dial}: this model has no exits, so it cannot spend a share of its cost; train it with exits, "
                f"or give {heads}"
            )
        return 0.0 if self.exits is None else self.stages.limit(dial)

    @cached_property
    def shape(self) -> Shape:
        """The sizes that FLOPs depend on."""
        return Shape(
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            width=self.hidden_size,
            inner=self.intermediate_size,
            labels=self.labels,
            budget_net=self.gate.has_budget_net,
            scorer=self.gate.has_scorer,
            groups=self.groups,
            words=self.stages.words,
        )

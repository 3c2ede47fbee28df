"""What results/ID.json holds: one definition to make a result, to write it, and to read it with errors in words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sized
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from budgetformer.errors import BudgetFormerError, DataError

IDS = (
    "main", "fixed", "random", "model-scale", "data-scale", "dynamics", "complexity", "heatmaps", "attention-maps",
    "sizes", "ablation", "controls", "needs",
)  # fmt: skip
Verdict = Literal["holds", "does not hold", "not tested"]
OVER_ROWS = "95 % interval over test rows (not over training runs), seeds averaged"  # what an evidence's intervals are
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_Model = TypeVar("_Model", bound=BaseModel)
_Sized = TypeVar("_Sized", bound=Sized)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> Any:
    if not _is_number(value):
        raise PydanticCustomError("number", "Input should be a finite number")
    return value


def _plain(value: Any) -> Any:
    if not (value is None or isinstance(value, str) or _is_number(value)):
        raise PydanticCustomError("plain", "Input should be text, a finite number, null or an object with a mean")
    return value


Number = Annotated[float, PlainValidator(_number)]
Plain = Annotated[float | str | None, PlainValidator(_plain)]
Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """JSON types as they are, no NaN; keys that a later version adds are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class Measured(_Part):
    """A mean over `n` seeds with its 95 % interval, and the number that the paper prints."""

    mean: Number | None
    n: Count = 0
    low: Number | None = None
    high: Number | None = None
    unit: str = ""
    published: Plain = None


def _kind(value: Any) -> str:
    return "measured" if isinstance(value, dict | Measured) else "plain"


Value = Annotated[Annotated[Measured, Tag("measured")] | Annotated[Plain, Tag("plain")], Discriminator(_kind)]


class Column(_Part):
    key: str
    title: str
    digits: Count | None = None


class Table(_Part):
    """Rows hold a value under each column's key; one that is missing reads as a dash."""

    name: str = ""
    title: str
    note: str
    columns: list[Column]
    rows: list[dict[str, Value]]


class Claim(_Part):
    """A claim of the paper and what became of it. `key` finds its explanation and is not written."""

    claim: str
    verdict: Verdict
    evidence: str
    explanation: str
    key: str = Field("", exclude=True)


class _Figure(_Part):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    kind: str
    title: str


def _sized(values: _Sized, length: int, words: str) -> _Sized:
    if len(values) != length:
        raise PydanticCustomError("size", "Input should be {length} {words}", {"length": length, "words": words})
    return values


class Series(_Part):
    name: str
    x: list[Any]
    y: list[Number | None]
    low: list[Number | None] = []
    high: list[Number | None] = []

    @field_validator("y", "low", "high")
    @classmethod
    def _as_long_as_x(cls, values: list[float | None], info: ValidationInfo) -> list[float | None]:
        return _sized(values, len(info.data.get("x", values)), "numbers, as many as x")


class Lines(_Figure):
    """Lines over x; those of `y2` belong to the axis on the right."""

    kind: Literal["lines"]
    x_title: str
    y_title: str
    series: list[Series]
    y2: list[Series] = []
    y2_title: str = ""
    log_x: bool = False


class Group(_Part):
    """A box: the 5, 25, 50, 75 and 95 % quantiles, null where there are no values."""

    name: str
    n: Count
    mean: Number | None = None
    q: Annotated[list[Number], Field(min_length=5, max_length=5)] | None


class BoxPanel(_Part):
    title: str
    groups: list[Group]


class Boxes(_Figure):
    kind: Literal["boxes"]
    y_title: str
    panels: list[BoxPanel]


class MapPanel(_Part):
    title: str
    rows: list[str]
    columns: list[str]
    values: list[list[Number | None]]

    @field_validator("values")
    @classmethod
    def _one_for_each_place(cls, values: list[list[float | None]], info: ValidationInfo) -> list[list[float | None]]:
        columns = len(info.data.get("columns", ()))
        for row in _sized(values, len(info.data.get("rows", values)), f"rows of {columns} numbers"):
            _sized(row, columns, "numbers in every row")
        return values


class Heatmap(_Figure):
    kind: Literal["heatmap"]
    panels: list[MapPanel]


class AttentionPanel(MapPanel):
    rows: list[str] = Field(alias="query_tokens")
    columns: list[str] = Field(alias="key_tokens")


class Attention(_Figure):
    kind: Literal["attention"]
    panels: list[AttentionPanel]


Figure = Lines | Boxes | Heatmap | Attention


class Provenance(_Part):
    """Where the cells behind a result come from; a key that is missing is not known."""

    commit: Any = None
    version: Any = None
    machine: Any = None
    threads: Any = None
    torch: Any = None
    python: Any = None
    precision: str = "fp32"  # of training
    seeds: list[Number] = []
    data: dict[str, Any] = {}
    cells: Count | None = None
    seconds: Number | None = None


class Result(_Part):
    """What one experiment found."""

    id: Literal[IDS]  # type: ignore[valid-type]
    scale: str
    title: str
    summary: str
    tables: list[Table]
    figures: list[Annotated[Figure, Field(discriminator="kind")]]
    claims: list[Claim]
    provenance: Provenance

    @field_validator("figures")
    @classmethod
    def _names_differ(cls, figures: list[Figure]) -> list[Figure]:
        names = [figure.name for figure in figures]
        if twice := [name for name in names if names.count(name) > 1]:
            raise PydanticCustomError("twice", "Input should have a name of its own for each figure: {name} is there "
                                      "twice", {"name": twice[0]})  # fmt: skip
        return figures

    def to_json(self) -> str:
        data = self.model_dump(exclude_unset=True, by_alias=True)
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def checked(
    kind: type[_Model], data: Any, source: str, remedy: str, error_type: type[BudgetFormerError] = DataError
) -> _Model:
    """The data as a model, or an error that names `source`, the field and what it must be."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors()[0]
        place, shown = _place(fault["loc"], data), repr(fault["input"])
        field = f"field {place}" if place else "the file"
        wants = (
            re.sub(r"^\w+ should", "must", fault["msg"]) + f", not {shown[:57] + '...' if len(shown) > 60 else shown}"
        )
        if fault["type"] == "missing":
            wants = "must be there"
        raise error_type(f"{source}: {field} {wants}: {remedy}") from None


def _place(loc: tuple[int | str, ...], data: Any) -> str:
    """The path of a fault in the data: tables[0].rows[1].dense. The names of a union's branches are left out."""
    path = ""
    for part in loc:
        if isinstance(data, list) and isinstance(part, int):
            path, data = f"{path}[{part}]", data[part]
        elif isinstance(data, dict) and (part in data or part == loc[-1]):
            path, data = f"{path}.{part}", data.get(part)
    return path.removeprefix(".")

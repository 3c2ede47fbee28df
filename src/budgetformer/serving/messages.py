"""What goes in and out: the JSON bodies as OpenAPI shows them, and errors of one form."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from starlette.exceptions import HTTPException

from budgetformer import __version__

# A text that is no string fails by itself, not its neighbours: so it is no matter of the schema's.
_Text = Annotated[Any, WithJsonSchema({"type": "string"})]
_Pair = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2})]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(None, examples=["a film of rare warmth"])
    text_pair: str | None = None
    budget: str | None = Field(None, description="One of /info's budgets; the service's own if not given")

    def items(self) -> list[list[Any]]:
        """The texts as lists of one or two parts, unchecked."""
        return [[self.text] if self.text_pair is None else [self.text, self.text_pair]]


class TextBody(_Body):
    """One text, or two, and the budget."""

    text: str = Field(examples=["a film of rare warmth"])


class HeadBody(TextBody):
    """A text and the head whose attention is asked for; layers and heads are counted from 0."""

    layer: int = Field(ge=0, le=10_000)
    head: int = Field(ge=0, le=10_000)


class PredictBody(_Body):
    """Exactly one of `text` (with `text_pair` for a model of pairs), `texts` and `pairs`."""

    texts: list[_Text] | None = None
    pairs: list[_Pair] | None = None
    top: int | None = Field(None, ge=1, le=1_000_000, description="return only so many of the likeliest labels")
    deadline_ms: float | None = Field(
        None, gt=0, le=3_600_000, allow_inf_nan=False,
        description="after so many milliseconds, answer with the last stage that is finished",
    )  # fmt: skip

    @model_validator(mode="after")
    def _one_field(self) -> Self:
        named = [name for name in ("text", "texts", "pairs") if getattr(self, name) is not None]
        if len(named) != 1 or (self.text_pair is not None and self.text is None):
            raise ValueError("give exactly one of text, texts and pairs, and text_pair with text only")
        if [] in (self.texts, self.pairs):
            raise ValueError(f"{named[0]} is empty: give at least one")
        return self

    def items(self) -> list[list[Any]]:
        """The texts as lists of one or two parts, unchecked."""
        if self.texts is not None:
            return [[text] for text in self.texts]
        if self.pairs is not None:
            return [pair if isinstance(pair, list) and len(pair) == 2 else [None] for pair in self.pairs]
        return super().items()


class ErrorDetail(BaseModel):
    """What is wrong, and what to do about it."""

    code: str = Field(examples=["text_too_long"])
    message: str
    hint: str


class ErrorBody(BaseModel):
    """The body of every answer that is not 200."""

    error: ErrorDetail


class Prediction(BaseModel):
    """The answer for one text.

    `label` is the likeliest; a model of several labels for each text gives `labels`, one of numbers gives `value`.
    `cut` says that the text was longer than the model reads.
    """

    label: str | None = None
    labels: list[str] | None = None
    value: float | None = None
    score: float | None = None
    probabilities: dict[str, float] | None = None
    heads: dict[str, int] = Field(description="attention heads: those computed (used), of all (possible)")
    tokens: int
    cut: bool
    exit: str | None = Field(None, description="of a model with exits: the stage at which the text left")
    deadline: bool | None = Field(None, description="with deadline_ms: whether the deadline cut the text's way short")
    cost: float | None = Field(None, description="its FLOPs, as a share of the dense model's for this text")


class Predictions(BaseModel):
    """One prediction, or one error, for each text in order."""

    predictions: list[Prediction | ErrorBody]
    model: str = Field(description="a hash of the weights, the config and the tokenizer")
    budget: str


class Layer(BaseModel):
    """What one layer decided: the budget s, the k heads that ran, and each head's part in it."""

    s: float
    k: int
    relevance: list[float]
    weights: list[float]
    active: list[bool]
    neurons: float | None = Field(description="the share of feed-forward neurons that ran; null: never left out")


class StageAnswer(BaseModel):
    """A text's answer after one stage, and P(the last one is different); null and {} where it did not run."""

    stage: str
    layers: int
    ran: bool
    label: str | list[str] | float | None
    probabilities: dict[str, float]
    risk: float | None


class Explanation(BaseModel):
    """A prediction with every layer's heads and the FLOPs that they took; docs/json.md has the keys."""

    dial: str
    tokens: list[str]
    joined: list[bool]
    parts: list[int | None]
    cut: bool
    label: str | list[str] | float
    probabilities: dict[str, float]
    exit: str | None = Field(description="the stage at which the text left; null where the model has no exits")
    stages: list[StageAnswer] = Field(description="the answer after each stage; empty where the model has no exits")
    gated: bool
    layers: list[Layer]
    flops: dict[str, int]


class AttentionMap(BaseModel):
    """Where one head looks: row i of `map` is what token i gives to every token."""

    dial: str
    layer: int
    head: int
    tokens: list[str]
    map: list[list[float]]


class Info(BaseModel):
    """What is served, and what it accepts."""

    model: str
    task: str
    labels: list[str]
    pairs: bool = Field(description="whether it reads pairs of texts")
    layers: int
    heads: int
    max_tokens: int
    budget: str
    budgets: list[str] = Field(description="what a request may name; the run's operating points are among them")
    slider: list[str] = Field(description="the budgets that the page offers")
    start: int = Field(description="the place of the service's own budget among them")
    description: str = Field("", description="how the model chooses heads, in words")
    examples: list[dict[str, str | None]] = Field([], description="texts that were stored with the run")
    limits: dict[str, int | float] = {}
    version: str = __version__


class Refusal(HTTPException):
    """An answer that is not 200. (FastAPI passes an HTTPException on, wherever it is raised.)"""

    def __init__(self, status: int, code: str, message: str, hint: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, code, headers)
        self.code = code
        self.body = {"error": {"code": code, "message": message, "hint": hint}}


def busy(code: str, message: str) -> Refusal:
    """A refusal that another attempt may not meet."""
    return Refusal(503, code, message, "try again after the seconds in Retry-After", {"Retry-After": "1"})


def client_closed() -> Refusal:
    """What is counted where a client left; nobody reads it."""
    return Refusal(499, "client_closed", "the client went away", "wait for the answer")


def too_late() -> Refusal:
    """What a text gets whose deadline came before its first answer."""
    hint = "give a longer deadline_ms, or serve a model with a stage of words"
    return Refusal(504, "deadline", "no stage was finished by the deadline", hint)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for OpenAPI."""
    return {status: {"model": ErrorBody} for status in statuses}

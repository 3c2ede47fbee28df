"""What a model does with one text: its answer, the heads that ran, their cost, where a head looks; and the page of it.

The JSON keys are documented in docs/json.md and stable.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from budgetformer.cost.flops import count
from budgetformer.data.tokens import truncating_tokenizer
from budgetformer.errors import UsageError
from budgetformer.evaluate import model_shape
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification, BudgetFormerOutput
from budgetformer.nn.allocation import Allocation, Dial

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    Tokenizer = PreTrainedTokenizerFast
    Model = BudgetFormerForSequenceClassification

Texts = Sequence[tuple[str, str | None]]
MAP_BYTES = 1_500_000  # of all attention maps in one file, after base64
_SLOT = '<script id="data" type="application/json">null</script>'


class Pieces(NamedTuple):
    """A text as the model reads it. `parts` says which of two texts a token is from, None for the special ones."""

    ids: list[int]
    tokens: list[str]  # as written in the text
    joined: list[bool]  # whether a token goes on with the word of the one before
    parts: list[int | None]
    cut: bool


def explain(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    text_pair: str | None = None,
    budget: str | Dial | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """The answer for a text at a position of the dial, with every layer's heads and the FLOPs they took."""
    pieces = read(model, tokenizer, text, text_pair, max_length)
    return _told(pieces, _run(model, pieces, budget), budget, model.config)


def attention(
    model: Model,
    tokenizer: Tokenizer,
    text: str,
    text_pair: str | None,
    layer: int,
    head: int,
    budget: str | Dial | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Where one head looks: row i of `map` is what token i takes from each token. Also for heads that did not run."""
    pieces = read(model, tokenizer, text, text_pair, max_length)
    output = _run(model, pieces, budget, {layer: [head]})
    assert output.attentions is not None
    rows = output.attentions[layer][0, 0].tolist()
    return {
        "dial": str(Dial.parse(budget)),
        "layer": layer,
        "head": head,
        "tokens": pieces.tokens,
        "map": [[round(value, 4) for value in row] for row in rows],
    }


def read(
    model: Model, tokenizer: Tokenizer, text: str, text_pair: str | None = None, max_length: int | None = None
) -> Pieces:
    """Tokenise a text or a pair as training did."""
    for name, given in (("text", text), ("text_pair", text_pair)):
        if given is not None and not given.strip():
            raise UsageError(f"{name} is empty: give at least one word")
        if given is not None and any("\ud800" <= character <= "\udfff" for character in given):
            raise UsageError(f"{name} is not valid Unicode: give it as UTF-8")
    limit = min(max_length or model.config.max_position_embeddings, model.config.max_position_embeddings)
    encoding = _truncating(tokenizer, limit, text_pair is not None).encode(text, text_pair)
    texts, parts, ids = (text, text_pair or ""), encoding.sequence_ids, encoding.ids
    tokens, joined, end = [], [], (None, 0)
    for i, (part, (start, stop)) in enumerate(zip(parts, encoding.offsets, strict=True)):
        known = part is not None and ids[i] != tokenizer.unk_token_id
        tokens.append((known and texts[part][start:stop].strip()) or encoding.tokens[i])
        joined.append(part is not None and (part, start) == end and not texts[part][start : start + 1].isspace())
        end = (part, stop)
    return Pieces(ids, tokens, joined, parts, bool(encoding.overflowing))


@lru_cache(maxsize=4)
def _truncating(tokenizer: Tokenizer, max_length: int, pair: bool) -> Any:
    return truncating_tokenizer(tokenizer, max_length, pair=pair)


def _run(
    model: Model, pieces: Pieces, budget: str | Dial | None, heads: Mapping[int, Sequence[int]] | None = None
) -> BudgetFormerOutput:
    ids = torch.tensor([pieces.ids], device=model.device)
    second = pieces.parts.index(1) if 1 in pieces.parts else len(pieces.ids)
    types = (torch.arange(len(pieces.ids), device=model.device) >= second).long()[None]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(0)  # random heads are the same ones each time a text is looked at
        output: BudgetFormerOutput = model(ids, token_type_ids=types, budget=budget, attention_heads=heads)
    return output


def _told(
    pieces: Pieces, output: BudgetFormerOutput, budget: str | Dial | None, config: BudgetFormerConfig
) -> dict[str, Any]:
    assert output.logits is not None
    assert output.allocations is not None
    layers = [_layer(allocation) for allocation in output.allocations]
    label, probabilities = _answer(output.logits[0].float(), config)
    tokens, gated, shape = len(pieces.ids), config.gate.selects, model_shape(config)
    used = count(shape, tokens, [layer["k"] for layer in layers], "selective" if gated else "dense")
    dense = count(shape, tokens, (), "dense")
    return {
        "dial": str(Dial.parse(budget)),
        "tokens": pieces.tokens,
        "joined": pieces.joined,
        "parts": pieces.parts,
        "cut": pieces.cut,
        "label": label,
        "probabilities": probabilities,
        "gated": gated,
        "layers": layers,
        "flops": {
            "used": int(used.total),
            "dense": int(dense.total),
            "attention_used": int(used.attention + used.gates),
            "attention_dense": int(dense.attention),
        },
    }


def _layer(allocation: Allocation) -> dict[str, Any]:
    active = allocation.active[0]
    weights = active.float() if allocation.weights is None else allocation.weights[0]
    return {
        "s": float(allocation.budget[0]),
        "k": int(active.sum()),
        "relevance": allocation.relevance[0].tolist(),
        "weights": weights.tolist(),
        "active": active.tolist(),
    }


def _answer(logits: Tensor, config: BudgetFormerConfig) -> tuple[Any, dict[str, float]]:
    if config.task == "regression":
        return float(logits[0]), {}
    several = config.task == "multi_label_classification"
    chances = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    named = dict(zip(config.label_names, chances, strict=True))
    return [name for name in named if named[name] > 0.5] if several else max(named, key=named.__getitem__), named


def dials(heads: int) -> list[str]:
    """The positions of the page's slider, from one head a layer to all of them, cheapest first."""
    return [*(f"max:{most / heads}" for most in range(1, heads)), "learned", "full"]


def slider(budget: str | Dial | None, heads: int) -> int:
    """The place of a budget on the slider."""
    dial = Dial.parse(budget)
    if dial.mode == "max" and dial.value is not None:
        return min(max(1, int(dial.value * heads + 1e-6)), heads) - 1
    if dial.mode not in ("learned", "full"):
        raise UsageError(f"budget {str(dial)!r} is not on the page's slider: give learned, full or max:X")
    return heads - (dial.mode == "learned")


def precompute(
    model: Model,
    tokenizer: Tokenizer,
    texts: Texts,
    budget: str | Dial | None = None,
    max_length: int | None = None,
    map_bytes: int = MAP_BYTES,
) -> dict[str, Any]:
    """All that the page can show of some texts, so that it needs no server.

    Every distinct result is kept once, with the maps of all heads; where those are too large, only with the maps of
    the chosen budget, or without any (`maps` says which).
    """
    config = model.config
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    start = slider(budget, heads)
    told: list[tuple[Pieces, dict[str, Any]]] = []
    every = chosen = 0
    for text, text_pair in texts:
        pieces = read(model, tokenizer, text, text_pair, max_length)
        places, results = _distinct(model, pieces)
        told.append((pieces, {"text": text, "text_pair": text_pair, "places": places, "results": results}))
        size = layers * heads * len(pieces.ids) ** 2 * 4 // 3
        every, chosen = every + size * len(results), chosen + size
    kept = "all" if every <= map_bytes else "chosen" if chosen <= map_bytes else "none"
    for pieces, one in told:
        for place, result in enumerate(one["results"]):
            if kept == "all" or (kept == "chosen" and place == one["places"][start]):
                result["maps"] = _maps(model, pieces, result["dial"])
    return {
        "info": {
            "labels": config.label_names,
            "heads": heads,
            "layers": layers,
            "max_tokens": max_length or config.max_position_embeddings,
        },
        "start": start,
        "maps": kept,
        "texts": [one for _, one in told],
    }


def _distinct(model: Model, pieces: Pieces) -> tuple[list[int], list[dict[str, Any]]]:
    """The result for every position of the slider, as its place in a list that holds equal ones once."""
    found: dict[str, int] = {}
    places: list[int] = []
    results: list[dict[str, Any]] = []
    for dial in dials(model.config.num_attention_heads):
        result = _rounded({**_told(pieces, _run(model, pieces, dial), dial, model.config), "dial": dial})
        places.append(found.setdefault(str([layer["active"] for layer in result["layers"]]), len(results)))
        if places[-1] == len(results):
            results.append(result)
    return places, results


def _maps(model: Model, pieces: Pieces, dial: str) -> str:
    """The maps of all heads, layer by layer: a byte for each value, in base64."""
    wanted = {layer: range(model.config.num_attention_heads) for layer in range(model.config.num_hidden_layers)}
    attentions = _run(model, pieces, dial, wanted).attentions
    assert attentions is not None
    maps = torch.stack([attentions[layer][0] for layer in wanted])
    return base64.b64encode((maps * 255).round().byte().cpu().numpy().tobytes()).decode()


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def page(data: Mapping[str, Any] | None = None) -> str:
    """The page: as the service gives it out, or with the data in it."""
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    if data is None:
        return html
    assert _SLOT in html
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return html.replace(_SLOT, _SLOT.replace("null", embedded))

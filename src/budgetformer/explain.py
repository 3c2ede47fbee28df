"""What a model does with one text: its answer, the heads that ran, their cost, where a head looks; and the page of it.

The JSON keys are documented in docs/json.md and stable.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from budgetformer.cost.flops import count
from budgetformer.data.tokens import overflow, truncating_tokenizer
from budgetformer.dial import Dial
from budgetformer.engine.answers import named, rounded
from budgetformer.engine.scores import probabilities_of
from budgetformer.errors import UsageError
from budgetformer.exits import Exits, StageResult
from budgetformer.runs.files import named_read_errors, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from budgetformer.models.model import BudgetFormerForSequenceClassification
    from budgetformer.spec import ModelSpec

MAP_BYTES = 1_500_000  # of all attention maps in one file, after base64
_REMEDY = "delete it, or train the run again"
_SLOT = '<script id="data" type="application/json">null</script>'


class Pieces(NamedTuple):
    """A text as the model reads it. `parts` says which of two texts a token is from, None for the special ones."""

    ids: list[int]
    tokens: list[str]  # as written in the text
    joined: list[bool]  # whether a token goes on with the word of the one before
    parts: list[int | None]
    cut: bool
    rest: list[int]  # ids that were cut from a single text, for the stage of words


class Explainer:
    """A model and its tokenizer, which reads texts as training did; those above `max_length` tokens are cut."""

    def __init__(
        self,
        model: BudgetFormerForSequenceClassification,
        tokenizer: Tokenizer,
        max_length: int | None = None,
    ) -> None:
        self.model, self.config = model, model.config.spec
        positions = self.config.max_position_embeddings
        self.max_length = min(max_length or positions, positions)
        self._tokenizer = truncating_tokenizer(tokenizer, self.max_length)
        unknown = json.loads(tokenizer.to_str())["model"]  # a Unigram model names its place, the others the piece
        self._unknown = unknown.get("unk_id", tokenizer.token_to_id(unknown.get("unk_token") or ""))

    def explain(self, text: str, text_pair: str | None = None, budget: str | Dial | None = None) -> dict[str, Any]:
        """The answer for a text at a position of the dial, with every layer's heads and the FLOPs they took."""
        return self._explain(self.read(text, text_pair), Dial.parse(budget))

    def attention(
        self, text: str, text_pair: str | None, layer: int, head: int, budget: str | Dial | None = None
    ) -> dict[str, Any]:
        """Where one head looks: row i of `map` is what token i takes from each token.

        Whether the head ran or not, and whether the text came so far or had left before.
        """
        pieces, dial = self.read(text, text_pair), Dial.parse(budget)
        rows = self._run(pieces, self._to_the_end(dial), {layer: [head]}).attentions[layer][0, 0].tolist()
        place = {"dial": str(dial), "layer": layer, "head": head, "tokens": pieces.tokens}
        return {**place, "map": [[round(value, 4) for value in row] for row in rows]}

    def read(self, text: str, text_pair: str | None = None) -> Pieces:
        """Tokenise a text or a pair."""
        for name, part in (("text", text), ("text_pair", text_pair)):
            if part is not None and not part.strip():
                raise UsageError(f"{name} is empty: give at least one word")
            if part is not None and any("\ud800" <= character <= "\udfff" for character in part):
                raise UsageError(f"{name} is not valid Unicode: give it as UTF-8")
        encoding: Any = self._tokenizer.encode(text, text_pair)
        texts, parts, ids = (text, text_pair or ""), encoding.sequence_ids, encoding.ids
        tokens, joined, end = [], [], (None, 0)
        for i, (part, (start, stop)) in enumerate(zip(parts, encoding.offsets, strict=True)):
            known = part is not None and ids[i] != self._unknown
            tokens.append((known and texts[part][start:stop].strip()) or encoding.tokens[i])
            joined.append(part is not None and (part, start) == end and not texts[part][start : start + 1].isspace())
            end = (part, stop)
        cut = bool(encoding.overflowing)
        return Pieces(ids, tokens, joined, parts, cut, overflow(encoding) if text_pair is None else [])

    def _run(self, pieces: Pieces, dial: Dial, heads: Mapping[int, Sequence[int]] | None = None, **options: Any) -> Any:
        import torch

        from budgetformer.engine.torch import TorchEngine

        device = self.model.device
        second = pieces.parts.index(1) if 1 in pieces.parts else len(pieces.ids)
        types = (torch.arange(len(pieces.ids), device=device) >= second).long()[None]
        words = None
        if pieces.rest and self.model.stages.words is not None:
            complete = torch.tensor([pieces.ids + pieces.rest], device=device)
            words = self.model.stages.words(complete, None, None)
        with TorchEngine(self.model).session(dial), torch.inference_mode():
            ids = torch.tensor([pieces.ids], device=device)
            options |= {"attention_heads": heads, "words_logits": words}
            return self.model(ids, token_type_ids=types, budget=dial, **options)

    def _to_the_end(self, dial: Dial) -> Dial:
        """The same heads, but the text goes through every layer."""
        return Dial("exit", 0.0) if self.config.exits and dial.mode in ("learned", "share", "exit") else dial

    def _explain(self, pieces: Pieces, dial: Dial) -> dict[str, Any]:
        logits_by_stage: list[NDArray[Any]] = []

        def after(result: StageResult) -> NDArray[np.bool_]:
            logits_by_stage.append(result.logits)
            return result.leaves

        output, config, stages = self._run(pieces, dial, after_stage=after), self.config, self.config.stages
        layers = [
            {
                "s": float(layer.budget[0]),
                "k": int(layer.active.sum()),
                "relevance": layer.relevance[0].tolist(),
                "weights": (layer.active.float() if layer.weights is None else layer.weights)[0].tolist(),
                "active": layer.active[0].tolist(),
                "neurons": None if layer.groups is None else float(layer.groups[0].mean()),
            }
            for layer in output.allocations
        ]
        values = probabilities_of(output.logits.float().cpu().numpy(), config.task)
        shape, tokens, stage = config.shape, len(pieces.ids), -1 if output.exits is None else int(output.exits)
        path: dict[str, Any] = {"layers": stages.depths[stage], "exits": stages.heads[stage]}
        path["execution"] = "selective" if config.gate.selects else "dense"
        path["groups"] = [int(a.groups.sum()) for a in output.allocations if a.groups is not None] or None
        used = count(shape, tokens, [layer["k"] for layer in layers], **path)
        dense = count(replace(shape, words=False), tokens, (), "dense")
        return {
            "dial": str(dial),
            "tokens": pieces.tokens,
            "joined": pieces.joined,
            "parts": pieces.parts,
            "cut": pieces.cut,
            **self._answer(values),
            "exit": stages.names[stage] if config.exits else None,
            "stages": self._stages(logits_by_stage, output.logits.float().cpu().numpy(), stage) if config.exits else [],
            "gated": config.gate.selects,
            "layers": layers,
            "flops": {
                "used": int(used.total),
                "dense": int(dense.total),
                "attention_used": int(used.attention + used.gates),
                "attention_dense": int(dense.attention),
            },
        }

    def _stages(self, before: list[NDArray[Any]], last: NDArray[Any], exit_stage: int) -> list[dict[str, Any]]:
        """The answer after each stage up to the one at which the text left; the others did not run."""
        config, exits, path = self.config, self.config.stages, []
        for stage, name in enumerate(exits.names):
            entry: dict[str, Any] = {"stage": name, "layers": exits.depths[stage], "ran": stage <= exit_stage}
            entry |= {"label": None, "probabilities": {}, "risk": None}
            if stage <= exit_stage:
                logits = last if stage == exit_stage else before[stage] / exits.temperatures[stage]
                entry |= self._answer(probabilities_of(logits, config.task))
                if stage < len(before) and exits.options.rule:
                    entry["risk"] = float(exits.risk(stage, before[stage])[0])
            path.append(entry)
        return path

    def _answer(self, values: NDArray[Any]) -> dict[str, Any]:
        task = self.config.task
        labels = [] if task == "regression" else self.config.label_names
        chances = dict(zip(labels, rounded(values, task)[0].tolist(), strict=False))
        return {"label": named(values, task, labels)[0], "probabilities": chances}

    def precompute(
        self,
        texts: Sequence[tuple[str, str | None]],
        budget: str | Dial | None = None,
        map_bytes: int = MAP_BYTES,
    ) -> dict[str, Any]:
        """All that the page can show of some texts (but for `description`), so that it needs no server.

        Every distinct result is stored once, with the maps of all heads; where those are too large, only with the maps
        of the chosen budget, or without any (`maps` says which).
        """
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        budgets, start = slider(budget, heads, self.config.stages if self.config.exits else None)
        shown: list[tuple[Pieces, dict[str, Any]]] = []
        every = chosen = 0
        for text, text_pair in texts:
            pieces = self.read(text, text_pair)
            distinct: dict[str, tuple[int, dict[str, Any]]] = {}
            places = []
            for each in budgets:
                exact = json.dumps(self._explain(pieces, Dial.parse(each)))
                result = json.loads(exact, parse_float=lambda number: round(float(number), 4))
                ran = [(layer["active"], layer["neurons"]) for layer in result["layers"]]
                key = str([result["exit"], *ran])
                places.append(distinct.setdefault(key, (len(distinct), result))[0])
            results = [result for _, result in distinct.values()]
            shown.append((pieces, {"text": text, "text_pair": text_pair, "places": places, "results": results}))
            size = layers * heads * len(pieces.ids) ** 2 * 4 // 3
            every, chosen = every + size * len(results), chosen + size
        maps = "all" if every <= map_bytes else "chosen" if chosen <= map_bytes else "none"
        for pieces, one in shown:
            for place, result in enumerate(one["results"]):
                if maps == "all" or (maps == "chosen" and place == one["places"][start]):
                    result["maps"] = self._maps(pieces, Dial.parse(result["dial"]))
        info = {"labels": self.config.label_names, "heads": heads, "layers": layers, "max_tokens": self.max_length}
        return {"info": info, "slider": budgets, "start": start, "maps": maps, "texts": [one for _, one in shown]}

    def _maps(self, pieces: Pieces, dial: Dial) -> str:
        """The maps of all heads, layer by layer: a byte for each value, in base64."""
        import torch

        every = {layer: range(self.config.num_attention_heads) for layer in range(self.config.num_hidden_layers)}
        attentions = self._run(pieces, self._to_the_end(dial), every).attentions
        maps = torch.stack([attentions[layer][0] for layer in every])
        return base64.b64encode((maps * 255).round().byte().cpu().numpy().tobytes()).decode()


def describe(config: ModelSpec, folder: Path) -> str:
    """How a run chooses heads: what its gates can do, and what its evaluation saw them do."""
    every = config.num_hidden_layers * config.num_attention_heads
    chooses = "For each text this model chooses the heads that run, and never computes the rest."
    if not config.gate.per_input:
        chooses = "This model runs the same heads for every text, and never computes the rest."
    if not config.gate.selects:
        chooses = f"This model has no gates: all {every} heads run, whatever the text."
    if config.exits:
        chooses = "A text leaves this model as soon as its answer is trusted, and the rest is never computed."
    if not (file := folder / "evaluation.json").exists() or not (config.exits or config.gate.selects):
        return chooses
    results = read_json(file, _REMEDY)
    with named_read_errors(file, _REMEDY):
        result = results["test"] or results["validation"]
        texts = f"its {int(result['rows']):,} {result['split']} texts"
        if config.exits:
            left = zip(result["exits"]["share"], result["exits"]["stages"], strict=True)
            return f"{chooses} Of {texts} {', '.join(f'{share:.0%} left at {stage}' for share, stage in left)}."
        least, most = (int(result["budget"]["heads_per_text"][name]) for name in ("least", "most"))
        mean = float(result["budget"]["k_over_h"]) * every
    if least < most:
        return f"{chooses} For {texts} it ran {least} to {most} of {every} heads, {mean:.3g} on average."
    return f"This model ran {least} of {every} heads for each of {texts}, and never computes the rest."


def stored_examples(folder: Path) -> list[dict[str, str | None]]:
    """Texts of the user's data that were stored with a run; none after `train --no-examples`."""
    if not (file := folder / "examples.json").exists():
        return []
    rows = read_json(file, _REMEDY)["examples"]
    with named_read_errors(file, _REMEDY):
        return [{"text": str(row["text"]), "text_pair": row["text_pair"] and str(row["text_pair"])} for row in rows]


def slider(budget: str | Dial | None, heads: int, stages: Exits | None = None) -> tuple[list[str], int]:
    """The budgets of the page's slider, from one head of each layer to all of them, and the place of `budget`.

    A mean over all layers, as calibrated points are, has a place of its own before the learned budget. Of a model with
    exits the budgets are shares of the cost, and all of them are in the order of their limits.
    """
    if stages is not None:
        chosen, shares = str(Dial.parse(budget)), ["0", "0.1", "0.2", "0.3", "0.5", "0.7"] * bool(stages.options.curve)
        shares = [*dict.fromkeys([*shares, "learned", *[chosen] * (chosen != "full")])]
        shares = [*sorted(shares, key=lambda each: -stages.limit(Dial.parse(each))), "full"]
        return shares, shares.index(chosen)
    dial, budgets = Dial.parse(budget), [*(f"max:{most / heads}" for most in range(1, heads)), "learned", "full"]
    if dial.mode == "mean":
        return [*budgets[:-2], str(dial), *budgets[-2:]], heads - 1
    if dial.mode == "max" and dial.value is not None:
        return budgets, min(max(1, int(dial.value * heads + 1e-6)), heads) - 1
    if dial.mode not in ("learned", "full"):
        raise UsageError(
            f"budget {str(dial)!r} is not on the page's slider: give learned, full, a share, max:X, mean:X or exit:X"
        )
    return budgets, budgets.index(dial.mode)


def page(data: Mapping[str, Any] | None = None) -> str:
    """The page: as the service gives it out, or with the data in it."""
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    if data is None:
        return html
    assert _SLOT in html
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return html.replace(_SLOT, _SLOT.replace("null", embedded))

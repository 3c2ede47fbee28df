"""Texts that leave early: the regrouping fast path against its definition, for our encoder and every architecture."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from budgetformer.engine.scores import leave_early, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import UsageError
from budgetformer.exits import StageResult
from budgetformer.models.config import BudgetFormerConfig
from budgetformer.models.model import BudgetFormerForSequenceClassification, retrofit
from tests.models.tiny import KINDS, VOCAB, ragged, tiny
from tests.test_words import table

RULE = [[0.5, -1.0], [0.2, -1.5], [0.0, -2.0]]
LIMITS = (0.0, 0.05, 0.3, 0.6, 1.0, float("inf"))


def randomise(
    model: BudgetFormerForSequenceClassification, words: bool = True
) -> BudgetFormerForSequenceClassification:
    """Words and exits that say something, and a rule over them."""
    generator = torch.Generator().manual_seed(1)
    stages = model.stages
    if stages.words is not None:
        stages.words.idf.fill_(1.0)
        stages.words.weights.copy_(torch.randn(stages.words.weights.shape, generator=generator))
    for head in stages.heads:
        head.outer.weight.data.copy_(torch.randn(head.outer.weight.shape, generator=generator))
    assert model.config.exits is not None
    model.config.exits["rule"] = RULE[: len(model.config.stages.depths) - 1]
    return model.eval()


def ours(**changes: Any) -> BudgetFormerForSequenceClassification:
    torch.manual_seed(0)
    options: dict[str, Any] = {"layers": [1, 2], "word_bits": 8, **changes.pop("exits", {})}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = BudgetFormerConfig(
        **shape, vocab_size=VOCAB, max_position_embeddings=64, num_labels=3, initializer_range=0.3, exits=options,
        **changes,
    )  # fmt: skip
    return randomise(BudgetFormerForSequenceClassification(config))


def retrofitted(kind: str, **changes: Any) -> BudgetFormerForSequenceClassification:
    exits = {"layers": [1, 2], "word_bits": 8}
    return randomise(retrofit(tiny(kind), exits=exits, gates=changes.get("gates", {"kind": "all"})))


MODELS = {
    "ours": ours,
    "ours, all heads": lambda: ours(gates={"kind": "all"}),
    "no words": lambda: ours(exits={"words": False}),
    "ranked heads": lambda: retrofitted("bert", gates={"kind": "ranked"}),
    **{kind: (lambda kind=kind: retrofitted(kind)) for kind in KINDS},
}


@pytest.fixture(scope="module")
def models() -> dict[str, BudgetFormerForSequenceClassification]:
    return {name: make() for name, make in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_leaving_early_is_running_everything_and_applying_the_rule(
    name: str, models: dict[str, BudgetFormerForSequenceClassification], data: st.DataObject
) -> None:
    model = models[name]
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    ids, mask = ragged(data.draw(st.integers(1, 7)), data.draw(st.integers(3, 30)))
    limit = data.draw(st.sampled_from(LIMITS))
    with torch.inference_mode():
        everything: Any = model(ids, mask, budget="exit:0")
        fast: Any = model(ids, mask, budget=f"exit:{limit}")
    stages = model.config.stages
    exits = stages.leave(everything.stage_logits.numpy(), limit)
    assert fast.exits.tolist() == exits.tolist()
    chosen = everything.stage_logits[torch.arange(len(ids)), torch.from_numpy(exits)]
    assert torch.allclose(fast.logits.float(), chosen, atol=1e-4)
    for layer, (before, after) in enumerate(zip(everything.allocations, fast.allocations, strict=True)):
        ran = torch.from_numpy(np.array(stages.depths)[exits] > layer)
        assert torch.equal(after.active, before.active & ran[:, None])
        assert not after.budget[~ran].any()


@pytest.mark.parametrize("name", MODELS)
def test_the_last_stage_without_corrections_is_the_model_without_exits(
    name: str, models: dict[str, BudgetFormerForSequenceClassification]
) -> None:
    model = copy.deepcopy(models[name])
    for head in model.stages.heads:
        head.outer.weight.data.zero_()
    if model.stages.words is not None:
        model.stages.words.weights.zero_()
    plain = copy.deepcopy(model)
    plain.config.exits, plain.stages = None, type(model.stages)(_without_exits(model.config))
    ids, mask = ragged()
    with torch.inference_mode():
        with_exits: Any = model(ids, mask, budget="exit:0")
        without: Any = plain(ids, mask)
    assert torch.equal(with_exits.logits, without.logits)
    assert without.exits is None
    assert without.stage_logits is None


def _without_exits(config: BudgetFormerConfig) -> BudgetFormerConfig:
    config = copy.deepcopy(config)
    config.exits = None
    return config


def rows(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return table([rng.integers(5, VOCAB, rng.integers(2, 40)).tolist() for _ in range(count)])


@pytest.mark.parametrize("name", ["ours", "no words", "bert"])
@pytest.mark.parametrize("limit", [0.0, 0.3, float("inf")])
def test_whoever_watches_the_stages_sees_every_row_and_may_send_it_out(
    name: str, limit: float, models: dict[str, BudgetFormerForSequenceClassification]
) -> None:
    model, tokens = models[name], rows(30)
    stages, everything = model.config.stages, score(TorchEngine(model), tokens, "exit:0")
    ends = np.random.default_rng(0).integers(0, len(stages.depths), 30)  # the last stage that each row may reach
    seen: dict[tuple[int, int], StageResult] = {}

    def after(result: StageResult) -> NDArray[np.bool_]:
        for place, row in enumerate(result.rows.tolist()):
            assert (result.stage, row) not in seen
            seen[result.stage, row] = result._replace(logits=result.logits[place], heads=result.heads[place])
        return result.leaves | (ends[result.rows] <= result.stage)

    actual = score(TorchEngine(model), tokens, f"exit:{limit}", batch_size=7, after=after)
    by_rule = stages.leave(everything.stage_logits, limit)  # type: ignore[arg-type]
    assert actual.exits.tolist() == np.minimum(by_rule, ends).tolist()  # type: ignore[union-attr]
    last = len(stages.depths) - 1
    assert set(seen) == {(s, row) for row, exit in enumerate(actual.exits) for s in range(min(exit + 1, last))}  # type: ignore[arg-type]
    for (stage, row), result in seen.items():
        assert np.allclose(result.logits, everything.stage_logits[row, stage], atol=1e-4)  # type: ignore[index]
        assert result.heads.tolist() == everything.heads[row, : stages.depths[stage]].tolist()
    chosen = everything.stage_logits[np.arange(30), actual.exits]  # type: ignore[index]
    assert np.allclose(actual.logits, chosen / stages.temperatures[actual.exits, None], atol=1e-4)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_scoring_regroups_at_any_batch_size_and_equals_the_definition(limit: float, batch_size: int | None) -> None:
    model, tokens = ours(), rows(40)
    engine = TorchEngine(model)
    everything = score(engine, tokens, "exit:0")
    expected = leave_early(everything, model.config.stages, limit)
    actual = score(engine, tokens, f"exit:{limit}", batch_size=batch_size)
    assert actual.exits is not None
    assert actual.exits.tolist() == expected.exits.tolist()  # type: ignore[union-attr]
    assert np.allclose(actual.logits, expected.logits, atol=1e-4)
    assert np.array_equal(actual.heads, expected.heads)


def test_a_text_gets_the_same_answer_whatever_batch_it_is_in() -> None:
    model, tokens = ours(), rows(30)
    engine = TorchEngine(model)
    together = score(engine, tokens, "exit:0.3")
    assert together.exits is not None
    assert len(set(together.exits.tolist())) > 2  # some leave at each stage
    for row in range(30):
        alone = score(engine, tokens.select(np.array([row])), "exit:0.3")
        assert alone.exits is not None
        assert alone.exits[0] == together.exits[row]
        assert np.allclose(alone.logits[0], together.logits[row], atol=1e-4)


def test_words_given_beforehand_are_the_words_of_the_batch() -> None:
    model = ours()
    ids, mask = ragged()
    with torch.inference_mode():
        by_model: Any = model(ids, mask, budget="exit:0")
        given: Any = model(ids, mask, budget="exit:0", words_logits=by_model.stage_logits[:, 0])
    assert torch.equal(by_model.logits, given.logits)


def test_pairs_tell_their_texts_apart_in_table_and_batch() -> None:
    model = ours(segment_embeddings=True)
    tokens = table([[5, 6, 7, 5, 9], [6, 7, 8]], [3, 2])
    scores = score(TorchEngine(model), tokens, "exit:0")
    assert model.stages.words is not None
    ids = torch.tensor([[5, 6, 7, 5, 9], [6, 7, 8, 0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]])
    assert scores.stage_logits is not None
    in_batch = model.stages.words(ids, mask.bool(), segments).numpy()
    assert np.array_equal(in_batch, scores.stage_logits[:, 0])


def test_every_stage_learns_and_later_ones_do_not_train_earlier_heads() -> None:
    model = ours()
    ids, mask = ragged()
    labels = torch.tensor([0, 1, 2, 0, 1])
    model.train()
    out: Any = model(ids, mask, labels=labels)
    assert "exits" in out.loss_parts
    out.loss_parts["task"].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.stages.heads.parameters())
    model.zero_grad()
    model(ids, mask, labels=labels).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.stages.heads.parameters())


def test_exits_count_nothing_before_their_start() -> None:
    model = ours(exits={"start": 0.5})
    ids, mask = ragged()
    model.train()
    labels = torch.tensor([0, 1, 2, 0, 1])
    assert float(model(ids, mask, labels=labels, progress=0.4).loss_parts["exits"]) == 0
    assert float(model(ids, mask, labels=labels, progress=0.5).loss_parts["exits"]) > 0


def test_weights_rule_and_words_survive_saving(tmp_path: Any) -> None:
    model = ours()
    model.save_pretrained(tmp_path)
    loaded = BudgetFormerForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, mask = ragged()
    with torch.inference_mode():
        a: Any = model(ids, mask, budget="exit:0.3")
        b: Any = loaded(ids, mask, budget="exit:0.3")
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.exits, b.exits)


def test_budgets_of_depth_need_exits_and_a_rule() -> None:
    plain = BudgetFormerConfig.preset("tiny", vocab_size=50)
    with pytest.raises(UsageError, match=r"budget 0\.3: this model has no exits.*train it with exits, or give max:X"):
        plain.spec.exit_limit(_dial("0.3"))
    fresh = BudgetFormerConfig.preset("tiny", vocab_size=50, exits={})
    with pytest.raises(UsageError, match=r"no exit rule has been fitted to this model; calibrate it, or give full"):
        fresh.spec.exit_limit(_dial("0.3"))


def _dial(text: str) -> Any:
    from budgetformer.dial import Dial

    return Dial.parse(text)


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        ({"layers": [2]}, r"exits\.layers=\[2\]: no text can leave after layer 2; the model has 2 layers"),
        ({"layers": [0]}, r"no text can leave after layer 0"),
        ({"layers": ["1"]}, r"no text can leave after layer 1"),
        ({"layer": [1]}, r"exits\.layer is not known: give one of curve, layers"),
        ({"word_bits": 4}, r"exits\.word_bits=4: give a whole number from 8 to 24"),
        ({"start": 1.0}, r"exits\.start=1\.0"),
        ({"weight": -1.0}, r"exits\.weight=-1\.0"),
    ],
)
def test_exits_that_cannot_be_are_refused(exits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BudgetFormerConfig.preset("tiny", vocab_size=50, exits=exits)

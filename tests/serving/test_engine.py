"""The real scorer behind the routes."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes import command
from tests.serving.small import TEXTS, write_run
from tests.serving.toy import Client, running

from budgetformer.dial import Dial
from budgetformer.errors import ModelError, UsageError
from budgetformer.runs.run import Run
from budgetformer.serving.app import make_app
from budgetformer.serving.service import Engine
from budgetformer.serving.settings import Settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "single")


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "pairs", pairs=True)


def engine_of(run: Path, **options: Any) -> Engine:
    return Engine(Settings(run, **options))


@pytest.mark.parametrize("budget", ["learned", "full", "fixed:0.25"])
def test_the_engine_answers_as_the_scorer_does(run: Path, budget: str) -> None:
    engine, texts = engine_of(run), [*TEXTS, "lake " * 40]
    scores = Run.open(run).scorer(budget).score(texts)
    table, dial = engine.encode([(text, None) for text in texts]), Dial.parse(budget)
    alone = [next(engine.answers(engine.score(row, dial))) for row in table.rows()]
    for answers in (list(engine.answers(engine.score(table, dial))), alone):
        chances = [[answer["probabilities"][label] for label in engine.info.labels] for answer in answers]
        np.testing.assert_allclose(chances, scores.probabilities, atol=1e-5)
        assert [answer["heads"]["used"] for answer in answers] == scores.heads.sum(1).tolist()
        assert [answer["cut"] for answer in answers] == [False, False, False, True]
        assert [answer["tokens"] for answer in answers] == scores.tokens.tolist()


def test_pairs_answer_as_the_scorer_does(pair_run: Path) -> None:
    engine = engine_of(pair_run)
    scores = Run.open(pair_run).scorer().score(TEXTS[:2], TEXTS[1:])
    answers = engine.answers(engine.score(engine.encode(list(itertools.pairwise(TEXTS))), engine.budget))
    chances = [[answer["probabilities"][label] for label in engine.info.labels] for answer in answers]
    np.testing.assert_allclose(chances, scores.probabilities, atol=1e-5)
    engine.self_test()


def test_the_hash_follows_the_weights(run: Path, pair_run: Path) -> None:
    assert engine_of(run).info.model == engine_of(run).info.model != engine_of(pair_run).info.model


def test_the_self_test_finds_weights_that_are_not_numbers(run: Path) -> None:
    engine = engine_of(run)
    engine.self_test()
    with torch.no_grad():
        engine.source.model.base.classifier.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        engine.self_test()


@pytest.mark.parametrize("text", ["random", "override:0.5", "half"])
def test_only_dials_that_repeat_themselves_are_served(run: Path, text: str) -> None:
    with pytest.raises(UsageError, match="learned, full, fixed:X"):
        engine_of(run).dial(text)


def test_operating_points_are_served_by_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "calibration.json").write_text(json.dumps({"points": {"max-drop-0.5": {"dial": "max:0.5"}}}))
    engine = Engine(Settings(folder, budget="max-drop-0.5"))
    assert engine.budget == Dial("max", 0.5) == engine.dial("max-drop-0.5")
    with pytest.raises(UsageError, match=r"one of this run's points: max-drop-0\.5"):
        engine.dial("max-drop-1")

    async def main() -> None:
        async with running(make_app(engine, Settings(folder))) as client:
            assert "max-drop-0.5" in json.loads((await client.send("GET", "/info"))[2])["budgets"]
            status, answer = await client.json("/predict", {"text": TEXTS[0], "budget": "max-drop-0.5"})
            assert (status, answer["budget"]) == (200, "max:0.5")
            status, answer = await client.json("/predict", {"text": TEXTS[0], "budget": "mean:0.5"})
            assert status == 422
            assert "max-drop-0.5" in answer["error"]["hint"]

    asyncio.run(main())


def test_budgets_of_depth_are_served(tiny_staged: Path) -> None:
    engine = engine_of(tiny_staged, budget="exit:inf")
    assert {"share:X", "exit:X"} < set(engine.info.budgets)
    table = engine.encode([("a superb story of town", None)])
    (early,), (late,) = (engine.answers(engine.score(table, engine.dial(budget))) for budget in ("exit:inf", "exit:0"))
    assert (early["heads"]["used"], engine.info.slider[engine.info.start]) == (0, "exit:inf")
    assert late["heads"]["used"] > 0
    engine.self_test()


def test_several_labels_and_numbers(tmp_path: Path) -> None:
    several = engine_of(write_run(tmp_path / "several", problem_type="multi_label_classification"))
    (answer,) = several.answers(several.score(several.encode([(TEXTS[0], None)]), several.budget))
    assert answer["labels"] == [name for name, chance in answer["probabilities"].items() if chance > 0.5]
    assert set(answer["probabilities"]) == {"travel", "film", "money"}
    assert "label" not in answer
    number = engine_of(write_run(tmp_path / "number", problem_type="regression", id2label={0: "LABEL_0"}))
    (answer,) = number.answers(number.score(number.encode([(TEXTS[0], None)]), number.budget))
    assert set(answer) == {"value", "heads", "tokens", "cut"}


def test_the_batch_that_was_chosen_is_the_one_that_runs(tmp_path: Path) -> None:
    """Texts of two lengths, which a plan by length alone would run in two batches."""
    engine = engine_of(write_run(tmp_path / "run", max_length=128))
    sizes: list[int] = []
    engine.source.model.register_forward_pre_hook(
        lambda model, args, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    table = engine.encode([("lake " * 100, None)] * 30 + [("lake " * 110, None)] * 20)
    assert len(list(engine.answers(engine.score(table, engine.budget)))) == 50
    assert sizes == [50]


def test_a_label_at_exactly_one_half_is_not_served(tmp_path: Path) -> None:
    engine = engine_of(write_run(tmp_path / "run", problem_type="multi_label_classification"))
    with torch.no_grad():
        for parameter in engine.source.model.base.classifier.parameters():
            parameter.zero_()
    (answer,) = engine.answers(engine.score(engine.encode([(TEXTS[0], None)]), engine.budget))
    assert set(answer["probabilities"].values()) == {0.5}
    assert answer["labels"] == []


def test_an_export_is_served_but_not_explained(run: Path, tmp_path: Path) -> None:
    assert command("export", run, "-o", tmp_path / "onnx") == 0

    async def main() -> None:
        async with running(make_app(engine_of(tmp_path / "onnx"), Settings(tmp_path / "onnx"))) as client:
            _, answer = await client.json("/predict", {"text": TEXTS[0]})
            assert answer["predictions"][0]["label"] == Run.open(run).predict(TEXTS[:1]).labels[0]
            status, answer = await client.json("/explain", {"text": TEXTS[0]})
            assert (status, answer["error"]["code"]) == (422, "not_explained")
            status, answer = await client.json("/predict", {"text": TEXTS[0], "budget": "full"})
            assert (status, answer["error"]["code"]) == (422, "invalid_budget")
            assert "give one of learned, max:X; X is from 0 to 1" in answer["error"]["hint"]
            assert (await client.json("/predict", {"text": TEXTS[0], "budget": "max:0.25"}))[0] == 200

    asyncio.run(main())


def test_the_page_its_explanations_and_its_maps(run: Path) -> None:
    async def main() -> None:
        async with running(make_app(engine_of(run), Settings(run))) as client:
            await looked_at(client)

    asyncio.run(main())


async def looked_at(client: Client) -> None:
    status, headers, page = await client.send("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<html" in page
    for name in ("default-src 'none'", "connect-src 'self'"):
        assert name in headers["content-security-policy"]
    text = {"text": TEXTS[0], "budget": "max:0.5"}
    (predicted,) = (await client.json("/predict", text))[1]["predictions"]
    status, explanation = await client.json("/explain", text)
    assert (status, explanation["label"], explanation["dial"]) == (200, predicted["label"], "max:0.5")
    assert sum(layer["k"] for layer in explanation["layers"]) == predicted["heads"]["used"]
    status, seen = await client.json("/attention", {**text, "layer": 1, "head": 3})
    assert (status, seen["layer"], seen["head"], len(seen["map"])) == (200, 1, 3, predicted["tokens"])
    for path, body, code in (
        ("/attention", {**text, "layer": 2, "head": 0}, "no_such_head"),
        ("/attention", {**text, "layer": 0, "head": 4}, "no_such_head"),
        ("/attention", {**text, "layer": -1, "head": 0}, "invalid_request"),
        ("/attention", text, "invalid_request"),
        ("/explain", {"text": " "}, "empty_text"),
        ("/explain", {"text": "x" * 20_001}, "text_too_long"),
        ("/explain", {"text": "a", "text_pair": "b"}, "no_pairs"),
        ("/explain", {"text": "a", "budget": "random"}, "invalid_budget"),
    ):
        status, answer = await client.json(path, body)
        assert (status, answer["error"]["code"]) == (422, code)
    schema = json.loads((await client.send("GET", "/openapi.json"))[2])
    assert set(schema["components"]["schemas"]["Explanation"]["required"]) == set(explanation)
    assert set(schema["components"]["schemas"]["AttentionMap"]["required"]) == set(seen)

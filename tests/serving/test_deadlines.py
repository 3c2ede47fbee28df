"""Deadlines and audits: who leaves when time is short, what is answered then, and what idle time is used for."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serving.test_app import play, post
from tests.serving.toy import RUN, Client, ToyEngine, running

from budgetformer.dial import Dial
from budgetformer.exits import StageResult
from budgetformer.runs.run import Run
from budgetformer.serving.app import make_app
from budgetformer.serving.batcher import Row
from budgetformer.serving.deadlines import Pace, Watch
from budgetformer.serving.service import Engine, Service
from budgetformer.serving.settings import Settings

TEXTS = ["a superb story of town", "an awful film", "the music was lovely", "a dull night and a great river of light"]


class Time:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_is_expected_to_take_what_it_took_and_some_more() -> None:
    pace = Pace()
    assert pace.expect(1, 100) == 0  # not seen yet: it is tried
    pace.learn(1, 100, 0.008)
    assert pace.expect(1, 100) == pytest.approx(0.008 + 4 * 0.004)
    assert pace.expect(1, 200) == pytest.approx(2 * 0.024)  # the next power of two
    assert pace.expect(1, 50) == pytest.approx(0.012)
    assert pace.expect(2, 100) == 0
    pace.learn(1, 100, 0.016)  # mean 8 + 8 / 8, deviation 4 + (8 - 4) / 4
    assert pace.expect(1, 100) == pytest.approx(0.009 + 4 * 0.005)
    for _ in range(200):
        pace.learn(1, 100, 0.003)
    assert pace.expect(1, 100) == pytest.approx(0.003, rel=1e-3)


def test_an_estimate_that_keeps_texts_out_fades() -> None:
    clock = Time()
    pace = Pace(clock)
    pace.learn(1, 100, 10.0)
    at_first = pace.expect(1, 100)
    for _ in range(4):  # the more often, the less each time: what counts is how long nothing was learnt
        clock.now += 0.25
        pace.fade(1)
    pace.fade(1)
    assert pace.expect(1, 100) == pytest.approx(at_first / 2)
    clock.now += 1000
    pace.fade(1)  # one text after a quiet time does not forget everything
    assert pace.expect(1, 100) == pytest.approx(at_first / 2**1.25)


def test_an_estimate_fades_while_other_sizes_are_learnt() -> None:
    clock = Time()
    pace = Pace(clock)
    pace.learn(1, 512, 0.2)
    for _ in range(100):
        clock.now += 0.1
        pace.learn(1, 16, 0.001)
        pace.fade(1)
    assert pace.expect(1, 512) < 0.001


def rows_due(*dues: float | None, tokens: int = 10) -> list[Row]:
    async def make() -> list[Row]:
        return [
            Row(number, tokens, Dial(), asyncio.get_running_loop().create_future(), 0.0, due)
            for number, due in enumerate(dues)
        ]

    return asyncio.run(make())


def behind(stage: int, rows: list[int], leaves: tuple[int, ...] = ()) -> StageResult:
    logits = np.array([[10 * stage + row] for row in rows], np.float32)
    mask = np.array([row in leaves for row in rows], bool)
    return StageResult(stage, np.array(rows), logits, np.zeros((len(rows), stage), np.int16), mask)


def test_who_would_be_late_leaves_with_the_answer_so_far_and_the_others_go_on() -> None:
    clock, pace, rows = Time(), Pace(), rows_due(0.02, None, 0.1, 0.015, 0.1)
    pace.learn(1, 50, 0.004)  # so at most 12 ms
    watch = Watch(rows, lambda *answer: answer, pace, clock)
    assert watch(behind(0, [0, 1, 2, 3, 4])).tolist() == [False] * 5
    clock.now = 0.005
    assert watch(behind(1, [0, 1, 2, 3, 4], leaves=(4,))).tolist() == [False, False, False, False, True]
    assert pace.expect(1, 50) == pytest.approx(0.004 + 0.001 / 8 + 4 * (0.002 + (0.001 - 0.002) / 4))
    pace.learn(2, 40, 0.004)
    clock.now = 0.006
    assert watch(behind(1, [0, 1, 2, 3])).tolist() == [False, False, False, True]  # 6 + 12 ms are after 15, not 20
    assert watch.cut.tolist() == [False, False, False, True, False]
    clock.now = 0.03
    assert watch(behind(2, [0, 1, 2])).tolist() == [True, False, False]
    watch.end(3)
    work, stage, logits, heads, cut = rows[3].best()  # type: ignore[misc]
    assert (work, stage, logits.tolist(), len(heads), cut) == (3, 1, [13.0], 1, True)
    assert rows[4].best()[1:3] == (1, [14.0])  # type: ignore[misc]
    assert rows[4].best()[-1] is False  # type: ignore[misc]  # the rule let it go, not the deadline
    assert rows[2].best()[1] == 2  # type: ignore[misc]
    assert rows[1].best is None


def test_a_text_that_has_been_answered_does_not_go_on() -> None:
    rows = rows_due(None, 5.0)
    rows[1].future.cancel()
    watch = Watch(rows, lambda *answer: answer, Pace(), Time())
    assert watch(behind(1, [0, 1])).tolist() == [False, True]
    assert not watch.cut.any()
    assert rows[1].best is None


@pytest.mark.parametrize("deadline", [0, -1, "5", True, 3_600_001])
def test_a_wrong_deadline_is_refused(deadline: Any) -> None:
    status, answer = post({"text": "good", "deadline_ms": deadline})
    assert (status, answer["error"]["code"]) == (422, "invalid_request")
    assert answer["error"]["message"].startswith("deadline_ms: ")
    assert post(b'{"text": "good", "deadline_ms": 1e999}')[1]["error"]["message"].startswith("deadline_ms: ")


def test_without_a_stage_in_time_the_answer_says_so() -> None:
    engine = ToyEngine()

    async def scene(client: Client) -> None:
        held = await client.hold(engine)
        status, answer = await client.json("/predict", {"text": "good it is", "deadline_ms": 1})
        assert (status, answer["error"]["code"]) == (504, "deadline")
        assert "no stage was finished" in answer["error"]["message"]
        status, answer = await client.json("/predict", {"texts": ["good it is", ""], "deadline_ms": 1})
        assert status == 200
        assert [one["error"]["code"] for one in answer["predictions"]] == ["deadline", "empty_text"]
        engine.gate.set()
        assert (await held)[0] == 200
        status, answer = await client.json("/predict", {"text": "good it is", "deadline_ms": 3_600_000})
        assert (status, answer["predictions"][0]["deadline"]) == (200, False)
        assert "deadline" not in (await client.json("/predict", {"text": "good"}))[1]["predictions"][0]

    play(scene, engine)
    assert [3] not in [batch for _, batch in engine.batches[:-2]]  # what was answered is not begun


@pytest.fixture(params=["run", "export"])
def engine(request: pytest.FixtureRequest, tiny_staged: Path, tmp_path: Path) -> Engine:
    if request.param == "export":
        Run.open(tiny_staged).export(tmp_path / "export")
    return Engine(Settings(tiny_staged if request.param == "run" else tmp_path / "export", budget="exit:0"))


def rows_of(engine: Engine, dues: list[float | None]) -> list[Row]:
    rows = rows_due(*dues)
    for row, table in zip(rows, engine.encode([(text, None) for text in TEXTS]).rows(), strict=True):
        row.work, row.tokens = table, len(table.tokens)
    return rows


def test_a_deadline_changes_no_other_answer_of_its_batch(engine: Engine) -> None:
    service = Service(engine, Settings(RUN), clock=Time())
    alone = {stage: list(engine.answers(engine.score(engine.encode([(text, None) for text in TEXTS]),
             Dial("exit", limit)))) for stage, limit in (("layer 2", 0.0), ("words", math.inf))}  # fmt: skip
    answers = service._run(rows_of(engine, [None, -1.0, 5.0, None]), Dial("exit", 0.0))
    for number, stage in enumerate(("layer 2", "words", "layer 2", "layer 2")):
        assert answers[number]["exit"] == stage
        assert answers[number]["probabilities"] == pytest.approx(alone[stage][number]["probabilities"], abs=1e-5)
        assert answers[number]["heads"] == alone[stage][number]["heads"]
    assert [answer.get("deadline") for answer in answers] == [None, True, False, None]


def test_with_words_every_text_has_an_answer(engine: Engine) -> None:
    async def main() -> None:
        async with running(make_app(engine, Settings(RUN, wait_ms=0, audit=0))) as client:
            status, cut = await client.json("/predict", {"texts": [*TEXTS, ""], "deadline_ms": 1e-6})
            *cut, empty = cut["predictions"]
            assert (status, empty["error"]["code"]) == (200, "empty_text")
            assert {(answer["exit"], answer["deadline"], answer["heads"]["used"]) for answer in cut} == {
                ("words", True, 0)
            }
            words = engine.answers(engine.score(engine.encode([(t, None) for t in TEXTS]), Dial("exit", math.inf)))
            assert [answer["label"] for answer in cut] == [answer["label"] for answer in words]
            _, ample = await client.json("/predict", {"texts": TEXTS, "deadline_ms": 3_600_000})
            _, usual = await client.json("/predict", {"texts": TEXTS})
            assert [answer.pop("deadline") for answer in ample["predictions"]] == [False] * 4
            assert ample == usual
            page = (await client.send("GET", "/metrics"))[2].decode()
            assert 'budgetformer_deadline_cut_total{stage="words"} 4.0' in page
            assert "budgetformer_texts_total 12.0" in page

    asyncio.run(main())


@pytest.mark.parametrize("budget", ["exit:inf", "exit:0.1"])
def test_idle_time_runs_early_answers_to_the_end_and_counts_other_answers(tiny_staged: Path, budget: str) -> None:
    settings, run = Settings(tiny_staged, budget=budget, wait_ms=0, audit=1), Run.open(tiny_staged)
    early, full = run.predict(TEXTS * 3, budget=budget), run.predict(TEXTS * 3, budget="exit:0")
    assert early.exits is not None
    audited = {stage: sum(exit == stage for exit in early.exits) for stage in ("words", "layer 1")}
    differ = {stage: sum(exit == stage and a != b for exit, a, b in zip(early.exits, early.labels, full.labels,
              strict=True)) for stage in audited}  # fmt: skip

    async def main() -> None:
        async with running(make_app(Engine(settings), settings)) as client:
            for _ in range(3):
                await client.json("/predict", {"texts": TEXTS})
                await client.json("/predict", {"texts": TEXTS, "budget": "full"})
            for stage, count in audited.items():
                while count and f'budgetformer_audited_total{{stage="{stage}"}} {count}.0' not in (
                    page := (await client.send("GET", "/metrics"))[2].decode()
                ):
                    await asyncio.sleep(0)
                if count:
                    assert f'budgetformer_audit_disagreed_total{{stage="{stage}"}} {differ[stage]}.0' in page
                    assert f'budgetformer_audit_disagreement{{stage="{stage}"}} {differ[stage] / count}' in page

    asyncio.run(main())
    assert sum(audited.values())


def test_audits_take_little_time(tiny_staged: Path) -> None:
    """One that took a second is followed by 5 (1 / audit - 1) seconds without any."""
    settings, now = Settings.make(["audit=0.2"], run=tiny_staged, budget="exit:inf"), [0.0]
    engine = Engine(settings)
    service = Service(engine, settings, clock=lambda: now[0])
    score, done = engine.score, list[float]()

    def slow(*arguments: Any) -> Any:
        done.append(now[0])
        now[0] += 1
        return score(*arguments)

    engine.score = slow  # type: ignore[method-assign, assignment]
    row = engine.encode([("a fine film", None)])
    for second in (0.0, 1.0, 20.5, 21.5, 22.0):
        now[0] = second
        service._audit(row, "words", ["pos"])
    assert done == [0.0, 21.5]


def test_audits_can_be_turned_off(tiny_staged: Path) -> None:
    settings = Settings.make(["audit=0"], run=tiny_staged, budget="exit:inf")
    service = Service(Engine(settings), settings)
    service._encode([(text, None) for text in TEXTS], Dial("exit", math.inf))
    assert not service._batcher._spare
    settings = Settings.make(["audit=1"], run=tiny_staged, budget="exit:inf")
    service = Service(service.engine, settings)
    service._encode([(text, None) for text in TEXTS], Dial("exit", math.inf))
    service._encode([(text, None) for text in TEXTS], Dial("full"))  # not the service's own budget
    assert len(service._batcher._spare) == 4
    for _ in range(30):
        service._encode([(text, None) for text in TEXTS], Dial("exit", math.inf))
    assert len(service._batcher._spare) == 64

"""The service behind the routes: a run that answers, admission, and how work reaches the model and comes back."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse

from budgetformer.calibrate import check_guarantee, named_dial
from budgetformer.data.tokens import TokenTable
from budgetformer.dial import Dial
from budgetformer.engine.answers import DECIMALS, named, ranking, rounded
from budgetformer.engine.scores import Floats, Scores, cost_shares, score
from budgetformer.errors import ModelError, UsageError
from budgetformer.exits import AfterStage
from budgetformer.explain import Explainer, describe, slider, stored_examples
from budgetformer.runs.run import Run
from budgetformer.serving.batcher import Batcher, Encoded, Row
from budgetformer.serving.deadlines import Pace, Watch
from budgetformer.serving.messages import Info, Refusal, busy, client_closed, too_late
from budgetformer.serving.metrics import Metrics
from budgetformer.serving.settings import Settings

T = TypeVar("T")
logger = logging.getLogger("budgetformer.serving")
Text = tuple[str, str | None]
_REST = 5  # after an audit, as a multiple of what it took: the share of the time is a fifth of the share of texts
_WRITING = 0.006  # seconds that are left for an answer to be written, on cores that are busy with other answers


class Engine:
    """A run that is ready to answer."""

    def __init__(self, settings: Settings) -> None:
        self.source = run = Run.open(settings.run)
        self._scorer = scorer = run.scorer(settings.budget, threads=settings.threads)
        self.config = config = scorer.config
        self.points = run.points
        for point in self.points:
            check_guarantee(run.folder, point, scorer.engine.name)
        # The paper's ablations are not served: they do not give the same answer twice, or not for the heads that run.
        depth, mean = bool(config.exits), config.gate.ranks_layers
        budgets = ["learned", "full", *["share:X", "exit:X"] * depth, "fixed:X", "max:X", *["mean:X"] * mean]
        self.check, now = scorer.engine.check, scorer.budget
        tried = {f"{now.mode}:X": f"{now.mode}:{now.value}"}  # of other modes X = 0.5
        self.budgets = [b for b in (*budgets, *run.points) if self._takes(tried.get(b, b.replace(":X", ":0.5")))]
        self.budget, heads = self.dial(str(scorer.budget)), config.num_attention_heads
        shown = None if self.budget.mode == "fixed" else self.budget
        positions, start = slider(shown, heads, config.stages if config.exits else None)
        self.info = Info(
            model=run.digest[:16], task=scorer.task, labels=scorer.labels, pairs=run.pairs, heads=heads,
            layers=config.num_hidden_layers, max_tokens=scorer.max_length, budget=str(self.budget),
            budgets=self.budgets, slider=positions, start=start, description=describe(config, run.folder),
            examples=stored_examples(run.folder),
        )  # fmt: skip

    @property
    def possible(self) -> int:
        """The heads of all layers."""
        return self.info.layers * self.info.heads

    def dial(self, text: str) -> Dial:
        """One of the budgets that the service takes, or an operating point by name."""
        dial = named_dial(text, self.points)
        if dial.mode not in {budget.removesuffix(":X") for budget in self.budgets}:
            raise UsageError(f"budget {text!r} is not for this run's service: give one of {', '.join(self.budgets)}")
        return self.check(dial)

    def _takes(self, text: str) -> bool:
        """Whether the model can be set to a budget; an export has few."""
        with suppress(UsageError):
            return bool(self.check(named_dial(text, self.points)))
        return False

    def encode(self, texts: Sequence[Text]) -> TokenTable:
        """Tokenise texts that are all pairs or all not, with what their words say; long ones are truncated."""
        seconds = [second for _, second in texts if second is not None]
        table = self._scorer.encode([first for first, _ in texts], seconds or None)
        return replace(table, words_logits=self._scorer.engine.words(table))

    def score(self, table: TokenTable, dial: Dial, after: AfterStage | None = None) -> Scores:
        """The model on one batch."""
        options: dict[str, Any] = {"batch_size": len(table), "words": table.words_logits, "after": after}
        return score(self._scorer.engine, table, dial, **options)

    def at_stage(self, table: TokenTable, stage: int, logits: Floats, heads: NDArray[np.int16]) -> Scores:
        """What is known of texts after a stage: its logits (T, C), the heads that ran in the layers so far (T, l)."""
        executed = np.zeros((len(table), self.info.layers), np.int16)
        executed[:, : heads.shape[1]] = heads
        values, exits = logits / self.config.stages.temperatures[stage], np.full(len(table), stage)
        return Scores(table, self.info.task, self.info.heads, values, executed, None, None, exits)

    def answers(self, scores: Scores) -> Iterator[dict[str, Any]]:
        """The answer for each text of a batch, ready for JSON."""
        table, task, labels = scores.table, self.info.task, self.info.labels
        values, chosen = rounded(scores.probabilities, task).tolist(), named(scores.probabilities, task, labels)
        order, used = ranking(scores.probabilities).tolist(), scores.heads.sum(1).tolist()
        config, depth = self.config, {}
        if config.exits:
            depth["exit"] = [config.stages.names[stage] for stage in scores.exits_per_text]
            depth["cost"] = np.round(cost_shares(scores, config).astype(float), DECIMALS).tolist()
        for i, (tokens, cut) in enumerate(zip(table.lengths.tolist(), table.truncated.tolist(), strict=True)):
            answer: dict[str, Any] = {"value": chosen[i]}
            if task != "regression":
                ranked = {labels[label]: values[i][label] for label in order[i]}
                answer = {"label": chosen[i], "score": values[i][order[i][0]], "probabilities": ranked}
            if task == "multi_label_classification":
                answer = {"labels": [label for label in ranked if label in chosen[i]], "probabilities": ranked}
            heads = {"used": used[i], "possible": self.possible}
            yield {**answer, "heads": heads, "tokens": tokens, "cut": cut, **{key: of[i] for key, of in depth.items()}}

    @cached_property
    def explainer(self) -> Explainer:
        """What explains single texts; it runs on the model's thread too."""
        if self.source.exported:
            hint = "serve the run that it was exported from"
            raise Refusal(422, "not_explained", "an exported graph does not show what its heads do", hint)
        return Explainer(self.source.model, self._scorer.tokenizer, self._scorer.max_length)

    def self_test(self) -> None:
        """Run a short and a long text together, and see that the answers can be answers."""
        texts = ("test", "word " * self.info.max_tokens)
        table = self.encode([(text, text if self.info.pairs else None) for text in texts])
        scores = self.score(table, self.budget)
        heads_fit = (scores.heads >= 0).all() and (scores.heads <= self.info.heads).all()
        if not np.isfinite(scores.logits).all() or not heads_fit or table.lengths.max() > self.info.max_tokens:
            raise ModelError("the model's answers are not finite, or it reads too much: train or copy it again")


class Service:
    """One engine behind one batcher. All but the engine's work happens on the event loop's thread."""

    def __init__(self, engine: Engine, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self.settings, self.metrics, self._clock = engine, settings, Metrics(), clock
        self.inside = 0  # texts that were taken in and not yet answered
        self._not_ready: str | None = "the self-test is running"
        self._pace, self._stages = Pace(clock), engine.config.stages
        self._audits = {stage: np.zeros(2) for stage in self._stages.names}  # audited, and with another answer
        self._next_audit = 0.0  # not before
        self._batcher = Batcher(
            self._encode, self._run, batch_tokens=settings.batch_tokens, wait=settings.wait_ms / 1000, late=self._late,
            expect=partial(self._pace.expect, int(self._stages.words)),
            skipped=partial(self._pace.fade, int(self._stages.words)), clock=clock,
        )  # fmt: skip
        self.close = self._batcher.close  # finishes what is waiting

    async def start(self) -> None:
        """Start the model's thread; ready once its self-test has passed."""
        self._batcher.start()
        try:
            await self._batcher.call(self.engine.self_test)
            self._not_ready = None
        except Exception as error:
            self._not_ready = f"the self-test failed ({type(error).__name__})"
            logger.error("%s: %s", self._not_ready, error)

    def check_ready(self) -> None:
        if self._not_ready:
            raise busy("not_ready", self._not_ready)

    def refuse(self, refusal: Refusal) -> JSONResponse:
        """The answer that says no; it is counted."""
        self.metrics.refused.labels(refusal.code).inc()
        return JSONResponse(refusal.body, refusal.status_code, refusal.headers)

    async def predict(
        self, request: Request, texts: Sequence[Text], dial: Dial, deadline_ms: float | None = None
    ) -> list[dict[str, Any]]:
        """The answer for each text: so many ms after the request's beginning, the best that there is."""
        due = None
        if deadline_ms is not None:
            began, seconds = request.state.deadline - self.settings.timeout, deadline_ms / 1000
            due = began + max(seconds / 2, seconds - _WRITING)
        return await self._attend(request, len(texts), lambda: self._batcher.submit(texts, dial, due))

    async def call(self, request: Request, function: Callable[[], T]) -> T:
        """Run a function on the model's thread for one client."""
        return await self._attend(request, 1, lambda: self._batcher.call(function))

    async def _attend(self, request: Request, texts: int, submit: Callable[[], asyncio.Future[T]]) -> T:
        """The work's result, unless time runs out or the client leaves first: then it is dropped, if not begun."""
        if self.inside + texts > self.settings.queue:
            raise busy("queue_full", f"{self.inside} texts are waiting, and {self.settings.queue} may wait")
        self._take_in(texts)
        work, gone = submit(), asyncio.ensure_future(request.receive())
        try:
            left = request.state.deadline - asyncio.get_running_loop().time()
            await asyncio.wait((work, gone), timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise client_closed()
            raise Refusal(
                504, "timeout", f"no answer within {self.settings.timeout:g} s", "send fewer texts, or try again later"
            )
        finally:
            work.cancel()
            gone.cancel()
            self._take_in(-texts)

    def _take_in(self, texts: int) -> None:
        self.inside += texts
        self.metrics.queue.set(self.inside)

    def _encode(self, texts: Sequence[Text], dial: Dial) -> list[Encoded]:
        """On the tokenizer's thread: what the words say is known at once, and may be all that a text needs."""
        table = self.engine.encode(texts)
        rows, words = table.rows(), table.words_logits
        if words is None:
            return [Encoded(row, len(row.tokens)) for row in rows]
        none = np.zeros((len(rows), 0), np.int16)
        early = np.flatnonzero(self._stages.leaves(0, words, self.engine.config.exit_limit(dial)))
        results: dict[int, Any] = {}
        if len(early):
            part = table if len(early) == len(rows) else table.select(early)
            scores = self.engine.at_stage(part, 0, words[early], none[early])
            results = dict(zip(early.tolist(), self.engine.answers(scores), strict=True))
            self._note([rows[i] for i in results], list(results.values()), dial)
        so_far = [partial(self._so_far, row, 0, words[i], none[i], True) for i, row in enumerate(rows)]
        return [Encoded(row, len(row.tokens), so_far[i], results.get(i)) for i, row in enumerate(rows)]

    def _run(self, rows: list[Row], dial: Dial) -> list[dict[str, Any]]:
        """On the model's thread: one batch."""
        watch, tables = Watch(rows, self._so_far, self._pace, self._clock), [row.work for row in rows]
        scores = self.engine.score(TokenTable.join(tables), dial, watch)
        watch.end(len(self._stages.depths) - 1)
        self.metrics.batch.observe(len(rows))
        answers = list(self.engine.answers(scores))
        for row, answer, cut in zip(rows, answers, watch.cut.tolist(), strict=True):
            if row.due is not None:
                answer["deadline"] = cut
        waiting = [not row.future.done() for row in rows]
        self._note([*compress(tables, waiting)], [*compress(answers, waiting)], dial)
        return answers

    def _so_far(self, row: TokenTable, stage: int, logits: Floats, heads: NDArray[np.int16], cut: bool) -> Any:
        """The answer after a stage, for a text whose deadline has come."""
        (answer,) = self.engine.answers(self.engine.at_stage(row, stage, logits[None], heads[None]))
        answer["deadline"] = cut
        self._note([row], [answer])
        return answer

    def _late(self, row: Row) -> Any:
        """What a text gets whose deadline has come: the best that there is."""
        return too_late().body if row.best is None else row.best()

    def _note(self, rows: Sequence[TokenTable], answers: Sequence[dict[str, Any]], dial: Dial | None = None) -> None:
        """Count answers; some of those that left early at the service's own budget are audited in idle time."""
        metrics, last, budget = self.metrics, self._stages.names[-1], self.engine.budget
        metrics.texts.inc(len(answers))
        metrics.tokens.inc(sum(answer["tokens"] for answer in answers))
        metrics.cut.inc(sum(answer["cut"] for answer in answers))
        metrics.used.inc(sum(answer["heads"]["used"] for answer in answers))
        metrics.possible.inc(len(answers) * self.engine.possible)
        for row, answer in zip(rows, answers, strict=True):
            if "exit" in answer:
                metrics.exits.labels(answer["exit"]).inc()
            if answer.get("deadline"):
                metrics.deadline.labels(answer["exit"]).inc()
            elif answer.get("exit", last) != last and dial == budget and random.random() < self.settings.audit:
                self._batcher.when_idle(partial(self._audit, row, answer["exit"], _labels(answer)))

    def _audit(self, row: TokenTable, stage: str, labels: list[str]) -> None:
        """Run a text that left early to the end, and see whether that gives another answer.

        Requests that come meanwhile find the cores busy: where few texts are to be audited, little time is given to it.
        """
        if (began := self._clock()) < self._next_audit:
            return
        (answer,) = self.engine.answers(self.engine.score(row, Dial("exit", 0.0)))
        now = self._clock()
        self._next_audit = now + _REST * (1 / self.settings.audit - 1) * (now - began)
        other, tally = _labels(answer) != labels, self._audits[stage]
        tally += np.array([1, other])
        self.metrics.disagreed.labels(stage).inc(other)
        self.metrics.disagreement.labels(stage).set(tally[1] / tally[0])
        self.metrics.audited.labels(stage).inc()


def _labels(answer: dict[str, Any]) -> list[str]:
    """The label or the labels of an answer, in one order."""
    return [answer["label"]] if "label" in answer else sorted(answer["labels"])

"""Scoring a file of any size in little memory, so that it can be killed at any moment and go on.

One thread reads and tokenises the next window and one writes the last, while the model computes. A window counts once
it is on disk and OUT.progress.json says so.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import budgetformer
from budgetformer.data.examples import BadRows, Example
from budgetformer.data.locate import DataSource, quarantine_file
from budgetformer.data.tokens import TextError
from budgetformer.engine.answers import Columns
from budgetformer.engine.scorer import Scorer
from budgetformer.engine.scores import Scores, flops_per_text
from budgetformer.errors import DataError, UsageError
from budgetformer.predict.input import open_input, parquet_schema, read_shard
from budgetformer.predict.sinks import Sink, format_of, remove_parts
from budgetformer.progress import View
from budgetformer.runs.files import check_identity, read_json, write_json
from budgetformer.runs.run import Run

Windows = Iterator[tuple[list[Example], int]]  # see Input.windows


@dataclass(frozen=True)
class Request:
    """What to score and where to: `output` None is standard output, `shard` i/n is one of n equal parts."""

    source: DataSource
    output: Path | None = None
    split: str | None = None
    top: int = 1
    probabilities: bool = False
    shard: str | None = None
    escape_formulas: bool = False
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Progress:
    """How far a request has come: input rows read, windows written with their bytes, rows written, texts cut.

    Of a model with exits also the texts that left at each stage, their FLOPs, and the dense model's for them.
    """

    read: int = 0
    windows: int = 0
    size: int = 0
    written: int = 0
    cut: int = 0
    exits: Sequence[int] = ()
    flops: float = 0.0
    dense_flops: float = 0.0
    complete: bool = False


@dataclass(frozen=True)
class Summary:
    """What was done: rows in the output, texts cut, bad rows set aside; `rows_now` without what was done before.

    Of a model with exits its stages' names; `exits`, `flops` and `dense_flops` as in Progress.
    """

    rows: int = 0
    cut: int = 0
    bad: int = 0
    rows_now: int = 0
    stages: Sequence[str] = ()
    exits: Sequence[int] = ()
    flops: float = 0.0
    dense_flops: float = 0.0
    seconds: float = 0.0


class Predictor:
    """A run, or an export of one, that is ready to score files."""

    def __init__(self, run: Run, *, budget: str | None = None, long: str = "cut") -> None:
        self.run, self.scorer = run, run.scorer(budget, long)

    def predict(self, request: Request, log: Callable[[str], None]) -> Summary | None:
        """Do what is asked, or the rest of it; None where it is done already. `log` gets lines for the user."""
        output, source = request.output, request.source
        saved = _claim(output, request.resume, request.overwrite)
        if saved is None and request.resume and output is not None and output.exists():
            remove_parts(output.with_name(f"{output.name}.parts"))  # where a kill came between the end and tidying up
            log(f"{output} is finished")
            return None
        answers = Columns(self.scorer.config, self.scorer.labels, top=request.top, probabilities=request.probabilities)
        bad = BadRows(source.bad_rows, quarantine_file(source, output))
        number, of = read_shard(request.shard)
        data = open_input(source, self.run.text_columns, split=request.split, shard=(number, of), bad=bad)
        names = answers.names(data.present)
        changed = [f"{old} as {new}" for old, new in zip(answers.kinds, names, strict=True) if old != new]
        beside = f"; written beside the input's own: {', '.join(changed)}" if changed else ""
        log(data.columns.sentence() + beside)
        digests, counts = zip(*(table.fingerprint() for table in data.tables), strict=True)
        contents = hashlib.sha256("".join(digests).encode()).hexdigest()
        options = self._options(request, data.columns.sentence())
        identity = {"model": self.run.digest, "input": contents, "options": options}
        if saved:
            check_identity(saved["identity"], identity)
        added = dict(zip(names, answers.kinds.values(), strict=True))
        schema = parquet_schema(data.tables) if output and format_of(output) == "parquet" else None
        sink = Sink(output, data.present, added, header=number == 1, schema=schema, escape=request.escape_formulas)
        progress = Progress(**saved["progress"]) if saved else Progress()
        job = _Job(self.scorer, answers, names, sink, output and _state_file(output), identity, progress)
        view, began = View(min(sum(counts), len(data.shard)), progress.read, unit="row"), time.monotonic()
        gc.freeze()  # rows make many small objects: collecting them must not walk all that is imported
        try:
            job.run(data.windows(progress.read), data.columns.text_pair is not None, view)
        finally:
            gc.unfreeze()
            view.close()
        done, seconds = job.progress, time.monotonic() - began
        counts = (done.written, done.cut, bad.bad, done.written - progress.written)
        return Summary(*counts, self.stages, done.exits, done.flops, done.dense_flops, seconds)

    @property
    def stages(self) -> Sequence[str]:
        """The names of the stages at which texts may leave; none of a model without exits."""
        return self.scorer.config.stages.names if self.scorer.config.exits else ()

    def _options(self, request: Request, columns: str) -> dict[str, Any]:
        """All that the output's bytes depend on beside the model and the input."""
        scorer = self.scorer
        return {
            "budget": str(scorer.budget), "long": scorer.long, "columns": columns, "top": request.top,
            "probabilities": request.probabilities, "shard": request.shard, "bad_rows": request.source.bad_rows,
            "encoding": request.source.encoding, "escape_formulas": request.escape_formulas,
            "budgetformer": budgetformer.__version__, "engine": scorer.engine.version,
        }  # fmt: skip


@dataclass
class _Job:
    """One output under way; `state` is the file that holds the progress."""

    scorer: Scorer
    answers: Columns
    names: list[str]
    sink: Sink
    state: Path | None
    identity: dict[str, Any]
    progress: Progress

    def run(self, windows: Windows, pairs: bool, view: View) -> None:
        self.sink.open(self.progress.windows, self.progress.size)
        if not self.progress.complete:
            self._save()
            self._stream(windows, pairs, view)
            self.progress = replace(self.progress, complete=True)
            self._save()
        self.sink.finish()
        if self.state:
            self.state.unlink(missing_ok=True)
            remove_parts(self.sink.folder)

    def _stream(self, windows: Windows, pairs: bool, view: View) -> None:
        before, began = self.progress.written, time.monotonic()
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            coming = reader.submit(next, windows, None)
            writing: Future[None] | None = None
            while (window := coming.result()) is not None:
                rows, _ = window
                with _placed(rows):  # on all cores; beside the model it would slow that more
                    seconds = [e.text_pair or "" for e in rows] if pairs else None
                    table = self.scorer.encode([e.text for e in rows], seconds)
                coming = reader.submit(next, windows, None)
                scores = self.scorer.run(table)
                if writing:
                    writing.result()
                    rate = (self.progress.written - before) / (time.monotonic() - began)
                    view.step(self.progress.read, {"rows/s": round(rate)})
                writing = writer.submit(self._commit, *window, scores)
            if writing:
                writing.result()

    def _commit(self, window: list[Example], end: int, scores: Scores) -> None:
        added, rows = set(self.names), []
        with _placed(window):
            for number, (example, values) in enumerate(zip(window, self.answers.rows(scores), strict=True)):
                if not added.isdisjoint(example.fields):
                    name = min(added & example.fields.keys())
                    raise TextError(number, f"the field {name!r} is one that predict adds: rename it in the input")
                rows.append({**example.fields, **dict(zip(self.names, values, strict=True))})
            size = self.sink.write(rows)
        done, cut = self.progress, int(scores.table.truncated.sum())
        self.progress = replace(
            done, read=end, windows=done.windows + 1, size=done.size + size, written=done.written + len(rows),
            cut=done.cut + cut, **self._path(scores),
        )  # fmt: skip
        self._save()

    def _path(self, scores: Scores) -> dict[str, Any]:
        """How far texts have gone, these included, and what that cost; nothing of a model without exits."""
        config, done = self.scorer.config, self.progress
        if not config.exits:
            return {}
        counts = np.bincount(scores.exits_per_text, minlength=len(config.stages.names))
        used, dense = (float(part.sum()) for part in flops_per_text(scores, config))
        exits = (counts + (done.exits or 0)).tolist()
        return {"exits": exits, "flops": done.flops + used, "dense_flops": done.dense_flops + dense}

    def _save(self) -> None:
        if self.state:
            write_json(self.state, {"identity": self.identity, "progress": asdict(self.progress)})


@contextmanager
def _placed(rows: list[Example]) -> Iterator[None]:
    """Errors about rows say where in the file those are."""
    try:
        yield
    except TextError as error:
        row = rows[error.row]
        raise DataError(f"{row.file}, line {row.line}: {error.reason}") from None
    except DataError as error:
        raise DataError(f"{rows[0].file}, lines {rows[0].line} to {rows[-1].line}: {error}") from None


def _state_file(output: Path) -> Path:
    return output.with_name(output.name + ".progress.json")


def _claim(output: Path | None, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Whether the output may be written; what an unfinished run saved, if it is to go on."""
    if output is None:
        if resume or overwrite:
            raise UsageError("--resume and --overwrite need an output: give one with -o")
        return None
    if resume and overwrite:
        raise UsageError("--resume goes on with an output and --overwrite begins it again: give one of them")
    format_of(output)
    state = _state_file(output)
    if output.is_dir():
        raise UsageError(f"-o {output} is a directory: give a file")
    if state.exists() and resume:
        saved: dict[str, Any] = read_json(state, f"delete it and {output} and begin again")
        return saved
    if state.exists() and not overwrite:
        raise UsageError(f"{output} is unfinished: go on with --resume, or begin again with --overwrite")
    if output.exists() and not (resume or overwrite):
        raise UsageError(f"{output} exists: give another -o, or replace it with --overwrite")
    state.unlink(missing_ok=True)  # before anything that it speaks of is touched
    return None

"""A run directory, opened: what was trained on what, and everything that answers with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from budgetformer.calibrate import (
    CALIBRATION,
    calibrate,
    check_guarantee,
    named_dial,
    operating_points,
    write_calibration,
)
from budgetformer.data.dataset import stream_examples
from budgetformer.data.examples import Example
from budgetformer.data.locate import DataSource
from budgetformer.data.splits import sample_rows
from budgetformer.data.tokenizer import tokenizer_files
from budgetformer.data.tokens import TextEncoder, TokenTable, encode_split
from budgetformer.dial import Dial
from budgetformer.engine.answers import named, rounded
from budgetformer.engine.graphs import GraphEngine
from budgetformer.engine.scorer import Scorer
from budgetformer.engine.scores import Engine, Scores, cost_shares, score
from budgetformer.errors import DataError, ModelError, UsageError
from budgetformer.evaluate import summarize, versus_twin, with_texts
from budgetformer.runs.files import COPY_AGAIN, hash_files, named_read_errors, read_json, recover_directory
from budgetformer.runs.record import read_record
from budgetformer.runs.rows import TRAINING_ROWS, HeldOut, RunRows
from budgetformer.spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from budgetformer.export.verify import CheckRows
    from budgetformer.models.model import BudgetFormerForSequenceClassification

_HARDEST = 12
_CHECK_ROWS = 512  # that an export is compared on


@dataclass(frozen=True, eq=False)
class Predictions:
    """Answers for texts, in their order."""

    labels: list[Any]  # a label each; for multi-label a list of labels each, for regression a number
    probabilities: NDArray[np.float64] | None  # (T, C), in the order of the run's labels; None for regression
    heads: NDArray[np.float32]  # (T,) executed attention heads, as a share of all
    truncated: NDArray[np.bool_]  # (T,) whether the text was longer than the model reads
    exits: list[str] | None  # the stage at which each text left; None for a model without exits
    cost: NDArray[np.float32]  # (T,) FLOPs, as a share of the dense model's for the same text


class Run:
    """A finished run of `budgetformer train`, or what `budgetformer export` made of one."""

    def __init__(self, folder: Path, record: dict[str, Any], *, exported: bool = False) -> None:
        self.folder, self.record, self.exported = folder, record, exported
        self.task: str = record["task"]
        self.labels: list[str] = record["labels"]
        self.max_length: int = record["max_length"]
        self.text_columns: list[str] = record.get("text_columns") or []

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a directory; a missing, unfinished or foreign one is refused with the remedy."""
        folder = Path(folder)
        if not folder.is_dir():
            with suppress(OSError):
                recover_directory(folder)  # of an export that was killed while it replaced this one
        if not folder.is_dir():
            raise ModelError(f"{folder} does not exist: give the directory of a run")
        if not (exported := (folder / "export.json").exists()) and find_spec("torch") is None:
            raise ModelError(f"{folder} is run by torch, which is not installed: install budgetformer with its "
                             "dependencies, or give an export")  # fmt: skip
        return cls(folder, read_record(folder), exported=exported)

    @property
    def pairs(self) -> bool:
        """Whether it reads pairs of texts."""
        return bool(self.record["pairs"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, by the library tokenizers alone."""
        from tokenizers import Tokenizer

        file = self.folder / "tokenizer.json"
        with named_read_errors(file, COPY_AGAIN):
            tokenizer: Tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
            if (last := max(tokenizer.get_vocab().values())) >= (size := self.config.vocab_size):
                raise ModelError(f"{file} has the id {last}, and the model {size} pieces: {COPY_AGAIN}")
            tokenizer.encode("a word \N{SNOWMAN}", "and another")  # what is wrong with its other parts shows here
            return tokenizer

    @cached_property
    def model(self) -> BudgetFormerForSequenceClassification:
        """The torch model, for evaluation, on the CPU."""
        from budgetformer.engine.torch import TorchEngine
        from budgetformer.models.model import BudgetFormerForSequenceClassification

        with named_read_errors(self.folder, COPY_AGAIN):
            model = BudgetFormerForSequenceClassification.from_pretrained(self.folder, offline=True)
            model.train(False)
            self._try(TorchEngine(model))
            return model

    def _try(self, engine: Engine) -> None:
        """Run it once, so that whatever is wrong with the values in its files shows where they are named."""
        score(engine, TokenTable.random(self.config.vocab_size, self.max_length, self.pairs, 1), self.budget(None))

    @cached_property
    def config(self) -> ModelSpec:
        """What engines and answers need to know, for the labels, the task and the length that the record names."""
        file, outputs = self.folder / ("export.json" if self.exported else "config.json"), len(self.labels) or 1
        with named_read_errors(file, COPY_AGAIN):
            if self.exported:
                config = TypeAdapter(ModelSpec).validate_python(self.record["model"])
            else:
                from budgetformer.models.config import BudgetFormerConfig

                if (number := read_json(file, COPY_AGAIN).get("num_labels", outputs)) != outputs:
                    raise ModelError(f"{file} has num_labels {number!r:.60}, not {outputs}: {COPY_AGAIN}")
                config = BudgetFormerConfig.from_pretrained(self.folder).spec
        labels = [] if config.task == "regression" else config.label_names
        most = min(self.max_length, config.max_position_embeddings)
        for key, value in {"task": config.task, "labels": labels, "max_length": most}.items():
            if value != self.record[key]:
                raise ModelError(f"{self.folder}: {key} is {self.record[key]!r:.80} in the record and {value!r:.80} in "
                                 f"{file.name}: {COPY_AGAIN}")  # fmt: skip
        return config

    @cached_property
    def points(self) -> dict[str, str]:
        """The operating points that `calibrate` named, as budgets."""
        return operating_points(self.folder)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of the files that answers come from."""
        hashes = self.record.get("sha256") or hash_files(self.folder)
        return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()

    @cached_property
    def baseline(self) -> Run | None:
        """The dense twin, where it was trained."""
        folder = self.folder / "baseline"
        if (file := folder / "run.json").exists() and read_json(file, COPY_AGAIN).get("status") != "done":
            return None  # its training has not come to an end
        return Run.open(folder) if folder.exists() else None

    def budget(self, text: str | float | Dial | None) -> Dial:
        """A budget as it is written, or the name of an operating point; None: as learned, or as exported."""
        if text is None and self.exported:
            point = self.record.get("point")
            text = str(point if point in self.points else self.record["dial"])
        return text if isinstance(text, Dial) else named_dial(text, self.points)

    def engine(self, device: str | None = None, threads: int | None = None) -> Engine:
        """What runs the model: ONNX Runtime or OpenVINO for an export, else torch (default: on a GPU if there is one).

        `threads` are those of this process; None: OMP_NUM_THREADS, or what the library chooses.
        """
        if self.exported:
            with named_read_errors(self.folder, COPY_AGAIN):
                chosen = os.environ.get("OMP_NUM_THREADS", "")
                threads = threads or (int(chosen) if chosen.isdecimal() else None)
                engine = GraphEngine.load(self.folder, self.config, self.record, threads)
                self._try(engine)
                return engine
        import torch

        from budgetformer.engine.torch import TorchEngine

        if threads:
            torch.set_num_threads(threads)
        place: Any = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return TorchEngine(self.model.to(place))

    def scorer(self, budget: str | Dial | None = None, long: str = "cut", threads: int | None = None) -> Scorer:
        """Texts -> scores at a budget."""
        engine = self.engine(threads=threads)
        dial = self._budget_with(engine, budget)
        return Scorer(engine, self.tokenizer, self.max_length, budget=dial, long=long)

    def _budget_with(self, engine: Engine, text: str | float | Dial | None) -> Dial:
        """A budget that an engine can be set to; a guarantee that was made with another one gets a warning."""
        dial, point = engine.check(self.budget(text)), self.record.get("point") if text is None else text
        if isinstance(point, str) and point in self.points:
            check_guarantee(self.folder, point, engine.name)
        return dial

    @cached_property
    def _scorer(self) -> Scorer:
        return self.scorer()

    def predict(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, budget: str | float | Dial | None = None
    ) -> Predictions:
        """Classify texts, each with its second text in `pairs` where the model reads pairs."""
        if isinstance(texts, str):
            raise UsageError("texts is one string: give a list of texts, such as [text]")
        self.check_pairs(pairs is not None)
        scorer = self._scorer
        scores = scorer.run(scorer.encode(texts, pairs), self._budget_with(scorer.engine, budget))
        probabilities = scores.probabilities
        return Predictions(
            labels=named(probabilities, self.task, self.labels),
            probabilities=None if self.task == "regression" else rounded(probabilities, self.task),
            heads=scores.head_share,
            truncated=scores.table.truncated,
            exits=[self.config.stages.names[stage] for stage in scores.exits_per_text] if self.config.exits else None,
            cost=cost_shares(scores, self.config),
        )

    def check_pairs(self, pairs: bool, flag: str = "pairs") -> None:
        """Refuse one text where the run reads two, and two where it reads one."""
        if self.pairs and not pairs:
            raise UsageError(f"the run was trained on pairs of texts: give the second one with {flag}")
        if pairs and not self.pairs:
            raise UsageError(f"the run was trained on single texts: leave {flag} out")

    @cached_property
    def rows(self) -> RunRows:
        """Which rows it was trained on, and which not."""
        return RunRows(self.folder, self.record, exit_rule=bool(self.config.exits))

    def held_out(
        self, source: DataSource | str | None = None, split: str | None = None, *, prefer: str = "test"
    ) -> HeldOut:
        """Labelled rows that the run was not trained on (see RunRows)."""
        return self.rows.held_out(source, split, prefer=prefer)

    def encode(self, rows: HeldOut) -> TokenTable:
        """Held-out rows in token ids."""
        return encode_split(rows.rows, rows.data, self.tokenizer, self.max_length)

    def evaluate(
        self,
        data: DataSource | str | None = None,
        *,
        split: str | None = None,
        budgets: Sequence[str | Dial | None] = (None,),
        limit: int | None = None,
    ) -> dict[str, Any]:
        """Quality, heads and cost on held-out rows at each budget, beside the dense twin if there is one."""
        engine = self.engine()
        dials = [self._budget_with(engine, budget) for budget in budgets]
        rows = self.held_out(data, split).sample(limit)
        table = self.encode(rows)
        scores = [score(engine, table, dial) for dial in dials]
        evaluations = [
            summarize(s, engine.config, split=rows.split, dial=str(dial), hardest=0 if number else _HARDEST)
            for number, (s, dial) in enumerate(zip(scores, dials, strict=True))
        ]
        evaluations[0] = with_texts(evaluations[0], rows.rows)
        result: dict[str, Any] = {"evaluations": [asdict(e) for e in evaluations], "notes": rows.notes}
        return {**result, "columns": rows.data.columns_chosen, **self._versus_twin(scores[0], table, rows.split)}

    def _versus_twin(self, ours: Scores, table: TokenTable, split: str) -> dict[str, Any]:
        if self.baseline is None:
            return {"baseline": None, "versus_baseline": None}
        engine = self.baseline.engine()
        theirs = score(engine, table)
        return {
            "baseline": asdict(summarize(theirs, engine.config, split=split, dial="learned")),
            "versus_baseline": versus_twin(ours, theirs, self.record["recipe"]),
        }

    def calibrate(
        self,
        data: DataSource | str | None = None,
        *,
        split: str | None = None,
        limit: int | None = None,
        **targets: Any,
    ) -> dict[str, Any]:
        """Sweep the budget over held-out rows; the points are stored in the run, as names for budgets.

        Targets are those of `calibrate.calibrate`: max_disagreement, max_drop, max_cost, target_ms, confidence.
        """
        try:
            rows = self.rows.held_out(data, split, prefer="validation", unseen=True).sample(limit)
            table, name, notes, columns = self.encode(rows), rows.split, rows.notes, rows.data.columns_chosen
            place = rows.data.source.data
        except DataError as error:
            if data is None:
                raise
            source = DataSource(data) if isinstance(data, str) else data
            examples, notes = self.rows.unlabelled(source)
            table, name, columns = self._unlabelled(examples), "unlabelled", f"read without labels ({error})"
            table, place = table if limit is None else table.select(sample_rows(len(table), limit)), source.data
        result = {"data": place, **calibrate(self.engine(), table, split=name, **targets)}
        write_calibration(self.folder, result)
        self.__dict__.pop("points", None)
        return {**result, "notes": notes, "columns": columns}

    def export(
        self,
        target: str | Path,
        *,
        format: str = "onnx",
        budget: str | float | Dial | None = None,
        int8: bool | str = False,
        rows: str | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Any]:
        """Write graphs that are checked against the model, on `rows` or on the run's held-out rows.

        Format "onnx" is for ONNX Runtime, "openvino" for OpenVINO.
        `int8` is static (scales from held-out rows; True where that can be), dynamic (scales by batch) or False.
        With format "torch": a static model with the best heads (and feed-forward groups); `budget`: their cost (0.5).
        """
        files = tokenizer_files(self.folder)
        if format == "torch":
            from budgetformer.export.frozen import export_frozen

            if int8 or rows is not None:
                raise UsageError("--int8 and --rows are for --format onnx and openvino: leave them out")
            share = 0.5 if budget is None else self._share(budget)
            return export_frozen(self.model, files, self.record, Path(target), run=self.folder, budget=share)
        import torch

        from budgetformer.export.run import FORMATS, check_target, choose_scales, export_model, narrowed

        if format not in FORMATS:
            raise UsageError(f"--format {format!r}: give {', '.join(FORMATS)} or torch")
        dial = self.budget(budget)
        model = narrowed(self.model, dial)
        check_target(model, Path(target), dial, format)
        scales = choose_scales(model, dial, int8, format)
        torch.nn.Module.float(model)
        chosen = self.check_rows(None if rows is None else DataSource(rows), log)
        log(f"comparing with the model on {chosen.source}")
        record = {name: self.record[name] for name in ("format_version", "name", "labels", "pairs", "max_length")}
        record |= {"text_columns": self.text_columns, "run": {"name": self.record["name"], "sha256": self.digest}}
        record |= {key: self.record.get(key) for key in ("data", "data_path", "data_digests")}
        record["point"] = budget if isinstance(budget, str) and budget in self.points else None
        beside = [file for name in (CALIBRATION, TRAINING_ROWS) if (file := self.folder / name).exists()]
        return export_model(
            model, files, record, Path(target), dial=dial, int8=scales, rows=chosen, format=format, beside=beside
        )

    def _share(self, budget: str | float | Dial) -> float:
        """The share of the cost of all units that a budget asks to keep: a number, or mean:X."""
        with suppress(TypeError, ValueError):
            return float(budget)  # type: ignore[arg-type]
        dial = self.budget(budget)
        if dial.mode != "mean" or dial.value is None:
            raise UsageError(f"budget {dial}: give the share of all heads that are kept, such as 0.5")
        return dial.value

    def check_rows(self, source: DataSource | None, log: Callable[[str], None]) -> CheckRows:
        """All rows of a file or data set; else a sample of the run's held-out rows; else made-up ones."""
        from budgetformer.export.verify import CheckRows

        try:
            rows = (
                self.rows.training_data("test").sample(_CHECK_ROWS)
                if source is None
                else self.rows.open_labelled(source)
            )
            table = self.encode(rows)
            return CheckRows(table, f"{len(table)} {rows.split} rows of {rows.data.source.data}")
        except DataError as error:
            if source is None:
                log(f"the run's own rows cannot be had ({error}): checking on made-up ones, give real ones with --rows")
                table = TokenTable.random(self.config.vocab_size, self.max_length, self.pairs)
                return CheckRows(table, f"{len(table)} made-up rows of random tokens")
            log(f"{source.data} is read without labels: {error}")
        table = self._unlabelled(stream_examples(self.rows.in_columns(source)))
        return CheckRows(table, f"{len(table)} rows of {source.data}")

    def _unlabelled(self, examples: Iterable[Example]) -> TokenTable:
        """Texts whose labels are not known."""
        return TextEncoder(self.tokenizer, self.max_length, pair=self.pairs).table(examples, self.pairs)


def load(folder: str | Path) -> Run:
    """A finished run, or an export of one: `load("runs/reviews").predict(["a fine film"])`."""
    return Run.open(folder)

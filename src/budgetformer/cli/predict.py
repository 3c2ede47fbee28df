"""budgetformer predict: a finished run on texts without labels, one or millions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from budgetformer.cli import app
from budgetformer.cli.data_flags import BUDGET, HELP, quarantine_fields
from budgetformer.data.locate import DataSource
from budgetformer.errors import UsageError

if TYPE_CHECKING:
    from budgetformer.predict.job import Predictor, Request


def _data(flag: str) -> Any:
    return typer.Option("--" + flag.replace("_", "-"), help=HELP[flag], rich_help_panel="Data")


@app.command()
def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The directory of a run, or of an export.", show_default=False)
    ],
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="A file, a folder of files, - or a data set, as for train.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Without DATA the text itself, with DATA its column.")] = None,
    text_pair: Annotated[str | None, typer.Option(help="The second text, or its column.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help=".csv, .tsv, .jsonl (each also .gz) or .parquet.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help=BUDGET)] = None,
    top: Annotated[int, typer.Option(help="The best N labels with their scores.")] = 1,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="The probability of every label.")] = False,
    long: Annotated[
        str, typer.Option(help="Texts longer than the model reads: cut, head-tail, windows or error.")
    ] = "cut",
    split: Annotated[str | None, typer.Option(help="Which split of a data set (default: test).")] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Only the I-th of N equal parts.")] = None,
    escape_formulas: Annotated[
        bool, typer.Option("--escape-formulas", help="In CSV, a quote (') before what a spreadsheet would compute.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="A folder's files on a Ray cluster, with so many models (0: one per CPU).", min=0)
    ] = None,
    encoding: Annotated[str, _data("encoding")] = "utf-8",
    bad_rows: Annotated[str, _data("bad_rows")] = "error",
    offline: Annotated[bool, _data("offline")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a single text.")] = False,
) -> None:
    """Predict labels with RUN, for one --text or for every row of DATA, which keeps its columns and order.

    Without -o, JSON lines go to standard output. docs/predict.md says what is added and how to go on after a stop.
    """
    from budgetformer.predict.job import Predictor, Request
    from budgetformer.runs.run import Run

    if data is None:
        if text is None:
            raise UsageError("nothing to predict: give a file (or - for standard input), or a text with --text")
        if output:
            raise UsageError(f"-o {output} goes with a file; a single --text is printed: leave -o out")
        _one(Predictor(Run.open(run), budget=budget, long=long), text, text_pair, top, probabilities, as_json)
        return
    source = DataSource(
        data, text=text, text_pair=text_pair, encoding=encoding, offline=offline, **quarantine_fields(bad_rows)
    )
    request = Request(source, output, split, top, probabilities, shard, escape_formulas, resume, overwrite)
    _many(run, request, budget, long, workers)


def _many(run: Path, request: Request, budget: str | None, long: str, workers: int | None) -> None:
    from budgetformer.cli.show import log, summary_line
    from budgetformer.predict.job import Predictor
    from budgetformer.runs.run import Run

    try:
        if workers is None:
            summary = Predictor(Run.open(run), budget=budget, long=long).predict(request, log)
        else:
            from budgetformer.predict.cluster import predict_folder

            summary = predict_folder(run, request, budget=budget, long=long, workers=workers, log=log)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    if summary:
        log(summary_line(summary, request.output))


def _one(predictor: Predictor, text: str, pair: str | None, top: int, probabilities: bool, as_json: bool) -> None:
    from budgetformer.cli.show import print_json
    from budgetformer.engine.answers import Columns

    scorer = predictor.scorer
    answers = Columns(scorer.config, scorer.labels, top=top, probabilities=probabilities)
    predictor.run.check_pairs(pair is not None, "--text-pair")
    scores = scorer.score([text], None if pair is None else [pair])
    answer = dict(zip(answers.kinds, next(answers.rows(scores)), strict=True))
    if as_json:
        print_json(answer)
        return
    width = max(map(len, answer))
    for name, value in answer.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:{width}}  {shown}")

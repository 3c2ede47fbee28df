"""Computing one cell: train it, write what it did on every test row, probe it. Runs in a process of its own too."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.cli.process import keep_freed_memory
from budgetformer.data.dataset import Texts, open_data
from budgetformer.data.examples import Example
from budgetformer.data.tokenizer import load_tokenizer, train_tokenizer
from budgetformer.data.tokens import encode_split
from budgetformer.engine.scores import Floats, Scores, score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import BudgetFormerError
from budgetformer.evaluate import row_losses
from budgetformer.models.model import BudgetFormerForSequenceClassification
from budgetformer.runs.files import named_write_errors, write_directory, write_json
from budgetformer.runs.provenance import environment
from budgetformer.training.prepare import Prepared
from budgetformer.training.record import has_begun
from budgetformer.training.run import train_run
from budgetformer_reproduction.cells import TFIDF, Cell, Plan
from budgetformer_reproduction.probes import probe
from budgetformer_reproduction.scale import scale_named


def compute(plan: Plan, cell: Cell) -> None:
    """Do all of a cell; one that was begun goes on, one that is done is left alone."""
    if plan.done(cell):
        return
    if cell.variant == TFIDF:
        fit_tfidf(plan, cell)
        return
    keep_freed_memory()
    folder = plan.cell(cell)

    def write_details(
        prepared: Prepared, folder: Path, model: BudgetFormerForSequenceClassification, outcome: Scores
    ) -> None:
        test = prepared.splits[prepared.final]
        gated = model.config.gate.selects
        soft = score(TorchEngine(model), test, "full").logits if gated else outcome.logits
        write_outcome(folder, outcome, row_losses(outcome), soft)
        probes: dict[str, Any] = {}
        if cell.variant in ("learned", "dense") and cell.fraction == 1:
            probes = probe(model, test, prepared.splits["validation"], outcome, plan.scale.probe_rows)
        write_json(folder / "probes.json", probes)

    train_run(
        plan.source(cell.dataset, cell.fraction),
        plan.recipe(cell),
        folder,
        seed=cell.seed,
        resume=has_begun(folder),
        on_finished=write_details,
        report=False,
    )


def write_outcome(folder: Path, outcome: Scores, losses: Floats, soft: Any) -> None:
    """What happened on each test row, as outcome.npz, whole or not at all; in few bits."""
    path = folder / "outcome.npz"
    temporary = path.with_name(".outcome.npz.tmp")
    table, logits = outcome.table, outcome.logits.astype(np.float64)
    assert table.labels is not None
    assert outcome.budget is not None
    assert outcome.entropy is not None
    arrays: dict[str, Any] = {
        "correct": logits.argmax(1) == table.labels, "soft_correct": soft.argmax(1) == table.labels,
        "confidence": (1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)).astype(np.float32),
        "losses": losses.astype(np.float16), "budget": outcome.budget.astype(np.float16),
        "entropy": outcome.entropy.astype(np.float16),
    }  # fmt: skip
    for name, values in (("labels", table.labels), ("lengths", table.lengths), ("lines", table.lines)):
        arrays[name] = values.astype(np.min_scalar_type(int(values.max(initial=0))))
    with named_write_errors(path):
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def fit_tfidf(plan: Plan, cell: Cell) -> None:
    """The control without any network: TF-IDF of words and word pairs, and logistic regression.

    It is fitted on the training rows that the networks have; the cell's files are as a network's cell has them.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    began = time.monotonic()
    data = open_data(plan.source(cell.dataset))
    model: Any = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=200_000),
        LogisticRegression(C=10.0, max_iter=300),
    )
    model.fit(*_texts(data.splits["train"].examples()))
    recipe = plan.recipe(cell)
    test = encode_split(
        data.splits["test"], data, load_tokenizer(str(recipe.tokenizer)).backend_tokenizer, recipe.max_length
    )
    probabilities = np.zeros((len(test), len(data.labels)), np.float32)
    columns = [data.labels.index(name) for name in model.classes_]
    probabilities[:, columns] = model.predict_proba(_texts(data.splits["test"].examples())[0])
    logits = np.log(np.maximum(probabilities, 1e-12))
    none = np.zeros((len(test), 0), np.float32)
    assert test.labels is not None
    losses = -logits[np.arange(len(test)), test.labels]
    folder = plan.cell(cell)
    with named_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    scores = Scores(test, "single_label_classification", 1, logits, none.astype(np.int16), none, none)
    write_outcome(folder, scores, losses, logits)
    write_json(folder / "probes.json", {})
    record = {
        "status": "done", "data_fingerprint": data.fingerprint, "seed": cell.seed, "environment": environment(),
        "labels": data.labels, "training": {"seconds": time.monotonic() - began}, "model": {"parameters": None},
    }  # fmt: skip
    write_json(folder / "run.json", record)


def _texts(examples: Iterable[Example]) -> tuple[list[str], list[str]]:
    """Texts and label names. The words of a second text are marked, so that a pair is not one bag of words."""
    texts, labels = [], []
    for example in examples:
        pair = " ".join(f"pair_{word}" for word in (example.text_pair or "").split())
        texts.append(f"{example.text} {pair}" if pair else example.text)
        labels.append(str(example.label))
    return texts, labels


def make_tokenizer(plan: Plan, dataset: str) -> None:
    """Train the tokenizer that all cells of a data set share, on the training rows alone; a finished one is kept."""
    folder = plan.tokenizer(dataset)
    if plan.scale.name == "paper" or (folder / "tokenizer.json").exists():
        return
    data = open_data(plan.source(dataset))
    texts = Texts(data.splits["train"])
    tokenizer = train_tokenizer(texts, vocab_size=plan.scale.recipe_for(dataset, {}, None).vocab_size)
    with named_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)

    def fill(path: Path) -> None:
        tokenizer.save_pretrained(path)

    write_directory(folder, fill)


def _end_with_parent() -> None:
    """Ask this process to stop when the pipe to its parent closes: a cell must not outlive the grid unseen."""

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin: its lock, held here, would make the interpreter abort at its end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def main(argument: str) -> int:
    """Compute the cell that the JSON argument describes; the exit code is that of the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _end_with_parent()
    job = json.loads(argument)
    options = {"data_dir": job["data_dir"], "precision": job["precision"]}
    plan = Plan(scale_named(job["scale"]), Path(job["folder"]), **options)
    try:
        compute(plan, Cell(**job["cell"]))
    except BudgetFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

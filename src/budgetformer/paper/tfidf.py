"""The control without any network: TF-IDF of words and word pairs, and logistic regression."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from budgetformer.data import Example, encode_split, load_tokenizer, open_data
from budgetformer.engine.scores import Scores
from budgetformer.errors import MissingExtraError
from budgetformer.paper.cells import Cell, Plan
from budgetformer.paper.work import write_outcome
from budgetformer.runs.files import named_write_errors, write_json
from budgetformer.runs.provenance import environment


def fit_tfidf(plan: Plan, cell: Cell) -> None:
    """Fit on the training rows that the networks have; write the cell's files as a network's cell has them."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
    except ImportError:
        raise MissingExtraError("sklearn", "scikit-learn") from None
    began = time.monotonic()
    data = open_data(plan.source(cell.dataset))
    texts, labels = _texts(data.splits["train"].examples())
    model: Any = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=200_000),
        LogisticRegression(C=10.0, max_iter=300),
    )
    model.fit(texts, labels)
    recipe = plan.recipe(cell)
    test = encode_split(data.splits["test"], data, load_tokenizer(str(recipe.tokenizer)), recipe.max_length)
    probabilities = np.zeros((len(test), len(data.labels)), np.float32)
    columns = [data.labels.index(name) for name in model.classes_]
    probabilities[:, columns] = model.predict_proba(_texts(data.splits["test"].examples())[0])
    logits = np.log(np.maximum(probabilities, 1e-12))
    none = np.zeros((len(test), 0), np.float32)
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


def _texts(examples: Any) -> tuple[list[str], list[str]]:
    """Texts and label names. The words of a second text are marked, so that a pair is not one bag of words."""
    texts, labels = [], []
    example: Example
    for example in examples:
        pair = " ".join(f"pair_{word}" for word in (example.text_pair or "").split())
        texts.append(f"{example.text} {pair}" if pair else example.text)
        labels.append(str(example.label))
    return texts, labels

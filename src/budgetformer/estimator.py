"""scikit-learn's surface: BudgetFormerClassifier, for texts or pairs of texts."""

from __future__ import annotations

import json
import numbers
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from budgetformer.data.examples import broken_unicode, label_text
from budgetformer.data.locate import DataSource
from budgetformer.data.splits import text_hash
from budgetformer.data.tokenizer import tokenizer_files
from budgetformer.dial import Dial
from budgetformer.engine.scorer import Scorer
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import DataError, ModelError, UsageError
from budgetformer.runs.files import hash_files, named_read_errors, read_json_lines, write_directory, write_json
from budgetformer.runs.run import Run

if TYPE_CHECKING:
    from budgetformer.training.recipe import Recipe

# Keys of a recipe with a parameter of their own; class_weight is class_weights there.
_RECIPE = ("preset", "base", "epochs", "batch_size", "learning_rate", "max_length", "vocab_size")


@dataclass(eq=False, repr=False)
class BudgetFormerClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A text classifier that computes only the heads that each input needs.

    `fit` trains from scratch by a preset (default: small), or from `base`, a pretrained encoder's directory or name.
    X is a sequence of strings, or of pairs of strings (also as two columns). What is None comes from the preset;
    `options` changes any other key of the recipe, such as {"patience": 2, "model": {"hidden_act": "gelu"}}. `budget` is
    the dial, which set_params may turn after fitting. `class_weight="balanced"` weighs classes by their rarity.
    `validation_fraction` of the rows choose the epoch that is kept.
    """

    preset: str | None = None
    _: KW_ONLY
    base: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    max_length: int | None = None
    vocab_size: int | None = None
    class_weight: str | None = None
    options: Mapping[str, Any] | None = None
    budget: str = "learned"
    validation_fraction: float = 0.1
    random_state: Any = None
    verbose: int = 0

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the texts X and their classes y; what was fitted before is forgotten."""
        from budgetformer.training.run import train_run

        recipe, seed = self._recipe(), _seed(self.random_state)
        Dial.parse(self.budget)
        y = validate_data(self, y=y)
        check_classification_targets(y)
        cells = self._cells(X, reset=True)
        check_consistent_length(cells, y)
        classes, codes = np.unique(y, return_inverse=True)
        names = _names(classes)
        if len({text_hash(" ".join(row), None) for row in cells}) <= len(classes):
            raise DataError(
                f"n_samples={len(cells)} with n_classes={len(classes)}: there must be more different texts than "
                "classes, for some of them are kept for validation"
            )
        with tempfile.TemporaryDirectory(prefix="budgetformer-fit-") as name, _apart():
            rows, run = Path(name, "rows.jsonl"), Path(name, "run")
            keys = ("text", "text_pair", "label") if cells.shape[1] == 2 else ("text", "label")
            with rows.open("w", encoding="utf-8") as file:
                for row, code in zip(cells, codes, strict=True):
                    file.write(json.dumps(dict(zip(keys, (*row, names[code]), strict=True))) + "\n")
            source = DataSource(
                str(rows), task="single", validation_fraction=self.validation_fraction, test_fraction=0.0, seed=seed
            )
            train_run(source, recipe, run, quiet=not self.verbose, evaluate=False)
            self._take(run)
        self._record["data"]["data"] = "texts in memory"
        self._record["text_columns"] = []  # a file has its own, not those of ours
        self.classes_ = classes
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each text."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of every class (in the order of `classes_`) for each text, at the dial `budget`."""
        check_is_fitted(self)
        cells = self._cells(X, reset=False)
        self._scorer.budget = Dial.parse(self.budget)
        scores = self._scorer.score(*(column.tolist() for column in cells.T))
        place = {label: column for column, label in enumerate(self._scorer.labels)}
        columns = [place[name] for name in _names(self.classes_)]
        return scores.probabilities[:, columns].astype(np.float64)

    def save(self, folder: str | Path) -> None:
        """Write a run directory, safetensors and JSON, for `load` and for the command line's eval and predict."""
        check_is_fitted(self)
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: give a new directory")
        parameters = {**self.get_params(), "budget": str(Dial.parse(self.budget))}
        if not isinstance(self.random_state, numbers.Integral):
            parameters["random_state"] = None
        about = {"parameters": parameters, "classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}
        if hasattr(self, "feature_names_in_"):
            about["columns"] = self.feature_names_in_.tolist()

        def fill(place: Path) -> None:
            cast("TorchEngine", self._scorer.engine).model.save_pretrained(place)
            for name, content in self._tokenizer.items():
                (place / name).write_bytes(content)
            lines = (json.dumps(epoch) + "\n" for epoch in self.history_)
            Path(place, "history.jsonl").write_text("".join(lines), encoding="utf-8")
            record = {**self._record, "sha256": hash_files(place), "estimator": about}
            write_json(place / "run.json", json.loads(json.dumps(record, default=_plain)))

        with _apart():
            write_directory(folder, fill, "Give another directory")

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """An estimator from what `save` wrote, or from a finished single-label run of `budgetformer train`."""
        self, folder = cls(), Path(folder)
        with _apart():
            self._take(folder)
        if (task := self._record["task"]) != "single_label_classification":
            raise ModelError(f"{folder} was trained for {task}: this needs one label a text")
        with named_read_errors(folder / "run.json", "save or train again"):
            self._restore(self._record.pop("estimator", None))
        return self

    def _restore(self, about: Mapping[str, Any] | None) -> None:
        """The parameters and classes: `about` them from what `save` wrote, else from the recipe of a run."""
        record = self._record
        if about:
            self.classes_ = np.array(about["classes"], np.dtype(about["dtype"]))
            if "columns" in about:
                self.feature_names_in_ = np.array(about["columns"], object)
            self.set_params(**about["parameters"])
        else:
            options = dict(record["recipe"])
            parameters = {name: options.pop(name) for name in _RECIPE}
            parameters["class_weight"] = None if options.pop("class_weights") == "none" else "balanced"
            parameters["validation_fraction"] = record["data"]["validation_fraction"]
            self.set_params(**parameters, options=options, random_state=record["seed"])
            self.classes_ = np.sort(np.array(record["labels"]))
        Dial.parse(self.budget)
        if sorted(_names(self.classes_)) != sorted(record["labels"]):
            raise ModelError(f"the classes {self.classes_.tolist()!r:.80} are not the model's: save or train again")

    def __getstate__(self) -> dict[str, Any]:
        """Plain data; of a fitted estimator the files that `save` writes, as bytes."""
        state = {**super().__getstate__()}
        if "_scorer" in state:
            with tempfile.TemporaryDirectory(prefix="budgetformer-pickle-") as name:
                self.save(name)
                del state["_tokenizer"]
                state["_scorer"] = {file.name: file.read_bytes() for file in sorted(Path(name).iterdir())}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.get("_scorer", {})
        super().__setstate__({key: value for key, value in state.items() if key != "_scorer"})
        if files:
            with tempfile.TemporaryDirectory(prefix="budgetformer-pickle-") as name, _apart():
                for file, content in files.items():
                    Path(name, file).write_bytes(content)
                self._take(Path(name))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        return tags

    def _recipe(self) -> Recipe:
        from budgetformer.training.recipe import Recipe

        options = dict(self.options or {})
        if taken := options.keys() & {*_RECIPE, "class_weights"}:
            raise UsageError(f"options: {min(taken)!r} is a parameter of its own: give it there")
        if self.class_weight not in (None, "balanced"):
            raise UsageError(f"class_weight={self.class_weight!r}: give None or 'balanced'")
        options |= {name: _plain(getattr(self, name)) for name in _RECIPE[2:] if getattr(self, name) is not None}
        options |= {"class_weights": "balanced"} if self.class_weight else {}
        return Recipe.make(self.preset, base=self.base).changed(options, where="options")

    def _cells(self, X: Any, *, reset: bool) -> NDArray[np.object_]:
        """X as an object array of strings with one or two columns; the number that was fitted, unless `reset`."""
        cells = _strings(X)
        validate_data(self, X if getattr(X, "ndim", 1) == 2 else cells, reset=reset, skip_check_array=True)
        return cells

    def _take(self, run: Path) -> None:
        """Hold in memory what prediction and `save` need of a run."""
        opened = Run.open(run)
        self._record = opened.record
        self._tokenizer = tokenizer_files(run)
        self._scorer = Scorer(TorchEngine(opened.model), opened.tokenizer, opened.max_length)
        self.n_features_in_ = 2 if self._record.get("pairs") else 1
        lines = read_json_lines(run / "history.jsonl", "copy the directory again")
        self.history_ = [dict(line) for line in lines if line["kind"] == "epoch"]


def _strings(X: Any) -> NDArray[np.object_]:
    """X as an object array of one column, or of two for pairs; every cell is a string with something in it."""
    if isinstance(X, str):
        raise ValueError("X is one string: give a sequence of texts, such as [X]")
    if hasattr(X, "tocsr"):
        raise TypeError("X is a sparse matrix: give texts, not numbers made of them")
    try:
        cells = np.asarray(X, dtype=object)
    except ValueError:  # numpy's word for rows of different lengths
        cells = np.empty((), object)
    if cells.ndim == 1:
        cells = cells[:, None]
    if cells.ndim != 2 or cells.shape[1] not in (1, 2):
        what = f"has shape {cells.shape}" if cells.ndim else f"is a {type(X).__name__} without a shape"
        raise ValueError(f"X {what}: give a sequence of texts, or of pairs of texts (two columns)")
    if not len(cells):
        raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required: X holds no text")
    for (row, column), text in np.ndenumerate(cells):
        where = f"X[{row}]" if cells.shape[1] == 1 else f"X[{row}, {column}]"
        if not isinstance(text, str):
            if text is None or str(text) in ("nan", "<NA>", "NaT"):
                raise ValueError(f"{where} is {text!r}: fill in missing texts or drop their rows")
            raise TypeError(f"{where} is a {type(text).__name__} ({text!r:.40}): give texts as strings")
        if not text.strip():
            raise ValueError(f"{where} is empty: fill in the text or drop the row")
        if fault := broken_unicode(text):
            raise ValueError(f"{where} {fault}")
    return cells


def _names(classes: NDArray[Any]) -> list[str]:
    """The classes as the model and its files call them."""
    names = [label_text(_plain(value)) for value in classes]
    if len(names) < 2:
        raise DataError(f"y has one class only ({classes[0]!r}): training needs at least two classes")
    for number, name in enumerate(names):
        if name.casefold() in ("", "nan"):
            raise DataError(f"y has the label {name!r}, which stands for a missing one in files: give it another name")
        if name in names[:number]:
            raise DataError(f"y has labels that differ in white space alone ({name!r}): make them the same")
    return names


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _seed(random_state: Any) -> int:
    """An integer is the seed itself, as on the command line."""
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


@contextmanager
def _apart() -> Iterator[None]:
    """Torch's random numbers are left alone, and transformers draws no bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()

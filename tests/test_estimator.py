"""The scikit-learn surface: sklearn's own checks and tools, every kind of input, saving, and every wrong use."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator, parametrize_with_checks
from sklearn.utils.validation import validate_data

from budgetformer import BudgetFormerClassifier
from budgetformer.errors import ModelError
from tests.models.tiny import save_base
from tests.processes import command

NARROW = {"model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}}
QUICK: dict[str, Any] = {"preset": "tiny", "epochs": 1, "max_length": 16, "vocab_size": 200, "options": NARROW}
X = [f"the film {n} was {'lovely' if n % 2 else 'dull'} to see" for n in range(60)]
Y = ["pos" if n % 2 else "neg" for n in range(60)]


def quick(**parameters: Any) -> BudgetFormerClassifier:
    return BudgetFormerClassifier(**{**QUICK, "random_state": 0, **parameters})


@pytest.fixture(scope="module")
def fitted() -> BudgetFormerClassifier:
    return quick(epochs=8, options=None).fit(X, Y)


@pytest.fixture(scope="module")
def of_pairs() -> BudgetFormerClassifier:
    return quick().fit([(text, f"{n} again") for n, text in enumerate(X)], Y)


def test_it_learns(fitted: BudgetFormerClassifier) -> None:
    probabilities = fitted.predict_proba(X)
    assert fitted.score(X, Y) >= 0.95
    assert fitted.classes_.tolist() == ["neg", "pos"]
    assert probabilities.shape == (60, 2)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    assert fitted.predict(X[:2]).tolist() == fitted.classes_[probabilities[:2].argmax(1)].tolist()
    assert [epoch["epoch"] for epoch in fitted.history_] == list(range(1, 9))


def test_every_kind_of_sequence_is_the_same_text(fitted: BudgetFormerClassifier, tmp_path: Path) -> None:
    expected = fitted.predict_proba(X)
    for same in (
        tuple(X),
        np.array(X),
        np.array(X, object),
        np.array(X)[:, None],
        pd.Series(X),
        pd.DataFrame({"x": X}),
    ):
        np.testing.assert_array_equal(fitted.predict_proba(same), expected)
    assert fitted.n_features_in_ == 1
    frame = pd.DataFrame({"review": X})
    model = quick().fit(frame, Y)
    assert model.feature_names_in_.tolist() == ["review"]
    model.save(tmp_path / "run")
    for same in (model, BudgetFormerClassifier.load(tmp_path / "run")):
        with pytest.raises(ValueError, match="feature names should match"):
            same.predict(frame.rename(columns={"review": "text"}))


def test_pairs(of_pairs: BudgetFormerClassifier) -> None:
    assert of_pairs.n_features_in_ == 2
    pairs = [("a film", "a book"), ("a play", "a song")]
    expected = of_pairs.predict_proba(pairs)
    for same in (np.array(pairs), pd.DataFrame(pairs), [list(pair) for pair in pairs]):
        np.testing.assert_array_equal(of_pairs.predict_proba(same), expected)
    with pytest.raises(ValueError, match="X has 1 features, but BudgetFormerClassifier is expecting 2"):
        of_pairs.predict(X)


@pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 3, 10], ["10", "2", "x y"], [False, True], [1.0, 2.0]])
def test_labels_of_any_type_come_back(labels: list[Any]) -> None:
    y = np.array([labels[n % len(labels)] for n in range(60)])
    model = quick().fit(X, y)
    assert model.classes_.dtype == y.dtype
    assert model.classes_.tolist() == sorted(labels)
    assert set(model.predict(X)) <= set(labels)


def test_columns_follow_the_classes_and_not_the_numbers_in_them() -> None:
    y = ["10" if n % 2 else "2" for n in range(60)]  # sorted as text "10" comes first, as numbers "2"
    model = quick(epochs=8, options=None).fit(X, y)
    assert model.classes_.tolist() == ["10", "2"]
    assert model.score(X, y) >= 0.95


def test_random_state_decides_everything_and_nothing_else_changes(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    first = quick(random_state=3).fit(X, Y).predict_proba(X)
    torch.rand(1)
    np.testing.assert_array_equal(quick(random_state=3).fit(X, Y).predict_proba(X), first)
    assert not np.array_equal(quick(random_state=np.random.RandomState(3)).fit(X, Y).predict_proba(X), first)
    torch.set_rng_state(before)
    quick(random_state=None).fit(X, Y)
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    quick(verbose=1).fit(X, Y)
    assert "epoch 1/1" in capfd.readouterr().err


def test_the_dial_turns_after_fitting(fitted: BudgetFormerClassifier) -> None:
    turned = copy.deepcopy(fitted)
    full = turned.set_params(budget="full").predict_proba(X)
    few = turned.set_params(budget="fixed:0.25").predict_proba(X)
    assert not np.array_equal(full, few)
    np.testing.assert_array_equal(turned.set_params(budget="learned").predict_proba(X), fitted.predict_proba(X))
    with pytest.raises(ValueError, match="budget 'half' is not known"):
        turned.set_params(budget="half").predict(X)


class Looking(pickle.Unpickler):
    """Notes the modules whose names a pickle calls for."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


def test_pickles_hold_bytes_and_plain_data_alone(fitted: BudgetFormerClassifier) -> None:
    expected, stored = fitted.predict_proba(X), pickle.dumps(fitted)
    looking = Looking(io.BytesIO(stored))
    looking.load()
    assert {module.split(".")[0] for module in looking.modules} == {"budgetformer", "numpy"}
    file = io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    for again in (pickle.loads(stored), joblib.load(file), copy.deepcopy(fitted)):
        np.testing.assert_array_equal(again.predict_proba(X), expected)
        assert again.get_params() == fitted.get_params()
    assert pickle.loads(pickle.dumps(clone(fitted))).get_params() == fitted.get_params()


def test_saved_is_a_run_for_the_command_line_and_comes_back(
    fitted: BudgetFormerClassifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy.deepcopy(fitted).set_params(budget="max:0.5", random_state=np.int64(0))
    model.save(tmp_path / "run")
    again = BudgetFormerClassifier.load(tmp_path / "run")
    assert again.get_params() == model.get_params()
    assert again.history_ == model.history_
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    rows = "".join(json.dumps({"review": text, "sentiment": label}) + "\n" for text, label in zip(X, Y, strict=True))
    (tmp_path / "reviews.jsonl").write_text(rows)
    assert command("eval", str(tmp_path / "run"), str(tmp_path / "reviews.jsonl"), "--budget", "max:0.5", "--json") == 0
    evaluation = json.loads(capsys.readouterr().out)["evaluations"][0]
    assert evaluation["score"] == model.score(X, Y)
    with pytest.raises(ValueError, match="is not empty: give a new directory"):
        model.save(tmp_path / "run")


def test_a_run_of_the_command_line_is_an_estimator(tiny_run: Path, tiny_multi: Path, tmp_path: Path) -> None:
    model = BudgetFormerClassifier.load(tiny_run)
    assert model.classes_.tolist() == ["neg", "pos"]
    parameters = model.get_params()
    assert (parameters["preset"], parameters["epochs"], parameters["random_state"]) == ("tiny", 6, 0)
    fitted_again = clone(model.set_params(epochs=1)).fit(X, Y)
    assert fitted_again.predict_proba(X).shape == model.predict_proba(X).shape
    with pytest.raises(ValueError, match="multi_label_classification: this needs one label a text"):
        BudgetFormerClassifier.load(tiny_multi)
    with pytest.raises(ValueError, match="does not exist: give the directory of a run"):
        BudgetFormerClassifier.load(tmp_path / "nothing")


def test_pipelines_searches_and_cross_validation() -> None:
    pipe = Pipeline([("clean", FunctionTransformer(np.char.lower)), ("classify", quick())])
    search = GridSearchCV(pipe, {"classify__learning_rate": np.array([3e-3, 1e-2])}, cv=2, n_jobs=2)
    with joblib.parallel_config("multiprocessing"):  # forked, so that none has to import torch
        search.fit(X, Y)
    assert search.best_params_["classify__learning_rate"] in (3e-3, 1e-2)
    assert search.best_estimator_.predict_proba(X).shape == (60, 2)
    scores = cross_val_score(quick(epochs=np.int64(1)), X, Y, cv=2)
    assert ((scores >= 0) & (scores <= 1)).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"X": "one text"}, ValueError, "X is one string: give a sequence of texts"),
        ({"X": csr_matrix(np.eye(60))}, TypeError, "X is a sparse matrix: give texts"),
        ({"X": np.zeros(60)}, TypeError, r"X\[0\] is a float \(0.0\): give texts as strings"),
        ({"X": [*X[:59], b"bytes"]}, TypeError, r"X\[59\] is a bytes"),
        ({"X": [*X[:59], None]}, ValueError, r"X\[59\] is None: fill in missing texts"),
        ({"X": pd.Series([*X[:59], np.nan])}, ValueError, r"X\[59\] is nan"),
        ({"X": [*X[:59], pd.NA]}, ValueError, r"X\[59\] is <NA>"),
        ({"X": [*X[:59], " \n"]}, ValueError, r"X\[59\] is empty"),
        ({"X": [*X[:59], "half \ud800"]}, ValueError, r"X\[59\] holds half a surrogate pair .* character 6\): write"),
        ({"X": [(text, "") for text in X]}, ValueError, r"X\[0, 1\] is empty"),
        ({"X": [(text, text, text) for text in X]}, ValueError, r"X has shape \(60, 3\): give a sequence of texts"),
        ({"X": [*X[:59], ("a", "b")]}, TypeError, r"X\[59\] is a tuple"),
        ({"X": [("a", "b", "c"), *[("a", "b")] * 59]}, TypeError, r"X\[0\] is a tuple"),
        ({"X": (text for text in X)}, ValueError, "X is a generator without a shape: give a sequence"),
        ({"X": []}, ValueError, "X holds no text"),
        ({"X": X[:59]}, ValueError, r"inconsistent numbers of samples: \[59, 60\]"),
        ({"y": None}, ValueError, "requires y to be passed"),
        ({"y": ["pos"] * 60}, ValueError, "one class only"),
        ({"y": np.linspace(0, 1, 60)}, ValueError, "Unknown label type: continuous"),
        ({"y": [np.nan, *[1.0] * 59]}, ValueError, "Input y contains NaN"),
        ({"y": [["a", "b"]] * 60}, ValueError, "y should be a 1d array"),
        ({"y": ["", "b"] * 30}, ValueError, "label '', which stands for a missing one"),
        ({"y": ["b ", "b"] * 30}, ValueError, "differ in white space alone"),
        (
            {"X": ["a", "b"], "y": [0, 1]},
            ValueError,
            "n_samples=2 with n_classes=2: there must be more",
        ),
        ({"preset": "huge"}, ValueError, "preset 'huge' is not known"),
        ({"epochs": 0}, ValueError, "epochs=0: give a whole number"),
        ({"budget": "half"}, ValueError, "budget 'half' is not known"),
        ({"validation_fraction": 1.5}, ValueError, "validation_fraction is 1.5"),
        ({"options": {"patiense": 1}}, ValueError, "options: key 'patiense' is not known: did you mean 'patience'"),
        ({"options": {"epochs": 1}}, ValueError, "options: 'epochs' is a parameter of its own"),
        ({"options": {"base": "x"}}, ValueError, "options: 'base' is a parameter of its own"),
        ({"class_weight": "heavy"}, ValueError, "class_weight='heavy': give None or 'balanced'"),
        ({"options": {"model": {"gates": {"min_head": 0}}}}, ValueError, "did you mean 'min_heads'"),
    ],
)
def test_wrong_use_is_explained(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    changes = dict(changes)
    texts, labels = changes.pop("X", X), changes.pop("y", Y)
    with pytest.raises(error, match=message):
        quick(**changes).fit(texts, labels)


def test_what_is_not_fitted_says_so(tmp_path: Path) -> None:
    for use in (lambda m: m.predict(X), lambda m: m.predict_proba(X), lambda m: m.save(tmp_path / "run")):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            use(quick())


def test_prediction_looks_at_its_texts_too(fitted: BudgetFormerClassifier) -> None:
    with pytest.raises(ValueError, match=r"X\[1\] is empty"):
        fitted.predict(["a", ""])
    with pytest.raises(ValueError, match="X has 2 features, but BudgetFormerClassifier is expecting 1"):
        fitted.predict([("a", "b")])


def test_a_pretrained_encoder_is_fitted_and_saved(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    model = BudgetFormerClassifier(base=str(base), epochs=1, max_length=16, options={"dense_epochs": 1}, random_state=0)
    model.fit(X, Y).save(tmp_path / "run")
    again = BudgetFormerClassifier.load(tmp_path / "run")
    assert again.get_params() == model.get_params()
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    half = [np.asarray(m.set_params(budget="mean:0.5").predict_proba(X)) for m in (model, again)]
    np.testing.assert_array_equal(*half)
    with pytest.raises(ValueError, match="the preset base is for --base, and only it"):
        BudgetFormerClassifier("tiny", base=str(base)).fit(X, Y)


def test_balanced_classes_weigh_the_same() -> None:
    y = ["rare" if n < 6 else "often" for n in range(60)]
    model = quick(class_weight="balanced").fit(X, y)
    weights = dict(zip(model._scorer.labels, model._scorer.engine.model.config.class_weights, strict=True))
    assert weights["rare"] > 4 * weights["often"]
    assert quick().fit(X, y)._scorer.engine.model.config.class_weights is None


def test_a_save_that_fails_leaves_nothing(
    fitted: BudgetFormerClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("budgetformer.estimator.write_json", no_space)
    with pytest.raises(ModelError, match="the disk is full"):
        fitted.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


class OfNumbers(BudgetFormerClassifier):  # type: ignore[misc]
    """The estimator over texts made of numbers: sklearn's checks know no other X."""

    def _cells(self, X: Any, *, reset: bool) -> Any:
        numbers = validate_data(self, X, reset=reset)
        texts = [" ".join(f"{chr(97 + i)}{v:+.0f} {v:.2f}" for i, v in enumerate(row)) for row in numbers]
        return np.array(texts, object)[:, None]

    def _take(self, run: Path) -> None:
        columns = self.n_features_in_
        super()._take(run)
        self.n_features_in_ = columns

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = False
        tags.input_tags.two_d_array = True
        return tags


def expected_failures() -> dict[str, str]:
    """The table of docs/sklearn.md."""
    page = (Path(__file__).parents[1] / "docs" / "sklearn.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(check_\w+)` \| (.+) \|$", page, flags=re.M))


OVER_NUMBERS = OfNumbers(**{**QUICK, "epochs": 2, "batch_size": 8, "learning_rate": 0.04})


@parametrize_with_checks([OVER_NUMBERS], expected_failed_checks=lambda _: expected_failures())
def test_sklearns_own_checks(estimator: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # dozens of fits, none of which must survive a power cut
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_over_texts_sklearn_skips_its_checks_and_the_documented_exceptions_exist() -> None:
    with pytest.warns(SkipTestWarning, match="Can't test estimator BudgetFormerClassifier"):
        assert [result["status"] for result in check_estimator(quick(), on_skip=None)] == ["passed"]
    names = {getattr(check, "func", check).__name__ for _, check in estimator_checks_generator(OVER_NUMBERS)}
    assert expected_failures().keys() <= names

"""One file through every way to an answer: predict, serve, eval, explain, run.predict, the estimator, transformers'
pipeline and the ONNX engine give the same answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import pipeline

import budgetformer
from budgetformer import BudgetFormerClassifier
from budgetformer.data.locate import DataSource
from budgetformer.engine.answers import named
from tests.processes import command


def lengthened(*texts: str) -> list[tuple[str, ...]]:
    """Each text by itself and repeated, up to more than the models read."""
    return [(" ".join([text] * times),) for text in texts for times in (1, 4, 15)]


TEXTS = {
    "tiny_run": lengthened("a superb story of a town", "a dull film", "the worst script", "town"),
    "tiny_pairs": [
        ("red box 1", "red"),
        ("red box 2", "blue"),
        ("box " * 40, "red " * 40),
        ("box", "a box that is red"),
    ],
    "tiny_multi": lengthened("w1 x 3", "w2 x", "w3 x 12 x x x x"),
    "tiny_regression": lengthened("w1 x 3", "w2 x", "w3 x 12 x x x x"),
    "tiny_staged": lengthened("a superb story of a town", "dull film, great people", "the worst script"),
    "tiny_base": lengthened("a superb story of a town", "the worst script"),
}
CLOSE = 2e-6  # answers are rounded to six decimals, and the last bits of a sum depend on the batch


class Answer(dict[str, float]):
    """Every label's probability (or the value under ""), and what was answered."""

    def __init__(self, answer: Any, probabilities: dict[str, float]) -> None:
        super().__init__(probabilities)
        self.answer = answer


def same(answers: list[Answer], expected: list[Answer], tolerance: float = CLOSE) -> None:
    assert len(answers) == len(expected)
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)
        if isinstance(theirs.answer, float):
            assert ours.answer == pytest.approx(theirs.answer, abs=max(tolerance, 1e-4))
        elif isinstance(theirs.answer, list):
            assert set(ours.answer) == set(theirs.answer)
        else:
            assert ours.answer == theirs.answer


def of_row(row: dict[str, Any], labels: list[str]) -> Answer:
    """An answer from the columns that predict writes."""
    if not labels:
        return Answer(row["score"], {"": row["score"]})
    return Answer(row["label"], {label: row[f"p_{label}"] for label in labels})


@pytest.fixture(params=list(TEXTS))
def case(request: pytest.FixtureRequest) -> tuple[Path, list[tuple[str, ...]]]:
    return request.getfixturevalue(request.param), TEXTS[request.param]


def write(path: Path, texts: list[tuple[str, ...]], **more: list[Any]) -> Path:
    names = ("premise", "hypothesis") if len(texts[0]) == 2 else ("text",)
    rows = [dict(zip(names, text, strict=True)) for text in texts]
    for name, values in more.items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def predicted(
    run: Path, texts: list[tuple[str, ...]], labels: list[str], folder: Path, name: str, *more: str
) -> list[Answer]:
    data, output = folder / "texts.jsonl", folder / f"{name}.jsonl"
    columns = () if len(texts[0]) == 2 else ("--text", "text")
    wide = ("--probabilities",) if labels else ()
    assert command("predict", run, write(data, texts), "-o", output, *wide, *columns, *more) == 0
    return [of_row(json.loads(line), labels) for line in output.read_text(encoding="utf-8").splitlines()]


def test_every_way_gives_the_same_answers(
    case: tuple[Path, list[tuple[str, ...]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = case
    run = budgetformer.load(folder)
    labels, pairs = run.labels, len(texts[0]) == 2
    expected = predicted(folder, texts, labels, tmp_path, "torch")

    seconds = [text[1] for text in texts] if pairs else None
    answers = run.predict([text[0] for text in texts], seconds)
    values = [{"": v} for v in answers.labels] if not labels else [
        dict(zip(labels, row, strict=True)) for row in answers.probabilities.tolist()
    ]  # fmt: skip
    same([Answer(a, v) for a, v in zip(answers.labels, values, strict=True)], expected)

    same(asyncio.run(served(folder, texts, labels)), expected)
    same([explained(folder, text, labels, capsys) for text in texts], expected)
    # A pipeline passes on what layers read; the stage of words would read more of a text that is cut.
    read = [i for i, cut in enumerate(answers.truncated) if not (cut and run.config.exits)]
    pick = [expected[i] for i in read]
    same(piped(folder, [texts[i] for i in read], run.task, labels, pick), pick)
    evaluated(run, texts, expected, tmp_path)
    if run.task == "single_label_classification":
        estimator = BudgetFormerClassifier.load(folder)
        X = [list(text) for text in texts] if pairs else [text[0] for text in texts]
        rows = zip(estimator.predict(X), estimator.predict_proba(X), strict=True)
        same([Answer(str(a), dict(zip(map(str, estimator.classes_), p, strict=True))) for a, p in rows], expected)
    assert command("export", folder, "-o", tmp_path / "onnx") == 0
    same(predicted(tmp_path / "onnx", texts, labels, tmp_path, "onnx"), expected, 1e-4)
    same(asyncio.run(served(tmp_path / "onnx", texts, labels)), expected, 1e-4)
    exported = budgetformer.load(tmp_path / "onnx").predict([text[0] for text in texts], seconds)
    assert exported.exits == answers.exits
    assert exported.labels == answers.labels or not labels


async def served(folder: Path, texts: list[tuple[str, ...]], labels: list[str]) -> list[Answer]:
    from budgetformer.serving.server import build
    from budgetformer.serving.settings import Settings
    from tests.serving.toy import running

    async with running(build(Settings(folder))) as client:
        body = {"pairs": [list(t) for t in texts]} if len(texts[0]) == 2 else {"texts": [t[0] for t in texts]}
        status, answer = await client.json("/predict", body)
    assert status == 200
    if not labels:
        return [Answer(p["value"], {"": p["value"]}) for p in answer["predictions"]]
    return [Answer(p["label"] if "label" in p else p["labels"], p["probabilities"]) for p in answer["predictions"]]


def explained(folder: Path, text: tuple[str, ...], labels: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    capsys.readouterr()
    second = ("--text-pair", text[1]) if len(text) == 2 else ()
    assert command("explain", folder, "--text", text[0], *second, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    return Answer(result["label"], result["probabilities"] if labels else {"": result["label"]})


def piped(
    folder: Path, texts: list[tuple[str, ...]], task: str, labels: list[str], expected: list[Answer]
) -> list[Answer]:
    """Hugging Face's own pipeline, which reads the run as any model; it chooses no labels of several."""
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    function = {"regression": "none", "multi_label_classification": "sigmoid"}.get(task, "softmax")
    length = budgetformer.load(folder).max_length
    answers = []
    for text, answer in zip(texts, expected, strict=True):
        inputs: Any = {"text": text[0], "text_pair": text[1]} if len(text) == 2 else text[0]
        scores = classify(inputs, top_k=None, function_to_apply=function, truncation=True, max_length=length)
        if not labels:
            answers.append(Answer(scores[0]["score"], {"": scores[0]["score"]}))
            continue
        chances = {score["label"]: score["score"] for score in scores}
        chosen = answer.answer if task.startswith("multi") else max(chances, key=chances.__getitem__)
        answers.append(Answer(chosen, chances))
    return answers


def evaluated(run: budgetformer.Run, texts: list[tuple[str, ...]], expected: list[Answer], folder: Path) -> None:
    """Labelled with what was predicted, a file is answered without a mistake."""
    data = write(folder / "labelled.jsonl", texts, label=[answer.answer for answer in expected])
    result = run.evaluate(DataSource(str(data), label="label"))["evaluations"][0]
    if run.task == "regression":
        assert result["quality"]["mse"]["value"] == pytest.approx(0, abs=1e-9)
    else:
        assert result["score"] == 1.0
    assert result["rows"] == len(texts)


def test_a_label_at_exactly_one_half_is_not_answered() -> None:
    half = np.array([[0.5, np.nextafter(np.float32(0.5), np.float32(1))]], np.float32)
    assert named(half, "multi_label_classification", ["a", "b"]) == [["b"]]

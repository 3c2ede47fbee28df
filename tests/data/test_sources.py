"""Files are read as they were written, and every row knows its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetformer.data.dataset import open_data
from budgetformer.data.locate import DataSource
from budgetformer.data.sources import BadRow, RawRow, read_rows

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
ROWS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8)
DATA = b"text,label\n" + b"".join(b"row %d,%d\n" % (i, i % 2) for i in range(30))


def good(path: Path, **options: str) -> list[RawRow]:
    rows = list(read_rows(path, **options))
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row for row in rows if isinstance(row, RawRow)]


@given(rows=ROWS, delimiter=st.sampled_from(",\t;"), newline=st.sampled_from(["\n", "\r\n"]))
def test_delimited_files_round_trip_with_their_line_numbers(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], delimiter: str, newline: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "data"
    lines, out = [], io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writerow(["text", "label"])
    for row in rows:
        lines.append(out.getvalue().count("\n") + 1)
        writer.writerow(row)
    path.write_bytes(out.getvalue().encode())
    read = good(path)
    assert [tuple(row.fields.values()) for row in read] == rows
    assert [row.line for row in read] == lines


@given(rows=ROWS)
def test_json_lines_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.mktemp("json") / "data.jsonl"
    path.write_bytes("\n\n".join(json.dumps({"text": a, "b": b}, ensure_ascii=False) for a, b in rows).encode())
    read = good(path)
    assert [(row.fields["text"], row.fields["b"]) for row in read] == rows
    assert [row.line for row in read] == list(range(1, 2 * len(rows), 2))


@pytest.mark.parametrize("name", ["d.csv", "d.csv.gz", "d.csv.xz", "d", "misnamed.gz"])
def test_compression_is_seen_whatever_the_name(name: str, tmp_path: Path) -> None:
    content = {"gz": gzip.compress, "xz": lzma.compress}.get(name.rpartition(".")[2], bytes)(DATA)
    (tmp_path / name).write_bytes(DATA if name == "misnamed.gz" else content)
    assert [row.fields for row in good(tmp_path / name)][:2] == [
        {"text": "row 0", "label": "0"},
        {"text": "row 1", "label": "1"},
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252"])
@pytest.mark.parametrize("name", ["d.csv", "d.jsonl"])
def test_encodings_and_byte_order_marks(encoding: str, name: str, tmp_path: Path) -> None:
    text = 'text,label\n"né\nà",ü\n' if name == "d.csv" else '{"text": "né\\nà", "label": "ü"}\n'
    (tmp_path / name).write_bytes(text.encode(encoding))
    (row,) = good(tmp_path / name, encoding=encoding)
    assert row.fields == {"text": "né\nà", "label": "ü"}


def test_a_mark_is_dropped_though_nobody_said_so(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"\xef\xbb\xbf" + DATA)
    assert list(good(tmp_path / "d.csv")[0].fields) == ["text", "label"]


def test_loose_quotes_in_tab_separated_text_are_just_quotes(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text('text\tlabel\n"So it goes\ta\n5" wide\tb\n')
    assert [row.fields["text"] for row in good(tmp_path / "d.tsv")] == ['"So it goes', '5" wide']


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp500"])
def test_quotes_of_tab_separated_text_are_judged_in_its_own_encoding(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_bytes('text\tlabel\n"So it goes\ta\nplain\tb\n'.encode(encoding))
    assert [row.fields["text"] for row in good(tmp_path / "d.tsv", encoding=encoding)] == ['"So it goes', "plain"]


def test_quoted_tab_separated_text_is_unquoted(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text('text\tlabel\n"a ""b""\tc"\tx\nplain\ty\n')
    assert [row.fields["text"] for row in good(tmp_path / "d.tsv")] == ['a "b"\tc', "plain"]


def test_a_field_may_be_longer_than_the_csv_module_likes(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "d.csv").write_text(f"text,label\n{'x' * 300_000},a\n")
    assert len(good(tmp_path / "d.csv")[0].fields["text"]) == 300_000
    assert csv.field_size_limit() == before


def test_reading_goes_on_after_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b"text,label\na,b\nc\n\xff,d\ne,f\n")
    rows = list(read_rows(tmp_path / "d.csv"))
    assert [(row.line, getattr(row, "kind", "")) for row in rows] == [
        (2, ""),
        (3, "wrong number of fields"),
        (4, "wrong encoding"),
        (5, ""),
    ]


def test_a_bad_row_of_several_lines_is_known_by_its_first(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('text,label\n"a\nb\nc"\nd,e\n')
    assert [row.line for row in read_rows(tmp_path / "d.csv")] == [2, 5]


def test_parquet_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [f"t{i}" for i in range(3000)], "label": [[1, 2]] * 3000}), tmp_path / "d.parquet")
    rows = good(tmp_path / "d.parquet")
    assert len(rows) == 3000
    assert rows[2500] == RawRow(str(tmp_path / "d.parquet"), 2501, {"text": "t2500", "label": [1, 2]})


@pytest.mark.parametrize("content", [DATA, gzip.compress(DATA), DATA.replace(b",", b"\t")])
def test_standard_input_is_spooled_and_read_twice(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    data = open_data(DataSource("-"))
    assert sum(split.rows for split in data.splits.values()) == 30
    train = data.splits["train"]
    assert list(train.examples()) == list(train.examples())
    assert next(train.examples()).file == "standard input"

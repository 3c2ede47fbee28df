"""The reproduction's documents: every number, safe with any text, the same for the same JSON."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from budgetformer.errors import DataError
from budgetformer_reproduction.render import read, write
from budgetformer_reproduction.schema import IDS, VERDICTS, Result

EVIL = r"<b>50% & $x_i$ #1 {a} ~ ^ \n | [y] *z* `q` -- 中 “w”"
PROVENANCE = {
    "commit": "0123abc", "version": "0.1.0", "machine": "two cores of a made-up CPU", "threads": 2, "torch": "2.13.0",
    "python": "3.11.9", "seeds": [0, 1], "data": {"snli": "sha256:0123456789abcdef0123"}, "cells": 12,
    "seconds": 345.6,
}  # fmt: skip


def result(name: str, **parts: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"summary": "", "tables": [], "figures": [], "claims": []}
    made = copy.deepcopy(PROVENANCE)
    return {"id": name, "title": f"About {name}", "scale": "cpu", "provenance": made, **empty, **parts}


def main() -> dict[str, Any]:
    rows = []
    for n, (name, dense, ours) in enumerate([("snli", 0.7835, 0.7786), ("ag_news", 0.9125, 0.9196)]):
        rows.append(
            {
                "dataset": name,
                "dense": {
                    "mean": 0.61 + n / 10,
                    "low": 0.6 + n / 10,
                    "high": 0.62 + n / 10,
                    "n": 2,
                    "published": dense,
                },
                "ours": {"mean": ours + 0.0004, "n": 1, "published": ours},
                "flops": {"mean": 1.2345e12, "published": 1.5e12, "unit": "FLOPs"},
                "k": {"mean": None, "published": "not given"} if n else None,
                "size": 4743812,
                "kind": "counted",
            }
        )
    columns: list[dict[str, Any]] = [
        {"key": "dataset", "title": "Data set"}, {"key": "dense", "title": "Transformer accuracy", "digits": 4},
        {"key": "ours", "title": "BudgetFormer accuracy", "digits": 4}, {"key": "flops", "title": "FLOPs"},
        {"key": "k", "title": "k/H", "digits": 3}, {"key": "size", "title": "Parameters"},
        {"key": "kind", "title": "Source"},
    ]  # fmt: skip
    table = {"name": "main", "title": "Accuracy and cost", "note": "FLOPs are counted.", "columns": columns}
    claims = [
        {"claim": "Accuracy is kept", "verdict": "holds", "evidence": "0.779 against 0.778.", "explanation": ""},
        {"claim": "s falls in training", "verdict": "does not hold", "evidence": "On SNLI s rose to 0.31.",
         "explanation": "The budget penalty is too weak at this learning rate to pull s into its interval."},
        {"claim": "Hard texts use more heads", "verdict": "not tested", "evidence": "", "explanation": ""},
    ]  # fmt: skip
    summary = "BudgetFormer keeps the accuracy of its dense twin on both data sets while running a fifth of its heads."
    return result("main", summary=summary, tables=[{**table, "rows": rows}], claims=claims)


def wave(n: int, shift: float) -> list[float]:
    return [round(0.5 + 0.3 * math.sin(i / 2 + shift) / (1 + i / 4), 4) for i in range(n)]


def lines() -> dict[str, Any]:
    def series(name: str, shift: float, *, band: bool = False) -> dict[str, Any]:
        y = wave(10, shift)
        around = {"low": [v - 0.03 for v in y], "high": [v + 0.03 for v in y]} if band else {}
        return {"name": name, "x": list(range(1, 11)), "y": y, **around}

    left = [series("s, train", 0, band=True), series("s, validation", 0.5, band=True)]
    right = [series("accuracy, validation", 2)]
    right[0]["y"][3] = None
    return {"name": "snli", "kind": "lines", "title": "SNLI: budget and accuracy by epoch", "x_title": "epoch",
            "y_title": "mean budget s", "series": left, "y2": right, "y2_title": "accuracy"}  # fmt: skip


def boxes() -> dict[str, Any]:
    def groups(lift: float) -> list[dict[str, Any]]:
        q = [[0.05, 0.1, 0.14, 0.2, 0.31], [0.08, 0.14, 0.19, 0.25, 0.36], [0.1, 0.17, 0.24, 0.3, 0.44]]
        names = ("Simple", "Hard", "Very hard")
        groups: list[dict[str, Any]] = [
            {"name": name, "n": 3210, "mean": five[2] + 0.02 + lift, "q": [v + lift for v in five]}
            for name, five in zip(names, q, strict=True)
        ]
        return [*groups, {"name": "Unknown", "n": 0, "mean": None, "q": None}]

    panels = [{"title": f"layer {n + 1}", "groups": groups(0.05 * n)} for n in range(4)]
    return {"name": "budget", "kind": "boxes", "title": "Budget by complexity", "y_title": "budget s", "panels": panels}


def heatmap(columns: int = 3) -> dict[str, Any]:
    names = [f"label {n}" for n in range(columns)] if columns > 3 else ["entailment", "neutral", "contradiction"]
    rows = [f"layer {n + 1}" for n in range(4)]
    values: list[list[float | None]] = [[0.1 + 0.8 * abs(v) for v in wave(columns, n)] for n in range(4)]
    values[1][1] = None
    panels = [{"title": t, "rows": rows, "columns": names, "values": values} for t in ("mean s", "std s", "entropy")]
    return {"name": f"labels{columns}", "kind": "heatmap", "title": "Budget by layer and label", "panels": panels}


def attention(
    panels: int = 4, words: str = "[CLS] a man plays the guitar . [SEP] nobody sings [SEP]"
) -> dict[str, Any]:
    tokens = words.split()
    size = len(tokens)
    weights = [[math.exp(-abs(i - j)) for j in range(size)] for i in range(size)]
    values = [[v / sum(row) for v in row] for row in weights]
    shown = [
        {"title": f"layer {n // 4 + 1} head {n % 8} (w {1.9 - n / 10:.1f})", "query_tokens": tokens,
         "key_tokens": tokens, "values": values}
        for n in range(panels)
    ]  # fmt: skip
    return {"name": f"maps{panels}", "kind": "attention", "title": "The heads that ran", "panels": shown}


def results(data: list[dict[str, Any]]) -> list[Result]:
    return [Result.model_validate(one) for one in data]


LONG = "[CLS] two women who just had lunch hug ##ging and say ##ing goodbye [SEP] women are fighting at a deli [SEP]"


def sample() -> list[dict[str, Any]]:
    """Every kind of table cell and figure, out of order."""
    many = [{**boxes(), "name": "plain", "panels": boxes()["panels"][:1]}]
    sizes = {"name": "accuracy", "kind": "lines", "title": "Accuracy by model size", "x_title": "model",
             "y_title": "accuracy", "series": [{"name": "a", "x": ["4L-8H", "12L-12H"], "y": [0.7, 0.71]}]}  # fmt: skip
    return [
        result("attention-maps", figures=[attention(), attention(16, LONG)]),
        result("heatmaps", figures=[heatmap(), heatmap(14)]),
        result("complexity", figures=[boxes(), *many]),
        result("dynamics", figures=[lines()]),
        result("model-scale", figures=[sizes]),
        main(),
    ]


class Words(HTMLParser):
    """The visible words, the tags and ids, and whether every tag that opens also closes."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        self.close()
        self.text = " ".join(" ".join(self.words).split())
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [str(v) for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("reproduction")
    assert sorted(write(results(sample()), target)) == sorted(p for p in target.rglob("*") if p.is_file())
    return target


def text(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def test_every_artefact_is_written(folder: Path) -> None:
    for name in (
        "results/main.json",
        "figures/dynamics-snli.svg",
        *(f"reproduction.{e}" for e in ("md", "tex", "html")),
    ):
        assert (folder / name).is_file()
    figures = list((folder / "figures").iterdir())
    assert len(figures) == 8
    for figure in figures:
        assert figure.stat().st_size < 200_000
        drawing = ET.fromstring(figure.read_text(encoding="utf-8"))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert "currentColor" not in text(figure.parent, figure.name)


def test_results_come_back_in_the_papers_order(folder: Path) -> None:
    back = read(folder)
    assert [r.id for r in back] == [i for i in IDS if i in {r["id"] for r in sample()}]
    assert [json.loads(r.to_json()) for r in back] == sorted(sample(), key=lambda r: IDS.index(r["id"]))
    assert read(folder / "nowhere") == []


NUMBERS = (
    "0.6100 ± 0.0100 (n=2)", "paper 0.7835 (−0.1735)", "0.7790 (n=1)", "paper 0.7786 (+0.0004)", "1.23e12 FLOPs",
    "paper 1.50e12 (−2.66e11)", "4,743,812", "paper not given", "A dash (–) marks", "FLOPs are counted.",
    "two cores of a made-up CPU", "0123abc", "compare directions, not digits", "12 training runs; seeds 0, 1; 6 min",
    "s rose to 0.31.", "does not hold", "The budget penalty is too weak", "holds: 1",
)  # fmt: skip


def test_markdown_says_everything(folder: Path) -> None:
    page = text(folder, "reproduction.md")
    for words in NUMBERS:
        assert words in page
    assert "| snli | 0.6100 ± 0.0100 (n=2)<br>paper 0.7835 (−0.1735) |" in page
    assert page.index("## Claims") < page.index("## About main") < page.index("- Scale: cpu")
    assert "| – | 4,743,812 | counted |" in page
    assert re.search(r"^- Command: budgetformer reproduce main\S* --scale cpu --seeds 2$", page, flags=re.MULTILINE)
    for linked in re.findall(r"\]\((figures/[^)]*)\)", page):
        assert (folder / linked).is_file()
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert "\n\n\n" not in page
    assert not re.findall(r"^[^|\n].*\n\|", page, flags=re.MULTILINE)  # a table is one only below an empty line


def test_verdicts_of_another_scale_stand_beside(tmp_path: Path) -> None:
    results = [Result.model_validate(r) for r in sample()]
    assert "(smoke: " not in text(write(results, tmp_path)[0].parents[1], "reproduction.md")
    (tmp_path / "smoke" / "results").mkdir(parents=True)
    verdicts = {}
    for file in (tmp_path / "results").glob("*.json"):
        small = json.loads(file.read_text()) | {"scale": "smoke"}
        for claim in small["claims"]:
            verdicts[claim["claim"]] = claim["verdict"] = VERDICTS[len(verdicts) % len(VERDICTS)]
        (tmp_path / "smoke" / "results" / file.name).write_text(json.dumps(small))
    assert len(set(verdicts.values())) > 1
    write(read(tmp_path), tmp_path)  # as it is rendered again
    page = text(tmp_path, "reproduction.md")
    assert "In brackets: the verdict at the scale [smoke](smoke/reproduction.md).\n\n| Claim |" in page
    for result in results:
        for made in result.claims:
            line = next(line for line in page.splitlines() if line.startswith(f"| {made.claim} |"))
            assert f"**{made.verdict}** (smoke: {verdicts[made.claim]})" in line
    for name in ("reproduction.html", "reproduction.tex"):
        assert text(tmp_path, name).count("(smoke: ") == len(verdicts)


def test_html_says_everything_and_needs_nothing_but_itself(folder: Path) -> None:
    page = text(folder, "reproduction.html")
    words = Words(page)
    for number in NUMBERS[:-1]:
        assert number in words.text
    assert page.count("<svg") == 8
    assert len(words.ids) == len(set(words.ids))
    assert '<span class="chip does-not-hold">does not hold</span>' in page
    bare = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert re.findall(r"https?://", bare) == []
    assert re.findall(r"(?:href|src)=\"(?!#|data:)", bare) == []
    assert re.findall(r"<script|<iframe|<img|@import", bare) == []


def balanced(page: str) -> None:
    """Braces close, environments nest, and each row of a table has as many cells as its columns."""
    bare = re.sub(r"\\[\\{}%&]|(?<!\\)%.*", "", page)
    depth = 0
    for c in bare:
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    stack: list[str] = []
    body = page[page.index(r"\begin{document}") :]
    for word, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if word == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    for align, rows in re.findall(
        r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}(.*?)\\end\{tabular\}", body, flags=re.DOTALL
    ):
        for line in re.findall(r"(.*) \\\\\n", rows):
            assert len(re.findall(r"(?<!\\)&", line)) == len(align) - 1


def test_latex_says_everything(folder: Path) -> None:
    page = text(folder, "reproduction.tex")
    for words in NUMBERS:
        assert words.replace("±", r"$\pm$").replace("−", "$-$").replace("–", "--") in page
    assert r"\both{0.6100 $\pm$ 0.0100 (n=2)}{paper 0.7835 ($-$0.1735)}" in page
    assert page.isascii()
    balanced(page)


def hostile() -> list[dict[str, Any]]:
    """Every free text of a result, made of what the three formats treat specially."""
    evil = main() | {"title": EVIL, "summary": EVIL}
    evil["provenance"] |= {"machine": EVIL, "data": {EVIL: EVIL}}
    evil["claims"][0] |= {"claim": EVIL, "evidence": EVIL, "explanation": EVIL}
    table = evil["tables"][0]
    table |= {"title": EVIL, "note": EVIL}
    table["columns"][0]["title"] = EVIL
    table["rows"][0]["dataset"] = EVIL
    table["rows"][0]["k"] = {"mean": 1.5, "published": EVIL, "unit": EVIL}
    drawn = [lines(), boxes(), heatmap(), attention(1)]
    drawn[0]["series"][0]["name"] = drawn[0]["x_title"] = drawn[1]["y_title"] = EVIL + "\x00\x1b"
    drawn[1]["panels"][0]["groups"][0]["name"] = drawn[2]["panels"][0]["rows"][0] = EVIL
    drawn[3]["panels"][0]["query_tokens"][0] = "$\\frac{"
    evil["figures"] = [figure | {"title": EVIL + '"onload="x\x00'} for figure in drawn]
    return [evil]


def test_any_text_stays_text(tmp_path: Path) -> None:
    for path in write(results(hostile()), tmp_path):
        if path.suffix == ".svg":
            ET.fromstring(path.read_text(encoding="utf-8"))
    page = Words(text(tmp_path, "reproduction.html"))
    assert "b" not in page.tags
    assert EVIL in page.text
    markdown = text(tmp_path, "reproduction.md")
    assert r"&lt;b&gt;50% &amp; &#36;x_i&#36; #1 {a} \~ ^ \\n \| \[y\] \*z\* \`q\` -- 中" in markdown
    assert re.findall(r"<(?!br>|a id=|/a>)", markdown) == []
    latex = text(tmp_path, "reproduction.tex")
    assert (
        r"\textless{}b\textgreater{}50\% \& \$x\_i\$ \#1 \{a\} \textasciitilde{} \textasciicircum{} \textbackslash{}n "
        r"\textbar{} {[}y{]} {*}z{*} \textasciigrave{}q\textasciigrave{} -{}- {[}U+4E2D{]} ``w''"
    ) in latex
    balanced(latex)


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
@pytest.mark.parametrize("make", [sample, hostile])
def test_latex_compiles(tmp_path: Path, make: Any) -> None:
    write(results(make()), tmp_path)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "reproduction.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("cell", "digits", "ours", "paper"),
    [
        (None, 4, "–", ""),
        ({"mean": None, "n": 0, "published": 0.5}, 4, "–", "paper 0.5000"),
        ({"mean": 0.5, "low": None, "high": None, "n": 1}, 3, "0.500 (n=1)", ""),
        ({"mean": 1, "low": 0.98, "high": 1.0}, 2, "1.00 ± 0.01", ""),
        ({"mean": 12.0, "unit": "s", "n": 3, "published": None}, 1, "12.0 s (n=3)", ""),
        (51794691, None, "51,794,691", ""),
        (0.00001234, None, "1.234e-5", ""),
        (2.5e10, 4, "2.50e10", ""),
        (12345.6, None, "12,346", ""),
        (-0.25, 2, "−0.25", ""),
        ("not run", 4, "not run", ""),
    ],
)
def test_cells_read_well(tmp_path: Path, cell: Any, digits: int | None, ours: str, paper: str) -> None:
    column = {"key": "x", "title": "X"} | ({} if digits is None else {"digits": digits})
    table = {"title": "T", "note": "", "columns": [{"key": "a", "title": "A"}, column], "rows": [{"a": "r", "x": cell}]}
    write(results([result("sizes", tables=[table])]), tmp_path)
    below = f"<br>{paper}" if paper else ""
    assert f"| r | {ours}{below} |" in text(tmp_path, "reproduction.md")


def drawn_lines(folder: Path, *series: dict[str, Any]) -> str:
    """The figure of these lines as SVG."""
    figure = {"name": "s", "kind": "lines", "title": "s", "x_title": "", "y_title": "", "series": [*series]}
    write([Result(**result("dynamics", figures=[figure]))], folder)
    return (folder / "figures" / "dynamics-s.svg").read_text(encoding="utf-8")


def test_a_line_of_many_points_has_no_markers(tmp_path: Path) -> None:
    def markers(points: int) -> int:
        line = {"name": "s", "x": list(range(points)), "y": wave(points, 0)}
        return drawn_lines(tmp_path, line).count("<use ")

    assert markers(30) - markers(10) > 15  # the axes' ticks are few
    assert markers(31) < markers(10)


def test_many_lines_differ_in_colour_and_leave_the_axes_as_high(tmp_path: Path) -> None:
    def drawn(count: int) -> tuple[float, set[str]]:
        names = [f"Transformer, width {n}" for n in range(count)]
        svg = drawn_lines(tmp_path, *({"name": name, "x": [1, 2], "y": wave(2, 0)} for name in names))
        paper, axes = re.findall(r'<path d="M \S+ (\S+) \nL \S+ \S+ \nL \S+ (\S+) ', svg)[:2]
        assert float(paper[0]) > float(axes[0])
        return float(axes[0]) - float(axes[1]), set(re.findall(r"stroke: (#\w+); stroke-width: 1.7", svg))

    (high, colours), (usual, _) = drawn(8), drawn(4)
    assert high == pytest.approx(usual, rel=0.1)
    assert len(colours) == 8


def test_a_single_point_shows_its_interval(tmp_path: Path) -> None:
    point = {"name": "s", "x": [100], "y": [0.5]}
    strokes = [drawn_lines(tmp_path, {**point, **more}).count("stroke: #3b82d0")
               for more in ({}, {"low": [0.4], "high": [0.6]})]  # fmt: skip
    assert strokes[1] == strokes[0] + 1


def test_nothing_at_all_still_gives_pages(tmp_path: Path) -> None:
    assert len(write([], tmp_path)) == 3
    balanced(text(tmp_path, "reproduction.tex"))
    empty = [{**lines(), "series": [], "y2": []}, {**boxes(), "panels": []}, {**heatmap(), "panels": []}]
    bare = result("sizes", provenance={}, figures=[*empty, attention(0)], tables=[{**main()["tables"][0], "rows": []}])
    write(results([bare]), tmp_path)
    Words(text(tmp_path, "reproduction.html"))


def test_the_same_results_give_the_same_bytes(tmp_path: Path, folder: Path) -> None:
    code = (
        "import sys, pathlib; from budgetformer_reproduction.render import read, write; "
        "write(read(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path)], check=True)
    for path in folder.rglob("*.*"):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: r.pop("claims"), "field claims must be there"),
        (lambda r: r.update(id="maine"), "field id must be 'main', 'fixed'"),
        (
            lambda r: r["tables"][0]["rows"][1]["dense"].update(mean="0.6"),
            "tables[0].rows[1].dense.mean must be a finite",
        ),
        (
            lambda r: r["tables"][0]["rows"][0].update(flops=True),
            "tables[0].rows[0].flops must be text, a finite number",
        ),
        (lambda r: r["tables"][0]["columns"][0].pop("title"), "tables[0].columns[0].title must be there"),
        (lambda r: r["claims"][0].update(verdict="maybe"), "claims[0].verdict must be 'holds', 'does not hold' or"),
        (
            lambda r: r["figures"][0]["series"][0]["y"].pop(),
            "figures[0].series[0].y must be 10 numbers, as many as x, not [",
        ),
        (lambda r: r["figures"][0].update(kind="pie"), "figures[0] Input tag 'pie' found using 'kind' does not match"),
        (lambda r: r["figures"][0].update(name="../x"), "figures[0].name must match pattern"),
        (
            lambda r: r["figures"].append(r["figures"][0]),
            "figures must have a name of its own for each figure: snli is there twice",
        ),
        (
            lambda r: r["figures"][1]["panels"][0]["groups"][0].update(q=[1, 2]),
            "groups[0].q must have at least 5 items",
        ),
        (lambda r: r["figures"][1].pop("panels"), "figures[1].panels must be there"),
        (lambda r: r["figures"][2]["panels"][0]["values"].pop(), "panels[0].values must be 4 rows of 3 numbers"),
        (lambda r: r["figures"][3].update(panels=None), "figures[3].panels must be a valid list, not None"),
        (lambda r: r["provenance"].update(seeds=0), "provenance.seeds must be a valid list, not 0"),
    ],
)
def test_a_malformed_field_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    spoilt = main() | {"figures": [lines(), boxes(), heatmap(), attention(1)]}
    spoil(spoilt)
    file = tmp_path / "results" / "main.json"
    file.parent.mkdir()
    file.write_text(json.dumps(spoilt), encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(str(file)) + ".*" + re.escape(words)):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("main", "{", "is not readable JSON"),
        ("main", "\udcff", "is not readable JSON"),
        ("main", "[1]", "the file must be a valid dictionary"),
        ("main", json.dumps(result("fixed")), "the file must be called fixed.json"),
        ("main", json.dumps(result("main", tables=[float("nan")])), "tables[0] must be a valid dictionary"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / "results" / f"{name}.json"
    file.parent.mkdir()
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=re.escape(str(file)) + ".*" + re.escape(words)) as caught:
        read(tmp_path)
    assert caught.value.exit_code == 3


def test_one_result_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'main' is given twice"):
        write(results([main(), main()]), tmp_path)

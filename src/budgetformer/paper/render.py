"""Results as JSON -> Markdown, LaTeX and one HTML page, with the figures. Nothing here touches a model or the data."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from budgetformer.errors import DataError
from budgetformer.paper.render_checks import IDS, VERDICTS, check
from budgetformer.report.numbers import DASH, format_seconds, format_value
from budgetformer.runs.files import write_text

_HERE = Path(__file__).parent
_READING = (
    "A cell is the mean over n seeds ± half its 95 % interval (one seed: the interval of the accuracy on its test "
    "rows). Below it stand the paper's number and, in brackets, ours minus the paper's."
)
_DASHED = f"A dash ({DASH}) marks a value that was not measured or does not apply."
_SCALES = {
    "smoke": "This is the smoke scale: it shows that every step runs, and its numbers mean nothing.",
    "cpu": "This is the CPU scale: models and data are smaller than the paper's, so compare directions, not digits. "
    "Explanations were tried on the runs that the project publishes.",
}


@dataclass(frozen=True)
class Entry:
    """A table's cell as people read it: our value, and under it the paper's."""

    ours: str
    paper: str = ""


def read(folder: Path) -> list[dict[str, Any]]:
    """The results in FOLDER/results/*.json, checked, in the paper's order."""
    found = []
    for file in sorted((folder / "results").glob("*.json")):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} is not readable JSON ({error}): delete it and reproduce again") from error
        check(result, str(file))
        if result["id"] != file.stem:
            raise DataError(f"{file}: field id is {result['id']!r}: the file must be called {result['id']}.json")
        found.append(result)
    return sorted(found, key=lambda result: IDS.index(result["id"]))


def write(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the JSON, the figures and the three documents into FOLDER; return every path written.

    The same results give the same bytes. Each file is replaced all at once.
    """
    for n, result in enumerate(results):
        check(result, f"results[{n}]")
    twice = [name for name, count in Counter(result["id"] for result in results).items() if count > 1]
    if twice:
        raise DataError(f"field id: {twice[0]!r} is given twice: one result an experiment")
    results = sorted(results, key=lambda result: IDS.index(result["id"]))

    from budgetformer.paper.render_figures import draw, key, standalone  # matplotlib is heavy

    files: dict[str, str] = {}
    experiments = []
    for result in results:
        files[f"results/{result['id']}.json"] = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        figures = []
        for figure in result["figures"]:
            name = f"{result['id']}-{figure['name']}"
            svg = draw(figure, name)
            files[f"figures/{name}.svg"] = standalone(svg)
            words = {"title": figure["title"], "key": key(figure), "file": f"figures/{name}.svg"}
            figures.append({**words, "svg": svg, "wide": _wide(svg)})
        experiments.append(_experiment(result, figures))
    files |= _documents(results, experiments)

    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
    return [folder / name for name in files]


def _wide(svg: str) -> bool:
    """Whether a phone should scroll the drawing sideways instead of shrinking it."""
    width = re.search(r'width="([0-9.]+)pt"', svg)
    return width is not None and float(width[1]) > 500


def _experiment(result: Mapping[str, Any], figures: list[dict[str, Any]]) -> dict[str, Any]:
    made = result["provenance"]
    parts = [f"{made['cells']} training runs"] if "cells" in made else []
    parts += [f"seeds {format_value(made['seeds'])}"] if made.get("seeds") else []
    parts += [format_seconds(made["seconds"])] if made.get("seconds") is not None else []
    head = {key: result[key] for key in ("id", "title", "summary")}
    return {**head, "tables": [_table(t) for t in result["tables"]], "figures": figures, "made": "; ".join(parts)}


def _table(table: Mapping[str, Any]) -> dict[str, Any]:
    columns = table["columns"]
    rows = [[_entry(row.get(c["key"]), c.get("digits")) for c in columns] for row in table["rows"]]
    words = [all(isinstance(row.get(c["key"]), str | None) for row in table["rows"]) for c in columns]
    notes = [table["note"]] if table["note"] else []
    notes += [_DASHED] if any(DASH in (entry.ours, entry.paper) for row in rows for entry in row) else []
    return {
        "title": table["title"], "note": " ".join(notes), "head": [c["title"] for c in columns],
        "align": "".join("l" if word else "r" for word in words), "rows": rows,
    }  # fmt: skip


def _entry(cell: Any, digits: int | None) -> Entry:
    if not isinstance(cell, Mapping):
        return Entry(cell if isinstance(cell, str) else _number(cell, digits))
    mean, low, high, published = (cell.get(key) for key in ("mean", "low", "high", "published"))
    ours = _number(mean, digits)
    if mean is not None:
        ours += f" ± {_number((high - low) / 2, digits)}" if low is not None and high is not None else ""
        ours += f" {cell['unit']}" if cell.get("unit") else ""
        ours += f" (n={cell['n']})" if "n" in cell else ""
    if published is None:
        return Entry(ours)
    if isinstance(published, str):
        return Entry(ours, f"paper {published}")
    difference = "" if mean is None else f" ({_number(mean - published, digits, signed=True)})"
    return Entry(ours, f"paper {_number(published, digits)}{difference}")


def _number(value: float | None, digits: int | None, *, signed: bool = False) -> str:
    """Fixed digits where the column gives them; else short; 1.23e12 as such."""
    if value is None:
        return DASH
    sign, size = "+" if signed else "", abs(value)
    if size >= 1e9:
        text = f"{value:{sign}.2e}"
    elif digits is not None:
        text = f"{value:{sign},.{digits}f}"
    elif isinstance(value, int):
        text = f"{value:{sign},}"
    elif size >= 1e6:
        text = f"{value:{sign}.2e}"
    else:
        text = f"{value:{sign},.0f}" if size >= 1e4 else f"{value:{sign}.4g}"
    text = re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], text)
    return "−" + text[1:] if text.startswith("-") else text


def _documents(results: Sequence[Mapping[str, Any]], experiments: list[dict[str, Any]]) -> dict[str, str]:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    claims = [{**claim, "id": result["id"]} for result in results for claim in result["claims"]]
    counts = Counter(claim["verdict"] for claim in claims)
    scales = list(dict.fromkeys(result["scale"] for result in results))
    facts = {
        "reading": _READING, "experiments": experiments, "claims": claims, "made": _made(results),
        "counts": [(verdict, counts[verdict]) for verdict in VERDICTS],
        "tally": ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS) + ".",
        "notices": [_SCALES[scale] for scale in scales if scale in _SCALES],
    }  # fmt: skip

    def fill(name: str, escape: Callable[[str], str] | None, **syntax: Any) -> str:
        environment = Environment(
            loader=FileSystemLoader([_HERE, _HERE.parent / "report"]), undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True, keep_trailing_newline=True, autoescape=escape is None, **syntax,
            finalize=None if escape is None else lambda v: v if isinstance(v, Markup) else escape(str(v)),
        )  # fmt: skip
        return environment.get_template(name).render(facts)

    tags = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
    tags |= {"variable_end_string": ">>", "comment_start_string": "<#", "comment_end_string": "#>"}
    return {
        "reproduction.md": fill("reproduction.md", _markdown),
        "reproduction.tex": fill("reproduction.tex", _latex, **tags),
        "reproduction.html": fill("reproduction.html", None),
    }


def _made(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """How it was made; where experiments differ, every answer."""
    data: dict[str, None] = {}
    for result in results:
        for name, print_ in (result["provenance"].get("data") or {}).items():
            data[f"{name} {str(print_)[:19]}"] = None

    def every(key: str) -> str:
        values = (result["provenance"].get(key) for result in results)
        return "; ".join(dict.fromkeys(format_value(v) for v in values if v is not None)) or DASH

    return [
        ("Scale", "; ".join(dict.fromkeys(result["scale"] for result in results)) or DASH),
        ("Seeds", every("seeds")),
        ("Commit", every("commit")),
        ("Machine", every("machine")),
        ("Threads", every("threads")),
        ("Software", f"budgetformer {every('version')}, torch {every('torch')}, Python {every('python')}"),
        ("Data", "; ".join(data) or DASH),
    ]


def _markdown(text: str) -> str:
    """Plain text that GitHub shows as it is, on one line."""
    text = re.sub(r"([\\`*\[\]~|]|(?<!\w)_|_(?!\w)|^[#+-](?=\s))", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "[": "{[}",
    "]": "{]}", "*": "{*}", "\0": "-{}", **{c: "\\" + c for c in "{}$&#_%"},
    "–": "--", "—": "---", "−": "$-$", "±": r"$\pm$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$",
    "≈": r"$\approx$", "→": r"$\rightarrow$", "…": r"\dots{}", "‘": "`", "’": "'", "“": "``", "”": "''", "²": r"$^2$",
    "·": r"$\cdot$", "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$", "σ": r"$\sigma$", "τ": r"$\tau$",
}  # fmt: skip


def _latex(text: str) -> str:
    """Plain text as LaTeX on one line; what pdflatex has no letter for appears as its code point."""

    def one(c: str) -> str:
        if c in _TEX:
            return _TEX[c]
        return c if c.isascii() or (c.isprintable() and c <= "ÿ") else f"{{[}}U+{ord(c):04X}{{]}}"

    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(map(one, re.sub("-(?=-)", "\0", text)))  # two hyphens would join to a dash

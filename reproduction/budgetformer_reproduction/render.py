"""Results as JSON -> Markdown, LaTeX and one HTML page, with the figures. Nothing here touches a model or the data."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from budgetformer.errors import DataError
from budgetformer.report import kit
from budgetformer.report.numbers import DASH, format_seconds, format_value
from budgetformer.runs.files import write_text
from budgetformer_reproduction.scale import SCALES
from budgetformer_reproduction.schema import IDS, OVER_ROWS, VERDICTS, Measured, Result, Table, checked

_HERE = Path(__file__).parent
_READING = (
    "A cell is the mean over n seeds ± half its 95 % interval (one seed: the interval of the accuracy on its test "
    "rows). Below it stand the paper's number and, in brackets, ours minus the paper's."
)
_DASHED = f"A dash ({DASH}) marks a value that was not measured or does not apply."
_SCALES = {
    "smoke": "This is the smoke scale: it shows that every step runs, and its numbers mean nothing.",
    "medium": "This is the medium scale: narrower models than the paper's (width 128) and fewer rows, trained for "
    "three to six epochs with a falling learning rate, of which the best on validation rows is kept. Explanations were "
    "tried on the runs that the project publishes.",
    "cpu": "This is the CPU scale: models and data are smaller than the paper's, so compare directions, not digits. "
    "Explanations were tried on the runs that the project publishes.",
}

_LINE = 150  # characters of a claim's evidence in the overview
_REMEDY = "fix it, or delete the file and reproduce again"


def read(folder: Path) -> list[Result]:
    """The results in FOLDER/results/*.json, checked, in the paper's order."""
    results = [_read_file(file) for file in sorted((folder / "results").glob("*.json"))]
    return sorted(results, key=lambda result: IDS.index(result.id))


def _read_file(file: Path) -> Result:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not readable JSON ({error}): delete it and reproduce again") from error
    result = checked(Result, data, str(file), _REMEDY)
    if result.id != file.stem:
        raise DataError(f"{file}: field id is {data['id']!r}: the file must be called {data['id']}.json")
    return result


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the JSON, the figures and the three documents into FOLDER; return every path written.

    The same results give the same bytes. Each file is replaced all at once.
    """
    twice = [name for name, count in Counter(result.id for result in results).items() if count > 1]
    if twice:
        raise DataError(f"field id: {twice[0]!r} is given twice: one result per experiment")

    from budgetformer_reproduction.drawing import draw, key, standalone  # matplotlib is heavy

    files: dict[str, str] = {}
    experiments = []
    results = sorted(results, key=lambda result: IDS.index(result.id))
    for result in results:
        files[f"results/{result.id}.json"] = result.to_json()
        figures = []
        for figure in result.figures:
            file = f"figures/{result.id}-{figure.name}.svg"
            svg = draw(figure, f"{result.id}-{figure.name}")
            files[file] = standalone(svg)
            width = re.search(r'width="([0-9.]+)pt"', svg)
            wide = width is not None and float(width[1]) > 500  # a phone scrolls it sideways instead of shrinking it
            figures.append({"title": figure.title, "key": key(figure), "file": file, "svg": svg, "wide": wide})
        experiments.append({**vars(result), "figures": figures, "tables": list(map(_table, result.tables)),
                            "made": _made_of(result)})  # fmt: skip
    files |= _documents(results, experiments, _other_verdicts(folder))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
    return [folder / name for name in files]


def _other_verdicts(folder: Path) -> dict[str, dict[str, str]]:
    """By scale and claim: the verdicts of a reproduction in FOLDER/SCALE, which stand beside those of FOLDER."""
    results = {name: read(folder / name) for name in SCALES}
    return {name: {claim.claim: claim.verdict for result in some for claim in result.claims}
            for name, some in results.items() if some}  # fmt: skip


def _made_of(result: Result) -> str:
    made = result.provenance
    if made.cells == 0:
        return ""
    parts = [f"{made.cells} training runs"] if made.cells is not None else []
    parts += [] if made.precision == "fp32" else [f"in {made.precision}"]
    parts += [f"seeds {format_value(made.seeds)}"] if made.seeds else []
    parts += [format_seconds(made.seconds)] if made.seconds is not None else []
    return "; ".join(parts)


def _table(table: Table) -> kit.Table:
    columns = [[row.get(column.key) for row in table.rows] for column in table.columns]
    cells = [[_cell(v, column.digits) for v in values] for column, values in zip(table.columns, columns, strict=True)]
    notes = [table.note] if table.note else []
    notes += [_DASHED] if any(DASH in (cell.text, cell.below) for column in cells for cell in column) else []
    return kit.Table(
        align="".join("l" if all(isinstance(v, str | None) for v in values) else "r" for values in columns),
        head=[column.title for column in table.columns],
        rows=[list(row) for row in zip(*cells, strict=True)],
        title=table.title,
        note=" ".join(notes),
    )


def _cell(value: Any, digits: int | None) -> kit.Cell:
    """Our value, and below it the paper's."""
    if not isinstance(value, Measured):
        return kit.Cell(value if isinstance(value, str) else _number(value, digits))
    mean, published, ours = value.mean, value.published, _number(value.mean, digits)
    if mean is not None:
        if value.low is not None and value.high is not None:
            ours += f" ± {_number((value.high - value.low) / 2, digits)}"
        ours += f" {value.unit}" if value.unit else ""
        ours += f" (n={value.n})" if "n" in value.model_fields_set else ""
    if published is None or isinstance(published, str):
        return kit.Cell(ours, below=f"paper {published}" if published else "")
    difference = "" if mean is None else f" ({_number(mean - published, digits, signed=True)})"
    return kit.Cell(ours, below=f"paper {_number(published, digits)}{difference}")


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


def _documents(
    results: Sequence[Result], experiments: list[dict[str, Any]], others: dict[str, dict[str, str]]
) -> dict[str, str]:
    claims = [
        {
            **vars(claim),
            "id": result.id,
            "brief": _brief(claim.evidence),
            "beside": " ".join(
                f"({name}: {verdicts[claim.claim]})" for name, verdicts in others.items() if claim.claim in verdicts
            ),
        }
        for result in results
        for claim in result.claims
    ]
    counts = Counter(claim["verdict"] for claim in claims)
    scales = dict.fromkeys(result.scale for result in results)
    facts = {
        "reading": _READING, "scales": list(others), "experiments": experiments, "claims": claims,
        "made": _made(results),
        "counts": [(verdict, counts[verdict]) for verdict in VERDICTS],
        "tally": ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS) + ".",
        "notices": [_SCALES[scale] for scale in scales if scale in _SCALES],
    }  # fmt: skip
    tags = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
    tags |= {"variable_end_string": ">>", "comment_start_string": "<#", "comment_end_string": "#>"}
    pages = {
        "reproduction.md": kit.environment(_HERE, escape=kit.escape_markdown),
        "reproduction.tex": kit.environment(_HERE, escape=_latex, **tags),
        "reproduction.html": kit.environment(_HERE),
    }
    return {name: environment.get_template(name).render(facts) for name, environment in pages.items()}


def _brief(evidence: str) -> str:
    """Evidence in one line: how often it fails, then the figures, without intervals, qualifiers and the rule."""
    figures = evidence.partition(" Rule:")[0].replace(f", {OVER_ROWS}", "")
    listed, _, exceptions = re.sub(r" \[[^]]*\]", "", figures).partition(" Not worse: ")
    parts = listed.split("; ")
    if exceptions:
        parts[0] = f"Not worse in {exceptions.count(',') + 1} of {len(parts)}. {parts[0]}"
    shown = list(itertools.accumulate(parts, lambda a, b: f"{a}; {b}"))
    fitting = [text for text in shown if len(text) <= _LINE] or [shown[0][:_LINE]]
    return fitting[-1] if fitting[-1] == shown[-1] else f"{fitting[-1]}; …"


def _made(results: Sequence[Result]) -> list[tuple[str, str]]:
    """How it was made; where experiments differ, every answer. Hashes of the data are in the results."""
    data = {name: None for r in results for name in r.provenance.data}
    commits = {commit[:7]: None for r in results for commit in re.findall(r"[0-9a-f]{7,}", str(r.provenance.commit))}

    def every(key: str) -> str:
        values = [getattr(result.provenance, key) for result in results if key in result.provenance.model_fields_set]
        shown = [part for v in values if v is not None for part in format_value(v).split("; ")]
        return "; ".join(dict.fromkeys(shown)) or DASH

    trained = [result.id for result in results if result.provenance.cells != 0]
    names = "all" if len(trained) == len(IDS) else ",".join(trained)
    seeds = max((len(result.provenance.seeds) for result in results), default=0)
    scales = list(dict.fromkeys(result.scale for result in results))
    return [
        ("Command", "; ".join(f"budgetformer reproduce {names} --scale {scale} --seeds {seeds}" for scale in scales)),
        ("Scale", "; ".join(scales) or DASH),
        ("Seeds", every("seeds")),
        ("Commits", ", ".join(commits) or DASH),
        ("Machine", every("machine")),
        ("Threads", every("threads")),
        ("Software", f"budgetformer {every('version')}, torch {every('torch')}, Python {every('python')}"),
        ("Data", ", ".join(data) or DASH),
    ]


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

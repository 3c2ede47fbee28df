"""The figures of a reproduction as SVG text: lines, boxes, heat maps and attention maps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.ticker import LogLocator, MaxNLocator

from budgetformer.report.figures import BLUE, GREEN, GREY, INK, ORANGE, canvas
from budgetformer_reproduction.schema import (
    Attention,
    AttentionPanel,
    Boxes,
    BoxPanel,
    Figure,
    Heatmap,
    Lines,
    MapPanel,
    Series,
)

_WIDE = 11.0  # inches: what a page on a desk shows without shrinking
_COLOURS = (BLUE, ORANGE, GREEN, "#b065b8", GREY, "#b59020", "#c94f4f", "#2aa5b0")
_MARKERS = "osD^vPX*"
_MARKED = 30  # points of a line that markers do not cover
_FILE_INK = "#787d85"  # a file cannot know the page it is shown on: this reads on white and on black
_Panel = TypeVar("_Panel", BoxPanel, MapPanel, AttentionPanel)
_HEAT = LinearSegmentedColormap.from_list("heat", ["#e3edf8", BLUE, "#123763"])


def draw(figure: Figure, salt: str) -> str:
    """One figure of the results as SVG with the page's ink; the same figure and salt give the same text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the viewer's fonts draw the text, not matplotlib's
        svg = _DRAW[figure.kind](figure, salt)
    svg = re.sub(r' id="image[0-9a-f]+"', "", svg)  # equal pictures have equal ids, and nothing points to them
    return re.sub(r"\n\s+(?=<)", "\n", svg).replace("<g/>\n", "")


def key(figure: Figure) -> str:
    """How to read the drawing, in words, or "" where its legend says it."""
    if isinstance(figure, Attention):
        return f"Rows ask, columns are attended to. Blank is 0, full blue is {_strongest(figure):.2f}."
    if isinstance(figure, Lines):
        return "Bands and bars: 95 % intervals." if any(line.low for line in (*figure.series, *figure.y2)) else ""
    return _KEYS[figure.kind]


def standalone(svg: str) -> str:
    """A drawing for a page as a file of its own."""
    svg = svg.replace("currentColor", _FILE_INK).replace("font-family: inherit", "font-family: sans-serif")
    return svg + "\n"


def _plain(text: Any, longest: int = 40) -> str:
    """Text that XML and one line can hold."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return words if len(words) <= longest else words[: longest - 1] + "…"


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if v is None else float(v) for v in values]


def _lines(figure: Lines, salt: str) -> str:
    left, right = figure.series, figure.y2
    count, longest = len(left) + len(right), max((len(series.name) for series in (*left, *right)), default=1)
    columns = max(1, min(4, count, 70 // (min(longest, 40) + 8)))
    height = 3.6 + 0.2 * max(0, -(-count // columns) - 2)  # the axes stay as high where the legend is long
    with canvas(salt, _plain(figure.title, 200), (5.4, height)) as (paper, svg):
        axes = paper.subplots()
        axes.set_xlabel(_plain(figure.x_title, 80))
        axes.set_ylabel(_plain(figure.y_title, 60))
        _plot(axes, left, 0, "")
        if right:
            other = axes.twinx()
            other.spines["right"].set_visible(True)
            other.grid(visible=False)
            other.set_ylabel(_plain(figure.y2_title, 60))
            _plot(other, right, len(left), " (right)")
        if figure.log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter("")
        elif all(isinstance(x, int) for series in left for x in series.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if count > 1:
            paper.legend(loc="outside lower center", ncols=columns)
    return svg[0]


def _plot(axes: Axes, lines: Sequence[Series], first: int, word: str) -> None:
    """Each line in its own colour and, where points are few, marker; the right axis's are dashed."""
    for n, line in enumerate(lines, first):
        colour = _COLOURS[n % len(_COLOURS)]
        marker = _MARKERS[(n + n // len(_COLOURS)) % len(_MARKERS)] if len(line.x) <= _MARKED else ""
        axes.plot(line.x, _floats(line.y), "--" if word else "-", color=colour, marker=marker, markersize=4,
                  linewidth=1.7, label=_plain(line.name) + word)  # fmt: skip
        if line.low and line.high:
            low, high = _floats(line.low), _floats(line.high)
            if len(line.x) > 1:
                axes.fill_between(line.x, low, high, color=colour, alpha=0.18, linewidth=0)
            else:
                axes.vlines(line.x, low, high, color=colour, linewidth=1)


@contextmanager
def _panels(
    figure: Boxes | Heatmap | Attention, panels: Sequence[_Panel], salt: str, width: float, height: float,
    margin: float = 0.0, level: bool = False,
) -> Iterator[tuple[list[tuple[Axes, _Panel, bool]], list[str]]]:  # fmt: skip
    """Axes for each panel, at most four a row, on one y axis if `level`; the flag says that a panel opens its row."""
    across = max(1, min(4, len(panels), int((_WIDE - margin) // width)))
    down = max(1, -(-len(panels) // across))
    across = max(1, -(-len(panels) // down))  # rows of one length where that needs no more rows
    with canvas(salt, _plain(figure.title, 200), (margin + across * width, down * height)) as (paper, svg):
        grid = list(paper.subplots(down, across, squeeze=False, sharey=level).flat)
        for spare in grid[len(panels) :]:
            spare.remove()
        for axes, panel in zip(grid, panels, strict=False):
            axes.set_title(_plain(panel.title), fontsize=10)
        yield [(axes, panel, n % across == 0) for n, (axes, panel) in enumerate(zip(grid, panels, strict=False))], svg


def _boxes(figure: Boxes, salt: str) -> str:
    panels = figure.panels
    most = max((len(panel.groups) for panel in panels), default=1)
    with _panels(figure, panels, salt, max(2.6, 0.85 * most), 3.4, margin=0.5, level=True) as (drawn, svg):
        for axes, panel, opens in drawn:
            groups = panel.groups
            boxes = [(n, group, group.q) for n, group in enumerate(groups) if group.q]
            keys = ("whislo", "q1", "med", "q3", "whishi")
            stats = [dict(zip(keys, q, strict=True), mean=_floats([g.mean])[0]) for _, g, q in boxes]
            line = {"color": INK, "linewidth": 1.1}
            axes.bxp(
                stats, positions=[n for n, *_ in boxes], widths=0.55, showfliers=False, showmeans=True,
                patch_artist=True, boxprops={"facecolor": BLUE + "66", "edgecolor": BLUE, "linewidth": 1.4},
                medianprops={"color": ORANGE, "linewidth": 2}, whiskerprops=line, capprops=line, manage_ticks=False,
                meanprops={"marker": "D", "markersize": 5, "markerfacecolor": INK, "markeredgecolor": INK},
            )  # fmt: skip
            axes.set_xticks(range(len(groups)), [f"{_plain(g.name, 16)}\nn = {g.n:,}" for g in groups])
            axes.set_xlim(-0.6, len(groups) - 0.4)
            axes.tick_params(axis="x", length=0, labelsize=8.5)
            axes.grid(visible=False, axis="x")
            axes.set_ylabel(_plain(figure.y_title, 60) if opens else "")
    return svg[0]


def _heatmap(figure: Heatmap, salt: str) -> str:
    panels = figure.panels
    columns = max((len(panel.columns) for panel in panels), default=1)
    rows = max((len(panel.rows) for panel in panels), default=1)
    label = max((len(_plain(c, 16)) for panel in panels for c in panel.columns), default=0)
    with _panels(figure, panels, salt, max(2.4, 0.5 * columns), 0.8 + 0.055 * label + 0.38 * rows, 0.9) as (drawn, svg):
        for axes, panel, opens in drawn:
            named = opens or panel.rows != panels[0].rows
            values = [_floats(row) for row in panel.values]
            axes.spines[:].set_visible(False)
            _ticks(axes, panel.rows if named else [], panel.columns, 9, rotated=label > 4)
            if not (values and values[0]):
                continue
            known = [v for row in values for v in row if v == v]
            low, high = min(known, default=0.0), max(known, default=1.0)
            axes.imshow(values, cmap=_HEAT, vmin=low, vmax=high, aspect="auto", interpolation="none")
            for i, row in enumerate(values):
                for j, value in enumerate(row):
                    dark = value - low > 0.5 * (high - low)
                    ink = INK if value != value else "#ffffff" if dark else "#14202e"
                    axes.text(j, i, "–" if value != value else _short(value, high), color=ink, fontsize=8, ha="center",
                              va="center")  # fmt: skip
    return svg[0]


def _short(value: float, high: float) -> str:
    return f"{value:.{3 if high < 0.1 else 2}f}" if abs(value) < 100 else f"{value:.3g}"


def _attention(figure: Attention, salt: str) -> str:
    panels = figure.panels
    tokens = max((max(len(p.rows), len(p.columns)) for p in panels), default=1)
    size, step = (8.0, 0.17) if tokens <= 14 else (7.0, 0.12)
    longest = max((len(_plain(t, 14)) for p in panels for t in (*p.rows, *p.columns)), default=1)
    label = longest * size * 0.0075 + 0.15
    top = _strongest(figure) or 1.0
    width, height = max(2.5, tokens * step + 0.2), tokens * step + label + 0.4
    with _panels(figure, panels, salt, width, height, margin=label) as (drawn, svg):
        for axes, panel, opens in drawn:
            named = opens or panel.rows != panels[0].rows
            _ticks(axes, panel.rows if named else [], panel.columns, size, rotated=True)
            if panel.rows and panel.columns:
                # No attention is no ink, so that the map sits on any page.
                shades = [[(*to_rgb(BLUE), (v or 0.0) / top) for v in row] for row in panel.values]
                axes.imshow(shades, interpolation="none")
            axes.spines[:].set_visible(True)
    return svg[0]


def _strongest(figure: Attention) -> float:
    return max((v for p in figure.panels for row in p.values for v in row if v is not None), default=0.0)


def _ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str], size: float, *, rotated: bool) -> None:
    axes.set_yticks(range(len(rows)), [_plain(row, 16) for row in rows], fontsize=size)
    words = [_plain(column, 16) for column in columns]
    axes.set_xticks(range(len(columns)), words, fontsize=size, rotation=90 if rotated else 0)
    axes.tick_params(length=0)
    axes.grid(visible=False)


_KEYS = {
    "boxes": "Box: quartiles and median. Whiskers: 5 % and 95 %. Diamond: mean.",
    "heatmap": "Darker is higher, in each panel by itself.",
}
_DRAW: dict[str, Callable[[Any, str], str]] = {
    "lines": _lines, "boxes": _boxes, "heatmap": _heatmap, "attention": _attention,
}  # fmt: skip

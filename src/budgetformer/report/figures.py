"""The curves, as SVG text that takes its ink from the page and is the same for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Mid-tones that stand out on white and on black; INK becomes the page's own text colour.
BLUE, ORANGE, GREEN, GREY = "#3b82d0", "#d9772b", "#2f9e6e", "#8a8a8a"
INK = "#010203"
_STEPS = 400  # points drawn of a long run

Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Curve:
    """One line of a figure; `label` is our own word, never a user's text."""

    label: str
    points: Points
    colour: str
    style: str = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Mark:
    """One point of the dial figure with its interval."""

    kind: str  # fixed, max, mean or learned
    x: float
    y: float
    low: float
    high: float


@contextmanager
def canvas(name: str, title: str, inches: tuple[float, float]) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on; the list holds the SVG once the block is left. `name` keeps ids apart on one page."""
    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.12,
        "legend.frameon": False, "legend.fontsize": 9, "text.parse_math": False,
    }  # fmt: skip
    svg: list[str] = []
    with mpl.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, svg
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg.append(_inline(buffer.getvalue(), title))


@contextmanager
def _axes(
    name: str, title: str, xlabel: str, ylabel: str, inches: tuple[float, float]
) -> Iterator[tuple[Axes, list[str]]]:
    """One pair of axes on a canvas, with a legend where there is more than one thing to tell apart."""
    with canvas(name, title, inches) as (figure, svg):
        axes = figure.subplots()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        yield axes, svg
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="best")


def _inline(svg: str, title: str) -> str:
    """Only the drawing: no prologue, comments, page-wide style or repeated ids, and the page's font and ink."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_[0-9]{1,4}"', "", svg)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px; font-family: inherit", svg)
    svg = re.sub(r"font-family: '[^;\"]*", "font-family: inherit", svg)  # how turned text says it
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


def curves(name: str, title: str, xlabel: str, ylabel: str, lines: Sequence[Curve], *, percent: bool = False) -> str:
    """Lines over steps or epochs, or "" where no line has a point."""
    lines = [line for line in lines if line.points[0]]
    if not lines:
        return ""
    with _axes(name, title, xlabel, ylabel, (4.0, 2.9)) as (axes, svg):
        for line in lines:
            xs, ys = line.points
            stride = -(-len(xs) // _STEPS)
            axes.plot(xs[::stride], ys[::stride], line.style, color=line.colour, label=line.label,
                      marker=line.marker, markersize=4, linewidth=1.6)  # fmt: skip
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        if xlabel == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return svg[0]


def dial_curve(marks: Sequence[Mark], learned: Mark | None, dense: float | None, ylabel: str, *, percent: bool) -> str:
    """Score against executed heads: one line a kind of dial, the learned point as a star, the dense twin dashed."""
    words = {
        "fixed": ("same share for every text", BLUE, "o-"), "max": ("learned, with a cap", GREEN, "s-"),
        "mean": ("each text its own share", GREEN, "s-"),
    }  # fmt: skip
    with _axes(
        "dials", "Score against the share of heads that ran", "share of heads run (k/H)", ylabel, (5.2, 3.5)
    ) as (axes, svg):
        if dense is not None:
            axes.axhline(dense, color=GREY, linestyle="--", linewidth=1.4, label="dense twin")
        for kind in sorted({m.kind for m in marks}):
            mine = sorted((m for m in marks if m.kind == kind), key=lambda m: m.x)
            label, colour, style = words.get(kind, ("another dial", GREY, "D"))
            _error_bars(axes, mine, label, colour, style, 5)
        if learned:
            _error_bars(axes, [learned], "learned budget", ORANGE, "*", 14)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    return svg[0]


def _error_bars(axes: Axes, marks: Sequence[Mark], label: str, colour: str, style: str, size: float) -> None:
    ys = [m.y for m in marks]
    below = [max(0.0, m.y - m.low) for m in marks]
    above = [max(0.0, m.high - m.y) for m in marks]
    axes.errorbar([m.x for m in marks], ys, yerr=[below, above], fmt=style, color=colour, label=label,
                  markersize=size, linewidth=1.6, elinewidth=1, capsize=2)  # fmt: skip

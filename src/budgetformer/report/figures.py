"""The curves, as SVG text that takes its ink from the page and is the same for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
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


@contextmanager
def canvas(name: str, title: str, inches: tuple[float, float]) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on; the list holds the SVG once the block is left. `name` keeps ids apart on one page."""
    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.12,
        "legend.frameon": False, "legend.fontsize": 9, "text.parse_math": False,
        "figure.facecolor": "none", "axes.facecolor": "none",
    }  # fmt: skip
    svg: list[str] = []
    with mpl.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        page = FigureCanvasSVG(figure)
        yield figure, svg
        buffer = io.StringIO()
        page.print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]  # savefig draws all twice
    svg.append(_inline(buffer.getvalue(), title))


@contextmanager
def _axes(
    name: str, title: str, xlabel: str, ylabel: str, inches: tuple[float, float], *, above: bool = False
) -> Iterator[tuple[Axes, list[str]]]:
    """One pair of axes on a canvas, with a legend where there is more than one thing to tell apart, inside or above."""
    with canvas(name, title, inches) as (figure, svg):
        axes = figure.subplots()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        yield axes, svg
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(**({"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2} if above else {"loc": "best"}))


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


_DIALS = {  # by the kind of dial: what it does, colour, style and size of its points
    "fixed": ("same share for every text", BLUE, "o-", 5), "max": ("learned, with a cap", GREEN, "s-", 5),
    "mean": ("share of all layers together", GREEN, "s-", 5), "learned": ("learned budget", ORANGE, "*", 14),
}  # fmt: skip


def dial_curve(
    points: Sequence[Mapping[str, Any]], dense: float | None, ylabel: str, *, percent: bool, by: str = "k_over_h"
) -> str:
    """Score against executed heads: a line per kind of dial, the learned point as a star, the dense twin dashed.

    A point has `dial`, `k_over_h`, `score`, and the interval `low` to `high` or None for both. `by` may be
    `flops_ratio` instead, where more than heads is left out.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: point[by]):
        kinds.setdefault(point["dial"].split(":")[0].replace("full", "fixed"), []).append(point)
    title, xlabel = "Score against the share of heads that ran", "share of heads run (k/H)"
    if by == "flops_ratio":
        title, xlabel = "Score against cost", "FLOPs, share of the dense model's"
    with _axes("dials", title, xlabel, ylabel, (5.2, 3.5), above=True) as (axes, svg):
        if dense is not None:
            axes.axhline(dense, color=GREY, linestyle="--", linewidth=1.4, label="dense twin")
        for kind in sorted(kinds, key=lambda kind: (kind == "learned", kind)):
            label, colour, style, size = _DIALS.get(kind, ("another dial", GREY, "D", 5))
            x, y = ([point[key] for point in kinds[kind]] for key in (by, "score"))
            spans = [(p["score"] if p["low"] is None else p["low"], p["high"] or p["score"]) for p in kinds[kind]]
            error = [[abs(b - span[side]) for b, span in zip(y, spans, strict=True)] for side in (0, 1)]
            axes.errorbar(x, y, yerr=error, fmt=style, color=colour, label=label, markersize=size, linewidth=1.6,
                          elinewidth=1, capsize=2)  # fmt: skip
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    return svg[0]


def cost_curve(
    curve: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]], learned: Mapping[str, Any],
    dense: float | None, ylabel: str, *, percent: bool,
) -> str:  # fmt: skip
    """Score against mean cost: leaving text by text, beside stopping every text at one stage. See `depth_report`."""
    title, xlabel = "Score against the mean cost of a text", "mean cost, share of the dense model's FLOPs"
    with _axes("depth", title, xlabel, ylabel, (5.2, 3.5), above=True) as (axes, svg):
        if dense is not None:
            axes.axhline(dense, color=GREY, linestyle="--", linewidth=1.4, label="dense twin")
        static, by_text = (sorted(points, key=lambda p: p["flops_ratio"]) for points in (stages, curve))
        for points, label, colour, style in ((static, "every text stops at one stage", BLUE, "o:"),
                                             (by_text, "each text leaves when sure", GREEN, "-")):  # fmt: skip
            axes.plot(*_columns(points), style, color=colour, label=label, markersize=6, linewidth=1.8)
        axes.plot(*_columns([learned]), "*", color=ORANGE, markersize=14, label="learned budget")
        for stage in static:
            side, shift = ("right", -6) if stage is static[-1] else ("left", 6)
            axes.annotate(stage["stage"], (stage["flops_ratio"], stage["score"]), xytext=(shift, -13), ha=side,
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axes.margins(y=0.15)  # room for the names
        axes.set_xlim(left=-0.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    return svg[0]


def _columns(points: Sequence[Mapping[str, Any]]) -> Points:
    return [p["flops_ratio"] for p in points], [p["score"] for p in points]


def reliability(groups: Sequence[Mapping[str, Any]]) -> str:
    """P(disagree) against how often answers did change, by stage, beside the diagonal of a rule that is right."""
    names = list(dict.fromkeys(group["stage"] for group in groups))
    title = "P(disagree), predicted against observed"
    with _axes("reliability", title, "predicted P(disagree)", "texts whose answer changed", (5.2, 3.5)) as (axes, svg):
        most = max([0.01, *(group[key] for group in groups for key in ("predicted", "observed"))])
        axes.plot([0, most], [0, most], "--", color=GREY, linewidth=1.2, label="as predicted")
        for number, name in enumerate(names):
            members = [group for group in groups if group["stage"] == name]
            xs, ys = ([group[key] for group in members] for key in ("predicted", "observed"))
            axes.plot(xs, ys, "os^D"[number % 4] + "-", color=(BLUE, GREEN, ORANGE)[number % 3], label=name,
                      markersize=5, linewidth=1.4)  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1))
    return svg[0]

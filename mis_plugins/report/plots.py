"""Plots as inline SVG by matplotlib: no script, crisp in print, and coloured by the page's own variables.

matplotlib draws with stand-in colours, which become CSS variables, so that one picture serves light and dark.
"""

import io
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from mis_plugins.explain.rungs import record
from mis_plugins.shared.terminal import printable

INK, MUTED, GRID, FIRST, SECOND, WARN = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", FIRST: "first", SECOND: "second", WARN: "warn"}
STYLE: Any = {
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}
SMALLEST = 1e-9
LONGEST = 40  # letters of a name in a picture
_numbers = itertools.count()


def curve(lines: Mapping[str, Mapping[int, float]], label: str, log: bool = False, marks: Sequence[int] = ()) -> str:
    """Values over steps, a line for each name. `marks` are steps at which something changed.

    `log` asks for a logarithmic axis, which values within a factor of ten do not get: theirs begins at 0.
    """
    heights = [max(y, SMALLEST) for line in lines.values() for y in line.values()]
    wide = log and max(heights) >= 10 * min(heights)
    with _drawn(4.4, 2.5) as (figure, axes):
        colors = itertools.cycle((FIRST, SECOND, WARN, MUTED))
        for (name, line), color in zip(lines.items(), colors, strict=False):
            values = [max(y, SMALLEST) if wide else y for y in line.values()]
            dots = "o" if len(line) < 30 else ""
            axes.plot([*line], values, color=color, lw=1.8, marker=dots, ms=3.5, label=as_label(name))
        for mark in marks:
            axes.axvline(mark, color=WARN, lw=1.2, ls=(0, (4, 3)))
        if wide:
            _log(axes.set_yscale, axes.yaxis)
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.set_ylim(bottom=0 if log else None)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step")
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
        return _svg(figure, label)


def span(tables: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """Ends of the one axis on which the kl_k3 of all tables are drawn; its right end leaves room for words."""
    values = [max(float(row["kl_k3"]), SMALLEST) for rows in tables for row in rows]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    return low / 2, high * max(high / low, 10.0) ** 0.5


def dots(rows: Sequence[Mapping[str, Any]], label: str, ends: tuple[float, float]) -> str:
    """kl_k3 of each bucket, as dots on a logarithmic axis between `ends`, with the share of the tokens beside."""
    total = sum(float(row["tokens"]) for row in rows) or 1.0
    with _drawn(4.4, 0.9 + 0.24 * len(rows)) as (figure, axes):
        places = range(len(rows))
        values = [max(float(row["kl_k3"]), SMALLEST) for row in rows]
        axes.plot(values, places, "o", color=FIRST, ms=6)
        axes.set_yticks(places, [as_label(str(row["bucket"])) for row in rows])
        for place, (value, row) in enumerate(zip(values, rows, strict=True)):
            text = f"{value:.1e} · {float(row['tokens']) / total:.0%}"
            _note(axes, text, (value, place), (7, 0), va="center", fontsize=8.5, color=MUTED)
        _log(axes.set_xscale, axes.xaxis)
        axes.set_xlim(*ends)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.invert_yaxis()
        axes.set_xlabel("kl_k3 · share of tokens")
        return _svg(figure, label)


def ladder(name: str, kl_k3: float, label: str) -> str:
    """The rungs of the ladder on a logarithmic line, and a run as a mark above it."""
    value = max(kl_k3, SMALLEST)
    with _drawn(4.4, 2.2) as (figure, axes):
        for place, rung in enumerate(record().steps):
            axes.plot([rung.k3], [0], marker="|", ms=14, mew=2, color=MUTED)
            below = (0, -15 if place % 2 else -26)
            _note(axes, rung.name, (rung.k3, 0), below, ha="center", va="top", fontsize=9, color=MUTED)
        axes.plot([value], [1], marker="D", ms=8, color=FIRST)
        text = f"{as_label(name)}  {kl_k3:.2g}"
        _note(axes, text, (value, 1), (0, 8), ha="center", fontsize=9.5, color=INK)
        _log(axes.set_xscale, axes.xaxis)
        axes.set_xlim(min(1e-4, value) / 4, max(1.0, value) * 4)
        axes.set_ylim(-1.2, 1.9)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("kl_k3")
        return _svg(figure, label)


def _note(axes: Axes, text: str, place: tuple[float, float], away: tuple[float, float], **style: Any) -> None:
    """Write a text `away` points from a place."""
    axes.annotate(text, place, away, textcoords="offset points", **style)


@contextmanager
def _drawn(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure in the page's style. No warning quotes foreign names, and the page's own fonts have all glyphs."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(width, height))
        yield figure, figure.add_subplot()


def as_label(name: str) -> str:
    """A foreign name as matplotlib draws it: cut, without mathematics between dollars, and with a legend's entry.

    An empty name, or one that begins with an underscore, would have none.
    """
    text = printable(name)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return (f" {text}" if text[:1] in ("", "_") else text).replace("$", r"\$")


def _log(set_scale: Any, axis: Any) -> None:
    set_scale("log")
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element of the page: its ids are its own, its colours the page's variables."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
    prefix = f"p{next(_numbers)}-"
    text = re.sub(r"<[^>]+>", lambda tag: _adopted(tag[0], prefix), text)  # between tags stand foreign names
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _adopted(tag: str, prefix: str) -> str:
    """A tag of matplotlib's with the ids and the colours of the page."""
    for color, variable in VARIABLES.items():
        tag = tag.replace(color, f"var(--{variable})")
    return re.sub(r'(\bid="|href="#|url\(#)', lambda match: match[1] + prefix, tag)

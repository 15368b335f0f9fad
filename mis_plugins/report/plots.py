"""Plots as inline SVG by matplotlib: no script, crisp in print, and coloured by the page's own variables.

matplotlib draws with stand-in colours, which become CSS variables, so that one picture serves light and dark.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from mis_plugins.explain.rungs import record
from mis_plugins.shared.terminal import printable

INK, MUTED, GRID, FIRST, SECOND, WARN = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    WARN: "var(--warn)",
}
SERIES = (FIRST, SECOND, WARN, MUTED)
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}
SMALLEST = 1e-9
LONGEST = 40  # letters of a name in a picture
_numbers = itertools.count()


@dataclass(frozen=True)
class Line:
    """One curve: its name, steps and values."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def curve(lines: Sequence[Line], label: str, log: bool = False, marks: Sequence[int] = ()) -> str:
    """Curves over steps. `marks` are steps at which something changed."""
    with _drawn(4.4, 2.5) as (figure, axes):
        for line, color in zip(lines, itertools.cycle(SERIES), strict=False):
            dots = "o" if len(line.x) < 30 else ""
            values = [max(y, SMALLEST) for y in line.y] if log else line.y
            axes.plot(line.x, values, color=color, lw=1.8, marker=dots, ms=3.5, label=as_label(line.name))
        for mark in marks:
            axes.axvline(mark, color=WARN, lw=1.2, ls=(0, (4, 3)))
        if log:
            _log(axes.set_yscale, axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step")
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
    return _svg(figure, label)


def bars(rows: Sequence[Mapping[str, Any]], label: str) -> str:
    """kl_k3 of each bucket, as bars on a logarithmic axis with the share of the tokens beside."""
    total = sum(float(row["tokens"]) for row in rows) or 1.0
    with _drawn(4.4, 0.9 + 0.24 * len(rows)) as (figure, axes):
        places = range(len(rows))
        values = [max(float(row["kl_k3"]), SMALLEST) for row in rows]
        low = min(values) / 2
        axes.barh(places, [value - low for value in values], left=low, color=FIRST, height=0.72)
        axes.set_yticks(places, [as_label(str(row["bucket"])) for row in rows])
        for place, (value, row) in enumerate(zip(values, rows, strict=True)):
            axes.annotate(f"{value:.1e} · {float(row['tokens']) / total:.0%}", (value, place), (4, 0),
                          textcoords="offset points", va="center", fontsize=8.5, color=MUTED)  # fmt: skip
        _log(axes.set_xscale, axes.xaxis)
        axes.set_xlim(low, max(values) * (max(values) / low) ** 0.55)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("kl_k3 · share of tokens")
    return _svg(figure, label)


def ladder(runs: Mapping[str, float], label: str) -> str:
    """The rungs of the ladder on a logarithmic line, and each run as a mark above it."""
    with _drawn(4.4, 2.0 + 0.2 * len(runs)) as (figure, axes):
        for place, rung in enumerate(record().steps):
            axes.plot([rung.k3], [0], marker="|", ms=14, mew=2, color=MUTED)
            axes.annotate(rung.name, (rung.k3, 0), (0, -15 if place % 2 else -26),
                          textcoords="offset points", ha="center", va="top", fontsize=9, color=MUTED)  # fmt: skip
        for place, (name, value) in enumerate(runs.items(), 1):
            color = SERIES[(place - 1) % len(SERIES)]
            axes.plot([max(value, SMALLEST)], [place], marker="D", ms=8, color=color)
            axes.annotate(f"{as_label(name)}  {value:.2g}", (max(value, SMALLEST), place), (0, 8),
                          textcoords="offset points", ha="center", fontsize=9.5, color=INK)  # fmt: skip
        _log(axes.set_xscale, axes.xaxis)
        known = [max(value, SMALLEST) for value in runs.values()]
        axes.set_xlim(min(1e-4, *known) / 4, max(1.0, *known) * 4)
        axes.set_ylim(-1.2, len(runs) + 0.9)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("kl_k3")
    return _svg(figure, label)


@contextmanager
def _drawn(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    with _quiet_style():
        figure = Figure(figsize=(width, height))
        yield figure, figure.add_subplot()


def as_label(name: str) -> str:
    """A foreign name as matplotlib draws it: cut, without mathematics between dollars, and with a legend's entry.

    An empty name, or one that begins with an underscore, would have none.
    """
    text = printable(name)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return (f" {text}" if text[:1] in ("", "_") else text).replace("$", r"\$")


@contextmanager
def _quiet_style() -> Iterator[None]:
    """The page's style, without warnings: they would quote foreign names, and the page's own fonts have all glyphs."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _log(set_scale: Any, axis: Any) -> None:
    set_scale("log")
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_minor_formatter(NullFormatter())


def _adopted(tag: str, prefix: str) -> str:
    """A tag of matplotlib's with the ids and the colours of the page."""
    for color, variable in VARIABLES.items():
        tag = tag.replace(color, variable)
    return re.sub(r'(\bid="|href="#|url\(#)', lambda found: found[1] + prefix, tag)


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element of the page: its ids are its own, its colours the page's variables."""
    file = io.StringIO()
    with _quiet_style():
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text))
    prefix = f"p{next(_numbers)}-"
    text = re.sub(r"<[^>]+>", lambda tag: _adopted(tag[0], prefix), text)  # between tags stand foreign names
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)

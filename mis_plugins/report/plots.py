"""Plots of the page, as shapes with their places: `page.html` draws them as SVG in the page's own colours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.explain.rungs import record

LEFT, RIGHT, TOP = 84.0, 428.0, 14.0  # of the axes, in units of which a plot is 440 wide
ROW = 24.0  # between two buckets, or two names of lines
COLORS = ("first", "second", "warn", "muted")  # variables of page.css
SMALLEST = 1e-9
LONGEST = 40  # letters of a name in a plot
MOST_TICKS = 6
Shape = Mapping[str, Any]
Ticks = list[tuple[float, str]]  # place and text


@dataclass(frozen=True)
class Axis:
    """A scale from numbers to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, x: float) -> float:
        low, high, x = (math.log10(one) if self.log else one for one in (self.low, self.high, x))
        return round(self.start + (self.end - self.start) * (x - low) / ((high - low) or 1.0), 1)

    @property
    def ticks(self) -> Ticks:
        """Powers of ten, or multiples of 1, 2 or 5 of one; `MOST_TICKS` or fewer."""
        if self.log:
            exponents = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            few = (1, 2, 5) if len(exponents) < 3 else (1,)
            places = [(n, e) for e in exponents for n in few if self.low <= n * 10.0**e <= self.high]
            return [
                (self.at(n * 10.0**e), f"{n}e{e}") for n, e in places[:: -(-len(places) // MOST_TICKS) or 1]
            ]
        least = (self.high - self.low or 1.0) / MOST_TICKS
        power = 10 ** math.floor(math.log10(least))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [(self.at(step * n), f"{step * n:.6g}") for n in range(first, last + 1)]


@dataclass(frozen=True)
class Plot:
    """A plot, ready to be drawn.

    label: what is shown, for who cannot see it; `axis` names the horizontal axis.
    lines, dots, texts: shapes with their places, and a color or an anchor.
    marks: places of vertical lines at which something changed.
    """

    label: str
    axis: str
    height: float
    x: Ticks
    y: Ticks = field(default_factory=list)
    lines: list[Shape] = field(default_factory=list)
    dots: list[Shape] = field(default_factory=list)
    texts: list[Shape] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)


def curve(
    lines: Mapping[str, Mapping[int, float]], label: str, log: bool = False, marks: Sequence[int] = ()
) -> Plot:
    """Values over steps, a line for each name. `marks` are steps at which something changed.

    `log` asks for a logarithmic axis, which values within a factor of ten do not get: theirs begins at 0.
    """
    steps = [step for line in lines.values() for step in line]
    known = [y for line in lines.values() for y in line.values()]
    wide = log and max(known) >= 10 * max(min(known), SMALLEST)
    low, high = (max(min(known), SMALLEST), max(known)) if wide else (0.0 if log else min(known), max(known))
    edge = 0.06 * (high - low) or abs(high) or 1.0
    ends = (low / 1.2, high * 1.2) if wide else (low if log else low - edge, high + edge)
    top = TOP + (ROW * len(lines) if len(lines) > 1 else 0.0)
    x, y = Axis(min(steps), max(steps), LEFT + 6, RIGHT), Axis(*ends, top + 180, top, wide)
    drawn = []
    for (name, line), color in zip(lines.items(), itertools.cycle(COLORS), strict=False):
        points = [(x.at(step), y.at(max(value, low))) for step, value in line.items()]
        drawn.append({"name": short(name), "points": points, "color": color})
    ticks = [(place, text) for place, text in x.ticks if text.lstrip("-").isdigit()]
    return Plot(label, "step", top + 230, ticks, y.ticks, drawn, marks=[x.at(step) for step in marks])


def span(tables: Iterable[Sequence[Mapping[str, Any]]]) -> tuple[float, float]:
    """Ends of the one axis on which the kl_k3 of all tables are drawn; its right end leaves room for words."""
    values = [max(float(row["kl_k3"]), SMALLEST) for rows in tables for row in rows]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    return low / 2, high * max(high / low, 10.0) ** 0.5


def dots(rows: Sequence[Mapping[str, Any]], label: str, ends: tuple[float, float]) -> Plot:
    """kl_k3 of each bucket, as dots on a logarithmic axis between `ends`, with the share of the tokens beside."""
    total = sum(float(row["tokens"]) for row in rows) or 1.0
    x, height = Axis(*ends, LEFT + 16, RIGHT, log=True), TOP + ROW * len(rows) + 50
    drawn = Plot(label, "kl_k3 · share of tokens", height, x.ticks)
    for place, row in enumerate(rows):
        value, y = max(float(row["kl_k3"]), SMALLEST), TOP + ROW * (place + 0.5)
        drawn.y.append((y, short(str(row["bucket"]))))
        drawn.dots.append({"x": x.at(value), "y": y, "color": "first"})
        text = f"{value:.1e} · {float(row['tokens']) / total:.0%}"
        drawn.texts.append({"x": x.at(value) + 9, "y": y + 4, "text": text, "anchor": "start"})
    return drawn


def ladder(name: str, kl_k3: float, label: str) -> Plot:
    """The rungs of the ladder on a logarithmic line, and a run as a mark above it."""
    value = max(kl_k3, SMALLEST)
    x = Axis(min(1e-4, value) / 4, max(1.0, value) * 4, 20.0, RIGHT, log=True)
    drawn = Plot(label, "kl_k3", 210.0, x.ticks)
    for place, rung in enumerate(record().steps):
        drawn.lines.append(
            {"points": [(x.at(rung.k3), 92), (x.at(rung.k3), 108)], "color": "muted", "name": ""}
        )
        below = {"x": x.at(rung.k3), "y": 138 if place % 2 else 124, "text": rung.name}
        drawn.texts.append(below | {"anchor": "middle"})
    drawn.dots.append({"x": x.at(value), "y": 62, "color": "first"})
    side = ("start", "middle", "end")[min(int(3 * (x.at(value) - x.start) / (x.end - x.start)), 2)]
    run = {"x": x.at(value), "y": 46, "text": f"{short(name)}  {kl_k3:.2g}"}
    drawn.texts.append(run | {"anchor": side})
    return drawn


def short(name: str) -> str:
    """A foreign name, cut."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"

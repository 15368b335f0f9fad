"""The picture of the mismatch: k3 of each rung, and the window that fits each step of the ladder by length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.ladder.rungs import RUNGS
from lab.ladder.shipped import SAMPLED_AS_TRAINED, by_k3
from lab.palette import BLACK, FRAME, GRID, OTHERS, TEXT
from mis_plugins.config.loading import load, presets
from mis_plugins.explain.rungs import windows
from mis_plugins.shared.files import replaced

EXPERTS = (1e-3, 1e-1)  # k3 of mixtures of experts, as the Miles blog tells it
PRESET = "geometric-mis"  # whose window is drawn beside the responses


def draw(measured: Mapping[str, Any], output: Path) -> None:
    """Write the picture of a record."""
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    _sizes(left, measured)
    _windows(right, measured)
    for axes in (left, right):
        axes.tick_params(colors=TEXT, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FRAME)
    with replaced(output) as partial:
        figure.savefig(partial, dpi=110, format="png")


def _sizes(axes: Axes, measured: Mapping[str, Any]) -> None:
    axes.set_title(f"k3 a token of {measured['model']}, trainer in bf16", loc="left", fontsize=10, color=TEXT)
    axes.axvspan(*EXPERTS, color=GRID, zorder=0)
    axes.text(EXPERTS[0], -0.75, " mixtures of experts, says the Miles blog", fontsize=8, color=TEXT)
    rungs = by_k3(measured["rungs"])
    for place, rung in enumerate(rungs.values()):
        k3 = rung["mismatch"][SAMPLED_AS_TRAINED]["k3"][0]
        axes.plot([k3], [place], "D", color=BLACK, ms=6)
        axes.annotate(f"{k3:.2g}", (k3, place), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rungs)), [RUNGS[name].words for name in rungs])
    axes.set_ylim(len(rungs) - 0.5, -1)
    axes.set_xscale("log")


def _windows(axes: Axes, measured: Mapping[str, Any]) -> None:
    """Draw a bar for each step of the ladder, at each length that all rungs have responses of."""
    axes.set_title("(prod r)^(1/n) of nine of ten responses of n tokens", loc="left", fontsize=10, color=TEXT)
    [window] = windows(load(presets()[PRESET]))
    low, high = (math.exp(limit) for limit in window.limits if limit is not None)
    axes.axhspan(low, high, color=BLACK, lw=0, alpha=0.35, label=f"window of {PRESET}")
    steps = {name: rung for name, rung in by_k3(measured["rungs"]).items() if RUNGS[name].step}
    lengths = sorted(set.intersection(*({*map(int, rung["fits"])} for rung in measured["rungs"].values())))
    for place, ((name, rung), color) in enumerate(zip(steps.items(), OTHERS, strict=False)):
        fitting = [rung["fits"][str(length)] for length in lengths]
        shift = (place - (len(steps) - 1) / 2) * 0.8 / len(steps)
        places = [group + shift for group in range(len(fitting))]
        lows, highs = [low for low, _ in fitting], [high for _, high in fitting]
        axes.vlines(places, lows, highs, color=color, lw=5, label=name)
    axes.set_xticks(range(len(lengths)), [f"n = {length}" for length in lengths])
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, fontsize=8, loc="lower right")

"""The results of the asynchrony experiment as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.palette import FRAME, TEXT, color, dress

WORDS = {
    "synchronous": "no token is old",
    "standard": "weight over all updates since\nthe token was written",
    "segment-wise": "weight over one update,\nclipped as AReaL does",
    "clip against next": "weight over one update,\nclipped against the next version",
    "no weights": "old tokens, no weights",
}
"""What each curve is, in the words of the legend."""
AGAIN = "on-policy, again"


def draw(content: Mapping[str, Any], output: Path) -> None:
    """Draw variance by age above rewards, a column for each learning rate; then bias above the legend."""
    rates = list(content["variance"])
    figure = Figure(figsize=(3.9 * len(rates) + 3, 7), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(rates) + 1, squeeze=False, width_ratios=[1] * len(rates) + [0.8])
    for column, lr in enumerate(rates):
        _variance(axes[0][column], lr, content["variance"][lr])
        _rewards(axes[1][column], lr, content["rewards"][lr])
    for row in axes[:, : len(rates)]:
        low, high = min(axis.get_ylim()[0] for axis in row), max(axis.get_ylim()[1] for axis in row)
        for axis in row:
            axis.set_ylim(low, high)
    _bias(axes[0][-1], content["bias"])
    _legend(axes[1][-1])
    figure.savefig(output, dpi=100, format="png")


def _legend(axis: Axes) -> None:
    """Draw the legend of the colours, in a place without axes."""
    axis.set_axis_off()
    handles = [
        Line2D([], [], color=color(name) if name in WORDS else FRAME, marker="o", lw=2, label=words)
        for name, words in {**WORDS, AGAIN: "on-policy gradient, drawn twice"}.items()
    ]
    axis.legend(
        handles=handles, frameon=False, fontsize=10, loc="center left", title="a dot a seed; a line, a bar: their mean"
    )


def _variance(axis: Axes, lr: str, runs: Sequence[Mapping[str, Any]]) -> None:
    for kind in ("standard", "segment-wise"):
        curves = [{int(age): one[kind] for age, one in run.items() if age != "all"} for run in runs]
        _curves(axis, kind, [[(age, value) for age, value in curve.items() if value > 0] for curve in curves])
    axis.set_yscale("log")
    _dress(axis, f"Variance of the weights, learning rate {lr}", "age of the token in updates")


def _rewards(axis: Axes, lr: str, methods: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> None:
    for name, runs in methods.items():
        _curves(axis, name, [[(tokens / 1000, reward) for tokens, reward in run] for run in runs])
    axis.set_ylim(-0.03, 1.03)
    _dress(axis, f"Held-out reward, learning rate {lr}", "thousand tokens trained on")


def _curves(axis: Axes, name: str, curves: Sequence[Sequence[Sequence[float]]]) -> None:
    """Draw small dots for each seed, and a line of their mean over as many points as the shortest seed has."""
    for curve in curves:
        axis.plot(*zip(*curve, strict=True), ".", color=color(name), alpha=0.45, markersize=4)
    points = list(zip(*curves, strict=False))
    mean = [(fmean(x for x, _ in point), fmean(y for _, y in point)) for point in points]
    axis.plot(*zip(*mean, strict=True), color=color(name), linewidth=2.2, marker="o", markersize=3, label=name)


def _bias(axis: Axes, bias: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> None:
    names = ["on-policy", "standard", "segment-wise", "no weights"]
    for place, name in enumerate(names):
        values = [[run[name]["pooled"] for run in runs] for runs in bias.values()]
        at = [index + (place - 1.5) * 0.2 for index in range(len(values))]
        axis.bar(
            at, [fmean(one) for one in values], 0.18, color=FRAME if name == "on-policy" else color(name), label=name
        )
        for x, one in zip(at, values, strict=True):
            axis.plot([x] * len(one), one, ".", color=TEXT, markersize=3)
    axis.set_xticks(range(len(bias)), list(bias))
    _dress(axis, "Cosine to the on-policy gradient", "learning rate")


def _dress(axis: Axes, title: str, x_label: str) -> None:
    dress(axis, title, size=10, labels=8)
    axis.set_xlabel(x_label, color=TEXT, fontsize=9)

"""The experiment's results as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mis_plugins.local.report import COLORS, FRAME, GRID, TEXT

COLOR = {"standard": COLORS[0], "segment-wise": COLORS[1], "synchronous": COLORS[2], "no weights": COLORS[3]}


def draw(content: Mapping[str, Any], output: Path) -> None:
    """Variance by age on top, rewards in the middle, a column a learning rate; bias and throughput below."""
    rates = list(content["variance"])
    figure = Figure(figsize=(4 * len(rates), 10), layout="constrained", facecolor="white")
    axes = figure.subplots(3, len(rates), squeeze=False)
    for column, lr in enumerate(rates):
        _variance(axes[0][column], lr, content["variance"][lr])
        _rewards(axes[1][column], lr, content["rewards"][lr])
    _bias(axes[2][0], content["bias"])
    for axis, step in zip(
        axes[2][1:], sorted({run["step_seconds"] for run in content["throughput"]["rows"]}), strict=False
    ):
        _throughput(axis, step, [run for run in content["throughput"]["rows"] if run["step_seconds"] == step])
    figure.savefig(output, dpi=150, format="png")


def _variance(axis: Axes, lr: str, runs: Sequence[Mapping[str, Any]]) -> None:
    for kind in ("standard", "segment-wise"):
        curves = [{int(age): one[kind] for age, one in run.items() if age != "all"} for run in runs]
        _curves(axis, kind, [[(age, value) for age, value in curve.items() if value > 0] for curve in curves])
    axis.set_yscale("log")
    _dress(axis, f"Variance of the weights, --lr {lr}", "age, updates")


def _rewards(axis: Axes, lr: str, methods: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> None:
    for name, runs in methods.items():
        _curves(axis, name, [[(tokens / 1000, reward) for tokens, reward in run] for run in runs])
    axis.set_ylim(-0.03, 1.03)
    _dress(axis, f"Held-out reward, --lr {lr}", "thousand tokens trained on")


def _curves(axis: Axes, name: str, curves: Sequence[Sequence[Sequence[float]]]) -> None:
    """One thin line a seed, and their mean: over the points of the shortest, which differ little in their places."""
    for curve in curves:
        axis.plot(*zip(*curve, strict=True), color=COLOR[name], alpha=0.3, linewidth=0.8)
    points = list(zip(*curves, strict=False))
    mean = [(fmean(x for x, _ in point), fmean(y for _, y in point)) for point in points]
    axis.plot(
        *zip(*mean, strict=True), color=COLOR[name], linewidth=2.2, marker="o", markersize=3, label=name
    )


def _bias(axis: Axes, bias: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> None:
    names = ["on-policy", "standard", "segment-wise", "no weights"]
    for place, name in enumerate(names):
        values = [[run[name]["pooled"] for run in runs] for runs in bias.values()]
        at = [index + (place - 1.5) * 0.2 for index in range(len(values))]
        axis.bar(at, [fmean(one) for one in values], 0.18, color=COLOR.get(name, FRAME), label=name)
        for x, one in zip(at, values, strict=True):
            axis.plot([x] * len(one), one, ".", color=TEXT, markersize=3)
    axis.set_xticks(range(len(bias)), list(bias))
    _dress(axis, "Cosine to the on-policy gradient", "--lr")


def _throughput(axis: Axes, step: float, runs: Sequence[Mapping[str, Any]]) -> None:
    names = [str(run["bound"]) for run in runs]
    axis.bar(names, [fmean(run["tokens_a_second"]) for run in runs], color=COLORS[4])
    for name, run in zip(names, runs, strict=True):
        axis.plot([name] * len(run["tokens_a_second"]), run["tokens_a_second"], ".", color=TEXT, markersize=3)
    engine = f"{step:g} s a decode step" if step else "engine at full speed"
    _dress(axis, f"Tokens a second, {engine}", "--max-head-offpolicyness")


def _dress(axis: Axes, title: str, x_label: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=TEXT, fontweight="bold")
    axis.set_xlabel(x_label, color=TEXT, fontsize=9)
    axis.tick_params(colors=TEXT, labelsize=8)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FRAME)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)

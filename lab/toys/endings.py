"""Draw runs as small multiples: a panel for each method, a line for each seed, nothing averaged.

A run that recorded its course is drawn over its rollouts; a record of start and end alone is drawn as two
points.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.palette import TEXT, color, dress
from mis_plugins.shared.files import replaced

Run = Mapping[str, Any]
MOST_PANELS = 5  # beside each other
LETTERS = 28  # of a line of a note above a panel


def points(run: Run, policy: str) -> list[Sequence[float]]:
    """Return (rollout, reward) of a policy: its course, or its start and end at 0 and 1."""
    held = run.get("course", {}).get(policy)
    return held or [(0, run[f"{policy}_start"]), (1, run[f"{policy}_final"])]


def draw(methods: Mapping[str, Sequence[Run]], output: Path, notes: Mapping[str, str] | None = None) -> None:
    """Draw a panel for each method, whose runs are seeds; a note stands below the method's name."""
    rows = math.ceil(len(methods) / MOST_PANELS)
    columns = math.ceil(len(methods) / rows)
    figure = Figure(figsize=(2.5 * max(columns, 3), 0.3 + 3 * rows), layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(methods) :]:
        axis.set_axis_off()
    for axis, (name, runs) in zip(axes.flat, methods.items(), strict=False):
        _panel(axis, color(name), runs)
        note = textwrap.fill((notes or {}).get(name, ""), LETTERS)
        _dress(axis, name, note, any("course" in run for run in runs))
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out reward", color=TEXT)
    figure.legend(handles=_key(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    with replaced(output) as partial:
        figure.savefig(partial, dpi=100, format="png")


def _panel(axis: Axes, shade: str, runs: Sequence[Run]) -> None:
    for run in runs:
        for policy, style, inside in (("rollout", "--", "none"), ("trainer", "-", shade)):
            line = points(run, policy)
            size = (5 if len(line) == 2 else 2.5) + 3 * (policy == "rollout")
            axis.plot(*zip(*line, strict=True), style, marker="o", color=shade, mfc=inside, ms=size, lw=1.2, alpha=0.9)


def _dress(axis: Axes, name: str, note: str, has_course: bool) -> None:
    dress(axis, f"{name}\n{note}" if note else name, size=9)
    axis.set_ylim(-0.05, 1.05)
    if has_course:
        axis.set_xlabel("rollout", color=TEXT, fontsize=9)
    else:
        axis.set_xlim(-0.25, 1.25)
        axis.set_xticks([0, 1], ["start", "end"])


def _key() -> list[Line2D]:
    trainer = Line2D([], [], color=TEXT, marker="o", ms=6, lw=1.2, label="the trainer's policy, a line a seed")
    rollout = Line2D(
        [],
        [],
        color=TEXT,
        marker="o",
        mfc="white",
        ms=6,
        lw=1.2,
        ls="--",
        label="the rollout engine's, of the same seed",
    )
    return [trainer, rollout]


def of_collapse(content: Mapping[str, Any], path: Path) -> None:
    """Does correction help? A panel for each method, of the runs with the advantage R - 1."""
    draw(content["runs"]["R-1"], path)


ARMS_OF_EXPERTS = {
    "uncorrected": "no correction",
    "token TIS": "token weights up to 2",
    "route": "token TIS, and tokens of another route dropped",
    "R3": "the engine's routes replayed",
    "R3 + TIS": "routes replayed, and token TIS",
    "truly on policy": "an engine in fp32 on the trainer's kernels",
    "blog 1": "Miles blog, MoE 1: TIS up to 2, window, normalized",
    "blog 2": "Miles blog, MoE 2: TIS up to 1.5, window, normalized",
    "blog 3": "Miles blog, MoE 3: TIS up to 1.5, window",
    "blog 4": "Miles blog, MoE 4: TIS up to 1.5",
}


def of_experts(content: Mapping[str, Any], path: Path) -> None:
    """A mixture of experts: what each arm of the recipe does about the mismatch."""
    draw(content["runs"], path, ARMS_OF_EXPERTS)


def of_truth(content: Mapping[str, Any], path: Path) -> None:
    """The demonstration's collapse, and a run on equal log-probs: a KL of exactly 0 has no place on a log axis."""
    runs: Mapping[str, Mapping[str, Any]] = content["runs"]
    notes = {
        name: f"{run['equal']:,} of {run['tokens']:,} log-probs equal\nk3 {run['k3_kl']:.2g}"
        + (", exactly" if run["k3_kl"] == 0 else "")
        for name, run in runs.items()
    }
    draw({name: [run] for name, run in runs.items()}, path, notes)

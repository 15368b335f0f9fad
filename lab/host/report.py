"""What a run shows and leaves: a row a rollout, metrics.jsonl, summary.json, curves.png, a sentence.

A rollout's record in metrics.jsonl has these keys, and the metrics of the TIS hook under their own names.

rollout: index of the rollout, from 0.
reward_rollout: mean reward of the training samples, which the rollout policy drew.
eval_trainer, eval_rollout: mean reward of either policy on held-out prompts, with the weights that drew this rollout;
    rollout 0 therefore shows the start. Absent between evaluations.
k3_kl: k3 estimate of KL(rollout policy || trainer policy) per token of the training samples; absent where no log-probs
    were recomputed for a custom loss.
kept_fraction: tokens that pass rejection over tokens in the loss; absent where a custom loss does not tell.
grad_norm, loss: means over the optimizer steps of this rollout.
grad_cosine: cosine of this rollout's gradient, as corrected, to an on-policy one at the same weights; absent where
    none was asked for.
seconds: wall time of this rollout, evaluation included.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from lab.palette import FRAME, TEXT, color, dress
from mis_plugins.shared.files import replaced, write_text


@dataclass(frozen=True)
class MetricsLog:
    """A file of JSON lines, one a rollout. Interrupted at any moment, it holds whole lines only."""

    path: Path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, in one unbuffered write. JSON has no NaN: what is not finite becomes null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """All records; a last line that a crash of the machine cut short is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def truncate(self, after: int) -> None:
        """Forget the rollouts beyond `after`, which a run resumed from its checkpoint will do again."""
        kept = [record for record in self.read() if record["rollout"] <= after]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))


def summarize(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run in a few numbers; a number that was never recorded is None.

    rollouts, seconds: how many and how long, in total.
    trainer_start, rollout_start: held-out reward of either policy at the first evaluation.
    trainer_final, rollout_final: its mean over the evaluations of the last tenth of the rollouts.
    collapsed: whether `trainer_final` is below half of `trainer_start`.
    k3_kl, kept_fraction, grad_cosine: means over the run.
    """
    summary: dict[str, Any] = {"rollouts": len(records), "seconds": sum(_values(records, "seconds"))}
    for policy in ("trainer", "rollout"):
        summary[f"{policy}_start"], summary[f"{policy}_final"] = _start_and_final(records, f"eval_{policy}")
    summary["collapsed"] = _collapsed(summary["trainer_start"], summary["trainer_final"])
    for name in ("k3_kl", "kept_fraction", "grad_cosine"):
        values = _values(records, name)
        summary[name] = fmean(values) if values else None
    return summary


def _collapsed(start: float | None, final: float | None) -> bool:
    return start is not None and final is not None and final < start / 2


def in_words(name: str, summary: Mapping[str, Any]) -> str:
    """One run in a sentence, from its numbers alone."""
    without = {None: "was not evaluated", 0.0: "had no reward to lose"}
    fate = without.get(summary["trainer_start"], "kept at least half of its reward")
    fate = "collapsed" if summary["collapsed"] else fate
    return (
        f"{name}: the trainer policy {fate}; its held-out reward went from {_number(summary['trainer_start'])} to "
        f"{_number(summary['trainer_final'])}, the rollout policy's from {_number(summary['rollout_start'])} to "
        f"{_number(summary['rollout_final'])}, at a mean k3 KL per token of {_number(summary['k3_kl'], '.2g')}, with "
        f"{_number(summary['kept_fraction'], '.0%')} of the tokens kept and a mean cosine of "
        f"{_number(summary['grad_cosine'])} to an on-policy gradient."
    )


Histories = Mapping[str, Sequence[Mapping[str, Any]]]  # label to records


@dataclass(frozen=True)
class Panel:
    """One axis of the picture: which key under which title; `limits` give way to a curve that falls below."""

    key: str
    title: str
    scale: str = "linear"
    limits: tuple[float, float] | None = None


ZERO_TO_ONE = (-0.03, 1.03)
PANELS = (
    Panel("eval_trainer", "Reward of the trainer policy", limits=ZERO_TO_ONE),
    Panel("eval_rollout", "Reward of the rollout policy", limits=ZERO_TO_ONE),
    Panel("k3_kl", "k3 KL(rollout ‖ trainer) per token", scale="log"),
    Panel("kept_fraction", "Fraction of tokens kept", limits=ZERO_TO_ONE),
    Panel("grad_cosine", "Cosine to the on-policy gradient", limits=ZERO_TO_ONE),
)


def draw_histories(histories: Histories, output: Path) -> None:
    """Draw the curves of runs over each other as a PNG file.

    A dot is what was measured, a line the moving mean over a twentieth of the run; it begins at the first dot.
    """
    panels = [panel for panel in PANELS if panel.key != "grad_cosine" or _recorded(histories, panel.key)]
    figure = Figure(figsize=(11, 7), layout="constrained", facecolor="white")
    axes = figure.subplot_mosaic(_mosaic([panel.key for panel in panels]), sharex=True)
    for panel in panels:
        _draw(axes[panel.key], panel, histories)
        _dress(axes[panel.key], panel, empty=not _recorded(histories, panel.key))
    with replaced(output) as partial:
        figure.savefig(partial, dpi=150, format="png")


def _draw(axis: Axes, panel: Panel, histories: Histories) -> None:
    curves = {label: _shown(history, panel.key) for label, history in histories.items()}
    zero = _zero_of(curves) if panel.scale == "log" else None
    ends: list[tuple[float, float, str, str]] = []
    for index, (label, curve) in enumerate(curves.items()):
        shade, mean = color(label, index), _smooth(curve)
        axis.plot(list(curve), _lifted(curve, zero), ".", color=shade, alpha=0.35, markersize=3)
        if mean:
            line = _lifted(mean, zero)
            axis.plot(list(mean), line, color=shade, linewidth=2)
            ends.append((list(mean)[-1], line[-1], label, shade))
    _name(axis, ends, panel)
    if zero is not None and any(0.0 in curve.values() for curve in curves.values()):
        axis.axhline(zero, color=FRAME, linewidth=0.8, linestyle=":")
        axis.text(0.01, zero, "exactly 0", transform=axis.get_yaxis_transform(), fontsize=8, color=TEXT, va="bottom")


def _shown(history: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """A curve; a gradient's cosine ends where the run has collapsed, since no direction is left to compare."""
    curve = _curve(history, key)
    rewards = _curve(history, "eval_trainer")
    if key != "grad_cosine" or not rewards:
        return curve
    start = next(iter(rewards.values()))
    fallen = next((rollout for rollout, reward in rewards.items() if _collapsed(start, reward)), math.inf)
    return {rollout: value for rollout, value in curve.items() if rollout < fallen}


def _zero_of(curves: Mapping[str, Mapping[int, float]]) -> float:
    """Where a logarithmic axis shows values of exactly 0: a decade below the smallest other."""
    values = [value for curve in curves.values() for value in curve.values() if value > 0]
    return 10.0 ** (math.floor(math.log10(min(values))) - 1) if values else 1.0


def _lifted(curve: Mapping[int, float], zero: float | None) -> list[float]:
    return [zero if zero is not None and value <= 0 else value for value in curve.values()]


def _name(axis: Axes, ends: Sequence[tuple[float, float, str, str]], panel: Panel) -> None:
    """Write the name of each line at its end, no two names over each other."""
    heights = sorted(ends, key=lambda end: end[1])
    for place, (x, y, label, shade) in enumerate(heights):
        nudge = 9 * (place - (len(heights) - 1) / 2) if _near(heights, panel) else 0
        axis.annotate(label, (x, y), xytext=(5, nudge), textcoords="offset points", color=shade, fontsize=9,
                      va="center", annotation_clip=False, parse_math=False)  # fmt: skip


def _near(ends: Sequence[tuple[float, float, str, str]], panel: Panel) -> bool:
    """Whether the ends of two lines are so near that their names would touch."""
    heights = [math.log10(y) if panel.scale == "log" and y > 0 else 10 * y for _, y, _, _ in ends]
    return any(above - below < 1 for below, above in itertools.pairwise(heights))


def _dress(axis: Axes, panel: Panel, empty: bool) -> None:
    dress(axis, panel.title)
    axis.set_xlabel("rollout", color=TEXT)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.tick_params(labelbottom=True)
    if empty:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=FRAME)
    elif panel.scale == "log" and axis.dataLim.ymax > 0:
        _log_axis(axis)
    if panel.limits:
        low, high = panel.limits
        axis.set_ylim(min(low, axis.get_ylim()[0] - 0.05), high)


def _log_axis(axis: Axes) -> None:
    """Label 1, 2 and 5 within two decades and powers of ten over more, as plain numbers where short."""
    axis.set_yscale("log", nonpositive="mask")
    low, high = axis.get_ylim()
    steps = (1, 2, 5) if high < 100 * low else (1,)
    axis.yaxis.set_major_locator(LogLocator(subs=steps, numticks=8))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _mosaic(keys: Sequence[str]) -> list[Any]:
    """The first two panels on top, half the width each; the others share the row below."""
    return [[key for key in row for _ in range(6 // len(row))] for row in (keys[:2], keys[2:])]


def _recorded(histories: Histories, key: str) -> bool:
    return any(_values(history, key) for history in histories.values())


def _curve(history: Iterable[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Values of one key by rollout, where the key was recorded."""
    return {record["rollout"]: float(record[key]) for record in history if record.get(key) is not None}


def _smooth(curve: Mapping[int, float]) -> dict[int, float]:
    """Centred moving mean over a twentieth of the points, cut at the end; the first point is the measured one."""
    values, widest = list(curve.values()), len(curve) // 40
    smoothed = {}
    for index, rollout in enumerate(curve):
        half = min(widest, index)
        smoothed[rollout] = fmean(values[index - half : index + half + 1])
    return smoothed


COLUMNS = {
    "rollout": ("rollout", ".0f"),
    "eval_trainer": ("reward trainer", ".3f"),
    "eval_rollout": ("reward rollout", ".3f"),
    "k3_kl": ("   k3 KL", ".2e"),
    "kept_fraction": (" kept", ".3f"),
    "seconds": ("seconds", ".2f"),
}
"""What is printed of each rollout: record key to heading, as wide as a number, and format."""


def headings(name: str, rollouts: int) -> str:
    """The lines above the rows of a run."""
    return f"{name}, {rollouts} rollouts\n" + "  ".join(heading for heading, _ in COLUMNS.values())


def row_of(record: Mapping[str, Any]) -> str:
    """One rollout as a row below `headings`."""
    cells = ((_number(record.get(key), form, "-"), heading) for key, (heading, form) in COLUMNS.items())
    return "  ".join(cell.rjust(len(heading)) for cell, heading in cells)


def _number(value: float | None, form: str = ".2f", lacking: str = "(not recorded)") -> str:
    return lacking if value is None else format(value, form)


def _start_and_final(records: Sequence[Mapping[str, Any]], key: str) -> tuple[float | None, float | None]:
    """The first value, and the mean over the last tenth of the rollouts (the last value if none is there)."""
    values = _values(records, key)
    last_tenth = _values(records[-math.ceil(len(records) / 10) :], key)
    return (values[0], fmean(last_tenth or values[-1:])) if values else (None, None)


def _values(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [float(record[key]) for record in records if record.get(key) is not None]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

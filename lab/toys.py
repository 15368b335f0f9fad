"""Pictures of toy experiments, drawn anew from their records.

    python -m lab.toys [NAME ...]

What ran an experiment lies in the history (`docs/results.md`).
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.toys:main", extra="verify")

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.palette import BLACK, BLUE, FRAME, GRID, SKY, TEXT, color, dress
from lab.provenance import parser_of
from mis_plugins.config.loading import START
from mis_plugins.shared.files import replaced

RESULTS = Path("lab/results")

# ---------------------------------------------------------------------- methods: a panel each, a line for each seed

Run = Mapping[str, Any]
MOST_PANELS = 5  # beside each other
LETTERS = 28  # of a line of a note above a panel


def _points(run: Run, policy: str) -> list[Sequence[float]]:
    """Return (rollout, reward) of a policy: its course, or its start and end at 0 and 1."""
    held = run.get("course", {}).get(policy)
    return held or [(0, run[f"{policy}_start"]), (1, run[f"{policy}_final"])]


def _of_methods(methods: Mapping[str, Sequence[Run]], output: Path, notes: Mapping[str, str] | None = None) -> None:
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
        _dress_panel(axis, name, note, any("course" in run for run in runs))
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out reward", color=TEXT)
    figure.legend(handles=_policies(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    with replaced(output) as partial:
        figure.savefig(partial, dpi=100, format="png")


def _panel(axis: Axes, shade: str, runs: Sequence[Run]) -> None:
    for run in runs:
        for policy, style, inside in (("rollout", "--", "none"), ("trainer", "-", shade)):
            line = _points(run, policy)
            size = (5 if len(line) == 2 else 2.5) + 3 * (policy == "rollout")
            axis.plot(*zip(*line, strict=True), style, marker="o", color=shade, mfc=inside, ms=size, lw=1.2, alpha=0.9)


def _dress_panel(axis: Axes, name: str, note: str, has_course: bool) -> None:
    dress(axis, f"{name}\n{note}" if note else name, size=9)
    axis.set_ylim(-0.05, 1.05)
    if has_course:
        axis.set_xlabel("rollout", color=TEXT, fontsize=9)
    else:
        axis.set_xlim(-0.25, 1.25)
        axis.set_xticks([0, 1], ["start", "end"])


def _policies() -> list[Line2D]:
    look: dict[str, Any] = {"color": TEXT, "marker": "o", "ms": 6, "lw": 1.2}
    trainer = Line2D([], [], label="the trainer's policy, a line a seed", **look)
    return [trainer, Line2D([], [], label="the rollout engine's, of the same seed", mfc="white", ls="--", **look)]


def of_collapse(content: Mapping[str, Any], path: Path) -> None:
    """Does correction help? A panel for each method, of the runs with the advantage R - 1."""
    _of_methods(content["runs"]["R-1"], path)


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
    _of_methods(content["runs"], path, ARMS_OF_EXPERTS)


def of_truth(content: Mapping[str, Any], path: Path) -> None:
    """The demonstration's collapse, and a run on equal log-probs: a KL of exactly 0 has no place on a log axis."""
    runs: Mapping[str, Mapping[str, Any]] = content["runs"]
    notes = {
        name: f"{run['equal']:,} of {run['tokens']:,} log-probs equal\nk3 {run['k3_kl']:.2g}"
        + (", exactly" if run["k3_kl"] == 0 else "")
        for name, run in runs.items()
    }
    _of_methods({name: [run] for name, run in runs.items()}, path, notes)


# ------------------------------------------------------------------------------------------ presets: a line each


def of_presets(content: Mapping[str, Any], path: Path) -> None:
    """Draw a line for each preset, best trainer first: rewards of both policies, and shares of tokens.

    A ring is wider than a dot, so that both are seen where the policies end alike. The presets of README's table are
    bold, and those of them that the record lacks are named.
    """
    ranked = dict(sorted(content["presets"].items(), key=lambda item: -item[1]["trainer_final"]))
    figure = Figure(figsize=(11, 1.2 + 0.2 * len(ranked)), layout="constrained", facecolor="white")
    rewards, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    column = lambda key: [one[key] for one in ranked.values()]  # noqa: E731
    lines = range(len(ranked))
    rewards.hlines(lines, column("rollout_final"), column("trainer_final"), color=FRAME, linewidth=0.8)
    rewards.plot(column("rollout_final"), lines, "o", color=BLUE, mfc="none", ms=9, label="rollout policy")
    rewards.plot(column("trainer_final"), lines, "o", color=BLUE, ms=4, label="trainer policy")
    shares.barh(lines, column("kept"), height=0.55, color=SKY, alpha=0.5, label="tokens kept")
    shares.plot(column("ess"), lines, "|", color=BLACK, markersize=9, label="effective sample size")
    rewards.set_yticks(lines, list(ranked), fontsize=8)
    for name, label in zip(ranked, rewards.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if name in START else "normal")
    rewards.set_ylim(len(ranked) - 0.4, -0.6)
    missing = ", ".join(name for name in START if name not in ranked)
    _dress_shares(rewards, "Final reward, one seed")
    not_run = f"; of it not run: {missing}" if missing else ""
    rewards.set_xlabel(f"bold: README's table{not_run}", loc="left", fontsize=9)
    _dress_shares(shares, "Share of the tokens")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100, format="png")


def _dress_shares(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlim(-0.03, 1.03)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(left=False, labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FRAME)


# ------------------------------------------------------------------------- asynchrony: a column each learning rate

WORDS = {
    "synchronous": "no token is old",
    "standard": "weight over all updates since\nthe token was written",
    "segment-wise": "weight over one update,\nclipped as AReaL does",
    "clip against next": "weight over one update,\nclipped against the next version",
    "no weights": "old tokens, no weights",
}
"""What each curve is, in the words of the legend."""
AGAIN = "on-policy, again"


def of_asynchrony(content: Mapping[str, Any], path: Path) -> None:
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
    _legend_of_asynchrony(axes[1][-1])
    figure.savefig(path, dpi=100, format="png")


def _legend_of_asynchrony(axis: Axes) -> None:
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
    _dress_curves(axis, f"Variance of the weights, learning rate {lr}", "age of the token in updates")


def _rewards(axis: Axes, lr: str, methods: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> None:
    for name, runs in methods.items():
        _curves(axis, name, [[(tokens / 1000, reward) for tokens, reward in run] for run in runs])
    axis.set_ylim(-0.03, 1.03)
    _dress_curves(axis, f"Held-out reward, learning rate {lr}", "thousand tokens trained on")


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
    _dress_curves(axis, "Cosine to the on-policy gradient", "learning rate")


def _dress_curves(axis: Axes, title: str, x_label: str) -> None:
    dress(axis, title, size=10, labels=8)
    axis.set_xlabel(x_label, color=TEXT, fontsize=9)


DRAWN: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "async": of_asynchrony,
    "collapse": of_collapse,
    "experts": of_experts,
    "presets": of_presets,
    "truly_on_policy": of_truth,
}
"""What draws each experiment, by the name of its record."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWN)} (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in DRAWN]:
        parser.error(f"no experiment {', '.join(unknown)}; choose from {', '.join(DRAWN)}")
    for name in options.names or DRAWN:
        record = RESULTS / f"{name}.json"
        DRAWN[name](json.loads(record.read_text(encoding="utf-8")), record.with_suffix(".png"))
    return 0

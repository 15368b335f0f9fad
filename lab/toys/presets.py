"""What does each preset do to one small run that collapses without correction?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.palette import BLACK, BLUE, FRAME, GRID, SKY
from mis_plugins.config.loading import START


def draw(content: Mapping[str, Any], path: Path) -> None:
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
    _dress(rewards, "Final reward, one seed")
    not_run = f"; of it not run: {missing}" if missing else ""
    rewards.set_xlabel(f"bold: README's table{not_run}", loc="left", fontsize=9)
    _dress(shares, "Share of the tokens")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100, format="png")


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlim(-0.03, 1.03)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(left=False, labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FRAME)

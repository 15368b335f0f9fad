"""What does each preset do to one small run that collapses without correction?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.provenance import markdown_table
from mis_plugins.config.families import START
from mis_plugins.shared.palette import BLACK, BLUE, FRAME, GRID, SKY
from mis_plugins.shared.provenance import as_markdown

HEADINGS = ("preset", "trainer", "rollout", "k3", "ESS", "kept", "formula")


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: how to read the table, and the table."""
    presets = content["presets"]
    start = next(iter(presets.values()))
    head = [
        "# Every preset on one run that collapses",
        "",
        "Drawn by `python -m lab.toys presets`. A Megatron-core policy reverses six digits; an engine with emulated",
        "int3 weights samples it; only failures push (advantage R - 1), so that the uncorrected run falls. Rewards on",
        "256 held-out prompts, sampled (standard error up to 0.03), of the trainer's float32 policy and of the rollout",
        "policy, mean over the last tenth of the run. k3: KL(rollout || trainer) a token. ESS: (sum w)^2 / (n sum w^2)",
        "of the weights applied. Kept: share of tokens whose policy loss counts. All three are means over the run.",
        f"Start: trainer {start['trainer_start']:.2f}, rollout {start['rollout_start']:.2f} (int3).",
        "",
        "Read it with care. One seed, one toy task, nothing was tuned: presets of one formula have equal rows, others",
        "may differ by chance. int3 mismatches a hundred times as much as a real engine, and the windows of many",
        "presets were made for real ones: [0.99, 1.001] keeps a few tokens in a hundred here. That does not make a run",
        "safe: AdamW divides by the gradient's own size, so that even a few sequences move the policy by whole steps.",
        "",
        f"    {content['recipe']}",
        "",
    ]
    table = markdown_table(HEADINGS, (_row(name, one) for name, one in presets.items()))
    return "\n".join([*head, table, as_markdown(content["measured_with"])])


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    numbers = [f"{one[key]:.2f}" for key in ("trainer_final", "rollout_final")]
    numbers += [f"{one['k3_kl']:.3f}", *(f"{one[key]:.2f}" for key in ("ess", "kept"))]
    return [name, *numbers, one["formula"].replace("|", "\\|")]


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
    rewards.set_xlabel(f"bold: README's table; of it not run: {missing or 'none'}", loc="left", fontsize=9)
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

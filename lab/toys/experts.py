"""A mixture of experts: what correction, dropping by route, replay (R3) and truth on policy do to one recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.provenance import as_markdown, markdown_table
from lab.toys import endings

HEADINGS = (
    *("arm", "what it does", "trainer, start", "trainer, final", "rollout, final"),
    *("k3 KL", "kept", "cosine (noise)"),
)

REWARDS = ("trainer_start", "trainer_final", "rollout_final")

WORDS = {
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
"""What each arm of the recipe does about the mismatch."""


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: what ran, the table, and the arms that collapsed."""
    fallen = {name: sum(run["collapsed"] for run in runs) for name, runs in content["runs"].items()}
    told = ", ".join(f"{name} ({many} of {len(content['seeds'])})" for name, many in fallen.items() if many)
    lines = [
        "# A mixture of experts, with and without the engine's routes",
        "",
        "Drawn by `python -m lab.toys experts`. The embedded host trains a tiny mixture of experts, of which a token",
        "takes 2 of 8, that reverses digits; the engine that samples it has emulated int3 weights, but for",
        "`truly on policy`. Rewards on 128 held-out prompts (standard error up to 0.05), an entry a seed: of the",
        "trainer's policy at the start and over the last tenth of the run, and of the rollout policy. Cosine: of the",
        "arm's gradient to the on-policy one, at the start and in the middle of the run, mean over both and the seeds;",
        "beside it the cosine of two independent on-policy gradients, the noise. Seeds of one toy task rank nothing",
        "within their spread.",
        "",
        f"    {content['recipe']}",
        "",
        *markdown_table(
            HEADINGS,
            [_row(name, runs) for name, runs in content["runs"].items()],
        ).splitlines(),
        "",
        f"Fell below half of the start: {told}." if told else "No arm collapsed: none fell below half of its start.",
        "",
        "![Held-out reward of every arm, a line a seed](experts.png)",
    ]  # fmt: skip
    return "\n".join([*lines, "", as_markdown(content["measured_with"])])


def _row(name: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    rewards = (", ".join(f"{run[key]:.2f}" for run in runs) for key in REWARDS)
    means = (fmean(run[key] for run in runs) for key in ("k3_kl", "kept_fraction"))
    compared = [one for run in runs for one in run["cosines"]]
    cosine, noise = (fmean(one[place] for one in compared) if compared else float("nan") for place in (1, 2))
    return (
        name,
        WORDS[name],
        *rewards,
        *(f"{mean:.2g}" for mean in means),
        f"{cosine:.2f} ({noise:.2f})",
    )


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each arm."""
    endings.draw(content["runs"], path, WORDS)

"""What becomes of the demonstration's collapse where rollout and training are equal to the bit?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.experiments.recipe import RECIPE
from lab.provenance import as_markdown, markdown_table
from lab.toys import endings

HEADINGS = ("run", "trainer", "rollout", "collapsed", "k3", "equal", "lowest, highest ratio", "seconds")


def markdown(content: Mapping[str, Any]) -> str:
    """Write the page of results: how to read the table, and the table."""
    head = [
        "# The demonstration's collapse, and the same run truly on policy",
        "",
        "Drawn by `python -m lab.toys truly_on_policy`. A Megatron-core policy reverses digits; only failures push",
        f"(advantage R - 1); seed {content['seed']}; nothing is corrected. Equal: sampled tokens whose log-prob is,",
        "byte for byte, the one that the trainer recomputes before the rollout's optimizer steps. Ratio: the trainer's",
        "probability over the engine's, of each token. Rewards on 256 held-out prompts, at the start and as the mean",
        "of the last tenth of the run, sampled (standard error up to 0.03).",
        "",
        "One seed of one toy task: it shows that the mismatch of int3 weights caused this collapse, not how often a",
        "mismatch causes one. Float32 on both sides without any pin does not fall either (`matched` in collapse.md,",
        "k3 6e-14).",
        "",
        f"    {' '.join(RECIPE)} --advantage-estimator reinforce --reward-shift -1",
        "",
    ]
    table = markdown_table(HEADINGS, (_row(name, run) for name, run in content["runs"].items()))
    return "\n".join([*head, table, as_markdown(content["measured_with"])])


def _row(name: str, run: Mapping[str, Any]) -> list[str]:
    rewards = [f"{run[f'{who}_start']:.2f} -> {run[f'{who}_final']:.2f}" for who in ("trainer", "rollout")]
    equal = f"{run['equal']} of {run['tokens']}"
    ratios = f"{run['lowest_ratio']:g}, {run['highest_ratio']:g}"
    collapsed, seconds = "yes" if run["collapsed"] else "no", f"{run['seconds']:.0f}"
    return [name, *rewards, collapsed, f"{run['k3_kl']:.2g}", equal, ratios, seconds]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the rewards of both runs, each with its mismatch in words: a KL of exactly 0 has no place on a log axis."""
    runs: Mapping[str, Mapping[str, Any]] = content["runs"]
    notes = {
        name: f"{run['equal']:,} of {run['tokens']:,} log-probs equal\nk3 {run['k3_kl']:.2g}"
        + (", exactly" if run["k3_kl"] == 0 else "")
        for name, run in runs.items()
    }
    endings.draw({name: [run] for name, run in runs.items()}, path, notes)

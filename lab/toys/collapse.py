"""Does correction help, when, and by how much? Every method, both advantages, several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.experiments.recipe import METHODS
from lab.host.cli.flags import PRECISIONS
from lab.provenance import as_markdown, markdown_table
from lab.toys import endings

COSINE_METHODS = tuple(method for method in METHODS if method != "matched")

COSINE_PRECISIONS = tuple(name for name in PRECISIONS if name != "fp32")

COSINE_ROLLOUTS = 16

# A policy that still fails often: near its optimum a gradient is nearly all noise.
COSINE_RECIPE = "--num-digits 6 --warmup-steps 120 --rollout-batch-size 64 --global-batch-size 512".split()


def markdown(content: Mapping[str, Any]) -> str:
    """The tables, and what they mean."""
    lines = [
        "# Collapse and correction",
        "",
        "Drawn by `python -m lab.toys collapse`. A Megatron-core policy reverses digits. `matched` samples it",
        "in float32, every other run in emulated int3 weights. Rewards on 256 held-out prompts, an entry a seed,",
        "sampled (standard error up to 0.03): of the trainer's float32 policy, and of the rollout policy, in int3.",
        "Final: mean over the last tenth of the run. Collapsed: the trainer's final reward is below half of its start.",
        "How the recipe was found, and where no correction helped: collapse-search.md.",
        "",
        f"    {content['recipe']}",
    ]
    for estimator, methods in content["runs"].items():
        lines += ["", f"## Advantage: {estimator}", "", *_run_table(methods)]
    lines += ["", *_cosine_section(content["gradient_cosine"])]
    return "\n".join([*lines, "", as_markdown(content["measured_with"])])


def _run_table(methods: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    rows = []
    for method, runs in methods.items():
        rewards = (
            _each(runs, key) for key in ("trainer_start", "trainer_final", "rollout_start", "rollout_final")
        )
        collapsed = f"{sum(run['collapsed'] for run in runs)} of {len(runs)}"
        means = (
            fmean(run[key] for run in runs) if runs else float("nan") for key in ("k3_kl", "kept_fraction")
        )
        rows.append((method, *rewards, collapsed, *(f"{mean:.2g}" for mean in means)))
    policies = (f"{policy}, {when}" for policy in ("trainer", "rollout") for when in ("start", "final"))
    return markdown_table(("method", *policies, "collapsed", "k3 KL", "kept"), rows).splitlines()


def _each(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(f"{run[key]:.2f}" for run in runs)


def _cosine_section(directions: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    lines = [
        "## Direction of the gradient",
        "",
        "Cosine of the policy gradient on samples of the rollout engine to the on-policy gradient, mean over the",
        "seeds; at a policy that still fails often, before any RL step, with the recipe changed by",
        "",
        f"    {' '.join(COSINE_RECIPE)}",
        "",
        f"A gradient pools {COSINE_ROLLOUTS} rollouts. Agreement: the cosine of two independent on-policy gradients of",
        "the same size, that is, how much sampling noise there is; the reference is the mean of the two.",
    ]
    for estimator, precisions in directions.items():
        at = precisions["on-policy"]
        title = f"Advantage {estimator}: reward {at['reward']:.2f}, agreement {at['agreement']:.3f}"
        lines += ["", title, ""]
        rows = [
            (name, f"{row['k3_kl']:.1e}", *(f"{row[method]:.3f}" for method in COSINE_METHODS))
            for name, row in ((name, precisions[name]) for name in COSINE_PRECISIONS)
        ]
        lines += markdown_table(("rollout weights", "k3 KL", *COSINE_METHODS), rows).splitlines()
    return lines


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the runs of the advantage R - 1, a panel for each method."""
    endings.draw(content["runs"]["R-1"], path)

"""Rewards of asynchronous training at the bound of AReaL's own experiments, 2, by what weighs a stale token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.provenance import as_markdown
from lab.toys.asynchrony import rewards_table

BOUND = 2

# A sequence's nine tokens come from three versions, three each: all ages up to the bound occur at any timing.
FLAGS = f"--async --max-head-offpolicyness {BOUND} --rollout-steps-per-update 3".split()

HEAD = """\
# Rewards with a bound of {bound}

Drawn by `{program}`: the runs of [async.md](async.md) with tokens that are at most {bound} updates old. Rewards of the
trainer's policy on 256 held-out prompts at the last evaluation, after 97 rollouts: means over the seeds {seeds},
smallest and largest in brackets; a run's standard error is up to 0.03. Not run on a GPU.

    {flags}
"""


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page of the record."""
    seeds = ", ".join(map(str, content["seeds"]))
    head = HEAD.format(
        bound=BOUND, program="python -m lab.toys async_rewards", seeds=seeds, flags=" ".join(FLAGS)
    )
    made = f"## Measured with\n\n{as_markdown(content['measured_with'])}"
    return "\n".join([head, rewards_table(content["rewards"]), made])

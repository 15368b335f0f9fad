"""Rewards of asynchronous training at the bound of AReaL's own experiments, 2, by what weighs a stale token.

    python -m lab.async_rewards            27 runs, some twenty minutes on two quiet cores
    python -m lab.async_rewards --smoke --seeds 0

Recipe, rates and seeds are those of `bash scripts/experiment-async.sh`, whose bound is 8 and whose record holds the
synchronous runs. A run that this committed code finished with equal settings is not repeated.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.async_rewards:main", extra="verify")

import itertools
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.asynchrony import FULL, METHODS, SMOKE, Plan, command_line, course
from lab.experiments.async_tables import rewards_table
from lab.experiments.runner import Arm, made_with, parsed, publish, run_arms, this_code, training
from lab.provenance import as_markdown

PROGRAM = "python -m lab.async_rewards"
BOUND = 2
# A sequence's nine tokens come from three versions, three each: all ages up to the bound occur at any timing.
FLAGS = f"--async --max-head-offpolicyness {BOUND} --rollout-steps-per-update 3".split()
WEIGHTS = ("standard", "segment-wise", "clip against next")
HEAD = """\
# Rewards with a bound of {bound}

Made by `{program}`: the runs of [async.md](async.md) with tokens that are at most {bound} updates old. Rewards of the
trainer's policy on 256 held-out prompts at the last evaluation, after 97 rollouts: means over the seeds {seeds},
smallest and largest in brackets; a run's standard error is up to 0.03. Not run on a GPU.

    {flags}
"""


def main() -> int:
    """Return 0, or the exit code of the run that failed or was interrupted."""
    parser = ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options = parsed(parser, "async_rewards")
    plan, root, seeds = SMOKE if options.smoke else FULL, options.runs, options.seeds
    made = made_with(PROGRAM)
    arms = {place: training(partial(words, *place, plan, root)) for place in places(plan, seeds)}
    if code := run_arms(list(arms.values()), options.processes, this_code()):
        return code
    content = {"seeds": list(seeds), "rewards": rewards(arms, plan, seeds), "measured_with": made}
    publish(options.results / "async_rewards", content, markdown(content), {})
    return 0


def places(plan: Plan, seeds: Sequence[int]) -> list[tuple[str, str, int]]:
    """List weight, learning rate and seed of each run, seed by seed, so that an interrupt leaves whole comparisons."""
    return [(weight, lr, seed) for seed, lr, weight in itertools.product(seeds, plan.rates, WEIGHTS)]


def words(weight: str, lr: str, seed: int, plan: Plan, root: Path) -> list[str]:
    """Arguments of one run of `python -m lab.host`."""
    folder = root / f"{weight.replace(' ', '-')}-lr{lr}-seed{seed}"
    config, _ = METHODS[weight]
    return [*command_line(config, lr, seed, folder, root), *FLAGS, *plan.flags]


def rewards(
    arms: Mapping[tuple[str, str, int], Arm], plan: Plan, seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Collect the curves of held-out rewards by learning rate, weight and seed."""
    return {
        lr: {weight: [course(arms[weight, lr, seed].folder) for seed in seeds] for weight in WEIGHTS}
        for lr in plan.rates
    }


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page of the record."""
    seeds = ", ".join(map(str, content["seeds"]))
    head = HEAD.format(bound=BOUND, program=PROGRAM, seeds=seeds, flags=" ".join(FLAGS))
    made = f"## Measured with\n\n{as_markdown(content['measured_with'])}"
    return "\n".join([head, rewards_table(content["rewards"]), made])

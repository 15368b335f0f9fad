"""Does score centering help? REINFORCE on the demonstration's int3 engine, with and without it, over three seeds.

    python -m lab.centered                  21 runs, some ten minutes; writes lab/results/centered.{json,md}
    python -m lab.centered --smoke          tiny runs that only show that everything works

An arm that this committed code finished is not repeated.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.centered:main", extra="verify")

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lab.demo import CORRECTION, RECIPE
from lab.experiments.runner import made_with, parsed, run_arms, this_code, training
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import MetricsLog
from lab.provenance import markdown_table, write_record

PROGRAM = "python -m lab.centered"
RUN = "--num-rollout 100 --eval-interval 10 --eval-prompts 128 --rollout-top-logprobs-num 16 --quiet".split()
LOSS = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss".split()
OBJECTIVE = {"objective": {"surrogate": "reinforce", "old": "behavior"}, "metrics": "full"}
TIS = {"weight": {"upper": 2.0}}
ARMS: dict[str, dict[str, Any]] = {
    "nothing": {"weight": None},
    "token TIS": TIS,
    "geometric window": CORRECTION,
    "centered": {"weight": None, "center": {"top_k": 16}},
    "centered, token TIS": TIS | {"center": {"top_k": 16}},
    "centered by 8 tokens": {"weight": None, "center": {"top_k": 8}},
    "centered by 4 tokens": {"weight": None, "center": {"top_k": 4}},
}
"""What `mis:` holds beside the objective. The toy's vocabulary has 16 tokens, so that 16 are exact."""


def main() -> int:
    """Return 0, or the exit code of the arm that failed or was interrupted."""
    options = parsed(ArgumentParser(prog=PROGRAM, description=__doc__), "centered")
    smoke = ["--smoke"] if options.smoke else []
    made = made_with(PROGRAM)
    arms = {
        (name, seed): training(partial(command_line, name, seed, options.runs, smoke))
        for seed in options.seeds
        for name in ARMS
    }
    if code := run_arms(list(arms.values()), options.processes, this_code()):
        return code
    rows = [{"arm": name, "seed": seed, **_outcome(arm.folder)} for (name, seed), arm in arms.items()]
    content = {"rows": rows, "measured_with": made}
    write_record(options.results / "centered.json", content, "\n".join(markdown(content)))
    print(f"wrote {options.results / 'centered.md'}")
    return 0


def command_line(name: str, seed: int, root: Path, more: Sequence[str]) -> list[str]:
    """Return the arguments of `python -m lab.host` for an arm, and write its config to its folder."""
    folder = root / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "mis.yaml"
    config.write_text(yaml.safe_dump({"mis": OBJECTIVE | ARMS[name]}, sort_keys=False))
    places = ["--output", str(folder), "--custom-config-path", str(config)]
    warm = ["--warmup-cache", str(root / "warm-start")]
    return [*RECIPE, *RUN, *LOSS, "--seed", str(seed), *warm, *places, *more]


def _outcome(folder: Path) -> dict[str, Any]:
    """Held-out rewards, the trainer's lowest on the way and both policies' at the end, and the last k3."""
    summary = json.loads((folder / SUMMARY).read_text())
    way = [row["eval_trainer"] for row in MetricsLog(folder / METRICS).read() if "eval_trainer" in row]
    kept = ("trainer_final", "rollout_final", "k3_kl")
    return {key: summary[key] for key in kept} | {"lowest": min(way)}


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    """The page: an arm a row, a number for each seed."""
    yield "# Score centering on a toy\n"
    yield f"Made by `{PROGRAM}`: the demonstration's recipe (int3 engine, advantage R - 1) with REINFORCE and"
    yield "`old: behavior`, 100 rollouts. Rewards on held-out prompts at the end, one number a seed. *Lowest* is the"
    yield "trainer's lowest on the way.\n"
    headings = ("arm", "trainer", "engine", "lowest", "k3 of the last rollouts")
    keys = ("trainer_final", "rollout_final", "lowest", "k3_kl")
    found = {name: [row for row in content["rows"] if row["arm"] == name] for name in ARMS}
    yield markdown_table(
        headings,
        [[name, *(", ".join(f"{row[key]:.2f}" for row in rows) for key in keys)] for name, rows in found.items()],
    )
    yield "```\n" + yaml.safe_dump(json.loads(json.dumps(ARMS)), sort_keys=False) + "```\n"
    yield markdown_table(("measured with", ""), content["measured_with"].items())

"""Segment-wise against standard decoupled PPO: variance of the weights by age, bias, rewards, and what both cost.

Each run is its own process, with one thread. A run that this committed code finished with equal settings is not
repeated, so the experiment can be interrupted and continued; throughput is always measured again.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.asynchrony:main", extra="verify")

import itertools
import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from lab.experiments.async_picture import draw
from lab.experiments.async_tables import markdown
from lab.experiments.runner import Arm, in_ranks, made_with, parsed, publish, run_arms, this_code, training
from lab.host.cli.arguments import parse_args
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import MetricsLog, write_json

RECIPE = (
    "--task reverse --num-digits 8 --warmup-steps 230 --num-rollout 97 --eval-interval 16 --eval-prompts 256 "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --disable-grpo-std-normalization --adam-beta2 0.999"
).split()
BOUND = 8
# A sequence's nine tokens come from nine versions: all ages up to the bound occur at any timing.
ASYNCHRONOUS = f"--async --max-head-offpolicyness {BOUND} --rollout-steps-per-update 1".split()
METHODS: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "synchronous": ({"segment_wise": {}}, ()),
    "standard": ({"segment_wise": {"enabled": False}}, ASYNCHRONOUS),
    "segment-wise": ({"segment_wise": {"clip_against": "proximal"}}, ASYNCHRONOUS),
    "clip against next": ({"segment_wise": {"clip_against": "next"}}, ASYNCHRONOUS),
}
"""Each method's config under `mis:`, and its flags."""

SETTLED, MEASURED = 10, 20
"""Rollouts before throughput is measured, while the worker starts, and rollouts that are measured."""

ROUNDS = 3
"""Rounds of throughput measurements. A round measures every setting once, so that a slow spell of the machine
does not slow one setting alone."""


@dataclass(frozen=True)
class Plan:
    """A plan says what is run.

    Attributes:
        bounds, step_seconds: throughput is measured for each bound with each time of a decode step, `rounds`
            times.
        bias_rollouts: how many rollouts are pooled into a gradient.
    """

    rates: Sequence[str]
    bounds: Sequence[int]
    step_seconds: Sequence[float]
    bias_rollouts: int
    flags: Sequence[str]
    rounds: int = ROUNDS


FULL = Plan(("5e-5", "1e-4", "2e-4"), (0, 2, 8), (0.0, 0.05), 8, ())
# Failures have a reward of -1, so that a policy that never succeeds has a gradient too.
SMOKE = Plan(
    ("3e-4",),
    (0, 2),
    (0.0,),
    2,
    "--smoke --advantage-estimator reinforce --reward-shift -1".split(),
    rounds=1,
)


@dataclass(frozen=True)
class Cell:
    """One run for the variance of weights and for rewards."""

    method: str
    lr: str
    seed: int

    def folder(self, root: Path) -> Path:
        return root / f"{self.method}-lr{self.lr}-seed{self.seed}"


def cells(plan: Plan, seeds: Sequence[int], methods: Sequence[str] = tuple(METHODS)) -> list[Cell]:
    """List the cells seed by seed, so that an interrupted experiment holds whole comparisons."""
    return [Cell(method, lr, seed) for seed, lr, method in itertools.product(seeds, plan.rates, methods)]


def command_line(config: Mapping[str, Any] | None, lr: str, seed: int, folder: Path, root: Path) -> list[str]:
    """Return the arguments of `python -m lab.host`, and write the config, if any, to `folder`."""
    shared = ["--warmup-cache", str(root / "warm-start"), "--output", str(folder), "--quiet"]
    line = [*RECIPE, "--lr", lr, "--seed", str(seed), *shared]
    if config is None:
        return line
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mis.yaml"
    path.write_text(yaml.safe_dump({"mis": dict(config)}))
    loss = ["--loss-type", "custom_loss", "--custom-loss-function-path", "mis_plugins.mis.policy_loss"]
    return [*line, *loss, "--custom-config-path", str(path)]


def cell_arm(cell: Cell, plan: Plan, root: Path) -> Arm:
    """The run of a cell."""
    config, flags = METHODS[cell.method]

    def words() -> list[str]:
        return [*command_line(config, cell.lr, cell.seed, cell.folder(root), root), *flags, *plan.flags]

    return training(words)


@dataclass(frozen=True)
class Directions:
    """One measurement of the gradient's direction."""

    lr: str
    seed: int
    root: Path
    plan: Plan

    @property
    def folder(self) -> Path:
        return self.root / "bias" / f"lr{self.lr}-seed{self.seed}"

    @property
    def file(self) -> Path:
        return self.folder / "directions.json"

    def methods(self) -> dict[str, Namespace]:
        """The arguments of each method, by name."""
        configs = {name: METHODS[name][0] for name in ("standard", "segment-wise")} | {"no weights": None}
        lines = {
            name: command_line(config, self.lr, self.seed, self.folder / name, self.root)
            for name, config in configs.items()
        }
        return {name: parse_args([*line, *self.plan.flags]) for name, line in lines.items()}

    def settings(self) -> dict[str, Any]:
        """The settings from which the directions follow, without the code."""
        methods = {name: vars(args) for name, args in self.methods().items()}
        return {"methods": methods, "bound": BOUND, "rollouts": self.plan.bias_rollouts}

    def arm(self) -> Arm:
        """The measurement of standard, segment-wise and no weights."""

        def work() -> int:
            return in_ranks(1, partial(_write_directions, self.methods(), self.plan.bias_rollouts, self.file))

        return Arm(self.folder, self.settings(), work)


def all_directions(plan: Plan, seeds: Sequence[int], root: Path) -> dict[str, list[Directions]]:
    """The measurements of the gradient's direction, by learning rate."""
    return {lr: [Directions(lr, seed, root, plan) for seed in seeds] for lr in plan.rates}


def _write_directions(methods: Mapping[str, Namespace], rollouts: int, path: Path) -> None:
    from lab.experiments.async_bias import directions
    from lab.host.loop import Loop
    from lab.host.train.parallel import initialize

    loop = Loop.start(methods["segment-wise"], initialize(1, 1))
    found = directions(loop, methods, BOUND, rollouts)
    if dist.get_rank() == 0:
        write_json(path, found)


def throughput_arms(plan: Plan, root: Path) -> list[Arm]:
    """List the runs of one round, one for each setting."""
    return [_throughput_arm(plan, bound, step, root) for step, bound in throughput_settings(plan)]


def throughput_settings(plan: Plan) -> list[tuple[float, int]]:
    """List (seconds a decode step, bound) of every setting."""
    return list(itertools.product(plan.step_seconds, plan.bounds))


def measure_throughput(plan: Plan, root: Path) -> tuple[int, dict[str, Any]]:
    """Measure throughput, and return the exit code of the runs and the record.

    The record holds the machine's load before the runs, and one row for each setting. A row's columns are
    lists with one number a round.
    """
    before, rounds = os.getloadavg()[0], []
    for _ in range(plan.rounds):
        if code := run_arms(throughput_arms(plan, root), 1, None):
            return code, {}
        found = [_throughput(bound, step, root) for step, bound in throughput_settings(plan)]
        rounds.append(found)
    rows = [
        {"bound": bound, "step_seconds": step, **_columns([one[place] for one in rounds])}
        for place, (step, bound) in enumerate(throughput_settings(plan))
    ]
    return 0, {"load_before": before, "processors": os.cpu_count(), "rows": rows}


def _columns(measured: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [one[name] for one in measured] for name in measured[0]}


def _throughput_folder(bound: int, step: float, root: Path) -> Path:
    return root / "throughput" / f"bound{bound}-step{step:g}"


def _throughput_arm(plan: Plan, bound: int, step: float, root: Path) -> Arm:
    """Build a run that measures the throughput of one setting; the caller runs it alone."""
    folder = _throughput_folder(bound, step, root)
    flags = ["--async", "--max-head-offpolicyness", str(bound), "--rollout-step-seconds", str(step)]
    length = ["--num-rollout", str(SETTLED + MEASURED + bound), "--eval-interval", "1000"]

    def words() -> list[str]:
        line = command_line({"segment_wise": {}}, plan.rates[0], 0, folder, root)
        return [*line, *flags, *length, *plan.flags]

    return training(words)


def _throughput(bound: int, step: float, root: Path) -> dict[str, float]:
    """Return the tokens a second of a finished run, and the shares of time that it waited and recomputed."""
    folder = _throughput_folder(bound, step, root)
    settled = steady(MetricsLog(folder / METRICS).read(), bound)
    seconds = {name: sum(record[name] for record in settled) for name in ("seconds", "wait_seconds")}
    return {
        "tokens_a_second": sum(_tokens(record) for record in settled) / seconds["seconds"],
        "waiting": seconds["wait_seconds"] / seconds["seconds"],
        "recompute": sum(record.get("recompute/seconds", 0) for record in settled) / seconds["seconds"],
    }


def steady(records: Sequence[Mapping[str, Any]], bound: int) -> Sequence[Mapping[str, Any]]:
    """Select the rollouts in which the worker is fully busy; all rollouts where a run is too short for that.

    The first SETTLED rollouts are left out, and the last `bound`, in which the worker has nothing left to begin.
    """
    return records[SETTLED : len(records) - bound] or records


def _tokens(record: Mapping[str, Any]) -> float:
    return record["staleness/tokens"]


def result(plan: Plan, root: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Collect the results of the runs: weights by age, rewards by trained tokens, share of recompute."""
    segment_wise = {lr: [Cell("segment-wise", lr, seed).folder(root) for seed in seeds] for lr in plan.rates}
    return {
        "recipe": " ".join((*RECIPE, *ASYNCHRONOUS)),
        "seeds": list(seeds),
        "variance": {lr: [_variance(folder) for folder in folders] for lr, folders in segment_wise.items()},
        "loglinear": {lr: [_loglinear(folder) for folder in folders] for lr, folders in segment_wise.items()},
        "recompute_share": {
            lr: [json.loads((folder / SUMMARY).read_text())["recompute/share"] for folder in folders]
            for lr, folders in segment_wise.items()
        },
        "rewards": rewards(plan, root, seeds, tuple(METHODS)),
    }


def rewards(
    plan: Plan, root: Path, seeds: Sequence[int], methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Collect the curves of held-out rewards by learning rate, method and seed."""
    return {
        lr: {name: [course(Cell(name, lr, seed).folder(root)) for seed in seeds] for name in methods}
        for lr in plan.rates
    }


def _variance(folder: Path) -> dict[str, dict[str, float]]:
    """Return by age, and for "all" ages, the variance of both weights over equal tokens, and the number of tokens."""
    summary, name = json.loads((folder / SUMMARY).read_text()), "behav_imp_weight/var"
    ages = {"all": "", **{str(age): f"/age_{age}" for age in range(BOUND + 1)}}
    return {
        age: {
            "segment-wise": summary[f"{name}/segment_wise{suffix}"],
            "standard": summary[f"{name}/standard{suffix}"],
            "tokens": summary[f"staleness/tokens{suffix}"],
        }
        for age, suffix in ages.items()
        if f"{name}/standard{suffix}" in summary
    }


def _loglinear(folder: Path) -> dict[str, dict[str, float]]:
    """Return by age the root mean square of the interpolation's error, and of the interpolated log ratio."""
    found: dict[str, dict[str, float]] = {}
    records = MetricsLog(folder / METRICS).read()
    for age in range(2, BOUND + 1):
        known = [record for record in records if f"loglinear/error/rms/age_{age}" in record]
        tokens = sum(record[f"staleness/tokens/age_{age}"] for record in known)
        if tokens:
            squares = {
                kind: sum(
                    record[f"loglinear/error/{kind}/age_{age}"] ** 2 * record[f"staleness/tokens/age_{age}"]
                    for record in known
                )
                for kind in ("rms", "step_rms")
            }
            found[str(age)] = {kind: math.sqrt(square / tokens) for kind, square in squares.items()}
    return found


def course(folder: Path) -> list[tuple[float, float]]:
    """Return (tokens trained on, held-out reward of the trainer) at each evaluation."""
    found, tokens = [], 0.0
    settings = json.loads((folder / SUMMARY).read_text())["arguments"]
    samples = settings["rollout_batch_size"] * settings["n_samples_per_prompt"]
    for record in MetricsLog(folder / METRICS).read():
        if "eval_trainer" in record:
            found.append((tokens, record["eval_trainer"]))
        tokens += record["response_length"] * samples
    return found


def main() -> int:
    """Return 0, or the exit code of the run that failed or was interrupted."""
    options = parsed(_parser(), "async")
    keeps = options.throughput or options.only or options.tables
    content = held(options.results / "async.json") if keeps else {}
    if options.only:
        return _put(options, content)
    code, measured = (0, {}) if options.tables else measure(options)
    if code:
        return code
    content |= measured
    publish(options.results / "async", content, markdown(content), {"": partial(draw, content)})
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="bash scripts/experiment-async.sh", description=__doc__)
    for flag, does in (
        ("--throughput", "measure throughput alone, and put it into the results that are there"),
        ("--tables", "measure nothing: tables and picture of the results that are there"),
    ):
        parser.add_argument(flag, action="store_true", help=does)
    parser.add_argument(
        "--only",
        choices=METHODS,
        help="train one method, and put its rewards into the results that are there, which have their own seeds",
    )
    return parser


def _put(options: Namespace, content: dict[str, Any]) -> int:
    """Train one method at the learning rates and seeds of results that are there, and publish them with its rewards."""
    plan, root, seeds = SMOKE if options.smoke else FULL, options.runs, content["seeds"]
    made = provenance()
    arms = [cell_arm(cell, plan, root) for cell in cells(plan, seeds, (options.only,))]
    if code := run_arms(arms, options.processes, this_code()):
        return code
    for lr, found in rewards(plan, root, seeds, (options.only,)).items():
        content["rewards"][lr] |= found
    content.setdefault("rewards_measured_with", {})[options.only] = made
    publish(options.results / "async", content, markdown(content), {"": partial(draw, content)})
    return 0


def measure(options: Namespace) -> tuple[int, dict[str, Any]]:
    """Measure everything, or throughput alone; throughput comes first, before our own work burdens the machine.

    Returns:
        0 and the results, or the exit code of the run that failed.
    """
    plan, root, seeds = SMOKE if options.smoke else FULL, options.runs, options.seeds
    measured_with = provenance()
    code, throughput = measure_throughput(plan, root)
    first = {"throughput": {**throughput, "measured_with": measured_with}}
    if code or options.throughput:
        return code, first
    bias = all_directions(plan, seeds, root)
    arms = [cell_arm(cell, plan, root) for cell in cells(plan, seeds)]
    arms += [one.arm() for ones in bias.values() for one in ones]
    if code := run_arms(arms, options.processes, this_code()):
        return code, {}
    found = {lr: [json.loads(one.file.read_text()) for one in ones] for lr, ones in bias.items()}
    others = {"measured_with": measured_with, "bias_rollouts": plan.bias_rollouts, "bias": found}
    return 0, {**result(plan, root, seeds), **first, **others}


def held(path: Path) -> dict[str, Any]:
    """Read the results that a file holds.

    Raises:
        SystemExit: the file holds no results.
    """
    if not path.is_file():
        sys.exit(
            f"error: there is no {path}; run the whole experiment first, without --throughput and --tables"
        )
    return json.loads(path.read_text())


def provenance(program: str = "bash scripts/experiment-async.sh") -> dict[str, str]:
    """Describe what the measurement runs with, and the machine's load before it starts."""
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, before the start"
    return {**made_with(program), "load average": load}

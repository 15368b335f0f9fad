"""Segment-wise against standard decoupled PPO: variance of the weights by age, bias, rewards, and what both cost.

Each run is its own process, two at a time, with one thread each. A run that this committed code finished with equal
settings is not repeated, so the experiment can be interrupted and continued; throughput is always measured again.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("asynchrony:main", extra="local")

import argparse
import itertools
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from experiments.async_picture import draw
from experiments.async_readme import README, with_figures
from experiments.async_tables import markdown
from experiments.reuse import made_of, stamp, unstamp
from torch.multiprocessing.spawn import start_processes

from mis_plugins.local.cli.arguments import parse_args
from mis_plugins.local.folders import METRICS, RESULTS, SUMMARY, add_folders, set_aside, with_folders
from mis_plugins.local.report import MetricsLog, write_json
from mis_plugins.shared.numerals import count, whole
from mis_plugins.shared.provenance import as_given, committed_tree, measured_with
from mis_plugins.shared.shell import add_version

RECIPE = (
    "--task reverse --num-digits 8 --warmup-steps 230 --num-rollout 97 --eval-interval 16 --eval-prompts 256 "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --disable-grpo-std-normalization --adam-beta2 0.999"
).split()
SEEDS = (0, 1, 2)
BOUND = 8
# A sequence of nine tokens gets one of each of nine versions: all ages up to the bound occur, whatever the timing.
ASYNCHRONOUS = f"--async --max-head-offpolicyness {BOUND} --rollout-steps-per-update 1".split()
METHODS: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "synchronous": ({"segment_wise": {}}, ()),
    "standard": ({"segment_wise": {"enabled": False}}, ASYNCHRONOUS),
    "segment-wise": ({"segment_wise": {}}, ASYNCHRONOUS),
}
"""What stands under `mis:`, and flags."""

SETTLED, MEASURED = 10, 20
"""Rollouts before throughput is measured, in which the worker starts and the first ones begin together; and then."""

ROUNDS = 3
"""Measurements of throughput, each of all settings one after the other, so that whatever slows the machine for a while
does not slow one of them alone."""

MEASURED_CODE = ("mis_plugins", "scripts/experiment-async.sh")


@dataclass(frozen=True)
class Plan:
    """A plan says what is run.

    Attributes:
        bounds, step_seconds: the settings of throughput, each bound with each time, `rounds` times.
        bias_rollouts: how many rollouts are pooled into a gradient.
    """

    rates: Sequence[str]
    bounds: Sequence[int]
    step_seconds: Sequence[float]
    bias_rollouts: int
    flags: Sequence[str]
    rounds: int = ROUNDS


FULL = Plan(("5e-5", "1e-4", "2e-4"), (0, 2, 8), (0.0, 0.05), 8, ())
# Failures push: a policy that never succeeds has a gradient too.
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


def cells(plan: Plan, seeds: Sequence[int]) -> list[Cell]:
    """List the cells seed by seed, so that an interrupted experiment holds whole comparisons."""
    return [Cell(method, lr, seed) for seed, lr, method in itertools.product(seeds, plan.rates, METHODS)]


def command_line(config: Mapping[str, Any] | None, lr: str, seed: int, folder: Path, root: Path) -> list[str]:
    """Arguments of ``python -m mis_plugins.local``; the config is written to ``folder``. None: no weights at all."""
    shared = ["--warmup-cache", str(root / "warm-start"), "--output", str(folder), "--quiet"]
    line = [*RECIPE, "--lr", lr, "--seed", str(seed), *shared]
    if config is None:
        return line
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mis.yaml"
    path.write_text(yaml.safe_dump({"mis": dict(config)}))
    loss = ["--loss-type", "custom_loss", "--custom-loss-function-path", "mis_plugins.mis.policy_loss"]
    return [*line, *loss, "--custom-config-path", str(path)]


def run_cells(plan: Plan, seeds: Sequence[int], root: Path, processes: int, code: str | None) -> None:
    """Run every cell that is not finished."""
    wanted = {cell: cell_arguments(cell, plan, root) for cell in cells(plan, seeds)}
    lacking = [cell for cell, args in wanted.items() if not made_of(Path(args.output), vars(args), code)]
    for cell in lacking:
        set_aside(cell.folder(root))
    missing = [cell_arguments(cell, plan, root) for cell in lacking]  # writes the configs into the folders
    # Forked, so that Megatron is imported once.
    start_processes(_cell_share, (missing, processes, code), nprocs=processes, start_method="fork")


def cell_arguments(cell: Cell, plan: Plan, root: Path) -> Namespace:
    """The arguments of a cell's run."""
    config, flags = METHODS[cell.method]
    argv = command_line(config, cell.lr, cell.seed, cell.folder(root), root)
    return parse_args([*argv, *flags, *plan.flags])


def _cell_share(share: int, missing: Sequence[Namespace], shares: int, code: str | None) -> None:
    for args in missing[share::shares]:
        settings = dict(vars(args))  # as they were given: a hook may keep its own things on args
        unstamp(Path(args.output))
        _run(args)
        stamp(Path(args.output), settings, code)


def _run(args: Namespace) -> None:
    from mis_plugins.local.loop import run_rank
    from mis_plugins.local.train.parallel import launch

    if launch(1, partial(run_rank, args)):
        raise RuntimeError(f"{args.output}: the run failed; see above")
    print(args.output, flush=True)


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


def measure_bias(
    plan: Plan, seeds: Sequence[int], root: Path, processes: int, code: str | None
) -> dict[str, list[Any]]:
    """Measure `directions` of standard, segment-wise and no weights, by learning rate and seed."""
    wanted = {lr: [Directions(lr, seed, root, plan) for seed in seeds] for lr in plan.rates}
    flat = [one for ones in wanted.values() for one in ones]
    missing = [one for one in flat if not made_of(one.folder, one.settings(), code)]
    start_processes(_bias_share, (missing, processes, code), nprocs=processes, start_method="fork")
    return {lr: [json.loads(one.file.read_text()) for one in ones] for lr, ones in wanted.items()}


def _bias_share(share: int, missing: Sequence[Directions], shares: int, code: str | None) -> None:
    from mis_plugins.local.train.parallel import launch

    for one in missing[share::shares]:
        unstamp(one.folder)
        if launch(1, partial(_write_directions, one.methods(), one.plan.bias_rollouts, one.file)):
            raise RuntimeError(f"{one.folder}: measuring the gradient's direction failed; see above")
        stamp(one.folder, one.settings(), code)
        print(one.folder, flush=True)


def _write_directions(methods: Mapping[str, Namespace], rollouts: int, path: Path) -> None:
    from experiments.async_bias import directions

    from mis_plugins.local.loop import Loop
    from mis_plugins.local.train.parallel import initialize

    loop = Loop.start(methods["segment-wise"], initialize(1, 1))
    found = directions(loop, methods, BOUND, rollouts)
    if dist.get_rank() == 0:
        write_json(path, found)


def measure_throughput(plan: Plan, root: Path) -> dict[str, Any]:
    """A row a setting, a list a column with a number a round; and what the machine had to do before and after."""
    settings = list(itertools.product(plan.step_seconds, plan.bounds))
    before = os.getloadavg()[0]
    rounds = [[_throughput(plan, bound, step, root) for step, bound in settings] for _ in range(plan.rounds)]
    rows = [
        {"bound": bound, "step_seconds": step, **_columns([one[place] for one in rounds])}
        for place, (step, bound) in enumerate(settings)
    ]
    return {"load_before": before, "processors": os.cpu_count(), "rows": rows}


def _columns(measured: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {name: [one[name] for one in measured] for name in measured[0]}


def _throughput(plan: Plan, bound: int, step: float, root: Path) -> dict[str, float]:
    """Tokens a second of one run, alone on the machine as far as we know, and how its time went."""
    folder = root / "throughput" / f"bound{bound}-step{step:g}"
    set_aside(folder)
    flags = ["--async", "--max-head-offpolicyness", str(bound), "--rollout-step-seconds", str(step)]
    length = ["--num-rollout", str(SETTLED + MEASURED + bound), "--eval-interval", "1000"]
    argv = command_line({"segment_wise": {}}, plan.rates[0], 0, folder, root)
    args = parse_args([*argv, *flags, *length, *plan.flags])
    _run(args)
    settled = steady(MetricsLog(folder / METRICS).read(), bound)
    seconds = {name: sum(record[name] for record in settled) for name in ("seconds", "wait_seconds")}
    return {
        "tokens_a_second": sum(_tokens(record) for record in settled) / seconds["seconds"],
        "waiting": seconds["wait_seconds"] / seconds["seconds"],
        "recompute": sum(record.get("recompute/seconds", 0) for record in settled) / seconds["seconds"],
    }


def steady(records: Sequence[Mapping[str, Any]], bound: int) -> Sequence[Mapping[str, Any]]:
    """Select the rollouts in which the worker is fully busy; every rollout of a run that is too short for a selection.

    The first SETTLED rollouts are left out, and the last `bound`, in which the worker has nothing left to begin.
    """
    return records[SETTLED : len(records) - bound] or records


def _tokens(record: Mapping[str, Any]) -> float:
    return record["staleness/tokens"]


def result(plan: Plan, root: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Collect the results of the runs: weights by age, rewards by trained tokens, the share of recompute."""
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
        "rewards": {
            lr: {name: [_rewards(Cell(name, lr, seed).folder(root)) for seed in seeds] for name in METHODS}
            for lr in plan.rates
        },
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


def _rewards(folder: Path) -> list[tuple[float, float]]:
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
    parser = argparse.ArgumentParser(prog="bash scripts/experiment-async.sh", description=__doc__)
    add_folders(parser, "async")
    parser.add_argument("--processes", type=count, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=whole, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    parser.add_argument(
        "--throughput",
        action="store_true",
        help="measure throughput alone, and put it into the results that are there",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="measure nothing: tables and picture of the results that are there",
    )
    add_version(parser)
    options = with_folders(parser.parse_args(), "async")
    content = held(options.results / "async.json") if options.throughput or options.tables else {}
    if not options.tables:
        content |= measure(options)
    publish(content, options.results)
    if options.results == RESULTS:
        README.write_text(with_figures(README.read_text(), content))
    return 0


def measure(options: Namespace) -> dict[str, Any]:
    """Measure everything, or throughput alone; throughput comes first, before our own work burdens the machine."""
    plan, root, seeds = SMOKE if options.smoke else FULL, options.runs, options.seeds
    # Megatron takes seconds to import: here, once for all runs, and not in their workers, which import this file.
    import mis_plugins.local.loop  # noqa: F401

    code = committed_tree("mis_plugins")
    made_with = provenance(sys.argv[1:])
    throughput = {"throughput": {**measure_throughput(plan, root), "measured_with": made_with}}
    if options.throughput:
        return throughput
    run_cells(plan, seeds, root, options.processes, code)
    bias = measure_bias(plan, seeds, root, options.processes, code)
    others = {"measured_with": made_with, "bias_rollouts": plan.bias_rollouts, "bias": bias}
    return {**result(plan, root, seeds), **throughput, **others}


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


def provenance(words: Sequence[str]) -> dict[str, str]:
    """Describe what the measurement runs with, from now on."""
    command = as_given("bash scripts/experiment-async.sh", words)
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, before the start"
    return {**measured_with(command, MEASURED_CODE), "load average": load}


def publish(content: Mapping[str, Any], results: Path) -> None:
    """Write async.json, async.md and async.png, and say where."""
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "async.json", content)
    (results / "async.md").write_text(markdown(content))
    draw(content, results / "async.png")
    print(f"wrote {results}")

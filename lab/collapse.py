"""Does correction help, when, and by how much? Every method, both advantages, several seeds; the gradient's direction.

Each run is its own process, with one thread. A run that this committed code finished with equal settings is not
repeated, so the experiment can be interrupted and continued.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.collapse:main", extra="verify")

import itertools
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from lab.experiments import endings
from lab.experiments.recipe import ESTIMATORS, METHODS, RECIPE, command_line
from lab.experiments.runner import Arm, in_ranks, made_with, parsed, publish, run_arms, this_code, training
from lab.host.cli.arguments import parse_args
from lab.host.cli.parser import PRECISIONS
from lab.host.folders import SUMMARY
from lab.host.loop import Loop
from lab.host.model.engine import DecodeEngine
from lab.host.report import write_json
from lab.host.rollout.sampler import Rollout, shard
from lab.host.train.gradients import cosine, mean_gradient, on_policy_reference
from lab.host.train.parallel import initialize
from lab.provenance import as_markdown, markdown_table
from mis_plugins.config.terms.divergence import k3

COSINE_METHODS = tuple(method for method in METHODS if method != "matched")
COSINE_PRECISIONS = tuple(name for name in PRECISIONS if name != "fp32")
COSINES = "cosines.json"
COSINE_ROLLOUTS = 16
COSINE_RANKS = 2
# A policy that still fails often: near its optimum a gradient is nearly all noise.
COSINE_RECIPE = "--num-digits 6 --warmup-steps 120 --rollout-batch-size 64 --global-batch-size 512".split()


@dataclass(frozen=True)
class Cell:
    """One run of the experiment."""

    method: str
    estimator: str
    seed: int

    def folder(self, root: Path) -> Path:
        return root / f"{self.estimator}-{self.method.replace(' ', '')}-seed{self.seed}"


def cells(seeds: Sequence[int]) -> list[Cell]:
    """List the cells seed by seed, so that an interrupted experiment holds whole comparisons."""
    return [
        Cell(method, estimator, seed)
        for seed, estimator, method in itertools.product(seeds, ESTIMATORS, METHODS)
    ]


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read the summary of a finished run; None where the run is not finished."""
    path = folder / SUMMARY
    summary = json.loads(path.read_text()) if path.is_file() else {}
    return summary if summary.get("status") == "finished" else None


def training_arm(cell: Cell, root: Path, smoke: bool) -> Arm:
    """The run of a cell."""
    extra = [
        "--warmup-cache",
        str(root / "warm-start"),
        "--eval-interval",
        "10",
        *(["--smoke"] if smoke else []),
    ]
    return training(partial(command_line, cell.method, cell.estimator, cell.seed, cell.folder(root), *extra))


def cosine_arm(seed: int, estimator: str, root: Path, smoke: bool) -> Arm:
    """Build the comparison of every method's gradient with the on-policy one, at the warm-started policy."""
    folder = cosine_folder(seed, estimator, root)

    def settings() -> dict[str, Namespace]:
        return {name: _settings(name, estimator, seed, folder / name, root, smoke) for name in COSINE_METHODS}

    def work() -> int:
        return in_ranks(COSINE_RANKS, partial(_write_cosines, settings(), folder / COSINES))

    return Arm(folder, {name: dict(vars(args)) for name, args in settings().items()}, work)


def cosine_folder(seed: int, estimator: str, root: Path) -> Path:
    return root / "cosines" / f"{estimator}-seed{seed}"


def _settings(method: str, estimator: str, seed: int, folder: Path, root: Path, smoke: bool) -> Namespace:
    extra = ["--warmup-cache", str(root / "warm-start"), "--data-parallel-size", str(COSINE_RANKS)]
    extra += [*COSINE_RECIPE, *(["--smoke"] if smoke else [])]
    return parse_args(command_line(method, estimator, seed, folder, *extra))


def _write_cosines(settings: Mapping[str, Namespace], path: Path) -> None:
    found = _cosines_by_precision(settings)
    if dist.get_rank() == 0:
        write_json(path, found)


def _cosines_by_precision(settings: Mapping[str, Namespace]) -> dict[str, dict[str, float]]:
    """``{"on-policy": {"agreement": c, "reward": r}, "int3": {method: c, "k3_kl": k}, ...}``"""
    plain = settings["uncorrected"]
    loop = Loop.start(plain, initialize(1, 1))
    config, weights = loop.reference.config, loop.trainer.weights()

    def rollouts(engine: DecodeEngine, name: str) -> list[Rollout]:
        engine.update_weights(weights, 0)
        return [loop.collect(engine, name, index) for index in range(COSINE_ROLLOUTS)]

    samples = (rollouts(loop.reference, "first"), rollouts(loop.reference, "second"))
    reference = on_policy_reference(plain, loop.state, loop.trainer, samples)
    reward = fmean(rollout.reward for rollouts in samples for rollout in rollouts)
    found = {"on-policy": {"agreement": reference.agreement, "reward": reward}}
    for precision in COSINE_PRECISIONS:
        sampled = rollouts(DecodeEngine(config, precision), "cosine")
        gradients = {
            name: mean_gradient(args, loop.state, loop.trainer, sampled) for name, args in settings.items()
        }
        found[precision] = {name: cosine(gradient, reference.mean) for name, gradient in gradients.items()}
        found[precision]["k3_kl"] = _mismatch(loop, sampled)
    return found


def _mismatch(loop: Loop, sampled: Sequence[Rollout]) -> float:
    """Compute the k3 KL a token of the sampled responses."""
    total = torch.zeros(2, dtype=torch.float64)
    for rollout in sampled:
        data = shard(loop.args, loop.state, rollout)
        log_ratio = torch.cat(loop.trainer.log_probs(data)) - torch.cat(data["rollout_log_probs"])
        total += torch.stack([k3(log_ratio).sum().double(), torch.tensor(float(len(log_ratio)))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def result(root: Path, seeds: Sequence[int], directions: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the tables show: by estimator and method, a list with one entry a seed."""
    runs = {
        estimator: {
            method: [_read(Cell(method, estimator, seed).folder(root)) for seed in seeds]
            for method in METHODS
        }
        for estimator in ESTIMATORS
    }
    kept = (
        "trainer_start",
        "trainer_final",
        "rollout_start",
        "rollout_final",
        "collapsed",
        "k3_kl",
        "kept_fraction",
        "course",
    )
    numbers = {
        estimator: {
            method: [{key: summary[key] for key in kept} for summary in summaries if summary]
            for method, summaries in methods.items()
        }
        for estimator, methods in runs.items()
    }
    return {"recipe": " ".join(RECIPE), "seeds": list(seeds), "runs": numbers, "gradient_cosine": directions}


def _read(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run with the course of its rewards."""
    summary = read_summary(folder)
    return summary and summary | {"course": endings.course(folder)}


def markdown(content: Mapping[str, Any]) -> str:
    """The tables, and what they mean."""
    lines = [
        "# Collapse and correction",
        "",
        "Made by `bash scripts/experiment-collapse.sh`. A Megatron-core policy reverses digits. `matched` samples it",
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


def mean_directions(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Average what `cosine_arm` measures over the seeds."""
    return {
        precision: {name: fmean(one[precision][name] for one in measured) for name in names}
        for precision, names in measured[0].items()
    }


def directions(root: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Read what the cosine arms wrote, by advantage, as means over the seeds."""
    files = {name: [cosine_folder(seed, name, root) / COSINES for seed in seeds] for name in ESTIMATORS}
    return {
        name: mean_directions([json.loads(file.read_text()) for file in found])
        for name, found in files.items()
    }


def main() -> int:
    """Return 0, or the exit code of the run that failed or was interrupted."""
    parser = ArgumentParser(prog="bash scripts/experiment-collapse.sh", description=__doc__)
    options = parsed(parser, "collapse")
    measured_with = made_with("bash scripts/experiment-collapse.sh")
    if code := run_arms(arms(options), options.processes, this_code()):
        return code
    numbers = result(options.runs, options.seeds, directions(options.runs, options.seeds))
    write_results(options, {"measured_with": measured_with, **numbers})
    return 0


def arms(options: Namespace) -> list[Arm]:
    """Every cell, and the direction of the gradient for every seed."""
    measured = itertools.product(options.seeds, ESTIMATORS)
    return [
        *(training_arm(cell, options.runs, options.smoke) for cell in cells(options.seeds)),
        *(cosine_arm(seed, estimator, options.runs, options.smoke) for seed, estimator in measured),
    ]


def write_results(options: Namespace, content: Mapping[str, Any]) -> None:
    """Write collapse.json, collapse.md, collapse.png (R-1) and collapse-group.png, and say where."""
    pictures = {
        "": partial(endings.draw, content["runs"]["R-1"]),
        "-group": partial(endings.draw, content["runs"]["group"]),
    }
    publish(options.results / "collapse", content, markdown(content), pictures)

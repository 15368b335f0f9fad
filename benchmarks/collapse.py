"""Does correction help, when, and by how much? Every method, both advantages, several seeds; the gradient's direction.

Each run is its own process, two at a time and with one thread each. A run that this committed code finished with equal
settings is not repeated, so the experiment can be interrupted and continued.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("collapse:main", extra="local")

import argparse
import itertools
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from experiments.recipe import ESTIMATORS, METHODS, RECIPE, command_line
from experiments.reuse import made_of, stamp, unstamp
from rich.progress import track

from mis_plugins.local.cli.arguments import parse_args
from mis_plugins.local.cli.parser import PRECISIONS
from mis_plugins.local.folders import SUMMARY, add_folders, set_aside, with_folders
from mis_plugins.local.loop import Loop
from mis_plugins.local.model.engine import DecodeEngine
from mis_plugins.local.report import plot_curves, write_json
from mis_plugins.local.rollout.sampler import Rollout, shard
from mis_plugins.local.train.gradients import cosine, mean_gradient, on_policy_reference
from mis_plugins.local.train.parallel import initialize, launch
from mis_plugins.shared.numerals import count, whole
from mis_plugins.shared.provenance import as_given, as_markdown, committed_tree, measured_with
from mis_plugins.shared.shell import add_version
from mis_plugins.terms.divergence import k3

SEEDS = (0, 1, 2)
MEASURED_CODE = ("mis_plugins", "scripts/experiment-collapse.sh")
COSINE_METHODS = tuple(method for method in METHODS if method != "matched")
COSINE_PRECISIONS = tuple(name for name in PRECISIONS if name != "fp32")
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


def run_cell(cell: Cell, root: Path, smoke: bool, code: str | None) -> None:
    """Run one cell in a process of its own, unless this code did. Its output goes to ``run.log`` beside its files."""
    folder = cell.folder(root)
    extra = [
        "--warmup-cache",
        str(root / "warm-start"),
        "--eval-interval",
        "10",
        *(["--smoke"] if smoke else []),
    ]
    words = partial(command_line, cell.method, cell.estimator, cell.seed, folder, *extra)
    settings = vars(parse_args(words()))
    if made_of(folder, settings, code):
        return
    set_aside(folder)
    argv = words()  # writes the config into the folder
    unstamp(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "run.log").open("w") as log:
        command = [sys.executable, "-m", "mis_plugins.local", *argv]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    stamp(folder, settings, code)


def measure_cosines(
    seed: int, estimator: str, root: Path, smoke: bool, code: str | None
) -> dict[str, dict[str, float]]:
    """By rollout precision, the cosine of every method's gradient to the on-policy one, at the warm-started policy."""
    folder = root / "cosines" / f"{estimator}-seed{seed}"
    path = folder / "cosines.json"
    settings = {name: _settings(name, estimator, seed, folder / name, root, smoke) for name in COSINE_METHODS}
    said = {name: dict(vars(args)) for name, args in settings.items()}
    if not made_of(folder, said, code):
        unstamp(folder)
        if launch(COSINE_RANKS, lambda: _write_cosines(settings, path)):
            raise RuntimeError(f"measuring the gradient's direction failed for {estimator}, seed {seed}")
        stamp(folder, said, code)
    return json.loads(path.read_text())


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
            method: [read_summary(Cell(method, estimator, seed).folder(root)) for seed in seeds]
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
    )
    numbers = {
        estimator: {
            method: [{key: summary[key] for key in kept} for summary in summaries if summary]
            for method, summaries in methods.items()
        }
        for estimator, methods in runs.items()
    }
    return {"recipe": " ".join(RECIPE), "seeds": list(seeds), "runs": numbers, "gradient_cosine": directions}


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
    head = "| method | trainer, start | trainer, final | rollout, start | rollout, final | collapsed | k3 KL | kept |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for method, runs in methods.items():
        rewards = (
            _each(runs, key) for key in ("trainer_start", "trainer_final", "rollout_start", "rollout_final")
        )
        collapsed = f"{sum(run['collapsed'] for run in runs)} of {len(runs)}"
        means = (
            fmean(run[key] for run in runs) if runs else float("nan") for key in ("k3_kl", "kept_fraction")
        )
        rows.append(f"| {' | '.join([method, *rewards, collapsed, *(f'{mean:.2g}' for mean in means)])} |")
    return rows


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
        lines += [
            f"| rollout weights | k3 KL | {' | '.join(COSINE_METHODS)} |",
            "|---" * (2 + len(COSINE_METHODS)) + "|",
        ]
        for precision in COSINE_PRECISIONS:
            row = precisions[precision]
            values = [f"{row['k3_kl']:.1e}", *(f"{row[method]:.3f}" for method in COSINE_METHODS)]
            lines.append(f"| {precision} | {' | '.join(values)} |")
    return lines


def mean_directions(measured: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean over the seeds of what :func:`measure_cosines` gives."""
    return {
        precision: {name: fmean(one[precision][name] for one in measured) for name in names}
        for precision, names in measured[0].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bash scripts/experiment-collapse.sh", description=__doc__)
    add_folders(parser, "collapse")
    parser.add_argument("--processes", type=count, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=whole, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    add_version(parser)
    options = with_folders(parser.parse_args(), "collapse")
    code = committed_tree("mis_plugins")
    made_with = measured_with(as_given("bash scripts/experiment-collapse.sh", sys.argv[1:]), MEASURED_CODE)
    with ThreadPoolExecutor(options.processes) as pool:
        work = pool.map(lambda cell: run_cell(cell, options.runs, options.smoke, code), cells(options.seeds))
        list(track(work, "runs", total=len(cells(options.seeds))))
    directions = {
        estimator: mean_directions(
            [measure_cosines(seed, estimator, options.runs, options.smoke, code) for seed in options.seeds]
        )
        for estimator in ESTIMATORS
    }
    publish(options.runs, options.results, options.seeds, directions, made_with)
    return 0


def publish(
    root: Path,
    results: Path,
    seeds: Sequence[int],
    directions: Mapping[str, Any],
    made_with: Mapping[str, str],
) -> None:
    """Write collapse.json, collapse.md, collapse.png (R-1) and collapse-group.png, and say where."""
    results.mkdir(parents=True, exist_ok=True)
    content = {"measured_with": made_with, **result(root, seeds, directions)}
    write_json(results / "collapse.json", content)
    (results / "collapse.md").write_text(markdown(content))
    for estimator, name in (("R-1", "collapse.png"), ("group", "collapse-group.png")):
        folders = {
            method: [Cell(method, estimator, seed).folder(root) for seed in seeds] for method in METHODS
        }
        plot_curves(folders, results / name)
    print(f"wrote {results}")

"""A mixture of experts: what correction, dropping by route, replay (R3) and truth on policy do to one recipe.

    python -m lab.experts             ten arms, three seeds: some fifteen minutes on one core
    python -m lab.experts --smoke     shows that it works, in runs/experts-smoke

A tiny mixture of experts, Megatron-core's own layer, learns in the embedded host from what an engine in int3 samples.
An arm that the same committed code finished is not repeated. Each arm tells its end on standard error.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.experts:main", extra="verify")

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.experiments import endings
from lab.experiments.runner import Arm, made_with, parsed, publish, run_arms, this_code, training
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import MetricsLog
from lab.provenance import as_markdown, markdown_table
from mis_plugins.config.reading import preset_path

PROGRAM = "python -m lab.experts"
RECIPE = (
    "--task reverse --num-digits 8 --warmup-steps 300 --hidden-size 32 --num-layers 2 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 32 --num-rollout 50 --rollout-batch-size 8 --n-samples-per-prompt 8 "
    "--global-batch-size 32 --lr 1e-4 --advantage-estimator reinforce --reward-shift -1 --eval-interval 10 "
    "--eval-prompts 128 --grad-cosine-every 25"
)
CORRECTION = (
    "--use-tis --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp --custom-config-path"
)
REPLAY = "--use-rollout-routing-replay"
WATCH = (
    "--custom-megatron-before-log-prob-hook-path mis_plugins.mis.watch_routes "
    "--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step"
)
HEADINGS = (
    *("arm", "what it does", "trainer, start", "trainer, final", "rollout, final"),
    *("k3 KL", "kept", "cosine (noise)"),
)
REWARDS = ("trainer_start", "trainer_final", "rollout_final")
KEPT = (*REWARDS, "collapsed", "k3_kl", "kept_fraction")


@dataclass(frozen=True)
class Method:
    """What one arm of the recipe does about the mismatch.

    Attributes:
        words: a description of the arm for the table.
        preset: the correction that the hook loads; None without a hook.
        flags: the flags of replay and of the watch over routes.
        weights: the precision of the rollout engine.
    """

    words: str
    preset: str | None = None
    flags: str = ""
    weights: str = "int3"

    def command_line(self) -> list[str]:
        """The flags in which the arm differs from the others."""
        config = [] if self.preset is None else [*CORRECTION.split(), str(preset_path(self.preset))]
        return ["--rollout-weights", self.weights, *self.flags.split(), *config]


METHODS = {
    "uncorrected": Method("nothing"),
    "token TIS": Method("token weights up to 2", "tis"),
    "route": Method("the same, and tokens of another route dropped", "route", f"{REPLAY} {WATCH}"),
    "R3": Method("the engine's routes replayed", flags=f"{REPLAY} {WATCH}"),
    "R3 + TIS": Method("both", "tis", f"{REPLAY} {WATCH}"),
    "truly on policy": Method("an engine in fp32 on the trainer's kernels", flags="--true-on-policy", weights="fp32"),
    **{f"blog {n}": Method(f"the Miles blog's MoE configuration {n}", f"miles-blog-moe-{n}") for n in range(1, 5)},
}  # fmt: skip


def command_line(name: str, seed: int, root: Path, smoke: bool) -> list[str]:
    """Return the arguments of `python -m lab.host` for one arm."""
    own = ["--seed", str(seed), "--output", str(folder(root, name, seed)), "--quiet"]
    cache = ["--warmup-cache", str(root / "warm-start")]
    return [*RECIPE.split(), *METHODS[name].command_line(), *own, *cache, *(["--smoke"] if smoke else [])]


def folder(root: Path, name: str, seed: int) -> Path:
    """Return the folder of an arm."""
    return root / f"{name.replace(' ', '')}-seed{seed}"


def arms(root: Path, seeds: Sequence[int], smoke: bool) -> list[Arm]:
    """All arms, seed by seed, so that an interrupted experiment holds whole comparisons."""
    return [training(partial(command_line, name, seed, root, smoke)) for seed in seeds for name in METHODS]


def outcome(found: Path) -> dict[str, Any]:
    """What the record keeps of an arm: its summary, the course of its rewards, and each cosine beside the noise."""
    summary = json.loads((found / SUMMARY).read_text())
    compared = [one for one in MetricsLog(found / METRICS).read() if one.get("grad_cosine") is not None]
    cosines = [[one["rollout"], one["grad_cosine"], one["grad_cosine_on_policy"]] for one in compared]
    return {key: summary[key] for key in KEPT} | {"cosines": cosines, "course": endings.course(found)}


def numbers(root: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the record: for each arm a list with one entry a seed."""
    runs = {name: [outcome(folder(root, name, seed)) for seed in seeds] for name in METHODS}
    return {"recipe": RECIPE, "seeds": list(seeds), "runs": runs}


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: what ran, the table, and the arms that collapsed."""
    fallen = {name: sum(run["collapsed"] for run in runs) for name, runs in content["runs"].items()}
    told = ", ".join(f"{name} ({many} of {len(content['seeds'])})" for name, many in fallen.items() if many)
    lines = [
        "# A mixture of experts, with and without the engine's routes",
        "",
        f"Made by `{PROGRAM}`. The embedded host trains a tiny mixture of experts, 8 experts of which a token takes",
        "2, that reverses digits; the engine that samples it has emulated int3 weights, but for `truly on policy`.",
        "Rewards on 128 held-out prompts (standard error up to 0.05), an entry a seed: of the trainer's policy at the",
        "start and over the last tenth of the run, and of the rollout policy. Cosine: of the arm's gradient to the",
        "on-policy one, at the start and in the middle of the run, mean over both and the seeds; beside it the cosine",
        "of two independent on-policy gradients, the noise. Seeds of one toy task rank nothing within their spread.",
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
        METHODS[name].words,
        *rewards,
        *(f"{mean:.2g}" for mean in means),
        f"{cosine:.2f} ({noise:.2f})",
    )


def main() -> int:
    """Return 0, or the exit code of the arm that failed or was interrupted."""
    parser = ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options = parsed(parser, "experts")
    measured_with = made_with(PROGRAM)
    if code := run_arms(arms(options.runs, options.seeds, options.smoke), options.processes, this_code()):
        return code
    content = {"measured_with": measured_with, **numbers(options.runs, options.seeds)}
    publish(
        options.results / "experts",
        content,
        markdown(content),
        {"": partial(endings.draw, content["runs"])},
    )
    return 0

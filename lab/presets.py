"""What does each preset do to one small run that collapses without correction?

    python -m lab.presets            every file of yaml/, some 15 seconds each; what the same committed code
                                            finished is not repeated
    python -m lab.presets --smoke    tiny runs that only show that every preset runs, in about a minute

Runs in the embedded host, from the same warm-started policy. Ctrl-C leaves complete files.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.presets:main", extra="local")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.experiments.runner import Arm, made_with, parsed, publish, run_arms, this_code, training
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import MetricsLog
from lab.provenance import markdown_table, parser_of
from mis_plugins.__main__ import load
from mis_plugins.config import reading
from mis_plugins.config.families import header
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.shared.palette import BLACK, BLUE, FRAME, GRID, SKY
from mis_plugins.shared.provenance import as_markdown

RECIPE = (
    "--task reverse --num-digits 6 --warmup-steps 200 --num-rollout 100 --rollout-batch-size 16 "
    "--n-samples-per-prompt 8 --global-batch-size 64 --lr 1e-4 --advantage-estimator reinforce --reward-shift -1 "
    "--eval-interval 5 --eval-prompts 256 --seed 0"
)
BASELINES = {"uncorrected": "int3", "matched precision": "fp32"}
TIS = "--custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
LOSS = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss"


@dataclass(frozen=True)
class Case:
    """One run: a preset of ours, or a baseline without a file."""

    name: str
    file: Path | None = None

    @property
    def flags(self) -> list[str]:
        """Return the flags that differ between the runs."""
        if self.file is None:
            return ["--rollout-weights", BASELINES[self.name]]
        return [
            "--rollout-weights",
            "int3",
            *hook(load(self.file)).split(),
            "--custom-config-path",
            str(self.file),
        ]

    @property
    def formula(self) -> str:
        """The file's first line."""
        if self.file is None:
            return f"no hook, {BASELINES[self.name]} rollout weights"
        return header(self.file).formula

    def arm(self, recipe: str, runs: Path) -> Arm:
        """Build the run; its output and its warnings lie beside its numbers."""
        output = [
            "--output",
            str(runs / self.name.replace(" ", "-")),
            "--warmup-cache",
            str(runs / "warm-start"),
        ]
        return training(lambda: [*recipe.split(), *self.flags, *output, "--quiet"])


def hook(config: CorrectionConfig) -> str:
    """Return the flags that load the hook which a config needs."""
    if config.needs_loss_hook:
        return LOSS
    return f"--use-tis {TIS}" if config.corrects else f"--get-mismatch-metrics {TIS}"


def cases() -> list[Case]:
    """List the baselines, then the presets that can train a dense policy, which has no routes to read."""
    files = {name: file for name, file in reading.presets().items() if not load(file).reads_routes}
    return [*map(Case, BASELINES), *(Case(name, file) for name, file in files.items())]


def read(folder: Path) -> dict[str, Any]:
    """Read the numbers of a finished run.

    `kept` leaves out the tokens that OPSM masks. Where the run reports no ESS, every weight is 1, and `ess`
    is `kept`.
    """
    summary = json.loads((folder / SUMMARY).read_text())
    rows = MetricsLog(folder / METRICS).read()
    passing = 1.0 if summary["kept_fraction"] is None else summary["kept_fraction"]
    kept = passing - _mean(rows, "opsm_clipfrac", 0.0)
    numbers = {
        key: summary[key] for key in ("trainer_start", "trainer_final", "rollout_start", "rollout_final")
    }
    return numbers | {
        "k3_kl": summary["k3_kl"],
        "ess": _mean(rows, "mis_ess_mb", kept),
        "kept": kept,
        "seconds": round(summary["seconds"], 1),
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str, otherwise: float) -> float:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else otherwise


def measure(options: Namespace, selected: Sequence[Case], recipe: str) -> int:
    """Run the selected cases, and add the finished cases to the results that the file holds.

    Returns:
        0, or the exit code of the run that failed or was interrupted.
    """
    target = options.results / "presets"
    measured_with = made_with("python -m lab.presets")
    arms = {case: case.arm(recipe, options.runs) for case in selected}
    code = run_arms(list(arms.values()), options.processes, this_code())
    path = target.with_suffix(".json")
    found = json.loads(path.read_text())["presets"] if path.is_file() else {}
    for case, arm in arms.items():
        if arm.finished:
            found[case.name] = {"formula": case.formula, **read(arm.folder)}
    present = {one.name: found[one.name] for one in cases() if one.name in found}
    if present:
        content = {"recipe": recipe, "measured_with": measured_with, "presets": present}
        publish(target, content, markdown(content), {"": partial(plot, present)})
    return code


HEADINGS = ("preset", "trainer", "rollout", "k3", "ESS", "kept", "formula")


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: how to read the table, and the table."""
    presets = content["presets"]
    start = next(iter(presets.values()))
    head = [
        "# Every preset on one run that collapses",
        "",
        "Made by `python -m lab.presets`. A Megatron-core policy reverses six digits; an engine with emulated",
        "int3 weights samples it; only failures push (advantage R - 1), so that the uncorrected run falls. Rewards on",
        "256 held-out prompts, sampled (standard error up to 0.03), of the trainer's float32 policy and of the rollout",
        "policy, mean over the last tenth of the run. k3: KL(rollout || trainer) a token. ESS: (sum w)^2 / (n sum w^2)",
        "of the weights applied. Kept: share of tokens whose policy loss counts. All three are means over the run.",
        f"Start: trainer {start['trainer_start']:.2f}, rollout {start['rollout_start']:.2f} (int3).",
        "",
        "Read it with care. One seed, one toy task, nothing was tuned: presets of one formula have equal rows, others",
        "may differ by chance. int3 mismatches a hundred times as much as a real engine, and the windows of many",
        "presets were made for real ones: [0.99, 1.001] keeps a few tokens in a hundred here. That does not make a run",
        "safe: AdamW divides by the gradient's own size, so that even a few sequences move the policy by whole steps.",
        "",
        f"    {content['recipe']}",
        "",
    ]
    table = markdown_table(HEADINGS, (_row(name, one) for name, one in presets.items()))
    return "\n".join([*head, table, as_markdown(content["measured_with"])])


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    numbers = [f"{one[key]:.2f}" for key in ("trainer_final", "rollout_final")]
    numbers += [f"{one['k3_kl']:.3f}", *(f"{one[key]:.2f}" for key in ("ess", "kept"))]
    return [name, *numbers, one["formula"].replace("|", "\\|")]


def plot(presets: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw a line for each preset, best trainer first: rewards of both policies, and shares of tokens.

    A ring is wider than a dot, so that both are seen where the policies end alike.
    """
    ranked = dict(sorted(presets.items(), key=lambda item: -item[1]["trainer_final"]))
    figure = Figure(figsize=(11, 1.2 + 0.2 * len(ranked)), layout="constrained", facecolor="white")
    rewards, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    column = lambda key: [one[key] for one in ranked.values()]  # noqa: E731
    lines = range(len(ranked))
    rewards.hlines(lines, column("rollout_final"), column("trainer_final"), color=FRAME, linewidth=0.8)
    rewards.plot(column("rollout_final"), lines, "o", color=BLUE, mfc="none", ms=9, label="rollout policy")
    rewards.plot(column("trainer_final"), lines, "o", color=BLUE, ms=4, label="trainer policy")
    shares.barh(lines, column("kept"), height=0.55, color=SKY, alpha=0.5, label="tokens kept")
    shares.plot(column("ess"), lines, "|", color=BLACK, markersize=9, label="effective sample size")
    rewards.set_yticks(lines, list(ranked), fontsize=8)
    rewards.set_ylim(len(ranked) - 0.4, -0.6)
    _dress(rewards, "Final reward, one seed")
    _dress(shares, "Share of the tokens")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")


def _dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlim(-0.03, 1.03)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(left=False, labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FRAME)


def main() -> int:
    """Return 0, or the exit code of the run that failed or was interrupted."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "presets", nargs="*", metavar="PRESET", help="(default: all of them, and the baselines)"
    )
    options = parsed(parser, "presets", seeds=False)
    known = {case.name: case for case in cases()}
    unknown = [name for name in options.presets if name not in known]
    if unknown:
        parser.error(f"no preset {', '.join(unknown)}; choose from {', '.join(known)}")
    recipe = RECIPE + (" --smoke" if options.smoke else "")
    return measure(options, [known[name] for name in options.presets or known], recipe)

"""What does each preset do to one small run that collapses without correction?

    python benchmarks/presets.py            every file of yaml/, some 15 seconds each; what the same committed code
                                            finished is not repeated
    python benchmarks/presets.py --smoke    tiny runs that only show that every preset runs, in about a minute

Runs in the embedded host, one after the other, from the same warm-started policy. Ctrl-C leaves complete files.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("presets:main", extra="local")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from provenance import as_markdown, provenance
from rich.progress import track

from mis_plugins.__main__ import load
from mis_plugins.config import reading
from mis_plugins.config.docs import header
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.local.cli.arguments import parse_args
from mis_plugins.local.folders import METRICS, SUMMARY, set_aside
from mis_plugins.local.loop import run_rank
from mis_plugins.local.report import COLORS, FRAME, GRID, MetricsLog, write_json
from mis_plugins.local.train.parallel import EXIT_INTERRUPTED, launch
from mis_plugins.shared.provenance import committed_tree

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

    def digest(self, recipe: str, code: str) -> str:
        """Hash everything from which a run follows: preset, recipe and code."""
        said = code + recipe + (self.file.read_text(encoding="utf-8") if self.file else self.name)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


def hook(config: CorrectionConfig) -> str:
    """The flags that load what a config needs."""
    if config.needs_loss_hook:
        return LOSS
    return f"--use-tis {TIS}" if config.corrects else f"--get-mismatch-metrics {TIS}"


def cases() -> list[Case]:
    """The baselines, then every preset by name."""
    return [*map(Case, BASELINES), *(Case(name, file) for name, file in reading.presets().items())]


def run(case: Case, recipe: str, runs: Path) -> int:
    """Run one case in its own ranks; its warnings go to a file beside its numbers."""
    folder = runs / case.name.replace(" ", "-")
    set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    output = ["--output", str(folder), "--warmup-cache", str(runs / "warm-start"), "--quiet"]
    args = parse_args([*recipe.split(), *case.flags, *output])

    def main() -> None:
        logging.basicConfig(filename=folder / "warnings.log", force=True)
        run_rank(args)

    return launch(args.world_size, main)


def read(case: Case, runs: Path) -> dict[str, Any]:
    """Read the numbers of a finished run.

    `kept` leaves out the tokens that OPSM masks. `ess` is `kept` where the run reports none, since every weight is 1.
    """
    folder = runs / case.name.replace(" ", "-")
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


def measure(selected: Sequence[Case], recipe: str, runs: Path, path: Path, code: str | None) -> int:
    """Run what the json lacks or holds of another file, recipe or code, and write it anew after each run.

    Args:
        code: a name of it; None, of code that no commit holds, repeats every run.

    Returns:
        0, or the exit code of the run that failed or was interrupted.
    """
    found = json.loads(path.read_text())["presets"] if path.is_file() else {}
    digests = {case.name: code and case.digest(recipe, code) for case in selected}
    held = {name for name, one in found.items() if one["digest"] and one["digest"] == digests.get(name)}
    missing = [case for case in selected if case.name not in held]
    # No refresh thread: the ranks are forked, and a fork must not copy a lock that a thread holds.
    for case in track(missing, "presets", auto_refresh=False):
        exit_code = run(case, recipe, runs)
        if exit_code:
            said = "interrupted" if exit_code == EXIT_INTERRUPTED else "failed"
            print(f"{case.name}: {said}", file=sys.stderr)
            return exit_code
        found[case.name] = {"formula": case.formula, **read(case, runs), "digest": digests[case.name]}
        present = {one.name: found[one.name] for one in cases() if one.name in found}
        write_json(path, {"recipe": recipe, "measured_with": provenance(), "presets": present})
    return 0


def markdown(content: Mapping[str, Any]) -> str:
    """The table, and how to read it."""
    presets = content["presets"]
    start = next(iter(presets.values()))
    head = [
        "# Every preset on one run that collapses",
        "",
        "Made by `python benchmarks/presets.py`. A Megatron-core policy reverses six digits; an engine with emulated",
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
        "| preset | trainer | rollout | k3 | ESS | kept | formula |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [_row(name, one) for name, one in presets.items()]
    return "\n".join([*head, *rows, "", as_markdown(content["measured_with"])])


def _row(name: str, one: Mapping[str, Any]) -> str:
    numbers = [f"{one[key]:.2f}" for key in ("trainer_final", "rollout_final")]
    numbers += [f"{one['k3_kl']:.3f}", *(f"{one[key]:.2f}" for key in ("ess", "kept"))]
    return f"| {name} | {' | '.join(numbers)} | {one['formula'].replace('|', chr(92) + '|')} |"


def plot(presets: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A line a preset: rewards of both policies on the left, what is kept and its effective size on the right."""
    figure = Figure(figsize=(11, 1.2 + 0.2 * len(presets)), layout="constrained", facecolor="white")
    rewards, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    column = lambda key: [one[key] for one in presets.values()]  # noqa: E731
    lines = range(len(presets))
    rewards.hlines(lines, column("rollout_final"), column("trainer_final"), color=FRAME, linewidth=0.8)
    rewards.plot(column("trainer_final"), lines, "o", color=COLORS[0], label="trainer policy")
    rewards.plot(column("rollout_final"), lines, "o", color=COLORS[1], mfc="white", label="rollout policy")
    shares.barh(lines, column("kept"), height=0.55, color=COLORS[2], alpha=0.45, label="tokens kept")
    shares.plot(column("ess"), lines, "|", color=COLORS[6], markersize=9, label="effective sample size")
    rewards.set_yticks(lines, list(presets), fontsize=8)
    rewards.set_ylim(len(presets) - 0.4, -0.6)
    _dress(rewards, "Final reward")
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


def publish(path: Path) -> None:
    """Write table and picture of what the json holds."""
    content = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(content))
    plot(content["presets"], path.with_suffix(".png"))
    print(f"wrote {path.parent}")


def main() -> int:
    """Exit code: 0, or that of the run that failed or was interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "presets", nargs="*", metavar="PRESET", help="(default: all of them, and the baselines)"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    parser.add_argument("--runs", type=Path, help="(default: runs/presets)")
    parser.add_argument("--results", type=Path, help="(default: benchmarks/results)")
    options = parser.parse_args()
    known = {case.name: case for case in cases()}
    unknown = [name for name in options.presets if name not in known]
    if unknown:
        parser.error(f"no preset {', '.join(unknown)}; choose from {', '.join(known)}")
    runs = options.runs or Path("runs/presets-smoke" if options.smoke else "runs/presets")
    results = options.results or (runs if options.smoke else Path("benchmarks/results"))
    results.mkdir(parents=True, exist_ok=True)
    path = results / "presets.json"
    recipe = RECIPE + (" --smoke" if options.smoke else "")
    selected = [known[name] for name in options.presets or known]
    exit_code = measure(selected, recipe, runs, path, committed_tree("mis_plugins"))
    if path.is_file():
        publish(path)
    return exit_code

"""The demonstration: one run uncorrected, the same run corrected, then a picture and a sentence of each."""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.demo:main", extra="verify")

import argparse
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lab.experiments.runner import made_with
from lab.host.cli.arguments import parse_args
from lab.host.folders import CURVES, METRICS, SUMMARY, unused
from lab.host.loop import run_rank
from lab.host.report import PANELS, MetricsLog, draw_histories, in_words
from lab.host.train.parallel import launch
from lab.provenance import write_json
from mis_plugins.shared.numerals import whole
from mis_plugins.shared.shell import add_version

RECORD = "demo.json"
# One small setting in which the mismatch is large: digits are reversed by a policy that was warm-started to a reward
# near 0.95 and is sampled by an engine with int3 weights. With the advantage R - 1 only failures have a gradient, and
# a failure of the rollout policy says little about the trainer's policy.
RECIPE = (
    "--num-digits 10 --warmup-steps 500 "
    "--num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 64 --lr 5e-5 "
    "--advantage-estimator reinforce --reward-shift -1 --rollout-weights int3"
).split()
# The geometric bounds are wide: int3 weights mismatch a hundred times as much as a real engine does.
WEIGHT = {"level": "token", "upper": 2.0, "normalize": {"scope": "micro_batch", "over": "valid"}}
CORRECTION = {"weight": WEIGHT, "reject": [{"over": "mean", "lower": 0.8, "upper": 1.25}], "metrics": "core"}
RUNS: dict[str, dict[str, Any] | None] = {"uncorrected": None, "corrected": CORRECTION}
"""What --custom-config-path holds under `mis:` in each run; None without the hook."""


def command_line(name: str, seed: int, output: Path, *extra: str) -> list[str]:
    """Return the arguments of `python -m lab.host` for a run, and write its config, where it has one, to `output`."""
    shared = [*RECIPE, "--seed", str(seed), "--output", str(output), *extra]
    if RUNS[name] is None:
        return shared
    path = output / "mis.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"mis": RUNS[name]}, sort_keys=False))
    hook = "mis_plugins.mis.compute_mis_weights_with_cp"
    return [*shared, "--use-tis", "--custom-tis-function-path", hook, "--custom-config-path", str(path)]


def main() -> int:
    """Run the demonstration; return 0, or the exit code of the run that failed."""
    parser = argparse.ArgumentParser(prog="bash scripts/demo.sh", description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="(default: %(default)s; where an earlier demonstration lies there, the first free of DIR-2, DIR-3, ...)",
    )
    parser.add_argument("--seed", type=whole, default=1, help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few tiny rollouts that show nothing but that it works")
    add_version(parser)
    options = parser.parse_args()
    options.output = unused(options.output, RUNS)
    measured = made_with("bash scripts/demo.sh")
    for name in RUNS:
        code = run(name, options)
        if code:
            return code
    conclude(options.output, measured)
    return 0


def run(name: str, options: argparse.Namespace) -> int:
    """Train once over two context-parallel ranks; both runs start from one set of warm-started weights."""
    extra = ["--context-parallel-size", "2", "--grad-cosine-every", "20", *(["--smoke"] if options.smoke else [])]
    argv = command_line(name, options.seed, options.output / name, *extra)
    print(f"\n{name}: python -m lab.host {shlex.join(argv)}", flush=True)
    args = parse_args(argv)
    return launch(args.world_size, lambda: run_rank(args))


def record(folder: Path, measured: Mapping[str, str]) -> dict[str, Any]:
    """Collect what the picture shows of both runs by rollout, and what the runs were measured with."""
    held = {name: MetricsLog(folder / name / METRICS).read() for name in RUNS}
    shown = ("rollout", *(panel.key for panel in PANELS))
    runs = {name: [{key: one[key] for key in shown if key in one} for one in rows] for name, rows in held.items()}
    return {"measured_with": dict(measured), "runs": runs}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the picture from the record alone."""
    draw_histories(content["runs"], path)


def conclude(folder: Path, measured: Mapping[str, str]) -> None:
    content = record(folder, measured)
    write_json(folder / RECORD, content)
    draw(content, folder / CURVES)
    for name in RUNS:
        summary = json.loads((folder / name / SUMMARY).read_text())
        Console().print(f"\n{in_words(name, summary)}", highlight=False)
    print(f"\nwrote {folder}")

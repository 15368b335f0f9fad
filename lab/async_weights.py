"""Which weight of stale tokens brings a gradient nearest to the on-policy one: formulas beside those of the pack.

Each measurement is its own process, with one thread, and is not repeated where this committed code finished it. The
formulas stand in lab/experiments/async_candidates.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.async_weights:main", extra="verify")

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
import yaml

from lab.experiments.runner import Arm, made_with, parsed, run_arms, this_code
from lab.host.cli.arguments import parse_args
from lab.provenance import markdown_table, write_json, write_record

PROGRAM = "bash scripts/experiment-async-weights.sh"
RECIPE = (
    "--num-digits 8 --warmup-steps 230 --num-rollout 97 --eval-interval 16 --eval-prompts 256 "
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --disable-grpo-std-normalization --adam-beta2 0.999"
).split()
LOSS = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss".split()
BOUNDS = (2, 8)
UNBOUNDED = {"mis": {"segment_wise": {"weight_cap": None}}}


@dataclass(frozen=True)
class Plan:
    """What is measured: learning rates, rollouts that are pooled into a gradient, and further flags of each run."""

    rates: Sequence[str]
    bias_rollouts: int
    flags: Sequence[str] = ()


FULL = Plan(("5e-5", "1e-4", "2e-4"), 8)
# Failures have a reward of -1, so that a policy that never succeeds has a gradient too.
SMOKE = Plan(("3e-4",), 2, "--smoke --advantage-estimator reinforce --reward-shift -1".split())


def main() -> int:
    """Return 0, or the exit code of the measurement that failed or was interrupted."""
    options = parsed(ArgumentParser(prog=PROGRAM, description=__doc__), "async_weights")
    plan = SMOKE if options.smoke else FULL
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, before the start"
    made = {**made_with(PROGRAM), "load average": load}
    places = [(bound, lr, seed) for seed in options.seeds for bound in BOUNDS for lr in plan.rates]
    arms = {place: _arm(*place, plan, options.runs) for place in places}
    if code := run_arms(list(arms.values()), this_code()):
        return code
    rows = [
        {"bound": bound, "lr": lr, "seed": seed, "found": json.loads((arm.folder / "found.json").read_text())}
        for (bound, lr, seed), arm in arms.items()
    ]
    content = {"rows": rows, "rollouts": plan.bias_rollouts, "seeds": list(options.seeds), "measured_with": made}
    write_record(options.results / "async_weights.json", content, markdown(content))
    print(f"wrote {options.results}")
    return 0


def _arm(bound: int, lr: str, seed: int, plan: Plan, root: Path) -> Arm:
    folder = root / f"bound{bound}-lr{lr}-seed{seed}"
    args = parse_args([*command_line(lr, seed, folder, root), *plan.flags])
    work = partial(_write, args, bound, plan.bias_rollouts, folder / "found.json")
    settings = {"arguments": vars(args), "bound": bound, "rollouts": plan.bias_rollouts}
    return Arm(folder, settings, work)


def command_line(lr: str, seed: int, folder: Path, root: Path) -> list[str]:
    """Return the arguments of `python -m lab.host` for unbounded weights, and write their config to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "mis.yaml"
    config.write_text(yaml.safe_dump(UNBOUNDED))
    shared = ["--warmup-cache", str(root / "warm-start"), "--output", str(folder), "--quiet"]
    return [*RECIPE, "--lr", lr, "--seed", str(seed), *shared, *LOSS, "--custom-config-path", str(config)]


def _write(args: Namespace, bound: int, rollouts: int, path: Path) -> None:
    from lab.experiments.async_candidates import compared
    from lab.host.loop import Loop
    from lab.host.train.parallel import initialize

    found = compared(Loop(args, initialize(1, 1)), args, bound, rollouts)
    if dist.get_rank() == 0:
        write_json(path, found)


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page: for each bound a table of the weights, with means over learning rates and seeds."""
    lines = [
        "# Weights of stale tokens, compared",
        "",
        "Made by `bash scripts/experiment-async-weights.sh`; formulas in `lab/experiments/async_candidates.py`.",
        "Cosines to the on-policy gradient, as in [async.md](async.md): `pooled`, of the gradient over",
        f"{content['rollouts']} rollouts, shows bias, `single` variance too. `of the noise`: pooled, over what a",
        f"second on-policy gradient reaches. Means over {_settings(content['rows'])}.",
        "Smallest and largest are in brackets. `mean` and `variance` are the weight's own.",
        "What follows a name is its bound c.",
    ]
    for bound in BOUNDS:
        rows = [row for row in content["rows"] if row["bound"] == bound]
        lines += ["", f"## Ages up to {bound}", "", *_table(rows)]
    table = markdown_table(("measured with", ""), content["measured_with"].items())
    return "\n".join([*lines, "", "## Measured with", "", table])


def _settings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the learning rates and seeds that were measured."""
    rates, seeds = ({str(row[name]): None for row in rows} for name in ("lr", "seed"))
    return f"the learning rates {', '.join(rates)} and the seeds {', '.join(seeds)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(rows[0]["found"])
    lines = []
    for name in names:
        found = [row["found"][name] for row in rows]
        share = [row["found"][name]["pooled"] / row["found"]["on-policy"]["pooled"] for row in rows]
        cells = [_spread([one["pooled"] for one in found]), _spread([one["single"] for one in found]), _spread(share)]
        own = [f"{fmean(one[what] for one in found):.3g}" if what in found[0] else "" for what in ("mean", "variance")]
        lines.append((name, *cells, *own))
    headings = ("weight", "pooled", "single", "of the noise", "mean", "variance")
    return markdown_table(headings, lines).splitlines()


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"

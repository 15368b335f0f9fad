"""The drift of a constant reward on the real model, by rung: forward passes of the first rollout, before any training.

python -m lab.real_model.drift RUNS    nine rollouts, some ten minutes on one core; one that RUNS has is not repeated
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from lab.host.train.parallel import initialize
from lab.provenance import as_given, markdown_table, measured_with, write_record
from lab.real_model.arms import Arm
from lab.real_model.correction import centered_loss, pair
from lab.real_model.policy import log_probs_of
from lab.real_model.task import Task
from lab.real_model.unit import Recipe, Unit, _mismatch
from lab.real_model_rl import MEASURED, RESULTS, SEEDS, model_of

RUNGS = ("bf16", "fp8", "int5")
KEYS = ("k3", "center_drift", "center_target_mass", "center_behavior_mass", "center_tail_ratio", "center_tail_error")
PROGRAM = "python -m lab.real_model.drift"
PAGE = """Made by `{program}` of the commit below; the runner lies in that commit and not in the tree.

SmolLM2-135M before training, sampled as in [real_model_rl.md](real_model_rl.md) by an engine whose weights are rounded
as the rung says: 16 prompts with 4 responses, three seeds. Means over tokens; in brackets the least and the largest
seed. Not run on a GPU.

* *Drift*: the metric `center_drift` of the loss hook, the norm of the step of the logits that a constant reward makes
  without centering, within the 32 tokens that the engine finds likeliest.
* *Head*: the probability of these 32 tokens.
* *Tail ratio*: the engine's probability beyond the head over the trainer's. *Left*: what centering leaves of the drift
  there; its mean is 0 where the engine's tail has the trainer's shape.
"""


def main(runs: Path) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    made = measured_with(as_given(PROGRAM, sys.argv[1:]), MEASURED)
    with TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        initialize(1, 1)
        source, task = model_of(False, Path(scratch))
        rows = [_row(runs, rung, seed, source, task) for seed in SEEDS for rung in RUNGS]
    content = {"rows": rows, "measured_with": made}
    write_record(RESULTS / "real_model_drift.json", content, "\n".join(markdown(content)))


def _row(runs: Path, rung: str, seed: int, source: Path, task: Task) -> dict[str, Any]:
    path = runs / f"{rung}-seed{seed}.json"
    if not path.exists():
        path.write_text(json.dumps({"rung": rung, "seed": seed, **_measured(rung, seed, source, task)}))
    return json.loads(path.read_text())


@torch.no_grad()
def _measured(rung: str, seed: int, source: Path, task: Task) -> dict[str, Any]:
    """The hook's centering metrics over 16 prompts with 4 responses each, and the mismatch."""
    unit = Unit.start(Arm(rung, rung, "centered"), seed, Recipe(directed=()), task, source)
    problems = unit.problems("rollout", 0, unit.recipe.prompts)
    batches = unit.sampled(unit.of_arm, problems, unit.recipe.samples, "rollout", 0)
    sums, scored = Counter[str](), []
    for batch in batches:
        logits = unit.trainer.logits(batch.prompts, batch.tokens)
        scored.append(log_probs_of(logits, batch.tokens))
        _, metrics = centered_loss(unit.args, batch, torch.ones(len(batch.lengths)), logits)
        sums.update({name: float(value) for name, value in metrics.items() if "center" in name})
    count = unit.recipe.prompts * unit.recipe.samples
    return {name: value / count for name, value in sums.items()} | _mismatch(pair(batches, scored))


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    """The page: a rung a row."""
    yield "# The drift of a constant reward on a real model\n"
    yield PAGE.format(program=PROGRAM)
    rows = []
    for rung in RUNGS:
        found = [row for row in content["rows"] if row["rung"] == rung]
        rows.append([rung, *(_spread([row[key] for row in found], ".1e" if key == "k3" else ".3f") for key in KEYS)])
    yield markdown_table(("rung", "k3", "drift", "head, trainer", "head, engine", "tail ratio", "left"), rows)
    yield markdown_table(("measured with", ""), content["measured_with"].items())


def _spread(values: Sequence[float], spec: str) -> str:
    return f"{fmean(values):{spec}} [{min(values):{spec}}, {max(values):{spec}}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

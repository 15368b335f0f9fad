"""Does correction help a real model? GRPO on SmolLM2-135M-Instruct, with rollouts by rounded weights.

    python -m lab.real_model_rl               all arms and seeds: some hours on one core
    python -m lab.real_model_rl --arms on-policy bf16 --seeds 0
    python -m lab.real_model_rl --smoke       a tiny random model, in half a minute

An arm with a seed is a unit, and each finished unit leaves a record in runs/real_model_rl, which
`python -m lab.records runs/real_model_rl lab/results/real_model_rl.tar.xz` packs. After Ctrl-C the same command goes on
with the unit that it interrupted. The page is made anew of all records after every unit.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.real_model_rl:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from lab.host.train.parallel import initialize
from lab.provenance import as_given, measured_with, parser_of, write_json
from lab.real_model.arms import ARMS, units
from lab.real_model.page import page
from lab.real_model.records import Record, finished, name_of
from lab.real_model.task import Task, of_letters, of_tokenizer
from lab.real_model.unit import Recipe, Unit
from lab.records import records
from mis_plugins.errors import UserError
from mis_plugins.shared.numerals import whole
from true_on_policy.models.tiny import checkpoint, read_config, weights_hash

MODEL, SMOKE_MODEL = "smollm2-135m", "tiny-llama"
SEEDS = (0, 1, 2)
RESULTS = Path("lab/results")
PACKED = RESULTS / "real_model_rl.tar.xz"
MEASURED = ("mis_plugins", "true_on_policy", "lab", ":!lab/results")
SMOKE = Recipe(
    rollouts=2,
    prompts=4,
    samples=8,
    length=6,
    batch=16,
    evaluated=2,
    asked=1,
    directed=(0, 2),
    direction_prompts=4,
    direction_samples=8,
    layers=1,
)


def main() -> int:
    """Return 0, or 2 where a record is of other settings."""
    parser = parser_of(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", type=whole, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and two rollouts")
    parser.add_argument(
        "--runs", type=Path, help="folder of the records (default: runs/real_model_rl, beside the packed ones)"
    )
    parser.add_argument("--results", type=Path, help="folder of the page (default: lab/results)")
    options = parser.parse_args()
    options.runs = options.runs or (Path("runs/real-model-rl-smoke") if options.smoke else Path("runs/real_model_rl"))
    options.results = options.results or (options.runs if options.smoke else RESULTS)
    try:
        with TemporaryDirectory(prefix="real-model-") as scratch:
            dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
            initialize(1, 1)  # the embedded host scores by Megatron's cross entropy
            run(options, *model_of(options.smoke, Path(scratch)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def model_of(smoke: bool, scratch: Path) -> tuple[Path, Task]:
    """The checkpoint, and the task in its tokens."""
    if smoke:
        found = checkpoint(SMOKE_MODEL, scratch / "model", torch.float32, seed=0)
        return found, of_letters(read_config(found).eos_token_id)
    from transformers import AutoTokenizer

    from true_on_policy.models.pretrained import pretrained

    found = pretrained(MODEL, lambda line: print(line, file=sys.stderr))
    return found, of_tokenizer(AutoTokenizer.from_pretrained(found))


def run(options: Namespace, source: Path, task: Task) -> None:
    """Run the units that have no record yet, in their order, and write the page after each.

    Raises:
        UserError: a record is of other settings; raised before any unit runs.
    """
    whole = SMOKE if options.smoke else Recipe()
    model, digest = (SMOKE_MODEL if options.smoke else MODEL), weights_hash(source)
    options.runs.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)

    def recipe_of(name: str) -> Recipe:  # a centered arm has no directions, which take half the time of a unit
        return replace(whole, directed=()) if ARMS[name].centered else whole

    def settings(name: str, seed: int) -> dict[str, Any]:
        arm = ARMS[name]
        told = {"rung": arm.rung, "correction": arm.correction}
        return {"arm": name, "seed": seed, **told, "model": model, "weights": digest, **asdict(recipe_of(name))}

    packed = {} if options.smoke else records(PACKED)

    def record_of(name: str, seed: int) -> Record | None:
        return finished(packed | records(options.runs), name_of(name, seed), settings(name, seed))

    asked = units(options.arms, options.seeds)
    missing = [unit for unit in asked if record_of(*unit) is None]
    progress = Progress(len(missing), whole.rollouts)
    for name, seed in missing:
        unit = Unit.start(ARMS[name], seed, recipe_of(name), task, source)
        command = as_given("python -m lab.real_model_rl", sys.argv[1:])
        measured = measured_with(command, MEASURED)  # as the code is when the unit starts
        numbers = unit.run(lambda done, told=f"{name}, seed {seed}": progress.tell(told, done))
        progress.finished += 1
        content = {"settings": settings(name, seed), "correction": unit.correction, **numbers}
        write_json(options.runs / f"{name_of(name, seed)}.json", content | {"measured_with": measured})
        publish(options.results, record_of)
    publish(options.results, record_of)


class Progress:
    """Tells on stderr how far the experiment is, and how long it takes on."""

    def __init__(self, units: int, rollouts: int):
        self.units, self.rollouts, self.finished = units, rollouts, 0
        self._began = time.monotonic()

    def tell(self, unit: str, done: int) -> None:
        """Say that a unit has done so many rollouts."""
        share = self.finished + done / self.rollouts
        pace = (time.monotonic() - self._began) / share / 60  # minutes a unit
        here, all_left = pace * (1 - done / self.rollouts), pace * (self.units - share)
        said = f"{unit}: rollout {done} of {self.rollouts}, {here:.0f} min left; "
        print(f"{said}unit {self.finished + 1} of {self.units}, {all_left:.0f} min left", file=sys.stderr)


def publish(results: Path, record_of: Callable[[str, int], Record | None]) -> None:
    """Write the page of the records that are there, and say what is missing."""
    planned = units([*ARMS], SEEDS)
    there = {unit: record for unit in planned if (record := record_of(*unit)) is not None}
    missing: Sequence[tuple[str, int]] = [unit for unit in planned if unit not in there]
    (results / "real_model_rl.md").write_text(page(there, missing), encoding="utf-8")
    print(f"{len(there)} of {len(planned)} units: wrote {results / 'real_model_rl.md'}")

"""What a host logs of our TIS hook when 4 of 16 samples of a step are removed, by the host's own loss and reduction.

The program hands one optimizer step to the real `loss_function` of a Miles or slime checkout, micro-batch by
micro-batch, and reduces what it logs with the checkout's own code. Each split of the step runs twice: with 16 samples,
of which 4 have a loss mask of zeros, and without those 4. The second log has the means over the samples that train.

docs/metrics.md makes four statements of the first log; the program checks each number of it against them. Each split
runs a third time, with our rollout-data hook `count_samples`; names that Miles's `mis.py` lacks are then equal to those
of the second log in every split. Miles calls that hook with `args` alone, and ours reads the batch from the trainer;
here the batch is handed.

Exit status: 0 every statement holds, 1 one does not, 2 could not compare.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.masked_samples:main", extra="verify")

import importlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lab.host_checkout import build_parser, load_host, run_ranks, start_groups
from lab.host_modules import Host
from lab.parity.cases import Batch, make_batch
from lab.parity.drive import OURS, host_args, micro_batch
from lab.provenance import as_markdown, markdown_table, provenance, write_record
from mis_plugins.metrics.token_metrics import OF_MIS_PY
from mis_plugins.shared.table import print_table

SAMPLES = 16
SHOWN = ("mis_ratio_max_mb", "mis_kept_fraction", "mis_kl")
TOLERANCE = 1e-5
CONFIG = {"weight": {"upper": 1.5}, "reject": [{"over": "token", "lower": 0.5}], "metrics": "all"}

Log = dict[str, float]


@dataclass(frozen=True)
class Split:
    """How a step is split into micro-batches, and the samples that are removed.

    Attributes:
        spread: whether every micro-batch loses an equal share of its samples.
        dead: how many samples lie in micro-batches that lose all samples.
    """

    name: str
    micro_batches: tuple[tuple[int, ...], ...]
    removed: frozenset[int]
    spread: bool = False
    dead: int = 0

    @property
    def valid_share(self) -> float:
        return 1 - len(self.removed) / SAMPLES


def splits() -> list[Split]:
    whole, quarters = (tuple(range(SAMPLES)),), tuple(tuple(range(i, i + 4)) for i in range(0, SAMPLES, 4))
    return [
        Split("one micro-batch of 16", whole, frozenset({1, 6, 7, 12}), spread=True),
        Split("4 of 4, one removed in each", quarters, frozenset({1, 4, 10, 15}), spread=True),
        Split("4 of 4, three removed in one, one in another", quarters, frozenset({1, 4, 5, 7})),
        Split("4 of 4, one removed as a whole", quarters, frozenset({4, 5, 6, 7}), dead=4),
    ]


def samples(removed: frozenset[int]) -> list[Batch]:
    """The step's 16 samples, each alone; a removed sample has a loss mask of zeros."""
    return [
        make_batch(
            f"sample {i}",
            [5 + 3 * (i % 5)],
            lambda _, u, i=i: torch.full_like(u, float(i not in removed)),
            lambda n: 0.4 * torch.randn(n),
            seed=i,
        )
        for i in range(SAMPLES)
    ]


def joined(rows: Sequence[Batch]) -> Batch:
    """Join samples into one micro-batch."""
    lists = {
        name: [x for row in rows for x in getattr(row, name)]
        for name in Batch.__annotations__
        if name != "name"
    }
    return Batch(name="micro-batch", **lists)


@dataclass(frozen=True)
class Logs:
    """What a step leaves: the host's own log, and our metrics of the step."""

    host: Log
    step: Log


def run_step(host: Host, micro_batches: Sequence[Batch], rollouts: int, counts: bool = False) -> Logs:
    """Run one optimizer step: the host's loss of each micro-batch, its reduction of logs, and our step hook.

    Args:
        counts: whether the host calls `count_samples` before the step.
    """
    from mis_plugins import mis
    from mis_plugins.hosts import tracking

    args = host_args(
        {"mis": CONFIG}, OURS, False, "thd", use_tis=True, loss_type="policy_loss", recompute_loss_function=False,
        rollout_function_path=None, multi_lora_n_adapters=0, global_batch_size=rollouts, num_steps_per_rollout=1,
    )  # fmt: skip
    found: list[Log] = []
    if counts:
        mis.count_samples(args, 0, rollout_data(host, micro_batches, rollouts))
    with patch.object(tracking, "log", lambda args, metrics, *_: found.append(dict(metrics))):
        mis.report_step(args, 0, 0)
        logged = _reduced(host, args, [_logged(host, args, x, rollouts) for x in micro_batches], rollouts)
        mis.report_step(args, 1, 0)
    return Logs({name: x for name, x in logged.items() if name.startswith("mis_")}, found[-1])


def rollout_data(host: Host, micro_batches: Sequence[Batch], rollouts: int) -> dict[str, Any]:
    """Build what a host's trainer hands to the rollout-data hook: masks of the samples, and the schedule."""
    sizes = [len(batch.loss_masks) for batch in micro_batches]
    ends = list(accumulate(sizes))
    return {
        "loss_masks": [mask for batch in micro_batches for mask in batch.loss_masks],
        "rollout_mask_sums": torch.tensor([float(x) for batch in micro_batches for x in batch.mask_sums]),
        "micro_batch_indices": [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)],
        "num_microbatches": [len(micro_batches)],
        "global_batch_sizes" if host.name == "slime" else "num_rollouts": [rollouts],
    }


def _logged(host: Host, args: Namespace, batch: Batch, rollouts: int) -> dict[str, Any]:
    given, logits = micro_batch(host, args, batch)
    module = importlib.import_module(host.step_loss_module)
    if host.name == "slime":
        return module.loss_function(args, given, 1, rollouts, logits)[2]
    return module.loss_function(args, given, 1, logits, True, num_rollouts=rollouts)[2]


def _reduced(host: Host, args: Namespace, logged: list[dict[str, Any]], rollouts: int) -> Log:
    module = importlib.import_module(host.step_log_module)
    if host.name == "miles":
        return module.aggregate_train_losses(logged, rollouts)
    return module.reduce_train_step_metrics(
        logged,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=rollouts,
        cp_size=1,
        dp_with_cp_group=dist.group.WORLD,
    )


@dataclass(frozen=True)
class Row:
    """One split: the logs of its steps, and what does not hold of the log of all 16 samples.

    Attributes:
        among: the logs of all 16 samples.
        alone: the logs of the 12 samples that train.
        counted: the logs of all 16 samples after `count_samples` saw them.
        faults: numbers of the logs that are not as docs/metrics.md states.
    """

    split: Split
    among: Logs
    alone: Logs
    counted: Logs
    faults: tuple[str, ...]


def measure(host: Host, split: Split) -> Row:
    """Run a split with the removed samples and without them."""
    rows = samples(split.removed)
    among = [joined([rows[i] for i in of]) for of in split.micro_batches]
    left = [[rows[i] for i in of if i not in split.removed] for of in split.micro_batches]
    with_removed = run_step(host, among, SAMPLES)
    without = run_step(host, [joined(of) for of in left if of], SAMPLES - len(split.removed))
    counted = run_step(host, among, SAMPLES, counts=True)
    faults = [*_faults(host, split, with_removed, without, among)]
    faults += _faults_counted(split, counted, with_removed, without)
    return Row(split, with_removed, without, counted, tuple(faults))


def _faults_counted(split: Split, counted: Logs, among: Logs, alone: Logs) -> Iterator[str]:
    """Name numbers of a counted step that are not the mean over what trains, or changed by mistake."""
    for name, value in counted.host.items():
        expected = among.host[name] if name.removeprefix("mis_") in OF_MIS_PY else alone.host[name]
        if abs(value - expected) > TOLERANCE * max(1.0, abs(expected)):
            yield f"{split.name}, counted: {name} is {value:.6g}, and should be {expected:.6g}"


def _faults(
    host: Host, split: Split, among: Logs, alone: Logs, micro_batches: Sequence[Batch]
) -> Iterator[str]:
    """Name the numbers of a log that are not as docs/metrics.md states."""
    each = [run_step(host, [batch], SAMPLES).host for batch in micro_batches]
    for name, value in among.host.items():
        if name.removeprefix("mis_") in OF_MIS_PY:
            expected = alone.host[name] * among.step["live_sequences_fraction"]
        elif split.spread:
            expected = alone.host[name]
        elif split.dead:
            expected = alone.host[name] * (1 - split.dead / SAMPLES)
        else:
            # Each micro-batch counts by all its samples: alone in a step of 16 it logs its own part of the mean.
            expected = sum(log[name] for log in each)
        if abs(value - expected) > TOLERANCE * max(1.0, abs(expected)):
            yield f"{split.name}: {name} is {value:.6g}, and should be {expected:.6g}"
    for name, value in among.step.items():
        if name == "live_sequences_fraction":
            expected = split.valid_share
        else:
            expected = alone.step[name]
        if abs(value - expected) > TOLERANCE * max(1.0, abs(expected)):
            yield f"{split.name}: the step's {name} is {value:.6g}, and should be {expected:.6g}"


HEADINGS = ("step", "metric", "logged", "over the 12", "logged / 0.75", "quotient logged to over the 12")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Return one line for each shown metric of each split."""
    return [
        [
            row.split.name + said,
            name,
            *(f"{x:.5f}" for x in (value, mean, value / row.split.valid_share, value / mean)),
        ]
        for row in rows
        for said, logs in (("", row.among), (", counted", row.counted))
        for name in SHOWN
        for value, mean in [(logs.host[name], row.alone.host[name])]
    ]


def write_results(path: Path, rows: Sequence[Row], measured: dict[str, str]) -> None:
    """Write all numbers to `path` as JSON, and the shown ones to a .md beside it."""
    splits_of = [
        {
            "split": row.split.name,
            "logged": row.among.host,
            "counted": row.counted.host,
            "over the 12": row.alone.host,
            "of the step": row.among.step,
            "faults": row.faults,
        }
        for row in rows
    ]
    note = (
        "4 of 16 samples of a step have a loss mask of zeros. `logged` is the host's own number; `over the 12` its "
        "number for the same step without those 4. The TIS hook scales the first two metrics back in each micro-batch; "
        "`mis_kl` is a name of Miles's `mis.py`. Every metric of `mis_step/` is equal with and without the 4. Where a "
        "step is `counted`, the rollout-data hook `count_samples` has seen it before. Miles calls "
        "that hook with `args` alone, and ours reads the batch from the trainer; here the batch is handed."
    )
    text = f"{as_markdown(measured)}\n{note}\n\n{markdown_table(HEADINGS, table(rows))}"
    write_record(path, {"measured with": measured, "splits": splits_of}, text)


def main() -> int:
    arguments = build_parser(__doc__).parse_args()

    def alone(rank: int) -> list[Row]:
        start_groups(host.name, 1)
        return [measure(host, split) for split in splits()]

    try:
        host = load_host(arguments.host, arguments.checkout)
        rows: list[Row] = run_ranks(1, alone)[0]
    except Exception as error:
        print(f"could not compare: {error}")
        return 2
    print_table(HEADINGS, table(rows))
    print(*(fault for row in rows for fault in row.faults), sep="\n")
    if arguments.json:
        write_results(arguments.json, rows, provenance({arguments.host: arguments.checkout}))
    return 1 if any(row.faults for row in rows) else 0

"""What does the bitwise comparison add to a training step, beside the TIS hook of this micro-batch?

TIS hook and comparison are called in turn, A B A B, in one process group on one thread. The TIS hook runs with Miles's
own mis.yaml, and all its metrics are read, as in correction_cost.py. A comparison is
`true_on_policy.hosts.policy_loss` around a loss that does nothing, and one `report_step` that reads its flags. The
log-probs are equal. `one bit off` repeats the comparison with a micro-batch that differs every time: the host counts
its ulps, and writes one sample.

share       the comparison's time over the TIS hook's
operators   dispatched below autograd, views included; the other columns as in correction_cost.py
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("comparison_cost:main", extra="local")

import functools
import importlib
import itertools
import logging
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from correction_cost import (
    OURS,
    Cost,
    alternating_seconds,
    called,
    cost_of,
    hook_args,
    hook_kwargs,
    lengths,
    load,
    response_lengths,
)
from host_checkout import run_ranks, start_groups
from provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from torch import Tensor

from mis_plugins.shared.numerals import counts
from mis_plugins.shared.table import print_table
from true_on_policy import hosts
from true_on_policy.hosts.watch import Comparison

NAMES = ("TIS hook", "comparison", "one bit off")


@dataclass(frozen=True)
class Row:
    """The costs of one shape and context parallelism, by the names of NAMES."""

    sequences: int
    length: str
    cp: int
    costs: dict[str, Cost]

    def share(self, name: str) -> float:
        return self.costs[name].seconds / self.costs["TIS hook"].seconds

    def share_of_cpu(self, name: str) -> float:
        return self.costs[name].cpu_seconds / self.costs["TIS hook"].cpu_seconds


def nothing(args: Any, batch: Any, logits: Tensor, reduce: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits as the loss behind the comparison, which costs nothing."""
    return logits, {}


def reduce(x: Tensor) -> Tensor:
    raise AssertionError("the comparison averages nothing")


reduce.__module__ = "slime.backends.megatron_utils.cp_utils"  # whose groups are Megatron's own


def compared(kwargs: dict[str, Any], folder: str, off: bool) -> Callable[[], Any]:
    """Return a call that compares the TIS hook's micro-batch and reads the flags once."""
    behavior = [x.clone() for x in kwargs["train_log_probs"]]
    if off:
        next(x for x in behavior if x.numel()).view(torch.int32)[0] ^= 1
    batch = {
        "unconcat_tokens": [torch.zeros(n, dtype=torch.int64) for n in kwargs["total_lengths"]],
        "rollout_log_probs": behavior, "log_probs": kwargs["train_log_probs"], "loss_masks": kwargs["loss_masks"],
        "total_lengths": kwargs["total_lengths"], "response_lengths": kwargs["response_lengths"],
    }  # fmt: skip
    args = Namespace(bitwise={"folder": folder, "loss": "comparison_cost.nothing"}, qkv_format="thd")
    logits, step, comparison = torch.zeros(()), itertools.count(), Comparison()

    def call() -> Any:
        hosts.COMPARISON = comparison
        hosts.report_step(args, 0, next(step))
        return hosts.policy_loss(args, batch, logits, reduce)

    return call


def measure(shapes: Sequence[tuple[int, str]], cp: int, seconds: float) -> list[Row]:
    """Measure all shapes in one process group."""

    def work(rank: int) -> list[dict[str, Cost]]:
        start_groups(None, cp)
        with tempfile.TemporaryDirectory() as folder:
            return [
                _costs(hook_kwargs(response_lengths(*shape), cp, rank), folder, seconds) for shape in shapes
            ]

    return [Row(*shape, cp, costs) for shape, costs in zip(shapes, run_ranks(cp, work)[0], strict=True)]


def _costs(kwargs: dict[str, Any], folder: str, seconds: float) -> dict[str, Cost]:
    calls = (
        called(load(OURS), hook_args("full"), kwargs),
        compared(kwargs, folder, off=False),
        compared(kwargs, folder, off=True),
    )
    spent = zip(*alternating_seconds(calls, seconds), strict=True)
    return {name: cost_of(call, each) for name, call, each in zip(NAMES, calls, spent, strict=True)}


HEADINGS = ("N x length", "CP", "", "time", "share", "cpu share", "operators", "waits", "collectives", "peak")


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Write three lines for each row, one for each name of NAMES."""
    out = []
    for row, name in itertools.product(rows, NAMES):
        cost, first = row.costs[name], name == NAMES[0]
        shape = (f"{row.sequences} x {row.length}", str(row.cp)) if first else ("", "")
        shares = f"{row.share(name):.3f}", f"{row.share_of_cpu(name):.3f}"
        counts = (f"{count:,}" for count in (cost.operators, cost.waits, cost.collectives))
        took, peak = f"{1e3 * cost.seconds:.2f} ms", f"{cost.peak_bytes / 1e6:.2f} MB"
        out.append((*shape, name, took, *shares, *counts, peak))
    return out


def write_results(path: Path, rows: Sequence[Row], measured: dict[str, str]) -> None:
    """Write the figures to `path` as JSON, and as a table to a .md beside it."""
    listed = [asdict(row) | {"share": {name: row.share(name) for name in NAMES}} for row in rows]
    text = f"{as_markdown(measured)}\n{markdown_table(HEADINGS, lines(rows))}"
    write_record(path, {"measured with": measured, "rows": listed}, text)


def parse_arguments() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--n", type=counts, default=[8, 64, 256], help="sequences (default: 8,64,256)")
    parser.add_argument(
        "--length",
        type=lengths,
        default=["128", "1024", "8192"],
        help="tokens of each (default: 128,1024,8192)",
    )
    parser.add_argument("--cp", type=counts, default=[1, 2], help="ranks (default: 1,2)")
    parser.add_argument("--json", type=target, help="write the figures here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="two small shapes, a few calls")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.smoke:
        arguments.n, arguments.length = [8, 64], ["128"]
    warnings.filterwarnings("ignore", module="megatron")
    importlib.import_module("megatron.core")  # before the fork: seconds a rank
    logging.getLogger("true_on_policy").setLevel(
        logging.CRITICAL
    )  # each reading of `one bit off` would say so
    shapes = list(itertools.product(arguments.n, arguments.length))
    timed = functools.partial(measure, shapes, seconds=0.1 if arguments.smoke else 3.0)
    rows = [row for cp in arguments.cp for row in timed(cp)]
    print_table(HEADINGS, lines(rows))
    if arguments.json:
        write_results(arguments.json, rows, provenance())
    return 0

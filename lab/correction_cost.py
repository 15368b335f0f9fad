"""What does the correction cost a training step, and what does the number of sequences add to it?

Our hook and a baseline are called in turn, A B A B, in one process group on one thread, with Miles's own mis.yaml in
force. A call is the hook and the reading of every metric that it returns, one at a time and dropped, as hosts do. The
host's own averaging and the backward (one multiplication) are left out. Without --baseline the baseline is our own hook
in a loop over the sequences. With PYTHONPATH at a Miles checkout, the baseline can be Miles's own function:

    --baseline examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp

time        median of the calls on the wall clock, slowest rank
cpu         median of the processor time of rank 0, waiting left out: what a busy machine cannot stretch
faults      median of the pages that the call on rank 0 had to ask the kernel for, which takes time: memory that the
            allocator gave back after the former call. Whether it gives back is chance; on a GPU it gives back nothing
operators   dispatched below autograd, views included, collectives left out
waits       operators that make the host wait for a CUDA device; on CPU, operators that would
copies      tensors made from host data: on CUDA a copy each
bytes       what one rank puts into its collectives
peak        largest sum of live tensor bytes that the call added on rank 0, from the profiler's allocator events
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.correction_cost:main", extra="verify")

import importlib
import importlib.util
import itertools
import resource
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.host_checkout import run_ranks, stand_in_for_missing_packages, start_groups
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from lab.tallies import peak_bytes, tally
from mis_plugins.packing.layout import zigzag
from mis_plugins.shared.numerals import count, counts
from mis_plugins.shared.terminal import print_table

OURS = "mis_plugins.mis.compute_mis_weights_with_cp"
LOOP = "lab.correction_cost.sequence_by_sequence"
MIXED = (16, 8192)
PROMPT = 32
FEWEST_CALLS, MOST_CALLS = 3, 60

MIS_YAML = {
    "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
    "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True,
}  # fmt: skip

METRICS = ("watch", "all", "full", "core", "none")

Hook = Callable[..., tuple[Tensor, Any, Any]]
Spent = tuple[float, float, float]  # wall clock, processor time, page faults


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu_seconds: float
    page_faults: int
    operators: int
    waits: int
    copies: int
    collectives: int
    collective_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    sequences: int
    length: str
    cp: int
    ours: Cost
    baseline: Cost

    @property
    def times_faster(self) -> float:
        return self.baseline.seconds / self.ours.seconds

    @property
    def times_less_cpu(self) -> float:
        return self.baseline.cpu_seconds / self.ours.cpu_seconds

    @property
    def share_of_memory(self) -> float:
        return self.ours.peak_bytes / max(1, self.baseline.peak_bytes)


def response_lengths(sequences: int, length: str) -> list[int]:
    """Return the lengths of responses: all equal, or `mixed`: log-uniform between MIXED, equal in every run."""
    if length != "mixed":
        return [int(length)] * sequences
    low, high = (torch.tensor(float(x)).log() for x in MIXED)
    drawn = torch.rand(sequences, generator=torch.Generator().manual_seed(0))
    return (low + drawn * (high - low)).exp().long().tolist()


def lengths(text: str) -> list[str]:
    """Split the words of --length, counts of tokens and `mixed`, at commas."""
    return [part if part == "mixed" else str(count(part)) for part in text.split(",")]


def hook_kwargs(lengths: Sequence[int], cp: int, rank: int) -> dict[str, Any]:
    """Build a single-turn micro-batch whose log ratios have a standard deviation of 0.1."""
    torch.manual_seed(0)
    totals = [PROMPT + length for length in lengths]
    proximal = [-2 * torch.rand(length) for length in lengths]
    behavior = [x - 0.1 * torch.randn_like(x) for x in proximal]
    layout = zigzag(totals, lengths, cp, rank)
    local = layout.cut(proximal)
    return {
        "pg_loss": torch.randn(sum(map(len, local))).requires_grad_(),
        "train_log_probs": local,
        "rollout_log_probs": layout.cut(behavior),
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in lengths],
        "total_lengths": totals,
        "response_lengths": list(lengths),
    }


def called(hook: Hook, args: Namespace, kwargs: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        pg_loss, masks, metrics = hook(args, **kwargs)
        for name in metrics:
            _ = metrics[name]
        return pg_loss, masks

    return call


def averaged(hook: Hook, args: Namespace, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Call a hook, and average each metric that it hands back as a host does: a mean over each sequence's mask."""
    lengths = [len(x) for x in kwargs["train_log_probs"]]
    masks = [(mask, mask.sum()) for mask in kwargs["loss_masks"]]

    def call() -> Any:
        answer = hook(args, **kwargs)
        for name in answer[2]:
            rows = zip(answer[2][name].split(lengths), masks, strict=True)
            _ = sum((x * mask).sum() / size.clamp(min=1) for x, (mask, size) in rows)
        return answer

    return call


def sequence_by_sequence(
    args: Namespace, *, pg_loss: Tensor, **given: Sequence[Any]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Call our hook for each sequence alone, and read the loss on the host, as a loop with branches does.

    The weights are then normalized over one sequence: costs compare with the costs of the whole batch, losses
    do not.
    """
    losses, masks, metrics = [], [], []
    for number, part in enumerate(pg_loss.split([len(x) for x in given["train_log_probs"]])):
        one = {name: values[number : number + 1] for name, values in given.items()}
        loss, mask, named = load(OURS)(args, pg_loss=part, **one)
        float(loss.detach().sum())
        losses.append(loss)
        masks += mask
        metrics.append({name: named[name] for name in named})
    return torch.cat(losses), masks, {name: torch.cat([x[name] for x in metrics]) for name in metrics[0]}


def hook_args(metrics: str | None) -> Namespace:
    extra = {} if metrics is None else {"mis": {"metrics": metrics}}
    return Namespace(**MIS_YAML, **extra, qkv_format="thd", get_mismatch_metrics=False)


@dataclass(frozen=True)
class Contest:
    """A contest of our hook with a baseline: the baseline, our metrics, and how long each is called."""

    baseline: str = LOOP
    metrics: str = "full"
    seconds: float = 3.0


def measure(contest: Contest, shape: tuple[int, str], cp: int) -> Row:
    """Measure one shape: our hook and the baseline take turns in one process group.

    Each shape gets a new process group, so that the allocator holds no pages of another shape.
    """

    def work(rank: int) -> tuple[Cost, Cost]:
        start_groups("miles" if importlib.util.find_spec("miles") else None, cp)
        return _both(contest, hook_kwargs(response_lengths(*shape), cp, rank))

    return Row(*shape, cp, *run_ranks(cp, work)[0])


def load(path: str) -> Hook:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _both(contest: Contest, kwargs: dict[str, Any]) -> tuple[Cost, Cost]:
    ours = called(load(OURS), hook_args(contest.metrics), kwargs)
    baseline = called(load(contest.baseline), hook_args(None), kwargs)
    spent = alternating_seconds((ours, baseline), contest.seconds)
    ours_spent, baseline_spent = zip(*spent, strict=True)
    return cost_of(ours, ours_spent), cost_of(baseline, baseline_spent)


def alternating_seconds(calls: tuple[Callable[[], Any], ...], seconds: float) -> list[list[Spent]]:
    """Call each twice to warm up, then A B A B until both had their time; ranks make equally many rounds."""
    once = [_seconds(call) for call in calls]
    once = [_seconds(call) for call in calls]
    average = sum(wall for wall, *_ in once) / len(once)
    rounds = min(max(FEWEST_CALLS, int(seconds / average)), MOST_CALLS)
    return [[_seconds(call) for call in calls] for _ in range(rounds)]


def _seconds(call: Callable[[], Any]) -> Spent:
    """Measure one call: the wall clock of the slowest rank, and this rank's processor time and page faults."""
    dist.barrier()
    start, cpu_start, faults_before = time.perf_counter(), time.process_time(), _page_faults()
    kept = call()
    cpu, faults = time.process_time() - cpu_start, _page_faults() - faults_before
    wall = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    del kept
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    return wall.item(), cpu, faults


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def cost_of(call: Callable[[], Any], spent: Sequence[Spent]) -> Cost:
    counted = tally(call)
    peak = peak_bytes(call)
    wall, cpu, faults = (median(column) for column in zip(*spent, strict=True))
    collectives = sum(counted.collectives.values())
    waits = sum(counted.waits.values())
    return Cost(
        wall,
        cpu,
        int(faults),
        counted.operators,
        waits,
        counted.copies,
        collectives,
        counted.collective_bytes,
        peak,
    )


HEADINGS = tuple("N x length,CP,,time,cpu,faults,operators,waits,copies,collectives,bytes,peak,ratio".split(","))


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Write two lines for each row: the baseline, then ours with what it saves."""
    out: list[tuple[str, ...]] = []
    for row in rows:
        saved = f"{row.times_faster:.1f}x less time ({row.times_less_cpu:.1f}x cpu), {row.share_of_memory:.2f}x memory"
        out.append((f"{row.sequences} x {row.length}", str(row.cp), "baseline", *_figures(row.baseline), ""))
        out.append(("", "", "ours", *_figures(row.ours), saved))
    return out


def _figures(cost: Cost) -> tuple[str, ...]:
    counts = (
        cost.page_faults,
        cost.operators,
        cost.waits,
        cost.copies,
        cost.collectives,
        cost.collective_bytes,
    )
    times = f"{1e3 * cost.seconds:.2f} ms", f"{1e3 * cost.cpu_seconds:.2f} ms"
    return *times, *(f"{count:,}" for count in counts), f"{cost.peak_bytes / 1e6:.2f} MB"


def write_results(path: Path, rows: Sequence[Row], measured: dict[str, str], named: str) -> None:
    """Write the figures to `path` as JSON, and as a table to a .md beside it."""
    ratios = ("times_faster", "times_less_cpu", "share_of_memory")
    listed = [asdict(row) | {name: getattr(row, name) for name in ratios} for row in rows]
    legend = (__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[2]
    head = f"{as_markdown(measured)}\nBaseline: `{named}`\n\n```\n{legend}```\n\n"
    write_record(
        path,
        {"measured with": measured, "baseline": named, "rows": listed},
        head + markdown_table(HEADINGS, lines(rows)),
    )


def parse_arguments() -> Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--n", type=counts, default=[8, 64, 256], help="sequences (default: 8,64,256)")
    parser.add_argument(
        "--length",
        type=lengths,
        default=["128", "1024", "8192", "mixed"],
        help="tokens of each; mixed: ragged (default: 128,1024,8192,mixed)",
    )
    parser.add_argument("--cp", type=counts, default=[1, 2, 4], help="ranks (default: 1,2,4)")
    parser.add_argument("--baseline", default=LOOP, help="dotted path of a hook to compare with (default: %(default)s)")
    parser.add_argument("--metrics", choices=METRICS, default="full", help="of ours")
    parser.add_argument("--json", type=target, help="write the figures here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="two small shapes, a few calls")
    return parser.parse_args()


def measure_all(arguments: Namespace) -> list[Row]:
    if arguments.smoke:
        arguments.n, arguments.length, arguments.cp = [8, 64], ["128"], [1, 2]
    contest = Contest(arguments.baseline, arguments.metrics, 0.1 if arguments.smoke else 3.0)
    shapes = list(itertools.product(arguments.n, arguments.length))
    return [measure(contest, shape, cp) for cp in arguments.cp for shape in shapes]


def main() -> int:
    arguments = parse_arguments()
    stand_in_for_missing_packages()
    warnings.filterwarnings("ignore", module="megatron")
    importlib.import_module("megatron.core")  # before the fork: seconds a rank
    for path in (OURS, arguments.baseline):
        load(path)
    rows = measure_all(arguments)
    print(f"ours against {arguments.baseline}")
    print_table(HEADINGS, lines(rows))
    if arguments.json:
        write_results(arguments.json, rows, provenance(_checkout(arguments.baseline)), arguments.baseline)
    return 0


def _checkout(baseline: str) -> dict[str, Path]:
    """Find the folder of the baseline's source, for its commit; none where the baseline is the loop."""
    source = sys.modules[baseline.rpartition(".")[0]].__file__
    return {"baseline": Path(source).parent} if source and baseline != LOOP else {}

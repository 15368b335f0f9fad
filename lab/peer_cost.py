"""What does a correction cost beside the peers' own, whole, with the metrics that each package computes?

    python -m lab.peer_cost --smoke                  two small shapes; ours alone where no peer is there
    bash scripts/peers.sh --collect-only -q          once: installs the peers into .venv-peers
    PYTHONPATH=MILES .venv-peers/bin/python -m lab.peer_cost --json lab/results/peer_cost.json     ten minutes

All ways take turns in one process on one thread and one batch, A B C A B C; one that takes less than 20 ms is called
twice in its turn, and the second call is timed: what a package keeps between calls is there. Each has the tensors that
its own trainer holds: ours and Miles's `mis.py` lists of responses, AReaL packed tokens, the others rows padded to the
longest response, joined before the clock starts. `+ host` adds what Miles does with what a hook hands back: for each
metric a mean over each sequence. `watch` is our default, with the sums of the step that the step hook logs. Only hooks
know context parallelism, so that the peers have no row at CP 2. TRL's two statements are compiled before the clock
starts, as is our token stage in the row `compiled`, whose operators and peak are counted uncompiled. AReaL's second row
and OpenRLHF's hold the policy loss too, outside of which their metrics or weights are not to be had.

way         token TIS bounded at 2; with `mis.yaml` Miles's own config of that name, with a veto and a normalized weight
time        median of the calls on the wall clock, slowest rank
cpu         median of the processor time of rank 0: what a busy machine stretches least
operators   dispatched below autograd, views included, collectives left out
waits       operators that make the host wait for a CUDA device; on CPU, operators that would
bytes       what one rank puts into its collectives
peak        largest sum of live tensor bytes that the call added on rank 0, from the profiler's allocator events
floor       the passes over memory that token TIS on lists cannot do without, each timed by itself, added up
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.peer_cost:main", extra="verify")

import importlib
import importlib.util
import itertools
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.host_checkout import run_ranks, stand_in_for_missing_packages, start_groups
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from lab.tallies import peak_bytes, tally
from mis_plugins import mis
from mis_plugins.correction import pipeline
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.packing.layout import zigzag
from mis_plugins.shared.terminal import print_table

OURS = mis.compute_mis_weights_with_cp
MILES = "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
PROMPT, UPPER = 32, 2.0
SHAPES = ((256, 128, 128), (256, 16, 1024), (256, 16, 8192), (64, 16, 8192))  # sequences, shortest, longest response
SMOKE = ((8, 128, 128), (64, 128, 128))
FEWEST, MOST, QUICK = 3, 60, 0.02  # calls of each way; seconds
FLOOR = "floor: "

MIS_YAML = {
    "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
    "tis_lower_bound": 0.5, "tis_upper_bound": UPPER, "rs_lower_bound": None, "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True,
}  # fmt: skip
TOKEN_TIS = MIS_YAML | {
    "use_rs": False, "tis_lower_bound": 0.0, "rs_level": None, "rs_veto_threshold": None, "tis_batch_normalize": False
}  # fmt: skip

Hook = Callable[..., tuple[Tensor, Any, Any]]
Call = Callable[[], Any]
Shape = tuple[int, int, int]


def lengths_of(shape: Shape) -> list[int]:
    """Log-uniform lengths of responses, equal in every run."""
    sequences, *ends = shape
    low, high = torch.tensor([float(end) for end in ends]).log()
    drawn = torch.rand(sequences, generator=torch.Generator().manual_seed(0))
    return (low + drawn * (high - low)).exp().round().long().tolist()


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


def hook_args(metrics: str | None, keys: Mapping[str, Any] = MIS_YAML) -> Namespace:
    extra = {} if metrics is None else {"mis": {"metrics": metrics}}
    return Namespace(**keys, **extra, qkv_format="thd", get_mismatch_metrics=False)


def called(hook: Hook, args: Namespace, kwargs: dict[str, Any]) -> Call:
    """Call a hook, and read and drop each metric that it hands back, as hosts do."""

    def call() -> Any:
        pg_loss, masks, metrics = hook(args, **kwargs)
        for name in metrics:
            _ = metrics[name]
        return pg_loss, masks

    return call


def compiled(call: Call) -> Call:
    """The call with the token stage by torch.compile, as Miles compiles functions of its own loss."""
    fast, config = torch.compile(pipeline.token_stage, dynamic=True), importlib.import_module("torch._dynamo").config

    def with_fast_stage() -> Any:
        with config.patch(disable=False), mock.patch.object(pipeline, "token_stage", fast):
            return call()

    return with_fast_stage


def averaged(hook: Hook, args: Namespace, kwargs: dict[str, Any]) -> Call:
    """Call a hook, and average each metric that it hands back as a host does: a mean over each sequence's mask."""
    lengths = [len(x) for x in kwargs["train_log_probs"]]
    masks = [(mask[:length], mask.sum()) for mask, length in zip(kwargs["loss_masks"], lengths, strict=True)]

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
        loss, mask, named = OURS(args, pg_loss=part, **one)
        float(loss.detach().sum())
        losses.append(loss)
        masks += mask
        metrics.append({name: named[name] for name in named})
    return torch.cat(losses), masks, {name: torch.cat([x[name] for x in metrics]) for name in metrics[0]}


def of_hooks(kwargs: dict[str, Any], with_miles: bool) -> dict[str, Call]:
    """Our hook by what it hands back, and Miles's where it can be imported."""
    ours = {name: hook_args(name, TOKEN_TIS) for name in ("none", "full", "watch")}
    calls = {f"ours, {name}": called(OURS, args, kwargs) for name, args in ours.items()}
    calls |= {f"ours, {name} + host": averaged(OURS, ours[name], kwargs) for name in ("full", "watch")}
    calls["ours, mis.yaml"] = called(OURS, hook_args("full"), kwargs)
    if with_miles:
        theirs, args = resolve_name(MILES), hook_args(None, TOKEN_TIS)
        calls |= {"mis.py": called(theirs, args, kwargs), "mis.py + host": averaged(theirs, args, kwargs)}
        calls["mis.py, mis.yaml"] = called(theirs, hook_args(None), kwargs)
    return calls


def of_peers(kwargs: dict[str, Any]) -> dict[str, Call]:
    """Token TIS by each installed package, through the adapters that the tests judge with."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from peers import areal, ms_swift, openrlhf, skyrl, trl, verl

    rows: Any = _joined(kwargs, lambda tensors: pad_sequence(tensors, batch_first=True))
    packed: Any = _joined(kwargs, torch.cat)
    ends = torch.tensor([0, *itertools.accumulate(kwargs["response_lengths"])], dtype=torch.int32)
    packed_mask, rejects = packed.mask.bool(), areal.load(areal.FUNCTIONAL).apply_rejection_sampling
    clamps = areal.settings(level="token", action="clamp", metric="ratio", upper=UPPER)
    truncates = skyrl.settings(tis_ratio_type="token", token_tis_ratio_clip_high=UPPER)
    mode = "token_truncate", UPPER
    return {
        "verl": lambda: verl.correction(rows, {"rollout_is": "token", "rollout_is_threshold": UPPER}),
        "TRL": lambda: trl.correction(rows, *mode),
        "ms-swift": lambda: (ms_swift.weight_metrics(rows, *mode), ms_swift.mismatch_metrics(rows)),
        "AReaL": lambda: rejects(packed.proximal, packed.behavior, packed_mask, ends, clamps),
        "AReaL, loss and metrics": lambda: areal.metrics(packed, clamps),
        "SkyRL": lambda: skyrl.correction(rows, truncates),
        "OpenRLHF, loss": lambda: openrlhf.loss(rows, rows.proximal, (0.0, UPPER), **openrlhf.PRESETS["tis"]),
    }


def _joined(kwargs: dict[str, Any], join: Callable[[list[Tensor]], Tensor]) -> SimpleNamespace:
    """The batch under the names that the adapters read, in float32."""
    proximal, behavior, mask = (join(kwargs[x]).float() for x in ("train_log_probs", "rollout_log_probs", "loss_masks"))
    of_batch = {"log_ratio": proximal - behavior, "token_advantages": torch.ones_like(mask), "target": proximal}
    return SimpleNamespace(proximal=proximal, behavior=behavior, mask=mask, pad=lambda x: x, **of_batch)


def passes(kwargs: dict[str, Any]) -> dict[str, Call]:
    """The passes over memory that token TIS on lists needs: three lists become one tensor each; r, w and the loss.

    Joining into padded rows is what a peer's function would need first where a host hands lists over.
    """
    proximal, behavior, masks = (kwargs[name] for name in ("train_log_probs", "rollout_log_probs", "loss_masks"))
    pi, mu = torch.cat(proximal), torch.cat(behavior)
    log_ratio, loss, mask = pi - mu, kwargs["pg_loss"].detach(), torch.ones_like(pi).bool()
    weight = log_ratio.exp().clamp(max=UPPER)
    needed: dict[str, Call] = {
        "join log-probs": lambda: (torch.cat(proximal), torch.cat(behavior)),
        "join masks": lambda: torch.cat(masks).bool(),
        "subtract": lambda: pi - mu,
        "exponentiate": lambda: log_ratio.exp(),
        "bound": lambda: weight.clamp(max=UPPER),
        "mask": lambda: torch.where(mask, weight, 0),
        "multiply": lambda: loss * weight,
    }
    padding = {"lists to padded rows": lambda: _joined(kwargs, lambda x: pad_sequence(x, batch_first=True))}
    return {FLOOR + name: call for name, call in needed.items()} | padding


def measured(shape: Shape, cp: int, seconds: float) -> list[dict[str, Any]]:
    """Time every way in turn, and count operators, waits, collectives and memory of one call of each."""
    with_miles = importlib.util.find_spec("miles") is not None
    with_peers = cp == 1 and importlib.util.find_spec("verl") is not None

    def work(rank: int) -> list[dict[str, Any]]:
        start_groups("miles" if with_miles else None, cp)
        mis.RECORDER = Recorder(step=(1, 0))
        kwargs = hook_kwargs(lengths_of(shape), cp, rank)
        hooks = of_hooks(kwargs, with_miles)
        hooks["ours, none, compiled"] = compiled(hooks["ours, none"])
        calls = hooks | (of_peers(kwargs) if with_peers else {}) | passes(kwargs)
        spent = in_turn(calls, seconds)
        return [{"way": name} | costs(call, spent[name]) for name, call in calls.items()]

    named = dict(zip(("sequences", "shortest", "longest"), shape, strict=True), cp=cp)
    return [named | row for row in run_ranks(cp, work)[0]]


def in_turn(calls: Mapping[str, Call], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Wall clock and processor time of each call; ranks make equally many rounds, of some `seconds` a way."""
    once = sum(_seconds(call)[0] for call in calls.values())
    rounds = min(max(FEWEST, int(seconds * len(calls) / once)), MOST)
    turns = [{name: _seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in calls}


def _seconds(call: Call) -> tuple[float, float]:
    """Time a call; a quick one a second time, so that what a package keeps between calls is there."""
    wall, cpu = _timed(call)
    return _timed(call) if wall < QUICK else (wall, cpu)


def _timed(call: Call) -> tuple[float, float]:
    """The wall clock of the slowest rank, and this rank's processor time."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    kept = call()
    cpu = time.process_time() - cpu_start
    wall = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    del kept
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    return wall.item(), cpu


def costs(call: Call, spent: Sequence[tuple[float, float]]) -> dict[str, Any]:
    counted, peak = tally(call), peak_bytes(call)
    wall, cpu = (median(column) for column in zip(*spent, strict=True))
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "operators": counted.operators,
        "waits": sum(counted.waits.values()),
        "collectives": sum(counted.collectives.values()),
        "collective_bytes": counted.collective_bytes,
        "peak_bytes": peak,
    }


HEADINGS = tuple("sequences x tokens,CP,way,time,cpu,operators,waits,collectives,bytes,peak,beside floor".split(","))


def lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Write a line for each way, its processor time beside the floor; the passes of the floor are added up in one."""
    key = lambda row: (row["sequences"], row["shortest"], row["longest"], row["cp"])  # noqa: E731
    for (sequences, shortest, longest, cp), found in itertools.groupby(rows, key):
        size = f"{sequences} x {longest}" if shortest == longest else f"{sequences} x {shortest} to {longest}"
        ways = {row["way"]: row for row in found}
        floor = sum(row["cpu_seconds"] for way, row in ways.items() if way.startswith(FLOOR))
        for way, row in ways.items():
            times = [f"{1e3 * row[name]:.2f} ms" for name in ("seconds", "cpu_seconds")]
            counts = [f"{row[name]:,}" for name in ("operators", "waits", "collectives", "collective_bytes")]
            rest = f"{row['peak_bytes'] / 1e6:.2f} MB", f"{row['cpu_seconds'] / floor:.2f}x"
            yield size, cp, way, *times, *counts, *rest


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=target, help="write the figures here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="two small shapes, a few calls")
    options = parser.parse_args()
    stand_in_for_missing_packages()
    warnings.filterwarnings("ignore", module="megatron")
    importlib.import_module("megatron.core")  # before the fork: seconds a rank
    shapes, seconds = (SMOKE, 0.01) if options.smoke else (SHAPES, 0.3)
    rows: list[dict[str, Any]] = []
    for cp, shape in itertools.product((1, 2), shapes):
        rows += measured(shape, cp, seconds)
        print(f"{shape[0]} x {shape[2]}, CP {cp}: measured", file=sys.stderr, flush=True)
        if options.json:
            _write(options.json, rows)
    print_table(HEADINGS, [*lines(rows)])
    return 0


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the figures to `path` as JSON, and as a table to a .md beside it."""
    miles = importlib.util.find_spec("miles")
    found = provenance({"Miles": Path(miles.origin).parent} if miles and miles.origin else None)
    legend = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    head = f"# A correction beside the peers' own\n\n{as_markdown(found)}\n```\n{legend}```\n\n"
    write_record(path, {"measured with": found, "rows": rows}, head + markdown_table(HEADINGS, lines(rows)))

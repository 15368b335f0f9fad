"""Is a correction's answer always the same, and its memory too? Bits, long hauls, large batches, errors of sums.

    python -m lab.sameness --json lab/results/sameness.json        ten minutes on one core; --smoke: half a minute

bits       loss, masks and metrics of one batch, with absent log-probs and masked tokens, by SHA-256: run to run, on 1
           and 2 threads, and each sequence's own bits in another order of the sequences
ranks      masks over 2 and 4 context-parallel ranks of gloo, and the factors of the loss, beside those of one process
hauls      what calls of the hook, and steps that `report_step` logs, add to the resident memory and to the tensors
tokens     ten million tokens in one call: two sequences beside a call of their own
metrics    every number of a step with `metrics: all` on float32 log-probs, beside an oracle in float64

By design two things may differ. Ranks add up a sequence in an order of their own, in float64: a total differs by at
most 2 (T + ranks) 2^-53 of the sum of its terms' sizes, which moves a float32 weight by one spacing where it moves it.
A normalized weight is divided by a mean over sequences, whose order moves that mean by as little. Both are held to
2^-22 of the weight, two spacings. Masks differ only where a statistic lies that close to its bound.
Only the torch of this record was tried; no other version could be installed beside it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.sameness:main", extra="verify")

import gc
import hashlib
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lab.host_checkout import run_ranks, start_groups
from lab.peer_cost import hook_kwargs
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target, write_record
from mis_plugins import mis
from mis_plugins.config.loading import presets
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import correct
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.metrics.partials import finalize, partials
from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.packing.ragged import Ranks
from mis_plugins.shared.terminal import print_table

PRESETS = ("mis", "geometric-mis", "tis", "icepop", "sequence", "seq-mask-tis", "geometric-rs")
SPACINGS = 2**-22
LEFT_OVER = 4_000_000  # bytes that an allocator may keep between two readings
ORACLE = {
    "weight": {"level": "token", "bound": "truncate", "upper": 2.0},
    "reject": [{"statistic": "ratio", "over": "mean", "lower": 0.99, "upper": 1.01}],
    "metrics": "all",
}  # fmt: skip
# Float64 sums of numbers that are one rounded float32 difference and an exp or two old, themselves near 1 or below.
WORST = 1e-6


@dataclass(frozen=True)
class Row:
    """One thing that was tried: on what, what came out, what it is held to, and whether that holds."""

    check: str
    of: str
    found: str
    bound: str
    holds: bool


def hostile(lengths: Sequence[int]) -> dict[str, Any]:
    """A micro-batch with log ratios of three sizes, every seventh token masked, and some without a log-prob of mu."""
    kwargs = hook_kwargs(lengths, 1, 0)
    rows = zip(*(kwargs[name] for name in ("train_log_probs", "rollout_log_probs", "loss_masks")), strict=True)
    for i, (proximal, behavior, mask) in enumerate(rows):
        behavior.lerp_(proximal, (-9.0, 0.0, 0.99)[i % 3]).clamp_(max=0)
        behavior[60::97] = torch.nan if i % 5 == 1 else -1.0
        mask[i % 7 :: 7] = 0
    return kwargs | {"pg_loss": torch.ones(sum(lengths), requires_grad=True)}


def args_of(preset: str, **more: Any) -> Namespace:
    keys = yaml.safe_load(presets()[preset].read_text())
    nested = {**keys.pop("mis", {}), "metrics": "full"}
    flags = {"use_tis": True, "qkv_format": "thd", "get_mismatch_metrics": False}
    return Namespace(**flags | keys, mis=nested, **more)


def answer(args: Namespace, kwargs: dict[str, Any]) -> list[Tensor]:
    """Loss, masks and metrics."""
    loss, masks, metrics = mis.compute_mis_weights_with_cp(args, **kwargs)
    return [loss.detach(), torch.cat([*masks]), *(metrics[name] for name in metrics)]


def digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors)).hexdigest()


def permuted(kwargs: dict[str, Any], order: Sequence[int]) -> dict[str, Any]:
    return {name: x if name == "pg_loss" else [x[i] for i in order] for name, x in kwargs.items()}


def bits(lengths: Sequence[int]) -> Iterator[Row]:
    kwargs, order = hostile(lengths), torch.randperm(len(lengths)).tolist()
    for preset in PRESETS:
        args = args_of(preset)
        first = answer(args, kwargs)
        runs = {digest(first), *(digest(answer(args, kwargs)) for _ in range(2))}
        torch.set_num_threads(2)
        threads = {digest(first), digest(answer(args, kwargs))}
        torch.set_num_threads(1)
        yield Row("run to run", preset, f"{len(runs)} digest of 3 calls", "1", len(runs) == 1)
        yield Row("1 and 2 threads", preset, f"{len(threads)} digest", "1", len(threads) == 1)
        other = answer(args, permuted(kwargs, order))
        parts = [x.split([lengths[i] for i in order]) for x in other[:2]]
        places = sorted(range(len(order)), key=order.__getitem__)
        loss, masks = (torch.cat([part[place] for place in places]) for part in parts)
        yield _beside("order of sequences", preset, (loss, masks), (first[0], first[1]))


def _beside(check: str, of: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Row:
    """Factors of the loss within two spacings, masks equal."""
    (factor, masks), (usual, usual_masks) = found, wanted
    apart = float(((factor - usual).abs() / usual.abs().clamp(min=1e-30)).max())
    words = "masks equal, " if torch.equal(masks, usual_masks) else "masks DIFFER, "
    words += f"factors {'equal' if torch.equal(factor, usual) else f'{apart / 2**-23:.2g} spacings apart'}"
    return Row(check, of, words, "masks equal, factors 2 spacings", "DIFFER" not in words and apart <= SPACINGS)


def ranks(lengths: Sequence[int]) -> Iterator[Row]:
    whole_batch = hostile(lengths)
    for cp in (2, 4):
        found = run_ranks(cp, lambda rank, cp=cp: _on_rank(whole_batch, cp, rank))
        for preset in PRESETS:
            wanted = answer(args_of(preset), whole_batch)[:2]
            joined = torch.stack([one[preset][0] for one in found]).sum(0)
            masks = {digest([one[preset][1]]): one[preset][1] for one in found}
            row = _beside(f"CP {cp}", preset, (joined, next(iter(masks.values()))), wanted)
            yield replace(row, holds=row.holds and len(masks) == 1)


def _on_rank(kwargs: dict[str, Any], cp: int, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By preset the factors of this rank's tokens at their places in the whole batch, and the masks."""
    start_groups(None, cp)
    lengths = kwargs["response_lengths"]
    layout = zigzag(kwargs["total_lengths"], lengths, cp, rank)
    sides = {name: layout.cut(kwargs[name]) for name in ("train_log_probs", "rollout_log_probs")}
    place = torch.cat(layout.cut(torch.arange(sum(lengths)).split(lengths)))
    local = kwargs | sides | {"pg_loss": torch.ones(len(place))}
    found = {preset: answer(args_of(preset), local) for preset in PRESETS}
    return {name: (torch.zeros(sum(lengths)).index_copy(0, place, x[0]), x[1]) for name, x in found.items()}


def hauls(calls: int, steps: int) -> Iterator[Row]:
    kwargs = hostile([3, 1, 7, 12])
    step_hook = {"custom_megatron_before_train_step_hook_path": "mis_plugins.mis.report_step"}
    full, watched = args_of("mis"), args_of("mis", **step_hook)
    watched.mis["metrics"] = "all"

    def stepped(number: int) -> None:
        mis.report_step(watched, number // 4, number % 4)
        answer(watched, kwargs)

    yield _grown("calls of the hook", lambda _: answer(full, kwargs), calls)
    yield _grown("steps of the recorder", stepped, steps)
    mis.RECORDER = Recorder()


def _grown(of: str, call: Callable[[int], Any], times: int) -> Row:
    """What calls leave behind, once a tenth of them has warmed up what is kept."""
    mis.RECORDER = Recorder()
    for number in range(times // 10):
        call(number)
    memory, tensors = _held()
    for number in range(times):
        call(times // 10 + number)
    grown, more = (after - before for after, before in zip(_held(), (memory, tensors), strict=True))
    found = f"{grown / 1e6:+.1f} MB resident, {more:+d} tensors"
    return Row("long haul", f"{times:,} {of}", found, "4 MB, 0 tensors", grown <= LEFT_OVER and more <= 0)


def _held() -> tuple[int, int]:
    """Resident bytes and live tensors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def tokens(count: int) -> Iterator[Row]:
    """Sequences of up to 8,192 tokens that make `count` in one call."""
    lengths = [8192] * (count // 8192) + [count % 8192]
    kwargs, args = hostile(lengths), args_of("seq-mask-tis")  # without a mean over the batch
    loss, masks, metrics = mis.compute_mis_weights_with_cp(args, **kwargs)
    numbers = [float(metrics[name].sum()) for name in metrics]
    factors = loss.detach().split(lengths)
    for i in (2, len(lengths) - 1):
        alone = answer(args, permuted(kwargs, [i, i]) | {"pg_loss": torch.ones(2 * lengths[i])})
        own = alone[0][: lengths[i]], alone[1][: lengths[i]]
        equal = digest(own) == digest([factors[i], masks[i]])
        found = f"{'equal bits' if equal else 'other bits'}, {sum(map(abs, numbers)) < torch.inf} finite metrics"
        yield Row(f"{count:,} tokens", f"sequence {i:,}", found.replace("True ", "").replace("False", "NOT"),
                  "equal bits, finite metrics", equal and all(abs(x) < torch.inf for x in numbers))  # fmt: skip


def metrics(lengths: Sequence[int]) -> Iterator[Row]:
    """Each number of a step beside the oracle's; percentiles are held to 1 percent by `metrics/sketch.py`."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    import oracle
    import step_oracle

    kwargs = hostile(lengths)
    lists = [kwargs[name] for name in ("train_log_probs", "rollout_log_probs", "loss_masks")]
    rows = [[x.double().tolist() for x in side] for side in lists]
    samples = [oracle.Sample(p, b, [bool(x) for x in m]) for p, b, m in zip(*rows, strict=True)]
    ones = [[1.0] * length for length in lengths]
    wanted, _ = step_oracle.step_metrics(samples, ORACLE, oracle.correct(samples, ORACLE), ones)
    config, (proximal, behavior, mask) = from_mapping(ORACLE), (torch.cat(x) for x in lists)
    ragged = whole(lengths).place(mask, Ranks())
    found = finalize(partials(correct(proximal, behavior, ragged, config), kwargs["pg_loss"].detach()), config)
    for name in sorted(found.keys() & wanted.keys()):
        error = abs(found[name] - wanted[name])
        words = f"{found[name]:.9g}, off by {error:.1e}"
        yield Row(
            "metric in float64", name, words, f"{WORST} of it, or of 1", error <= WORST * max(1, abs(wanted[name]))
        )


def everything(smoke: bool) -> Iterator[Row]:
    lengths = [1, 5, 300, 17, 64, 2, 900, 128] * (1 if smoke else 16)
    yield from bits(lengths)
    yield from ranks(lengths)
    yield from metrics(lengths[:8])
    yield from tokens(50_000 if smoke else 10_000_000)
    yield from hauls(*((500, 100) if smoke else (50_000, 20_000)))


HEADINGS = ("check", "of", "found", "held to", "")


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(row.check, row.of, row.found, row.bound, "" if row.holds else "DIFFERS") for row in rows]


def main() -> int:
    """Exit with 1 where anything differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=target, help="write the rows here, and beside it a .md")
    parser.add_argument("--smoke", action="store_true", help="few sequences, calls and tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # what the hook has to say of such a batch
    rows = []
    for row in everything(options.smoke):
        if not rows or row.check != rows[-1].check:
            print(f"{row.check}: {row.of}: {row.found}", file=sys.stderr, flush=True)
        rows.append(row)
    print_table(HEADINGS, lines(rows))
    if options.json:
        found = provenance()
        legend = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
        head = f"# Sameness\n\n{as_markdown(found)}\n```\n{legend}```\n\n"
        content: Mapping[str, Any] = {"measured with": found, "rows": [asdict(row) for row in rows]}
        write_record(options.json, content, head + markdown_table(HEADINGS, lines(rows)))
    return int(not all(row.holds for row in rows))

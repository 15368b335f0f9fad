"""The trainer against itself: score a rollout a second time, in micro-batches that are cut otherwise.

A trainer whose kernels depend on the batch gives a token another log-prob in another micro-batch. No engine
causes this part of the mismatch, and no update of weights removes it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import original, view
from mis_plugins.errors import ConfigError, InputError, warn_once
from mis_plugins.hosts import megatron, tracking
from mis_plugins.hosts.batch import layout_of
from mis_plugins.hosts.host import Host, Rescore
from mis_plugins.hosts.needs import Needs
from mis_plugins.hosts.registry import current
from mis_plugins.metrics.alarms import COUNT
from mis_plugins.metrics.quantity import known, ratio_of
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ranks
from mis_plugins.packing.roll_call import heard, together

Groups = list[list[int]]  # the samples of each micro-batch of an optimizer step
KEY = "resplit_every"
FIELD = f"mis.{KEY}"
PREFIX = "resplit_"  # of the pass's keys, as hosts have `ref_` for a reference policy
RESPLIT = ("resplit_differs", "resplit_diff_abs_mean", "resplit_diff_abs_max")  # metrics of the valid tokens
HELD = ("self", "data_iterator", "num_microbatches", "rollout_id")
ONE_SPLIT = (
    "mis.resplit_every: micro-batches of one sample, and no two of them that can be joined, so that nothing is "
    "compared; give the trainer more samples or a larger micro-batch"
)
QUEUED = "what is replayed is queued for one pass, micro-batch by micro-batch"
GONE = dict.fromkeys(("use_routing_replay", "use_rollout_routing_replay", "use_indexer_replay"), QUEUED) | {
    "keep_old_actor": "the trainer has switched to other weights by then"
}


def check_hook(args: Any, config: CorrectionConfig) -> None:
    """Refuse `resplit_every` where no rollout-data hook is given, so that nothing would be compared."""
    if config.resplit_every is not None and getattr(args, "rollout_data_postprocess_path", None) is None:
        raise ConfigError(
            f"{{resplit_every}}: {config.resplit_every} needs {COUNT} (normalize_rollout does it too)"
        ).spelled(reading.spelling(args), "mis.")


def compare(args: Any, rollout_id: int, data: Mapping[str, Any]) -> None:
    """Compute the log-probs of each `resplit_every`-th rollout once more, and log what differs. Collective.

    Raises:
        ConfigError: arguments of the host under which a second pass would not be the same pass.
        InputError: a rollout without the trainer's log-probs.
    """
    asked = view(args).get("mis")
    if not isinstance(asked, Mapping) or KEY not in asked:
        return  # no config is read: `count_samples` serves runs without one
    every = reading.from_args(args).resplit_every
    if every is None or rollout_id % every:
        return
    host = current(args)
    rescore = together(FIELD, lambda: _rescore(args, data, host))
    ranks, cp = host.parallel()
    again = rescore(original(args), data, ranks)
    measured = together(FIELD, lambda: None if again is None else _differences(args, data, again, ranks, cp))
    if measured is None:
        return
    sums, largest = measured
    for group in (ranks.cp, ranks.dp):
        if group is not None:
            all_reduce(sums, group)
            all_reduce(largest, group, dist.ReduceOp.MAX)
    if host.reports(ranks):
        tokens, differing, apart = sums.tolist()
        values = ratio_of(differing, tokens), ratio_of(apart, tokens), float(largest) if tokens else math.nan
        metrics = known(dict(zip(RESPLIT, values, strict=True)))
        tracking.log(args, metrics, tracking.number_of(args, rollout_id, 0))


def _rescore(args: Any, data: Mapping[str, Any], host: Host) -> Rescore:
    """The host's second pass, unless weights or routes of the first are gone by now, or nothing is there to compare."""
    for name, why in GONE.items():
        if getattr(args, name, False):
            raise ConfigError(f"mis.resplit_every with --{name.replace('_', '-')}: {why}; drop one")
    if megatron.holds_log_probs() and not data.get("log_probs"):
        raise InputError(
            "mis.resplit_every: rollout_data has no log-probs of the trainer to compare with; let it recompute them "
            "(slime with one step a rollout: --get-mismatch-metrics beside --use-tis)"
        )
    if host.rescore is None:
        raise ConfigError(f"mis.resplit_every: no hook of {host.title} reaches its log-prob pass; leave it out")
    return host.rescore


def _differences(
    args: Any, data: Mapping[str, Any], again: Sequence[Tensor], ranks: Ranks, cp: tuple[int, int]
) -> tuple[Float64[Tensor, "3"], Float64[Tensor, ""]]:
    mask = layout_of(args, data, cp).place(torch.cat(list(data["loss_masks"])), ranks).loss_mask
    return differences(torch.cat(list(data["log_probs"])), torch.cat(list(again)), mask)


def differences(
    first: Float[Tensor, " T"], second: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]
) -> tuple[Float64[Tensor, "3"], Float64[Tensor, ""]]:
    """Counts of valid and of differing tokens, and the sum of |difference|; the largest |difference|.

    Two NaN are equal; a NaN differs from a number by infinity.
    """
    second = second.to(first.device)
    differs = loss_mask & (first != second) & ~(first.isnan() & second.isnan())
    apart = torch.where(differs, (first.double() - second.double()).abs(), 0)
    apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
    sums = torch.stack([loss_mask.sum().double(), differs.sum().double(), apart.sum()])
    return sums, apart.max() if apart.numel() else sums.new_zeros(())


def cut_otherwise(groups: Groups, halves: bool) -> Groups:
    """Regroup the samples of a step; the number of new groups depends on the number of `groups` alone.

    Ranks that hold other samples have equally many groups, and must run equally many forward passes. Halving
    turns a group of one sample into two such groups, so that the sample is scored twice.

    Args:
        halves: halve each group; otherwise join groups two by two.

    >>> cut_otherwise([[0, 1, 2], [3]], halves=True)
    [[0, 1], [2], [3], [3]]
    >>> cut_otherwise([[0], [1], [2]], halves=False)
    [[0, 1], [2]]
    """
    if halves:
        cut = [(group, (len(group) + 1) // 2) for group in groups]
        return [part for group, half in cut for part in (group[:half], group[half:] or group)]
    return [sum(groups[start : start + 2], []) for start in range(0, len(groups), 2)]


def rescored(needs: Needs, args: Any, data: Mapping[str, Any], ranks: Ranks) -> list[Tensor] | None:
    """Score a rollout again by the log-prob pass of the host's trainer, for `Host.rescore`.

    No hook is handed the trainer: it is read from `train_actor`, the hook's caller; another caller is an InputError.
    """
    held = needs.train_actor.frame()
    if not held.keys() >= set(HELD):
        raise InputError(
            f"mis.resplit_every: {' or '.join(needs.train_actor.at)} does not call this hook, or holds no "
            f"{', '.join(HELD)}: the trainer cannot be asked for a second log-prob pass; leave it out"
        )
    trainer, iterators, numbers, rollout_id = (held[name] for name in HELD)
    rest = iter(together(FIELD, lambda: _groups(iterators[0], sum(numbers))))
    steps = [list(islice(rest, number)) for number in numbers]
    halves = _anywhere(any(len(group) > 1 for step in steps for group in step))
    # A virtual pipeline needs a number of micro-batches that its stages divide: halving keeps it so, joining may not.
    if not halves and (len(iterators) > 1 or max(numbers) < 2):
        warn_once(ONE_SPLIT)
        return None
    cut = [cut_otherwise(step, halves) for step in steps]
    flat = [group for step in cut for group in step]
    others = [type(iterator)(iterator.rollout_data, micro_batch_indices=flat) for iterator in iterators]
    scores = needs.rescore(trainer, others, [len(step) for step in cut], PREFIX, rollout_id)
    if scores is None:
        return None
    samples = sum(flat, [])
    # With dynamic batches both hosts put what they computed back in the order of the samples.
    if args.use_dynamic_batch_size:
        samples = range(len(set(samples)))
    by_sample = dict(zip(samples, scores, strict=False))
    return [by_sample[sample] for sample in sorted(by_sample)]


def _groups(iterator: Any, number: int) -> Groups:
    """The samples of each micro-batch of a rollout, as one of the host's iterators gives them."""
    if iterator.micro_batch_indices is not None:
        return [list(group) for group in iterator.micro_batch_indices]
    size = iterator.micro_batch_size
    return [list(range(start, start + size)) for start in range(0, number * size, size)]


def _anywhere(here: bool) -> bool:
    """Whether something holds on any rank."""
    return here if not dist.is_initialized() else any(heard(FIELD, "yes" * here).values())

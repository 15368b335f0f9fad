"""Checks that ranks agree on their config, and on what they recorded.

Ranks with different config files would silently mix two corrections in one sequence or one gradient. Ranks
that recorded different things would wait for each other for ever.
"""

import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import plain
from mis_plugins.errors import ConfigError, InputError, shown
from mis_plugins.packing.collectives import Arrival, all_reduce, to_host
from mis_plugins.packing.ragged import Ranks, to_device

SHOWN_KEYS = 3  # how many differing keys an error names
FirstRanks = dict[str, dict[str, int]]  # by key, and by what a rank was given there: the first such rank


@functools.cache
def check_agreement(config: CorrectionConfig, ranks: Ranks) -> None:
    """Compare the config over the ranks that make one gradient: once a config, at first use.

    Context-parallel ranks hold other tokens of a sequence, data-parallel ranks other sequences. Tensor-parallel ranks
    hold the same tokens and each its own part of the gradient, which would mix two losses.

    No collective, so that a rank without this hook is named. The ranks of torchft's groups are not compared, as each of
    its cells is a job of its own: `can_add_up` sees them after one step.

    Raises:
        ConfigError: the configs differ; every rank of all groups raises, and names the keys.
        MisError: a rank did not use its config within the time-out.
    """
    groups = {"context-parallel": ranks.cp, "tensor-parallel": ranks.tp, "data-parallel": ranks.dp}
    axes = {
        f"{name} ranks": dist.get_process_group_ranks(group)
        for name, group in groups.items()
        if group is not None and not hasattr(group, "errored")
    }
    if axes:
        compare(config, axes)


def check_everywhere(hook: str, setting: Any) -> None:
    """Compare what a hook was given under `mis:` on all ranks, at first use; raises what `check_agreement` raises."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _compared_everywhere(hook, json.dumps(plain(setting), default=repr))


@functools.cache
def _compared_everywhere(hook: str, setting: str) -> None:
    compare(json.loads(setting), {f"as {hook} was given it": None})


def compare(config: Any, axes: Mapping[str, Collection[int] | None]) -> None:
    """Compare the config with that of all ranks that the axes of the grid reach, one axis after the other.

    Args:
        axes: numbers of the ranks along each axis; None is every rank of the job.

    Raises:
        ConfigError: the configs differ; every rank raises, and names the keys and a rank for each value.
        MisError: a rank was not heard of, which the error names.
    """
    from mis_plugins.packing.roll_call import heard  # loaded by jobs of several ranks

    settings: FirstRanks = {key: {value: dist.get_rank()} for key, value in flat(config, "mis").items()}
    for axis, ranks in axes.items():
        texts = heard(f"the mis config, {axis}", json.dumps(settings), ranks)
        settings = joined([json.loads(text) for text in texts.values()])
    differing = {key: given for key, given in settings.items() if len(given) > 1}
    if differing:
        raise ConfigError(f"ranks have different mis configs: {in_words(differing)}; give all ranks one config")


def flat(given: Any, key: str) -> dict[str, str]:
    """Every setting below a key, each by its own key; a block also by what it holds.

    >>> flat({"weight": {"upper": 2.0}}, "mis")
    {'mis': 'weight', 'mis.weight': 'upper', 'mis.weight.upper': '2.0'}
    """
    if is_dataclass(given):
        inner, own = {f"{key}.{field.name}": getattr(given, field.name) for field in fields(given)}, "given"
    elif isinstance(given, Mapping):
        inner, own = {f"{key}.{name}": value for name, value in given.items()}, ", ".join(sorted(map(str, given)))
    elif isinstance(given, list | tuple):
        inner, own = {f"{key}[{number}]": value for number, value in enumerate(given)}, f"{len(given)} entries"
    else:
        return {key: shown(given)}
    return {key: own} | {name: text for at, value in inner.items() for name, text in flat(value, at).items()}


def joined(parts: Sequence[FirstRanks]) -> FirstRanks:
    """The values of each key over several ranks, each value with the first rank that has it."""
    every: FirstRanks = {}
    for key, value, rank in ((key, *entry) for part in parts for key, given in part.items() for entry in given.items()):
        of_key = every.setdefault(key, {})
        of_key[value] = min(rank, of_key.get(value, rank))
    return every


def in_words(differing: FirstRanks) -> str:
    """The first differing keys, each with its values and a rank for each value."""
    parts = []
    for key in list(differing)[:SHOWN_KEYS]:
        by_rank = sorted((rank, value) for value, rank in differing[key].items())
        parts.append(f"{key} is {', '.join(f'{value} on rank {rank}' for rank, value in by_rank)}")
    return "; ".join(parts)


class Uncorrected(Exception):
    """No rank corrected a step whose arguments ask for a correction."""


def can_add_up(
    recorded: Sequence[CorrectionConfig],
    began: bool,
    same_ranks: bool,
    ranks: Ranks,
    corrected: bool | None = True,
    pipeline: dist.ProcessGroup | None = None,
) -> bool:
    """Whether the records of all ranks can be added up: one maximum of seven numbers over each group.

    False where a rank joined since the step began, or took another rank's place: it has recorded nothing, and
    the groups of the other ranks' records may be gone.

    Args:
        recorded: the configs under which this rank recorded anything.
        began: whether this rank was there when the step began.
        same_ranks: whether this rank recorded among `ranks`.
        ranks: the groups as they are now.
        corrected: whether a hook corrected on this rank; False where none did and the arguments ask for it; None
            on a rank that cannot tell, such as one of an earlier pipeline stage.
        pipeline: the group over which the last stage tells the earlier ones.

    Raises:
        Uncorrected: no rank corrected, and the arguments of one ask for it; every rank raises.
        InputError: all ranks were there and recorded under different configs; every rank raises.
        RANK_LOST: a rank of a group died.
    """
    groups = [group for group in (ranks.cp, ranks.dp) if group is not None]
    if not groups and pipeline is None:
        if corrected is False:
            raise Uncorrected
        return same_ranks
    digest = int.from_bytes(hashlib.sha256(repr(sorted(map(repr, recorded))).encode()).digest()[:7])
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    marks = [began, not began, not same_ranks, corrected is True, corrected is False]
    mine = to_device([digest, -digest, *marks], device)
    if pipeline is not None:
        dist.all_reduce(mine[-2:], dist.ReduceOp.MAX, group=pipeline)
    for group in groups:
        all_reduce(mine, group, dist.ReduceOp.MAX)
    maxima = to_host(mine)
    Arrival.of_copies_from(mine).wait()
    raise_if_aborted(groups)
    largest, negated_smallest, some_began, some_joined, some_moved, some_ran, some_missed = maxima.tolist()
    if (some_began and some_joined) or some_moved:
        return False
    if some_missed and not some_ran:
        raise Uncorrected
    if largest != -negated_smallest:
        raise InputError(
            f"ranks corrected under different mis configs, this rank under {list(recorded) or 'none'}; config "
            "files differ, or batches of some ranks lack what others have (proximal_version, rollout_log_probs)"
        )
    return True


def outlives(ranks: Ranks) -> bool:
    """Whether the job goes on where a rank dies: only with torchft's groups, which report their errors.

    With other groups a collective's error may be this rank's alone, while the other ranks wait.
    """
    return any(hasattr(group, "errored") for group in (ranks.cp, ranks.dp))


def raise_if_aborted(groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise the error of a torchft collective, which on a GPU aborts silently and leaves arbitrary numbers.

    Asking for the error waits for the device. Torch's own groups raise by themselves, or end the process.
    """
    for group in groups:
        error = getattr(group, "errored", lambda: None)()
        if error is not None:
            raise error

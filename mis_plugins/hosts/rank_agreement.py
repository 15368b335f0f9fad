"""Checks that ranks agree on their config, and on what they recorded.

Ranks with different config files would silently mix two corrections in one sequence or one gradient. Ranks
that recorded different things would wait for each other for ever.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import plain
from mis_plugins.errors import InputError
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ranks, to_device
from mis_plugins.packing.transfer import Arrival, to_host


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
        from mis_plugins.hosts.config_agreement import compare  # loaded by jobs of several ranks

        compare(config, axes)


def check_everywhere(hook: str, said: Any) -> None:
    """Compare what a hook of all ranks, those of earlier pipeline stages too, was given under `mis:`, at first use."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _compared_everywhere(hook, json.dumps(plain(said), default=repr))


@functools.cache
def _compared_everywhere(hook: str, said: str) -> None:
    from mis_plugins.hosts.config_agreement import compare

    compare(json.loads(said), {f"as {hook} was given it": None})


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
    digest = _digest(sorted(map(repr, recorded)))
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    told = [began, not began, not same_ranks, corrected is True, corrected is False]
    mine = to_device([digest, -digest, *told], device)
    if pipeline is not None:
        dist.all_reduce(mine[-2:], dist.ReduceOp.MAX, group=pipeline)
    for group in groups:
        all_reduce(mine, group, dist.ReduceOp.MAX)
    found = to_host(mine)
    Arrival.of_copies_from(mine).wait()
    raise_if_aborted(groups)
    largest, negated_smallest, some_began, some_joined, some_moved, some_ran, some_missed = found.tolist()
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


def _digest(said: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])

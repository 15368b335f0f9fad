"""Ranks that read different config files would mix two corrections of one sequence, or of one gradient, and nobody
would see it; ranks that recorded different things would wait for each other for ever.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ranks, to_device
from mis_plugins.packing.transfer import Arrival, to_host


@functools.cache
def check_agreement(
    config: CorrectionConfig,
    cp: dist.ProcessGroup | None,
    tp: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Compare the config with those of the ranks that hold the same sequences: once a config, at first use.

    Context-parallel ones hold other tokens. Tensor-parallel ones hold the same, and each its own part of their
    gradient, which would be that of one loss here and of another there.

    The only wait for the device, and the only collectives of a config that needs none. Not over data-parallel ranks:
    a fault-tolerant host replaces those one by one, and a new one would wait alone.

    Raises:
        ConfigError: on every rank of both groups alike.
    """
    groups = [group for group in (cp, tp) if group is not None]
    if not groups:
        return
    digest = _digest(config)
    extremes = torch.tensor([digest, -digest], device=device)
    for group in groups:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if extremes.tolist() != [digest, -digest]:
        raise ConfigError(
            f"context- or tensor-parallel ranks have different mis configs; the config of this rank is {config}"
        )


def can_add_up(recorded: Sequence[CorrectionConfig], began: bool, same_ranks: bool, ranks: Ranks) -> bool:
    """Whether what each rank recorded can be added up: a maximum of five numbers over each group, between two steps.

    Not where a rank joined meanwhile, or took another's place: it has recorded nothing yet, and the groups that the
    others recorded for may be gone.

    Args:
        recorded: the configs under which this rank recorded anything.
        began: whether it was there when the step began.
        same_ranks: whether it recorded among `ranks`.
        ranks: the groups as they are now.

    Raises:
        InputError: on every rank alike: they were all there, and recorded under different configs.
        RANK_LOST: a rank of a group died.
    """
    groups = [group for group in (ranks.cp, ranks.dp) if group is not None]
    if not groups:
        return same_ranks
    digest = _digest(sorted(map(repr, recorded)))
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    mine = to_device([digest, -digest, began, not began, not same_ranks], device)
    for group in groups:
        all_reduce(mine, group, dist.ReduceOp.MAX)
    found = to_host(mine)
    Arrival.of_copies_from(mine).wait()
    raise_if_aborted(groups)
    largest, negated_smallest, some_began, some_joined, some_moved = found.tolist()
    if (some_began and some_joined) or some_moved:
        return False
    if largest != -negated_smallest:
        raise InputError(
            f"ranks corrected under different mis configs, this rank under {list(recorded) or 'none'}; config "
            "files differ, or batches of some ranks lack what others have (proximal_version, rollout_log_probs)"
        )
    return True


def outlives(ranks: Ranks) -> bool:
    """Whether a host goes on where a rank dies: it does among groups of torchft, which tell the error that they met.

    Elsewhere an error of a collective may be this rank's alone, and the others wait for it.
    """
    return any(hasattr(group, "errored") for group in (ranks.cp, ranks.dp))


def raise_if_aborted(groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise what a collective of torchft's met: on a GPU it aborts without an exception, and leaves any numbers there.

    Asking waits for the device. Groups of torch's own raise by themselves, or end the process.

    Raises:
        RANK_LOST: what the group reports.
    """
    for group in groups:
        error = getattr(group, "errored", lambda: None)()
        if error is not None:
            raise error


def _digest(said: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])

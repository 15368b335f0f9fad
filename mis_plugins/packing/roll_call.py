"""Ranks tell each other how far they are before they meet in a collective, through the store of the job.

A collective in which one rank is missing ends with the time-out of its group, if at all, and names nobody. The store
is a table of keys that the ranks share, in which a rank can ask who has spoken. So the others raise as soon as one rank
has said that it failed, and ranks that say nothing within the time-out are named.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mis_plugins.errors import MisError, cut

R = TypeVar("R")

LONGEST_POLL_S = 0.05
LONGEST = 400  # characters of another rank's error
SPOKEN = Counter[str]()  # how often this rank has spoken, by subject


def heard(subject: str, said: str, ranks: Collection[int] | None = None) -> dict[int, str]:
    """Tell the other ranks something, and return what each of them said, by rank. Each calls it equally often.

    Args:
        subject: what is said, in words that open the sentence of an error.
        ranks: numbers in the default group; None is every rank of that group.

    Raises:
        MisError: ranks said nothing within the time-out of the default group, or the store is gone.
    """
    try:
        _say(subject, said)
        keys = {rank: _key(subject, rank) for rank in (range(dist.get_world_size()) if ranks is None else ranks)}
        absent = _absent(keys)
        if not absent:
            texts = _get_default_store().multi_get([*keys.values()])
            return {rank: text.decode() for rank, text in zip(keys, texts, strict=True)}
    except dist.DistError as error:
        raise MisError(f"{subject}: the job's store, which rank 0 or torchrun holds, is gone ({error})") from error
    raise MisError(
        f"{subject}: waited {_timeout_s():g} s, the time-out of the default process group, for {_named(absent)}, which "
        "is dead, slow, stopped by an error of its own, or runs without this hook: see its log"
    )


def together(subject: str, work: Callable[[], R]) -> R:
    """Do the work, and return what it returns once every rank of the default group has done its own.

    Raises:
        MisError: the work failed on another rank, whose error is quoted; or as `heard`.
        BaseException: what the work raises here; the other ranks are told.
    """
    if not dist.is_initialized():
        return work()
    try:
        done = work()
    except BaseException as error:
        _say(subject, f"{type(error).__name__}: {cut(str(error), LONGEST)}")
        raise
    failed = {rank: said for rank, said in heard(subject, "").items() if said}
    if failed:
        first = min(failed)
        others = [rank for rank in failed if rank != first]
        raise MisError(f"{subject}: rank {first}: {failed[first]}{'; so did ' + _named(others) if others else ''}")
    return done


def _say(subject: str, said: str) -> None:
    store, rank = _get_default_store(), dist.get_rank()
    SPOKEN[subject] += 1
    store.set(_key(subject, rank), said)
    store.delete_key(_key(subject, rank, before=2))  # read by all, who have spoken once since


def _key(subject: str, rank: int, before: int = 0) -> str:
    return f"mis_plugins/{subject}/{SPOKEN[subject] - before}/{rank}"


def _absent(keys: dict[int, str]) -> list[int]:
    """The ranks that have not spoken when the time-out is over; returns at once when all have."""
    store, poll_s, end = _get_default_store(), 0.001, time.monotonic() + _timeout_s()
    while not store.check([*keys.values()]):
        if time.monotonic() > end:
            return [rank for rank, key in keys.items() if not store.check([key])]
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, LONGEST_POLL_S)
    return []


def _timeout_s() -> float:
    return _get_default_store().timeout.total_seconds()


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

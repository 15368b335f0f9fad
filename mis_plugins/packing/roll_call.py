"""Ranks tell each other how far they are before they meet in a collective, through the store of the job.

A collective in which one rank is missing ends with the time-out of its group, if at all, and names nobody. The store
is a table of keys that the ranks share, in which a rank can ask who has spoken. So the others raise as soon as one rank
has said that it failed, and ranks that say nothing within the time-out are named.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mis_plugins.errors import MisError, cut

R = TypeVar("R")
FIRST_POLL_S, LONGEST_POLL_S, FEW = 0.001, 0.05, 16  # between two questions to the store, of so few ranks
GRACE_S = 2.0  # between the first and the last rank in which a collective of ours fails
LONGEST = 400  # characters of another rank's error
SPOKEN = Counter[str]()  # how often this rank has spoken, by subject


def heard(subject: str, message: str, ranks: Collection[int] | None = None) -> dict[int, str]:
    """Tell the other ranks something, and return what each rank said, by rank. Every rank calls it equally often.

    Args:
        subject: what is said, in words that open the sentence of an error.
        ranks: numbers in the default group; None is every rank of that group.

    Raises:
        MisError: ranks said nothing within the time-out of the default group, or the store is gone.
    """
    try:
        _say(subject, message)
        keys = _keys(subject, ranks)
        absent = _absent(keys, timeout().total_seconds())
        if not absent:
            store = _get_default_store()
            texts = store.multi_get([*keys.values()])
            store.delete_key(_key(subject, dist.get_rank(), before=1))  # all have spoken since, and so have read it
            return {rank: text.decode() for rank, text in zip(keys, texts, strict=True)}
    except dist.DistError as error:
        raise MisError(f"{subject}: the job's store, which rank 0 or torchrun holds, is gone ({error})") from error
    waited = f"waited {timeout().total_seconds():g} s, the time-out of the default process group"
    raise MisError(
        f"{subject}: {waited}, for {_named(absent)}: dead, slow, stopped by an error, without this hook, or waiting "
        "for another rank in turn; see its log"
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
        with suppress(dist.DistError):  # the store is gone; the error of the work says more
            _say(subject, f"{type(error).__name__}: {cut(str(error), LONGEST)}")
        raise
    failed = {rank: message for rank, message in heard(subject, "").items() if message}
    if failed:
        first = min(failed)
        others = [rank for rank in failed if rank != first]
        raise MisError(f"{subject}: rank {first}: {failed[first]}{'; so did ' + _named(others) if others else ''}")
    return done


def met(subject: str, collective: Callable[[], R]) -> R:
    """Enter a collective of all ranks, in a group of ours, right after they were `together`.

    Raises:
        MisError: it failed; the ranks that do not say so too are named, as those that did not come.
    """
    try:
        return collective()
    except RuntimeError as error:
        with suppress(dist.DistError):
            _say(subject, "")
            if absent := _absent(_keys(subject, None), GRACE_S):
                message = (
                    f"{subject}: {_named(absent)} did not come, dead or stopped by an error: see its log ({error})"
                )
                raise MisError(message) from error
        raise


def timeout() -> timedelta:
    """The time-out of the default group, as the host set it: Megatron's hosts by `--distributed-timeout-minutes`."""
    return _get_default_store().timeout  # type: ignore[attr-defined]


def _say(subject: str, text: str) -> None:
    SPOKEN[subject] += 1
    _get_default_store().set(_key(subject, dist.get_rank()), text)


def _keys(subject: str, ranks: Collection[int] | None) -> dict[int, str]:
    return {rank: _key(subject, rank) for rank in (range(dist.get_world_size()) if ranks is None else ranks)}


def _key(subject: str, rank: int, before: int = 0) -> str:
    return f"mis_plugins/{subject}/{SPOKEN[subject] - before}/{rank}"


def _absent(keys: dict[int, str], seconds: float) -> list[int]:
    """The ranks that have not spoken when the time is over; returns at once when all have."""
    share = max(1.0, len(keys) / FEW)  # one process answers every rank: the more ranks ask, the rarer each asks
    store, poll_s, end = _get_default_store(), share * FIRST_POLL_S, time.monotonic() + seconds
    while not store.check([*keys.values()]):
        if time.monotonic() > end:
            return [rank for rank, key in keys.items() if not store.check([key])]
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, share * LONGEST_POLL_S)
    return []


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

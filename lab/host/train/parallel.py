"""The ranks of the embedded host: who they are, how they start and how they stop.

Ranks are forked after Megatron has been imported: its import costs seconds, a fork does not.
All collectives run over gloo, so no GPU is needed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from mis_plugins.errors import UserError
from mis_plugins.shared.shell import INTERRUPTED, REFUSED, UNREAD, Unread, undisturbed
from true_on_policy.engines.server import on_loopback

EXIT_FAILURE = 1

STOPPED = "stopped"  # file with the exit code of a rank that was interrupted, or whose output nobody reads


@dataclass(frozen=True)
class GroupInfo:
    """One process group as the hosts hand it to a hook: this rank's place in it, and the group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None  # None: no other rank


@dataclass(frozen=True)
class ParallelState:
    """The groups of this rank, under the names Miles gives them.

    `effective_dp` holds other samples, `cp` other tokens of the same samples, `effective_dp_cp` both.
    """

    cp: GroupInfo
    tp: GroupInfo
    pp: GroupInfo
    effective_dp: GroupInfo
    effective_dp_cp: GroupInfo
    is_ulysses_cp: bool = False


def _info(group: Any) -> GroupInfo:
    return GroupInfo(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)


def initialize(tensor_parallel: int, context_parallel: int) -> ParallelState:
    """Build Megatron's groups over the default process group, which must exist. Collective.

    Interrupts wait: a rank that left between two groups would let the others wait for it in C++. The barrier fails on
    the others where a rank has left before.
    """
    with undisturbed():
        dist.barrier()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel
        )
    return ParallelState(
        cp=_info(mpu.get_context_parallel_group()),
        tp=_info(mpu.get_tensor_model_parallel_group()),
        pp=_info(mpu.get_pipeline_model_parallel_group()),
        effective_dp=_info(mpu.get_data_parallel_group(with_context_parallel=False)),
        effective_dp_cp=_info(mpu.get_data_parallel_group(with_context_parallel=True)),
    )


def of_rank_0(value: Any) -> Any:
    """Rank 0's value, on every rank. Collective."""
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def of_each_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, rank after rank, on every rank. Collective.

    Args:
        group: the ranks that share their values; None is all ranks.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class StopSignal:
    """Ctrl-C seen by any rank ends the run on all ranks, at the same rollout."""

    def __init__(self) -> None:
        self._seen = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._seen = True

    def agreed(self) -> bool:
        """True on every rank once one of them was interrupted. One collective."""
        seen = torch.tensor(int(self._seen))
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen)


def launch(world_size: int, main: Callable[[], None]) -> int:
    """Run `main` on every rank and return the exit code of the run.

    0: done. 1: a fault, its traceback printed. 2: an error the user can mend, its message printed once.
    130: interrupted. 141: nobody reads what a rank prints.
    """
    with tempfile.TemporaryDirectory(prefix="mis-local-") as scratch:
        return _fork_ranks(world_size, main, Path(scratch))


def _fork_ranks(world_size: int, main: Callable[[], None], scratch: Path) -> int:
    interrupts = Interrupts()
    previous = signal.signal(signal.SIGINT, interrupts)
    try:
        with _sigint_blocked(), nothing_collected():  # SIGINT is blocked in a rank until it has joined the others
            ranks = start_processes(
                _forked_rank, (world_size, main, scratch), nprocs=world_size, join=False, start_method="fork"
            )
        assert ranks is not None  # join=False gives a context
        interrupts.reach(ranks.processes)
        while not ranks.join():
            pass
    except ProcessExitedException as error:
        # A rank may fail only because another was interrupted and left their collective.
        return _stopped(scratch) or _print_report(scratch, error)
    finally:
        signal.signal(signal.SIGINT, previous)
    return _stopped(scratch) or 0


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Let no garbage of this process be collected in a process that is forked here.

    A process group in it would wait there for threads that a fork does not inherit, or crash.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stopped(scratch: Path) -> int | None:
    """The exit code of a rank that was made to stop."""
    told = scratch / STOPPED
    return int(told.read_text()) if told.exists() else None


class Interrupts:
    """The launcher's answer to Ctrl-C: the first asks the ranks to finish their rollout, the second ends them now."""

    def __init__(self) -> None:
        self._asked, self._ranks = 0, list[Any]()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._asked += 1
        self._send()

    def reach(self, ranks: Sequence[Any]) -> None:
        """Send to these ranks from now on, and what came before."""
        self._ranks = list(ranks)
        if self._asked:
            self._send()

    def _send(self) -> None:
        for rank in self._ranks:
            if rank.is_alive():
                os.kill(rank.pid, signal.SIGINT if self._asked == 1 else signal.SIGKILL)


def _forked_rank(rank: int, world_size: int, main: Callable[[], None], scratch: Path) -> None:
    signal.signal(signal.SIGINT, _interrupt_once)
    torch.set_num_threads(1)
    os.environ |= on_loopback()

    def joined() -> None:
        with undisturbed():  # a rank that leaves here would let the others wait for it in C++
            dist.init_process_group("gloo", f"file://{scratch}/store", rank=rank, world_size=world_size)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the launcher
        main()

    code = _run_rank(joined, scratch, rank)
    if code in (INTERRUPTED, UNREAD):
        (scratch / STOPPED).write_text(str(code))
    if code not in (0, INTERRUPTED):
        # No orderly exit: the other ranks may wait in a collective, and only this exit code tells the launcher.
        sys.exit(code)


def _interrupt_once(signum: int, frame: FrameType | None) -> None:
    """Interrupt a rank at the first Ctrl-C and ignore the second: terminal and launcher both send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run_rank(main: Callable[[], None], scratch: Path, rank: int) -> int:
    try:
        main()
        return 0
    except UserError as error:
        (scratch / f"error-{rank}").write_text(f"error: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Unread as error:
        if error.code == REFUSED:
            (scratch / f"error-{rank}").write_text(f"error: {error}\n")
        return error.code
    except Exception:
        (scratch / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        return EXIT_FAILURE


def _print_report(scratch: Path, error: ProcessExitedException) -> int:
    """Print the first fault that a rank reported, the others being its echoes, and return its exit code."""
    reports = sorted(scratch.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
    text = reports[0].read_text() if reports else f"{error}\n"
    print(text, end="", file=sys.stderr)
    return REFUSED if text.startswith("error: ") else EXIT_FAILURE

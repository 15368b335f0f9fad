"""Ranks of which one raises, dies or lags where it meets the others: what each rank answers, and after how long."""

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from lab.host.train.parallel import nothing_collected
from mis_plugins.packing import roll_call

MEETINGS = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list")
KINDS = ("raises", "raises after", "dies", "lags")
TIMEOUT_S, LAG_S = 3.0, 0.5  # a hook of these tests takes 5 ms
LONGEST_S = 3 * TIMEOUT_S + 3  # of a rank that waits for one that waits for one: a time-out an axis, and a busy machine
LIMIT_S = 60.0  # of a test: ranks that have not ended by then hang


class Planted(Exception):
    """The fault of the odd rank."""


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` at its meeting number `at`, of 0 and up; no fault where it has fewer meetings.

    kind: `raises`, and stays alive as an actor of Ray does; `raises after` the meeting; `dies`; or `lags`.
    """

    kind: str = "none"
    rank: int = 1
    at: int = 0


@dataclass(frozen=True)
class Said:
    """What came of a rank.

    answer: what its work returned; None where it raised `error`.
    met: the meetings that it entered.
    """

    answer: Any
    error: str
    seconds: float
    met: tuple[str, ...]


@dataclass(frozen=True)
class Started:
    """The processes of one case, which has one folder."""

    fault: Fault
    folder: Path
    processes: Sequence[Any]

    def ended(self) -> list[Said | None]:
        """What each rank said, in rank order; None of a rank that died.

        Raises:
            TimeoutError: a rank hangs.
        """
        end = time.monotonic() + LIMIT_S
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
        if hung:
            raise TimeoutError(f"{self.fault}: ranks {hung} wait without end")
        paths = [self.folder / f"{rank}.pt" for rank in range(len(self.processes))]
        said = [torch.load(path, weights_only=False) if path.exists() else None for path in paths]
        shutil.rmtree(self.folder)
        return said


def started(world: int, work: Callable[[int], Any], fault: Fault, **sizes: Any) -> Started:
    """Start ranks of a Megatron grid whose groups have a time-out of `TIMEOUT_S`."""
    folder = Path(tempfile.mkdtemp(prefix="mis-faults-"))
    processes = [
        get_context("fork").Process(target=_rank, args=(rank, world, work, fault, folder, sizes))
        for rank in range(world)
    ]
    with nothing_collected():
        for process in processes:
            process.start()
    return Started(fault, folder, processes)


def _rank(rank: int, world: int, work: Callable[[int], Any], fault: Fault, folder: Path, sizes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    mpu.initialize_model_parallel(distributed_timeout_minutes=TIMEOUT_S / 60, **sizes)  # type: ignore[arg-type]
    dist.barrier()
    began, answer, error = time.monotonic(), None, ""
    with meetings(fault if rank == fault.rank else Fault(), folder) as met:
        try:
            answer = work(rank)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    with (folder / f"{rank}.part").open("wb") as part:
        torch.save(Said(answer, error, time.monotonic() - began, tuple(met)), part)
    os.rename(folder / f"{rank}.part", folder / f"{rank}.pt")
    while len([*folder.glob("*.pt"), *folder.glob("*.dead")]) < world:  # an end closes connections
        time.sleep(0.05)
    os._exit(0)  # no orderly end: the groups may be broken


@contextmanager
def meetings(fault: Fault, folder: Path) -> Iterator[list[str]]:
    """Plant a fault at one of the meetings of this rank, whose names are listed as they are entered."""
    entered: list[str] = []
    originals = [(dist, name, getattr(dist, name)) for name in MEETINGS] + [(roll_call, "_say", roll_call._say)]

    def met(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def meeting(*given: Any, **named: Any) -> Any:
            here = len(entered) == fault.at
            entered.append(name)
            if here and fault.kind == "dies":
                (folder / f"{fault.rank}.dead").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if here and fault.kind == "lags":
                time.sleep(LAG_S)
            if here and fault.kind == "raises":
                raise Planted
            done = function(*given, **named)
            if here and fault.kind == "raises after":
                raise Planted
            return done

        return meeting

    for owner, name, function in originals:
        setattr(owner, name, met(name, function))
    try:
        yield entered
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def judge(fault: Fault, said: Sequence[Said | None], healthy: Sequence[Any], same: Callable[[Any, Any], bool]) -> str:
    """What a fault did to the others: `answered` all alike, or `raised`.

    Raises:
        AssertionError: a rank answered otherwise than without the fault, outlived the time-out, or does not say whom it
            waited for in anything but a group of the host.
    """
    odd, ends = said[fault.rank], "answered"
    met = odd is None or fault.at < len(odd.met)
    assert (odd is None) == (met and fault.kind == "dies"), fault
    assert odd is None or ("Planted" in odd.error) == (met and fault.kind.startswith("raises")), (fault, odd.error)
    for rank, one in enumerate(said):
        if rank == fault.rank:
            continue
        assert one is not None, f"{fault}: rank {rank} died"
        assert one.seconds < LONGEST_S, f"{fault}: rank {rank} ended after {one.seconds:.1f} s"
        if not one.error:
            assert same(one.answer, healthy[rank]), f"{fault}: rank {rank} has another answer"
            continue
        ends = "raised"
        assert met and fault.kind != "lags", f"{fault}: rank {rank}: {one.error}"
        named = re.search(r"(?:for|:) ranks? (\d+)", one.error)
        of_host = one.error.startswith("RuntimeError") and one.met[-1] not in ("_say", "all_gather_object")
        assert named or of_host, f"{fault}: rank {rank} names nobody: {one.error}"
        if named:
            waits = said[int(named[1])]
            assert waits is None or waits.error, f"{fault}: rank {rank} names a rank that ended well: {one.error}"
    return ends

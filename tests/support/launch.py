"""Forks gloo ranks with real Megatron groups: importing megatron.core takes seconds, forking after it does not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.multiprocessing.spawn import ProcessContext, start_processes

from lab.host.train.parallel import nothing_collected
from mis_plugins.errors import MisError

Work = Callable[[int], object]


def run_ranks(
    world: int, cp: int, work: Work, folder: Path, limit_s: float = 60.0, megatron: bool = True, **sizes: int
) -> list:
    """`work(rank)` on every rank of a Megatron grid with context parallelism `cp`; their results, in rank order.

    Args:
        folder: of the results, made where there is none.
        sizes: of other groups, by the names of `initialize_model_parallel`.
    """
    folder.mkdir(exist_ok=True)
    given = (world, cp, work, folder, megatron, sizes)
    with nothing_collected():
        context = start_processes(_rank, args=given, nprocs=world, start_method="fork", join=False)
    assert isinstance(context, ProcessContext)
    deadline = time.monotonic() + limit_s
    try:
        while not context.join(timeout=0.5):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{world} ranks did not end within {limit_s:g} s")
    finally:
        for process in context.processes:
            if process is not None:
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, cp: int, work: Work, folder: Path, megatron: bool, sizes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if megatron:
        mpu.initialize_model_parallel(context_parallel_size=cp, **sizes)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def told(work: Callable[[], object]) -> str:
    """What a MisError of the work says, for a rank to hand back; `no error` where none is raised."""
    try:
        work()
    except MisError as error:
        return str(error)
    return "no error"


def alive(process: int) -> bool:
    """Whether a process exists and is no zombie, which nobody has waited for."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"

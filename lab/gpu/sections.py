"""Run each section in its own process, so that a section which crashes or hangs ends no other."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection

from lab.gpu.machine import Cuda
from lab.gpu.plan import FULL, TINY, Plan
from lab.gpu.receipt import Result, Section
from true_on_policy.errors import NotSeenError

# The most seconds of each section, in the order of running: sections that compile kernels at run time come last.
SECTIONS = {
    "ceilings": 40,
    "correction": 90,
    "hostile": 60,
    "attention": 60,
    "model": 90,
    "kernels": 180,
    "cost": 180,
    "probes": 70,
    "engine": 450,
}
# The section `engine` is left out: SGLang comes in a second set of wheels.
USUAL = tuple(name for name in SECTIONS if name != "engine")

Work = Callable[[Plan, Cuda], Iterator[Result]]
FORK = multiprocessing.get_context("fork")


def run(name: str, seconds: float, dry_run: bool) -> Section:
    """Run one section, and end it after `seconds` at the latest; earlier results are kept."""
    start = time.monotonic()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = FORK.Process(target=_child, args=(name, dry_run, sender))
    process.start()
    sender.close()
    results, ended = _received(receiver, start + seconds)
    process.kill()
    process.join()
    return Section(name, ended or f"cut off after {seconds:.0f} s", time.monotonic() - start, results)


@contextmanager
def warming(dry_run: bool) -> Iterator[None]:
    """Compile kernels in a process beside the body; an error there recurs where the kernel is measured."""
    process = FORK.Process(target=_warm, args=(dry_run,))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def preload() -> None:
    """Import what sections import, for the forks of a dry run; beside a GPU this process must not touch CUDA."""
    importlib.import_module("lab.gpu.dry_run").interpret()
    for name in SECTIONS:
        load(name)


def _warm(dry_run: bool) -> None:
    try:
        with _machine(dry_run) as machine:
            importlib.import_module("lab.gpu.kernels").warm(_plan(dry_run), machine)
        print("warm", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()


def _plan(dry_run: bool) -> Plan:
    return TINY if dry_run else FULL


def _received(receiver: Connection, deadline: float) -> tuple[tuple[Result, ...], str]:
    """Receive the results and how the section ended; the ending is empty where it did not come in time."""
    results: list[Result] = []
    while receiver.poll(max(0, deadline - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            return tuple(results), "crashed"
        if isinstance(message, str):
            return tuple(results), message
        results.append(message)
    return tuple(results), ""


def _child(name: str, dry_run: bool, sender: Connection) -> None:
    try:
        with _machine(dry_run) as machine:
            for result in load(name)(_plan(dry_run), machine):
                sender.send(result)
        sender.send("done")
    except NotSeenError as error:
        sender.send(str(error))
    except Exception as error:
        traceback.print_exc()
        sender.send(f"failed: {type(error).__name__}: {error}")


def load(name: str) -> Work:
    return getattr(importlib.import_module(f"lab.gpu.{'cost' if name == 'ceilings' else name}"), name)


def _machine(dry_run: bool) -> AbstractContextManager[Cuda]:
    if dry_run:
        return importlib.import_module("lab.gpu.dry_run").swapped()
    return nullcontext(Cuda())

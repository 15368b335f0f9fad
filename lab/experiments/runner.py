"""Run an experiment: arms in processes of their own, resumed arm by arm, and their results written.

    parser = argparse.ArgumentParser(prog="bash scripts/NAME.sh", description=__doc__)
    options = parsed(parser, "NAME")                  # --runs --results --processes --smoke --version, --seeds
    arms = [training(partial(command_line, method, seed)) for seed in options.seeds for method in METHODS]
    if code := run_arms(arms, options.processes, this_code()):   # what this code finished is not repeated
        return code
    content = {"measured_with": made_with("bash scripts/NAME.sh"), **numbers(arms)}
    write_record(options.results / "NAME.json", content, markdown(content))

An arm is finished when its folder holds a stamp of its settings and of the code. Ctrl-C lets the running arms end their
rollout, starts no more, and leaves complete files; a second Ctrl-C kills them. A failed arm lets the others finish.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from signal import SIG_BLOCK, SIG_UNBLOCK, SIGINT, SIGKILL, default_int_handler, pthread_sigmask, signal
from typing import Any

from lab.host.cli.arguments import parse_args
from lab.host.folders import set_aside
from lab.provenance import as_given, committed_tree, measured_with, write_json
from mis_plugins.shared.numerals import count, whole
from mis_plugins.shared.shell import INTERRUPTED, add_version, importing

STAMP, LOG = "made_of.json", "run.log"
SEEDS, RESULTS = (0, 1, 2), Path("lab/results")
MEASURED_CODE = ("mis_plugins", "lab", "scripts", ":!lab/results")


@dataclass(frozen=True)
class Arm:
    """One run of an experiment.

    folder: holds all that the run writes, its output in `run.log`; an earlier run there is set aside.
    settings: what the outcome depends on besides the code, in values that JSON can hold.
    work: does the run and returns its exit code; `work` is called in a forked process.
    """

    folder: Path
    settings: Mapping[str, Any]
    work: Callable[[], int]

    def made(self, code: str | None) -> bool:
        """Whether the folder holds a complete run of these settings and this code; never for `code` None."""
        path = self.folder / STAMP
        return code is not None and path.is_file() and json.loads(path.read_text()) == self._stamp(code)

    def stamp(self, code: str | None) -> None:
        """Write into a complete folder which settings and code made it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STAMP, self._stamp(code))

    def unstamp(self) -> None:
        """Remove the stamp of an arm before it runs again, so that an interrupt leaves no old stamp."""
        (self.folder / STAMP).unlink(missing_ok=True)

    def _stamp(self, code: str | None) -> dict[str, Any]:
        return json.loads(json.dumps({"settings": self.settings, "code": code}))


def training(words: Callable[[], Sequence[str]]) -> Arm:
    """An arm that is a run of `python -m lab.host`.

    Args:
        words: returns the command line, with `--output`, and writes the files that the line names. `words`
            may be called again.
    """
    args = parse_args(list(words()))
    return Arm(Path(args.output), dict(vars(args)), lambda: train(parse_args(list(words()))))


def train(args: Namespace) -> int:
    """Train as the arguments say, in ranks of this process's own."""
    from lab.host.loop import run_rank

    return in_ranks(args.world_size, partial(run_rank, args))


def in_ranks(count: int, main: Callable[[], None]) -> int:
    """Call `main` on `count` ranks, and return the exit code of the run."""
    from lab.host.train.parallel import launch

    return launch(count, main)


def this_code() -> str | None:
    """Return a name of the committed code that runs depend on; None where changes are uncommitted."""
    return committed_tree("mis_plugins")


def run_arms(arms: Sequence[Arm], processes: int, code: str | None) -> int:
    """Run the arms that are not made yet, in their order, `processes` at a time.

    Args:
        code: a name of the code, as `this_code` gives it; None repeats every arm.

    Returns:
        0, or the exit code of the arm that failed or was interrupted first.
    """
    with importing():  # Megatron takes seconds: here, once for all forks
        import lab.host.loop  # noqa: F401

    missing = deque(arm for arm in arms if not arm.made(code))
    for arm in missing:
        arm.unstamp()
    queue = Queue(missing, code)
    with interrupts_counted() as interrupts:
        while queue.goes_on:
            queue.fill(processes)
            queue.reap()
            queue.obey(len(interrupts))
    return queue.failed


@contextmanager
def interrupts_counted() -> Iterator[list[int]]:
    """Collect each Ctrl-C in a list, for a loop that looks at it: an exception could hit between any two lines."""
    interrupts: list[int] = []
    before = signal(SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal(SIGINT, before)


@dataclass
class Running:
    """An arm, and the process that runs it and leads a group of its own."""

    arm: Arm
    process: ForkProcess
    group: int
    begun: float


class Queue:
    """Arms that wait and arms that run."""

    def __init__(self, waiting: deque[Arm], code: str | None) -> None:
        self.failed = 0
        self._obeyed = 0
        self._waiting, self._running = waiting, list[Running]()
        self._code, self._total, self._begun = code, len(waiting), time.monotonic()

    @property
    def goes_on(self) -> bool:
        return bool(self._running or (self._waiting and not self.failed))

    def fill(self, processes: int) -> None:
        """Start arms until `processes` run; start none once an arm has failed."""
        while self._waiting and len(self._running) < processes and not self.failed:
            arm = self._waiting.popleft()
            set_aside(arm.folder)
            arm.folder.mkdir(parents=True, exist_ok=True)
            with blocked(SIGINT):  # until the fork has a handler of its own
                process = get_context("fork").Process(target=_forked, args=(arm,))
                process.start()
            assert process.pid  # it has started
            with suppress(OSError):  # the process is in its own group already, or has ended
                os.setpgid(process.pid, process.pid)
            self._running.append(Running(arm, process, process.pid, time.monotonic()))

    def reap(self) -> None:
        """Stamp the arms that succeeded, and report each arm that ended."""
        for one in list(self._running):
            one.process.join(timeout=0.1)
            if (code := one.process.exitcode) is None:
                continue
            self._running.remove(one)
            if code == 0:
                one.arm.stamp(self._code)
            self.failed = self.failed or code
            self._tell(one, code)

    def obey(self, interrupts: int) -> None:
        """Ask the running arms to end at the first Ctrl-C, and kill them at the next."""
        if interrupts == self._obeyed:
            return
        for one in self._running:
            with suppress(OSError):  # the process has ended
                os.killpg(one.group, SIGINT if interrupts == 1 else SIGKILL)
        self._obeyed = interrupts
        self.failed = self.failed or INTERRUPTED

    def _tell(self, one: Running, code: int) -> None:
        done = self._total - len(self._waiting) - len(self._running)
        left = (time.monotonic() - self._begun) / done * (self._total - done) / 60
        fate = {0: "done", INTERRUPTED: "interrupted"}.get(code, f"failed with exit code {code}, see {LOG} there")
        seconds = time.monotonic() - one.begun
        said = f"{done} of {self._total}: {one.arm.folder} {fate} after {seconds:.0f} s; some {left:.0f} min left"
        print(said, file=sys.stderr, flush=True)


@contextmanager
def blocked(number: int) -> Iterator[None]:
    """Hold a signal back, here and in what is forked here."""
    pthread_sigmask(SIG_BLOCK, {number})
    try:
        yield
    finally:
        pthread_sigmask(SIG_UNBLOCK, {number})


def _forked(arm: Arm) -> None:
    """Run an arm in a process group of its own, which Ctrl-C reaches through `Queue.obey` alone."""
    os.setpgrp()
    with (arm.folder / LOG).open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    signal(SIGINT, default_int_handler)
    try:
        pthread_sigmask(SIG_UNBLOCK, {SIGINT})
        code = arm.work()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def parsed(parser: ArgumentParser, name: str) -> Namespace:
    """Parse the options of the experiment `name`: its own, and the options that all experiments have."""
    folders, smoke = {"runs": Path("runs") / name, "results": RESULTS}, Path("runs") / f"{name}-smoke"
    for flag, usual in folders.items():
        told = f"(default: {usual}; with --smoke {smoke})"
        parser.add_argument(f"--{flag}", type=Path, metavar="FOLDER", help=told)
    parser.add_argument("--processes", type=count, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=whole, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--smoke", action="store_true", help="tiny runs that only show that everything works")
    add_version(parser)
    options = parser.parse_args()
    for flag, usual in folders.items():
        if getattr(options, flag) is None:
            setattr(options, flag, smoke if options.smoke else usual)
    return options


def made_with(program: str) -> dict[str, str]:
    """Describe what the results are measured with, as of now."""
    return measured_with(as_given(program, sys.argv[1:]), MEASURED_CODE)

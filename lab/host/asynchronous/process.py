"""The worker as the trainer sees it: a process that is spoken to, heard by a thread, and may be gone at any moment."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from lab.host.asynchronous.messages import Beat, Command, Event, Stop
from lab.host.asynchronous.watchdog import Watchdog
from lab.host.asynchronous.worker import WorkerSettings, run

logger = logging.getLogger("mis_plugins")

STOP_SECONDS = 10.0
"""How long a worker may take to end when asked to, before it is killed."""

STEP_LIMITS = 10
"""Limit of one step, in limits of a stand-still: a step that computes is alive, and might never end."""


class WorkerProcess:
    """One worker process.

    A thread of the trainer receives all the time: a trainer that steps never keeps the worker waiting, and
    the two cannot wait for each other with both pipes full. Two watchdog threads kill a worker that is stuck,
    so that whoever waits for the worker finds it gone.

    Args:
        limit_s: seconds that the worker may stand still; one step may take `STEP_LIMITS` times as long.
        heard: called with every event, on the receiving thread.
        ended: called on the receiving thread once the worker is gone and all its events were heard.

    Attributes:
        fault: the error that `heard` raised; the worker is then killed, and no event is heard any more.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        heard: Callable[[Event], None],
        ended: Callable[[], None],
        limit_s: float,
    ) -> None:
        # Spawned: a fork would take along the trainer's threads, its process groups and its ends of the pipes.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run, args=(theirs, settings), name="rollout-worker", daemon=True
        )
        _start_deaf_to_interrupts(self._process)
        theirs.close()  # or its end would never be noticed
        self._gone, self._events, self._turns, self._limit_s = threading.Event(), 0, 0, limit_s
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._listen, args=(heard, ended), daemon=True)
        self._thread.start()
        self._watchdogs = (
            Watchdog(limit_s, lambda: self._events, self._gone, self._silent),
            Watchdog(STEP_LIMITS * limit_s, lambda: self._turns, self._gone, self._spins),
        )
        for watchdog in self._watchdogs:
            watchdog.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the worker has ended, with all of its events heard."""
        return self._gone.is_set()

    @property
    def exit_code(self) -> int | None:
        self._process.join(STOP_SECONDS)
        return self._process.exitcode

    def send(self, command: Command) -> None:
        """Send a command; where the worker is gone, wait until all of its events are heard."""
        try:
            self._connection.send(command)
        except ConnectionError:
            self._gone.wait()

    def stop(self) -> None:
        """End the worker process, its threads and its pipe."""
        # On a thread of its own: a worker that reads no more leaves the pipe full, and asking would wait for ever.
        asking = threading.Thread(target=self.send, args=(Stop(),), daemon=True)
        asking.start()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._thread.join()
        for watchdog in self._watchdogs:
            watchdog.join()
        asking.join()
        self._process.join()
        self._connection.close()

    def _listen(self, heard: Callable[[Event], None], ended: Callable[[], None]) -> None:
        try:
            while (event := self._next()) is not None:
                self._events += 1
                if isinstance(event, Beat):
                    self._turns = event.turns
                heard(event)
        except Exception as error:  # of `heard`: the trainer's thread shall raise it, not this one
            self.fault = error
            self._process.kill()  # nobody hears it any more
        finally:
            self._gone.set()
            ended()

    def _silent(self) -> None:
        self._stuck(
            f"alive, but it used no processor time for {self._limit_s:g} s (--rollout-health-check-timeout)"
        )

    def _spins(self) -> None:
        self._stuck(
            f"computing, but it has not ended a step, or begun another, for {STEP_LIMITS * self._limit_s:g} s "
            f"({STEP_LIMITS} times --rollout-health-check-timeout)"
        )

    def _stuck(self, how: str) -> None:
        """Kill a worker that is stuck, on the thread that watches."""
        logger.warning("rollout worker, process %d: %s; killed, to be replaced", self.pid, how)
        self._process.kill()

    def _next(self) -> Event | None:
        """The next event; None once the worker is gone, even if it died in the midst of an event."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None


def _start_deaf_to_interrupts(process: BaseProcess) -> None:
    """Start a process with SIGINT masked: Ctrl-C reaches every process, and the trainer ends the worker."""
    # On 3.11 the start of the resource tracker unblocks SIGINT at its end: so it comes before the mask.
    resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

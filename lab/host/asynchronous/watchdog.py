"""Whether a worker that is alive still moves: the worker sends beats, the trainer judges them.

A thread of the worker sends a beat whenever the generating thread has used processor time since the last
beat. Computing, however slowly, uses some, and so does waking up to look for work. A process that is stopped,
or waits for a lock that nobody opens, uses none. An endless loop uses some: so each beat also tells how many
turns the generating thread has taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
"""Seconds between two beats of a worker that moves."""

LEAST_LIMIT_SECONDS = 10 * BEAT_SECONDS
"""Least limit that a user may set: a smaller one would take a busy machine for a stuck worker."""

START_SECONDS = 300.0
"""Least limit before the first beat: a process that imports libraries from a slow disk cannot send one."""


class Heartbeat(threading.Thread):
    """Calls `tell` while the thread that made this heartbeat uses processor time.

    Args:
        tell: sends a beat; an OSError ends the heartbeat.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._tell = tell
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def run(self) -> None:
        used = -1.0
        while True:
            before, used = used, time.clock_gettime(self._clock)
            if used > before:
                try:
                    self._tell()
                except OSError:  # nobody listens any more
                    return
            time.sleep(BEAT_SECONDS)


class Watchdog(threading.Thread):
    """Calls `stuck`, once, when a count stood still for `limit_s` seconds, or longer while the count is 0.

    Only seconds in which this thread itself ran are counted: a trainer that was stopped for an hour has not
    heard the events that wait for it, which is not the worker's silence.

    Args:
        heard: gives the number of events, or of turns, so far.
        over: set when there is nothing to watch any more.
    """

    def __init__(
        self, limit_s: float, heard: Callable[[], int], over: threading.Event, stuck: Callable[[], None]
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._limit_s, self._heard, self._over, self._stuck = limit_s, heard, over, stuck

    def run(self) -> None:
        known, silent = self._heard(), 0.0
        while not self._over.wait(BEAT_SECONDS):
            silent = silent + BEAT_SECONDS if self._heard() == known else 0.0
            known = self._heard()
            if silent >= (self._limit_s if known else max(self._limit_s, START_SECONDS)):
                self._stuck()
                return

"""Whether a worker that is alive still moves: told by itself, judged by the trainer.

A thread of the worker tells whenever the thread that generates has used processor time since the last word: computing,
however slowly, and waking up to see whether there is something to do both use some. Stopped, or waiting for a lock that
nobody opens, it uses none. One that computes in a loop without an end does: so each word also says how many turns that
thread has taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_SECONDS = 0.5
"""Between two words of a worker that moves."""

LEAST_LIMIT_SECONDS = 10 * BEAT_SECONDS
"""Less would take a busy machine for a stuck worker."""

START_SECONDS = 300.0
"""To the first word, at least: a process that imports its libraries from a slow disk cannot speak yet."""


class Heartbeat(threading.Thread):
    """Calls `tell` while the thread that made this one moves.

    Args:
        tell: what it raises ends it.
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
    """Calls `stuck`, once, when a count stood still for `limit_s` seconds; for `START_SECONDS` before it first moves.

    Only seconds in which this thread itself ran are counted: a trainer that was stopped for an hour has not heard what
    waits for it, and that is not the worker's silence.

    Args:
        heard: how many words, or turns, were heard of so far.
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

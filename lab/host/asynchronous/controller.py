"""The trainer's side of asynchronous generation, which knows no trainer, task or rank.

Rollouts begin as soon as they may, the weights move while responses are generated, and a worker that dies is
replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lab.host.asynchronous.ledger import Ledger, Wanted
from lab.host.asynchronous.messages import (
    Beat,
    Begin,
    Event,
    Failed,
    Pause,
    Paused,
    Publish,
    Resume,
    Tokens,
)
from lab.host.asynchronous.process import WorkerProcess
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.staleness_bound import HeadOffpolicyness
from lab.host.asynchronous.update_hooks import Hooks
from lab.host.asynchronous.worker import WorkerSettings
from mis_plugins.errors import InputError

logger = logging.getLogger("mis_plugins")

FRUITLESS_STARTS = 3
"""How many workers in a row may die before their first token: the next one would die as well."""


class WorkerError(RuntimeError):
    """The rollout worker failed, or dies whenever it is started."""


@dataclass
class Tally:
    """What happened since the last tally was taken.

    waited, paused: seconds that the trainer stood still, for a rollout and over an update.
    restarts: how many workers were replaced.
    """

    waited: float = 0.0
    paused: float = 0.0
    restarts: int = 0


class Controller:
    """One worker, and the rollouts that it writes for a trainer that trains on them in order.

    Args:
        wanted: gives the responses that a rollout asks for.
        rollouts: numbers of the rollouts to train on; the first is trained on at the version of `weights`.
        stuck_s: seconds that the worker may stand still before it is replaced.
        shares: number of batches that a rollout is decoded in.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        bound: HeadOffpolicyness,
        wanted: Callable[[int], Sequence[Wanted]],
        rollouts: range,
        weights: Mapping[str, Tensor],
        stuck_s: float,
        shares: int = 1,
    ) -> None:
        self.settings, self.bound, self.wanted, self.rollouts = settings, bound, wanted, rollouts
        self.stuck_s = stuck_s
        self.hooks, self.ledger, self.tally = Hooks(), Ledger(shares), Tally()
        self._published = _publish(weights, rollouts.start)
        self._begun = rollouts.start
        self._failed: Failed | None = None
        self._paused = False
        self._fruitless = 0
        self.worker = self._start()
        self._admit()

    @property
    def version(self) -> int:
        """Version of the weights that the worker has."""
        return self._published.version

    def rollout(self, number: int) -> list[Response]:
        """Wait for a rollout, and take it.

        Raises:
            InputError, WorkerError: the worker failed, or cannot be kept alive.
        """
        began = time.perf_counter()
        self._wait(lambda: self.ledger.complete(number))
        self.tally.waited += time.perf_counter() - began
        return self.ledger.take(number)

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give the worker the next version of the weights; then begin the rollouts that the bound admits.

        Raises:
            HookError: a hook with `on_error: stop` failed. Up to the post-pause hooks the weights have not
                moved. Later they have moved, and the rollouts that the bound admits have begun.
        """
        try:
            with self.hooks.paused(self._pause, self._resume):
                self._published = _publish(weights, self.version + 1)
                self.worker.send(self._published)
        finally:
            self._admit()

    def close(self) -> None:
        """End the worker; what it has not finished is lost."""
        self.worker.stop()

    def take_tally(self) -> Tally:
        """What happened since the last call."""
        taken, self.tally = self.tally, Tally()
        return taken

    def _pause(self) -> None:
        began = time.perf_counter()
        self._paused = False
        self.worker.send(Pause())
        with self.ledger.changed:
            self.ledger.changed.wait_for(lambda: self._paused or self.worker.gone)
        self._pause_began = began

    def _resume(self) -> None:
        self.worker.send(Resume())
        self._give(self.ledger.rollouts)  # what an abort sent back
        self.tally.paused += time.perf_counter() - self._pause_began

    def _admit(self) -> None:
        """Begin every rollout that the staleness bound admits."""
        for rollout in self.bound.admitted(self._begun, self.version):
            if rollout in self.rollouts:
                self.ledger.open(rollout, self.wanted(rollout))
                self._begun = rollout + 1
        self._give(self.ledger.rollouts)

    def _give(self, rollouts: Sequence[int]) -> None:
        for rollout in rollouts:
            for batch in self.ledger.give(rollout):
                self.worker.send(Begin(rollout, batch))

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.worker.gone:
                self._replace()
            with self.ledger.changed:
                self.ledger.changed.wait_for(lambda: ready() or self.worker.gone)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self.settings, self._heard, self._ended, self.stuck_s)
        worker.send(self._published)
        return worker

    def _replace(self) -> None:
        """Replace a worker that is gone: the next worker goes on from the last token that was heard."""
        self._raise_fault()
        logger.warning("rollout worker: gone, exit code %s; starting another", self.worker.exit_code)
        self._fruitless += 1
        if self._fruitless > FRUITLESS_STARTS:
            raise WorkerError(
                f"the rollout worker died {self._fruitless} times without a token in between, last with exit code "
                f"{self.worker.exit_code}"
            )
        self.worker.stop()
        self.ledger.take_back_all()
        self.worker = self._start()
        self.tally.restarts += 1
        self._give(self.ledger.rollouts)

    def _raise_fault(self) -> None:
        if self.worker.fault is not None:
            raise self.worker.fault
        if self._failed is not None:
            error = InputError if self._failed.by_user else WorkerError
            raise error(self._failed.reason)

    def _heard(self, event: Event) -> None:
        """Take in an event, on the thread that listens to the worker."""
        if isinstance(event, Beat):
            return
        if isinstance(event, Tokens):
            self._fruitless = 0
            self.ledger.write(event)
            return
        if isinstance(event, Paused):
            self.ledger.take_back(event.aborted)
            self._paused = True
        else:
            self._failed = event
        self._ended()

    def _ended(self) -> None:
        with self.ledger.changed:
            self.ledger.changed.notify_all()


def _publish(weights: Mapping[str, Tensor], version: int) -> Publish:
    return Publish(version, {name: tensor.numpy() for name, tensor in weights.items()})

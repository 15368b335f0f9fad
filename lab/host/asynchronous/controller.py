"""Generation beside training: a thread samples, a token of every response at a time, while the trainer steps.

Rollouts begin as soon as the staleness bound admits them, and the weights move between two tokens. The controller knows
no trainer, task or rank.

The bound is on the age of tokens in training. Rollouts are trained on in order, rollout k at version k. A rollout that
begins at version v has no token of an earlier version, however often the weights move meanwhile. So rollout k may begin
once k - v is within the bound. AReaL counts samples instead: bound + v + 1 batches may have begun at version v
(`max_head_offpolicyness`). Fu et al. 2025, "AReaL", arxiv.org/abs/2505.24298, section 5.1.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lab.host.asynchronous.pool import Pool
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.update_hooks import Hooks
from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Drawn, Sampling, Unfinished
from lab.host.rollout.served_steps import Growing, stepped

PauseMode = Literal["in_place", "retract", "abort"]


@dataclass(frozen=True)
class Settings:
    """How responses are generated.

    pause_mode: what an update does to the responses under way. `in_place` goes on over their keys and values; `retract`
        makes these anew with the new weights; `abort` ends the responses, which begin again from their tokens.
    step_seconds: least seconds of a step; 0 is no delay.
    steps_per_update: most tokens that one version adds to a response before its rollout is due; 0 is no limit.
    max_concurrent: responses in flight at most, the others wait for one to end; None is no limit.
    engine: a name of `--rollout-engine`.
    shares: number of batches that a rollout is decoded in, as many as the synchronous host decodes it in.
    """

    config: ModelConfig
    precision: str
    sampling: Sampling
    pause_mode: PauseMode
    step_seconds: float = 0.0
    steps_per_update: int = 0
    max_concurrent: int | None = None
    engine: str = "local"
    shares: int = 1


@dataclass(frozen=True)
class Wanted:
    """A response that a rollout asks for."""

    prompt: tuple[int, ...]
    seed: int


@dataclass
class Tally:
    """Seconds that the trainer stood still since the last tally was taken: for rollouts, and over updates."""

    waited: float = 0.0
    paused: float = 0.0


@dataclass
class Batch:
    """Responses that step together. steps: number of steps taken with the present weights."""

    rollout: int
    decoding: Growing
    steps: int = 0


class Controller:
    """The rollouts that a thread generates for a trainer that trains on them in order.

    The thread alone steps batches, outside the lock of `_changed`; everything else is done under the lock, and to
    batches only while none steps.

    Args:
        bound: the largest age of a token in training; 0 is synchronous.
        wanted: gives the responses that a rollout asks for.
        rollouts: numbers of the rollouts to train on; the first is trained on at the version of `weights`.
    """

    def __init__(
        self,
        settings: Settings,
        bound: int,
        wanted: Callable[[int], Sequence[Wanted]],
        rollouts: range,
        weights: Mapping[str, Tensor],
    ) -> None:
        self.settings, self.bound, self.wanted, self.rollouts = settings, bound, wanted, rollouts
        self.hooks, self.pool, self.tally = Hooks(), Pool(), Tally()
        self._keep_cache = settings.pause_mode == "in_place"
        self.engine = stepped(settings.engine, settings.config, settings.precision, self._keep_cache)
        self.engine.update_weights(weights, rollouts.start)
        self._open: dict[int, dict[int, int]] = {}  # of each rollout the numbers of its responses, and their seeds
        self._ended: set[int] = set()
        self._waiting: list[tuple[int, list[Unfinished]]] = []
        self._batches: list[Batch] = []
        self._changed = threading.Condition()
        self._stepping = self._paused = self._closed = False
        self._due, self._begun = 0.0, rollouts.start
        self._fault: Exception | None = None
        self._admit()
        self._thread = threading.Thread(target=self._generate, name="rollouts", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that generate."""
        return self.engine.version

    def complete(self, rollout: int) -> bool:
        """Whether all responses of a rollout have ended."""
        with self._changed:
            return self._open[rollout].keys() <= self._ended

    def rollout(self, number: int) -> list[Response]:
        """Wait for a rollout, and take its responses.

        Raises:
            Exception: what generation raised.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._fault or self.complete(number))
            if not self.complete(number):
                assert self._fault is not None
                raise self._fault
            numbers = self._open.pop(number)
            self._ended -= numbers.keys()
        self.tally.waited += time.perf_counter() - began
        responses = [self.pool.take(one) for one in numbers]
        return [response for response in responses if response is not None]

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Generate with the next version of the weights; then begin the rollouts that the bound admits.

        Raises:
            HookError: a hook failed. Up to the post-pause hooks the weights have not
                moved. Later they have moved, and the rollouts that the bound admits have begun.
        """
        try:
            with self.hooks.paused(self._pause, self._resume):
                self.engine.update_weights(weights, self.version + 1)
                self._batches = [
                    Batch(one.rollout, one.decoding.go_on(self.engine.decoder, keep_cache=self._keep_cache))
                    for one in self._batches
                ]
        finally:
            self._admit()

    def close(self) -> None:
        """End generation; what is not finished is lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.engine.close()

    def take_tally(self) -> Tally:
        """Take the tally since the last call."""
        taken, self.tally = self.tally, Tally()
        return taken

    def _pause(self) -> None:
        self._pause_began = time.perf_counter()
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._stepping)
            if self.settings.pause_mode == "abort":
                self._batches = []
                self._waiting = [batch for rollout in sorted(self._open) for batch in self._unfinished(rollout)]

    def _resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()
        self.tally.paused += time.perf_counter() - self._pause_began

    def _admit(self) -> None:
        """Begin every rollout that the staleness bound admits."""
        with self._changed:
            for rollout in range(self._begun, self.version + self.bound + 1):
                if rollout in self.rollouts:
                    asked = self.wanted(rollout)
                    self._open[rollout] = {self.pool.add(Response(one.prompt)): one.seed for one in asked}
                    self._waiting += self._unfinished(rollout)
                    self._begun = rollout + 1
            self._changed.notify_all()

    def _unfinished(self, rollout: int) -> list[tuple[int, list[Unfinished]]]:
        """A rollout's responses that have not ended, as far as they got, in batches."""
        known, seeds = self.pool.snapshot(), list(self._open[rollout].items())
        shares = [seeds[first :: self.settings.shares] for first in range(self.settings.shares)]
        batches = [
            [
                Unfinished(number, known[number].prompt, known[number].tokens, seed)
                for number, seed in share
                if number not in self._ended
            ]
            for share in shares
        ]
        return [(rollout, batch) for batch in batches if batch]

    # ------------------------------------------------------------------------------------------ the thread that samples

    def _generate(self) -> None:
        """Step batches until the controller is closed, or a step fails."""
        torch.set_num_threads(1)  # as a rank of the trainer: threads may change the last bits of a sum
        try:
            while moving := self._next_batches():
                for batch in moving:
                    drawn = batch.decoding.step()
                    batch.steps += 1
                    self._write(drawn, batch.decoding.stale_cache)
        except Exception as error:  # the trainer's thread shall raise it, not this one
            self._fault = error
        with self._changed:
            self._stepping = False
            self._changed.notify_all()

    def _next_batches(self) -> list[Batch]:
        """Wait until batches may step; empty once the controller is closed."""
        with self._changed:
            self._batches = [batch for batch in self._batches if not batch.decoding.ended]
            self._stepping = False
            self._changed.notify_all()
            while not self._closed:
                moving = [] if self._paused else self._moving()
                ahead = self._due - time.monotonic()
                if moving and ahead <= 0:
                    self._due = time.monotonic() + self.settings.step_seconds
                    self._stepping = True
                    return moving
                self._changed.wait(ahead if moving else None)
            return []

    def _moving(self) -> list[Batch]:
        """The batches that may step now, once waiting responses have taken the places that are free."""
        while self._waiting and (places := self._places()) > 0:
            rollout, responses = self._waiting.pop(0)
            if responses[places:]:
                self._waiting.insert(0, (rollout, responses[places:]))
            decoding = self.engine.begin(responses[:places], self.settings.sampling)
            self._batches.append(Batch(rollout, decoding))
        limit = self.settings.steps_per_update
        if not limit:
            return list(self._batches)
        return [one for one in self._batches if one.steps < limit or one.rollout <= self.version]

    def _places(self) -> int:
        """How many responses may join those in flight."""
        if self.settings.max_concurrent is None:
            return sys.maxsize
        return self.settings.max_concurrent - sum(len(one.decoding.unfinished) for one in self._batches)

    def _write(self, drawn: Drawn, stale_cache: bool) -> None:
        """Append a step's tokens to their responses."""
        rows = zip(drawn.numbers, drawn.tokens, drawn.log_probs, drawn.ended, strict=True)
        with self._changed:
            for number, token, log_prob, ended in rows:
                self.pool.update(
                    number, lambda now, t=token, x=log_prob: now.append([t], [x], self.version, stale_cache)
                )
                if ended:
                    self._ended.add(number)
            self._changed.notify_all()

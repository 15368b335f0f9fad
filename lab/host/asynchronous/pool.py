"""Log pi_{v+1} of the tokens that version v wrote, scored while v + 1 is still the version of the trainer.

Before the weights move on from V, pi_V scores the tokens of V - 1 in every response that is not in training yet,
running or finished. After the update nobody can. Tokens of V itself are scored one update later. A token that is
trained on at age 1 needs no stored score: the trainer's own log-prob is log pi_{v+1}.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lab.host.asynchronous.response import Response
from mis_plugins.versions.spans import Request, batches

Batch = tuple[Sequence[Sequence[int]], Sequence[int]]
"""Whole sequences for one forward pass, and how many tokens at the end of each to score."""

Score = Callable[[Sequence[Batch]], Sequence[Sequence[Sequence[float]]]]
"""A function from batches, one for each rank that shares the work, to log-probs under the trainer's weights."""


@dataclass
class Pool:
    """All responses on their way to the trainer: running, waiting to be resumed, finished and queued.

    Workers write while the trainer recomputes: every method is atomic. A caller names a response by the number that
    `add` gave. No number is given twice, so that a late answer for a removed response reaches no other response.
    """

    _responses: dict[int, Response] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, response: Response) -> int:
        """Take in a response, empty or partial, and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._responses[number] = response
            return number

    def update(self, number: int, change: Callable[[Response], Response]) -> bool:
        """Replace a response by what `change` makes of it; false where the pool no longer holds the response."""
        with self._lock:
            if number not in self._responses:
                return False
            self._responses[number] = change(self._responses[number])
            return True

    def take(self, number: int) -> Response | None:
        """Remove a response, to train on it or to drop it; None where the pool no longer holds the response."""
        with self._lock:
            return self._responses.pop(number, None)

    def snapshot(self) -> dict[int, Response]:
        """All responses as they are now, by number."""
        with self._lock:
            return dict(self._responses)


def requests(pool: Pool, version: int) -> list[Request]:
    """Requests for all tokens of `version` that wait for their score, the longest request first."""
    found = (_request(number, response, version) for number, response in pool.snapshot().items())
    return sorted((one for one in found if one is not None), key=lambda one: -len(one.tokens))


def _request(number: int, response: Response, version: int) -> Request | None:
    """The request of one response; None where no token of `version` waits for its score."""
    positions = tuple(response.lacking(version))
    if not positions:
        return None
    return Request(number, response.prompt + response.tokens[: positions[-1] + 1], positions)


@dataclass(frozen=True)
class Recomputed:
    """What one recompute did.

    tokens: how many log-probs were stored.
    gone: how many log-probs belonged to responses that had left the pool meanwhile.
    scored: how many tokens went through the model, prompts and earlier tokens included.
    """

    tokens: int = 0
    gone: int = 0
    scored: int = 0
    batches: int = 0


def recompute(pool: Pool, current: int, budget: int, score: Score, ranks: int = 1) -> Recomputed:
    """Store log pi_V of all tokens of version V - 1, once each. Call this before the weights move on from V.

    The call ends when no token waits: tokens that slow workers append meanwhile are scored too. Whatever `score` raises
    passes through, and what was stored before stays. A second call goes on from there.

    Args:
        current: V, the version of the weights that `score` uses.
        budget: how many tokens a batch may hold; a longer sequence goes alone.
        ranks: how many batches `score` is given at a time. The content of a batch does not depend on `ranks`, so that
            a model gives the same bits however many ranks share the batches.

    Raises:
        InputError: `score` returned too few or too many log-probs.
    """
    done = Recomputed()
    while waiting := requests(pool, current - 1):
        planned = batches(waiting, budget)
        for first in range(0, len(planned), ranks):
            together = planned[first : first + ranks]
            answers = score([_asked(batch) for batch in together])
            for batch, answer in zip(together, answers, strict=True):
                done = _stored(pool, batch, answer, done)
    return done


def _asked(batch: Sequence[Request]) -> Batch:
    return [request.tokens for request in batch], [request.count for request in batch]


def _stored(pool: Pool, batch: Sequence[Request], answers: Sequence[Sequence[float]], done: Recomputed) -> Recomputed:
    tokens = gone = 0
    for request, answer in zip(batch, answers, strict=True):
        positions, log_probs = request.positions, request.wanted(answer)
        if pool.update(request.number, lambda now, p=positions, x=log_probs: now.stored(p, x)):
            tokens += len(positions)
        else:
            gone += len(positions)
    scored = sum(len(request.tokens) for request in batch)
    return Recomputed(done.tokens + tokens, done.gone + gone, done.scored + scored, done.batches + 1)

"""Responses on their way, from their first token until the trainer has them.

The trainer asks the shelf, once a version, for the tokens to score. A response leaves with its sample, when the host
drops the sample, or when the batch that took it is trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from mis_plugins.versions.recompute import Request
from mis_plugins.versions.segment_wise import NO_VERSION


@dataclass
class Growing:
    """A response while it grows.

    prompt: the tokens before the response.
    versions: of each token; until the call ends and names them all, the engine's version when the token arrived.
    batch: the number of the batch that took the response; None while none has.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    batch: int | None = None

    def lacking(self, number: int, version: int) -> Request | None:
        """Request to score the tokens that `version` wrote; None where there are none."""
        positions = tuple(i for i, wrote in enumerate(self.versions) if wrote == version > NO_VERSION)
        if not positions:
            return None
        return Request(number, (*self.prompt, *self.tokens[: positions[-1] + 1]), positions)


@dataclass(frozen=True)
class Waiting:
    """The shelf's answer to the trainer: tokens to score, and responses that are not trained on yet."""

    requests: Sequence[Request]
    alive: frozenset[int]


class Shelf:
    """All responses of a run. Rollouts write on one thread while the trainer asks on another."""

    def __init__(self) -> None:
        self._growing: dict[int, Growing] = {}
        self._lock = threading.Lock()

    def begin(self, number: int, prompt: Sequence[int]) -> None:
        """Take in a response that begins."""
        with self._lock:
            self._growing[number] = Growing(tuple(prompt))

    def say(self, number: int, start: int, tokens: Sequence[int], versions: Sequence[int]) -> None:
        """Set the response's tokens and versions from place `start` on, in place of earlier ones."""
        with self._lock:
            if (growing := self._growing.get(number)) is not None:
                growing.tokens[start:], growing.versions[start:] = tokens, versions

    def take(self, batch: int, numbers: Sequence[int]) -> None:
        """Number a batch of responses that the trainer gets next; they stay until it says that it has them."""
        with self._lock:
            for number in numbers:
                if number in self._growing:
                    self._growing[number].batch = batch

    def drop(self, number: int) -> None:
        """Forget a response whose sample is gone, unless a batch has taken it."""
        with self._lock:
            if (growing := self._growing.get(number)) is not None and growing.batch is None:
                del self._growing[number]

    def waiting(self, version: int, trained: int) -> Waiting:
        """Forget batches up to `trained`; list tokens of `version` to score, the longest response first."""
        with self._lock:
            left = {
                number: growing
                for number, growing in self._growing.items()
                if growing.batch is None or growing.batch > trained
            }
            self._growing = left
            lacking = [growing.lacking(number, version) for number, growing in left.items()]
        requests = sorted(
            (request for request in lacking if request is not None), key=lambda request: -len(request.tokens)
        )
        return Waiting(requests, frozenset(left))

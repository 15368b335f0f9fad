"""Responses in the process of the rollouts, from their first token until the trainer has them.

The trainer asks that process, once a version, for the tokens to score. A response leaves the shelf with its sample,
when the host drops the sample, or when the batch that took it is trained on.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.shared import runs
from mis_plugins.versions.recompute import Request
from mis_plugins.versions.segment_wise import NO_VERSION

NUMBER, VERSIONS = "response_number", "output_versions"  # what our generate function leaves on a sample


@dataclass
class Growing:
    """A response while it grows.

    prompt: the tokens before the response.
    versions: of each token; the engine's version when the token was heard of, until the call ends and tells them all.
    batch: the number of the batch that took the response; None while none has.
    """

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    batch: int | None = None

    def lacking(self, number: int, version: int) -> Request | None:
        """What is to be scored of the tokens of `version`; None where there is none."""
        positions = tuple(i for i, wrote in enumerate(self.versions) if wrote == version > NO_VERSION)
        if not positions:
            return None
        return Request(number, (*self.prompt, *self.tokens[: positions[-1] + 1]), positions)


@dataclass(frozen=True)
class Waiting:
    """What the trainer is told: the tokens to score, and the responses that are not trained on yet."""

    requests: Sequence[Request]
    alive: frozenset[int]


class Shelf:
    """All responses of this process. Rollouts write on one thread while the trainer asks on another."""

    def __init__(self) -> None:
        self._growing: dict[int, Growing] = {}
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._lock = threading.Lock()

    def begin(self, sample: Any, prompt: Sequence[int]) -> int:
        """Take in a response that begins, in place of what the sample had before, and number it."""
        with self._lock:
            self._growing.pop(getattr(sample, NUMBER, -1), None)
            number = next(self._numbers)
            self._growing[number] = Growing(tuple(prompt))
        setattr(sample, NUMBER, number)
        setattr(sample, VERSIONS, [])
        weakref.finalize(sample, self._dropped, number).atexit = False
        return number

    def say(self, number: int, start: int, tokens: Sequence[int], versions: Sequence[int]) -> None:
        """Say what the response holds from token `start` on; what was said of these places before is replaced."""
        with self._lock:
            if (growing := self._growing.get(number)) is not None:
                growing.tokens[start:], growing.versions[start:] = tokens, versions

    def take(self, numbers: Sequence[int]) -> int:
        """Number a batch of responses that the trainer gets next; they stay until it says that it has them."""
        with self._lock:
            batch = next(self._batches)
            for number in numbers:
                if number in self._growing:
                    self._growing[number].batch = batch
            return batch

    def waiting(self, version: int, trained: int) -> Waiting:
        """Tokens of `version` to score, the longest response first; batches up to `trained` leave."""
        with self._lock:
            left = {
                number: growing
                for number, growing in self._growing.items()
                if growing.batch is None or growing.batch > trained
            }
            self._growing = left
            found = [growing.lacking(number, version) for number, growing in left.items()]
        requests = sorted((one for one in found if one is not None), key=lambda one: -len(one.tokens))
        return Waiting(requests, frozenset(left))

    def _dropped(self, number: int) -> None:
        """The sample is gone: so is its response, unless a batch has taken it."""
        with self._lock:
            if (growing := self._growing.get(number)) is not None and growing.batch is None:
                del self._growing[number]


SHELF = Shelf()


def waiting(manager: Any, version: int, trained: int) -> Waiting:
    """`Shelf.waiting` of the process in which Ray calls this."""
    return SHELF.waiting(version, trained)


@dataclass(frozen=True)
class Note:
    """What travels to the trainer beside a sample: who wrote its tokens, and the number by which the trainer scored."""

    batch: int
    number: int
    versions: Sequence[int]

    def packed(self) -> list[int]:
        """Batch, number, and then version and count of each run of tokens that one version wrote."""
        return [self.batch, self.number, *runs.packed(self.versions)]

    @classmethod
    def of(cls, packed: Sequence[Any]) -> Note:
        """Read what `packed` wrote.

        Raises:
            InputError: it is the host's own list of versions.
        """
        if len(packed) < 2 or len(packed) % 2 or not all(isinstance(x, int) for x in packed):
            raise InputError(
                "weight_versions: not those of mis_plugins; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        return cls(packed[0], packed[1], runs.unpacked(packed[2:]))

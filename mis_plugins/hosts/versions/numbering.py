"""Samples in the process of the rollouts: the number by which the shelf knows each, and who wrote its tokens."""

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mis_plugins.errors import InputError
from mis_plugins.hosts.versions.note import Note
from mis_plugins.hosts.versions.settings import LOGLINEAR

NUMBER, VERSIONS = "response_number", "output_versions"  # what our generate functions leave on a sample
GENERATE = "--custom-generate-function-path mis_plugins.mis.generate_with_versions"


class Told(Protocol):
    """A shelf, here or in another process."""

    def begin(self, number: int, prompt: Sequence[int]) -> object: ...
    def say(self, number: int, start: int, tokens: Sequence[int], versions: Sequence[int]) -> object: ...
    def take(self, batch: int, numbers: Sequence[int]) -> object: ...
    def drop(self, number: int) -> object: ...


class Numbering:
    """Numbers the samples of this process, and tells a shelf of each.

    Args:
        shelf: makes the shelf, or what reaches it, when the first sample begins.
    """

    def __init__(self, shelf: Callable[[], Told]) -> None:
        self._make, self._made = shelf, list[Told]()
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._begun: set[int] = set()
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()

    @property
    def shelf(self) -> Told:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]

    def begin(self, sample: Any, prompt: Sequence[int]) -> int:
        """Number a response that begins, in place of what the sample had before."""
        self._gone.put(getattr(sample, NUMBER, -1))
        self._sweep()
        number = next(self._numbers)
        self._begun.add(number)
        self.shelf.begin(number, tuple(prompt))
        setattr(sample, NUMBER, number)
        setattr(sample, VERSIONS, [])
        weakref.finalize(sample, self._gone.put, number).atexit = False
        return number

    def known(self, sample: Any) -> bool:
        """Whether this process numbered the sample: one that was read from a file may carry another's number."""
        return getattr(sample, NUMBER, -1) in self._begun

    def noted(self, samples: Sequence[Any], scored: bool) -> list[list[int]]:
        """A packed note of each sample of a batch, which the trainer gets next.

        Args:
            scored: whether the trainer scores tokens of what waits.

        Raises:
            InputError: a sample without versions, or with others than its tokens; a scored one with images.
        """
        for sample in samples:
            _check(sample, scored)
        self._sweep()
        batch, numbers = next(self._batches), [getattr(sample, NUMBER) for sample in samples]
        self.shelf.take(batch, numbers)
        return [
            Note(batch, number, getattr(sample, VERSIONS)).packed()
            for number, sample in zip(numbers, samples, strict=True)
        ]

    def _sweep(self) -> None:
        """Drop what is gone. Not as a sample goes: the garbage collector may come while this thread has the shelf."""
        while not self._gone.empty():
            number = self._gone.get()
            if number in self._begun:
                self._begun.discard(number)
                self.shelf.drop(number)


def _check(sample: Any, scored: bool) -> None:
    versions = getattr(sample, VERSIONS, None)
    if versions is None or not hasattr(sample, NUMBER):
        raise InputError(f"sample {sample.index}: no {VERSIONS}; generate with {GENERATE}")
    if len(versions) != sample.response_length:
        raise InputError(
            f"sample {sample.index}: {VERSIONS} of {len(versions)} tokens, and the response has "
            f"{sample.response_length}; change responses before they are generated on, not after"
        )
    if scored and getattr(sample, "multimodal_train_inputs", None):
        raise InputError(
            f"sample {sample.index}: multimodal_train_inputs, and recompute would score its tokens without them; "
            f"{LOGLINEAR}"
        )

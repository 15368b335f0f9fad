"""Samples in the process of the rollouts: the number by which the shelf knows each, and who wrote its tokens."""

from __future__ import annotations

import functools
import itertools
import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs.record import LOGLINEAR
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.versions.heads import HEAD
from mis_plugins.hosts.versions.kept import KEPT
from mis_plugins.hosts.versions.shelf import Shelf
from mis_plugins.shared import runs

# Attributes that our generate functions leave on a sample; FAULT where its versions cannot be known.
NUMBER, VERSIONS, FAULT = "response_number", "output_versions", "versions_fault"
NO_NUMBER = -1
GENERATE = "--custom-generate-function-path mis_plugins.mis.generate_with_versions"


def served(args: Any, flag: str) -> Host:
    """The host that runs, for the hook of a flag: a host on which versions are carried."""
    host = current(args)
    if not host.version_flags:
        raise ConfigError(f"{flag}: versions are not carried on {host.title}; leave the flag out")
    return host


def segment_wise(args: Any) -> SegmentWiseConfig | None:
    """Segment-wise weights as the loss hook will have them; None where they are off, or the TIS hook weighs."""
    if getattr(args, "loss_type", None) != "custom_loss":
        return None
    config = reading.from_args(args).where_versions_are_known()
    return config.segment_wise if config.segment_wise_on else None


def recomputes(config: SegmentWiseConfig | None) -> bool:
    """Whether weights read log-probs that a recompute stored."""
    return config is not None and config.method == "recompute"


@dataclass(frozen=True)
class Note:
    """What travels to the trainer beside a sample: its batch and number on the shelf, and who wrote its tokens.

    more: what else the engine said of the tokens, in bytes by name (`heads.py`, `kept.py`), and numbers of the batch.
    """

    batch: int
    number: int
    versions: Sequence[int]
    more: Mapping[str, Any] = field(default_factory=dict)

    def packed(self) -> list[Any]:
        """Batch, number, version and count of each run of tokens that one version wrote, and what else there is."""
        more = [dict(self.more)] if self.more else []
        return [self.batch, self.number, *runs.packed(self.versions), *more]

    @classmethod
    def of(cls, packed: Any, key: str) -> Note:
        """Read what `packed` wrote."""
        written = list(packed) if isinstance(packed, Sequence) else []
        more = written[-1] if written and isinstance(written[-1], Mapping) else {}
        numbers = written[:-1] if more else written
        if len(numbers) < 2 or len(numbers) % 2 or not all(isinstance(x, int) for x in numbers):
            raise InputError(
                f"{key}: not those of mis_plugins; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        return cls(numbers[0], numbers[1], runs.unpacked(numbers[2:]), more)


class Numbering:
    """Numbers the samples of this process, and tells of each a shelf, which is made when the first sample begins."""

    def __init__(self, shelf: Callable[[], Shelf]) -> None:
        self._make = shelf
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._begun: dict[int, weakref.ref[Any]] = {}
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()

    @functools.cached_property
    def shelf(self) -> Shelf:
        return self._make()

    def begin(self, sample: Any, prompt: Sequence[int]) -> int:
        """Number a response that begins; the sample's number from before is given up."""
        self._gone.put(self._number(sample))
        self._sweep()
        number = next(self._numbers)
        self._begun[number] = weakref.ref(sample)
        self.shelf.begin(number, tuple(prompt))
        setattr(sample, NUMBER, number)
        setattr(sample, VERSIONS, [])
        weakref.finalize(sample, self._gone.put, number).atexit = False
        return number

    def known(self, sample: Any) -> bool:
        """Whether this process numbered the sample: a copy, or one from a file, carries the number of another."""
        return self._number(sample) != NO_NUMBER

    def noted(
        self, samples: Sequence[Any], scored: bool, needed: Mapping[str, str] = {}, of_batch: Mapping[str, float] = {}
    ) -> list[list[Any]]:
        """A packed note of each sample of a batch, which the trainer gets next.

        Args:
            scored: whether the trainer asks for waiting tokens and scores them. Else the shelf forgets the batch.
            needed: attributes that each sample must have, and who reads each.
            of_batch: numbers of the batch, which each note tells.

        Raises:
            InputError: a sample without versions or a needed attribute, or with those of other tokens; a scored one
                with images.
        """
        for sample in samples:
            _check(sample, scored, needed)
        batch, numbers = next(self._batches), [self._number(sample) for sample in samples]
        if scored:
            self.shelf.take(batch, numbers)
        else:
            for number in numbers:
                self._gone.put(number)
        self._sweep()
        return [
            Note(batch, number, getattr(sample, VERSIONS), {**_packed(sample), **of_batch}).packed()
            for number, sample in zip(numbers, samples, strict=True)
        ]

    def _sweep(self) -> None:
        """Drop the numbers of samples that are gone.

        A sample's finalizer only queues its number: it may run while this thread holds the shelf's lock.
        """
        with suppress(queue.Empty):  # without waiting: another thread may take the last one first
            while True:
                number = self._gone.get_nowait()
                if self._begun.pop(number, None) is not None:
                    self.shelf.drop(number)

    def _number(self, sample: Any) -> int:
        number = getattr(sample, NUMBER, NO_NUMBER)
        reference = self._begun.get(number)
        return number if reference is not None and reference() is sample else NO_NUMBER


SAID = (HEAD, KEPT)  # attributes that hold what the engine said of each token, beside its version


def _packed(sample: Any) -> dict[str, bytes]:
    """What the engine said of the tokens of a sample, packed by name."""
    columns = (getattr(sample, name).packed() for name in SAID if hasattr(sample, name))
    return {name: packed for each in columns for name, packed in each.items()}


def _check(sample: Any, scored: bool, needed: Mapping[str, str]) -> None:
    if (fault := getattr(sample, FAULT, None)) is not None:
        raise InputError(f"sample {sample.index}: {fault}")
    versions = getattr(sample, VERSIONS, None)
    if versions is None or not hasattr(sample, NUMBER):
        raise InputError(f"sample {sample.index}: no {VERSIONS}; generate with {GENERATE}")
    for name, reader in needed.items():
        if not hasattr(sample, name):
            raise InputError(f"sample {sample.index}: no {name}, which {reader} reads; generate with {GENERATE}")
    columns = {name: getattr(sample, name) for name in (VERSIONS, *SAID) if hasattr(sample, name)}
    for name, of_tokens in columns.items():
        if len(of_tokens) != sample.response_length:
            raise InputError(
                f"sample {sample.index}: {name} of {len(of_tokens)} tokens, and the response has "
                f"{sample.response_length}; change responses before they are generated on, not after"
            )
    if scored and getattr(sample, "multimodal_train_inputs", None):
        raise InputError(
            f"sample {sample.index}: multimodal_train_inputs, and recompute would score its tokens without them; "
            f"{LOGLINEAR}"
        )

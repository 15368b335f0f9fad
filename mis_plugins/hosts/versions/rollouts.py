"""The process of the rollouts: the responses on their way, and how the trainer asks for them.

A response is on the shelf from its first token until the trainer has it. The trainer asks, once a version, for the
tokens to score. A response leaves with its sample, when the host drops the sample, or when the batch that took it is
trained on.

No host hands its trainer the actor of the rollouts, and that actor may answer nobody while a rollout runs. So the
process of the rollouts starts an actor of ours under a name: the trainer puts a question there, and a thread beside the
rollouts answers it. Tokens never leave their process.
"""

import asyncio
import functools
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.versions import heads, kept
from mis_plugins.hosts.versions.samples import (
    GENERATE,
    NUMBER,
    VERSIONS,
    Note,
    check_sample,
    packed_columns,
    recomputes,
    retracted_share,
    segment_wise,
    served,
)
from mis_plugins.versions.segment_wise import NO_VERSION
from mis_plugins.versions.spans import Request

NAME = "mis_plugins_rollouts"
NO_NUMBER = -1


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
            check_sample(sample, scored, needed)
        batch, numbers = next(self._batches), [self._number(sample) for sample in samples]
        if scored:
            self.shelf.take(batch, numbers)
        else:
            for number in numbers:
                self._gone.put(number)
        self._sweep()
        return [
            Note(batch, number, getattr(sample, VERSIONS), {**packed_columns(sample), **of_batch}).packed()
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


class Questions:
    """Questions of the trainer that wait for an answer, in a Ray actor of their own."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, tuple[int, ...]]] = asyncio.Queue()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, *question: int) -> Any:
        """Put a question, and wait for its answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._waiting.put((number, question))
        return await answer

    async def next(self) -> tuple[int, tuple[int, ...]]:
        """The number of the next question, and the question."""
        return await self._waiting.get()

    async def answer(self, number: int, answer: Any) -> None:
        """Answer a question by its number; an exception is raised where it was asked."""
        future = self._answers.pop(number)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def opened() -> Shelf:
    """The shelf of this process, whose questions are answered from now on."""
    import ray  # type: ignore[import-not-found]

    shelf, questions = Shelf(), ray.remote(Questions).options(name=NAME, num_cpus=0).remote()
    threading.Thread(target=_answer, args=(shelf, questions), name=NAME, daemon=True).start()
    return shelf


def _answer(shelf: Shelf, questions: Any) -> None:
    import ray  # type: ignore[import-not-found]

    with suppress(ray.exceptions.RayError):
        while True:
            number, question = ray.get(questions.next.remote())
            try:
                answer = shelf.waiting(*question)
            except Exception as error:  # the trainer raises it, and would otherwise wait for ever
                answer = error
            ray.get(questions.answer.remote(number, answer))


NUMBERING = Numbering(opened)


def waiting(version: int, trained: int) -> Waiting:
    """`Shelf.waiting`, asked from a trainer's process; raises ConfigError where no process generates with our hook."""
    import ray  # type: ignore[import-not-found]

    try:
        questions = ray.get_actor(NAME)
    except ValueError as error:
        raise ConfigError(f"no rollout of this job answers under the name {NAME}; generate with {GENERATE}") from error
    return ray.get(questions.ask.remote(version, trained))


@Hook
def convert_with_versions(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The conversion of Miles and slime: the host's own train data, with a `Note` of each sample for `carry_versions`.

    Raises:
        ConfigError: versions are not carried on this host, the caller is not its process of the rollouts, or its
            conversion needs inputs that it does not hand to this function.
        InputError: a sample without versions, or with others than its tokens, or with images where recompute scores.
    """
    needs = served(args, "--custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions").needs
    own = needs.own_conversion(args)
    needed = {heads.HEAD: "mis.center"} if heads.wanted(args, needs.asks_for_head) else {}
    if needs.keeps_sets and kept.asked(args):
        needed[kept.KEPT] = "--rollout-top-k"
    notes = NUMBERING.noted(samples, recomputes(segment_wise(args)), needed, retracted_share(args, samples))
    return own(samples) | {needs.notes: notes}

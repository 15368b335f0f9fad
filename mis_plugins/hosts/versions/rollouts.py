"""The process of the rollouts: its shelf, and how the trainer asks it.

No host hands its trainer the actor of the rollouts, and that actor may answer nobody while a rollout runs. So the
process of the rollouts starts an actor of ours under a name: the trainer puts a question there, and a thread beside the
rollouts answers it. Tokens never leave their process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.versions import heads, kept, retractions
from mis_plugins.hosts.versions.samples import GENERATE, Numbering, recomputes, segment_wise, served
from mis_plugins.hosts.versions.shelf import Shelf, Waiting

NAME = "mis_plugins_rollouts"


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
    """Answer questions until Ray ends."""
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
    """`Shelf.waiting`, asked from the process of a trainer.

    Raises:
        ConfigError: no process generates with our hook.
    """
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
    notes = NUMBERING.noted(samples, recomputes(segment_wise(args)), needed, retractions.share(args, samples))
    return own(samples) | {needs.notes: notes}

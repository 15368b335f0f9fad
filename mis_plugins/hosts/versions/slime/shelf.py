"""The shelf of slime, in a Ray actor of its own: the actor of its rollouts answers nobody while a rollout runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_plugins.hosts.versions.numbering import Numbering
from mis_plugins.hosts.versions.shelf import Shelf, Waiting

NAME = "mis_plugins_shelf"


class Distant:
    """A shelf in a Ray actor, which gets the calls in the order in which this process makes them."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, number: int, prompt: Sequence[int]) -> None:
        self._actor.begin.remote(number, prompt)

    def say(self, number: int, start: int, tokens: Sequence[int], versions: Sequence[int]) -> None:
        self._actor.say.remote(number, start, tokens, versions)

    def take(self, batch: int, numbers: Sequence[int]) -> None:
        self._actor.take.remote(batch, numbers)

    def drop(self, number: int) -> None:
        self._actor.drop.remote(number)


def made() -> Distant:
    """The shelf of this job, which the process of the rollouts owns."""
    import ray  # type: ignore[import-not-found]

    return Distant(ray.remote(Shelf).options(name=NAME, num_cpus=0).remote())


NUMBERING = Numbering(made)


def waiting(version: int, trained: int) -> Waiting:
    """`Shelf.waiting`, asked from the process of a trainer."""
    import ray  # type: ignore[import-not-found]

    return ray.get(ray.get_actor(NAME).waiting.remote(version, trained))

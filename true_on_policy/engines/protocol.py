"""What a rollout engine does for the proof: sample, score what was sampled, take new weights, end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from jaxtyping import Float32
from torch import Tensor

from true_on_policy.errors import TrueOnPolicyError


class EngineError(TrueOnPolicyError):
    """An engine that did not start, died, was too slow, or answered something else than was asked."""


@dataclass(frozen=True)
class Request:
    """One sequence to sample.

    Attributes:
        prompt: token ids, at least one.
        length: how many tokens to sample; the engine ignores its end-of-sequence token.
        seed: of this sequence's own random numbers, where the engine has such.
        temperature: above 0; the log-probs are those of log_softmax(logits / temperature).
    """

    prompt: tuple[int, ...]
    length: int
    seed: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class Sample:
    """A request and what the engine made of it.

    Attributes:
        tokens: the sampled ids, as many as were asked.
        log_probs: of each, under the distribution that it was sampled from.
        version: which update of the weights sampled it.
        cached: tokens of the prompt that the engine took from its cache.
        preempted: how often the engine gave up its cache and computed it again.
    """

    request: Request
    tokens: tuple[int, ...]
    log_probs: Float32[Tensor, "N"]
    version: int
    cached: int = 0
    preempted: int = 0

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.request.prompt + self.tokens


@runtime_checkable
class Engine(Protocol):
    """A rollout engine. Every method raises EngineError; `close` never does and may be called twice."""

    name: str

    def versions(self) -> dict[str, str]:
        """Of the packages that compute, in the engine's own environment."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests in one batch."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Float32[Tensor, "_"]]:
        """Log-prob of each sampled token by prefill of the whole sequence, at temperature 1."""
        ...

    def update_weights(self, checkpoint: Path, version: int) -> None:
        """Take the weights of a checkpoint of the same shape; forget what was cached of the former ones."""
        ...

    def close(self) -> None: ...

"""The protocol of a rollout engine: it samples, scores samples, takes new weights and ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import frexp, log10
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float32
from torch import Tensor

from true_on_policy.engines.asking import log_prob, whole
from true_on_policy.errors import EngineError as EngineError

NO_CHANCE = -12  # a power of 10


@dataclass(frozen=True)
class Cut:
    """A cut restricts each sampled token to a part of the vocabulary, whose probabilities are renormalized.

    top_p: the probability mass of the likeliest tokens that are kept, at most 1.
    top_k: the greatest number of tokens that are kept; None sets no limit.
    """

    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class Request:
    """A request asks an engine to sample one sequence.

    prompt: token ids, at least one.
    length: how many tokens to sample, at most; the engine ignores the end-of-sequence token of its model.
    seed: the seed of this sequence's random numbers, in an engine that takes a seed per request.
    temperature: above 0; the log-probs are those of log_softmax(logits / temperature).
    cut: the part of the vocabulary to sample from, in an engine that can cut; None: all of it.
    end: the token that ends a response; None where every response has `length` tokens.
    """

    prompt: tuple[int, ...]
    length: int
    seed: int = 0
    temperature: float = 1.0
    cut: Cut | None = None
    end: int | None = None

    def over(self, tokens: Sequence[int]) -> bool:
        """Whether a response ends exactly with `tokens`: at `length`, or at the first `end`."""
        early = self.end in tokens[:-1]
        return not early and (len(tokens) == self.length or (bool(tokens) and tokens[-1] == self.end))


@dataclass(frozen=True)
class Sample:
    """A sample is a request with the tokens that the engine sampled for it.

    tokens: the sampled ids, until the response is over.
    log_probs: the log-prob of each token under the distribution from which it was sampled.
    version: the version of the weights that sampled the tokens.
    cached: how many tokens of the prompt the engine took from its cache.
    preempted: how often the engine dropped the request's cache and computed it again.
    kept: for each token, the ids that the cut left to sample from; None without a cut.
    """

    request: Request
    tokens: tuple[int, ...]
    log_probs: Float32[Tensor, "N"]
    version: int
    cached: int = 0
    preempted: int = 0
    kept: tuple[tuple[int, ...], ...] | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.request.prompt + self.tokens


@runtime_checkable
class Engine(Protocol):
    """A rollout engine; every method but `close` may raise EngineError, and `close` may be called twice."""

    name: str

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that compute, in the engine's own environment."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests in one batch."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Float32[Tensor, "_"]]:
        """Compute the log-prob of each sampled token by prefill of the whole sequence, at temperature 1."""
        ...

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        """Load the weights of a checkpoint with equal shapes, and drop the cache of the previous weights.

        An engine keeps its cache while a request runs, so that the call returns when the last request has ended.
        With `keep_cache`, the next tokens of a sequence attend to keys and values of the previous weights.
        """
        ...

    def close(self) -> None: ...


def log_probs(values: Iterable[Any]) -> Float32[Tensor, "_"]:
    """Read an answer's log-probs; JSON carries a float32 as the float64 of equal value, or in fewest digits.

    Raises:
        EngineError: numbers that are no float32 have so few digits that their last bits are lost.
    """
    given = torch.tensor([*map(log_prob, values)], dtype=torch.float64)
    others = given[given != given.float()].tolist()
    if others and _are_rounded(others):
        raise EngineError(f"log-probs are rounded, as {others[0]!r} is, by the server or a proxy before it")
    return given.float()


def _are_rounded(numbers: Sequence[float]) -> bool:
    """Whether numbers have five decimals at most, or so few digits that no chance gives float32 as few.

    Of random float32 a share of about 10^d times the distance to the next one has d decimals or digits at most.
    """
    written = [Decimal(repr(number)).normalize() for number in numbers]
    digits = [len(each.as_tuple().digits) for each in written]
    places = [each.adjusted() for each in written]  # the power of 10 of the first digit
    apart = [(frexp(number)[1] - 24) * log10(2) for number in numbers]  # neighbours in float32, as a power of 10
    decimals = max(count - 1 - first for count, first in zip(digits, places, strict=True))
    chances = (
        sum(min(space + decimals, 0) for space in apart),
        sum(min(space + max(digits) - 1 - first, 0) for space, first in zip(apart, places, strict=True)),
    )
    return decimals <= 5 or min(chances) < NO_CHANCE


def sglang_rows(rows: Any) -> tuple[tuple[int, ...], Float32[Tensor, "_"]]:
    """Read token ids and log-probs from SGLang's rows (log-prob, token id, text)."""
    return tuple(whole(row[1], "token id") for row in rows), log_probs(row[0] for row in rows)

"""Responses that grow together, a token a step, so that the weights may move between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.host.model.decoder import Decoder, LeftPadded
from mis_plugins.errors import InputError


@dataclass(frozen=True)
class Unfinished:
    """A response to begin, or to go on with.

    number: the number by which the caller knows the response.
    tokens: the tokens of the response so far.
    seed: seed and place of a token decide the randomness of that token.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    max_new_tokens: most tokens of a response, the tokens that it began with included.
    named: how many of the likeliest tokens at each position are named beside the one that is drawn.
    """

    max_new_tokens: int
    temperature: float
    eos: int
    named: int = 0


@dataclass(frozen=True)
class Drawn:
    """One step: a token of each response that had not ended. Log-probs are taken after temperature.

    named: the likeliest tokens of each response and their log-probs, a row each; None where none are named.
    """

    numbers: list[int]
    tokens: list[int]
    log_probs: list[float]
    ended: list[bool]
    named: tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]] | None = None


class Decoding:
    """A batch of responses over one KV cache.

    Rows that have ended stay in the batch until all have: the last bits of a row may depend on the number of
    rows.

    responses: the responses as far as they got, ended or not.
    stale_cache: whether the cache holds keys and values of weights before the present ones.
    """

    def __init__(self, decoder: Decoder, responses: Sequence[Unfinished], sampling: Sampling) -> None:
        self.sampling, self.stale_cache = sampling, False
        self._decoder, self.responses = decoder, list(responses)
        batch = LeftPadded.of([one.prompt + one.tokens for one in responses])
        drawn = [len(one.tokens) for one in responses]
        self._padding = batch.padding.tolist()
        self._cache = decoder.cache(batch, sampling.max_new_tokens - min(drawn))
        self._position = torch.tensor(drawn)
        self._uniform = counter_uniform([one.seed for one in responses], sampling.max_new_tokens)
        self._alive = self._position < sampling.max_new_tokens
        self._pending = batch.tokens

    @property
    def ended(self) -> bool:
        return not self._alive.any()

    @property
    def unfinished(self) -> list[Unfinished]:
        """Responses that have not ended, with the tokens drawn so far."""
        return [one for one, alive in zip(self.responses, self._alive.tolist(), strict=True) if alive]

    @property
    def routes(self) -> list[Int[Tensor, "N L K"]] | None:
        """The experts of each token of prompt and response but the last; None in a dense model.

        The last token was drawn, and no layer has seen it.
        """
        held = self._cache.routes
        if held is None:
            return None
        rows = enumerate(zip(self.responses, self._padding, strict=True))
        return [
            held[:, row, start : start + len(one.prompt + one.tokens) - 1].transpose(0, 1).contiguous()
            for row, (one, start) in rows
        ]

    @torch.no_grad()
    def step(self) -> Drawn:
        """Draw the next token of every response."""
        logits = self._decoder.forward(self._pending, self._cache)[:, -1]
        # Responses that have ended draw on, and nobody reads the tokens: their place may lie beyond the last.
        place = self._position.clamp(max=self.sampling.max_new_tokens - 1)
        uniform = self._uniform.gather(1, place[:, None])[:, 0]
        tokens, log_probs = sample(logits, self.sampling.temperature, uniform)
        rows = self._alive.nonzero()[:, 0]
        k = self.sampling.named
        named = likeliest(logits[rows], self.sampling.temperature, k) if k else None
        self._position += 1
        self._alive &= (tokens != self.sampling.eos) & (self._position < self.sampling.max_new_tokens)
        self._pending = tokens[:, None]
        drawn = Drawn(
            [self.responses[row].number for row in rows.tolist()],
            tokens[rows].tolist(),
            log_probs[rows].tolist(),
            (~self._alive[rows]).tolist(),
            named,
        )
        for row, token in zip(rows.tolist(), drawn.tokens, strict=True):
            one = self.responses[row]
            self.responses[row] = replace(one, tokens=(*one.tokens, token))
        return drawn

    def go_on(self, decoder: Any, *, keep_cache: bool) -> Decoding:
        """Go on with other weights, over the present KV cache or over one that the other weights compute."""
        if not keep_cache:
            return Decoding(decoder, self.unfinished, self.sampling)
        self._decoder = decoder
        self.stale_cache = self.stale_cache or self._cache.used > 0
        return self


def sample(
    logits: Float[Tensor, "B V"], temperature: float, uniform: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw a token a row by inverting the cumulative distribution at `uniform`; also its log-probability.

    Raises:
        InputError: a logit is NaN or infinite.
    """
    log_probs = (logits.float() / temperature).log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    if not cumulative[:, -1].isfinite().all():
        raise InputError("the rollout engine's logits are not finite; the weights it was given have diverged")
    token = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    return token[:, 0], log_probs.gather(-1, token)[:, 0]


def likeliest(
    logits: Float[Tensor, "B V"], temperature: float, k: int
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """The k likeliest tokens of each row, or all that there are, and their log-probabilities."""
    found = (logits.float() / temperature).log_softmax(-1).topk(min(k, logits.shape[-1]), -1)
    return found.indices, found.values


def counter_uniform(seeds: Sequence[int], count: int) -> Float[Tensor, "B count"]:
    """Uniform numbers in [0, 1), float64: column `t` of a row depends on its seed and `t` alone.

    SplitMix64 (Steele, Lea, Flood 2014, doi.org/10.1145/2660193.2660195) read as a counter-based generator.
    The seed is mixed first, or the streams of seeds 1 and 1 + the increment would be one stream a step apart.
    Only 32 bits are used: `uniform * total < total` then holds in float64, and no token of probability 0 is
    ever drawn.
    """
    start = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((_mix(start[:, None] + steps) >> np.uint64(32)) * 2.0**-32)


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer; products wrap modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))

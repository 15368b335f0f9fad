"""Drawing a token: from a distribution, by numbers that a seed and a position decide alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mis_plugins.errors import InputError


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

"""Statistics that rejection rules compare with their bounds, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import LEAST_PROBABILITY, Statistic
from mis_plugins.correction.divergence import k1, k2, k3
from mis_plugins.correction.ratios import LARGEST_EXPONENT, LogProbs

LARGEST_K2 = math.exp(LARGEST_EXPONENT)  # where a log ratio has a square that is no float32
PROBABLE = math.log(LEAST_PROBABILITY), math.log1p(-LEAST_PROBABILITY)


def prob_diff(log_probs: LogProbs) -> Float[Tensor, " T"]:
    """pi_old - mu."""
    return log_probs.proximal.float().exp() - log_probs.behavior.float().exp()


def binary_kl(log_probs: LogProbs) -> Float[Tensor, " T"]:
    """mu log(mu / pi_old) + (1 - mu) log((1 - mu) / (1 - pi_old)): what the sampled token alone shows of the KL.

    Probabilities are taken to lie in [1e-6, 1 - 1e-6], as in OpenRLHF; it is at most `LARGEST_BINARY_KL`, 13.8.
    """
    mu, pi = (x.float().clamp(*PROBABLE) for x in (log_probs.behavior, log_probs.proximal))
    others_mu, others_pi = -mu.expm1(), -pi.expm1()
    return mu.exp() * (mu - pi) + others_mu * (others_mu.log() - others_pi.log())


STATISTICS: dict[Statistic, Callable[[Float[Tensor, " T"], LogProbs], Float[Tensor, " T"]]] = {
    "ratio": lambda log_ratio, _: log_ratio,  # compared and added up as a logarithm, see `RejectRule.limits`
    "k1": lambda log_ratio, _: k1(log_ratio),
    "k2": lambda log_ratio, _: k2(log_ratio).clamp_(max=LARGEST_K2),
    "k3": lambda log_ratio, _: k3(log_ratio),
    "binary_kl": lambda _, log_probs: binary_kl(log_probs),
    "prob_diff": lambda _, log_probs: prob_diff(log_probs),
    "abs_prob_diff": lambda _, log_probs: prob_diff(log_probs).abs(),
    "proximal_prob": lambda _, log_probs: log_probs.proximal.float().exp(),
    "behavior_prob": lambda _, log_probs: log_probs.behavior.float().exp(),
}
"""Called with the log ratio, 0 where it is not known, and both log-probs."""

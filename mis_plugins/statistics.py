"""What a rejection rule looks at, token by token."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from mis_plugins.config import Statistic
from mis_plugins.divergence import k1, k2, k3
from mis_plugins.ratios import LogProbs


def prob_diff(log_probs: LogProbs) -> Float[Tensor, " T"]:
    """pi_old - mu."""
    return log_probs.proximal.float().exp() - log_probs.behavior.float().exp()


STATISTICS: dict[Statistic, Callable[[Float[Tensor, " T"], LogProbs], Float[Tensor, " T"]]] = {
    "ratio": lambda log_ratio, _: log_ratio,  # compared and added up as a logarithm, see `RejectRule.limits`
    "k1": lambda log_ratio, _: k1(log_ratio),
    "k2": lambda log_ratio, _: k2(log_ratio),
    "k3": lambda log_ratio, _: k3(log_ratio),
    "prob_diff": lambda _, log_probs: prob_diff(log_probs),
    "abs_prob_diff": lambda _, log_probs: prob_diff(log_probs).abs(),
    "proximal_prob": lambda _, log_probs: log_probs.proximal.float().exp(),
    "behavior_prob": lambda _, log_probs: log_probs.behavior.float().exp(),
}
"""Called with the log ratio, 0 where it is not known, and both log-probs."""

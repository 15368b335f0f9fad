"""Statistics of a rejection rule: what a rule compares, token by token. A new one is a row of `STATISTICS`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mis_plugins.config.terms.divergence import LARGEST_EXPONENT, Tensor, k1, k2, k3

LEAST_PROBABILITY = 1e-6  # clamp of `binary_kl`, for the token and for all other tokens together
# binary_kl at mu = 1 - 1e-6 and pi_old = 1e-6: 13.8155.
LARGEST_BINARY_KL = (1 - 2 * LEAST_PROBABILITY) * -math.log(LEAST_PROBABILITY / (1 - LEAST_PROBABILITY))
PROBABLE = math.log(LEAST_PROBABILITY), math.log1p(-LEAST_PROBABILITY)
LARGEST_K2 = math.exp(LARGEST_EXPONENT)  # cap for a log ratio whose square overflows float32


@dataclass(frozen=True)
class Evidence:
    """What a statistic may be made of, one entry a token.

    log_ratio: log pi_old - log mu, 0 where the token is not usable.
    proximal, behavior: log-probs under pi_old and mu.
    routes: number of layers that route the token to other experts than the engine; None where nothing watched.
    """

    log_ratio: Tensor
    proximal: Tensor
    behavior: Tensor
    routes: Tensor | None = None


@dataclass(frozen=True)
class Statistic:
    """One statistic of a token, with everything that the pack knows of it.

    value: makes the statistic of each token from the evidence.
    low, high: the open range of a token's value; a bound outside would drop nothing or everything.
    formula, words: the value for a reader; `{trainer}` is the policy that is compared with mu.
    on_policy: the value where trainer and rollout engine agree; None where it has no such value.
    reads_probabilities: whether the value comes from the log-probs themselves; it is then set to 0 at unusable tokens.
    reads_routes: whether the value comes from the token's routes, which a watch over the routers knows; it is
        then set to 0 at unusable tokens.
    factor: the letter of a value that multiplies over a unit, None where values add up. With a letter,
        `value` is the logarithm, which is compared and added up so that nothing overflows.
    row: the name of the total that the values add up to, where it is not the statistic's own.
    """

    value: Callable[[Evidence], Tensor]
    low: float
    high: float
    formula: str
    words: str
    on_policy: float | None = 0
    reads_probabilities: bool = False
    reads_routes: bool = False
    factor: str | None = None
    row: str | None = None


def prob_diff(proximal: Tensor, behavior: Tensor) -> Tensor:
    """pi_old - mu."""
    return proximal.float().exp() - behavior.float().exp()


def binary_kl(proximal: Tensor, behavior: Tensor) -> Tensor:
    """mu log(mu / pi_old) + (1 - mu) log((1 - mu) / (1 - pi_old)): what the sampled token alone shows of the KL.

    Probabilities are taken to lie in [1e-6, 1 - 1e-6], as in OpenRLHF; it is at most `LARGEST_BINARY_KL`, 13.8.
    """
    mu, pi = (x.float().clamp(*PROBABLE) for x in (behavior, proximal))
    others_mu, others_pi = -mu.expm1(), -pi.expm1()
    return mu.exp() * (mu - pi) + others_mu * (others_mu.log() - others_pi.log())


def _routes(token: Evidence) -> Tensor:
    assert token.routes is not None, "a hook refuses the statistic where no watch knows the routes"
    return token.routes


_of_probabilities = partial(Statistic, reads_probabilities=True)

STATISTICS: dict[str, Statistic] = {
    "ratio": Statistic(lambda t: t.log_ratio, 0, math.inf, "r_t", "ratio", on_policy=1, factor="r", row="log_ratio"),
    "k1": Statistic(lambda t: k1(t.log_ratio), -math.inf, math.inf, "-log r_t", "k1 (-log ratio)"),
    "k2": Statistic(
        lambda t: k2(t.log_ratio).clamp_(max=LARGEST_K2), 0, math.inf, "(log r_t)^2 / 2", "k2 ((log ratio)^2 / 2)"
    ),
    "k3": Statistic(lambda t: k3(t.log_ratio), 0, math.inf, "(r_t - 1 - log r_t)", "k3 (ratio - 1 - log ratio)"),
    "binary_kl": _of_probabilities(
        value=lambda t: binary_kl(t.proximal, t.behavior),
        low=0,
        high=LARGEST_BINARY_KL,
        formula="(mu * log(mu / {trainer}) + (1 - mu) * log((1 - mu) / (1 - {trainer})))",
        words="binary KL divergence (mu to {trainer}, the sampled token against all others)",
    ),
    "prob_diff": _of_probabilities(
        value=lambda t: prob_diff(t.proximal, t.behavior),
        low=-1,
        high=1,
        formula="({trainer} - mu)",
        words="probability difference ({trainer} - mu)",
    ),
    "abs_prob_diff": _of_probabilities(
        value=lambda t: prob_diff(t.proximal, t.behavior).abs(),
        low=0,
        high=1,
        formula="|{trainer} - mu|",
        words="absolute probability difference |{trainer} - mu|",
    ),
    "proximal_prob": _of_probabilities(
        value=lambda t: t.proximal.float().exp(),
        low=0,
        high=1,
        formula="{trainer}",
        words="probability under the trainer ({trainer})",
        on_policy=None,
    ),
    "behavior_prob": _of_probabilities(
        lambda t: t.behavior.float().exp(), 0, 1, "mu", "probability under the rollout engine (mu)", on_policy=None
    ),
    "route": Statistic(
        _routes, 0, math.inf, "n_t", "number of layers with other experts than the engine's", reads_routes=True
    ),
}
"""By the name that a config gives in `statistic`."""


def row_of(name: str) -> str:
    """Name of the total that a statistic adds up to."""
    return STATISTICS[name].row or name


def row_names() -> list[str]:
    """Names of the totals that the statistics add up to."""
    return [row_of(name) for name in STATISTICS]


def statistic_of(row: str) -> str:
    """The statistic that adds up to the total of this name."""
    return next(name for name in STATISTICS if row_of(name) == row)

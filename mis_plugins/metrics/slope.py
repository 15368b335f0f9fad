"""Detects log-probs that were processed on one side only: by a temperature, or by top-p and its like.

Two quantities, both from sums that add.

1. *The slope of log pi_old on log mu*. If mu is sampled at temperature T and the trainer's log-probs are raw,
   log pi_old = T log mu + T log Z(T) - log Z(1): within one context a line of slope T. Over contexts the last terms
   move with the entropy and pull the slope towards 1, the more the more peaked the policies are. The slope tells
   on which side of 1 the temperature lies; T itself is one to five times as far from 1. Noise of one side
   flattens the least squares slope of y on x and steepens the inverse of that of x on y, while a temperature moves both
   alike; hence what counts is the end of the two that is nearer to 1. A coarse engine samples from a policy that noise
   has flattened, which looks like a little of a temperature above 1; so above 1 the slope must also exceed twice the
   share of variance that is not explained, of which noise gives at most once. A cut, see below, also steepens it.

2. *The mean ratio*. The mean of pi_old / mu over samples of mu is 1, whatever the two policies are, as long as mu is
   what was sampled from and covers pi_old; and since each token's ratio less 1 has mean 0 given all tokens before it,
   the standard error of the mean needs no independence. Above 1: the engine sampled from something else than it
   reports (raw log-probs of a policy that is sampled at a temperature; log-probs of other weights). Below 1: mu is cut
   off (top-p, top-k, min-p), and the mean is the mass that is left; or the trainer finds nearly every token less likely
   than the engine did, as one of other weights does. Where few ratios carry the mean, the mean of log pi_old - log mu
   tells that: below -1 a token.

Selection of samples after sampling (by their reward, say) breaks this; it has to be strong to matter here.

`lab/pages/slope.md` has both for simulated errors (`python tests/support/slope_simulation.py` prints them).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Half of what a temperature of 0.9 or 1.1 does to the most peaked policies simulated; thirty times what int8 does.
SLOPE_MARGIN = 0.02
RATIO_MARGIN = 0.005
STANDARD_ERRORS = 6.0
UNLIKELY = 1.0  # nats a token: three times the largest mean of an int3 engine
LEAST_TO_RELATE = 3  # tokens
LEAST_ESS = 0.5  # with a smaller share the tail of the ratios decides their mean
# With fewer tokens a few unlikely ones decide the slope, and its error, which assumes even noise, comes out too small.
LEAST_TOKENS = 16_000


@dataclass(frozen=True)
class Relation:
    """How log pi_old follows log mu over the tokens of a step.

    slope: slope of the least squares line of log pi_old on log mu.
    inverse: inverse slope of the least squares line of log mu on log pi_old.
    slope_error: standard error of either slope.
    unexplained: share of the variance that the line leaves, 1 - correlation^2.
    mean_log_ratio: mean of log pi_old - log mu.
    mean_ratio, mean_ratio_error: mean of pi_old / mu, and its standard error.
    ess: effective sample size of the ratios, as a share of the tokens.
    """

    tokens: float
    slope: float
    inverse: float
    slope_error: float
    unexplained: float
    mean_log_ratio: float
    mean_ratio: float
    mean_ratio_error: float
    ess: float

    @property
    def nearest(self) -> float:
        """The number between both slopes that is nearest to 1."""
        low, high = sorted((self.slope, self.inverse))
        return min(max(1.0, low), high)

    @property
    def implied_temperature(self) -> float:
        """Temperature of mu against pi_old that both slopes imply: their geometric mean."""
        return math.sqrt(self.slope * self.inverse)


RELATED_SUMS = (
    "behavior", "proximal", "behavior_squared", "proximal_squared", "log_prob_product", "ratio", "ratio_squared"
)  # fmt: skip


def relation(sums: Mapping[str, float]) -> Relation | None:
    """The relation that follows from the sums `RELATED_SUMS` over "usable" tokens; None where log-probs do not vary."""
    n = sums["usable"]
    if n < LEAST_TO_RELATE:
        return None
    mean_x, mean_y = sums["behavior"] / n, sums["proximal"] / n
    xx = sums["behavior_squared"] / n - mean_x**2
    yy = sums["proximal_squared"] / n - mean_y**2
    xy = sums["log_prob_product"] / n - mean_x * mean_y
    if min(xx, yy) <= 1e-12 * (mean_x**2 + mean_y**2) or xy <= 0:
        return None
    unexplained = max(1 - xy * xy / (xx * yy), 0.0)
    ratio, squared = sums["ratio"] / n, sums["ratio_squared"] / n
    return Relation(
        tokens=n,
        slope=xy / xx,
        inverse=yy / xy,
        slope_error=math.sqrt(unexplained * yy / xx / (n - 2)),
        unexplained=unexplained,
        mean_log_ratio=mean_y - mean_x,
        mean_ratio=ratio,
        mean_ratio_error=math.sqrt(max(squared - ratio**2, 0.0) / (n - 1)),
        ess=ratio**2 / squared,
    )


def scaled(related: Relation) -> bool:
    """Whether one side is scaled by a temperature."""
    off = related.nearest - 1
    if related.tokens < LEAST_TOKENS or abs(off) < max(SLOPE_MARGIN, STANDARD_ERRORS * related.slope_error):
        return False
    by_noise = off < 2 * related.unexplained and not not_sampled_from(related)
    return off < 0 or not (by_noise or cut_off(related))


def not_sampled_from(related: Relation) -> bool:
    """Whether tokens were sampled from something else than the log-probs reported."""
    return related.mean_ratio - 1 > max(RATIO_MARGIN, STANDARD_ERRORS * related.mean_ratio_error)


def cut_off(related: Relation) -> bool:
    """Whether the engine samples from a part of the vocabulary only, and renormalizes."""
    off = 1 - related.mean_ratio
    return off > max(RATIO_MARGIN, STANDARD_ERRORS * related.mean_ratio_error) and related.ess > LEAST_ESS


def unlikely(related: Relation) -> bool:
    """Whether the trainer finds the sampled tokens unlikely, and no cut of the engine's explains it."""
    return related.mean_log_ratio < -UNLIKELY and not cut_off(related)


def means_unlikely(sums: Mapping[str, float]) -> bool:
    """Whether the trainer finds the sampled tokens unlikely by the means alone, where no line relates the log-probs."""
    return sums["usable"] >= LEAST_TO_RELATE and mean_log_ratio(sums) < -UNLIKELY


def mean_log_ratio(sums: Mapping[str, float]) -> float:
    """The mean of log pi_old - log mu over the tokens of `sums`."""
    return (sums["proximal"] - sums["behavior"]) / max(sums["usable"], 1)


def is_suspect(sums: Mapping[str, float]) -> bool:
    """Whether the log-probs that `sums` add up show an error, which the messages in `processed.py` describe."""
    related = relation(sums)
    if related is None:
        return means_unlikely(sums)
    return cut_off(related) or unlikely(related) or not_sampled_from(related) or scaled(related)

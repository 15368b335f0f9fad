"""What a quantity is: a number of each token, sequence or segment, and the metrics of a step that it is reduced to.

A record says once what the numbers are and what is taken of them. The totals that a step keeps (sums, squares,
extremes, sketches), the names of the metrics and their values at the end of the step follow from the record.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from mis_plugins.correction.ratios import LARGEST_EXPONENT, LOG_RATIO_CLAMP
from mis_plugins.metrics import sketch
from mis_plugins.metrics.slope import Relation, relation

ROUNDING = 1e-6  # of a mean: a spread below is that of the rounding of sums
QUANTILES = (25, 50, 75, 95, 99)


@dataclass(frozen=True)
class Step:
    """Totals of one optimizer step, as numbers. A number that cannot be known, such as a mean of nothing, is NaN.

    sums: sum of each quantity and, under `NAME_squared`, of its squares; under `PLACE/NAME` over a part of its members.
    maxima: largest value of each quantity (`NAME_max`), and of the negated quantity (`NAME_min`).
    sketches: histogram of each quantity that has percentiles.
    log_products: for each power, the log of the sum over sequences of that power of a sequence's ratio.
    """

    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    sketches: Mapping[str, Float[Tensor, " B"]]
    log_products: Mapping[int, float]

    def over(self, name: str, count: str) -> float:
        """Quotient of a sum and a count."""
        return ratio_of(self.sums[name], self.sums[count])

    def smallest(self, name: str) -> float:
        return -_finite(self.maxima[f"{name}_min"])

    def largest(self, name: str) -> float:
        return _finite(self.maxima[f"{name}_max"])

    def share(self, name: str, count: str) -> float:
        """Effective sample size of x as a share of a count: (sum x)^2 / (n sum x^2)."""
        return ratio_of(self.sums[name] ** 2, self.sums[count] * self.sums[f"{name}_squared"])

    def spread(self, name: str, count: str, unbiased: bool = False) -> float:
        """Standard deviation from a sum and a sum of squares."""
        n = self.sums[count]
        if n == 0 or (unbiased and n == 1):
            return math.nan
        variance = max(self.over(f"{name}_squared", count) - self.over(name, count) ** 2, 0)
        return math.sqrt(variance * n / (n - 1) if unbiased else variance)

    def correlation(self, first: str, second: str, product: str) -> float:
        """Pearson correlation of two quantities over usable tokens; NaN where one varies by no more than rounding."""
        mean, other_mean = (self.over(name, "usable") for name in (first, second))
        spread, other_spread = (self.spread(name, "usable") for name in (first, second))
        if spread <= ROUNDING * abs(mean) or other_spread <= ROUNDING * abs(other_mean):
            return math.nan
        return ratio_of(self.over(product, "usable") - mean * other_mean, spread * other_spread)

    def related(self, name: str) -> float:
        """A number of the `Relation` between both sides' log-probs."""
        return math.nan if self._relation is None else getattr(self._relation, name)

    @cached_property
    def _relation(self) -> Relation | None:
        return relation(self.sums)


@dataclass(frozen=True)
class Reduction:
    """What a metric takes of a quantity at the end of a step.

    needs: the totals that it is made of: words out of `sum`, `squares`, `ends`, `sketch`.
    take: a function of the step, of the quantity's name and of the name of the count that a mean divides by.
    at: the part of the members that enter (`turn_1/`, `lag_3/`, `tokens/`); all where it is empty.
    """

    needs: str
    take: Callable[[Step, str, str], float]
    at: str = ""

    def within(self, place: str) -> "Reduction":
        """The reduction over one part of the members."""
        return replace(self, at=place)

    def over(self, count: str) -> "Reduction":
        """The reduction with another count than the quantity's own."""
        return replace(self, take=lambda s, x, _: self.take(s, x, count))

    def then(self, scale: Callable[[float], float]) -> "Reduction":
        """A function of what the reduction takes."""
        return replace(self, take=lambda s, x, n: scale(self.take(s, x, n)))

    def of(self, step: Step, name: str, count: str) -> float:
        """What is taken of a quantity of this name, whose means divide by this count."""
        return self.take(step, self.at + name, self.at + count)


Metrics = dict[str, Reduction]
Record = tuple[str, Metrics, str]
"""What a quantity is without its values: its name, its metrics, and the count that its means divide by."""


class Quantity(NamedTuple):
    """A number of each member of a population, and the metrics made of it.

    values: the numbers, finite where a member does not enter.
    metrics: the reductions of the quantity by the names of their metrics.
    over: the count that its means divide by.
    also: totals that metrics of several quantities, or warnings, read: words of `Reduction.needs`.
    """

    name: str
    values: Shaped[Tensor, " M"]
    metrics: Metrics = {}
    over: str = "usable"
    also: str = ""


@cache
def needed(*needs: str) -> frozenset[str]:
    """The totals that a step keeps of a quantity, from `Quantity.also` and the `needs` of its metrics."""
    return frozenset(" ".join(needs).split())


def percentiles(stem: str, scale: Callable[[float], float] = float) -> Metrics:
    """Percentiles of a quantity, their names `STEM_p50` and so on."""
    quantiles = {
        p: Reduction("sketch", lambda s, x, _, p=p: sketch.quantile(s.sketches[x], p / 100)) for p in QUANTILES
    }
    return {f"{stem}_p{p}": reduction.then(scale) for p, reduction in quantiles.items()}


total = Reduction("sum", lambda s, x, _: s.sums[x])
mean = Reduction("sum", lambda s, x, n: s.over(x, n))
minus_mean = mean.then(float.__neg__)
half_mean = mean.then(lambda x: x / 2)
rest = mean.then(lambda x: 1 - x)
mean_by_tokens = mean.within("tokens/")
mean_square = Reduction("sum squares", lambda s, x, n: s.over(f"{x}_squared", n))
chi2 = mean_square.then(lambda x: x - 1)
share = Reduction("sum squares", lambda s, x, n: s.share(x, n))
std = Reduction("sum squares", lambda s, x, n: s.spread(x, n))
std_by_tokens = std.within("tokens/")
unbiased_std = Reduction("sum squares", lambda s, x, n: s.spread(x, n, unbiased=True))
smallest = Reduction("ends", lambda s, x, _: s.smallest(x))
largest = Reduction("ends", lambda s, x, _: s.largest(x))
size = Reduction("ends", lambda s, x, _: max(s.largest(x), -s.smallest(x)))
from_one = Reduction("ends", lambda s, x, _: max(s.largest(x) - 1, 1 - s.smallest(x)))


def ratio_of(part: float, whole: float) -> float:
    """Quotient of two numbers; NaN where the divisor is 0."""
    return part / whole if whole else math.nan


def log_of(x: float) -> float:
    """Logarithm of x; NaN where x is not above 0."""
    return math.log(x) if x > 0 else math.nan


def exp_of(x: float) -> float:
    """Exponential of x, at most e^80; NaN of NaN."""
    return math.exp(min(x, LARGEST_EXPONENT))


def exp_clamped(log_ratio: float) -> float:
    """Ratio from a log ratio clamped to +-LOG_RATIO_CLAMP, as the ratio of a token is; NaN of NaN."""
    return math.exp(min(max(log_ratio, -LOG_RATIO_CLAMP), LOG_RATIO_CLAMP))


def known(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are known."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.nan

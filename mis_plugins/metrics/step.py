"""The totals of one optimizer step, on the host, and the means, extremes and spreads that its metrics take of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.ratios import LARGEST_EXPONENT, LOG_RATIO_CLAMP
from mis_plugins.metrics import sketch
from mis_plugins.metrics.partials import POWERS, SKETCHES, TURN_SUMS, WINDOW, WINDOWS, Partials
from mis_plugins.metrics.slope import Relation, relation

OLDEST_AGE = 7  # of the metrics by age; all older tokens belong to it


@dataclass(frozen=True)
class Step:
    """Totals of one optimizer step. A number that cannot be known, such as a mean of nothing, is NaN.

    sums: sum of each row of `metrics/rows.py`.
    maxima: maximum of each row. A row for a minimum is negated.
    histograms: one sketch for each of `SKETCHES` that the config has.
    log_products: for each of `POWERS`, the log of the sum over sequences of that power of a sequence's ratio.
    ages: sums over usable tokens of each age up to `OLDEST_AGE`.
    turns: sums over usable tokens of each turn, from 1 to `TURNS`.
    """

    config: CorrectionConfig
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    histograms: Mapping[str, Int[Tensor, " B"]]
    log_products: Mapping[int, float]
    ages: list[Mapping[str, float]]
    turns: Mapping[int, Mapping[str, float]]

    @classmethod
    def of(cls, partials: Partials, config: CorrectionConfig) -> Step:
        """Totals of the merged partials of a step, which should be on the host by now."""
        return cls(
            config,
            partials.named_sums,
            dict(zip(partials.maximum_names, partials.maxima.tolist(), strict=True)),
            dict(zip(SKETCHES, partials.histograms.cpu().unbind(), strict=False)),  # OPSM's come last
            {p: _log_sum(row) for p, row in zip(POWERS, partials.products.tolist(), strict=True)},
            partials.by_age.up_to(OLDEST_AGE),
            {
                turn: dict(zip(TURN_SUMS, column, strict=True))
                for turn, column in enumerate(partials.by_turn.T.tolist(), 1)
            },
        )

    def over(self, name: str, count: str) -> float:
        """Quotient of a sum and a count of this step."""
        return ratio_of(self.sums.get(name, math.nan), self.sums[count])

    def over_tokens(self, name: str) -> float:
        return self.over(name, "usable")

    def over_valid(self, name: str) -> float:
        return self.over(name, "valid")

    def over_sequences(self, name: str) -> float:
        return self.over(name, "any_usable")

    def over_units(self, name: str) -> float:
        """Mean over the units of the weight: sequences where it is one a sequence, else tokens."""
        weight = self.config.weight
        return self.over_sequences(name) if weight and weight.by_sequence else self.over_tokens(name)

    def over_rule(self, rule: str, row: str, count: str = "_count") -> float:
        """Mean of a row of one rule. A row that is missing, because the rule lacks that bound, adds up to 0."""
        return ratio_of(self.sums.get(rule + row, 0.0), self.sums[rule + count])

    def over_age(self, name: str, age: int) -> float:
        """Mean over the tokens of one age."""
        return ratio_of(self.ages[age][name], self.ages[age]["tokens"])

    def over_turn(self, name: str, turn: int) -> float:
        """Mean over the tokens of one turn; NaN where no response has a second one, as then it is the mean of all."""
        return ratio_of(self.turns[turn][name], self.turns[turn]["tokens"]) if self.has_turns else math.nan

    @property
    def has_turns(self) -> bool:
        """Whether a response has a usable token after its first turn."""
        return any(sums["tokens"] for turn, sums in self.turns.items() if turn > 1)

    def effective_share(self, name: str, count: str) -> float:
        """Effective sample size of x as a share of a count: (sum x)^2 / (n sum x^2)."""
        total, squares = (self.sums.get(row, math.nan) for row in (name, f"{name}_squared"))
        return ratio_of(total**2, self.sums[count] * squares)

    def largest(self, name: str) -> float:
        return _finite(self.maxima[f"{name}_max"])

    def smallest(self, name: str) -> float:
        return _finite(-self.maxima[f"{name}_min"])

    def largest_size(self, name: str) -> float:
        """Largest absolute value of a row."""
        return max(self.largest(name), -self.smallest(name))

    def over_departures(self, name: str) -> float:
        """Mean over the sequences for which OPSM knows the number; NaN where OPSM is off."""
        return ratio_of(self.sums.get(name, math.nan), self.sums.get(f"{name}_count", math.nan))

    def quantile(self, name: str, percent: int) -> float:
        """Percentile of a row that has a sketch; NaN where the config has no such row."""
        if name not in self.histograms:
            return math.nan
        return sketch.quantile(self.histograms[name], percent / 100)

    def spread(self, name: str, squared: str, count: float, unbiased: bool = False) -> float:
        """Standard deviation from a sum and a sum of squares."""
        if count == 0 or (unbiased and count == 1):
            return math.nan
        mean = self.sums[name] / count
        variance = max(self.sums[squared] / count - mean * mean, 0)
        return math.sqrt(variance * count / (count - 1) if unbiased else variance)

    def correlation(self, first: str, second: str, product: str) -> float:
        """Pearson correlation of two rows over usable tokens."""
        n = self.sums["usable"]
        spreads = self.spread(first, f"{first}_squared", n) * self.spread(second, f"{second}_squared", n)
        means = self.over_tokens(first) * self.over_tokens(second)
        return ratio_of(self.over_tokens(product) - means, spreads)

    def related(self, name: str) -> float:
        """A number of the `Relation` between both sides' log-probs."""
        return math.nan if self._relation is None else getattr(self._relation, name)

    @cached_property
    def _relation(self) -> Relation | None:
        return relation(self.sums)


def ratio_of(part: float, whole: float) -> float:
    """Quotient of two numbers; NaN where the divisor is 0."""
    return part / whole if whole else math.nan


def log_of(x: float) -> float:
    """Logarithm of x; NaN where x is not above 0."""
    return math.log(x) if x > 0 else math.nan


def exp_of(x: float) -> float:
    """Exponential of x, at most e^80; NaN of NaN."""
    return math.nan if math.isnan(x) else math.exp(min(x, LARGEST_EXPONENT))


def exp_clamped(log_ratio: float) -> float:
    """Ratio from a log ratio clamped to +-LOG_RATIO_CLAMP, as the ratio of a token is; NaN of NaN."""
    if math.isnan(log_ratio):
        return math.nan
    return math.exp(max(-LOG_RATIO_CLAMP, min(LOG_RATIO_CLAMP, log_ratio)))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.nan


def _log_sum(windows: list[float]) -> float:
    """Logarithm of the sum over all windows; NaN where every window is 0."""
    logs = [math.log(x) + WINDOW * (i - WINDOWS // 2) for i, x in enumerate(windows) if x > 0]
    if not logs:
        return math.nan
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logs))

"""What one optimizer step added up to, on the host, and the means, extremes and spreads that its metrics take of it."""

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
from mis_plugins.metrics.partials import LAG_ROWS, POWERS, SKETCHES, WINDOW, WINDOWS, Partials
from mis_plugins.metrics.slope import Relation, relation


@dataclass(frozen=True)
class Step:
    """The rows of `metrics/rows.py`, added up. What cannot be known of them (a mean of nothing) is NaN.

    maxima: minima are negated there.
    log_products: the log of the sum over sequences of `POWERS` of the product of their ratios.
    lags: `LAG_ROWS` by how many weight versions the token is behind.
    """

    config: CorrectionConfig
    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    histograms: Mapping[str, Int[Tensor, " B"]]
    log_products: Mapping[int, float]
    lags: list[Mapping[str, float]]

    @classmethod
    def of(cls, partials: Partials, config: CorrectionConfig) -> Step:
        """Reads the partials, which should be on the host by now."""
        lags = partials.lags.T.tolist()
        return cls(
            config,
            partials.named_sums,
            dict(zip(partials.maximum_names, partials.maxima.tolist(), strict=True)),
            dict(zip(SKETCHES, partials.histograms.cpu().unbind(), strict=False)),  # OPSM's come last
            {p: _log_sum(row) for p, row in zip(POWERS, partials.products.tolist(), strict=True)},
            [dict(zip(LAG_ROWS, row, strict=True)) for row in lags],
        )

    def over(self, name: str, count: str) -> float:
        """A sum over a count of the same step."""
        return ratio_of(self.sums.get(name, math.nan), self.sums[count])

    def over_tokens(self, name: str) -> float:
        return self.over(name, "usable")

    def over_valid(self, name: str) -> float:
        return self.over(name, "valid")

    def over_sequences(self, name: str) -> float:
        return self.over(name, "seen")

    def over_units(self, name: str) -> float:
        """Of what the weight belongs to: tokens or sequences."""
        weight = self.config.weight
        return self.over_sequences(name) if weight and weight.by_sequence else self.over_tokens(name)

    def over_rule(self, rule: str, row: str, count: str = "_count") -> float:
        """Of one rule; a row that it lacks, which is that of a bound it does not have, adds up to 0."""
        return ratio_of(self.sums.get(rule + row, 0.0), self.sums[rule + count])

    def over_lag(self, name: str, lag: int) -> float:
        """Over the tokens that are this many versions behind."""
        return ratio_of(self.lags[lag][name], self.lags[lag]["tokens"])

    def effective_share(self, name: str, count: str) -> float:
        """(sum x)^2 / (n sum x^2)."""
        total, squares = (self.sums.get(row, math.nan) for row in (name, f"{name}_squared"))
        return ratio_of(total**2, self.sums[count] * squares)

    def largest(self, name: str) -> float:
        return _finite(self.maxima[f"{name}_max"])

    def smallest(self, name: str) -> float:
        return _finite(-self.maxima[f"{name}_min"])

    def largest_size(self, name: str) -> float:
        """Of the absolute values."""
        return max(self.largest(name), -self.smallest(name))

    def over_departures(self, name: str) -> float:
        """Mean over the sequences of which OPSM knows it; NaN without OPSM."""
        return ratio_of(self.sums.get(name, math.nan), self.sums.get(f"{name}_count", math.nan))

    def quantile(self, name: str, percent: int) -> float:
        """NaN of what the config does not have."""
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
        """Pearson's, over tokens."""
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
    """NaN of nothing."""
    return part / whole if whole else math.nan


def log_of(x: float) -> float:
    """NaN of what has none."""
    return math.log(x) if x > 0 else math.nan


def exp_of(x: float) -> float:
    """At most e^80."""
    return math.nan if math.isnan(x) else math.exp(min(x, LARGEST_EXPONENT))


def exp_clamped(log_ratio: float) -> float:
    """As of a token: its argument clamped to +-LOG_RATIO_CLAMP."""
    if math.isnan(log_ratio):
        return math.nan
    return math.exp(max(-LOG_RATIO_CLAMP, min(LOG_RATIO_CLAMP, log_ratio)))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.nan


def _log_sum(windows: list[float]) -> float:
    """log of the sum over all windows; NaN of nothing."""
    logs = [math.log(x) + WINDOW * (i - WINDOWS // 2) for i, x in enumerate(windows) if x > 0]
    if not logs:
        return math.nan
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logs))

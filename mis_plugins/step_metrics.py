"""The metrics of one optimizer step, each a function of what its micro-batches added up to.

`docs/metrics.md` is made of the docstrings below, by `python -m mis_plugins.metric_docs`. Notation: r_t = pi_old(y_t) /
mu(y_t), trainer over rollout engine, of a token; w_t its bounded weight; means over tokens are over those in the loss
mask with finite log-probs, means over sequences over those with such a token. log r is clamped at +-20 inside exp.
What cannot be known (a mean of nothing) is NaN, and is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from mis_plugins import sketch
from mis_plugins.config import CorrectionConfig
from mis_plugins.partials import LAG_ROWS, LAGS, POWERS, SKETCHES, WINDOW, WINDOWS, Partials
from mis_plugins.ratios import LARGEST_EXPONENT
from mis_plugins.slope import relation
from mis_plugins.step_rows import LOG_RATIO_TAILS, PROB_DIFF_TAILS, numbered

QUANTILES = (25, 50, 75, 95, 99)


@dataclass(frozen=True)
class Step:
    """What a step added up to, on the host. Minima are negated in `maxima`."""

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
            dict(zip(SKETCHES, partials.histograms.cpu().unbind(), strict=True)),
            {p: _log_sum(row) for p, row in zip(POWERS, partials.products.tolist(), strict=True)},
            [dict(zip(LAG_ROWS, row, strict=True)) for row in lags],
        )

    def over_tokens(self, name: str) -> float:
        return ratio_of(self.sums.get(name, math.nan), self.sums["usable"])

    def over_valid(self, name: str) -> float:
        return ratio_of(self.sums.get(name, math.nan), self.sums["valid"])

    def over_sequences(self, name: str) -> float:
        return ratio_of(self.sums.get(name, math.nan), self.sums["seen"])

    def over_units(self, name: str) -> float:
        """Of what the weight belongs to: tokens or sequences."""
        weight = self.config.weight
        return self.over_sequences(name) if weight and weight.by_sequence else self.over_tokens(name)

    def largest(self, name: str) -> float:
        return _finite(self.maxima[f"{name}_max"])

    def smallest(self, name: str) -> float:
        return _finite(-self.maxima[f"{name}_min"])

    def quantile(self, name: str, percent: int) -> float:
        return sketch.quantile(self.histograms[name], percent / 100)

    def spread(self, name: str, squared: str, count: float, unbiased: bool = False) -> float:
        """Standard deviation from a sum and a sum of squares."""
        if count == 0 or (unbiased and count == 1):
            return math.nan
        mean = self.sums[name] / count
        variance = max(self.sums[squared] / count - mean * mean, 0)
        return math.sqrt(variance * count / (count - 1) if unbiased else variance)


Metric = Callable[[Step], float]
METRICS: dict[str, Metric] = {}
"""Those with one value a step."""
SECTIONS: dict[str, list[str]] = {}
"""Their names, as the document has them."""


def section(title: str) -> None:
    SECTIONS[title] = []


def metric(function: Metric) -> Metric:
    METRICS[function.__name__] = function
    SECTIONS[list(SECTIONS)[-1]].append(function.__name__)
    return function


def finalize(partials: Partials, config: CorrectionConfig) -> dict[str, float]:
    """Every metric of the step that is known. Reads the partials."""
    step = Step.of(partials, config)
    values = {name: function(step) for name, function in METRICS.items()}
    values |= {name: function(step, *place) for name, (function, place) in families(config).items()}
    return {name: value for name, value in values.items() if not math.isnan(value)}


section("How much there was")


@metric
def tokens(s: Step) -> float:
    """Number of tokens in the loss mask.

    Range: at least 0.
    Bad: far from the batch size times the usual length.
    Do: look at the loss masks and at the sample filter.
    """
    return s.sums["valid"]


@metric
def sequences(s: Step) -> float:
    """Number of sequences with a token in the loss mask.

    Range: at least 0.
    Bad: below the global batch size.
    Do: look for samples whose mask is all 0 (truncated, removed by a filter).
    """
    return s.sums["live"]


@metric
def nonfinite_train_tokens(s: Step) -> float:
    """Number of tokens in the loss mask whose trainer log-prob is NaN or infinite.

    Range: 0 and above.
    Bad: above 0. The host's loss is already not finite.
    Do: look for overflow in the trainer (fp16 logits, a diverged step); nothing here can mend it.
    """
    return s.sums["nonfinite_train"]


@metric
def nonfinite_rollout_tokens(s: Step) -> float:
    """Number of tokens in the loss mask whose rollout log-prob is NaN or infinite.

    Range: 0 and above.
    Bad: above 0. They get weight 0.
    Do: find out which samples (mis_plugins.mis.drop_broken_samples names them); often a custom rollout function.
    """
    return s.sums["nonfinite_rollout"]


section("How far the two policies are apart, token by token")


@metric
def kl_k1(s: Step) -> float:
    """KL(mu || pi_old), estimator k1: mean over tokens of -log r_t.

    Range: any; its expectation is at least 0.
    Bad: clearly below 0, which samples of mu cannot give: the log-probs are then not those it sampled with.
    Do: see `slope`; else compare with kl_k3, which has less noise.
    """
    return -s.over_tokens("log_ratio")


@metric
def kl_k2(s: Step) -> float:
    """KL(mu || pi_old), estimator k2: mean over tokens of (log r_t)^2 / 2.

    Range: 0 and above.
    Bad: as kl_k3; far above it when a few tokens differ much.
    Do: as kl_k3; look at the tails.
    """
    return s.over_tokens("k2")


@metric
def kl_k3(s: Step) -> float:
    """KL(mu || pi_old), estimator k3: mean over tokens of r_t - 1 - log r_t.

    Range: 0 and above; 1e-5 to 1e-3 for a bf16 engine that matches, 0 for an exact one.
    Bad: above 1e-2, or a rise over days.
    Do: correct (token TIS first), raise the engine's precision, sync weights more often.
    """
    return s.over_tokens("k3")


@metric
def reverse_kl_k1(s: Step) -> float:
    """KL(pi_old || mu), estimator k1, by importance weighting: mean over tokens of r_t log r_t.

    Range: any; its expectation is at least 0.
    Bad: far above kl_k3: pi_old puts mass where mu seldom samples.
    Do: as kl_k3; look at ratio_max and at the upper tail.
    """
    return s.over_tokens("reverse_k1")


@metric
def reverse_kl_k2(s: Step) -> float:
    """KL(pi_old || mu), estimator k2, by importance weighting: mean over tokens of r_t (log r_t)^2 / 2.

    Range: 0 and above.
    Bad: as reverse_kl_k1.
    Do: as reverse_kl_k1.
    """
    return s.over_tokens("reverse_k2")


@metric
def reverse_kl_k3(s: Step) -> float:
    """KL(pi_old || mu), estimator k3, by importance weighting: mean over tokens of r_t log r_t - r_t + 1.

    Range: 0 and above.
    Bad: as reverse_kl_k1.
    Do: as reverse_kl_k1.
    """
    return s.over_tokens("reverse_k3")


@metric
def log_prob_diff_abs_mean(s: Step) -> float:
    """Mean over tokens of |log pi_old - log mu|.

    Range: 0 and above; 0.01 to 0.03 for bf16.
    Bad: above 0.1, or a rise.
    Do: as kl_k3.
    """
    return s.over_tokens("abs_log_ratio")


@metric
def log_prob_diff_abs_max(s: Step) -> float:
    """Largest |log pi_old - log mu| of a token.

    Range: 0 and above.
    Bad: above 5: a token that one policy finds 150 times as likely.
    Do: find the token; a veto or a token mask drops such ones.
    """
    return max(s.largest("log_ratio"), -s.smallest("log_ratio"))


@metric
def ratio_mean(s: Step) -> float:
    """Mean over tokens of r_t before any bound.

    Range: above 0; its expectation is 1 when mu is what was sampled from, and the mass of the nucleus under top-p.
    Bad: clearly above 1: these are not the log-probs sampled with. Clearly below 1: mu is cut off (top-p, top-k).
    Do: have the engine return the log-probs of what it samples from, and the trainer compute the same.
    """
    return s.over_tokens("ratio")


@metric
def ratio_std(s: Step) -> float:
    """Standard deviation over tokens of r_t before any bound.

    Range: 0 and above; near the square root of 2 kl_k3.
    Bad: above 1.
    Do: bound the weights; look at ratio_max.
    """
    return s.spread("ratio", "ratio_squared", s.sums["usable"])


@metric
def ratio_min(s: Step) -> float:
    """Smallest r_t before any bound.

    Range: 2e-9, where the clamp acts, to 1.
    Bad: below 1e-4: the engine sampled a token that the trainer thinks impossible.
    Do: a veto, {over: min, lower: 1e-4}, drops such sequences.
    """
    return _exp(s.smallest("log_ratio"))


@metric
def ratio_max(s: Step) -> float:
    """Largest r_t before any bound.

    Range: 1 to 4.9e8, where the clamp acts.
    Bad: above 100.
    Do: bound the weights from above.
    """
    return _exp(s.largest("log_ratio"))


@metric
def chi2_token(s: Step) -> float:
    """chi^2(pi_old || mu) of a token: mean over tokens of r_t^2, less 1.

    Range: its expectation is at least 0.
    Bad: above 1: token weights alone halve the effective sample.
    Do: bound the weights; raise the engine's precision.
    """
    return s.over_tokens("ratio_squared") - 1


@metric
def ess_ratio(s: Step) -> float:
    """Effective sample size of the unbounded r_t: (sum r)^2 / (n sum r^2), as a share of the tokens.

    Range: 0 to 1; 1 where the policies agree.
    Bad: below 0.5.
    Do: compare with ess: what the bound has won.
    """
    return ratio_of(s.sums["ratio"] ** 2, s.sums["usable"] * s.sums["ratio_squared"])


@metric
def prob_diff_abs_mean(s: Step) -> float:
    """Mean over tokens of |pi_old - mu|, of probabilities.

    Range: 0 to 1; below 0.01 for bf16.
    Bad: above 0.05.
    Do: as kl_k3. Unlike log-probs it ignores tokens that both find unlikely.
    """
    return s.over_tokens("abs_prob_diff")


@metric
def prob_diff_abs_std(s: Step) -> float:
    """Standard deviation over tokens of |pi_old - mu|, unbiased.

    Range: 0 to 1.
    Bad: far above prob_diff_abs_mean: few tokens differ, but much.
    Do: look at the prob_diff tails.
    """
    return s.spread("abs_prob_diff", "prob_diff_squared", s.sums["usable"], unbiased=True)


@metric
def prob_diff_abs_max(s: Step) -> float:
    """Largest |pi_old - mu| of a token.

    Range: 0 to 1.
    Bad: above 0.5: one policy was sure of a token, the other not.
    Do: find the token; often a kernel that differs, a stale weight or a wrong template.
    """
    return _finite(s.maxima["abs_prob_diff_max"])


@metric
def prob_correlation(s: Step) -> float:
    """Pearson correlation over tokens of pi_old and mu.

    Range: -1 to 1; above 0.99 for bf16.
    Bad: below 0.95.
    Do: as kl_k3. MiniMax 2025, arxiv.org/abs/2506.13585, found about 0.9 and mended the precision of the output layer.
    """
    return _correlation(s, "proximal_prob", "behavior_prob", "prob_product")


@metric
def log_prob_correlation(s: Step) -> float:
    """Pearson correlation over tokens of log pi_old and log mu.

    Range: -1 to 1; above 0.99 for bf16.
    Bad: below 0.95 while prob_correlation is high: unlikely tokens differ.
    Do: as kl_k3.
    """
    return _correlation(s, "proximal", "behavior", "log_prob_product")


@metric
def saturated_tokens(s: Step) -> float:
    """Share of the tokens with |log r_t| above 20, where the clamp makes all ratios alike.

    Range: 0 to 1.
    Bad: above 0.
    Do: find the tokens; a log-prob of -20 or so is often a placeholder.
    """
    return s.over_tokens("saturated")


section("Whether both sides mean the same by a log-prob: see `slope.py`")


@metric
def slope(s: Step) -> float:
    """Least squares slope over tokens of log pi_old on log mu.

    Range: above 0; 1 where the policies agree, a little less under noise.
    Bad: it and slope_inverse both on one side of 1 by 0.02: one side's log-probs are scaled by a temperature.
    Do: check --rollout-temperature on both sides and whether the engine's log-probs are raw or processed.
    """
    return _of_relation(s, "slope")


@metric
def slope_inverse(s: Step) -> float:
    """Inverse of the least squares slope over tokens of log mu on log pi_old.

    Range: at least slope.
    Bad: as slope.
    Do: as slope.
    """
    return _of_relation(s, "inverse")


@metric
def slope_error(s: Step) -> float:
    """Standard error of slope.

    Range: 0 and above.
    Bad: nothing by itself.
    Do: read slope with it.
    """
    return _of_relation(s, "slope_error")


@metric
def implied_temperature(s: Step) -> float:
    """The temperature of mu against pi_old that both slopes imply: sqrt(slope x slope_inverse).

    Range: above 0; 1 where the policies agree. The true one is 1 to 5 times as far from 1.
    Bad: as slope.
    Do: as slope.
    """
    return _of_relation(s, "implied_temperature")


@metric
def ratio_mean_error(s: Step) -> float:
    """Standard error of ratio_mean; r_t - 1 has mean 0 given what came before, so that tokens need not be independent.

    Range: 0 and above.
    Bad: |ratio_mean - 1| above 6 of it: see ratio_mean.
    Do: as ratio_mean.
    """
    return _of_relation(s, "mean_ratio_error")


section("The same of whole sequences")


@metric
def train_log_ppl(s: Step) -> float:
    """Mean over sequences of the log perplexity of the trainer: -mean_t log pi_old.

    Range: 0 and above.
    Bad: a fall towards 0 (the policy loses its entropy), or a jump.
    Do: compare with rollout_log_ppl; if both fall, look at the entropy and the learning rate.
    """
    return s.over_sequences("train_log_ppl")


@metric
def train_ppl(s: Step) -> float:
    """Mean over sequences of the perplexity of the trainer: exp(-mean_t log pi_old).

    Range: 1 and above.
    Bad: as train_log_ppl.
    Do: as train_log_ppl.
    """
    return s.over_sequences("train_ppl")


@metric
def rollout_log_ppl(s: Step) -> float:
    """Mean over sequences of the log perplexity of the rollout engine: -mean_t log mu.

    Range: 0 and above.
    Bad: as train_log_ppl.
    Do: as train_log_ppl.
    """
    return s.over_sequences("rollout_log_ppl")


@metric
def rollout_ppl(s: Step) -> float:
    """Mean over sequences of the perplexity of the rollout engine: exp(-mean_t log mu).

    Range: 1 and above.
    Bad: as train_log_ppl.
    Do: as train_log_ppl.
    """
    return s.over_sequences("rollout_ppl")


@metric
def log_ppl_diff(s: Step) -> float:
    """Mean over sequences of log perplexity of the trainer less that of the engine: -mean_t log r_t.

    Range: any; its expectation is at least 0.
    Bad: above 0.1, or a rise: the trainer is more and more surprised by what is sampled.
    Do: as kl_k3. Differs from kl_k1 in that each sequence counts once, not each token.
    """
    return s.over_sequences("log_ppl_diff")


@metric
def log_ppl_abs_diff(s: Step) -> float:
    """Mean over sequences of |mean_t log r_t|.

    Range: 0 and above.
    Bad: far above |log_ppl_diff|: sequences differ in both directions.
    Do: geometric rejection drops the worst; see log_ppl_diff_max.
    """
    return s.over_sequences("log_ppl_abs_diff")


@metric
def log_ppl_diff_max(s: Step) -> float:
    """Largest -mean_t log r_t of a sequence.

    Range: any, at least log_ppl_diff.
    Bad: above 1: a sequence that the trainer finds e times as surprising a token.
    Do: find it; often the wrong weights, template or truncation.
    """
    return -s.smallest("mean_log_ratio")


@metric
def log_ppl_diff_min(s: Step) -> float:
    """Smallest -mean_t log r_t of a sequence.

    Range: any, at most log_ppl_diff.
    Bad: below -1.
    Do: as log_ppl_diff_max.
    """
    return -s.largest("mean_log_ratio")


@metric
def ppl_ratio(s: Step) -> float:
    """Mean over sequences of perplexity of the trainer over that of the engine: exp(-mean_t log r_t).

    Range: above 0; near 1.
    Bad: above 1.1.
    Do: as log_ppl_diff.
    """
    return s.over_sequences("ppl_ratio")


@metric
def chi2_sequence(s: Step) -> float:
    """chi^2 of whole sequences: mean over sequences of (prod_t r_t)^2, less 1; the log of the product clamped at +-20.

    Range: -1 to 2.4e17, where the clamp acts.
    Bad: above 1; it then says mostly how long the sequences are. Beyond 1e17 it says nothing.
    Do: do not weigh by the product; read log_chi2_sequence.
    """
    return s.over_sequences("product_squared") - 1


@metric
def log_chi2_sequence(s: Step) -> float:
    """log(1 + chi^2) of whole sequences, without a clamp: log of the mean of (prod_t r_t)^2.

    Range: any; its expectation is at least 0. Exact while |sum_t log r_t| is below 2048.
    Bad: above log 2 = 0.69.
    Do: geometric or token weights in place of the product.
    """
    return s.log_products[2] - _log(s.sums["seen"])


@metric
def log_mean_product(s: Step) -> float:
    """log of the mean over sequences of prod_t r_t, without a clamp.

    Range: any; 0 in expectation, but far below 0 in any sample once the products spread.
    Bad: below -1: nearly all sequences have a product near 0, and product weights shrink the gradient.
    Do: geometric or token weights in place of the product, or normalize.
    """
    return s.log_products[1] - _log(s.sums["seen"])


@metric
def ess_product(s: Step) -> float:
    """Effective sample size of the unbounded products prod_t r_t, as a share of the sequences.

    Range: 1 / sequences to 1.
    Bad: below 0.5; at its lower end one sequence carries the whole step.
    Do: geometric or token weights in place of the product.
    """
    return _exp_of(2 * s.log_products[1] - s.log_products[2] - _log(s.sums["seen"]))


@metric
def chi2_geometric(s: Step) -> float:
    """Mean over sequences of the squared geometric mean of r_t, less 1.

    Range: above -1; near 0.
    Bad: further from 0 than 0.1.
    Do: geometric rejection.
    """
    return s.over_sequences("geometric_squared") - 1


@metric
def sequence_log_ratio_mean(s: Step) -> float:
    """Mean over sequences of sum_t log r_t.

    Range: any; its expectation is at most 0, and falls with the length.
    Bad: below -1 in a config that weighs by the product.
    Do: geometric or token weights.
    """
    return s.over_sequences("sequence_log_ratio")


@metric
def sequence_log_ratio_abs_mean(s: Step) -> float:
    """Mean over sequences of |sum_t log r_t|.

    Range: 0 and above; grows with the length. r_t = 1.001 at each of 2000 tokens is 2: a product of 7.38.
    Bad: above 1 in a config that weighs or rejects by the product; at 20 the clamp acts and all look alike.
    Do: geometric or token weights.
    """
    return s.over_sequences("abs_sequence_log_ratio")


@metric
def sequence_log_ratio_min(s: Step) -> float:
    """Smallest sum_t log r_t of a sequence.

    Range: any.
    Bad: below -20 in a config that weighs or rejects by the product.
    Do: as sequence_log_ratio_abs_mean.
    """
    return s.smallest("sequence_log_ratio")


@metric
def sequence_log_ratio_max(s: Step) -> float:
    """Largest sum_t log r_t of a sequence.

    Range: any.
    Bad: above 20 in a config that weighs or rejects by the product.
    Do: as sequence_log_ratio_abs_mean.
    """
    return s.largest("sequence_log_ratio")


@metric
def saturated_sequences(s: Step) -> float:
    """Share of the sequences with |sum_t log r_t| above 20, where the clamp makes all products alike.

    Range: 0 to 1.
    Bad: above 0 in a config that weighs by the product.
    Do: geometric or token weights.
    """
    return s.over_sequences("saturated_sequences")


section("The weights")


@metric
def weight_mean(s: Step) -> float:
    """Mean over valid tokens of the bounded weight, before normalization and rejection; 0 where it is not known.

    Range: 0 to the upper bound.
    Bad: far from 1: the correction changes the learning rate.
    Do: normalize, or lower the mismatch.
    """
    return s.over_valid("weight")


@metric
def weight_std(s: Step) -> float:
    """Standard deviation over valid tokens of the bounded weight, before normalization and rejection.

    Range: 0 to half the upper bound.
    Bad: above 0.5.
    Do: tighten the bound.
    """
    return s.spread("weight", "weight_squared", s.sums["valid"])


@metric
def weight_min(s: Step) -> float:
    """Smallest bounded weight, before normalization and rejection.

    Range: 0 to the upper bound; what a zero bound zeroes is 0.
    Bad: 0 without a zero bound.
    Do: look at ratio_min.
    """
    return s.smallest("weight")


@metric
def weight_max(s: Step) -> float:
    """Largest bounded weight, before normalization and rejection. A mask bound drops, it does not bound.

    Range: 0 to the upper bound.
    Bad: the upper bound in every step: see weight_high_fraction.
    Do: as weight_high_fraction.
    """
    return s.largest("weight")


@metric
def weight_high_fraction(s: Step) -> float:
    """Share of the tokens (of the sequences, at their levels) whose ratio is above the upper bound.

    Range: 0 to 1.
    Bad: above a few percent: the bound no longer cuts a tail but shapes the gradient.
    Do: lower the mismatch before raising the bound.
    """
    return s.over_units("weight_high")


@metric
def weight_low_fraction(s: Step) -> float:
    """Share of the tokens (of the sequences, at their levels) whose ratio is below the lower bound, else 1 / upper.

    Range: 0 to 1.
    Bad: far above weight_high_fraction: the trainer finds much of what is sampled unlikely.
    Do: as kl_k3.
    """
    return s.over_units("weight_low")


@metric
def normalization_factor(s: Step) -> float:
    """Mean bounded weight over mean normalized weight: what the weights were divided by, averaged over micro-batches.

    Range: above 0; 1 without normalization.
    Bad: below 0.5: weights shrink the gradient, and normalization has to undo it.
    Do: look at log_mean_product and at the bound.
    """
    return ratio_of(s.sums["weight"], s.sums["normalized"])


@metric
def applied_mean(s: Step) -> float:
    """Mean over kept tokens of the weight as multiplied into the loss.

    Range: 0 and above.
    Bad: far from 1.
    Do: normalize over kept tokens.
    """
    return ratio_of(s.sums["applied"], s.sums["kept"])


@metric
def applied_valid_mean(s: Step) -> float:
    """Mean over valid tokens of the weight as multiplied into the loss, 0 where dropped.

    Range: 0 and above.
    Bad: below 0.5: half of the gradient is gone, be it by weights or by rejection.
    Do: compare with applied_mean and kept_fraction.
    """
    return s.over_valid("applied")


@metric
def applied_min(s: Step) -> float:
    """Smallest weight as multiplied into the loss, 0 where dropped.

    Range: 0 and above.
    Bad: nothing by itself.
    Do: read with kept_fraction.
    """
    return s.smallest("applied")


@metric
def applied_max(s: Step) -> float:
    """Largest weight as multiplied into the loss.

    Range: 0 and above.
    Bad: above the upper bound by much: normalization has blown it up.
    Do: look at normalization_factor.
    """
    return s.largest("applied")


@metric
def kept_weight_min(s: Step) -> float:
    """Smallest weight of a kept token, as multiplied into the loss.

    Range: 0 and above.
    Bad: near 0: the token is kept, and nothing is learned from it.
    Do: a lower bound, by clip, mask or a rule.
    """
    return s.smallest("kept_weight")


@metric
def ess(s: Step) -> float:
    """Effective sample size of the weights as multiplied into the loss, 0 where dropped: (sum w)^2 / (n sum w^2).

    Range: 0 to 1, as a share of the valid tokens; at most kept_fraction.
    Bad: below 0.5.
    Do: tighten the bound; lower the mismatch. (Kish 1965)
    """
    return ratio_of(s.sums["applied"] ** 2, s.sums["valid"] * s.sums["applied_squared"])


@metric
def ess_bounded(s: Step) -> float:
    """Effective sample size of the bounded weights before rejection, as a share of the valid tokens.

    Range: 0 to 1.
    Bad: below 0.5.
    Do: compare with ess: what rejection costs.
    """
    return ratio_of(s.sums["weight"] ** 2, s.sums["valid"] * s.sums["weight_squared"])


@metric
def ess_lifted(s: Step) -> float:
    """Effective sample size of the applied weights within [1 / upper, upper]: dropped ones count as 1 / upper.

    upper is the bound of the weight; of an unbounded one, that of the first rule on a ratio which has one.

    Range: 0 to 1.
    Bad: nothing by itself; it cannot see rejection.
    Do: use ess. It is here for those who come from ms-swift.
    """
    squares = s.sums.get("lifted_squared", math.nan)
    return ratio_of(s.sums.get("lifted", math.nan) ** 2, s.sums["valid"] * squares)


@metric
def sequence_weight_mean(s: Step) -> float:
    """Mean over sequences of the mean over its tokens of the bounded weight, before normalization and rejection.

    Range: 0 to the upper bound.
    Bad: far from weight_mean: long and short sequences are weighed differently.
    Do: look at sequence_log_ratio_mean.
    """
    return s.over_sequences("sequence_weight")


@metric
def sequence_weight_std(s: Step) -> float:
    """Standard deviation of the same over sequences, unbiased.

    Range: 0 and above.
    Bad: above 0.5.
    Do: geometric weights, or a tighter bound.
    """
    return s.spread("sequence_weight", "sequence_weight_squared", s.sums["seen"], unbiased=True)


@metric
def sequence_weight_min(s: Step) -> float:
    """Smallest of the same.

    Range: 0 to the upper bound.
    Bad: near 0.
    Do: find the sequence.
    """
    return s.smallest("sequence_weight")


@metric
def sequence_weight_max(s: Step) -> float:
    """Largest of the same.

    Range: 0 to the upper bound.
    Bad: the upper bound in every step.
    Do: find the sequence.
    """
    return s.largest("sequence_weight")


@metric
def sequence_weight_max_deviation(s: Step) -> float:
    """Largest distance of the same from 1.

    Range: 0 and above.
    Bad: near the upper bound less 1 in every step.
    Do: find the sequence.
    """
    return max(s.largest("sequence_weight") - 1, 1 - s.smallest("sequence_weight"))


@metric
def sequence_ratio_high_fraction(s: Step) -> float:
    """Share of the sequences whose ratio before the bound (the mean one of tokens or segments) is above the upper one.

    Range: 0 to 1.
    Bad: above a few percent.
    Do: lower the mismatch.
    """
    return s.over_sequences("sequence_ratio_high")


@metric
def sequence_ratio_low_fraction(s: Step) -> float:
    """Share of the sequences whose ratio before the bound is below the lower one, else 1 / upper.

    Range: 0 to 1.
    Bad: above a few percent.
    Do: lower the mismatch.
    """
    return s.over_sequences("sequence_ratio_low")


@metric
def sequence_applied_mean(s: Step) -> float:
    """Mean over sequences of the mean over its tokens of the weight as multiplied into the loss, 0 where dropped.

    Range: 0 and above.
    Bad: below 0.5.
    Do: as applied_valid_mean.
    """
    return s.over_sequences("sequence_applied")


@metric
def sequence_applied_min(s: Step) -> float:
    """Smallest of the same.

    Range: 0 and above.
    Bad: nothing by itself.
    Do: read with kept_sequences.
    """
    return s.smallest("sequence_applied")


@metric
def sequence_applied_max(s: Step) -> float:
    """Largest of the same.

    Range: 0 and above.
    Bad: above the upper bound by much.
    Do: look at normalization_factor.
    """
    return s.largest("sequence_applied")


section("What was rejected")


@metric
def kept_fraction(s: Step) -> float:
    """Share of the valid tokens that no rule, no mask bound and no OPSM dropped.

    Range: 0 to 1.
    Bad: below 0.5; below `keep_floor` a warning is logged.
    Do: see which rule_i_rejected_fraction is high, and widen that rule or lower the mismatch.
    """
    return s.over_valid("kept")


@metric
def rejected_fraction(s: Step) -> float:
    """1 - kept_fraction.

    Range: 0 to 1.
    Bad: above 0.5.
    Do: as kept_fraction.
    """
    return 1 - s.over_valid("kept")


@metric
def kept_sequences(s: Step) -> float:
    """Share of the sequences that keep at least one token.

    Range: 0 to 1.
    Bad: below 0.5: groups lose members, and their baseline no longer fits.
    Do: as kept_fraction.
    """
    return ratio_of(s.sums["kept_sequences"], s.sums["live"])


@metric
def touched_sequences(s: Step) -> float:
    """Share of the sequences that lose at least one token.

    Range: 0 to 1; at least 1 - kept_sequences.
    Bad: near 1 while kept_fraction is high: almost every sequence loses a few tokens.
    Do: nothing, unless a rule over sequences would say the same more simply.
    """
    return ratio_of(s.sums["touched_sequences"], s.sums["live"])


@metric
def outside_bound_fraction(s: Step) -> float:
    """Share of the tokens whose ratio, or whose unit's, the bound of the weight truncates, clips, drops or sets to 0.

    Range: 0 to 1.
    Bad: above a few percent.
    Do: lower the mismatch, or widen the bound; truncate in place of masking.
    """
    return s.over_tokens("outside_bound")


@metric
def all_rejected_fraction(s: Step) -> float:
    """Share of the micro-batches whose every sequence was rejected. Depends on the split into micro-batches.

    Range: 0 to 1.
    Bad: above 0; `on_all_rejected` says what was done, and a warning is logged.
    Do: widen the rules; a geometric rule must be far narrower or wider than a token rule.
    """
    return ratio_of(s.sums["all_rejected"], s.sums["micro_batches"])


@metric
def kept_log_ratio_mean(s: Step) -> float:
    """Mean over kept tokens of log r_t.

    Range: any.
    Bad: nothing by itself.
    Do: compare with -kl_k1: what rejection leaves of the mismatch.
    """
    return ratio_of(s.sums["kept_log_ratio"], s.sums["kept"])


@metric
def kept_log_ratio_min(s: Step) -> float:
    """Smallest log r_t of a kept token.

    Range: any.
    Bad: below -5: a token that the trainer finds unlikely is still learned from.
    Do: a veto or a token rule with a lower bound.
    """
    return s.smallest("kept_log_ratio")


@metric
def kept_log_ratio_max(s: Step) -> float:
    """Largest log r_t of a kept token.

    Range: any.
    Bad: above 5, in a config that does not bound weights from above.
    Do: bound the weights, or a token rule with an upper bound.
    """
    return s.largest("kept_log_ratio")


section("The loss")


@metric
def loss_uncorrected(s: Step) -> float:
    """Policy loss before correction: sum over valid tokens / valid tokens.

    Range: any.
    Bad: nothing by itself.
    Do: compare with loss_original_denominator.
    """
    return ratio_of(s.sums["loss"], s.sums["with_loss"])


@metric
def loss_original_denominator(s: Step) -> float:
    """Policy loss after correction: sum over kept tokens of w_t loss_t / valid tokens.

    Range: any.
    Bad: far smaller than loss_kept_denominator: rejection acts as a lower learning rate.
    Do: `denominator: kept`, if that is not wanted.
    """
    return ratio_of(s.sums["corrected_loss"], s.sums["with_loss"])


@metric
def loss_kept_denominator(s: Step) -> float:
    """Policy loss after correction: sum over kept tokens of w_t loss_t / kept tokens.

    Range: any.
    Bad: far larger than loss_original_denominator.
    Do: as loss_original_denominator.
    """
    return ratio_of(s.sums["corrected_loss"], s.sums["kept"]) if s.sums["with_loss"] else math.nan


# Families: one function, several places.


def ratio_percentile(s: Step, percent: int) -> float:
    """Percentile over tokens of r_t before any bound, from logs that are within 1 percent of themselves.

    Range: above 0.
    Bad: p99 above the upper bound of the weight.
    Do: as weight_high_fraction.
    """
    return _exp_of(s.quantile("log_ratio", percent))


def weight_percentile(s: Step, percent: int) -> float:
    """Percentile over tokens of the bounded weight before normalization and rejection, in the same way.

    Range: 0 to the upper bound.
    Bad: p95 at the upper bound.
    Do: as weight_high_fraction.
    """
    return _exp_of(s.quantile("log_weight", percent))


def sequence_log_ratio_percentile(s: Step, percent: int) -> float:
    """Percentile over sequences of sum_t log r_t, from sums that are within 1 percent of themselves.

    Range: any.
    Bad: p25 or p75 beyond +-1 in a config that weighs by the product.
    Do: as sequence_log_ratio_abs_mean.
    """
    return s.quantile("sequence_log_ratio", percent)


def geometric_ratio_percentile(s: Step, percent: int) -> float:
    """Percentile over sequences of the geometric mean of r_t, in the same way.

    Range: above 0; 0.99 to 1.01 for bf16.
    Bad: p25 or p75 outside the bounds of a geometric rule: it drops half.
    Do: choose such a rule's bounds by these.
    """
    return _exp_of(s.quantile("mean_log_ratio", percent))


def log_ratio_tail(s: Step, side: str, bound: float) -> float:
    """Share of the tokens with log r_t above the bound (high), or below minus the bound (low).

    Range: 0 to 1.
    Bad: at 1.0 above 0.001; one side far above the other.
    Do: a token mask or a veto drops such tokens.
    """
    return s.over_tokens(f"{'above' if side == 'high' else 'below'}_{bound}")


def prob_diff_tail(s: Step, bound: float) -> float:
    """Share of the tokens with |pi_old - mu| above the bound.

    Range: 0 to 1.
    Bad: at 0.2 above 0.01.
    Do: as prob_diff_abs_max; a rule of `statistic: abs_prob_diff` drops such tokens.
    """
    return s.over_tokens(f"prob_diff_above_{bound}")


def rule_mean(s: Step, rule: str) -> float:
    """Mean over tokens of what the rule compares (of ratios the log); of a unit's statistic, at each of its tokens.

    Range: that of the statistic.
    Bad: near a bound.
    Do: widen the rule, or lower the mismatch.
    """
    return _over_rule(s, rule, "_count", "")


def rule_std(s: Step, rule: str) -> float:
    """Standard deviation over tokens of the same, within the bounds (from 0 where there is no lower one).

    Range: 0 and above.
    Bad: as wide as the bounds.
    Do: as rule_mean.
    """
    return s.spread(f"{rule}_bounded", f"{rule}_bounded_squared", s.sums[f"{rule}_count"])


def rule_low_fraction(s: Step, rule: str) -> float:
    """Share of the tokens that lie below the rule's lower bound, or whose unit does.

    Range: 0 to 1.
    Bad: far above rule_i_high_fraction.
    Do: as kl_k3.
    """
    return _over_rule(s, rule, "_count", "_low")


def rule_high_fraction(s: Step, rule: str) -> float:
    """Share of the tokens that lie above the rule's upper bound, or whose unit does.

    Range: 0 to 1.
    Bad: far above rule_i_low_fraction.
    Do: widen the rule, or lower the mismatch.
    """
    return _over_rule(s, rule, "_count", "_high")


def rule_rejected_fraction(s: Step, rule: str) -> float:
    """Share of the tokens that this rule alone would drop.

    Range: 0 to 1.
    Bad: near rejected_fraction: this rule is the one.
    Do: widen it.
    """
    return _over_rule(s, rule, "_count", "_low") + _over_rule(s, rule, "_count", "_high")


def rule_min(s: Step, rule: str) -> float:
    """Smallest value that the rule compares.

    Range: that of the statistic.
    Bad: far outside the bounds.
    Do: find the token or the unit.
    """
    return s.smallest(rule if f"{rule}_min" in s.maxima else f"{rule}_unit")


def rule_max(s: Step, rule: str) -> float:
    """Largest value that the rule compares.

    Range: that of the statistic.
    Bad: far outside the bounds.
    Do: find the token or the unit.
    """
    return s.largest(rule if f"{rule}_max" in s.maxima else f"{rule}_unit")


def rule_unit_mean(s: Step, rule: str) -> float:
    """Mean over units (segments, where the rule drops those, else sequences) of what the rule compares, or of its mean.

    Range: that of the statistic.
    Bad: near a bound.
    Do: as rule_mean.
    """
    return _over_rule(s, rule, "_unit_count", "_unit")


def rule_unit_std(s: Step, rule: str) -> float:
    """Standard deviation over units of the same, unbiased.

    Range: 0 and above.
    Bad: as wide as the bounds.
    Do: as rule_mean.
    """
    return s.spread(f"{rule}_unit", f"{rule}_unit_squared", s.sums[f"{rule}_unit_count"], unbiased=True)


def rule_unit_min(s: Step, rule: str) -> float:
    """Smallest of the same.

    Range: that of the statistic.
    Bad: far outside the bounds.
    Do: find the unit.
    """
    return s.smallest(f"{rule}_unit")


def rule_unit_max(s: Step, rule: str) -> float:
    """Largest of the same.

    Range: that of the statistic.
    Bad: far outside the bounds.
    Do: find the unit.
    """
    return s.largest(f"{rule}_unit")


def rule_unit_max_deviation(s: Step, rule: str) -> float:
    """Largest size of the same.

    Range: 0 and above.
    Bad: far outside the bounds.
    Do: find the unit.
    """
    return max(s.largest(f"{rule}_unit"), -s.smallest(f"{rule}_unit"))


def rule_unit_low_fraction(s: Step, rule: str) -> float:
    """Share of the units for which the same lies below the lower bound.

    Range: 0 to 1.
    Bad: far above the other side.
    Do: as rule_low_fraction.
    """
    return _over_rule(s, rule, "_unit_count", "_unit_low")


def rule_unit_high_fraction(s: Step, rule: str) -> float:
    """Share of the units for which the same lies above the upper bound.

    Range: 0 to 1.
    Bad: far above the other side.
    Do: as rule_high_fraction.
    """
    return _over_rule(s, rule, "_unit_count", "_unit_high")


def rule_unit_rejected_fraction(s: Step, rule: str) -> float:
    """Share of the units of which this rule alone would drop at least one token.

    Range: 0 to 1.
    Bad: near 1 of a rule over units: nothing is left.
    Do: widen it.
    """
    return _over_rule(s, rule, "_unit_count", "_unit_touched")


def lag_share(s: Step, lag: int) -> float:
    """Share of the tokens with a known weight version that is this many behind the trainer's (the last: or more).

    Range: 0 to 1.
    Bad: much mass at high lags.
    Do: sync weights more often, or bound the staleness.
    """
    return ratio_of(s.lags[lag]["tokens"], sum(row["tokens"] for row in s.lags))


def lag_kl_k1(s: Step, lag: int) -> float:
    """kl_k1 of those tokens.

    Range: any.
    Bad: a rise with the lag: staleness, not the engine, makes the mismatch.
    Do: sync weights more often, or bound the staleness.
    """
    return -ratio_of(s.lags[lag]["log_ratio"], s.lags[lag]["tokens"])


def lag_kl_k3(s: Step, lag: int) -> float:
    """kl_k3 of those tokens.

    Range: 0 and above.
    Bad: as lag_kl_k1; high at lag 0: the engine, not staleness, makes the mismatch.
    Do: as lag_kl_k1, or as kl_k3.
    """
    return ratio_of(s.lags[lag]["k3"], s.lags[lag]["tokens"])


def lag_ratio_mean(s: Step, lag: int) -> float:
    """ratio_mean of those tokens.

    Range: above 0.
    Bad: far from 1.
    Do: as ratio_mean.
    """
    return ratio_of(s.lags[lag]["ratio"], s.lags[lag]["tokens"])


def lag_kept_fraction(s: Step, lag: int) -> float:
    """Share of those tokens that are kept.

    Range: 0 to 1.
    Bad: a fall with the lag to near 0: what is stale is generated for nothing.
    Do: bound the staleness, or widen the rules.
    """
    return ratio_of(s.lags[lag]["kept"], s.lags[lag]["tokens"])


Family = Callable[..., float]

PERCENTILES: dict[str, Family] = {
    "ratio_p{percent}": ratio_percentile,
    "weight_p{percent}": weight_percentile,
    "sequence_log_ratio_p{percent}": sequence_log_ratio_percentile,
    "geometric_ratio_p{percent}": geometric_ratio_percentile,
}
TAILS: dict[str, Family] = {
    "log_ratio_tail_{side}_{bound}": log_ratio_tail,
    "prob_diff_tail_{bound}": prob_diff_tail,
}
RULES: dict[str, Family] = {
    "rule_{i}_mean": rule_mean,
    "rule_{i}_std": rule_std,
    "rule_{i}_min": rule_min,
    "rule_{i}_max": rule_max,
    "rule_{i}_low_fraction": rule_low_fraction,
    "rule_{i}_high_fraction": rule_high_fraction,
    "rule_{i}_rejected_fraction": rule_rejected_fraction,
    "rule_{i}_unit_mean": rule_unit_mean,
    "rule_{i}_unit_std": rule_unit_std,
    "rule_{i}_unit_min": rule_unit_min,
    "rule_{i}_unit_max": rule_unit_max,
    "rule_{i}_unit_max_deviation": rule_unit_max_deviation,
    "rule_{i}_unit_low_fraction": rule_unit_low_fraction,
    "rule_{i}_unit_high_fraction": rule_unit_high_fraction,
    "rule_{i}_unit_rejected_fraction": rule_unit_rejected_fraction,
}
VERSIONS: dict[str, Family] = {
    "lag_{lag}_share": lag_share,
    "lag_{lag}_kl_k1": lag_kl_k1,
    "lag_{lag}_kl_k3": lag_kl_k3,
    "lag_{lag}_ratio_mean": lag_ratio_mean,
    "lag_{lag}_kept_fraction": lag_kept_fraction,
}


def families(config: CorrectionConfig) -> dict[str, tuple[Family, tuple]]:
    """Name, function and place of each metric that comes in several."""
    found: dict[str, tuple[Family, tuple]] = {
        name.format(percent=percent): (function, (percent,))
        for name, function in PERCENTILES.items()
        for percent in QUANTILES
    }
    high_low, differences = TAILS.items()
    for bound in LOG_RATIO_TAILS:
        for side in ("high", "low"):
            found[high_low[0].format(side=side, bound=bound)] = (high_low[1], (side, bound))
    for bound in PROB_DIFF_TAILS:
        found[differences[0].format(bound=bound)] = (differences[1], (bound,))
    for rule, _ in numbered(config):
        for name, function in RULES.items():
            found[name.replace("rule_{i}", rule)] = (function, (rule,))
    for lag in range(LAGS):
        found |= {name.format(lag=lag): (function, (lag,)) for name, function in VERSIONS.items()}
    return found


def _of_relation(s: Step, name: str) -> float:
    found = relation(s.sums)
    return math.nan if found is None else getattr(found, name)


def _over_rule(s: Step, rule: str, of: str, row: str) -> float:
    return ratio_of(s.sums.get(rule + row, 0.0), s.sums[rule + of])


def ratio_of(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else math.nan


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.nan


def _log(x: float) -> float:
    return math.log(x) if x > 0 else math.nan


def _exp(log_ratio: float) -> float:
    """As of a token: clamped."""
    return math.exp(max(-20.0, min(20.0, log_ratio))) if not math.isnan(log_ratio) else math.nan


def _exp_of(x: float) -> float:
    return math.nan if math.isnan(x) else math.exp(min(x, LARGEST_EXPONENT))


def _log_sum(windows: list[float]) -> float:
    """log of the sum over all windows; NaN of nothing."""
    logs = [math.log(x) + WINDOW * (i - WINDOWS // 2) for i, x in enumerate(windows) if x > 0]
    if not logs:
        return math.nan
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(x - largest) for x in logs))


def _correlation(s: Step, first: str, second: str, product: str) -> float:
    n = s.sums["usable"]
    spreads = s.spread(first, f"{first}_squared", n) * s.spread(second, f"{second}_squared", n)
    return ratio_of(s.over_tokens(product) - s.over_tokens(first) * s.over_tokens(second), spreads)

"""Metrics of segment-wise weights by age, beside the metrics of standard weights of equal tokens.

A ratio here is unbounded, with its logarithm clamped at +-20; a weight is what multiplied the loss.
"""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.ratios import LOG_RATIO_CLAMP, finite
from mis_plugins.metrics import quantity as take
from mis_plugins.metrics.quantity import Metrics, Quantity, Reduction, Step, known
from mis_plugins.metrics.totals import Partials, Places, reduced
from mis_plugins.versions.segment_wise import BehaviorWeight, Written

AGES = 17  # ages 0, 1, ... 15, and 16 or more
COLUMNS = (*(f"age_{age}" for age in range(AGES - 1)), f"age_{AGES - 1}_up", "no_age")
PLACES = ("", *(f"{column}/" for column in COLUMNS))


def _effective_share(s: Step, x: str, count: str) -> float:
    """Effective sample size as a share of the count; 0 where every weight is 0."""
    return s.share(x, count) if s.sums[f"{x}_squared"] or not s.sums[count] else 0.0


SEGMENT_WISE_ONLY = "behav_imp_weight/var/segment_wise"
variance = take.std.then(lambda x: x * x)
OF_WEIGHT_EXCESS: Metrics = {"behav_imp_weight/avg": take.mean.then(lambda x: 1 + x), "behav_imp_weight/std": take.std}
OF_WEIGHT: Metrics = {
    "behav_imp_weight/min": take.smallest,
    "behav_imp_weight/max": take.largest,
    # Weights near 0 would vanish in a sum of squared excesses.
    "behav_imp_weight/ess": Reduction("sum squares", _effective_share),
}


def of_correction(correction: Correction, written: Written, numerator: Float[Tensor, " T"] | None = None) -> Partials:
    """What the micro-batch of a correction adds; `numerator` is log pi_{v+1}, None with standard weights."""
    proximal, behavior = correction.stage.proximal_log_probs, correction.stage.behavior_log_probs
    multiplied = BehaviorWeight(correction.weights, correction.keep)
    mask = correction.ragged.loss_mask
    numerator = proximal if numerator is None else numerator
    return weights_by_age(numerator, proximal, behavior, written, mask, multiplied)


@torch.no_grad()
def weights_by_age(
    proximal_t: Float[Tensor, " T"],
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    written: Written,
    loss_mask: Bool[Tensor, " T"],
    multiplied: BehaviorWeight,
) -> Partials:
    """What one micro-batch adds to `weight_metrics`.

    Only tokens of which both ratios are known enter the sums over ratios. `unknown` counts the other valid tokens.
    `nonfinite` counts the unknown tokens that have a log-prob which is not finite; the others lack a version or a
    stored log-prob.

    Args:
        proximal_t: log pi_{v+1} of each token; NaN where it is not known.
        proximal: log pi_V of each token.
        multiplied: the weights that multiplied the loss, and which tokens were kept.
    """
    log_r, standard = proximal_t.double() - behavior.double(), proximal.double() - behavior.double()
    both = loss_mask & written.known & finite(log_r) & finite(standard)
    nonfinite = ~finite(standard) | proximal_t.isinf()  # proximal_t is NaN where it is not known
    log_r, standard = (x.masked_fill(~both, 0) for x in (log_r, standard))
    weight = multiplied.weights.double().masked_fill(~both, 0)
    of_both = (
        Quantity("tokens", both, {"staleness/tokens": take.total}),
        Quantity("excess", _excess(log_r), {SEGMENT_WISE_ONLY: variance}, over="tokens"),
        Quantity("standard_excess", _excess(standard), {"behav_imp_weight/var/standard": variance}, over="tokens"),
        Quantity("step", log_r, {"behav_kl/avg": take.minus_mean}, over="tokens"),
        Quantity("age", written.age, {"staleness/avg": take.mean}, over="tokens"),
    )
    of_kept = (
        Quantity("kept", both, also="sum"),
        Quantity("weight_excess", weight - 1, OF_WEIGHT_EXCESS, over="kept"),
        Quantity("weight", weight, OF_WEIGHT, over="kept"),
    )
    of_unknown = (
        Quantity("unknown", torch.ones_like(log_r), {"staleness/unknown": take.total}),
        Quantity("nonfinite", nonfinite, also="sum"),
    )
    populations = (both, of_both), (both & multiplied.keep, of_kept), (loss_mask & ~both, of_unknown)
    parts = (by_age(of_part, where, written.known_age) for where, of_part in populations)
    return Partials.beside(part for of_age in parts for part in of_age)


def by_age(quantities: Iterable[Quantity], where: Bool[Tensor, " T"], ages: Int[Tensor, " T"]) -> Iterator[Partials]:
    """The totals of the tokens that `where` marks, of all and by age; an age below 0 is not known."""
    column = torch.where(ages >= 0, ages.clamp(max=AGES - 1), AGES)
    of_age = column.unsqueeze(1) == torch.arange(len(COLUMNS), device=ages.device)
    every = torch.cat([where.unsqueeze(1), of_age & where.unsqueeze(1)], 1)
    return reduced(quantities, places=Places(PLACES, every.double()))


def weight_metrics(measured: Partials, segment_wise: bool = True) -> dict[str, float]:
    """The metrics of `weights_by_age` over a whole step from merged sums on the host, each also by age (`/age_2`).

    Where `segment_wise` is false, the weights are the standard pi_old / pi_v; the variance of pi_{v+1} / pi_v is then
    unknown and left out.
    """
    metrics = metrics_by_age(measured)
    return metrics if segment_wise else {name: x for name, x in metrics.items() if SEGMENT_WISE_ONLY not in name}


def metrics_by_age(measured: Partials) -> dict[str, float]:
    """Every known metric of the quantities, of all tokens and of each age that has tokens."""
    step = measured.step()
    held = [at for at in PLACES if not at or any(step.sums[at + name] for name, _, _ in measured.records)]
    return known(
        {
            f"{metric}/{at}".removesuffix("/"): reduction.within(at).of(step, name, count)
            for at in held
            for name, metrics, count in measured.records
            for metric, reduction in metrics.items()
        }
    )


def _excess(log_ratio: Tensor) -> Tensor:
    """The ratio less 1, exact where the ratio is near 1."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()

"""What segment-wise weights are worth: metrics by age, beside those of standard weights for equal tokens.

A ratio here is unbounded, with its logarithm clamped at +-20; a weight is what multiplied the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.correction.ratios import LOG_RATIO_CLAMP, finite
from mis_plugins.metrics.by_age import ByAge, TokenRows, by_age
from mis_plugins.metrics.quantity import Metric, ratio_of
from mis_plugins.versions.loglinear import loglinear
from mis_plugins.versions.segment_wise import STORED_FROM, BehaviorWeight, Written


@torch.no_grad()
def weights_by_age(
    proximal_t: Float[Tensor, " T"],
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    written: Written,
    loss_mask: Bool[Tensor, " T"],
    multiplied: BehaviorWeight,
) -> ByAge:
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
    one, weight = torch.ones_like(log_r), multiplied.weights.double()
    excess, standard_excess, weight_excess = _excess(log_r), _excess(standard), weight - 1
    ratios = {
        "tokens": one,
        "excess": excess,
        "excess_squared": excess.square(),
        "standard_excess": standard_excess,
        "standard_excess_squared": standard_excess.square(),
        "kl": -log_r,
        "age": written.age,
    }
    weights = {
        "kept": one,
        "weight_excess": weight_excess,
        "weight_excess_squared": weight_excess.square(),
        "weight_squared": weight.square(),  # weights near 0 would vanish in a sum of squared excesses
    }
    nonfinite = ~finite(standard) | proximal_t.isinf()  # proximal_t is NaN where it is not known
    parts = (
        TokenRows(both, ratios),
        TokenRows(both & multiplied.keep, weights, {"largest": weight, "smallest": -weight}),
        TokenRows(loss_mask & ~both, {"unknown": one, "nonfinite": nonfinite}),
    )
    return by_age(parts, written.known_age)


@torch.no_grad()
def loglinear_error_by_age(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    written: Written,
    loss_mask: Bool[Tensor, " T"],
) -> ByAge:
    """Error of the interpolated log pi_{v+1} against the stored one, as sums by age for `error_metrics`.

    The sums are over valid tokens of age 2 and more whose log pi_{v+1} was stored.
    """
    drawn, stored = loglinear(proximal, behavior, written.age).double(), written.recomputed.double()
    error, step = drawn - stored, stored - behavior.double()
    where = loss_mask & written.known & (written.age >= STORED_FROM) & finite(error) & finite(step)
    sums = {
        "tokens": torch.ones_like(error),
        "error": error,
        "absolute": error.abs(),
        "squared": error.square(),
        "step_squared": step.square(),
    }
    return by_age([TokenRows(where, sums, {"largest": error.abs()})], written.known_age)


def weight_metrics(measured: ByAge, segment_wise: bool = True) -> dict[str, float]:
    """The metrics `WEIGHT_METRICS` of a whole step from merged sums on the host, each also by age (`/age_2`).

    Args:
        segment_wise: false where the weights are the standard pi_old / pi_v; the variance of pi_{v+1} / pi_v is then
            unknown and left out.
    """
    found = _named(measured, _weight_row)
    return found if segment_wise else {name: x for name, x in found.items() if SEGMENT_WISE_ONLY not in name}


def error_metrics(measured: ByAge) -> dict[str, float]:
    """Metrics of a step, in nats, from the sums of `loglinear_error_by_age`, each also by age.

    loglinear/error/{avg,abs,rms,max}: error of the interpolated log-prob.
    loglinear/error/step_rms: root mean square of log pi_{v+1} - log pi_v, the size to compare the error with.
    """
    return _named(measured, _error_row)


SEGMENT_WISE_ONLY = "behav_imp_weight/var/segment_wise"


def _excess(log_ratio: Tensor) -> Tensor:
    """The ratio less 1, exact where the ratio is near 1."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()


def _weight_row(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    values = ((name, metric(row)) for name, metric in WEIGHT_METRICS.items())
    return ((name, value) for name, value in values if not math.isnan(value))


def _error_row(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    tokens = row["tokens"]
    if tokens:
        yield "loglinear/error/avg", row["error"] / tokens
        yield "loglinear/error/abs", row["absolute"] / tokens
        yield "loglinear/error/rms", math.sqrt(row["squared"] / tokens)
        yield "loglinear/error/max", row["largest"]
        yield "loglinear/error/step_rms", math.sqrt(row["step_squared"] / tokens)


def _variance(row: Mapping[str, float], name: str, count: str) -> float:
    """Variance of x from the sums of x - 1 and of its square; NaN of nothing, and 0 where rounding falls below."""
    mean, squared = ratio_of(row[name], row[count]), ratio_of(row[f"{name}_squared"], row[count])
    return math.nan if math.isnan(mean) else max(0.0, squared - mean**2)


def _effective_share(row: Mapping[str, float]) -> float:
    if not row["kept"]:
        return math.nan
    total, squares = row["kept"] + row["weight_excess"], row["weight_squared"]
    return total**2 / (row["kept"] * squares) if squares > 0 else 0.0


WEIGHT_METRICS: dict[str, Metric] = {
    "behav_imp_weight/avg": lambda row: ratio_of(row["kept"] + row["weight_excess"], row["kept"]),
    "behav_imp_weight/std": lambda row: math.sqrt(_variance(row, "weight_excess", "kept")),
    "behav_imp_weight/min": lambda row: -row["smallest"] if row["kept"] else math.nan,
    "behav_imp_weight/max": lambda row: row["largest"] if row["kept"] else math.nan,
    "behav_imp_weight/ess": _effective_share,
    SEGMENT_WISE_ONLY: lambda row: _variance(row, "excess", "tokens"),
    "behav_imp_weight/var/standard": lambda row: _variance(row, "standard_excess", "tokens"),
    "behav_kl/avg": lambda row: ratio_of(row["kl"], row["tokens"]),
    "staleness/avg": lambda row: ratio_of(row["age"], row["tokens"]),
    "staleness/tokens": lambda row: row["tokens"],
    "staleness/unknown": lambda row: row["unknown"],
}
"""Metrics by name, each a function of one row of the sums of `weights_by_age`."""


def _named(
    measured: ByAge, metrics: Callable[[Mapping[str, float]], Iterator[tuple[str, float]]]
) -> dict[str, float]:
    return {
        f"{name}/{group}" if group else name: value
        for group, row in measured.groups.items()
        for name, value in metrics(row)
    }

"""What segment-wise weights are worth: by age, beside the standard weights of the very same tokens.

Ratios are those before any bound, clamped at e^+-20; weights are those applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.by_age import ByAge, Rows, by_age
from mis_plugins.loglinear import loglinear
from mis_plugins.ratios import LOG_RATIO_CLAMP, finite
from mis_plugins.segmentwise import STORED_FROM, BehaviorWeight, Written


@torch.no_grad()
def weights_by_age(
    proximal_t: Float[Tensor, " T"],
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    written: Written,
    loss_mask: Bool[Tensor, " T"],
    applied: BehaviorWeight,
) -> ByAge:
    """What one micro-batch adds to `weight_metrics`.

    Only tokens of which both ratios are known enter a ratio; `unknown` counts the others of the loss mask.

    Args:
        proximal_t: log pi_{v+1}. proximal: log pi_V.
        applied: what the loss was multiplied by, and what of it stayed.
    """
    log_r, standard = proximal_t.double() - behavior.double(), proximal.double() - behavior.double()
    both = loss_mask & written.known & finite(log_r) & finite(standard)
    one, weight = torch.ones_like(log_r), applied.weights.double()
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
    weights = {"kept": one, "weight_excess": weight_excess, "weight_excess_squared": weight_excess.square()}
    parts = (
        Rows(both, ratios),
        Rows(both & applied.keep, weights, {"largest": weight, "smallest": -weight}),
        Rows(loss_mask & ~both, {"unknown": one}),
    )
    return by_age(parts, written)


@torch.no_grad()
def loglinear_error_by_age(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    written: Written,
    loss_mask: Bool[Tensor, " T"],
) -> ByAge:
    """How far the interpolated log pi_{v+1} is from the recomputed, and the behavior policy's own: for `error_metrics`.

    Over the tokens old enough to need one that have one stored.
    """
    drawn, stored = loglinear(proximal, behavior, written.age).double(), written.recomputed.double()
    error, step = drawn - stored, stored - behavior.double()
    counted = loss_mask & written.known & (written.age >= STORED_FROM) & finite(error) & finite(step)
    sums = {
        "tokens": torch.ones_like(error),
        "error": error,
        "absolute": error.abs(),
        "squared": error.square(),
        "step_squared": step.square(),
    }
    return by_age([Rows(counted, sums, {"largest": error.abs()})], written)


def weight_metrics(measured: ByAge) -> dict[str, float]:
    """Of a whole step, each also by age (`/age_2`): on the host, of merged sums.

    behav_imp_weight/{avg,std,min,max,ess}: weights applied; ess is (sum w)^2 / (n sum w^2).
    behav_imp_weight/var/segment_wise, /standard: variance of pi_{v+1} / pi_v and of pi_V / pi_v over the same tokens.
    behav_kl/avg: mean of log pi_v - log pi_{v+1}.
    staleness/tokens: their number; staleness/unknown: those whose weight is not known; staleness/avg: mean age.
    """
    return _named(measured, _weight_row)


def error_metrics(measured: ByAge) -> dict[str, float]:
    """Of `loglinear_error_by_age`, in nats, each also by age.

    loglinear/error/{avg,abs,rms,max}: of the interpolated log-prob.
    loglinear/error/step_rms: root mean square of log pi_{v+1} - log pi_v itself, which the error is to be held against.
    """
    return _named(measured, _error_row)


def _excess(log_ratio: Tensor) -> Tensor:
    """r - 1, exact where r is near 1."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()


def _weight_row(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    kept, tokens = row["kept"], row["tokens"]
    if kept:
        weight = kept + row["weight_excess"]
        squares = row["weight_excess_squared"] + weight + row["weight_excess"]
        yield "behav_imp_weight/avg", weight / kept
        yield "behav_imp_weight/std", math.sqrt(_variance(row, "weight_excess", kept))
        yield "behav_imp_weight/min", -row["smallest"]
        yield "behav_imp_weight/max", row["largest"]
        yield "behav_imp_weight/ess", weight**2 / (kept * squares) if squares > 0 else 0.0
    if tokens:
        yield "behav_imp_weight/var/segment_wise", _variance(row, "excess", tokens)
        yield "behav_imp_weight/var/standard", _variance(row, "standard_excess", tokens)
        yield "behav_kl/avg", row["kl"] / tokens
        yield "staleness/avg", row["age"] / tokens
    yield "staleness/tokens", tokens
    yield "staleness/unknown", row["unknown"]


def _error_row(row: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    tokens = row["tokens"]
    if tokens:
        yield "loglinear/error/avg", row["error"] / tokens
        yield "loglinear/error/abs", row["absolute"] / tokens
        yield "loglinear/error/rms", math.sqrt(row["squared"] / tokens)
        yield "loglinear/error/max", row["largest"]
        yield "loglinear/error/step_rms", math.sqrt(row["step_squared"] / tokens)


def _variance(row: Mapping[str, float], name: str, count: float) -> float:
    """From the sums of x - 1 and of its square; never below 0, which rounding could reach."""
    return max(0.0, row[f"{name}_squared"] / count - (row[name] / count) ** 2)


def _named(
    measured: ByAge, metrics: Callable[[Mapping[str, float]], Iterator[tuple[str, float]]]
) -> dict[str, float]:
    return {
        f"{name}/{group}" if group else name: value
        for group, row in measured.groups.items()
        for name, value in metrics(row)
    }

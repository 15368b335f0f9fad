"""The metrics of the trainer against itself: equal tokens, equal weights, other micro-batches."""

from __future__ import annotations

import math

from mis_plugins.metrics.quantity import known, ratio_of

RESPLIT = ("resplit_differs", "resplit_diff_abs_mean", "resplit_diff_abs_max")


def resplit_metrics(tokens: float, differing: float, apart: float, largest: float) -> dict[str, float]:
    """Every known metric of two log-prob passes over the valid tokens of a rollout, by name.

    Args:
        differing: how many tokens have another log-prob in the second pass.
        apart, largest: the sum of |difference|, and the largest.
    """
    most = largest if tokens else math.nan
    return known(
        dict(zip(RESPLIT, (ratio_of(differing, tokens), ratio_of(apart, tokens), most), strict=True))
    )

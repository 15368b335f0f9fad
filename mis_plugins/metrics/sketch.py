"""Quantiles of numbers that no process holds together: histograms over fixed logarithmic buckets, whose counts add.

A bucket is as wide as a fixed share of its values, of either sign, so that an order statistic is off by at most
`RELATIVE_ERROR` of itself. A size below `SMALLEST` reads 0, a size above `LARGEST` reads `LARGEST`. A ratio r is held
as its logarithm, whose exp is off by a factor of at most exp(RELATIVE_ERROR |log r|): 1.007 at r = 2, 1.047 at 100,
1.22 at e^20. Counts are integers, so that the split of the numbers into parts does not change the histogram.

Masson, Rim and Lee 2019, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees".
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RELATIVE_ERROR = 0.01
SMALLEST = 1e-8  # a float32 log-prob near 1 has steps of 6e-8
LARGEST = 1e4  # sums of log ratios reach thousands

GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
STEPS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH))
SIZE = 2 * STEPS + 3  # buckets of either sign, one beyond either end, and zero in the middle


def edges(device: torch.device) -> Float[Tensor, " _"]:
    """Upper ends of all buckets but the last, in ascending order."""
    exponents = torch.arange(STEPS + 1, dtype=torch.float64, device=device)
    positive = (exponents * math.log(GROWTH) + math.log(SMALLEST)).exp()
    return torch.cat([-positive.flip(0), positive])


def histograms(
    x: Float[Tensor, "H K"], counted: Bool[Tensor, "*H K"], edges: Float[Tensor, " _"]
) -> Int[Tensor, "H B"]:
    """How many of the counted values of each row lie in each bucket.

    Args:
        counted: which values enter: one mask for all rows, or one mask a row.
    """
    # Comparing with edges is exact; vectorized and scalar logarithms differ in the last bit.
    bucket = torch.bucketize(x.to(edges.dtype), edges)
    empty = torch.zeros(x.shape[0], SIZE, dtype=torch.int64, device=x.device)
    return empty.scatter_add_(1, bucket, counted.long().expand_as(bucket))


def quantile(counts: Int[Tensor, " B"], q: float) -> float:
    """The q-quantile, interpolated between order statistics as `torch.quantile` does; NaN of an empty histogram.

    Each of the two order statistics is off by at most `RELATIVE_ERROR` of itself (or `SMALLEST`). The call reads
    `counts`, which should be on the host.
    """
    cumulative = counts.cumsum(0)
    rank = q * (int(cumulative[-1]) - 1)
    if rank < 0:
        return math.nan
    ranks = torch.tensor([math.floor(rank), math.ceil(rank)])
    low, high = (_value(bucket) for bucket in torch.searchsorted(cumulative, ranks, right=True).tolist())
    return low + (high - low) * (rank - math.floor(rank))


def _value(bucket: int) -> float:
    """The value that stands for a bucket: in proportion equally far from both ends of the bucket."""
    step = abs(bucket - STEPS - 1)
    if step == 0:
        return 0.0
    size = SMALLEST * GROWTH ** (step - 1) * (2 * GROWTH / (1 + GROWTH)) if step <= STEPS else LARGEST
    return math.copysign(size, bucket - STEPS - 1)

"""Quantiles of numbers that no process holds together: histograms over fixed logarithmic buckets, whose counts add.

A bucket is as wide as a fixed share of its values, of either sign, so that an order statistic is off by at most
`RELATIVE_ERROR` of itself. A size below `SMALLEST` reads 0, a size above `LARGEST` reads `LARGEST`. A ratio r is held
as its logarithm, whose exp is off by a factor of at most exp(RELATIVE_ERROR |log r|): 1.007 at r = 2, 1.047 at 100,
1.22 at e^20. Counts are integers, so that the split of the numbers into parts does not change the histogram.

Masson, Rim and Lee 2019, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees".
"""

import math
from functools import cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

RELATIVE_ERROR = 0.01
SMALLEST = 1e-8  # a float32 log-prob near 1 has steps of 6e-8
LARGEST = 1e4  # sums of log ratios reach thousands
GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
STEPS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH))
# A CPU looks long rows up in a table: a search takes ten times as long.
LONG = 4_096
KEPT_BITS, DROPPED_BITS = 18, 46  # sign, exponent and six bits of the mantissa; the rest of a float64
SIZE = 2 * STEPS + 3  # buckets of either sign, one beyond either end, and zero in the middle


def edges(device: torch.device) -> Float[Tensor, " _"]:
    """Upper ends of all buckets but the last, in ascending order."""
    first, last = math.log10(SMALLEST), math.log10(SMALLEST) + STEPS * math.log10(GROWTH)
    positive = torch.logspace(first, last, STEPS + 1, dtype=torch.float64, device=device)
    return torch.cat([-positive.flip(0), positive])


edges_on_cpu = cache(partial(edges, torch.device("cpu")))  # not kept on a GPU, where each stream would have to wait


def histograms(x: Float[Tensor, "H K"], where: Float[Tensor, " K"], edges: Float[Tensor, " _"]) -> Float[Tensor, "H B"]:
    """How many values of each row, of those that `where` marks by 1, lie in each bucket, as whole numbers."""
    # Comparing with edges is exact; vectorized and scalar logarithms differ in the last bit.
    long = x.is_cpu and x.shape[-1] >= LONG
    bucket = _looked_up(x.double()) if long else torch.bucketize(x.to(edges.dtype), edges)
    return where.new_zeros(len(x), SIZE).scatter_add_(1, bucket, where.expand_as(bucket))


@cache
def _cells() -> tuple[Int[Tensor, " C"], Float[Tensor, " C"]]:
    """Bucket of the lowest float64 of each cell, and the edge at which the next bucket begins.

    A cell is all numbers that share their leading bits, up to six of the mantissa. Buckets are wider than cells.
    """
    first = torch.arange(1 << KEPT_BITS, dtype=torch.int64, device="cpu") << DROPPED_BITS
    negative = first < 0
    lowest = torch.where(negative, first | ((1 << DROPPED_BITS) - 1), first).view(torch.float64)
    lowest = torch.where(negative, lowest.nan_to_num(nan=-math.inf), lowest)  # -inf shares its cell with NaN
    ends = edges_on_cpu()
    bucket = torch.bucketize(lowest, ends)
    return bucket, torch.cat([ends, ends.new_tensor([math.inf])])[bucket]


def _looked_up(x: Float[Tensor, "H K"]) -> Int[Tensor, "H K"]:
    """What `torch.bucketize` answers, without a search at each number."""
    bucket, edge = _cells()
    cell = x.view(torch.int64) >> DROPPED_BITS  # below 0 where x is negative, and `take` counts from the end
    return bucket.take(cell) + (edge.take(cell) < x)  # an index takes half as long again


def quantile(counts: Float[Tensor, " B"], q: float) -> float:
    """The q-quantile, interpolated between order statistics as `torch.quantile` does; NaN of an empty histogram.

    Each of the two order statistics is off by at most `RELATIVE_ERROR` of itself (or `SMALLEST`). The call reads
    `counts`, which should be on the host.
    """
    cumulative = counts.cumsum(0)
    rank = q * (int(cumulative[-1]) - 1)
    if rank < 0:
        return math.nan
    ranks = counts.new_tensor([math.floor(rank), math.ceil(rank)])
    low, high = (_value(bucket) for bucket in torch.searchsorted(cumulative, ranks, right=True).tolist())
    return low + (high - low) * (rank - math.floor(rank))


def _value(bucket: int) -> float:
    """The value that stands for a bucket: in proportion equally far from both ends of the bucket."""
    step = abs(bucket - STEPS - 1)
    if step == 0:
        return 0.0
    size = SMALLEST * GROWTH ** (step - 1) * (2 * GROWTH / (1 + GROWTH)) if step <= STEPS else LARGEST
    return math.copysign(size, bucket - STEPS - 1)

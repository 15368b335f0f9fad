"""Quantiles from histograms: within the stated error of the exact ones, and the same however the data is split."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import EPS64

from mis_plugins.metrics.sketch import LARGEST, LONG, RELATIVE_ERROR, SIZE, SMALLEST, edges, histograms, quantile

CPU = torch.device("cpu")

values = st.one_of(
    st.just(0.0), st.floats(-1e-7, 1e-7), st.floats(-1.5, 1.5), st.floats(-LARGEST, LARGEST), st.just(1e-300)
)
samples = st.lists(values, min_size=1, max_size=60)


def sketch(x: list[float]) -> torch.Tensor:
    return histograms(torch.tensor([x]).double(), torch.ones(len(x), dtype=torch.float64), edges(CPU))[0]


def stated_error(x: list[float], q: float) -> float:
    """Of the two order statistics that the quantile lies between, each in its share."""
    ordered, rank = sorted(x), q * (len(x) - 1)
    share = rank - math.floor(rank)
    low, high = abs(ordered[math.floor(rank)]), abs(ordered[math.ceil(rank)])
    worst = RELATIVE_ERROR * ((1 - share) * low + share * high) + SMALLEST
    return worst + 100 * EPS64 * LARGEST  # of the edges, whose exponent is at most 100 in size


@given(samples, st.floats(0, 1))
def test_a_quantile_keeps_to_the_stated_error(x: list[float], q: float):
    exact = float(torch.quantile(torch.tensor(x).double(), q))
    assert abs(quantile(sketch(x), q) - exact) <= stated_error(x, q)


@given(samples, st.data())
def test_any_split_gives_the_same_histogram(x: list[float], data: st.DataObject):
    order = data.draw(st.permutations(x))
    cut = data.draw(st.integers(0, len(x)))
    assert torch.equal(sketch(order[:cut]) + sketch(order[cut:]), sketch(x))


@pytest.mark.parametrize("x", [LARGEST * 2, 1e300, math.inf])
def test_what_lies_beyond_reads_as_the_largest(x: float):
    assert quantile(sketch([x]), 0.5) == LARGEST
    assert quantile(sketch([-x]), 0.5) == -LARGEST


def test_what_does_not_count_does_not_count():
    x = torch.tensor([[1.0, math.nan, 3.0], [-2.0, 1.0, math.inf]])
    counts = histograms(x, torch.tensor([1.0, 0.0, 0.0]).double(), edges(CPU))
    assert counts.sum(-1).tolist() == [1, 1]
    with torch.device("meta"):  # a default of another's
        quantiles = [quantile(row, 1.0) for row in counts]
    assert quantiles == pytest.approx([1.0, -2.0], rel=RELATIVE_ERROR)


def test_nothing_has_no_quantile():
    assert math.isnan(quantile(sketch([]), 0.5))


def test_buckets_are_as_many_as_counts():
    assert len(edges(CPU)) == SIZE - 1
    assert float(edges(CPU)[-1]) >= LARGEST


@pytest.mark.parametrize("log_ratio", [0.003, math.log(2), -math.log(2), math.log(100), -7.5, 20.0])
def test_a_ratio_is_off_by_a_factor_that_grows_with_its_logarithm(log_ratio: float):
    """1% is of the logarithm: of a ratio r that is a factor of r^0.01, which is 1.047 at 100."""
    nearby = [log_ratio * (1 + 1e-4 * i) for i in range(400)]  # more than two buckets of them
    factors = [math.exp(quantile(sketch([x]), 0.5) - x) for x in nearby]
    bound = math.exp(RELATIVE_ERROR * abs(max(nearby, key=abs)) + SMALLEST)
    assert 1 / bound <= min(factors) and max(factors) <= bound
    assert max(factors) > bound**0.9  # and is no smaller


def test_long_rows_fall_into_the_buckets_of_short_ones():
    """A long row is looked up in a table: every edge, its neighbors, both zeros and both infinities."""
    ends = edges(torch.device("cpu"))
    up, down = (torch.nextafter(ends, ends.new_tensor(way)) for way in (math.inf, -math.inf))
    odd = ends.new_tensor([0.0, -0.0, math.inf, -math.inf, 5e-324, -5e-324, 1e300, -1e300])
    random = torch.randn(LONG, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.cat([ends, up, down, odd, random, random * 1e-8, random * 1e5]).unsqueeze(0)
    assert x.shape[1] >= LONG
    marks = torch.ones_like(x[0])
    parts = [
        histograms(part, mark, ends) for part, mark in zip(x.split(LONG // 2, 1), marks.split(LONG // 2), strict=True)
    ]
    with torch.device("meta"):  # a default of another's
        whole = histograms(x, marks, ends)
    assert torch.equal(whole, torch.stack(parts).sum(0))
    nan, low = x.masked_fill(x > 1, math.nan), (x[0] <= 1).double()
    assert torch.equal(histograms(nan, low, ends), histograms(x, low, ends))

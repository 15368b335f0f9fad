"""M2PO against its twin in the oracle: which tokens of a micro-batch leave the loss, alone and beside rules."""

import math
from typing import Any

import oracle
import pytest
import torch
from batches import Batch, batches, make_batch
from drive import assert_matches_oracle, corrected, run
from hypothesis import assume, given
from hypothesis import strategies as st
from tolerances import DECISION
from torch.utils._python_dispatch import TorchDispatchMode

from mis_plugins.correction.m2po import first_dropped

THRESHOLDS = [1e-3, 0.04, 0.5, 50.0]
BESIDE: list[dict] = [
    {"weight": None},
    {"weight": {"level": "token", "bound": "mask", "upper": 2.0}},
    {"weight": {"level": "token", "bound": "truncate", "upper": 2.0, "normalize": {"over": "kept"}}},
    {"weight": {"level": "geometric", "bound": "truncate", "upper": 2.0}, "aggregate": "kept"},
    {"weight": None, "reject": [{"over": "mean", "lower": 0.9, "upper": 1.1}], "denominator": "kept"},
    {"weight": None, "reject": [{"over": "mean", "lower": 0.9, "upper": 1.1}], "aggregate": "kept"},
    {"weight": None, "reject": [{"over": "mean", "unit": "segment", "upper": 1.1, "aggregate": "kept"}]},
    {"weight": None, "on_all_rejected": "keep"},
]


@given(batch=batches(), threshold=st.sampled_from(THRESHOLDS), beside=st.sampled_from(BESIDE))
def test_the_hook_drops_what_the_twin_drops(batch: Batch, threshold: float, beside: dict) -> None:
    config = {**beside, "m2_threshold": threshold, "metrics": "full"}
    expected = oracle.correct(batch.samples, config)
    assume(expected.margin > DECISION)
    assert_matches_oracle(run(batch, config), batch, expected)


def kept(log_ratios: list[list[float]], threshold: float) -> list[bool]:
    """Which tokens of responses with these log ratios stay."""
    batch = make_batch([([x - 2.0 for x in row], [-2.0] * len(row), [1] * len(row)) for row in log_ratios])
    return corrected(batch, {"weight": None, "m2_threshold": threshold}).keep.tolist()


# The squares are 0, 0.25, 1 and 4. The mean of the smallest three is 0.417, and the mean of all four 1.3125.
OF_EITHER_SIGN = [[1.0, -2.0], [0.0, -0.5]]
LARGEST, AT_IT, EQUAL = "the largest leave", "a mean at the threshold is not below it", "no rule says which 1 leaves"


@pytest.mark.parametrize(
    ("why", "rows", "threshold", "expected"),
    [
        (LARGEST, OF_EITHER_SIGN, 0.5, [True, False, True, True]),
        (LARGEST, OF_EITHER_SIGN, 1.32, [True] * 4),
        (LARGEST, OF_EITHER_SIGN, 0.4, [False, False, True, True]),
        (LARGEST, OF_EITHER_SIGN[::-1], 0.5, [True, True, True, False]),
        (AT_IT, [[0.0, 1.0]], 0.5, [True, False]),
        (AT_IT, [[0.0, 1.0]], 0.5000001, [True, True]),
        (EQUAL, [[1.0, 0.0, -1.0]], 0.6, [False, True, False]),
        ("all are large", [[2.0, 3.0]], 0.5, [False, False]),
    ],
)
def test_which_tokens_stay(why: str, rows: list[list[float]], threshold: float, expected: list[bool]) -> None:
    assert kept(rows, threshold) == expected, why


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_micro_batch_drops_nothing(count: int) -> None:
    squares = torch.full((count,), torch.inf)
    assert first_dropped(squares, 0.04).tolist() == [math.inf]


class Deterministic(TorchDispatchMode):
    """Refuses what torch refuses on a GPU under `use_deterministic_algorithms`: a running sum of floats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() != "aten::cumsum" or not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_a_host_with_deterministic_mode_is_served() -> None:
    """Megatron's --deterministic-mode makes torch raise within the first micro-batch."""
    with Deterministic():
        assert kept(OF_EITHER_SIGN, 0.5) == [True, False, True, True]


@pytest.mark.parametrize("threshold", [1e-30, 0.04, 1e30])
def test_of_many_tokens_as_many_stay_as_by_sums_in_python(threshold: float) -> None:
    squares = (torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 2 * threshold**0.5).square()
    mean = lambda count: math.fsum(ordered[:count]) / count  # noqa: E731
    ordered = squares.sort().values.tolist()
    stay = ordered.index(first_dropped(squares, threshold).item())
    assert 0 < stay < len(ordered) and mean(stay) < threshold <= mean(stay + 1)


@pytest.mark.parametrize(("threshold", "dropped"), [(5e-324, 1.0), (1e-300, 1.0), (1.7e308, math.inf)])
def test_any_threshold_of_a_float_serves(threshold: float, dropped: float) -> None:
    assert first_dropped(torch.tensor([0.0, 1.0, 1e38]), threshold).item() == dropped


@pytest.mark.parametrize(
    ("tiny", "threshold", "dropped"),
    [(0.0, 2**-14, 1.0), (0.0, 2**-14 * (1 + 2**-52), math.inf), (2**-54, 2**-14, 1.0), (0.0, 2**-13, math.inf)],
)
def test_less_than_a_unit_decides_about_many_tokens(tiny: float, threshold: float, dropped: float) -> None:
    """The mean of all is 2^-14, or above it by less than float64 tells of 16,384 squares in one sum of units."""
    squares = torch.tensor([1.0, *[tiny] * (2**14 - 1)])
    assert first_dropped(squares, threshold).item() == dropped

"""Requests for tokens that wait for their score: what is picked from an answer, and how they are packed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.versions.recompute import Request, batches


@given(st.lists(st.integers(1, 25), max_size=12), st.integers(1, 30))
def test_batches_keep_the_budget(sizes: list[int], budget: int):
    packed = batches([Request(i, (0,) * size, (0,)) for i, size in enumerate(sizes)], budget)
    assert sorted(one.number for batch in packed for one in batch) == list(range(len(sizes)))
    for batch in packed:
        assert sum(len(one.tokens) for one in batch) <= budget or len(batch) == 1
    # First-fit leaves no two batches that would fit into one.
    loads = [sum(len(one.tokens) for one in batch) for batch in packed]
    assert all(a + b > budget for a, b in itertools.combinations(loads, 2))


def test_a_budget_of_nothing():
    with pytest.raises(ConfigError, match="got 0 tokens; give at least 1"):
        batches([], 0)


def test_the_wanted_tokens_are_picked_from_those_between_them():
    request = Request(0, (7, 8, 1, 2, 3, 4), (1, 3))
    assert request.count == 3 and request.wanted([-1.0, -2.0, -3.0]) == [-1.0, -3.0]


@pytest.mark.parametrize("count", [2, 4])
def test_too_few_log_probs_or_too_many(count: int):
    with pytest.raises(InputError, match=f"{count} log-probs for a sequence of which 3 were asked for"):
        Request(0, (7, 8, 1, 2, 3, 4), (1, 3)).wanted([-1.0] * count)

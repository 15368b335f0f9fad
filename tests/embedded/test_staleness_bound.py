"""The bound on staleness: never passed under any order of events, reached, and never a standstill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.host.asynchronous.staleness_bound import HeadOffpolicyness
from mis_plugins.errors import ConfigError

ROLLOUTS = 12
LENGTH = 4  # tokens of a response; each rollout has one


def test_what_may_begin():
    assert list(HeadOffpolicyness(0).admitted(3, 3)) == [3]
    assert list(HeadOffpolicyness(2).admitted(0, 0)) == [0, 1, 2]
    assert list(HeadOffpolicyness(2).admitted(3, 0)) == []
    assert list(HeadOffpolicyness(2).admitted(3, 4)) == [3, 4, 5, 6]
    assert list(HeadOffpolicyness(2).admitted(5, 0)) == [], (
        "a bound that was larger before takes nothing back"
    )


def test_a_negative_bound():
    with pytest.raises(ConfigError, match="max_head_offpolicyness: got -1; give 0, which is synchronous"):
        HeadOffpolicyness(-1)


def simulated(bound: int, order: list[int]) -> list[list[int]]:
    """Ages of the tokens of each rollout in training, with events in a random order.

    An event of -1 lets the trainer train, if it can; of n >= 0, the n-th of the responses under way draw a token.
    """
    admission, version = HeadOffpolicyness(bound), 0
    written: list[list[int]] = [[] for _ in admission.admitted(0, 0)]
    trained: list[list[int]] = []
    for event in order:
        running = [one for one in written if len(one) < LENGTH]
        if event >= 0:
            if running:
                running[event % len(running)].append(version)
        elif len(written[version]) == LENGTH:
            trained.append([version - wrote for wrote in written[version]])
            version += 1
            written += [[] for _ in admission.admitted(len(written), version)]
    return trained


@given(st.integers(0, 5), st.lists(st.integers(-1, 8), min_size=20, max_size=300))
def test_no_order_of_events_passes_the_bound(bound: int, order: list[int]):
    for ages in simulated(bound, order):
        assert all(0 <= age <= bound for age in ages)


@given(st.integers(0, 5), st.lists(st.integers(-1, 8), max_size=200))
def test_no_order_of_events_leads_to_a_standstill(bound: int, order: list[int]):
    """Whatever happened, the worker alone and then the trainer alone get further."""
    before = len(simulated(bound, order))
    worker_alone = [0] * LENGTH * (bound + 1)
    assert len(simulated(bound, order + worker_alone + [-1])) > before


@pytest.mark.parametrize("bound", range(6))
def test_a_trainer_slower_than_the_rollout_reaches_the_bound(bound: int):
    """A worker that finishes whatever may begin: from then on every token is as old as it may be."""
    order = ([0] * LENGTH * (bound + 1) + [-1]) * ROLLOUTS
    trained = simulated(bound, order)
    assert len(trained) == ROLLOUTS
    assert trained[bound:] == [[bound] * LENGTH] * (ROLLOUTS - bound)
    assert [ages[0] for ages in trained[:bound]] == list(range(bound)), "the first ones wait for each other"

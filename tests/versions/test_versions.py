"""Responses while they grow: each token keeps what it was sampled with, and waits for the score of the next version."""

import itertools
import math
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.host.asynchronous.response import Response, written
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.versions.spans import Request, batches, from_run_lengths, run_lengths, spans


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Stretches of a response: the version (-1: a tool answers), how many tokens, whether over a stale cache."""
    steps = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans(), st.booleans())))
    versions = itertools.accumulate(up for up, _, _, _ in steps)
    pairs = zip(versions, steps, strict=True)
    return [(-1 if tool else version, n, stale and not tool) for version, (_, n, stale, tool) in pairs]


def grown(history: list[tuple[int, int, bool]]) -> Response:
    """Token i has id i and log-prob -i."""
    response = Response(prompt=(7, 8))
    for version, count, stale in history:
        ids = range(len(response.tokens), len(response.tokens) + count)
        if version < 0:
            response = response.observe(list(ids))
        else:
            response = response.append(list(ids), [-float(i) for i in ids], version, stale)
    return response


@given(histories())
def test_every_token_keeps_what_it_was_sampled_with(history: list[tuple[int, int, bool]]):
    response = grown(history)
    expected = [(version, stale) for version, count, stale in history for _ in range(count)]
    assert response.prompt == (7, 8)
    assert response.tokens == tuple(range(len(expected)))
    assert list(zip(response.versions, response.stale_cache, strict=True)) == expected
    sampled = [0.0 if version < 0 else -float(i) for i, (version, _) in enumerate(expected)]
    assert list(response.log_probs) == sampled
    assert set(response.recomputed) <= {None}


@given(histories())
def test_runs_partition_the_response(history: list[tuple[int, int, bool]]):
    response = grown(history)
    runs = run_lengths(response.versions)
    assert from_run_lengths(runs) == list(response.versions)
    assert all(a != b for a, b in itertools.pairwise(runs[::2])) and all(count > 0 for count in runs[1::2])


@given(histories(), st.integers(0, 6))
def test_stored_once_and_only_where_asked(history: list[tuple[int, int, bool]], version: int):
    response = grown(history)
    positions = response.lacking(version)
    assert positions == [i for i, v in enumerate(response.versions) if v == version]
    after = response.stored(positions, [-0.5 - i for i in positions])
    assert after.lacking(version) == []
    for i, (before, now) in enumerate(zip(response.recomputed, after.recomputed, strict=True)):
        assert now == (-0.5 - i if i in positions else before)


def test_tensors():
    response = grown([(1, 1, False), (-1, 1, False), (2, 1, False)]).stored([0], [-0.25])
    tensors = written(response.versions, response.recomputed, 4)
    assert tensors.versions.tolist() == [1, -1, 2] and tensors.current == 4
    stored = tensors.recomputed.tolist()
    assert stored[0] == -0.25 and all(math.isnan(x) for x in stored[1:])


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: grown([(3, 1, False), (-1, 1, False)]).append([1], [-1.0], 1), InputError,
     "version 1 after version 3.*never go back"),
    (lambda: Response((1,)).append([1], [-1.0], -1), InputError, "version -1 after"),
    (lambda: Response((1,)).append([1, 2], [-1.0], 0), InputError, "2 tokens with 1 log-probs"),
    (lambda: batches([], 0), ConfigError, "got 0 tokens; give at least 1"),
    *((lambda count=count: Request(0, (7, 8, 1, 2, 3, 4), (1, 3)).wanted([-1.0] * count), InputError,
       f"{count} log-probs for a sequence of which 3 were asked for") for count in (2, 4)),
    (lambda: grown([(3, 1, False)]).stored([0], [-1.0]).stored([0], [-2.0]), AssertionError, "^$"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_what_no_response_can_be_is_refused(call: Callable[[], object], error: type[Exception], said: str):
    """A version before an older one, tokens without log-probs, and a token that is stored twice, a bug of ours."""
    with pytest.raises(error, match=said):
        call()


def reported(*stretches: tuple[str, int, int]) -> dict:
    """`meta_info` of one call of SGLang: of the last version by name, and all of them as spans."""
    named = [{"version": version, "start": start, "end": end} for version, start, end in stretches]
    return {"weight_version": stretches[-1][0], "weight_versions": named}


def test_spans_of_a_call():
    assert spans(reported(("3", 0, 4), ("5", 4, 6)), 6) == [(3, 0, 4), (5, 4, 6)]
    assert spans(reported(("3", 0, 0)), 0) == []


@pytest.mark.parametrize(
    ("meta_info", "message"),
    [
        ({"weight_version": "5"}, "no weight_versions; weight_version alone names"),
        (reported(("3", 0, 4), ("5", 5, 6)), "where token 4 should follow"),
        (reported(("3", 0, 4)), "up to token 4 of 6"),
        (reported(("default", 0, 6)), "version 'default' is not a number"),
        (reported(("\u00b2", 0, 6)), "version '\u00b2' is not a number"),
        (reported(("9" * 19, 0, 6)), "version '9.*' is not a number"),
        (reported(("3", 0, cast(int, 6.0))), "each span needs a version, a start and an end"),
        ({"weight_versions": None}, "got None; each span needs"),
        ({"weight_versions": [{"start": 0, "end": 6}]}, "each span needs"),
    ],
)
def test_spans_that_cannot_be_trusted(meta_info: dict, message: str):
    with pytest.raises(InputError, match=message):
        spans(meta_info, 6)


@given(histories())
def test_spans_rebuild_the_runs(history: list[tuple[int, int, bool]]):
    """What a response says of its runs, an engine says of a call."""
    response = grown([entry for entry in history if entry[0] >= 0])
    lengths = run_lengths(response.versions)
    stretches = itertools.pairwise(itertools.accumulate(lengths[1::2], initial=0))
    runs = [(version, *stretch) for version, stretch in zip(lengths[::2], stretches, strict=True)]
    if runs:
        meta_info = reported(*((str(version), start, stop) for version, start, stop in runs))
        assert spans(meta_info, len(response.tokens)) == runs


# ------------------------------------------------------------------------------------ tokens that wait for their score


@given(st.lists(st.integers(1, 25), max_size=12), st.integers(1, 30))
def test_batches_keep_the_budget(sizes: list[int], budget: int):
    packed = batches([Request(i, (0,) * size, (0,)) for i, size in enumerate(sizes)], budget)
    assert sorted(one.number for batch in packed for one in batch) == list(range(len(sizes)))
    for batch in packed:
        assert sum(len(one.tokens) for one in batch) <= budget or len(batch) == 1
    # First-fit leaves no two batches that would fit into one.
    loads = [sum(len(one.tokens) for one in batch) for batch in packed]
    assert all(a + b > budget for a, b in itertools.combinations(loads, 2))


def test_the_wanted_tokens_are_picked_from_those_between_them():
    request = Request(0, (7, 8, 1, 2, 3, 4), (1, 3))
    assert request.count == 3 and request.wanted([-1.0, -2.0, -3.0]) == [-1.0, -3.0]

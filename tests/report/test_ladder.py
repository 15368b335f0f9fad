"""A mismatch beside the real model's: the rungs are those of the one record, and nothing between them is claimed."""

from __future__ import annotations

import pytest

from mis_plugins.explain.rungs import record
from mis_plugins.report.verdict import AS_MUCH, in_words, nearest

RUNGS = record().steps


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_each_rung_is_named_at_its_own_mismatch(rung) -> None:
    assert nearest(rung.k3, RUNGS) is rung
    assert in_words(rung.k3) == f"A real model shows as much ({rung.k3:.2g}) with an engine in {rung.words}."


def test_beyond_the_ladder_the_last_rung_is_a_measure() -> None:
    first, last = RUNGS[0], RUNGS[-1]
    assert in_words(first.k3 / 10) == (
        f"The mismatch is 10 times less than a real model shows with an engine in {first.name}."
    )
    assert in_words(10 * last.k3) == (
        f"The mismatch is 10 times what a real model shows with an engine in {last.name}."
    )
    assert "nothing to correct" in in_words(0.0)


def test_between_two_rungs_neither_is_named_as_the_engine() -> None:
    wide = [
        (low, high)
        for low, high in zip(RUNGS, RUNGS[1:], strict=False)
        if high.k3 > 1.2 * AS_MUCH**2 * low.k3
    ]
    for low, high in wide:
        said = in_words((low.k3 * high.k3) ** 0.5)
        assert f"an engine in {low.name} ({low.k3:.2g}) and in {high.name} ({high.k3:.2g})" in said

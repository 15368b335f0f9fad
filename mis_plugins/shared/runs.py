"""Whole numbers of tokens as runs: a value and the number of neighbours that share it, over and over in one list."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


def packed(values: Iterable[int]) -> list[int]:
    """Value and length of each run.

    >>> packed([4, 4, 5])
    [4, 2, 5, 1]
    """
    runs = ((value, len(list(run))) for value, run in itertools.groupby(values))
    return [*itertools.chain.from_iterable(runs)]


def unpacked(runs: Sequence[int]) -> list[int]:
    """The values that `packed` wrote.

    >>> unpacked([4, 2, 5, 1])
    [4, 4, 5]
    """
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [value for value, count in pairs for _ in range(count)]

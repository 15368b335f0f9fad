"""Since when: the steps at which a curve changes its level for good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

SMALLEST = 1e-12  # a KL below this counts as this
SIDE = 3  # steps that a level needs on either side of a change
STANDARD_ERRORS = 6.0
LEAST_FACTOR = 1.5
MOST = 5


@dataclass(frozen=True)
class Change:
    """A curve has one level up to a step, and another level from that step on.

    step: first step of the new level.
    before, after: geometric means of the two levels.
    sudden: whether half of the change happened within two steps; a drift is not sudden.
    apart: whether no step of one level reaches the other level's steps; a policy that is unstable comes and goes.
    """

    step: int
    before: float
    after: float
    sudden: bool = True
    apart: bool = True

    @property
    def factor(self) -> float:
        return self.after / self.before


def changes(steps: Sequence[int], values: Sequence[float]) -> list[Change]:
    """Changes of a positive curve, by repeated halving: the cut that best separates two levels, then each side anew.

    A cut counts where the levels differ by `LEAST_FACTOR` and by `STANDARD_ERRORS` of the noise between neighbours.
    """
    logs = [math.log(max(value, SMALLEST)) for value in values]
    edges = [0, *_cuts(torch.tensor(logs, dtype=torch.float64))[:MOST], len(logs)]
    spans = zip(edges, edges[1:], edges[2:], strict=False)
    return [_change(steps[cut], logs[start:cut], logs[cut:stop]) for start, cut, stop in spans]


def _change(step: int, before: Sequence[float], after: Sequence[float]) -> Change:
    """The change from one level, as logarithms of its steps, to another."""
    low, high = fmean(before), fmean(after)
    sudden = abs(fmean(after[:2]) - fmean(before[-2:])) >= abs(high - low) / 2
    apart = max(before) < min(after) or max(after) < min(before)
    return Change(step, math.exp(low), math.exp(high), sudden, apart)


def _cuts(logs: Float[Tensor, " S"]) -> list[int]:
    """All cuts, in order."""
    spans, found = [(0, len(logs))], []
    while spans:
        start, stop = spans.pop()
        cut = _best_cut(logs[start:stop])
        if cut is not None:
            found.append(start + cut)
            spans += [(start, start + cut), (start + cut, stop)]
    return sorted(found)


def _best_cut(logs: Float[Tensor, " S"]) -> int | None:
    """The cut with the largest distance of both levels in standard errors; None where no distance counts."""
    size = len(logs)
    if size < 2 * SIDE:
        return None
    count = torch.arange(SIDE, size - SIDE + 1)
    sums = logs.cumsum(0)
    before, after = sums[count - 1] / count, (sums[-1] - sums[count - 1]) / (size - count)
    distance = (after - before).abs()
    score = distance / (_noise(logs) * (1 / count + 1 / (size - count)).sqrt())
    score = torch.where(distance < math.log(LEAST_FACTOR), 0, score)
    best = int(score.argmax())
    return None if score[best] < STANDARD_ERRORS else int(count[best])


def _noise(logs: Float[Tensor, " S"]) -> float:
    """Standard deviation from the differences of neighbours, which a single change hardly moves."""
    median = float(logs.diff().abs().quantile(0.5))
    return max(median / 0.954, 0.02)  # median |difference| of two normal numbers is 0.954 sd

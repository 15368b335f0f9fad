"""Since when: the steps at which a curve changes its level for good, and the smallest change that would have shown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.metrics.slope import STANDARD_ERRORS

SMALLEST = 1e-12  # a KL below this counts as this
SIDE = 3  # steps that a level needs on either side of a change
LEAST_FACTOR = 1.5
FEW_FACTOR = 10.0  # between the ends of a curve: a change, however few the steps are
MOST = 8  # changes, the largest
BESIDE = 8  # steps on either side that tell the noise at a step
SUDDEN = 0.6  # of the change of a curve without levels, within one step


@dataclass(frozen=True)
class Change:
    """A curve has one level up to a step, and another level from that step on.

    step: first step of the new level, which may be the only one.
    before, after: geometric means of the two levels.
    sudden: whether half of the change happened in one step; a drift is not sudden.
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


def joined_steps(values: Mapping[int, float], tokens: Mapping[int, float], least: float) -> dict[int, float]:
    """Neighbouring steps as one, by the first, until they hold `least` tokens: a few tokens have any mean.

    The steps that are left at the end count with those before.
    """
    groups: list[list[int]] = [[]]

    def held(group: Sequence[int]) -> float:
        return sum(tokens[step] for step in group)

    for step in values:
        if held(groups[-1]) >= least:
            groups.append([])
        groups[-1].append(step)
    if len(groups) > 1 and held(groups[-1]) < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    return {group[0]: sum(values[step] * tokens[step] for step in group) / held(group) for group in groups if group}


def changes(steps: Sequence[int], values: Sequence[float]) -> list[Change]:
    """Changes of a positive curve, by repeated halving: the cut that best separates two levels, then each side anew.

    A cut counts where the levels differ by `LEAST_FACTOR` and by `STANDARD_ERRORS` of the noise between neighbours.
    Where two neighbours alone do, a cut stands between them, so that a single step may be a level. Without a cut, a
    line through all steps counts by the same two measures, and so do ends that lie `FEW_FACTOR` apart.
    """
    logs = _logs(values)
    cuts, levels = _cuts(logs), logs.tolist()
    if not cuts:
        return _drift(steps, logs)
    edges = [0, *cuts, len(logs)]
    spans = zip(edges, edges[1:], edges[2:], strict=False)
    every = [_change(steps[cut], levels[start:cut], levels[cut:stop]) for start, cut, stop in spans]
    largest = sorted(every, key=lambda change: abs(math.log(change.factor)))[-MOST:]
    return sorted(largest, key=lambda change: change.step)


def smallest_rise(values: Sequence[float]) -> float:
    """The factor by which a curve of this noise and length must rise at its middle to count as a change."""
    size = len(values)
    if size < 2 * SIDE:
        return FEW_FACTOR
    spread = _noise(_logs(values)) * math.sqrt(1 / (size // 2) + 1 / (size - size // 2))
    return min(max(LEAST_FACTOR, math.exp(STANDARD_ERRORS * spread)), FEW_FACTOR)


def _logs(values: Sequence[float]) -> Float[Tensor, " S"]:
    return torch.tensor([math.log(max(value, SMALLEST)) for value in values], dtype=torch.float64)


def _change(step: int, before: Sequence[float], after: Sequence[float]) -> Change:
    """The change from one level, as logarithms of its steps, to another."""
    low, high = fmean(before), fmean(after)
    sudden = (after[0] - before[-1]) / (high - low) >= 0.5 if high != low else False
    apart = max(before) < min(after) or max(after) < min(before)
    return Change(step, math.exp(low), math.exp(high), sudden, apart)


def _cuts(logs: Float[Tensor, " S"]) -> list[int]:
    """All cuts, in order."""
    spans, cuts, edges = [(0, len(logs))], [], _edges(logs)
    while spans:
        start, stop = spans.pop()
        edge = next((edge for edge in edges if start < edge < stop), None)
        cut = _best_cut(logs[start:stop]) if edge is None else edge - start
        if cut is not None:
            cuts.append(start + cut)
            spans += [(start, start + cut), (start + cut, stop)]
    return sorted(cuts)


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


def _edges(logs: Float[Tensor, " S"]) -> list[int]:
    """Steps that differ from the one before by more than noise, and by twice what a rise or a fall around them does.

    The noise is that of all moves or that of the moves beside, whichever is larger.
    """
    if len(logs) < 2:
        return []
    moves = torch.nn.functional.pad(logs.diff(), (1, 1))
    around = torch.stack([moves[:-2], moves[2:]]) * moves[1:-1].sign()
    alone = moves[1:-1].abs() - 2 * around.amax(0).clamp(min=0)
    beside = torch.nn.functional.pad(moves[1:-1].abs(), (BESIDE, BESIDE), value=torch.nan).unfold(0, 2 * BESIDE + 1, 1)
    beside = torch.cat([beside[:, :BESIDE], beside[:, BESIDE + 1 :]], 1)
    noise = (beside.nanquantile(0.5, 1) / 0.954).clamp(min=_noise(logs))
    least = (STANDARD_ERRORS * 2**0.5 * noise).clamp(min=math.log(LEAST_FACTOR))
    least = math.log(FEW_FACTOR) if len(logs) < 2 * SIDE else least
    return [place + 1 for place in (alone >= least).nonzero().flatten().tolist()]


def _drift(steps: Sequence[int], logs: Float[Tensor, " S"]) -> list[Change]:
    """The change, from first to last eighth, of a curve without levels whose line or whose ends rise or fall."""
    size, eighth = len(logs), max(len(logs) // 8, 1)
    if size < 2:
        return []
    before, after = logs[:eighth].tolist(), logs[-eighth:].tolist()
    ends = fmean(after) - fmean(before)
    if abs(ends) < math.log(FEW_FACTOR) and not _follows_a_line(logs):
        return []
    moves = logs.diff() * math.copysign(1, ends)
    sudden = float(moves.max()) >= SUDDEN * abs(ends)
    place = int(moves.argmax()) + 1 if sudden else size - eighth
    return [replace(_change(steps[place], before, after), sudden=sudden)]


def _follows_a_line(logs: Float[Tensor, " S"]) -> bool:
    size = len(logs)
    if size < 2 * SIDE:
        return False
    place = torch.arange(size, dtype=logs.dtype) - (size - 1) / 2
    slope = float(place @ logs / place.square().sum())
    rest = logs - logs.mean() - slope * place
    error = math.sqrt(max(float(rest.square().sum()) / (size - 2), 0.02**2) / float(place.square().sum()))
    return abs(slope) * (size - 1) >= math.log(LEAST_FACTOR) and abs(slope) >= STANDARD_ERRORS * error


def _noise(logs: Float[Tensor, " S"]) -> float:
    """Standard deviation from the differences of neighbours, which a single change hardly moves."""
    median = float(logs.diff().abs().quantile(0.5))
    return max(median / 0.954, 0.02)  # median |difference| of two normal numbers is 0.954 sd

"""Whether two lists of log-probs belong to the same tokens: their correlation, and the shift that would restore it."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.metrics.slope import STANDARD_ERRORS

SHIFTS = (-2, -1, 0, 1, 2)
HERE = SHIFTS.index(0)
LONG_ENOUGH = 16  # usable tokens of a sequence whose correlation is read, and of either end that a cause may touch
SUMS = 6  # number, x, y, x^2, y^2 and xy of pairs
BROKEN = 0.6  # a correlation above this is never a sign; for one turn of several half of it, since turns are many
# In 999 of 1,000 clean responses 1 - correlation is at most (1.3 + 11 / sqrt(tokens)) times KL over variance.
QUANTILE, QUANTILE_OF_FEW = 1.3, 11.0
LEAST_KL = 0.003
RESTORED = 0.25  # by which the correlation of a shift must exceed that of every other shift


def correlation(sums: Float[Tensor, "6 N"]) -> Float[Tensor, " N"]:
    """Correlation of each column's pairs: 0 where one side alone varies, NaN where neither does.

    A column with zeros alone on one side has NaN. Zeros are certain tokens, or placeholders, a cause of their own.
    """
    n, x, y, xx, yy, xy = sums
    squares = torch.stack([xx - x * x / n, yy - y * y / n]).clamp(min=0)
    spread = squares.prod(0).sqrt()
    alone = torch.where((squares.amax(0) > 1e-3 * n) & (xx > 0) & (yy > 0), 0.0, torch.nan)
    return torch.where(spread > 1e-9 * n, (xy - x * y / n) / spread, alone)


def floor(sums: Float[Tensor, "6 N"], kl: float) -> Float[Tensor, " N"]:
    """The 0.1% quantile of the correlation in clean runs of this KL, number of tokens and variance of log mu.

    No clean list has one number throughout.
    """
    n, x, y, xx, yy, _ = sums
    variances = torch.stack([xx, yy]) / n - (torch.stack([x, y]) / n).square()
    low = 1 - (QUANTILE + QUANTILE_OF_FEW / n.sqrt()) * max(kl, LEAST_KL) / variances[0].clamp(min=1e-3)
    return torch.where(variances.amin(0) > 1e-9, low, 1.0)


def units(owner: Int[Tensor, " U"], turn: Int[Tensor, " U"]) -> tuple[Int[Tensor, " U"], Int[Tensor, " N"]]:
    """The unit of each token, and the sequence of each unit: a long turn alone, or a sequence's short turns."""
    run = ((owner.diff(prepend=owner[:1]) != 0) | (turn.diff(prepend=turn[:1]) != 0)).cumsum(0)
    names, unit = torch.where(run.bincount()[run] > LONG_ENOUGH, run, -1 - owner).unique(return_inverse=True)
    return unit, torch.zeros_like(names).scatter_(0, unit, owner)


@dataclass
class Lists:
    """Sums over the pairs (log mu of a token, log pi_old of the token `shift` places on), among usable tokens.

    within: for each shift the sums of every unit, over pairs within a turn, less the pair that lies furthest apart:
        one wild token, as a lost end, is no sign of lists of different tokens.
    owners: the sequence of each unit, of `size` sequences in all.
    turns, joins: sums over pairs of two turns of one sequence, and of two sequences.
    """

    within: list[Float[Tensor, "S 6 N"]] = field(default_factory=list)
    owners: list[Int[Tensor, " N"]] = field(default_factory=list)
    size: int = 0
    turns: Float[Tensor, "S 6"] = field(default_factory=lambda: torch.zeros(len(SHIFTS), SUMS).double())
    joins: Float[Tensor, "S 6"] = field(default_factory=lambda: torch.zeros(len(SHIFTS), SUMS).double())

    def add(self, pairs: Float[Tensor, "2 U"], owner: Int[Tensor, " U"], turn: Int[Tensor, " U"], size: int) -> None:
        """Add the usable tokens of `size` sequences; owner is a token's sequence, turn its turn."""
        unit, owners = units(owner, turn)
        within = torch.zeros(len(SHIFTS), SUMS, len(owners), dtype=torch.float64)
        for place, shift in enumerate(SHIFTS):
            first = slice(max(-shift, 0), max(pairs.shape[1] - max(shift, 0), 0))
            second = slice(max(shift, 0), max(pairs.shape[1] - max(-shift, 0), 0))
            a, b = pairs[0, first], pairs[1, second]
            rows = torch.stack([torch.ones_like(a), a, b, a * a, b * b, a * b])
            same, turned = owner[first] == owner[second], turn[first] != turn[second]
            apart = torch.where(same & ~turned, (a - b).abs(), -1)
            most = apart.new_zeros(len(owners)).scatter_reduce(0, unit[first], apart, "amax")
            within[place].index_add_(1, unit[first], rows * ((apart >= 0) & (apart < most[unit[first]])))
            self.turns[place] += rows[:, same & turned].sum(1)
            self.joins[place] += rows[:, ~same].sum(1)
        self.within.append(within)
        self.owners.append(owners + self.size)
        self.size += size

    def broken(self, kl: float) -> Bool[Tensor, " N"]:
        """Sequences with a unit that is broken."""
        return torch.bincount(torch.cat(self.owners)[self._broken(kl)], minlength=self.size) > 0

    def _broken(self, kl: float) -> Bool[Tensor, " N"]:
        """Units whose correlation is below that of clean runs; all where most are.

        The others count together, and so do those of the short ones whose lists lie further apart than the mean.
        """
        sums = torch.cat([sums_of_part[HERE] for sums_of_part in self.within], 1)
        long = sums[0] >= LONG_ENOUGH
        owners = torch.cat(self.owners)
        most = torch.where(owners.bincount()[owners] > 1, BROKEN / 2, BROKEN)
        broken = long & (correlation(sums) < floor(sums, kl).minimum(most))
        if broken.sum() > long.sum() / 2:
            return torch.ones_like(broken)
        n, distance = sums[0] * ~long, (sums[3] + sums[4] - 2 * sums[5]) * ~long
        for part in (~broken, distance * n.sum() > distance.sum() * n):
            rest = sums[:, part].sum(1, keepdim=True)
            if rest[0] >= LONG_ENOUGH**2:
                broken |= part & (correlation(rest) < floor(rest, kl).clamp(max=BROKEN))
        return broken

    def verdict(self, kl: float) -> "Pairing | None":
        """What the correlations say at this KL; None where both lists belong to one list of tokens."""
        sums, broken, sequences = torch.cat(self.within, 2), self._broken(kl), self.broken(kl)
        if not broken.any():
            return None
        shifted = correlation(sums[:, :, broken].sum(2).T).nan_to_num(-1)
        others = shifted.index_fill(0, torch.tensor(HERE), -1)
        there, second = others.topk(2).values.tolist()
        best, pairs = int(others.argmax()), float(sums[HERE, 0, broken].sum())
        errors = float(torch.tensor([there, second]).atanh().clamp(-9, 9).diff().abs()) * math.sqrt(pairs)
        shift = SHIFTS[best] if there > second + RESTORED and errors > STANDARD_ERRORS else 0
        of_turns = "some turns of " * bool((sequences[torch.cat(self.owners)] & ~broken).any())
        counts = int(sequences.sum()), self.size
        return Pairing(*counts, of_turns, float(shifted[HERE]), shift, there, self._scope(best))

    def _scope(self, place: int) -> str:
        """Over which joins the shift at `place` goes on."""
        over = [bool(correlation(joins[place, :, None])[0] > BROKEN / 2) for joins in (self.joins, self.turns)]
        if over[0]:
            return "across the join of two sequences"
        return "by turn" if self.turns[place, 0] >= LONG_ENOUGH and not over[1] else "by response"


@dataclass(frozen=True)
class Pairing:
    """Sequences whose two lists belong to different tokens.

    broken, of: number of such sequences, and of all.
    turns: words for turns of these sequences, where not all turns are such.
    correlation: over the tokens of these sequences, or turns.
    shift: by which the trainer's list must move to restore it; 0 where no shift does.
    restored: the correlation after the shift.
    scope: what the shift goes by.
    """

    broken: int
    of: int
    turns: str
    correlation: float
    shift: int
    restored: float
    scope: str

    @property
    def repair(self) -> str:
        """The shift that restores the correlation, in words."""
        if not self.shift:
            return f"no shift of up to two tokens restores it (the best leads to {self.restored:.2f})"
        places = f"{abs(self.shift)} {'place' if abs(self.shift) == 1 else 'places'}"
        way = "later" if self.shift > 0 else "earlier"
        part = ", as where a part of each is shifted" * (self.restored < self.correlation + RESTORED)
        return f"with the trainer's list read {places} {way}, {self.scope}, it is {self.restored:.2f}{part}"

"""Sums and maxima over tokens, split by the age of a token, that merge over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mis_plugins.packing.collectives import all_reduce

AGES = 17  # ages 0, 1, ... 15, and 16 or more
COLUMNS = (*(f"age_{age}" for age in range(AGES - 1)), f"age_{AGES - 1}_up", "no_age")


def age_column(age: int) -> str:
    """Name of the column that holds tokens of one age."""
    return COLUMNS[min(age, AGES - 1)]


@dataclass(frozen=True)
class ByAge:
    """Sums and maxima of one micro-batch, or of many merged, with one column for each age.

    sum_names, maximum_names: names of the rows of `sums` and of `maxima`.
    maxima: the largest value of each row; -inf where a column has no token.
    """

    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums: Float[Tensor, "S A"]
    maxima: Float[Tensor, "M A"]

    def merge(self, other: ByAge) -> ByAge:
        """Add the sums of two, and take the larger of their maxima."""
        assert (self.sum_names, self.maximum_names) == (other.sum_names, other.maximum_names)
        return replace(self, sums=self.sums + other.sums, maxima=torch.maximum(self.maxima, other.maxima))

    def over_ranks(self, groups: Iterable[dist.ProcessGroup]) -> ByAge:
        """Merge over all ranks that hold other tokens: one sum and one maximum over each group."""
        sums, maxima = self.sums.clone(), self.maxima.clone()
        for group in groups:
            all_reduce(sums, group)
            all_reduce(maxima, group, dist.ReduceOp.MAX)
        return replace(self, sums=sums, maxima=maxima)

    def map(self, function: Callable[[Tensor], Tensor]) -> ByAge:
        """Apply a function to both tensors, such as a copy to the host."""
        return replace(self, sums=function(self.sums), maxima=function(self.maxima))

    @property
    def groups(self) -> dict[str, Mapping[str, float]]:
        """Rows by group: all tokens under "", and each column that has tokens. The tensors should be on the host."""
        found = {"": self._row(self.sums.sum(-1), self.maxima.amax(-1))}
        for column, name in enumerate(COLUMNS):
            row = self._row(self.sums[:, column], self.maxima[:, column])
            if any(row[kind] for kind in self.sum_names):
                found[name] = row
        return found

    def up_to(self, oldest: int) -> list[Mapping[str, float]]:
        """Sums for each age from 0 to `oldest`, which takes all older tokens too; unknown ages are left out.

        The tensors should be on the host.
        """
        older = self.sums[:, oldest:AGES].sum(-1, keepdim=True)
        columns = torch.cat([self.sums[:, :oldest], older], 1).T.tolist()
        return [dict(zip(self.sum_names, column, strict=True)) for column in columns]

    def _row(self, sums: Float[Tensor, " S"], maxima: Float[Tensor, " M"]) -> Mapping[str, float]:
        names = (*self.sum_names, *self.maximum_names)
        return dict(zip(names, torch.cat([sums, maxima]).tolist(), strict=True))


@dataclass(frozen=True)
class TokenRows:
    """Rows over the tokens that `where` marks. What a row holds at other tokens, NaN included, is ignored."""

    where: Bool[Tensor, " T"]
    sums: Mapping[str, Shaped[Tensor, " T"]]
    maxima: Mapping[str, Float[Tensor, " T"]] = field(default_factory=dict)


@torch.no_grad()
def by_age(parts: Iterable[TokenRows], ages: Int[Tensor, " T"]) -> ByAge:
    """Add up each row by age, in float64, without a collective and without waiting for the device.

    Args:
        ages: the age of each token; negative where it is not known.
    """
    column = torch.where(ages >= 0, ages.clamp(max=AGES - 1), AGES)
    names, sums, maxima = [], [], {}
    for part in parts:
        # One torch.where serves all rows: unmarked tokens go to a last column, which is dropped.
        places = torch.where(part.where, column, len(COLUMNS))
        names += part.sums
        sums.append(_added_up(part.sums.values(), places))
        for name, row in part.maxima.items():
            maxima[name] = _columns(row, -torch.inf).scatter_reduce_(0, places, row.double(), "amax")[:-1]
    stacked = torch.cat(sums)
    largest = torch.stack(list(maxima.values())) if maxima else stacked[:0]
    return ByAge(tuple(names), tuple(maxima), stacked, largest)


def no_ages(names: Iterable[str], device: torch.device) -> ByAge:
    """Sums by age of no token."""
    named = tuple(names)
    sums = torch.zeros(len(named), len(COLUMNS), dtype=torch.float64, device=device)
    return ByAge(named, (), sums, sums[:0])


def _added_up(rows: Iterable[Tensor], places: Int[Tensor, " T"]) -> Float[Tensor, "K A"]:
    stacked = torch.stack([row.double() for row in rows])
    columns = stacked.new_zeros(len(stacked), len(COLUMNS) + 1)
    return columns.scatter_add_(1, places.expand_as(stacked), stacked)[:, :-1]


def _columns(row: Tensor, value: float) -> Float[Tensor, " A1"]:
    return torch.full((len(COLUMNS) + 1,), value, dtype=torch.float64, device=row.device)

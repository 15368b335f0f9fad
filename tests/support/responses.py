"""Responses of the loss oracle as flat tensors: whole, or what one of four context-parallel ranks holds of them."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import oracle
import torch
from launch import run_ranks
from loss_oracle import Response
from torch import Tensor
from torch.distributed import ProcessGroup

from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.packing.ragged import Ragged, Ranks

PROMPTS, LENGTHS = (3, 30, 1, 5, 25, 8), (9, 1, 20, 0, 13, 6)
"""The lengths of prompts and responses. Some of four ranks hold no token of the second response."""

Held = Callable[[str], Tensor]
Place = Callable[[ProcessGroup | None], Ragged]


def flat(batch: Sequence[Response], field: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([value for x in batch for value in getattr(x, field)], dtype=dtype)


def ragged_of(batch: Sequence[Response]) -> Ragged:
    return whole([len(x.mask) for x in batch]).place(flat(batch, "mask", torch.bool), Ranks())


def split(x: Tensor, batch: Sequence[Response]) -> list[list]:
    """The numbers of each response."""
    return [part.tolist() for part in x.detach().split([len(r.mask) for r in batch])]


def over_four_ranks(
    batch: Sequence[Response], work: Callable[[Held, Place], list[Tensor]], folder: Path
) -> list[list[list]]:
    """Each tensor that `work` makes of a rank's tokens, joined to whole responses again.

    work: gets two functions: one gives the rank's part of a field, one places its tokens among a group of ranks.
    """
    lengths = [len(x.mask) for x in batch]
    totals = [prompt + n for prompt, n in zip(PROMPTS, lengths, strict=True)]
    places = list(zip([0, *itertools.accumulate(lengths[:-1])], totals, lengths, strict=True))
    owned = [[start + t for start, total, n in places for t in oracle.zigzag(total, n, 4, rank)] for rank in range(4)]

    def on_rank(rank: int) -> list[Tensor]:
        layout, mask = zigzag(totals, lengths, 4, rank), flat(batch, "mask", torch.bool)
        made = work(lambda field: flat(batch, field)[owned[rank]], lambda group: layout.place(mask, Ranks(cp=group)))
        return [x.detach() for x in made]

    ranks = run_ranks(4, 4, on_rank, folder, megatron=False)
    order = torch.tensor(sum(owned, [])).argsort()
    return [split(torch.cat(parts)[order], batch) for parts in zip(*ranks, strict=True)]

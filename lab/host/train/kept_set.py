"""Kept sets: the tokens that top-p or top-k left the engine to sample each token of a response from.

Engine and trainer both renormalize over the kept set, so that both give log-probs under the distribution that
was sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from lab.host.train.batch import Layout
from mis_plugins.errors import InputError

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
"""Names of the kept sets in a sample and in the rollout data, as in slime."""


@dataclass(frozen=True)
class KeptSets:
    """The kept sets of one response.

    ids: token ids, set after set.
    offsets: where each set begins in `ids`, and where the last one ends.
    """

    ids: Tensor
    offsets: Tensor


def kept_sets(ids: Sequence[Tensor] | None, offsets: Sequence[Tensor] | None) -> list[KeptSets] | None:
    """The kept sets of each sample from the hosts' two lists; None where nothing was cut."""
    if ids is None or offsets is None:
        return None
    return [KeptSets(*sets) for sets in zip(ids, offsets, strict=True)]


def kept_columns(layout: Layout, kept: Sequence[KeptSets], first: int, width: int) -> Bool[Tensor, "R W"]:
    """Which of the tokens `first` to `first + width` are in each scored token's kept set, itself included.

    Raises:
        InputError: a response has another number of kept sets than tokens.
    """
    sizes = [sets.offsets.long().diff() for sets in kept]
    for sample, (found, length) in enumerate(zip(sizes, layout.response_lengths, strict=True)):
        if len(found) != length:
            raise InputError(f"{OFFSETS} of sample {sample}: {len(found)} kept sets for {length} response tokens")
    ids = torch.cat([sets.ids.long() for sets in kept])
    row = torch.repeat_interleave(torch.cat(sizes))
    return (_members(row, ids - first, sum(map(len, sizes)), width))[layout.response_index] | _members(
        torch.arange(len(layout.targets)), layout.targets - first, len(layout.targets), width
    )


def _members(row: Tensor, column: Tensor, rows: int, width: int) -> Bool[Tensor, "N W"]:
    """A table with the given entries set; columns of other ranks are left out."""
    table, here = torch.zeros(rows, width, dtype=torch.bool), (column >= 0) & (column < width)
    table[row[here], column[here]] = True
    return table

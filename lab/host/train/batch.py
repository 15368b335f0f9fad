"""Packed micro-batches: where each token of each sequence lies on this context-parallel rank.

The layout is zigzag: a sequence of `L` tokens is padded to `2 * cp` equal chunks, and rank `r` holds chunks
`r` and `2 * cp - 1 - r`. Causal attention then costs every rank the same. Without context parallelism nothing
is padded. The log-prob of the token at position `p` is read from the logits at `p - 1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Index maps of one micro-batch on one rank.

    `N` sequences, `S` slots of this rank, `R` response tokens that it scores. `Q` and `K` are the longest
    sequence, counted in slots of this rank and in padded tokens.
    """

    total_lengths: list[int]
    response_lengths: list[int]
    local_lengths: list[int]  # [N] response tokens scored on this rank
    cu_seqlens: Tensor  # [N+1] int32, padded lengths over all ranks
    max_seqlen: int
    tokens: Tensor  # [S] input ids, 0 where padded
    positions: Tensor  # [S]
    sequence: Tensor  # [S] which sequence a slot belongs to
    offset: Tensor  # [S] place of the slot among its sequence's slots
    query_slots: Tensor  # [N, Q] into the local slots
    key_slots: Tensor  # [N, K] into the slots of all context ranks, rank after rank
    causal: Tensor  # [N, 1, Q, K] bool
    scored: Tensor  # [R] slots whose logits score a response token
    targets: Tensor  # [R] those response tokens
    response_index: Tensor  # [R] their place among the full responses, flattened
    response_sequence: Tensor  # [R] their sequence


def _starts(lengths: Tensor) -> Tensor:
    return torch.cumsum(lengths, 0) - lengths


def _grid(length: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns `0..width-1` for every sequence, and which of them lie inside it."""
    column = torch.arange(width).expand(len(length), width)
    return column, column < length[:, None]


def pack(tokens: Sequence[Tensor], response_lengths: Sequence[int], cp_rank: int = 0, cp_size: int = 1) -> Layout:
    """Lay sequences out for rank `cp_rank` of `cp_size`. `tokens` are full: prompt, then response."""
    flat = torch.cat(list(tokens))
    total = torch.tensor([len(sequence) for sequence in tokens])
    response = torch.tensor(list(response_lengths))
    parts = 1 if cp_size == 1 else 2 * cp_size
    chunk = (total + parts - 1) // parts
    padded, local = chunk * parts, chunk * parts // cp_size

    sequence = torch.repeat_interleave(torch.arange(len(total)), local)
    offset = torch.arange(len(sequence)) - _starts(local)[sequence]
    positions = _zigzag_position(offset, chunk[sequence], cp_rank, cp_size)
    real = positions < total[sequence]
    place = (_starts(total)[sequence] + positions).clamp(max=len(flat) - 1)

    first_scored = (total - response - 1)[sequence]
    scored = torch.nonzero((positions >= first_scored) & (positions < total[sequence] - 1)).squeeze(1)
    owner = sequence[scored]
    columns, inside = _grid(local, int(local.max()))
    query_slots = torch.where(inside, _starts(local)[:, None] + columns, 0)
    keys = torch.arange(int(padded.max()))
    return Layout(
        total_lengths=total.tolist(),
        response_lengths=response.tolist(),
        local_lengths=torch.bincount(owner, minlength=len(total)).tolist(),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), torch.cumsum(padded, 0)]).int(),
        max_seqlen=int(padded.max()),
        tokens=torch.where(real, flat[place], 0),
        positions=positions,
        sequence=sequence,
        offset=offset,
        query_slots=query_slots,
        key_slots=_key_slots(padded, chunk, local, cp_size),
        causal=(keys <= torch.where(inside, positions[query_slots], 0)[..., None]).unsqueeze(1),
        scored=scored,
        targets=flat[place[scored] + 1],
        response_index=_starts(response)[owner] + positions[scored] - first_scored[scored],
        response_sequence=owner,
    )


def _zigzag_position(offset: Tensor, chunk: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Position in the sequence of the local slot at `offset`."""
    if cp_size == 1:
        return offset
    early = offset + cp_rank * chunk
    late = offset + (2 * cp_size - 2 - cp_rank) * chunk
    return torch.where(offset < chunk, early, late)


def _key_slots(padded: Tensor, chunk: Tensor, local: Tensor, cp_size: int) -> Tensor:
    """`[N, K]`: where position `k` of each sequence lies once the slots of all ranks are concatenated."""
    position, inside = _grid(padded, int(padded.max()))
    if cp_size == 1:
        slot = _starts(local)[:, None] + position
    else:
        size = chunk[:, None].clamp(min=1)
        part = position // size
        rank = torch.minimum(part, 2 * cp_size - 1 - part)
        within = position % size + torch.where(part >= cp_size, size, 0)
        slot = rank * local.sum() + _starts(local)[:, None] + within
    return torch.where(inside, slot, 0)

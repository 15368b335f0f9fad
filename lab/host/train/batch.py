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
    causal: Tensor  # [N, 1, Q, K] bool; beyond a sequence's slots as for slot 0, which nobody reads
    scored: Tensor  # [R] slots whose logits score a response token
    targets: Tensor  # [R] those response tokens
    response_index: Tensor  # [R] their place among the full responses, flattened
    response_sequence: Tensor  # [R] their sequence


def _starts(lengths: Tensor) -> Tensor:
    return torch.cumsum(lengths, 0) - lengths


def pack(tokens: Sequence[Tensor], response_lengths: Sequence[int], cp_rank: int = 0, cp_size: int = 1) -> Layout:
    """Lay sequences out for rank `cp_rank` of `cp_size`. `tokens` are full: prompt, then response."""
    flat = torch.cat(list(tokens))
    total = torch.tensor([len(sequence) for sequence in tokens])
    response = torch.tensor(list(response_lengths))
    parts = 1 if cp_size == 1 else 2 * cp_size
    chunk = (total + parts - 1) // parts
    padded, local = chunk * parts, chunk * parts // cp_size

    sequence = torch.repeat_interleave(torch.arange(len(total)), local)
    slots = torch.arange(len(sequence))
    offset = slots - _starts(local)[sequence]
    everywhere = torch.cat([_zigzag_position(offset, chunk[sequence], rank, cp_size) for rank in range(cp_size)])
    positions = everywhere.view(cp_size, -1)[cp_rank]
    real = positions < total[sequence]
    place = (_starts(total)[sequence] + positions).clamp(max=len(flat) - 1)

    first_scored = (total - response - 1)[sequence]
    scored = torch.nonzero((positions >= first_scored) & (positions < total[sequence] - 1)).squeeze(1)
    owner = sequence[scored]
    query_slots = _table(sequence, offset, slots)
    key_slots = _table(sequence.repeat(cp_size), everywhere, torch.arange(len(everywhere)))
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
        key_slots=key_slots,
        causal=(torch.arange(key_slots.shape[1]) <= positions[query_slots][..., None]).unsqueeze(1),
        scored=scored,
        targets=flat[place[scored] + 1],
        response_index=_starts(response)[owner] + positions[scored] - first_scored[scored],
        response_sequence=owner,
    )


def _zigzag_position(offset: Tensor, chunk: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """Position in the sequence of the local slot at `offset`."""
    early = offset + cp_rank * chunk
    late = offset + (2 * cp_size - 2 - cp_rank) * chunk
    return torch.where(offset < chunk, early, late)


def _table(row: Tensor, column: Tensor, values: Tensor) -> Tensor:
    """The values in a table, each at its row and column; 0 elsewhere."""
    return values.new_zeros(int(row.max()) + 1, int(column.max()) + 1).index_put((row, column), values)

"""The tokens that the engine named beside each sampled one, from a host's micro-batch to `loss/centering.py`."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mis_plugins.errors import InputError
from mis_plugins.hosts.batch import check_sequences
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS, Batch
from mis_plugins.loss.centering import Candidates, Head, Vocabulary
from mis_plugins.packing.exchange import Exchange, contiguous
from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import Ranks
from mis_plugins.routing.placement import Grid, response_rows
from mis_plugins.shared.absent import LOWEST

ABSENT = -1  # the id of an entry beyond what the engine named


def head_of(
    args: Any, batch: Batch, logits: Tensor, layout: Layout, cp: tuple[int, int], ranks: Ranks, top_k: int | None = None
) -> Head:
    """The candidates of the tokens that this rank's logits score, and the logits.

    The batch holds the head of each sequence `[response, k]`, whole on every rank, or the tokens of this rank alone.

    Args:
        top_k: how many tokens of a position are read at most, the likeliest first; None reads all.

    Raises:
        InputError: the batch has no head, or one that does not fit; it names the key.
    """
    rows, totals, device = logits[..., 0].numel(), batch["total_lengths"], logits.device
    scored, exchange = layout, None
    if getattr(args, "allgather_cp", False) and ranks.cp is not None:
        scored = contiguous(totals, layout.response_lengths, rows, cp[1])
        exchange = Exchange.between(layout, scored, ranks.cp, device)
    _check(batch, layout, whole=exchange is not None)
    ids, behavior = _likeliest(batch, scored, top_k)
    held = behavior if exchange is None else _likeliest(batch, layout, top_k)[1]
    tokens = [x[len(x) - n :] for x, n in zip(batch["unconcat_tokens"], layout.response_lengths, strict=True)]
    if exchange is None:
        padded = batch.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
        places = response_rows(layout, totals, Grid(*cp), device, padded)
    else:
        places = _stream_rows(scored, totals).to(device) - cp[1] * rows
    start = 0 if ranks.tp is None else ranks.tp.rank() * logits.shape[-1]
    return Head(
        logits=logits,
        candidates=Candidates(places, _joined(tokens, scored).to(device), ids.to(device), behavior.to(device)),
        named=(held > -torch.inf).any(-1).to(device),
        temperature=getattr(args, "rollout_temperature", 1.0),
        vocabulary=Vocabulary(start, ranks.tp),
        exchange=exchange,
    )


def _likeliest(batch: Batch, layout: Layout, top_k: int | None) -> tuple[Int[Tensor, "T K"], Shaped[Tensor, "T K"]]:
    """Ids and log-probs of the `top_k` likeliest tokens at each position of a layout; -inf in an entry without one.

    An entry has none where the engine named no token, or where its log-prob is none (`shared/absent.py`).
    """
    width, held = _width(batch), [batch[HEAD_IDS], batch[HEAD_LOG_PROBS]]
    shaped = (
        [torch.as_tensor(x, device=getattr(x, "device", "cpu")).reshape(-1, width) for x in rows] for rows in held
    )
    ids, behavior = (_joined(rows, layout) for rows in shaped)
    ids, behavior = ids.long(), behavior.float()
    behavior = torch.where((ids > ABSENT) & (behavior.abs() < -LOWEST), behavior, -torch.inf)
    if top_k is not None and width > top_k:
        behavior, likeliest = behavior.topk(top_k, -1)
        ids = ids.gather(-1, likeliest)
    return ids.clamp(min=0), behavior


def _stream_rows(scored: Layout, totals: Sequence[int]) -> Int[Tensor, " S"]:
    """The row of the packed stream that scores each token of a contiguous layout: the position before the token."""
    firsts = (end - response - 1 for end, response in zip(accumulate(totals), scored.response_lengths, strict=True))
    spans = ((first + start, first + stop) for i, first in enumerate(firsts) for start, stop in scored.pieces(i))
    return torch.cat([torch.arange(*span, device="cpu") for span in spans])


def _check(batch: Batch, layout: Layout, whole: bool) -> None:
    """Refuse a batch without a head, or with a head that does not fit its responses."""
    for name in (HEAD_IDS, HEAD_LOG_PROBS):
        if batch.get(name) is None or not len(batch[name]):
            raise InputError(
                f"{name}: none in this micro-batch; mis.center needs the engine's likeliest tokens at each position: "
                "let the host ask for them (docs/algorithms.md says how)"
            )
        check_sequences({"response_lengths": layout.response_lengths, name: batch[name]})
        for i, (rows, response) in enumerate(zip(batch[name], layout.response_lengths, strict=True)):
            fits = (response,) if whole else (response, layout.local_lengths[i])
            if rows is None or len(rows) not in fits:
                length = "None" if rows is None else f"{len(rows)} positions"
                raise InputError(f"{name}[{i}]: {length}, but sequence {i} has {response} response tokens")
    if _width(batch) < 1 or any(len(rows) and len(rows[0]) != _width(batch) for rows in batch[HEAD_IDS]):
        raise InputError(f"{HEAD_IDS}: the number of tokens that the engine named differs between sequences, or is 0")


def _width(batch: Batch) -> int:
    return next((len(rows[0]) for rows in batch[HEAD_IDS] if len(rows)), 1)


def _joined(responses: Sequence[Shaped[Tensor, "_ ..."]], layout: Layout) -> Shaped[Tensor, "T ..."]:
    """The tokens of this rank in one tensor, from whole responses, or from what the host has cut to the rank."""
    pieces = []
    for i, response in enumerate(responses):
        is_whole = len(response) == layout.response_lengths[i]
        pieces += [response[start:stop] for start, stop in layout.pieces(i)] if is_whole else [response]
    return torch.cat(pieces)

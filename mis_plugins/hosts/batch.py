"""One micro-batch as a host hands it over: lists of tensors, refused where they do not fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.packing.layout import Layout, Placed, whole, zigzag
from mis_plugins.packing.ragged import Ranks

NO_ROLLOUT_LOG_PROBS = (
    "rollout_log_probs: None: the samples carry no log-probs of the rollout engine, so that no ratio is known; the "
    "rollout engine must return one for each sampled token: let the function of --custom-generate-function-path or "
    "--rollout-function-path set sample.rollout_log_probs (Miles scores samples anew with "
    "--recompute-logprobs-via-prefill)"
)
NO_TRAIN_LOG_PROBS = (
    "train_log_probs: None: the trainer's log-probs were neither recomputed nor handed on, so that no ratio is known; "
    "both hosts leave them out with --use-rollout-logprobs: drop it, or give --get-mismatch-metrics beside it, which "
    "recomputes them"
)
Tensors = Sequence[Tensor]
Handed = Sequence[Tensor | None] | None  # what a host may really pass; HostBatch refuses the None


@dataclass(frozen=True)
class HostBatch:
    """Per sequence: this rank's log-probs and the full response's loss mask.

    Raises:
        InputError: when built, before any work; it names the list, the sequence and both counts.
    """

    train_log_probs: Handed
    rollout_log_probs: Handed
    loss_masks: Tensors
    layout: Layout
    ranks: Ranks = Ranks()

    def __post_init__(self) -> None:
        if self.rollout_log_probs is None:
            raise InputError(NO_ROLLOUT_LOG_PROBS)
        if self.train_log_probs is None:
            raise InputError(NO_TRAIN_LOG_PROBS)
        if not len(self.loss_masks):
            raise InputError("loss_masks: no sequence in this micro-batch")
        _check("loss_masks", self.loss_masks, self.layout.response_lengths, "response tokens")
        for name in ("train_log_probs", "rollout_log_probs"):
            _check(name, getattr(self, name), self.layout.local_lengths, "response tokens on this rank")

    @property
    def proximal(self) -> Float[Tensor, " T"]:
        return _cat(self.train_log_probs)

    @property
    def behavior(self) -> Float[Tensor, " T"]:
        return _cat(self.rollout_log_probs)

    @cached_property
    def loss_mask(self) -> Tensor:
        """`[R]`, in the host's dtype."""
        return torch.cat(list(self.loss_masks))

    def place(self) -> Placed:
        return self.layout.place(self.loss_mask, self.ranks)


def check_apart(proximal: Handed, behavior: Handed, name: str = "train_log_probs") -> None:
    """Refuse log-probs of the trainer that are the rollout engine's own tensors: each ratio would be 1.

    Addresses are compared, so that nothing waits for the device. Tensors without tokens have no address.

    Args:
        proximal, behavior: each sequence's log-probs under the trainer, and under the rollout engine.
        name: the host's name of the first list.

    Raises:
        InputError: it names both lists, and the first sequence.
    """
    for i, (one, other) in enumerate(zip(proximal or (), behavior or (), strict=False)):
        if one is not None and other is not None and _at_one_address(one, other):
            raise InputError(
                f"{name}[{i}] and rollout_log_probs[{i}]: one tensor, so that every ratio of sequence {i} is 1 and "
                "nothing is corrected; hand over the trainer's own log-probs, recomputed before training (the loss "
                "hook corrects without them with mis.objective.old: behavior, or --use-rollout-logprobs)"
            )


def _at_one_address(one: Tensor, other: Tensor) -> bool:
    return 0 != one.data_ptr() == other.data_ptr()


def host_layout(
    args: Any,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None,
    cp_size: int,
    cp_rank: int,
) -> Layout:
    """Where `args.qkv_format` puts each response on this rank.

    Raises:
        ConfigError: an unknown `qkv_format`; every rank raises alike.
        InputError: lengths that are missing or do not fit; every rank raises alike.
    """
    qkv_format = getattr(args, "qkv_format", "thd")
    if qkv_format not in ("thd", "bshd"):
        raise ConfigError(f"qkv_format: got {qkv_format!r}; choose one of thd, bshd")
    if qkv_format == "bshd" and max_seq_lens is None:
        raise InputError("max_seq_lens: missing, and qkv_format: bshd needs it")
    if len(total_lengths) != len(response_lengths):
        raise InputError(
            f"total_lengths: {len(total_lengths)} sequences, response_lengths: {len(response_lengths)}"
        )
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if response and total <= response:
            raise InputError(
                f"total_lengths[{i}]: {total}, but sequence {i} has a prompt and {response} response tokens"
            )
    if cp_size == 1:
        return whole(response_lengths)
    return zigzag(
        total_lengths, response_lengths, cp_size, cp_rank, max_seq_lens if qkv_format == "bshd" else None
    )


def layout_of(args: Any, data: Mapping[str, Any], cp: tuple[int, int]) -> Layout:
    """Where the responses of a host's micro-batch or rollout lie on this rank, by its own keys of lengths."""
    return host_layout(args, data["total_lengths"], data["response_lengths"], data.get("max_seq_lens"), *cp)


@torch.no_grad()
def _cat(log_probs: Handed) -> Float[Tensor, " T"]:
    return torch.cat(cast(list[Tensor], list(log_probs or ())))


def _check(name: str, tensors: Sequence[Tensor | None], expected: Sequence[int], where: str) -> None:
    if len(tensors) != len(expected):
        raise InputError(f"{name}: {len(tensors)} sequences, but the batch has {len(expected)}")
    counts = [None if tensor is None else tensor.numel() for tensor in tensors]
    if counts == list(expected):
        return
    i = next(i for i, count in enumerate(counts) if count != expected[i])
    if counts[i] is None:
        raise InputError(f"{name}[{i}]: None; sequence {i} came without log-probs")
    raise InputError(f"{name}[{i}]: {counts[i]} tokens, but sequence {i} has {expected[i]} {where}")

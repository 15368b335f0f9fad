"""One micro-batch as a host hands it over: lists of tensors, refused where they do not fit together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mis_plugins.errors import ConfigError, InputError, shown
from mis_plugins.packing.layout import Layout, whole, zigzag
from mis_plugins.packing.ragged import Ragged, Ranks
from mis_plugins.shared.absent import LOWEST

Tensors = Sequence[Tensor]
Handed = Sequence[Tensor | None] | None  # what a host may really pass; HostBatch refuses the None
Lengths = Sequence[Any]  # a whole number each; `whole_numbers` names an entry that is none


@dataclass(frozen=True)
class HostBatch:
    """Per sequence: this rank's log-probs and the full response's loss mask.

    trainer: the host's name of the trainer's log-probs.
    if_cut: what an error adds where the log-probs of both sides are fewer than their mask; empty for nothing.

    Raises:
        InputError: when built, before any work; it names the list that is wrong, the sequence and all counts.
    """

    train_log_probs: Handed
    rollout_log_probs: Handed
    loss_masks: Tensors
    layout: Layout
    ranks: Ranks = Ranks()
    trainer: str = "train_log_probs"
    if_cut: str = ""

    @classmethod
    def of_rollout(cls, args: Any, data: Mapping[str, Any], parallel: tuple[Ranks, tuple[int, int]]) -> "HostBatch":
        """The rollout batch of a host, by its own keys."""
        layout = layout_of(args, data, parallel[1])
        sides = data["log_probs"], data.get("rollout_log_probs")
        return cls(*sides, data["loss_masks"], layout, parallel[0], trainer="log_probs")

    def __post_init__(self) -> None:
        if self.rollout_log_probs is None or self.train_log_probs is None:
            from mis_plugins.hosts import misfit

            is_engine = self.rollout_log_probs is None
            raise InputError(misfit.NO_ROLLOUT_LOG_PROBS if is_engine else misfit.NO_TRAIN_LOG_PROBS)
        if self.loss_masks is None or not len(self.loss_masks):
            raise InputError("loss_masks: no sequence in this micro-batch")
        sides = {self.trainer: self.train_log_probs, "rollout_log_probs": self.rollout_log_probs}
        check_lengths(self.loss_masks, sides, self.layout, self.if_cut)

    @property
    def proximal(self) -> Float[Tensor, " T"]:
        """Log-probs under the trainer before the update; NaN where there is none."""
        return self._sides[0]

    @property
    def behavior(self) -> Float[Tensor, " T"]:
        """Log-probs under the rollout engine; NaN where there is none."""
        return self._sides[1]

    @cached_property
    def _sides(self) -> Sequence[Float[Tensor, " T"]]:
        """Log-probs of trainer and engine, joined for one search for what stands in for a log-prob."""
        both = [*cast(Tensors, self.train_log_probs), *cast(Tensors, self.rollout_log_probs)]
        with torch.no_grad():
            return without_absent_(torch.cat(both)).chunk(2)

    @cached_property
    def loss_mask(self) -> Tensor:
        """`[R]`, in the host's dtype."""
        return torch.cat(list(self.loss_masks))

    def place(self) -> Ragged:
        return self.layout.place(self.loss_mask, self.ranks)


def check_apart(proximal: Handed, behavior: Handed, name: str = "train_log_probs") -> None:
    """Refuse log-probs of the trainer that are the rollout engine's own tensors: each ratio would be 1.

    Addresses are compared, so that nothing waits for the device. Tensors without tokens have no address.
    """
    if proximal is None or behavior is None:
        return
    for i, (trained, sampled) in enumerate(zip(proximal, behavior, strict=False)):
        if trained is not None and sampled is not None and 0 != trained.data_ptr() == sampled.data_ptr():
            raise InputError(
                f"{name}[{i}] and rollout_log_probs[{i}]: one tensor, so that every ratio of sequence {i} is 1 and "
                "nothing is corrected; hand over the trainer's own log-probs, recomputed before training (the loss "
                "hook corrects without them with mis.objective.old: behavior, or --use-rollout-logprobs)"
            )


def host_layout(
    args: Any,
    total_lengths: Lengths | None,
    response_lengths: Lengths | None,
    max_seq_lens: Lengths | None,
    cp_size: int,
    cp_rank: int,
    loss_masks: Sequence[Tensor | None] | None = None,
) -> Layout:
    """Where `args.qkv_format` puts each response on this rank.

    Args:
        loss_masks: they help to tell which of the lengths is wrong; None where the caller has none.

    Raises:
        ConfigError: an unknown `qkv_format`; every rank raises alike.
        InputError: lengths that are missing or do not fit; every rank raises alike.
    """
    qkv_format = getattr(args, "qkv_format", "thd")
    if qkv_format not in ("thd", "bshd"):
        raise ConfigError(f"qkv_format: got {qkv_format!r}; choose one of thd, bshd")
    given = {"response_lengths": response_lengths, "total_lengths": total_lengths}
    if qkv_format == "bshd":
        given["max_seq_lens"] = max_seq_lens
    for name, each in given.items():
        if each is None:
            raise InputError(f"{name}: missing, and qkv_format: {qkv_format} needs it")
    check_sequences(given | {"loss_masks": loss_masks})
    lengths = {name: whole_numbers(name, each) for name, each in given.items() if each is not None}
    responses, totals, *padded = lengths.values()
    rows = zip(totals, responses, *(padded or [totals]), strict=True)
    fits = [(response == 0 or response < total) and total <= held for total, response, held in rows]
    if not all(fits):
        from mis_plugins.hosts import misfit

        raise InputError(misfit.of_lengths(fits.index(False), lengths, loss_masks))
    if cp_size == 1:
        return whole(responses)
    return zigzag(totals, responses, cp_size, cp_rank, *padded)


def layout_of(args: Any, data: Mapping[str, Any], cp: tuple[int, int]) -> Layout:
    """Where the responses of a host's micro-batch or rollout lie on this rank, by its own keys of lengths."""
    total, response, padded = map(data.get, ("total_lengths", "response_lengths", "max_seq_lens"))
    return host_layout(args, total, response, padded, *cp, data.get("loss_masks"))


def check_lengths(
    loss_masks: Sequence[Tensor | None],
    log_probs: Mapping[str, Sequence[Tensor | None]],
    layout: Layout,
    if_cut: str = "",
) -> None:
    """Refuse lists of a micro-batch that do not fit together."""
    lists = {"loss_masks": loss_masks, **log_probs}
    check_sequences({"response_lengths": layout.response_lengths, **lists})
    local, full = ([(count,) for count in counts] for counts in (layout.local_lengths, layout.response_lengths))
    fits = dict.fromkeys(lists, local) | {"loss_masks": full}
    try:
        is_fit = all([Tensor.size(x) for x in cast(Tensors, each)] == fits[name] for name, each in lists.items())
    except TypeError:  # an entry is no tensor
        is_fit = False
    if not is_fit:
        from mis_plugins.hosts import misfit

        raise InputError(misfit.message(lists, layout, if_cut))
    devices = {name: str(x.device) for name, each in lists.items() for x in each[:1] if x is not None}
    if len(set(devices.values())) > 1:
        from mis_plugins.hosts import misfit

        raise InputError(misfit.of_devices(devices))


def check_sequences(lists: Mapping[str, Sequence[Any] | None]) -> None:
    """Refuse lists of a micro-batch that hold several numbers of sequences; None is no list."""
    counts = {name: len(rows) for name, rows in lists.items() if rows is not None}
    if len(set(counts.values())) > 1:
        from mis_plugins.hosts import misfit

        raise InputError(misfit.of_sequences(counts))


def numbers_of(
    loss_masks: Sequence[Tensor | None] | None, stated: Lengths | None = None, **log_probs: Handed
) -> list[int]:
    """Number of tokens of each sequence as the host states it, else by its mask: 0 where there is no tensor."""
    if stated is not None:
        return whole_numbers("response_lengths", stated)
    check_sequences({"loss_masks": loss_masks, **log_probs})
    return [] if loss_masks is None else [x.numel() if isinstance(x, Tensor) else 0 for x in loss_masks]


def whole_numbers(name: str, lengths: Lengths) -> list[int]:
    """Lengths as Python's own numbers: unsigned ones of numpy, less a larger one, would wrap around."""
    numbers: list[int] = []
    for size in lengths:
        try:
            numbers.append(index(size))
        except TypeError:
            raise InputError(f"{name}[{len(numbers)}]: got {shown(size)}; expected a whole number of tokens") from None
    return numbers


def counts_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Number of tokens of each tensor, its shape where it has not one dimension, and None where there is no tensor."""
    return [None if x is None else x.numel() if x.dim() == 1 else list(x.shape) for x in tensors]


def without_absent_(log_probs: Shaped[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """The log-probs, in place, NaN where a number at or below `LOWEST` stands in for one: one operator, and no wait."""
    floats = log_probs if log_probs.is_floating_point() else log_probs.float()
    return torch.threshold_(floats, LOWEST, math.nan)

"""One micro-batch's log-probs of both engines, compared on the device by their bits.

Nothing here waits for the device, and the number of kernels does not depend on the number of sequences. Tokens outside
the loss mask were sampled by nobody (the hosts give a tool's tokens the log-prob 0.0), so they are not compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import Ranks
from mis_plugins.packing.transfer import Arrival, to_host
from true_on_policy.bitwise import INTEGERS
from true_on_policy.errors import ContractError

LayoutOf = Callable[[Sequence[int]], Layout]  # of the sequences with these numbers


@dataclass(frozen=True)
class Flags:
    """What the host process reads of a micro-batch: tokens compared, and how many of them differ."""

    compared: int
    different: int


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The sequences of a micro-batch that have log-probs of both engines: T tokens on this rank.

    valid: inside the loss mask.
    numbers: of the sequences, in the host's micro-batch.
    tokens: of each sequence, prompt and response, whole.
    loss_masks: of each response, whole.
    flags: on the device: compared, different.
    copied: the flags in pinned memory, once `arrival` is there.
    """

    engine: Float[Tensor, "T"]
    trainer: Float[Tensor, "T"]
    valid: Bool[Tensor, "T"]
    numbers: Sequence[int]
    tokens: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    layout: Layout
    flags: Int64[Tensor, "2"]
    copied: Int64[Tensor, "2"]
    arrival: Arrival

    @classmethod
    def compare(cls, batch: Mapping[str, Any], layout_of: LayoutOf) -> MicroBatch | None:
        """Compare, and begin to copy what came out; None where no sequence has log-probs of both.

        Args:
            batch: a host's micro-batch.
            layout_of: where the responses of some of its sequences lie on this rank.

        Raises:
            ContractError: the two sides have other dtypes, so no bits in common, or other numbers of tokens.
        """
        count = len(batch["loss_masks"])
        sides = [batch.get(name) or [None] * count for name in ("rollout_log_probs", "log_probs")]
        present = [i for i in range(count) if all(side[i] is not None for side in sides)]
        if not present:
            return None
        layout = layout_of(present)
        masks = [batch["loss_masks"][i] for i in present]
        valid = layout.place(torch.cat(masks), Ranks()).ragged.loss_mask
        named = zip(("rollout_log_probs", "log_probs"), sides, strict=True)
        engine, trainer = (
            _packed(name, [side[i] for i in present], layout, valid.device) for name, side in named
        )
        _check_dtypes(engine, trainer)
        flags = _flags(engine, trainer, valid)
        copied = to_host(flags)
        tokens = [batch["unconcat_tokens"][i] for i in present]
        arrival = Arrival.of_copies_from(flags)
        return cls(engine, trainer, valid, present, tokens, masks, layout, flags, copied, arrival)

    def read(self) -> Flags:
        """Waits where the copy is still on its way."""
        self.arrival.wait()
        return Flags(*self.copied.tolist())

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        """engine, trainer, valid; by copies that are begun together and awaited once."""
        copies = to_host(self.engine), to_host(self.trainer), to_host(self.valid)
        Arrival.of_copies_from(self.engine).wait()
        return copies

    def ends(self) -> list[int]:
        """Where each sequence begins among this rank's tokens, and T."""
        return [0, *accumulate(self.layout.local_lengths)]

    def positions(self, sequence: int) -> list[int]:
        """In its response, of each token of a sequence that lies here."""
        return [position for start, stop in self.layout.pieces(sequence) for position in range(start, stop)]

    def locate(self, index: int) -> tuple[int, int]:
        """(sequence, position in its response) of a token of this rank."""
        ends = self.ends()
        sequence = bisect_right(ends, index) - 1
        return sequence, self.positions(sequence)[index - ends[sequence]]


def _packed(name: str, log_probs: Sequence[Any], layout: Layout, device: torch.device) -> Float[Tensor, "T"]:
    """This rank's tokens in one; without the empty ones, whose dtype is anybody's and would promote the others."""
    counts = [x.numel() for x in log_probs]
    if counts != layout.local_lengths:
        raise ContractError(
            f"{name}: {counts} tokens a sequence, but {layout.local_lengths} of their responses lie on this rank"
        )
    filled = [x for x in log_probs if x.numel()]
    return torch.cat(filled).detach() if filled else torch.empty(0, device=device)


def _check_dtypes(engine: Tensor, trainer: Tensor) -> None:
    if engine.dtype != trainer.dtype:
        raise ContractError(
            f"rollout_log_probs are {engine.dtype} and log_probs {trainer.dtype}: they have no bits in common. Miles "
            "casts both to one dtype with --true-on-policy-mode and --bf16 or --fp16"
        )


def _flags(
    engine: Float[Tensor, "T"], trainer: Float[Tensor, "T"], valid: Bool[Tensor, "T"]
) -> Int64[Tensor, "2"]:
    """-0.0 is not 0.0, and two NaNs are equal if all their bits are."""
    integers = INTEGERS[engine.element_size()]
    differs = (engine.view(integers) != trainer.view(integers)) & valid
    return torch.stack([valid.sum(), differs.sum()])

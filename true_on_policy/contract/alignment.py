"""One operation that a trainer rounds or adds otherwise than the engine, and what brings it in line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """An alignment is one row of the contract of a model family on a CPU.

    Attributes:
        name: the operation.
        bits: dtype and order of rounding, equal on both sides.
        megatron: what Megatron-core 0.16.1 does by itself, without Transformer Engine.
        pinned: what holds the row in the trainer of a proof.
    """

    name: str
    bits: str
    megatron: str
    pinned: str

"""One operation that a trainer by itself rounds or adds differently from the engine, and what aligns it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """An alignment is one row of the contract of a model family on a CPU.

    Attributes:
        name: the operation.
        bits: dtype and order of rounding, equal on both sides.
        megatron: what Megatron-core 0.16.1 does by itself, without Transformer Engine.
        pinned: what makes the trainer of a proof give these bits.
    """

    name: str
    bits: str
    megatron: str
    pinned: str

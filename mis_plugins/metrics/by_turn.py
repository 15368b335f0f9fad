"""Sums over tokens, split by the turn of a dialogue: the runs of ones in a response's loss mask, one after the other.

The host masks what a tool or a user says between two turns of the model. What rules reject begins no turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

TURNS = 4  # turns 1, 2 and 3, and 4 with all later ones


def by_turn(rows: Sequence[Float[Tensor, " T"]], turns: Int[Tensor, " T"]) -> Float[Tensor, "K U"]:
    """Add up each row by turn, in float64, without a collective and without waiting for the device.

    One product of matrices serves all rows: its order of additions is fixed, and no two tokens wait for one address.

    Args:
        rows: finite numbers in float64, 0 at tokens that shall not enter.
        turns: the turn of each token, from 1.
    """
    columns = torch.arange(1, TURNS + 1, device=turns.device)
    places = turns.clamp(max=TURNS).unsqueeze(-1) == columns
    return torch.stack(list(rows)) @ places.double()

"""The backend without a compiler: stock kernels, always called at the same tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """See `Backend`."""

    name: str = "tile"

    def prepare(self) -> None: ...

    def product(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor: ...


TILE = Tile()

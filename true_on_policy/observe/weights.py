"""The weights of a process, seen from inside: a digest of each tensor, and its values where they are asked for.

An engine answers two actions of its weight checker with what this module writes, and the other side reads the answers.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

DIGESTS, VALUES = "true_on_policy.digests", "true_on_policy.values"
BLOCK = 1 << 26  # bytes hashed at once


@dataclass(frozen=True)
class Digest:
    """A digest identifies the dtype, the shape and the bytes of a tensor.

    Attributes:
        dtype: torch's name, without `torch.`.
        shape: the sizes.
        sha256: the SHA-256 of the bytes in row-major order, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, tensor: Shaped[Tensor, "..."]) -> Digest:
        hashed, flat = hashlib.sha256(), _bytes(tensor)
        for start in range(0, flat.numel(), BLOCK):
            hashed.update(flat[start : start + BLOCK].cpu().numpy().data)
        return cls(_name(tensor.dtype), tuple(tensor.shape), hashed.hexdigest())

    @classmethod
    def read(cls, text: str) -> Digest:
        """Read a digest from its `text`."""
        dtype, shape, sha256 = text.split(" ")
        return cls(dtype, tuple(map(int, filter(None, shape.split("x")))), sha256)

    @property
    def text(self) -> str:
        return " ".join((self.dtype, "x".join(map(str, self.shape)), self.sha256))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor as text, by the tensor's name."""
    return {name: Digest.of(tensor).text for name, tensor in tensors.items()}


def values(tensor: Shaped[Tensor, "..."]) -> str:
    """Return all bytes of a tensor as base64 text."""
    return base64.b64encode(_bytes(tensor).cpu().numpy().tobytes()).decode()


def read_values(text: str, digest: Digest) -> Shaped[Tensor, "..."]:
    """Read a tensor from the text of `values` and the tensor's digest."""
    flat = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return flat.view(getattr(torch, digest.dtype)).view(digest.shape)


def _bytes(tensor: Shaped[Tensor, "..."]) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

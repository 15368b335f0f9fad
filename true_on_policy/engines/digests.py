"""Digests of the tensors that an engine holds, as our plugin in its processes tells them.

SGLang's own checksum differs between GPU and CPU, has 64 bits, and covers neither dtype nor shape.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

DIGESTS, VALUES = "true_on_policy.digests", "true_on_policy.values"
BLOCK = 1 << 26  # bytes hashed at once
_TEXT = re.compile(
    r"(?P<dtype>\w{1,40}) (?P<shape>(?:\d{1,12}(?:x\d{1,12}){0,15})?) (?P<sha256>[0-9a-f]{64})", re.ASCII
)


@dataclass(frozen=True)
class Digest:
    """A digest identifies the dtype, the shape and the bytes of a tensor.

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
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashed.hexdigest())

    @classmethod
    def read(cls, text: str) -> Digest:
        """Read a digest from its `text`.

        Raises:
            ValueError: the text is not that of a digest.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:100]!r} is no digest")
        return cls(match["dtype"], tuple(map(int, re.findall(r"\d+", match["shape"]))), match["sha256"])

    @property
    def text(self) -> str:
        return " ".join((self.dtype, "x".join(map(str, self.shape)), self.sha256))


def told(held: Mapping[str, Tensor], action: str, names: Sequence[str] = ()) -> dict[str, str]:
    """Return by name the digest of each tensor as text, or the values of the named tensors."""
    if action == DIGESTS:
        return {name: Digest.of(tensor).text for name, tensor in held.items()}
    return {name: values(held[name]) for name in names if name in held}


def values(tensor: Shaped[Tensor, "..."]) -> str:
    """Return all bytes of a tensor as base64 text."""
    return base64.b64encode(_bytes(tensor).cpu().numpy().tobytes()).decode()


def read_values(text: str, digest: Digest) -> Shaped[Tensor, "..."]:
    """Read a tensor from the text of `values` and the tensor's digest.

    Raises:
        ValueError: the text is no base64, or holds another number of bytes than the digest tells.
    """
    decoded = bytearray(base64.b64decode(text, validate=True))
    size = math.prod(digest.shape) * getattr(torch, digest.dtype).itemsize
    if len(decoded) != size:
        raise ValueError(f"{len(decoded)} bytes of values, and the digest tells {size}")
    flat = torch.frombuffer(decoded, dtype=torch.uint8) if decoded else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, digest.dtype)).view(digest.shape)


def _bytes(tensor: Shaped[Tensor, "..."]) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)

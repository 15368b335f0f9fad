"""SGLang's weight checker, asked for our digests: what `/weights_checker` answers with our plugin.

SGLang's own checksum differs between GPU and CPU, has 64 bits, and covers neither dtype nor shape.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """Read a digest from its `text`.

        Raises:
            ValueError: the text is not that of a digest.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:100]!r} is no digest")
        return cls(found["dtype"], tuple(map(int, re.findall(r"\d+", found["shape"]))), found["sha256"])

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TARGET = "sglang.srt.utils.weight_checker.WeightChecker.handle"  # 0.5.23


def answered(
    original: Callable[..., Any],
    checker: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: Sequence[str] | None = None,
    *,
    role: str,
) -> Any:
    """Answer our two actions in the form of SGLang's checksum, and leave every other action to SGLang.

    Args:
        skip_tensor_list: for the action `VALUES`, the names of the weights to return.
    """
    if action not in (DIGESTS, VALUES):
        return original(checker, action, allow_quant_error, skip_tensor_list, role=role)
    held = checker._get_model().state_dict()  # parameters and persistent buffers; rope's tables are neither
    if action == DIGESTS:
        told = digests(held)
    else:
        told = {name: values(held[name]) for name in skip_tensor_list or () if name in held}
    parallelism = checker._parallelism_info(role=role).model_dump()
    return {"checksums": told, "per_gpu_checksum": "", "parallelism_info": parallelism}

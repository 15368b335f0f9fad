"""Compare two tensors by bytes: where they differ first, in which values, and how far apart the values are.

Bytes decide: -0.0 is not 0.0, and two NaNs with other payloads differ. Tensors are read in blocks, so a tensor in a
mapped file need not fit into memory. Where the tensors lie in two processes, a digest tells one process what the other
holds.

A distance in ulps counts the steps between representable values: 1 for neighbours, 0 for -0.0 and 0.0.
"""

import base64
import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Int, Int64, Shaped
from torch import Tensor

BLOCK = 1 << 20  # values compared at once; comparing a block takes about 50 bytes of scratch memory a value
NO_DISTANCE = -1  # stands for the distance between a NaN and a value with other bytes
FURTHEST = torch.iinfo(torch.int64).max  # a distance of 64-bit numbers saturates here
HASHED = 1 << 26  # bytes hashed at once

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _existing(*names: str) -> frozenset[torch.dtype]:
    """Return the named dtypes that this torch has; a host may bring an old torch."""
    return frozenset(getattr(torch, name) for name in names if hasattr(torch, name))


FLOATS = _existing(
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
UNSIGNED = _existing("bool", "uint8", "uint16", "uint32", "uint64", "float8_e8m0fnu")
SIGNED = frozenset(INTEGERS.values())
ORDERED = FLOATS | UNSIGNED | SIGNED  # dtypes whose values have an order, and so a distance

Kind = Literal["dtype", "shape", "bytes"]
_DIGEST = re.compile(
    r"(?P<dtype>\w{1,40}) (?P<shape>(?:\d{1,12}(?:x\d{1,12}){0,15})?) (?P<sha256>[0-9a-f]{64})", re.ASCII
)


@dataclass(frozen=True)
class Mismatch:
    """A mismatch says why two tensors are not equal.

    kind: what differs; the first of dtype, shape, bytes.
    values: the two dtypes, the two shapes, or the first two values that differ.
    bits: the first two values that differ, in hexadecimal; empty unless `kind` is bytes.
    coordinate: index of the first difference; (sequence, position) where `cu_seqlens` was given. A complex
        number has one index more: 0 for its real part, 1 for its imaginary part.
    ulps: distance of the first two values that differ; None where one is NaN or the dtype has no order.
    count, total: the number of values that differ, and the number of all values.
    furthest: the greatest distance in ulps; None where no difference has a distance.
    histogram: differing values by distance, by LABELS.
    """

    kind: Kind
    values: tuple[object, object]
    bits: tuple[str, str] | tuple[()] = ()
    coordinate: tuple[int, ...] = ()
    ulps: int | None = None
    count: int = 0
    total: int = 0
    furthest: int | None = None
    histogram: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind != "bytes":
            return f"{self.kind} {self.values[0]} against {self.values[1]}"
        left, right = self.sides
        distance = ""
        if self.has_distance:
            distance = f", {self.apart}" + ("" if self.furthest is None else f", at most {self.furthest}")
        where = f"first at {list(self.coordinate)}"
        return f"{self.count} of {self.total} values differ, {where}: {left} against {right}{distance}"

    @property
    def sides(self) -> tuple[str, str]:
        """The first two values that differ, with 9 significant digits, which tell any two float32 apart, and bits."""
        texts = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in self.values)
        left, right = (f"{text} ({bits})" for text, bits in zip(texts, self.bits, strict=True))
        return left, right

    @property
    def apart(self) -> str:
        return "no distance" if self.ulps is None else f"{self.ulps} ulp apart"

    @property
    def has_distance(self) -> bool:
        """Whether a distance in ulps means anything: integers and booleans are ids and flags, a text has no order."""
        return not any(isinstance(value, int | str) for value in self.values)


def first_mismatch(
    a: Shaped[Tensor, "..."],
    b: Shaped[Tensor, "..."],
    cu_seqlens: Int[Tensor, "boundaries"] | None = None,
    missing: Bool[Tensor, "T"] | None = None,
) -> Mismatch | None:
    """Return the first mismatch of two tensors; None where dtype, shape and bytes are equal.

    Args:
        cu_seqlens: boundaries of the sequences of two packed `[T]` tensors; a coordinate is then (sequence, position).
        missing: values of `[T]` tensors that are equal to nothing, such as what stands in for a log-prob.
    """
    if a.dtype != b.dtype:
        return Mismatch("dtype", (a.dtype, b.dtype))
    if a.shape != b.shape:
        return Mismatch("shape", (tuple(a.shape), tuple(b.shape)))
    a, b = _plain(a), _plain(b)
    first, furthest, counts = None, NO_DISTANCE, torch.zeros(len(LABELS), dtype=torch.int64)
    for start, left, right in _blocks(a, b):
        same = _bits(left) == _bits(right)
        differs = ~same if missing is None else ~same | missing[start : start + len(same)]
        if not differs.any():
            continue
        distances = ulps(left, right).masked_fill(same, NO_DISTANCE)
        index = int(differs.int().argmax())
        first = first or (start + index, left[index], right[index], int(distances[index]))
        furthest = max(furthest, int(distances[differs].max()))
        counts += torch.bincount(_labels(distances[differs]), minlength=len(LABELS))
    if first is None:
        return None
    index, left, right, apart = first
    return Mismatch(
        kind="bytes",
        values=(_value(left), _value(right)),
        bits=(_hexadecimal(left), _hexadecimal(right)),
        coordinate=coordinate(index, a.shape, cu_seqlens),
        ulps=None if apart == NO_DISTANCE else apart,
        count=int(counts.sum()),
        total=a.numel(),
        furthest=None if furthest == NO_DISTANCE else furthest,
        histogram={label: count for label, count in zip(LABELS, counts.tolist(), strict=True) if count},
    )


def equal_bits(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."]) -> bool:
    """Whether dtype, shape and bytes are equal; the comparison stops at the first block that differs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(torch.equal(_bits(left), _bits(right)) for _, left, right in _blocks(_plain(a), _plain(b)))


def ulps(a: Shaped[Tensor, "*S"], b: Shaped[Tensor, "*S"]) -> Int64[Tensor, "*S"]:
    """Return the distance of each pair of values: 0 for equal bytes, `NO_DISTANCE` for other bytes with a NaN.

    Integers and booleans count in units. 64-bit distances saturate at 2^63 - 1. Both tensors must have one
    dtype.
    """
    left, right = _bits(a), _bits(b)
    if a.dtype in ORDERED:
        distance = _distance(_position(left, a.dtype), _position(right, a.dtype))
        distance = torch.where(_is_nan(a) | _is_nan(b), NO_DISTANCE, distance)
    else:
        distance = torch.full(left.shape, NO_DISTANCE)
    return torch.where(left == right, 0, distance)


def coordinate(index: int, shape: torch.Size, cu_seqlens: Int[Tensor, "boundaries"] | None = None) -> tuple[int, ...]:
    """Return the coordinate of the value at row-major `index`: (sequence, position) with `cu_seqlens`."""
    if cu_seqlens is None:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
    starts = cu_seqlens.tolist()
    sequence = bisect_right(starts, index) - 1
    return sequence, index - starts[sequence]


def _plain(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Detach a tensor from autograd, and view a complex number as its two parts."""
    x = x.detach().resolve_neg()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _blocks(
    a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."], start: int = 0
) -> Iterator[tuple[int, Shaped[Tensor, "n"], Shaped[Tensor, "n"]]]:
    """Yield both tensors in flat blocks of at most BLOCK values, in row-major order, each with its first index.

    The leading dimension is halved instead of flattened: `reshape(-1)` would copy an expanded or transposed tensor.
    """
    if a.numel() <= BLOCK:
        yield start, a.reshape(-1).cpu(), b.reshape(-1).cpu()
    elif len(a) == 1:
        yield from _blocks(a[0], b[0], start)
    else:
        half = len(a) // 2
        yield from _blocks(a[:half], b[:half], start)
        yield from _blocks(a[half:], b[half:], start + a[:half].numel())


def _bits(x: Shaped[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """View the bytes of each value as a signed integer of its width."""
    return x.view(INTEGERS[x.element_size()])


def _position(bits: Int[Tensor, "*S"], dtype: torch.dtype) -> Int64[Tensor, "*S"]:
    """Number the values of a dtype in their order: neighbours are 1 apart, and -0.0 has the number of 0.0."""
    lowest = torch.iinfo(bits.dtype).min
    bits = bits.to(torch.int64)
    if dtype in FLOATS:  # sign and magnitude
        return torch.where(bits < 0, lowest - bits, bits)
    return bits ^ lowest if dtype in UNSIGNED else bits


def _distance(a: Int64[Tensor, "*S"], b: Int64[Tensor, "*S"]) -> Int64[Tensor, "*S"]:
    """Compute |a - b|, saturating at FURTHEST."""
    difference = a - b
    overflown = ((a ^ b) & (a ^ difference)) < 0
    lowest = difference == torch.iinfo(torch.int64).min  # has no absolute value
    return torch.where(overflown | lowest, FURTHEST, difference.abs())


def _is_nan(x: Shaped[Tensor, "*S"]) -> Bool[Tensor, "*S"]:
    return (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(torch.float32)).isnan()


POWERS = 2 ** torch.arange(63)  # upper ends of the bins 1, 2, 3..4, 5..8, ...
_RANGES = (f"{2 ** (power - 1) + 1}..{2**power}" for power in range(2, 63))
LABELS = ("NaN", "0", "1", "2", *_RANGES, f"{2**62 + 1}..")


def _labels(distances: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """Return the place in LABELS of each distance."""
    labels = torch.bucketize(distances, POWERS) + LABELS.index("1")
    for special, value in (("0", 0), ("NaN", NO_DISTANCE)):
        labels = torch.where(distances == value, LABELS.index(special), labels)
    return labels


def _value(x: Shaped[Tensor, ""]) -> object:
    return x.item() if x.dtype in ORDERED else _hexadecimal(x)


def _hexadecimal(x: Shaped[Tensor, ""]) -> str:
    width = 8 * x.element_size()
    return f"0x{int(_bits(x)) % (1 << width):0{width // 4}x}"


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
    def of(cls, tensor: Shaped[Tensor, "..."]) -> "Digest":
        hashed, flat = hashlib.sha256(), _bytes(tensor)
        for start in range(0, flat.numel(), HASHED):
            hashed.update(flat[start : start + HASHED].cpu().numpy().data)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashed.hexdigest())

    @classmethod
    def read(cls, text: str) -> "Digest":
        """Read a digest from its `text`; raises ValueError where the text is not that of a digest."""
        match = _DIGEST.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:100]!r} is no digest")
        return cls(match["dtype"], tuple(map(int, re.findall(r"\d+", match["shape"]))), match["sha256"])

    @property
    def text(self) -> str:
        return " ".join((self.dtype, "x".join(map(str, self.shape)), self.sha256))


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

"""Bits, coordinates and distances, against numpy's own walk along the number line and against Python's integers."""

import math
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given

from true_on_policy import bitwise
from true_on_policy.bitwise import (
    FLOATS,
    FURTHEST,
    INTEGERS,
    LABELS,
    SIGNED,
    UNSIGNED,
    equal_bits,
    first_mismatch,
    ulps,
)

ORDERED = sorted(FLOATS | UNSIGNED | SIGNED, key=str)
# Mantissa bits below one sign bit; dtypes whose order is sign and magnitude.
WIDTHS = {dtype: torch.empty(0, dtype=dtype).element_size() for dtype in ORDERED}

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Values whose bytes are the given unsigned integers."""
    width = 8 * WIDTHS[dtype]
    signed = [bit - (1 << width) if bit >> (width - 1) else bit for bit in bits]
    return torch.tensor(signed, dtype=INTEGERS[width // 8]).view(dtype)


def position(bits: int, dtype: torch.dtype) -> int:
    """Place of a value on the number line of its dtype, in Python integers."""
    width = 8 * WIDTHS[dtype]
    negative = bits >> (width - 1)
    if dtype in FLOATS:
        return -(bits - (1 << (width - 1))) if negative else bits
    return bits - (1 << width) if negative and dtype in SIGNED else bits


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bytes in any dtype and shape."""
    dtype, shape = draw(st.sampled_from(ORDERED)), draw(shapes)
    largest = 1 if dtype == torch.bool else (1 << 8 * WIDTHS[dtype]) - 1
    size = math.prod(shape)
    bits = draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))
    return of_bits(bits, dtype).reshape(shape)


@given(tensors(), st.data())
def test_one_flipped_bit_is_found(x: torch.Tensor, data: st.DataObject):
    """At its coordinate, with both values, and as far away as Python's integers say."""
    assume(x.dtype != torch.bool)
    index, bit = data.draw(st.integers(0, x.numel() - 1)), data.draw(st.integers(0, 8 * x.element_size() - 1))
    before = int(x.flatten().view(INTEGERS[x.element_size()])[index]) % (1 << 8 * x.element_size())
    y = x.clone()
    flat = y.view(-1)
    flat[index] = of_bits([before ^ (1 << bit)], x.dtype)[0]
    assume(int(flat.view(INTEGERS[x.element_size()])[index]) % (1 << 8 * x.element_size()) != before)

    found = first_mismatch(x, y)
    assert found is not None and found.kind == "bytes"
    assert (found.count, found.total) == (1, x.numel())
    assert found.coordinate == tuple(int(i) for i in np.unravel_index(index, x.shape))
    assert [int(bits, 16) for bits in found.bits] == [before, before ^ (1 << bit)]
    nan = x.dtype not in SIGNED and any(math.isnan(float(t.flatten()[index].double())) for t in (x, y))
    distance = abs(position(before, x.dtype) - position(before ^ (1 << bit), x.dtype))
    assert found.ulps == (None if nan else min(distance, FURTHEST))
    assert found.furthest == found.ulps
    assert not equal_bits(x, y)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@given(value=st.floats(width=16, allow_nan=False), steps=st.integers(1, 5))
def test_ulps_are_steps_of_nextafter(dtype: type, value: float, steps: int):
    start = stop = dtype(value)
    for _ in range(steps):
        stop = np.nextafter(stop, dtype(-np.inf))
    assume(not np.isinf(stop) and not np.isinf(start))
    pair = torch.from_numpy(np.array([start, stop]))
    assert int(ulps(pair[:1], pair[1:])) == steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_minus_zero_is_not_zero(dtype: torch.dtype):
    zero, minus = torch.zeros(3).to(dtype), torch.tensor([0.0, -0.0, 0.0]).to(dtype)
    assert torch.equal(zero.float(), minus.float())  # what a comparison of values says
    found = first_mismatch(zero, minus)
    assert found is not None and (found.coordinate, found.ulps, found.furthest) == ((1,), 0, 0)
    assert found.histogram == {"0": 1}


def test_payload_of_a_nan_counts():
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan().all() and other.isnan().all()
    assert first_mismatch(quiet, quiet.clone()) is None
    found = first_mismatch(quiet, other)
    assert found is not None and found.bits == ("0x7fc00000", "0x7fc00001")
    assert (found.ulps, found.furthest, found.histogram) == (None, None, {"NaN": 1})
    assert str(found).endswith("(0x7fc00001), no distance")


def test_a_nan_does_not_hide_a_distance():
    found = first_mismatch(torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0000002384185791]))
    assert found is not None and (found.ulps, found.furthest, found.count) == (None, 1, 2)
    assert str(found).endswith(", no distance, at most 1")


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtype"),  # the same bytes
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16), "dtype"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape"),
        (torch.zeros(1), torch.zeros(()), "shape"),
        (torch.zeros(0, 3), torch.zeros(3, 0), "shape"),
    ],
)
def test_dtype_and_shape_come_first(a: torch.Tensor, b: torch.Tensor, kind: str):
    found = first_mismatch(a, b)
    assert found is not None and found.kind == kind and not equal_bits(a, b)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_coordinate_of_a_packed_token(lengths: list[int], data: st.DataObject):
    """(sequence, position), and never in an empty sequence."""
    assume(sum(lengths))
    sequence = data.draw(st.sampled_from([i for i, length in enumerate(lengths) if length]))
    at = data.draw(st.integers(0, lengths[sequence] - 1))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    a, b = torch.zeros(sum(lengths)), torch.zeros(sum(lengths))
    b[cu_seqlens[sequence] + at] = 1
    found = first_mismatch(a, b, cu_seqlens)
    assert found is not None and found.coordinate == (sequence, at)


def test_the_first_of_many_and_their_counts():
    a = torch.ones(4, 5)
    b = a.clone()
    b[1, 3] = float(np.nextafter(np.float32(1), np.float32(2)))
    b[2, 0] = 1 + 2**-20  # 8 ulp: float32 has 23 bits after the point
    b[3] = -1.0
    found = first_mismatch(a, b)
    assert found is not None
    assert (found.coordinate, found.ulps, found.count) == ((1, 3), 1, 7)
    ones = struct.unpack("<i", struct.pack("<f", 1.0))[0]
    assert found.furthest == 2 * ones
    assert found.histogram == {"1": 1, "5..8": 1, "1073741825..2147483648": 5}


@given(st.integers(1, 2**62))
@example(2**62)
def test_a_distance_stands_in_its_bin(distance: int):
    a, b = torch.tensor([0]), torch.tensor([distance])
    found = first_mismatch(a, b)
    assert found is not None
    (label,) = found.histogram
    low, _, high = label.partition("..")
    assert int(low) <= distance <= int(high or low)
    assert label in LABELS


def test_64_bit_distances_saturate():
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    for low, high in ((lowest, highest), (lowest, 0), (-2, highest)):
        assert int(ulps(torch.tensor([low]), torch.tensor([high]))) == FURTHEST
    infinities = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert int(ulps(infinities[:1], infinities[1:])) == FURTHEST


def test_a_complex_number_is_its_two_parts():
    a = torch.tensor([1 + 2j, 3 + 4j])
    b = torch.tensor([1 + 2j, 3 + 5j])
    found = first_mismatch(a, b)
    assert found is not None and (found.coordinate, found.values) == ((1, 1), (4.0, 5.0))
    assert first_mismatch(a.conj(), a.conj().resolve_conj()) is None
    assert first_mismatch(a.conj().imag, -a.imag) is None, "a negative view"


def test_a_dtype_without_order_has_bytes():
    a, b = (torch.tensor([3, bits], dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for bits in (0x10, 0x11))
    found = first_mismatch(a, b)
    assert found is not None and (found.coordinate, found.ulps, found.values) == ((1,), None, ("0x10", "0x11"))
    assert not found.has_distance


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "with gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [1, 2, 7, 64, 10_000])
def test_blocks_and_layouts_change_nothing(monkeypatch: pytest.MonkeyPatch, layout: str, block: int):
    monkeypatch.setattr(bitwise, "BLOCK", block)
    x = torch.arange(5 * 3 * 4, dtype=torch.float32).reshape(5, 3, 4)
    y = x.clone()
    y[2, 1, 3] += 1
    y[4, 0, 0] += 1
    assert first_mismatch(x, LAYOUTS[layout](x)) is None
    found = first_mismatch(LAYOUTS[layout](x), y)
    assert found is not None and (found.coordinate, found.count) == ((2, 1, 3), 2)
    assert sum(found.histogram.values()) == 2


def test_an_expanded_tensor_is_not_copied():
    """A terabyte of one repeated value, of which the first block differs."""
    a, b = (torch.full((1,), value).expand(2**38) for value in (1.0, 2.0))
    assert not equal_bits(a, b)

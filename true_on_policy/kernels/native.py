"""The native backend, in C: each output has one accumulator, a fixed order of adding, and explicit fma."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from true_on_policy.kernels import build

ENTRIES = {torch.float32: "bi_product_f32", torch.bfloat16: "bi_product_bf16"}


class _Product(ctypes.Structure):
    """The ctypes mirror of the struct `product` in the C source, field for field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "rows", "columns", "depth")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_long) for name in ("a_batch", "a_row", "b_batch", "b_row", "c_batch", "c_row")),
        ("c_is_f32", ctypes.c_int),
    ]


class _Attention(ctypes.Structure):
    """The ctypes mirror of the struct `attention` in the C source, field for field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "heads", "groups", "queries", "keys", "width")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "bias", "out", "logsumexp")),
        *((f"{name}_{axis}", ctypes.c_long) for name in "qkv" for axis in ("batch", "head", "row")),
        *((f"bias_{axis}", ctypes.c_long) for axis in ("batch", "head", "row")),
        ("scale", ctypes.c_float),
        ("is_causal", ctypes.c_int),
        ("is_bf16", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Native:
    """The backend that calls compiled C kernels; `Backend` describes its methods."""

    name: str = "native"

    def prepare(self) -> None:
        build.library()

    def product(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        a, columns = _rows(a), _rows(b.transpose(1, 2))
        (batch, rows, depth), width = a.shape, b.shape[2]
        out = torch.empty(batch, rows, width, dtype=out_dtype)
        arguments = _Product(
            *(batch, rows, width, depth),
            *(a.data_ptr(), columns.data_ptr(), out.data_ptr()),
            *(a.stride(0), a.stride(1), columns.stride(0), columns.stride(1), rows * width, width),
            out_dtype == torch.float32,
        )
        kernel = getattr(build.library(), ENTRIES[a.dtype])
        kernel(ctypes.byref(arguments), torch.get_num_threads())
        return out

    def attend(
        self, query, key, value, bias: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        (batch, heads, queries, width), (_, groups, keys, _) = query.shape, key.shape
        if bias is not None:
            bias = bias.expand(batch, heads, queries, keys)
            bias = bias if bias.stride(3) == 1 else bias.contiguous()
        out = torch.empty(batch, queries, heads, width, dtype=query.dtype)
        logsumexp = torch.empty(batch, queries, heads)
        arguments = _Attention(
            *(batch, heads, groups, queries, keys, width),
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), None if bias is None else bias.data_ptr()),
            *(out.data_ptr(), logsumexp.data_ptr()),
            *(stride for x in (query, key, value) for stride in x.stride()[:3]),
            *((0, 0, 0) if bias is None else bias.stride()[:3]),
            *(scale, is_causal, query.dtype == torch.bfloat16),
        )
        if build.library().bi_attention(ctypes.byref(arguments), torch.get_num_threads()):
            raise MemoryError(f"attention: no memory for the scores of {keys} keys")
        return out.transpose(1, 2), logsumexp.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """Return x [B, R, C] with contiguous rows.

    Our kernel copies a transposed batch: torch's own copy takes many times as long as the product.
    """
    if x.stride(2) == 1:
        return x
    if x.stride(1) != 1:
        return x.contiguous()
    (batch, rows, columns), out = x.shape, torch.empty(x.shape, dtype=x.dtype)
    addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
    longs = (ctypes.c_long(n) for n in (batch, columns, rows, x.stride(0), x.stride(2)))
    build.library().bi_transpose(
        addresses[0], *longs, addresses[1], x.element_size(), torch.get_num_threads()
    )
    return out


def instructions() -> str:
    """Name the instructions that multiply bfloat16 matrices here: machines with other instructions get other bits."""
    kernels = build.library()
    kernels.bi_instructions.restype = ctypes.c_char_p
    return kernels.bi_instructions().decode()


NATIVE = Native()

"""The backend in C: one accumulator for each output, fixed order, explicit fma."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from true_on_policy.kernels import build

ENTRIES = {torch.float32: "bi_product_f32", torch.bfloat16: "bi_product_bf16"}


class _Product(ctypes.Structure):
    """`product` of the C source, field for field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "rows", "columns", "depth")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_long) for name in ("a_batch", "a_row", "b_batch", "b_row", "c_batch", "c_row")),
        ("c_is_f32", ctypes.c_int),
    ]


class _Attention(ctypes.Structure):
    """`attention` of the C source, field for field."""

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
    """See `Backend`."""

    name: str = "native"

    def prepare(self) -> None:
        build.library()

    def product(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        a = a if a.stride(2) == 1 else a.contiguous()
        columns = b.transpose(1, 2)
        columns = columns if columns.stride(2) == 1 else columns.contiguous()
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


NATIVE = Native()

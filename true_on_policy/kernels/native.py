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


NATIVE = Native()

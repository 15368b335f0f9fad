"""Softmax, mean and elementwise operators: stock kernels, called so that no row's bits depend on another row.

Measured hazards of the stock kernels: a reduction over a strided dimension adds in another order; a mean with one
output is split over threads; silu, sigmoid and rsqrt take another code path for elements beyond the last
whole vector of a thread's share. So every tensor is made contiguous, a single row is doubled, and the number
of elements is padded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SERVED = (torch.float32, torch.bfloat16)

# ATen splits elementwise work into shares of at least this many elements (at::internal::GRAIN_SIZE).
GRAIN = 32768
# The most elements that ATen's unrolled loop takes at once: two 512-bit vectors of 16-bit lanes.
VECTORS = 64


def softmax(_, stock, keyset, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute _softmax or _log_softmax along `dim`, on contiguous rows."""
    if x.dim() == 0:
        return stock.call_boxed(keyset, x, dim, half_to_float)
    rows = x.movedim(dim, -1).contiguous()
    return stock.call_boxed(keyset, rows, rows.dim() - 1, half_to_float).movedim(-1, dim)


def mean(_, stock, keyset, x: Tensor, dim, keepdim: bool = False, *, dtype=None) -> Tensor:
    """Compute mean.dim; a single row is summed beside a copy of itself."""
    rows, shape = _rows(x, dim, keepdim)
    if len(rows) == 1:
        rows = rows.expand(2, -1).contiguous()
    return stock.call_boxed(keyset, rows, [1], False, dtype=dtype)[: math.prod(shape)].reshape(shape)


def _rows(x: Tensor, dim, keepdim: bool) -> tuple[Tensor, list[int]]:
    """Return `x` as contiguous [outputs, reduced], and the shape of its mean."""
    reduced = {d % x.dim() for d in dim} if dim else set(range(x.dim()))
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [1 if d in reduced else x.shape[d] for d in range(x.dim()) if keepdim or d not in reduced]
    outputs = math.prod(x.shape[d] for d in kept)
    elements = math.prod(x.shape[d] for d in reduced)
    return x.permute(*kept, *sorted(reduced)).reshape(outputs, elements).contiguous(), shape


def pointwise(_, stock, keyset, x: Tensor) -> Tensor:
    """Compute an elementwise kernel on `x`, padded so that only whole vectors are computed."""
    if x.dtype not in SERVED:
        return stock.call_boxed(keyset, x)
    flat = x.contiguous().view(-1)
    elements = flat.numel()
    extra = whole_vectors(elements, torch.get_num_threads()) - elements
    if extra:
        flat = torch.nn.functional.pad(flat, (0, extra))
    return stock.call_boxed(keyset, flat)[:elements].view(x.shape)


def whole_vectors(elements: int, threads: int) -> int:
    """Return the least number, not below `elements`, that splits into whole vectors for every thread."""
    padded = elements
    while True:
        shares = max(min(threads, math.ceil(padded / GRAIN)), 1)
        if padded % (shares * VECTORS) == 0:
            return padded
        padded = math.ceil(padded / (shares * VECTORS)) * shares * VECTORS


OVERRIDES = {
    "_softmax": softmax,
    "_log_softmax": softmax,
    "mean.dim": mean,
    "silu": pointwise,
    "sigmoid": pointwise,
    "rsqrt": pointwise,
}

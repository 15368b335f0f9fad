"""The overrides of mm, addmm, bmm and baddbmm, built from the product of a backend."""

from __future__ import annotations

import torch
from torch import Tensor

SERVED = (torch.float32, torch.bfloat16)


def mm(backend, stock, keyset, a: Tensor, b: Tensor) -> Tensor:
    if not _served(a, b):
        return stock.call_boxed(keyset, a, b)
    return backend.product(a[None], b[None], a.dtype)[0]


def bmm(backend, stock, keyset, a: Tensor, b: Tensor) -> Tensor:
    if not _served(a, b):
        return stock.call_boxed(keyset, a, b)
    return backend.product(a, b, a.dtype)


def addmm(backend, stock, keyset, bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    if not _served(a, b, bias):
        return stock.call_boxed(keyset, bias, a, b, beta=beta, alpha=alpha)
    return _add(bias, backend.product(a[None], b[None], torch.float32)[0], beta, alpha)


def baddbmm(backend, stock, keyset, bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    if not _served(a, b, bias):
        return stock.call_boxed(keyset, bias, a, b, beta=beta, alpha=alpha)
    return _add(bias, backend.product(a, b, torch.float32), beta, alpha)


def _served(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Whether the backend serves this call; other dtypes and shapes that do not fit go to the stock kernel."""
    return a.dtype in SERVED and all(x.dtype == a.dtype for x in (b, *others)) and a.shape[-1] == b.shape[-2]


def _add(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute beta * bias + alpha * product in float32 and round once; beta 0 ignores even a NaN in bias."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product.to(bias.dtype)
    return (product + (bias if beta == 1 else bias.float() * beta)).to(bias.dtype)


OVERRIDES = {"mm": mm, "bmm": bmm, "addmm": addmm, "baddbmm": baddbmm}

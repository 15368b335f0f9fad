"""Probe whether kernels are batch-invariant here: compare a row alone with the row in a batch, by bytes.

A probe calls the functions that a model calls, so the dispatcher picks the kernel. Pins and flags play no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from true_on_policy.bitwise import Mismatch, first_mismatch
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import chosen, combined
from true_on_policy.kernels.row_parallel import agreed_tree

ROWS = 7
TOKENS = 21
# The widest weight that is drawn in full; a wider weight is cut to this many columns.
COLUMNS = 8192

Kernel = Callable[[Float[Tensor, "M K"]], Float[Tensor, "M N"]]
Draw = Callable[..., Tensor]
CPU = torch.device("cpu")


def drawing(dtype: str, device: torch.device = CPU) -> Draw:
    """Return `draw(*shape)`, which draws normal numbers: equal ones in each process on this kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(DTYPES[dtype])


@dataclass(frozen=True)
class Failure:
    """A failure is a row whose bits changed with the rows, tokens or layout around it.

    kernel: the function that was called.
    shape: the shape of the model at which the function was called.
    company: what differed between the two calls.
    mismatch: where the two results differ first.
    """

    kernel: str
    shape: tuple[int, ...]
    company: str
    mismatch: Mismatch

    def __str__(self) -> str:
        return f"{self.kernel} at {self.shape}, {self.company}: {self.mismatch}"


@torch.no_grad()
def failures(contract: Contract) -> Iterator[Failure]:
    """Probe every kernel at the shapes of a contract, and yield each failure; none where all rows keep their bits."""
    draw, tree = drawing(contract.dtype), agreed_tree(contract)
    for inner, outer in contract.shapes.linear:
        yield from _linear(inner, outer, draw)
        if tree is not None and inner % tree.leaves == 0:  # a tree's product is no operator of the dispatcher
            product = partial(tree.product, weight=draw(min(outer, COLUMNS), inner))
            yield from _rows(f"{tree.leaves} leaves", (inner, outer), product, draw(ROWS, inner))
    for shape in contract.shapes.attention:
        yield from _attention(*shape, draw)
    for width in contract.shapes.hidden:
        mean = lambda x: x.float().pow(2).mean(-1, keepdim=True)  # noqa: E731
        yield from _rows("mean", (width,), mean, draw(ROWS, width))
        yield from _rows("rsqrt", (width,), lambda x: torch.rsqrt(x.abs() + 1), draw(ROWS, width))
    for shape in contract.shapes.chosen:
        yield from _experts(*shape, draw)
    for width in contract.shapes.activated:
        yield from _rows("silu", (width,), F.silu, draw(ROWS, width))
        yield from _rows("sigmoid", (width,), torch.sigmoid, draw(ROWS, width))
    for width in {columns for _, columns in contract.shapes.linear}:
        for name, function in (("log_softmax", torch.log_softmax), ("softmax", torch.softmax)):
            yield from _rows(name, (width,), partial(function, dim=-1), draw(ROWS, width).float())


def _rows(kernel: str, shape: tuple[int, ...], function: Kernel, x: Float[Tensor, "M K"]) -> Iterator[Failure]:
    """Compare each row alone with the row in a batch, and the batch in two orders."""
    together = function(x)
    alone = torch.cat([function(row) for row in x.split(1)])
    yield from compare(kernel, shape, "a row alone and in a batch", alone, together)
    yield from compare(kernel, shape, "a batch in two orders", function(x.flip(0)).flip(0), together)


def _linear(inner: int, outer: int, draw: Draw) -> Iterator[Failure]:
    """Probe a product with a weight, and compare the weight alone with the weight fused to another."""
    outer = min(outer, COLUMNS)
    weight, x = draw(outer, inner), draw(ROWS, inner)
    yield from _rows("linear", (inner, outer), lambda rows: F.linear(rows, weight), x)
    fused = F.linear(x, torch.cat((draw(5, inner), weight)))[:, 5:]
    yield from compare("linear", (inner, outer), "a weight alone and fused", F.linear(x, weight), fused)


def _attention(heads: int, groups: int, width: int, draw: Draw) -> Iterator[Failure]:
    """Compare prefill with decode, token by token, and with a prefill that is padded on the left."""
    query, key, value = (draw(2, count, TOKENS, width) for count in (heads, groups, groups))
    attend = lambda q, k, v, **kw: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kw)  # noqa: E731
    prefill = attend(query, key, value, is_causal=True)
    shape = (heads, groups, width)
    for t in range(TOKENS):
        decode = attend(query[:1, :, t, None], key[:1, :, : t + 1], value[:1, :, : t + 1])
        yield from compare("attention", shape, f"token {t} decoded and prefilled", decode, prefill[:1, :, t, None])
    padding = 5
    behind = lambda x: F.pad(x, (0, 0, padding, 0))  # noqa: E731
    mask = torch.ones(TOKENS + padding, TOKENS + padding, dtype=torch.bool).tril()
    mask[:, :padding] = False
    padded = attend(behind(query), behind(key), behind(value), attn_mask=mask[None, None])[:, :, padding:]
    yield from compare("attention", shape, "with and without padding on the left", padded, prefill)


def _experts(experts: int, top_k: int, width: int, draw: Draw) -> Iterator[Failure]:
    """Probe the choice of experts among scores that tie, and the sum of their weighted outputs."""
    shape, tied = (experts, top_k), draw(ROWS, experts).round()
    yield from _rows("top k among ties", shape, lambda logits: chosen(logits, top_k)[1], tied)
    yield from _rows("combine weight", shape, lambda logits: chosen(logits, top_k)[0], tied)
    outputs = draw(ROWS, top_k * width)

    def combine(rows: Tensor) -> Tensor:
        places = torch.arange(len(rows) * top_k).view(-1, top_k)
        weights = torch.linspace(0.1, 0.9, top_k).expand(len(rows), -1)
        return combined(rows.reshape(-1, width), places, weights)

    yield from _rows("sum over experts", (top_k, width), combine, outputs)


def compare(kernel: str, shape: tuple[int, ...], company: str, a: Tensor, b: Tensor) -> Iterator[Failure]:
    """Yield a failure where two results differ in a bit; nothing where they are equal."""
    mismatch = first_mismatch(a, b)
    if mismatch is not None:
        yield Failure(kernel, shape, company, mismatch)

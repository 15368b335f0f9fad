"""Probe whether kernels are batch-invariant here: compare a row alone with the row in a batch, by bytes.

A probe calls the functions that a model calls, so the dispatcher picks the kernel. Pins and flags play no part. Kernels
of an accelerator choose tiles, splits and whole libraries by the number of rows, so batches of several sizes are
compared there.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from true_on_policy.bitwise import Mismatch, first_mismatch
from true_on_policy.contract.cpu import DTYPES, Contract, Shapes
from true_on_policy.contract.rounding import chosen, combined
from true_on_policy.kernels.row_parallel import agreed_tree, tree_sum

ROWS = 7
TOKENS = 21
# The widest weight that is drawn in full; a wider weight is cut to this many columns.
COLUMNS = 8192
# Sizes of an accelerator's batches in which the first rows are computed; each smaller batch is compared with the last.
SIZES = (1, 2, 7, 64, 300)
# Sizes of the batches for kernels as wide as a vocabulary.
FEW = (1, 2, 7)
# How many rows, and how many columns of a weight, go into a digest.
DIGESTED = (64, 512)
# Lengths of the packed sequences: one key, less than a tile of 64 or 128, and more.
LENGTHS = (1, 33, 130, 257)
Kernel = Callable[[Float[Tensor, "M K"]], Float[Tensor, "M N"]]
Product = Callable[[Float[Tensor, "M K"], Float[Tensor, "N K"]], Float[Tensor, "M N"]]
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


@torch.no_grad()
def in_company(
    kernel: str, shape: tuple[int, ...], function: Kernel, x: Float[Tensor, "M K"], sizes: tuple[int, ...]
) -> Iterator[Failure]:
    """Compare the first rows in batches of several sizes with the whole batch, and the batch in two orders."""
    together = function(x)
    for size in (size for size in sizes if size < len(x)):
        company = f"{size} of {len(x)} rows and all"
        yield from compare(kernel, shape, company, function(x[:size]), together[:size])
    yield from compare(kernel, shape, "a batch in two orders", function(x.flip(0)).flip(0), together)


def product_failures(
    kernel: str, dtype: str, shapes: Shapes, device: torch.device, product: Product
) -> Iterator[Failure]:
    """Probe a product with every weight shape of a model; a weight wider than COLUMNS is cut to COLUMNS."""
    draw = drawing(dtype, device)
    for inner, outer in shapes.linear:
        weight = draw(min(outer, COLUMNS), inner)
        multiply = lambda rows, weight=weight: product(rows, weight)  # noqa: E731
        yield from in_company(kernel, (inner, len(weight)), multiply, draw(SIZES[-1], inner), SIZES)


@torch.no_grad()
def digest(dtype: str, products: Iterable[tuple[int, int, Product]], device: torch.device) -> str:
    """Hash the bits of products, given as (K, N, function): two processes that multiply alike get one digest.

    The numbers are drawn on the CPU, so that two kinds of accelerator multiply equal numbers.
    """
    draw, digested = drawing(dtype), hashlib.sha256()
    for inner, outer, multiply in products:
        weight, x = draw(min(outer, DIGESTED[1]), inner), draw(DIGESTED[0], inner)
        product = multiply(x.to(device), weight.to(device)).cpu()
        digested.update(bytes(product.view(torch.uint8).flatten().tolist()))
    return digested.hexdigest()[:12]


def over_ranks(share: Product, ranks: int) -> Product:
    """Build a product whose K is cut over tensor-parallel ranks: each part by `share`, the parts added as a tree.

    All parts are computed in one process, so the exchange between ranks is not tried.
    """

    def product(x: Tensor, weight: Tensor) -> Tensor:
        shares = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        return tree_sum([share(a.contiguous(), b.contiguous()) for a, b in shares])

    return product


def aten_failures(dtype: str, shapes: Shapes, device: torch.device) -> Iterator[Failure]:
    """Probe the operators that every batch-invariant mode overrides: mm, addmm, mean.dim and _log_softmax."""
    draw = drawing(dtype, device)
    yield from product_failures("linear", dtype, shapes, device, F.linear)
    # The bias must be contiguous: the kernels of the modes ignore its stride.
    biased = lambda x, weight: F.linear(x, weight, weight[:, 0].contiguous())  # noqa: E731
    yield from product_failures("linear with a bias", dtype, shapes, device, biased)
    for width in shapes.hidden:
        mean = lambda x: x.float().pow(2).mean(-1, keepdim=True)  # noqa: E731
        yield from in_company("mean", (width,), mean, draw(SIZES[-1], width), SIZES)
    width = max(outer for _, outer in shapes.linear)
    for logits in (draw(FEW[-1], width), draw(FEW[-1], width).float()):
        kernel = f"log_softmax of {logits.dtype}"
        yield from in_company(kernel, (width,), lambda x: torch.log_softmax(x, -1), logits, FEW)


@torch.no_grad()
def linear_once(dtype: str, shape: tuple[int, int], device: torch.device) -> None:
    """Multiply once as a model does, for a caller that counts the calls of a kernel."""
    draw, (inner, outer) = drawing(dtype, device), shape
    F.linear(draw(FEW[-1], inner), draw(min(outer, COLUMNS), inner))


@torch.no_grad()
def attention_failures(dtype: str, shapes: Shapes, device: torch.device, library: ModuleType) -> Iterator[Failure]:
    """Compare causal attention over packed sequences with each sequence alone, and with another order of packing."""
    for heads, groups, width in shapes.attention:
        shape, batch = (heads, groups, width), Packed(drawing(dtype, device), heads, groups, width)
        packed = batch.attend(library, range(len(LENGTHS)))
        turned = batch.attend(library, reversed(range(len(LENGTHS))))
        for i, length in enumerate(LENGTHS):
            alone, company = batch.attend(library, [i])[i], f"a sequence of {length} alone and packed"
            yield from compare("attention", shape, company, alone, packed[i])
            yield from compare("attention", shape, "packed sequences in two orders", turned[i], packed[i])


class Packed:
    """A batch of sequences with LENGTHS tokens; each has query [T, H, D], key and value [T, G, D]."""

    def __init__(self, draw: Draw, heads: int, groups: int, width: int):
        self.sequences = [[draw(n, count, width) for count in (heads, groups, groups)] for n in LENGTHS]

    def attend(self, library: ModuleType, order: Iterable[int]) -> dict[int, Tensor]:
        """Attend over the sequences packed in `order`, and return the output [T, H, D] of each."""
        order = list(order)
        queries, keys, values = ([self.sequences[i][part] for i in order] for part in range(3))
        (q_starts, q_longest), (k_starts, k_longest) = _starts(queries), _starts(keys)
        out = library.flash_attn_varlen_func(
            *(torch.cat(queries), torch.cat(keys), torch.cat(values)),
            *(q_starts, k_starts, q_longest, k_longest),
            causal=True,
        )
        parts = output(out).split([len(query) for query in queries])
        return dict(zip(order, parts, strict=True))


def _starts(parts: list[Tensor]) -> tuple[Tensor, int]:
    """Return the cu_seqlens of packed parts, and the longest length."""
    lengths = [len(part) for part in parts]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=parts[0].device)
    return starts, max(lengths)


def output(result) -> Tensor:
    """Pick the output from a result of FlashAttention-3; some builds return the logsumexp beside it."""
    return result[0] if isinstance(result, tuple) else result

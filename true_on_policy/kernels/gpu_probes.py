"""The probes of an accelerator: kernels there choose tiles, splits and whole libraries by the number of rows.

Like the probes of the CPU, these probes call the functions that a model calls and know nothing of pins or flags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from types import ModuleType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from true_on_policy.contract.cpu import Shapes
from true_on_policy.kernels.probes import COLUMNS, Draw, Failure, Kernel, compare, drawing
from true_on_policy.kernels.row_parallel import tree_sum

# Sizes of the batches in which the first rows are computed; each smaller batch is compared with the last.
SIZES = (1, 2, 7, 64, 300)
# Sizes of the batches for kernels as wide as a vocabulary.
FEW = (1, 2, 7)

# How many rows, and how many columns of a weight, go into a digest.
DIGESTED = (64, 512)

# Lengths of the packed sequences: one key, less than a tile of 64 or 128, and more.
LENGTHS = (1, 33, 130, 257)

Product = Callable[[Float[Tensor, "M K"], Float[Tensor, "N K"]], Float[Tensor, "M N"]]


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

    def attend(self, library: ModuleType, order, last: tuple[int, ...] = ()) -> dict[int, Tensor]:
        """Attend over the sequences packed in `order`, and return the output [T, H, D] of each.

        A sequence in `last` has one query only: its last token's.
        """
        order = list(order)
        queries = [self.sequences[i][0][-1:] if i in last else self.sequences[i][0] for i in order]
        keys, values = ([self.sequences[i][part] for i in order] for part in (1, 2))
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

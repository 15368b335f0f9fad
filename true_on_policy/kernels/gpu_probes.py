"""The probes of an accelerator: kernels there choose tiles, splits and whole libraries by the number of rows.

Like `probes`, they call what a model calls and know nothing of pins or flags.
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

from true_on_policy.contract.cpu import DTYPES, Shapes
from true_on_policy.kernels.probes import COLUMNS, Failure, Kernel, compare
from true_on_policy.kernels.row_parallel import tree_sum

# Numbers of rows in which the same rows are calculated; the last is the batch to which the others are compared.
SIZES = (1, 2, 7, 64, 300)
# Of what is as wide as a vocabulary.
FEW = (1, 2, 7)

# Rows, and columns of a weight, whose products are digested.
DIGESTED = (64, 512)

# Tokens of the sequences that are packed, and of one that decodes: one key, less than a tile of 64 or 128, and more.
LENGTHS = (1, 33, 130, 257)
POSITIONS = (0, 1, 63, 64, 128, 256)

Product = Callable[[Float[Tensor, "M K"], Float[Tensor, "N K"]], Float[Tensor, "M N"]]
Draw = Callable[..., Tensor]


def drawing(dtype: str, device: torch.device) -> Draw:
    """draw(*shape): normal numbers, the same in each process on this device."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(DTYPES[dtype])


@torch.no_grad()
def in_company(
    kernel: str,
    shape: tuple[int, ...],
    function: Kernel,
    x: Float[Tensor, "M K"],
    sizes: tuple[int, ...],
) -> Iterator[Failure]:
    """The first rows in batches of several sizes, and the whole batch in another order."""
    together = function(x)
    for size in (size for size in sizes if size < len(x)):
        company = f"{size} of {len(x)} rows and all"
        yield from compare(kernel, shape, company, function(x[:size]), together[:size])
    yield from compare(kernel, shape, "a batch in two orders", function(x.flip(0)).flip(0), together)


def product_failures(
    kernel: str, dtype: str, shapes: Shapes, device: torch.device, product: Product
) -> Iterator[Failure]:
    """A product with each weight of a model, as it is stored; of a wider one the first COLUMNS columns."""
    draw = drawing(dtype, device)
    for inner, outer in shapes.linear:
        weight = draw(min(outer, COLUMNS), inner)
        multiply = lambda rows, weight=weight: product(rows, weight)  # noqa: E731
        yield from in_company(kernel, (inner, len(weight)), multiply, draw(SIZES[-1], inner), SIZES)


@torch.no_grad()
def digest(dtype: str, products: Iterable[tuple[int, int, Product]], device: torch.device) -> str:
    """Of the bits of products (K, N, how): two processes that multiply alike have the same.

    Drawn on the CPU, so that two kinds of accelerator are given the same numbers.
    """
    draw, digested = drawing(dtype, torch.device("cpu")), hashlib.sha256()
    for inner, outer, multiply in products:
        weight, x = draw(min(outer, DIGESTED[1]), inner), draw(DIGESTED[0], inner)
        product = multiply(x.to(device), weight.to(device)).cpu()
        digested.update(bytes(product.view(torch.uint8).flatten().tolist()))
    return digested.hexdigest()[:12]


def over_ranks(share: Product, ranks: int) -> Product:
    """A product whose K so many tensor-parallel ranks share, each by `share`: their sum as both sides add it, a tree.

    In one process: what the ranks exchange is no part of it.
    """

    def product(x: Tensor, weight: Tensor) -> Tensor:
        shares = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
        return tree_sum([share(a.contiguous(), b.contiguous()) for a, b in shares])

    return product


def aten_failures(dtype: str, shapes: Shapes, device: torch.device) -> Iterator[Failure]:
    """What every batch-invariant mode overrides: mm, addmm, mean.dim and _log_softmax, as models call them."""
    draw = drawing(dtype, device)
    yield from product_failures("linear", dtype, shapes, device, F.linear)
    # Contiguous: the modes' kernels read a bias without its stride.
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
    """One product as a model calls it, for a caller that watches which kernel serves it."""
    draw, (inner, outer) = drawing(dtype, device), shape
    F.linear(draw(FEW[-1], inner), draw(min(outer, COLUMNS), inner))


@torch.no_grad()
def attention_failures(
    dtype: str, shapes: Shapes, device: torch.device, library: ModuleType
) -> Iterator[Failure]:
    """Causal attention over packed sequences: each alone, and in another order."""
    for heads, groups, width in shapes.attention:
        shape, batch = (heads, groups, width), _Packed(drawing(dtype, device), heads, groups, width)
        packed = batch.attend(library, range(len(LENGTHS)))
        turned = batch.attend(library, reversed(range(len(LENGTHS))))
        for i, length in enumerate(LENGTHS):
            yield from compare(
                *("attention", shape, f"a sequence of {length} alone and packed"),
                *(batch.attend(library, [i])[i], packed[i]),
            )
            yield from compare("attention", shape, "packed sequences in two orders", turned[i], packed[i])


@torch.no_grad()
def decode_failures(
    dtype: str, shapes: Shapes, device: torch.device, library: ModuleType, longest: int
) -> Iterator[Failure]:
    """Tokens that read their keys from a contiguous cache, against the same tokens prefilled.

    `longest` is the call's max_seqlen_q. FlashAttention-3 takes a lone query (1) for one without a causal mask, and
    then adds up its keys in other tiles than prefill does; with 2 it keeps the causal tiles.
    """
    for heads, groups, width in shapes.attention:
        batch, last = _Packed(drawing(dtype, device), heads, groups, width), len(LENGTHS) - 1
        prefilled = batch.attend(library, [last])[last]
        for t in POSITIONS:
            decoded = batch.decode(library, last, t, longest)
            company = f"token {t} decoded and prefilled"
            yield from compare("attention", (heads, groups, width), company, decoded, prefilled[t : t + 1])


@torch.no_grad()
def mixed_failures(
    dtype: str, shapes: Shapes, device: torch.device, library: ModuleType
) -> Iterator[Failure]:
    """One decoding sequence beside one that prefills, in one call: what a mixed (chunked) batch of an engine does."""
    for heads, groups, width in shapes.attention:
        batch = _Packed(drawing(dtype, device), heads, groups, width)
        one, other = len(LENGTHS) - 1, len(LENGTHS) - 2
        mixed = batch.attend(library, [one, other], last=(one,))
        alone = batch.attend(library, [one], last=(one,))[one], batch.attend(library, [other])[other]
        for name, a, b in zip(("decoding", "prefilling"), (mixed[one], mixed[other]), alone, strict=True):
            company = f"a {name} sequence alone and in a mixed batch"
            yield from compare("attention", (heads, groups, width), company, a, b)


class _Packed:
    """Sequences of LENGTHS tokens: query [T, H, D], key and value [T, G, D] each."""

    def __init__(self, draw: Draw, heads: int, groups: int, width: int):
        self.sequences = [[draw(n, count, width) for count in (heads, groups, groups)] for n in LENGTHS]

    def attend(self, library: ModuleType, order, last: tuple[int, ...] = ()) -> dict[int, Tensor]:
        """Output [T, H, D] of each sequence, packed in this order; of those in `last` the last token asks alone."""
        order = list(order)
        queries = [self.sequences[i][0][-1:] if i in last else self.sequences[i][0] for i in order]
        keys, values = ([self.sequences[i][part] for i in order] for part in (1, 2))
        (q_starts, q_longest), (k_starts, k_longest) = _starts(queries), _starts(keys)
        out = library.flash_attn_varlen_func(
            *(torch.cat(queries), torch.cat(keys), torch.cat(values)),
            *(q_starts, k_starts, q_longest, k_longest),
            causal=True,
        )
        parts = _output(out).split([len(query) for query in queries])
        return dict(zip(order, parts, strict=True))

    def decode(self, library: ModuleType, i: int, t: int, longest: int) -> Tensor:
        """Output [1, H, D] of token t, which reads its keys from a cache; `longest`: max_seqlen_q."""
        query, key, value = self.sequences[i]
        starts, seen = (torch.tensor(n, dtype=torch.int32, device=query.device) for n in ([0, 1], [t + 1]))
        out = library.flash_attn_with_kvcache(
            query[t : t + 1],
            key[None],
            value[None],
            cache_seqlens=seen,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=True,
        )
        return _output(out)


def _starts(parts: list[Tensor]) -> tuple[Tensor, int]:
    """cu_seqlens and the longest length."""
    lengths = [len(part) for part in parts]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=parts[0].device)
    return starts, max(lengths)


def _output(result) -> Tensor:
    """Builds differ in whether the logsumexp comes along."""
    return result[0] if isinstance(result, tuple) else result

"""Try every way in which a batch could change the bits of a row.

Each comparison is one call against the same rows of another call, on whatever kernels are pinned, so that the stock
kernels are the control. The digest covers every reference result: two runs with one digest agree by bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from true_on_policy.bitwise import equal_bits

AWKWARD = (33, 37, 100, 130, 2560)
MOST_ROWS = 64
FEW = (1, 2, 3, 5, 31, 33, 64)
TOKENS = 130
LONG = 600
SAMPLED = (0, 1, 31, 32, 255, 256, 511, 512, 513, 599)
ATTENTION = ((4, 2, 32), (6, 2, 64), (2, 1, 80), (4, 4, 128))
WIDTHS = (1, 15, 31, 33, 64, 100, 768, 997, 65537)


class Comparison(NamedTuple):
    family: str
    label: str
    reference: Tensor
    other: Tensor


@dataclass
class Tally:
    """A tally counts comparisons and failures by family of kernels, and keeps the labels of the failures."""

    compared: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    labels: list[str] = field(default_factory=list)
    digest: str = ""

    def add(self, comparison: Comparison) -> None:
        self.compared[comparison.family] += 1
        if not equal_bits(comparison.reference, comparison.other):
            self.failed[comparison.family] += 1
            self.labels.append(f"{comparison.family}: {comparison.label}")


def run(
    dtype: torch.dtype, depths: Sequence[int] = AWKWARD, columns: Sequence[int] = AWKWARD, every_row: bool = True
) -> Tally:
    """Try all families in `dtype`: each K of `depths`, each N of `columns`, and M from 1 to 64 or in FEW."""
    tally, digest = Tally(), hashlib.sha256()
    rows = range(1, MOST_ROWS + 1) if every_row else FEW
    with torch.no_grad():
        for comparison in _all(dtype, depths, columns, rows):
            tally.add(comparison)
            digest.update(comparison.reference.contiguous().view(torch.uint8).numpy().data)
    tally.digest = digest.hexdigest()
    return tally


def _all(
    dtype: torch.dtype, depths: Sequence[int], columns: Sequence[int], rows: Sequence[int]
) -> Iterator[Comparison]:
    draw = _drawer(dtype)
    for inner, outer in product(depths, columns):
        x, weight = draw(MOST_ROWS, inner), draw(outer, inner)
        yield from _company(x, weight, rows)
        yield from _layouts(x, weight)
        yield from _columns(x, weight)
    yield from _batches(draw)
    for heads, groups, width in ATTENTION if len(rows) == MOST_ROWS else ATTENTION[:2]:
        yield from _attention(draw, heads, groups, width)
    yield from _long_attention(draw)
    for name, function in ROWWISE.items():
        for width in WIDTHS:
            yield from _rowwise(name, function, draw(5, width))


def _drawer(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def _company(x: Tensor, weight: Tensor, rows: Sequence[int]) -> Iterator[Comparison]:
    """Compare M rows from three places of a batch of 64 with the rows of the whole batch."""
    together = F.linear(x, weight)
    size = tuple(weight.T.shape)
    for count in rows:
        for first in sorted({0, (MOST_ROWS - count) // 2, MOST_ROWS - count}):
            part = slice(first, first + count)
            yield Comparison("mm", f"{size} rows {part}", together[part], F.linear(x[part], weight))


def _layouts(x: Tensor, weight: Tensor) -> Iterator[Comparison]:
    """Compare products of equal numbers in different memory layouts, for one row, three rows and all rows."""
    size, bias = tuple(weight.T.shape), weight[:, 0].contiguous()
    for rows in (x, x[:1], x[17:20]):
        plain, biased = F.linear(rows, weight), F.linear(rows, weight, bias)
        for stored, left, right in product(STORED, (True, False), (True, False)):
            a = STORED[stored](rows) if left else rows
            b = STORED[stored](weight) if right else weight
            yield Comparison("layout", f"{size} {stored}", plain, a @ b.t())
            yield Comparison("layout", f"{size} {stored} bias", biased, torch.addmm(bias, a, b.t()))
        out = torch.empty_like(plain)
        yield Comparison("layout", f"{size} mm.out", plain, torch.mm(rows, weight.t(), out=out))
        order = torch.arange(len(rows)).flip(0)
        yield Comparison("layout", f"{size} shuffled", plain, F.linear(rows[order], weight)[order])


def _strided(x: Tensor) -> Tensor:
    wide = x.new_zeros(len(x), 2 * x.shape[1])
    wide[:, ::2] = x
    return wide[:, ::2]


def _misaligned(x: Tensor) -> Tensor:
    return torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(x.shape)


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "transposed": lambda x: x.t().contiguous().t(),
    "misaligned": _misaligned,
    "in wider rows": lambda x: F.pad(x, (3, 5))[:, 3:-5],
}


def _columns(x: Tensor, weight: Tensor) -> Iterator[Comparison]:
    """Compare a weight alone with the weight fused between others, and with its last column alone."""
    size = tuple(weight.T.shape)
    for rows in (x, x[:1], x[5:8]):
        alone = F.linear(rows, weight)
        for before, behind in ((0, 7), (7, 0), (64, 64), (weight.shape[0], 0)):
            fused = torch.cat((weight.flip(0)[:before], weight, weight[:behind]))
            start = len(fused) - len(weight) - len(weight[:behind])
            part = F.linear(rows, fused)[:, start : start + len(weight)]
            yield Comparison("columns", f"{size} fused {before} {behind}", alone, part)
        yield Comparison("columns", f"{size} last", alone[:, -1:], F.linear(rows, weight[-1:]))


def _batches(draw) -> Iterator[Comparison]:
    """Compare a matrix in a bmm with the matrix alone, as mm and by one row; baddbmm in a batch and alone."""
    for inner, outer in product((33, 64, 130), repeat=2):
        a, b, bias = draw(5, 37, inner), draw(5, inner, outer), draw(5, 37, outer)
        together, biased = torch.bmm(a, b), torch.baddbmm(bias, a, b)
        for i in range(5):
            one = slice(i, i + 1)
            yield Comparison("bmm", f"{inner} {outer} alone", together[one], torch.bmm(a[one], b[one]))
            yield Comparison("bmm", f"{inner} {outer} as mm", together[i], a[i] @ b[i])
            yield Comparison("bmm", f"{inner} {outer} one row", together[one, 3:4], torch.bmm(a[one, 3:4], b[one]))
            alone = torch.baddbmm(bias[one], a[one], b[one])
            yield Comparison("bmm", f"{inner} {outer} baddbmm", biased[one], alone)


def _attend(query: Tensor, key: Tensor, value: Tensor, **kwargs) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **kwargs)


def _causal(queries: int, keys: int) -> Tensor:
    """Return a mask that is True where a query may see a key; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _attention(draw, heads: int, groups: int, width: int) -> Iterator[Comparison]:
    query, key, value = (draw(2, count, TOKENS, width) for count in (heads, groups, groups))
    prefill = _attend(query, key, value, is_causal=True)
    name = f"{heads}/{groups} heads of {width}"
    masked = _attend(query, key, value, attn_mask=_causal(TOKENS, TOKENS))
    yield Comparison("attention", f"{name} causal by mask", prefill, masked)
    for t in range(TOKENS):
        for rows in (slice(0, 1), slice(0, 2)):
            seen = key[rows, :, : t + 1], value[rows, :, : t + 1]
            step = _attend(query[rows, :, t, None], *seen)
            yield Comparison("attention", f"{name} decode {t}", prefill[rows, :, t, None], step)
    yield from _chunks(name, query, key, value, prefill)
    yield from _padded(name, query, key, value, prefill)
    repeated = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    whole = F.scaled_dot_product_attention(query, *repeated, is_causal=True)
    yield Comparison("attention", f"{name} repeated keys", prefill, whole)
    packed = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    yield Comparison("attention", f"{name} other layout", prefill, _attend(*packed, is_causal=True))


def _chunks(name: str, query, key, value, prefill: Tensor) -> Iterator[Comparison]:
    for size in (1, 7, 32, 48, 64):
        for start in range(0, TOKENS, size):
            stop = min(start + size, TOKENS)
            mask = _causal(stop - start, stop)
            part = _attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], attn_mask=mask)
            yield Comparison("attention", f"{name} chunk {start}:{stop}", prefill[:, :, start:stop], part)


def _padded(name: str, query, key, value, prefill: Tensor) -> Iterator[Comparison]:
    for left, right in ((1, 0), (5, 0), (33, 0), (0, 1), (0, 30), (17, 13)):
        q, k, v = (F.pad(x, (0, 0, left, right)) for x in (query, key, value))
        mask = _causal(q.shape[2], q.shape[2])
        mask[:, :left] = False
        part = _attend(q, k, v, attn_mask=mask[None, None])[:, :, left : left + TOKENS]
        yield Comparison("attention", f"{name} padded {left} {right}", prefill, part)
        lowest = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        part = _attend(q, k, v, attn_mask=lowest[None, None])[:, :, left : left + TOKENS]
        yield Comparison("attention", f"{name} padded by numbers {left} {right}", prefill, part)


def _long_attention(draw) -> Iterator[Comparison]:
    query, key, value = (draw(1, heads, LONG, 64) for heads in (4, 2, 2))
    prefill = _attend(query, key, value, is_causal=True)
    for t in SAMPLED:
        step = _attend(query[:, :, t, None], key[:, :, : t + 1], value[:, :, : t + 1])
        yield Comparison("attention", f"long decode {t}", prefill[:, :, t, None], step)
    packed = torch.block_diag(_causal(200, 200), _causal(400, 400)).bool()
    whole = _attend(query, key, value, attn_mask=packed)
    for part in (slice(0, 200), slice(200, 600)):
        alone = _attend(query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True)
        yield Comparison("attention", f"packed {part}", alone, whole[:, :, part])


def _rowwise(name: str, function, x: Tensor) -> Iterator[Comparison]:
    together = function(x)
    width = x.shape[1]
    for count in range(1, len(x)):
        part = function(x[:count])
        yield Comparison(name, f"{width} of {count}", together[:count], part)
        yield Comparison(name, f"{width} last {count}", together[-count:], function(x[-count:]))
    for stored, view in STORED.items():
        yield Comparison(name, f"{width} {stored}", together, function(view(x)))
        yield Comparison(name, f"{width} {stored} alone", together[:1], function(view(x)[:1]))


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "log_softmax": partial(torch.log_softmax, dim=-1),
    "mean": partial(torch.mean, dim=-1, keepdim=True),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
}

"""The tile backend needs no compiler: it calls stock kernels, always at one tile size.

A stock kernel picks its code path by the shape of a call. Here every call has one shape, except for K: 32 rows by 256
columns of zero-padded, contiguous, aligned storage. Nothing guarantees that one path treats all rows alike,
so `prepare` tests this on this machine. An import of this module makes `Contract(backend="tile")` a choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from true_on_policy.errors import PinError
from true_on_policy.kernels.cpu import register

ROWS = 32
COLUMNS = 256
# The number of keys that ATen's flash attention takes at once.
KEYS = 512
# A mask at or below this number hides a key: -inf, or the lowest number of a dtype.
HIDDEN = -1e38
# The lengths K of the sums that are tried: around the widths of vectors, and the sizes of models.
TRIED_DEPTHS = (1, 33, 37, 64, 100, 130, 256, 712, 1024, 2560)

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@dataclass(frozen=True)
class Tile:
    """The backend that calls stock kernels tile by tile; `Backend` describes its methods."""

    name: str = "tile"

    def prepare(self) -> None:
        """Fetch the stock kernels, and check that every place in a tile gives equal bits."""
        _stock(FLASH)
        for dtype in (torch.float32, torch.bfloat16):
            _check_places(dtype)

    def product(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        if out_dtype != a.dtype:
            a, b = a.to(out_dtype), b.to(out_dtype)
        out = a.new_empty(len(a), a.shape[1], b.shape[2])
        if out.numel() == 0:
            return out
        with _one_thread():
            for one, left, right in zip(out, a, b, strict=True):
                one.copy_(_product(left, right))
        return out

    def attend(
        self, query, key, value, bias: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if bias is not None and bias.dim() == 4 and bias.shape[1] > 1:
            return self._attend_by_head(query, key, value, bias, is_causal, scale)
        (batch, heads, queries, width), keys = query.shape, key.shape[2]
        out = query.new_zeros(batch, queries, heads, width)
        logsumexp = torch.zeros(batch, queries, heads)
        shown = _shown(bias, batch, queries, keys, is_causal)
        for b in range(batch):
            sequence = _Sequence(query[b], key[b], value[b], shown[b])
            for rows, part, seen in sequence.tiles():
                out[b, rows], logsumexp[b, rows] = part.attend(seen, scale)
        return out.transpose(1, 2), logsumexp.transpose(1, 2)

    def _attend_by_head(self, query, key, value, bias, is_causal, scale):
        """Attend head by head, for a mask that differs between heads."""
        share = query.shape[1] // key.shape[1]
        bias = bias.expand(len(query), query.shape[1], -1, -1)
        parts = [
            self.attend(
                query[:, h, None], key[:, h // share, None], value[:, h // share, None], own, is_causal, scale
            )
            for h, own in enumerate(bias.split(1, dim=1))
        ]
        outs, logsumexps = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(logsumexps, 1)


@dataclass(frozen=True)
class _Seen:
    """A tile of up to `ROWS` queries whose visible keys begin at one place and fill an equal number of blocks."""

    rows: Tensor
    begin: int
    blocks: int


@dataclass(frozen=True)
class _Sequence:
    """One sequence: query [H, Q, D], key and value [G, T, D], and `shown` [Q, T], the bias of each score."""

    query: Tensor
    key: Tensor
    value: Tensor
    shown: Tensor

    def tiles(self) -> Iterator[tuple[Tensor, _Sequence, _Seen]]:
        """Yield (rows of this sequence, sequence to attend in, its visible keys) for each tile of queries.

        A row whose visible keys have gaps is attended in a new sequence of these keys. A row without keys is skipped.
        """
        visible = self.shown > -math.inf
        begin = visible.int().argmax(1)
        end = torch.where(visible, torch.arange(1, visible.shape[1] + 1), 0).amax(1)
        gaps = end - begin != visible.sum(1)
        kinds = torch.stack((begin, (end - begin + KEYS - 1) // KEYS), 1)
        for kind in kinds[(end > 0) & ~gaps].unique(dim=0):
            rows = ((kinds == kind).all(1) & (end > 0) & ~gaps).nonzero()[:, 0]
            for part in rows.split(ROWS):
                yield part, self, _Seen(part, int(kind[0]), int(kind[1]))
        for row in ((end > 0) & gaps).nonzero():
            keys = visible[row[0]].nonzero()[:, 0]
            close = _Sequence(
                self.query[:, row], self.key[:, keys], self.value[:, keys], self.shown[row][:, keys]
            )
            yield row, close, _Seen(torch.zeros_like(row), 0, math.ceil(len(keys) / KEYS))

    def attend(self, seen: _Seen, scale: float) -> tuple[Tensor, Tensor]:
        """Return the outputs [rows, H, D] and logsumexps [rows, H] of one tile."""
        length, rows = seen.blocks * KEYS, len(seen.rows)
        key, value = (_window(x, 1, seen.begin, length, 0.0) for x in (self.key, self.value))
        mask = _window(self.shown[seen.rows], 1, seen.begin, length, -math.inf)
        query, mask = (
            _window(x, -2, 0, ROWS, fill) for x, fill in ((self.query[:, seen.rows], 0.0), (mask, -math.inf))
        )
        out, logsumexp = _stock(FLASH).call_boxed(
            CPU, query[None], key[None], value[None], 0.0, False, attn_mask=mask[None, None], scale=scale
        )
        return out[0, :, :rows].transpose(0, 1), logsumexp[0, :, :rows].T


def _shown(bias: Tensor | None, batch: int, queries: int, keys: int, is_causal: bool) -> Tensor:
    """Return the bias [batch, queries, keys] of each score, -inf where the key is hidden."""
    shown = torch.zeros(1, queries, keys) if bias is None else bias.expand(batch, 1, queries, keys)[:, 0]
    if is_causal:
        shown = shown.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
    return shown.masked_fill(shown <= HIDDEN, -math.inf).expand(batch, queries, keys)


def _window(x: Tensor, dim: int, begin: int, length: int, fill: float) -> Tensor:
    """Cut `length` entries of x from `begin` on along `dim`, padded by `fill` where x ends, contiguous."""
    dim %= x.dim()
    have = x.narrow(dim, begin, min(length, x.shape[dim] - begin))
    missing = length - have.shape[dim]
    return pad(have, (0, 0) * (x.dim() - 1 - dim) + (0, missing), value=fill).contiguous()


def _check_places(dtype: torch.dtype) -> None:
    """Check that one row and one column, repeated, give equal bits in every place of a tile.

    Raises:
        PinError: two places differ, so the stock kernels of this machine cannot serve.
    """
    for depth in TRIED_DEPTHS:
        generator = torch.Generator().manual_seed(depth)
        row, column = torch.randn(2, depth, generator=generator).to(dtype)
        tile = _product(row.expand(ROWS, depth), column.expand(COLUMNS, depth).t())
        if not torch.equal(tile, tile[:1, :1].expand_as(tile)):
            raise PinError(
                f"contract.backend: 'tile' does not hold here: in {dtype}, K = {depth}, rows of a tile differ; "
                "choose 'native' on both sides"
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the body on one thread: MKL cuts a long K by the number of threads, as seen at K = 2560."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _stock(name: str):
    return torch.library.get_kernel(f"aten::{name}", "CPU")


def _whole(x: Tensor, multiple: int) -> Tensor:
    """Return x [n, K] contiguous and aligned, with rows of zeros up to a multiple of `multiple`."""
    missing = -len(x) % multiple
    if missing:
        return pad(x, (0, 0, 0, missing))
    aligned = x.is_contiguous() and x.data_ptr() % 64 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] @ b [K, N], one tile of the result at a time."""
    rows, columns = _whole(a, ROWS), _whole(b.t(), COLUMNS)
    out = a.new_empty(len(columns) // COLUMNS, len(rows) // ROWS, ROWS, COLUMNS)
    for strip, right in zip(out, columns.split(COLUMNS), strict=True):
        for place, left in zip(strip, rows.split(ROWS), strict=True):
            _stock("mm.out").call_boxed(CPU, left, right.t(), out=place)
    return out.permute(1, 2, 0, 3).reshape(len(rows), len(columns))[: len(a), : b.shape[1]]


TILE = Tile()
register(TILE)

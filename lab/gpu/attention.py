"""Does FlashAttention-3 give a token equal bits in decode from a cache, with its key appended, and in a prefill?"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT, Plan
from lab.gpu.receipt import Result
from true_on_policy.bitwise import first_mismatch
from true_on_policy.contract.cpu import Shapes
from true_on_policy.kernels import flash_attention, gpu, probes
from true_on_policy.kernels.probes import Failure, Packed, compare, drawing, output

# (num_splits, max_seqlen_q). On a contiguous cache FlashAttention-3 drops the causal mask of a lone query (1). In heads
# of 128 it then takes wider tiles of keys than prefill does; with 2 it keeps prefill's tiles.
CAUSAL_TILES = 2
DEMANDED = "one split, causal tiles"
POSITIONS = (0, 1, 63, 64, 128, 256)  # of decoded tokens: one key, less than a tile of 64 or 128, and more
WAYS = {"FA3 chooses the splits": (0, CAUSAL_TILES), DEMANDED: (1, CAUSAL_TILES), "one split, a lone query": (1, 1)}


def attention(plan: Plan, machine: Cuda) -> Iterator[Result]:
    library = flash_attention.library()
    columns = ("call", "heads, groups, width", "sequences x tokens", "values", "different", "first difference")
    rows = {name: tuple(_appended(plan, machine, library, name)) for name in WAYS}
    demanded = rows.pop(DEMANDED)
    title = "FlashAttention-3: appended and decoded, against prefilled"
    yield Result(title, columns, demanded, all(row[4] == 0 for row in demanded))
    yield Result(
        "Findings: appended and decoded by other calls, against prefilled",
        columns,
        tuple(row for found in rows.values() for row in found),
        note=f"Nothing is demanded of them: a contract decodes by {DEMANDED!r}, max_seqlen_q={CAUSAL_TILES}.",
    )
    found = list(mixed_failures(CONTRACT.dtype, gpu.shapes(CONTRACT), machine.device, library))
    yield Result(
        "FlashAttention-3: one that decodes beside one that prefills, in one call",
        ("company", "first difference"),
        tuple((failure.company, str(failure.mismatch)) for failure in found) or (("all equal", ""),),
        note="A finding, no demand: engines that mix the two in one batch are to know.",
    )


@torch.no_grad()
def _appended(plan: Plan, machine: Cuda, library: ModuleType, name: str) -> Iterator[tuple[Any, ...]]:
    count, length = plan.append
    draw = drawing(CONTRACT.dtype, machine.device)
    for heads, groups, width in gpu.shapes(CONTRACT).attention:
        query, key, value = (draw(count, length, each, width) for each in (heads, groups, groups))
        prefilled = prefill(library, query, key, value)
        decoded = torch.cat(list(_decode(library, query, key, value, *WAYS[name])), 1)
        mismatch = first_mismatch(decoded, prefilled)
        yield (
            *(name, f"{heads}, {groups}, {width}", f"{count} x {length}", prefilled.numel()),
            *(mismatch.count if mismatch else 0, str(mismatch or "")),
        )


def prefill(library: ModuleType, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally over B packed sequences of one length: [B, T, H, D] each."""
    count, length = query.shape[:2]
    starts = torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=query.device)
    packed = (x.flatten(0, 1).contiguous() for x in (query, key, value))
    out = library.flash_attn_varlen_func(*packed, starts, starts, length, length, causal=True)
    return output(out).unflatten(0, (count, length))


def _decode(
    library: ModuleType, query: Tensor, key: Tensor, value: Tensor, splits: int, longest: int
) -> Iterator[Tensor]:
    """Decode token after token; each call writes key and value of its token into the cache."""
    keys, values = torch.zeros_like(key), torch.zeros_like(value)
    for t in range(query.shape[1]):
        now = slice(t, t + 1)
        seen = torch.full((len(query),), t, dtype=torch.int32, device=query.device)
        new = {"k": key[:, now], "v": value[:, now], "num_splits": splits}
        yield next_token(library, query[:, now], keys, values, seen, longest, **new)


def next_token(
    library: ModuleType,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    longest: int = CAUSAL_TILES,
    **more: Any,
) -> Tensor:
    """Attend with one token of each of B sequences [B, 1, H, D] over a contiguous cache [B, S, G, D]."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    out = library.flash_attn_with_kvcache(
        *(query[:, 0].contiguous(), keys, values),
        **{"cache_seqlens": seen, "cu_seqlens_q": starts, "max_seqlen_q": longest},
        causal=True,
        **more,
    )
    return output(out)[:, None]


@torch.no_grad()
def decode_failures(
    dtype: str, shapes: Shapes, device: torch.device, library: ModuleType, longest: int
) -> Iterator[Failure]:
    """Compare tokens that read their keys from a contiguous cache with these tokens in a prefill.

    `longest` is the call's max_seqlen_q. With 1, FlashAttention-3 drops the causal mask of the lone query and adds up
    the keys in other tiles than prefill does; with 2 it keeps the causal tiles.
    """
    for heads, groups, width in shapes.attention:
        batch, last = Packed(drawing(dtype, device), heads, groups, width), len(probes.LENGTHS) - 1
        (query, key, value), prefilled = batch.sequences[last], batch.attend(library, [last])[last]
        for t in POSITIONS:
            seen = torch.full((1,), t + 1, dtype=torch.int32, device=device)
            alone = next_token(library, query[None, t, None], key[None], value[None], seen, longest)[0]
            company = f"token {t} decoded and prefilled"
            yield from compare("attention", (heads, groups, width), company, alone, prefilled[t : t + 1])


@torch.no_grad()
def mixed_failures(dtype: str, shapes: Shapes, device: torch.device, library: ModuleType) -> Iterator[Failure]:
    """Compare a mixed (chunked) batch, where one sequence decodes and one prefills, with each sequence alone."""
    for heads, groups, width in shapes.attention:
        batch = Packed(drawing(dtype, device), heads, groups, width)
        one, other = len(probes.LENGTHS) - 1, len(probes.LENGTHS) - 2
        batch.sequences[one][0] = batch.sequences[one][0][-1:]  # who decodes has the query of the last token alone
        mixed = batch.attend(library, [one, other])
        alone = batch.attend(library, [one])[one], batch.attend(library, [other])[other]
        for name, a, b in zip(("decoding", "prefilling"), (mixed[one], mixed[other]), alone, strict=True):
            company = f"a {name} sequence alone and in a mixed batch"
            yield from compare("attention", (heads, groups, width), company, a, b)

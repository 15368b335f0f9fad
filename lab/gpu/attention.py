"""Does FlashAttention-3 give a token equal bits in decode from a cache, with its key appended, and in a prefill?"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lab.gpu.decoding import mixed_failures
from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT, Plan
from lab.gpu.results import Result
from true_on_policy.bitwise import first_mismatch
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels import flash_attention, gpu
from true_on_policy.kernels.gpu_probes import drawing

# (num_splits, max_seqlen_q). On a contiguous cache FlashAttention-3 drops the causal mask of a lone query (1). In heads
# of 128 it then takes wider tiles of keys than prefill does; with 2 it keeps prefill's tiles.
CAUSAL_TILES = 2
DEMANDED = "one split, causal tiles"
WAYS = {"FA3 chooses the splits": (0, CAUSAL_TILES), DEMANDED: (1, CAUSAL_TILES), "one split, a lone query": (1, 1)}


def attention(plan: Plan, machine: Cuda) -> Iterator[Result]:
    library = flash_attention_3()
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


def flash_attention_3() -> ModuleType:
    """Import the FlashAttention-3 that is installed.

    Raises:
        NotSeenError: no FlashAttention-3 is installed.
    """
    name = flash_attention.interface()
    if name is None:
        raise NotSeenError("not seen: no FlashAttention-3 is installed")
    return import_module(name)


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


def output(result: Any) -> Tensor:
    """Pick the output from a result of FlashAttention-3; some builds return the logsumexp beside it."""
    return result[0] if isinstance(result, tuple) else result

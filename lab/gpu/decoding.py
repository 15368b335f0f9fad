"""Probes of FlashAttention-3 beside prefill: tokens that read their keys from a cache, and a batch that mixes both."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from true_on_policy.contract.cpu import Shapes
from true_on_policy.kernels import gpu_probes
from true_on_policy.kernels.gpu_probes import Packed, drawing, output
from true_on_policy.kernels.probes import Failure, compare

POSITIONS = (0, 1, 63, 64, 128, 256)  # of decoded tokens: one key, less than a tile of 64 or 128, and more


@torch.no_grad()
def decode_failures(
    dtype: str, shapes: Shapes, device: torch.device, library: ModuleType, longest: int
) -> Iterator[Failure]:
    """Compare tokens that read their keys from a contiguous cache with these tokens in a prefill.

    `longest` is the call's max_seqlen_q. With 1, FlashAttention-3 drops the causal mask of the lone query and adds up
    the keys in other tiles than prefill does; with 2 it keeps the causal tiles.
    """
    for heads, groups, width in shapes.attention:
        batch, last = Packed(drawing(dtype, device), heads, groups, width), len(gpu_probes.LENGTHS) - 1
        prefilled = batch.attend(library, [last])[last]
        for t in POSITIONS:
            alone = decoded(batch, library, last, t, longest)
            company = f"token {t} decoded and prefilled"
            yield from compare("attention", (heads, groups, width), company, alone, prefilled[t : t + 1])


@torch.no_grad()
def mixed_failures(dtype: str, shapes: Shapes, device: torch.device, library: ModuleType) -> Iterator[Failure]:
    """Compare a mixed (chunked) batch, where one sequence decodes and one prefills, with each sequence alone."""
    for heads, groups, width in shapes.attention:
        batch = Packed(drawing(dtype, device), heads, groups, width)
        one, other = len(gpu_probes.LENGTHS) - 1, len(gpu_probes.LENGTHS) - 2
        mixed = batch.attend(library, [one, other], last=(one,))
        alone = batch.attend(library, [one], last=(one,))[one], batch.attend(library, [other])[other]
        for name, a, b in zip(("decoding", "prefilling"), (mixed[one], mixed[other]), alone, strict=True):
            company = f"a {name} sequence alone and in a mixed batch"
            yield from compare("attention", (heads, groups, width), company, a, b)


def decoded(batch: Packed, library: ModuleType, i: int, t: int, longest: int) -> Tensor:
    """Return the output [1, H, D] of token t, which reads its keys from a cache; `longest` is max_seqlen_q."""
    query, key, value = batch.sequences[i]
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
    return output(out)

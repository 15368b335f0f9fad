"""Core attention of the Megatron trainer: torch's SDPA, which the pinned kernels override, in each layout of a batch.

Packed sequences lie end to end. Under context parallelism a rank holds two chunks of each sequence (zigzag): with R
ranks a sequence is cut into 2R chunks, and rank r holds chunks r and 2R - 1 - r.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def zigzag(length: int, rank: int, ranks: int) -> Int64[Tensor, "S"]:
    """Return the positions that a context-parallel rank holds, in its order; 2 * `ranks` divides `length`."""
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def in_order(parts: Shaped[Tensor, "R L *D"]) -> Shaped[Tensor, "N *D"]:
    """Join the parts that the ranks hold of a sequence, in the order of the sequence."""
    ranks, held = parts.shape[:2]
    places = torch.cat([zigzag(ranks * held, rank, ranks) for rank in range(ranks)]).argsort()
    return parts.flatten(0, 1)[places]


def of_all_ranks(local: Shaped[Tensor, "T *D"], context: Any) -> Shaped[Tensor, "R T *D"]:
    """Gather the tensors of all ranks of a group, rank after rank, with gradient."""
    return local[None] if context.size() == 1 else _Gather.apply(local, context)


class SpecAttention(torch.nn.Module):
    """Causal attention within each sequence of a batch, packed (T tokens of this rank) or padded on the right."""

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, softmax_scale: float | None = None, **unused: Any
    ):
        super().__init__()
        self.scale = softmax_scale
        self.context = pg_collection.cp

    def forward(
        self,
        query: Float[Tensor, "T H D"] | Float[Tensor, "S B H D"],
        key: Float[Tensor, "T G D"] | Float[Tensor, "S B G D"],
        value: Float[Tensor, "T G D"] | Float[Tensor, "S B G D"],
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Float[Tensor, "T H*D"] | Float[Tensor, "S B H*D"]:
        if packed_seq_params is None:
            padded = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
            return self._attend(padded[0], padded[1], padded[2]).permute(2, 0, 1, 3).flatten(2)
        ranks = self.context.size()
        lengths = (packed_seq_params.cu_seqlens_q.diff() // ranks).tolist()
        parts = zip(
            query.split(lengths),
            of_all_ranks(key, self.context).split(lengths, 1),
            of_all_ranks(value, self.context).split(lengths, 1),
            strict=True,
        )
        return torch.cat([self._one_sequence(*part) for part in parts])

    def _one_sequence(
        self, query: Float[Tensor, "L H D"], key: Float[Tensor, "R L G D"], value: Float[Tensor, "R L G D"]
    ) -> Float[Tensor, "L H*D"]:
        """Attend with this rank's queries over the keys of all ranks, in the order of the sequence."""
        keys, values = (in_order(x).transpose(0, 1)[None] for x in (key, value))
        ranks, length = self.context.size(), keys.shape[2]
        seen = None
        if ranks > 1:
            seen = zigzag(length, self.context.rank(), ranks)[:, None] >= torch.arange(length)
        attended = self._attend(query.transpose(0, 1)[None], keys, values, seen)
        return attended[0].transpose(0, 1).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=self.scale, enable_gqa=True
        )


class _Gather(torch.autograd.Function):
    """The gather `[...] -> [ranks, ...]`; the gradient of a rank's part is the sum of all ranks' gradients for it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None

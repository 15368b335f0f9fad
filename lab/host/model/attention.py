"""The trainer's core attention for packed sequences under context parallelism, on any device.

Megatron's local `DotProductAttention` refuses packed sequences and context parallelism, and Transformer Engine's
needs a GPU. `PackedAttention` replaces both through the layer spec. Keys and values are gathered over the context
ranks once, every sequence of the pack becomes a row of one padded batch, and a single masked SDPA serves all rows. The
cost grows with the tokens of the sequences, and not with their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from lab.host.train.batch import Layout
from true_on_policy.trainers.attention import of_all_ranks


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of a pack, which carries our index maps to the attention."""

    layout: Layout | None = None

    @classmethod
    def of(cls, layout: Layout) -> PackedLayout:
        return cls(
            qkv_format="thd",
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_kv=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_kv=layout.max_seqlen,
            layout=layout,
        )


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a `thd` pack. Takes and returns this rank's slots."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **unused: Any):
        super().__init__()
        self.context_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,  # [S, heads, dim]
        key: Tensor,  # [S, groups, dim]
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedLayout,
        **unused: Any,
    ) -> Tensor:
        layout = packed_seq_params.layout
        assert layout is not None
        key_value = of_all_ranks(torch.stack([key, value], dim=1), self.context_group).flatten(0, 1)
        shared = query.shape[1] // key.shape[1]
        keys, values = key_value[layout.key_slots].repeat_interleave(shared, dim=3).permute(2, 0, 3, 1, 4)
        queries = query[layout.query_slots].transpose(1, 2)
        context = F.scaled_dot_product_attention(queries, keys, values, layout.causal, scale=self.scale)
        return context[layout.sequence, :, layout.offset].flatten(1)

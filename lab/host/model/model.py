"""The trainer's policy: Megatron-core's `GPTModel`, Qwen3-, Llama- or Qwen3-MoE-shaped, on CPU.

Megatron is changed in two places alone: :func:`cpu_shims`, and with `--true-on-policy` how a layer of
experts chooses and adds. Weights enter and leave whole, under the names of a Hugging Face checkpoint,
whatever the tensor-parallel size: engine, checkpoint and another layout of ranks all read the same
dictionary.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.train.batch import Layout
from lab.host.train.parallel import GroupInfo, ParallelState
from true_on_policy.trainers import experts
from true_on_policy.trainers.attention import of_all_ranks
from true_on_policy.trainers.megatron import DECODER, Shard

INIT_STD = 0.02


def cpu_shims() -> None:
    """Let Megatron's RoPE run on CPU: on first use it moves a table to `torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]


def build_model(config: ModelConfig, state: ParallelState, args: Namespace) -> GPTModel:
    """An uninitialised `GPTModel` of this rank; its weights come through :class:`Naming`."""
    cpu_shims()
    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.experts or None, moe_grouped_gemm=False, qk_layernorm=config.qk_norm, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    if config.experts and args.true_on_policy:
        spec.submodules.mlp = experts.in_order(spec.submodules.mlp, divided=True)
    return GPTModel(
        config=_transformer_config(config, state, args),
        transformer_layer_spec=spec,
        vocab_size=config.vocab,
        max_sequence_length=1 << 20,  # RoPE needs no table; Megatron only stores the number
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def _transformer_config(config: ModelConfig, state: ParallelState, args: Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn,
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        tensor_model_parallel_size=state.tp.size,
        context_parallel_size=state.cp.size,
        calculate_per_token_loss=args.calculate_per_token_loss,
        **DECODER,
        **(_experts(config, args) if config.experts else {}),
    )


def _experts(config: ModelConfig, args: Namespace) -> dict[str, Any]:
    return {
        "num_moe_experts": config.experts,
        "moe_router_topk": config.top_k,
        "moe_ffn_hidden_size": config.ffn,
        "moe_router_pre_softmax": args.true_on_policy,  # scores of all experts, which the agreed order divides
        "moe_enable_routing_replay": args.use_rollout_routing_replay,
        **experts.RUNS_HERE,
    }


def packed_logits(model: torch.nn.Module, layout: Layout, loss_mask: Tensor | None = None) -> Tensor:
    """`[1, S, V / tp]`: this rank's slots and its part of the vocabulary, with gradient.

    Args:
        loss_mask: `[R]`, which of the scored tokens the loss reads. The model ignores it; a watch over the
            routers reads it from the call, as in the hosts. None where nothing shall watch.
    """
    at_slots = None
    if loss_mask is not None:
        at_slots = torch.zeros(1, len(layout.tokens)).index_fill(1, layout.scored[loss_mask > 0], 1)
    return model(
        input_ids=layout.tokens[None],
        position_ids=layout.positions[None],
        attention_mask=None,
        packed_seq_params=PackedLayout.of(layout),
        loss_mask=at_slots,
    )


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Fresh weights by Hugging Face name: norms 1, the rest normal, scaled by depth where they enter the residual."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.layers) ** -0.5

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return torch.randn(shape, generator=generator) * INIT_STD * (depth if residual else 1.0)

    return {name: draw(name, shape) for name, shape in config.shapes().items()}


WHOLE = ("layernorm.weight", "router.weight")
"""How the names end of Megatron's parameters that every tensor-parallel rank holds whole."""


@dataclass(frozen=True)
class Naming:
    """Translate weights, gradients and optimizer moments to Hugging Face names and back.

    parameters: Megatron's names of the parameters of the model.
    """

    config: ModelConfig
    tp: GroupInfo
    parameters: tuple[str, ...]

    @cached_property
    def _places(self) -> list[dict[str, Tensor]]:
        """Where each number of each rank's parameters stands among all numbers of a checkpoint."""
        shapes = self.config.shapes()
        sizes = [math.prod(shape) for shape in shapes.values()]
        numbered = torch.arange(sum(sizes), dtype=torch.float64).split(sizes)  # as weights, which a shard cuts
        whole = {name: one.view(shape) for (name, shape), one in zip(shapes.items(), numbered, strict=True)}
        held = (self._held_by(rank, whole) for rank in range(self.tp.size))
        return [{name: places.long() for name, places in one.items()} for one in held]

    def _held_by(self, rank: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shard = Shard(rank, self.tp.size, self.config.kv_heads)
        return {name: shard.parameter(name, whole) for name in self.parameters}

    def sharded(self, parameter: str) -> bool:
        """Whether the tensor-parallel ranks hold different parts of a Megatron parameter."""
        return not parameter.endswith(WHOLE)

    def to_hf(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in the order of a checkpoint, copied. Collective over the tensor-parallel ranks."""
        shapes = self.config.shapes()
        sizes = [math.prod(shape) for shape in shapes.values()]
        numbers = torch.empty(sum(sizes))
        for name in self.parameters:
            parts = of_all_ranks(local[name], self.tp.group) if self.sharded(name) else [local[name]]
            for places, part in zip(self._places, parts, strict=False):
                numbers[places[name]] = part
        parts = zip(shapes.items(), numbers.split(sizes), strict=True)
        return {name: part.view(shape).clone() for (name, shape), part in parts}

    def to_megatron(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards of this rank by Megatron's parameter name."""
        return self._held_by(self.tp.rank, weights)


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
    """Causal attention within each sequence of a `thd` pack. Takes and returns this rank's slots.

    Megatron's local attention refuses packed sequences and context parallelism, and Transformer Engine's needs a GPU.
    Here keys and values are gathered over the context ranks once. Every sequence of the pack becomes a row of one
    padded batch, and a single masked SDPA serves all rows. The cost grows with the tokens of the sequences, and not
    with their number.
    """

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

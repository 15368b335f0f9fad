"""The trainer's policy: Megatron-core's `GPTModel`, Qwen3-, Llama- or Qwen3-MoE-shaped, on CPU.

Megatron is changed in two places alone: :func:`cpu_shims`, and with `--true-on-policy` how a layer of
experts chooses and adds. Weights enter and leave whole, under the names of a Hugging Face checkpoint,
whatever the tensor-parallel size: engine, checkpoint and another layout of ranks all read the same
dictionary.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lab.host.model.attention import PackedAttention, PackedLayout
from lab.host.model.decoder import ModelConfig
from lab.host.train.batch import Layout
from lab.host.train.parallel import GroupInfo, ParallelState
from true_on_policy.trainers import experts
from true_on_policy.trainers.megatron import DECODER

INIT_STD = 0.02


def cpu_shims() -> None:
    """Let Megatron's RoPE run on CPU: on first use it moves a table to `torch.cuda.current_device()`.

    The environment variable only silences Megatron's advice for GPUs.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


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
        vocab_size=config.vocab_size,
        max_sequence_length=1 << 20,  # RoPE needs no table; Megatron only stores the number
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def _transformer_config(config: ModelConfig, state: ParallelState, args: Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_size,
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
        "moe_ffn_hidden_size": config.ffn_size,
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
    depth = (2 * config.num_layers) ** -0.5

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return torch.randn(shape, generator=generator) * INIT_STD * (depth if residual else 1.0)

    return {name: draw(name, shape) for name, shape in config.shapes().items()}


@dataclass(frozen=True)
class Shards:
    """How one Megatron parameter is made of Hugging Face weights on one tensor-parallel rank.

    `cut` names the dimension along which the ranks divide the weights. Several weights share one parameter
    in `groups` interleaved blocks: q, k and v in a block for each query group of the rank; gate and up in
    one block.
    """

    names: tuple[str, ...]
    cut: Literal["whole", "rows", "columns"] = "rows"
    groups: int = 1

    def local(self, weights: Mapping[str, Tensor], tp: GroupInfo) -> Tensor:
        """Cut this rank's parameter from whole Hugging Face weights."""
        if self.cut == "whole":
            return weights[self.names[0]]
        dim = 0 if self.cut == "rows" else 1
        parts = [weights[name].chunk(tp.size, dim)[tp.rank] for name in self.names]
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], 1).flatten(0, 1)

    def full(self, local: Tensor, shapes: Mapping[str, tuple[int, ...]], tp: GroupInfo) -> dict[str, Tensor]:
        """The inverse of :meth:`local`: whole weights, gathered over the tensor-parallel ranks."""
        if self.cut == "whole":
            return {self.names[0]: local.clone()}
        dim = 0 if self.cut == "rows" else 1
        share = tp.size if self.cut == "rows" else 1
        rows = [shapes[name][0] // share // self.groups for name in self.names]
        parts = local.unflatten(0, (self.groups, -1)).split(rows, 1)
        return {name: _gather(part.flatten(0, 1), dim, tp) for name, part in zip(self.names, parts, strict=True)}


def _gather(local: Tensor, dim: int, group: GroupInfo) -> Tensor:
    if group.size == 1:
        return local.clone()
    parts = [torch.empty_like(local) for _ in range(group.size)]
    dist.all_gather(parts, local.contiguous(), group=group.group)
    return torch.cat(parts, dim)


def shards(config: ModelConfig, tensor_parallel: int) -> dict[str, Shards]:
    """Megatron's parameter names, each with its :class:`Shards`."""
    table = {
        "embedding.word_embeddings.weight": Shards(("model.embed_tokens.weight",)),
        "decoder.final_layernorm.weight": Shards(("model.norm.weight",), "whole"),
        "output_layer.weight": Shards(("lm_head.weight",)),
    }
    for index in range(config.num_layers):
        table |= _layer_shards(index, config.num_kv_heads // tensor_parallel, config.experts)
    held = config.shapes()
    return {name: shard for name, shard in table.items() if all(one in held for one in shard.names)}


def _layer_shards(index: int, groups: int, experts: int) -> dict[str, Shards]:
    def of(*names: str) -> tuple[str, ...]:
        return tuple(f"model.layers.{index}.{name}.weight" for name in names)

    layer = {
        "input_layernorm": Shards(of("input_layernorm"), "whole"),
        "self_attention.linear_qkv": Shards(
            of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), groups=groups
        ),
        "self_attention.q_layernorm": Shards(of("self_attn.q_norm"), "whole"),
        "self_attention.k_layernorm": Shards(of("self_attn.k_norm"), "whole"),
        "self_attention.linear_proj": Shards(of("self_attn.o_proj"), "columns"),
        "pre_mlp_layernorm": Shards(of("post_attention_layernorm"), "whole"),
        "mlp.linear_fc1": Shards(of("mlp.gate_proj", "mlp.up_proj")),
        "mlp.linear_fc2": Shards(of("mlp.down_proj"), "columns"),
        "mlp.router": Shards(of("mlp.gate"), "whole"),
    }
    for number in range(experts):
        theirs, hf = f"mlp.experts.local_experts.{number}", f"mlp.experts.{number}"
        layer[f"{theirs}.linear_fc1"] = Shards(of(f"{hf}.gate_proj", f"{hf}.up_proj"))
        layer[f"{theirs}.linear_fc2"] = Shards(of(f"{hf}.down_proj"), "columns")
    return {f"decoder.layers.{index}.{name}.weight": value for name, value in layer.items()}


@dataclass(frozen=True)
class Naming:
    """Translate weights, gradients and optimizer moments to Hugging Face names and back."""

    config: ModelConfig
    tp: GroupInfo

    @cached_property
    def _shards(self) -> dict[str, Shards]:
        return shards(self.config, self.tp.size)

    def sharded(self, parameter: str) -> bool:
        """Whether the tensor-parallel ranks hold different parts of a Megatron parameter."""
        return self._shards[parameter].cut != "whole"

    def to_hf(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in the order of a checkpoint, copied. Collective over the tensor-parallel ranks."""
        shapes = self.config.shapes()
        whole = {
            name: tensor
            for parameter, piece in self._shards.items()
            for name, tensor in piece.full(local[parameter], shapes, self.tp).items()
        }
        return {name: whole[name] for name in shapes}

    def to_megatron(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards of this rank by Megatron's parameter name."""
        return {parameter: piece.local(weights, self.tp) for parameter, piece in self._shards.items()}

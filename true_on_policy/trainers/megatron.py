"""Megatron-core's own GPTModel on CPU, its sequences packed, with the weights of a Hugging Face checkpoint.

Its linear layers, RoPE, packing and block are Megatron's; norm, residual and core attention enter through its spec.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from true_on_policy.contract import DTYPES
from true_on_policy.engines.protocol import Sample
from true_on_policy.models import read_config, read_weights
from true_on_policy.norm_order import NormOrder, add_residual, rms_norm
from true_on_policy.trainers.attention import SpecAttention, in_order, of_all_ranks, zigzag
from true_on_policy.trainers.protocol import sampled_log_probs

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # silences Megatron's advice for GPUs


class Megatron:
    """GPTModel in evaluation mode, on one rank unless Megatron's groups exist already.

    Without an `order` its norms and residuals are Megatron's own.
    """

    name = "megatron"

    def __init__(self, checkpoint: Path, dtype: str, order: NormOrder | None = None):
        _one_rank()
        config: Any = read_config(checkpoint)  # its fields are optional to a type checker
        self._groups = config.num_key_value_heads
        self.model = _build(config, DTYPES[dtype], order).to(DTYPES[dtype]).eval()
        self.load(checkpoint)

    def load(self, checkpoint: Path) -> None:
        weights = read_weights(checkpoint)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(_parameter(name, weights, self._groups))

    @torch.no_grad()
    def log_probs(self, batch: Sequence[Sample], temperatures: Sequence[float]) -> list[Float32[Tensor, "_"]]:
        parts = self.logits([sample.sequence for sample in batch])
        return [
            sampled_log_probs(logits, sample, temperature)
            for logits, sample, temperature in zip(parts, batch, temperatures, strict=True)
        ]

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ V"]]:
        """The logits of each sequence, whole on every context rank, from one pass over all of them packed."""
        context: Any = mpu.get_context_parallel_group()
        ranks, lengths = context.size(), [len(sequence) for sequence in sequences]
        multiple = 2 * ranks if ranks > 1 else 1
        padded = [-(-length // multiple) * multiple for length in lengths]
        held = [zigzag(length, context.rank(), ranks) for length in padded]
        tokens = [_padded(sequence, length) for sequence, length in zip(sequences, padded, strict=True)]
        with _rope_on_cpu():
            logits = self.model(
                input_ids=torch.cat([row[slots] for row, slots in zip(tokens, held, strict=True)])[None],
                position_ids=torch.cat(held)[None],
                attention_mask=None,
                packed_seq_params=_packed(padded),
            )
        parts = of_all_ranks(logits[0], context).split([len(slots) for slots in held], 1)
        return [in_order(part)[:length] for part, length in zip(parts, lengths, strict=True)]

    def padded_logits(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ V"]]:
        """The same from one batch padded on the right."""
        longest = max(map(len, sequences))
        tokens = torch.stack([_padded(sequence, longest) for sequence in sequences])
        positions = torch.arange(longest).expand_as(tokens)
        with _rope_on_cpu():
            logits = self.model(input_ids=tokens, position_ids=positions, attention_mask=None)
        return [rows[: len(sequence)] for rows, sequence in zip(logits, sequences, strict=True)]


def _padded(sequence: Sequence[int], length: int) -> Int64[Tensor, "L"]:
    return torch.tensor([*sequence, *[0] * (length - len(sequence))])


class SpecNorm(torch.nn.Module):
    """RMSNorm in the agreed order of rounding."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, order: NormOrder):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.order = order

    def forward(self, stream: Tensor) -> Tensor:
        return rms_norm(stream, self.weight, self.eps, self.order)


def _residual(order: NormOrder) -> Callable:
    """What Megatron calls bias-dropout-add, without bias and dropout, which Qwen3 has not."""

    def build(training: bool, fused: bool) -> Callable:
        def add(branch_and_bias: tuple[Tensor, None], stream: Tensor, dropout: float) -> Tensor:
            branch, bias = branch_and_bias
            assert bias is None and not dropout
            return add_residual(branch, stream, order)

        return add

    return build


def _build(config: Any, dtype: torch.dtype, order: NormOrder | None) -> GPTModel:
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SpecAttention
    block: Any = layer
    if order is not None:
        norm = ModuleSpec(SpecNorm, params={"order": order})
        attention.q_layernorm = attention.k_layernorm = norm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = _residual(order)
        block = TransformerBlockSubmodules([layer] * config.num_hidden_layers, norm)
    return GPTModel(
        config=_transformer_config(config, dtype),
        transformer_layer_spec=block,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )


def _transformer_config(config: Any, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=mpu.get_context_parallel_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],  # its default only warns
    )


def _packed(lengths: Sequence[int]) -> PackedSeqParams:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def _rope_on_cpu() -> AbstractContextManager:
    """Megatron's RoPE moves its table to `torch.cuda.current_device()` at each use; on this machine there is none."""
    return patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _one_rank() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel()


# Megatron's names within a layer, each with the Hugging Face weights that make it.
LAYER = {
    "input_layernorm": ("input_layernorm",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
ENDS = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


def _parameter(name: str, weights: Mapping[str, Tensor], groups: int) -> Tensor:
    """A parameter of Megatron's, by its name, made of Hugging Face weights."""
    module = name.removesuffix(".weight")
    if module in ENDS:
        return weights[f"{ENDS[module]}.weight"]
    _, _, index, part = module.split(".", 3)
    sources = [weights[f"model.layers.{index}.{source}.weight"] for source in LAYER[part]]
    if part != "self_attention.linear_qkv":
        return torch.cat(sources)
    # A query group's rows of q, then of k, then of v.
    return torch.cat([source.unflatten(0, (groups, -1)) for source in sources], 1).flatten(0, 1)

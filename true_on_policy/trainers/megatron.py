"""Megatron-core's own GPTModel on CPU as a trainer: packed sequences, and the weights of a Hugging Face checkpoint.

Linear layers, RoPE, packing and block are Megatron's. Norm, residual and core attention are ours and enter through the
model's spec; on a tree, so do the sums of row-parallel layers, and in a mixture of experts so do routing and combining.

A Hugging Face checkpoint is cut into the parameters that a tensor-parallel rank holds; `megatron.yaml` has their names.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from jaxtyping import Float
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from true_on_policy.contract import rounding
from true_on_policy.contract.cpu import DTYPES
from true_on_policy.contract.families import Experts, Family
from true_on_policy.contract.rounding import add_residual, rms_norm
from true_on_policy.contract.specs import NormOrder
from true_on_policy.errors import ModelError
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.models.tiny import family_of, read_config, read_weights
from true_on_policy.trainers import experts
from true_on_policy.trainers.attention import SpecAttention, in_order, of_all_ranks, zigzag
from true_on_policy.trainers.protocol import InProcess

NAMES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DECODER: dict[str, Any] = {**NAMES["decoder"], "activation_func": F.silu}  # arguments of a TransformerConfig
# Megatron's gate of a shared expert is no module, so its parameter is renamed as if it were a module's.
SHARED_GATE = ("shared_experts.gate_weight", "shared_experts.gate.weight")

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # silences Megatron's advice for GPUs


class Megatron(InProcess):
    """GPTModel in evaluation mode, on one rank unless Megatron's groups exist already.

    Without an `order`, norms and residuals are Megatron's own; without a `tree`, row-parallel layers are. Every
    tensor-parallel rank computes all log-probs from gathered logits. On a tree, the bits of log-probs do not depend on
    the number of ranks. The bits of gradients do: the input gradient of a column-parallel layer adds one
    partial sum a rank.
    """

    name = "megatron"

    def __init__(self, checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None):
        one_rank()
        config: Any = read_config(checkpoint)  # to a type checker, the config's fields are optional
        rank, ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self._shard = Shard(rank, ranks, config.num_key_value_heads, family_of(config).decoder)
        self._vocabulary, self._ordered = config.vocab_size, order is not None
        self.model = _build(config, DTYPES[dtype], order, tree).to(DTYPES[dtype]).eval()
        self.load(checkpoint)

    def load(self, checkpoint: Path) -> None:
        weights = read_weights(checkpoint)
        try:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(self._shard.parameter(name, weights))
        except KeyError as lacking:
            raise ModelError(f"{checkpoint}: holds no {lacking.args[0]}") from None

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ V"]]:
        """Compute the logits of each sequence in one packed pass; every context rank gets all logits."""
        context: Any = mpu.get_context_parallel_group()
        ranks, lengths = context.size(), [len(sequence) for sequence in sequences]
        multiple = 2 * ranks if ranks > 1 else 1
        padded = [-(-length // multiple) * multiple for length in lengths]
        held = [zigzag(length, context.rank(), ranks) for length in padded]
        rows = zip(map(torch.tensor, sequences), padded, strict=True)
        tokens = [F.pad(row, (0, length - len(row))) for row, length in rows]
        logits = self._forward(
            input_ids=torch.cat([row[slots] for row, slots in zip(tokens, held, strict=True)])[None],
            position_ids=torch.cat(held)[None],
            packed_seq_params=_packed(padded),
        )
        parts = of_all_ranks(logits[0], context).split([len(slots) for slots in held], 1)
        return [in_order(part)[:length] for part, length in zip(parts, lengths, strict=True)]

    def _forward(self, **inputs: Any) -> Float[Tensor, "B T V"]:
        """Compute the logits of the whole vocabulary, on every tensor-parallel rank."""
        # Miles's fork of Megatron-core rotates bf16 in float32.
        agreed = patch.object(rope_utils, rounding.ROPE_NAME, rounding.rotated)
        with _rope_on_cpu(), agreed if self._ordered else nullcontext():
            return self.model(attention_mask=None, **inputs)[..., : self._vocabulary]


class SpecNorm(torch.nn.Module):
    """RMSNorm in the agreed order of rounding."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, order: NormOrder):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.order = order

    def forward(self, stream: Tensor) -> Tensor:
        return rms_norm(stream, self.weight, self.eps, self.order)


class SpecColumnParallel(ColumnParallelLinear):
    """Megatron's column-parallel layer with its bias added before the product is rounded, as engines add it."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, bias: Tensor, **options: Any) -> Tensor:
        if options["allreduce_dgrad"]:  # Megatron's own product adds up the input's gradient over the ranks
            input = copy_to_tensor_model_parallel_region(input, self.tp_group)
        return F.linear(input, weight, bias)


class SpecRowParallel(RowParallelLinear):
    """Megatron's row-parallel layer with a sum over K that is a tree, which the ranks share."""

    def __init__(self, *sizes: int, tree: Tree, **options: Any):
        super().__init__(*sizes, **options)
        assert self.input_is_parallel and self.bias is None and not self.sequence_parallel
        self.tree = tree

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return self.tree.product(input_, self.weight, self.tp_group), None


def residual_add(order: NormOrder) -> Callable:
    """Build what Megatron calls bias-dropout-add, without bias and dropout, which the proven families lack."""

    def build(training: bool, fused: bool) -> Callable:
        def add(branch_and_bias: tuple[Tensor, None], stream: Tensor, dropout: float) -> Tensor:
            branch, bias = branch_and_bias
            assert bias is None and not dropout
            return add_residual(branch, stream, order)

        return add

    return build


def _build(config: Any, dtype: torch.dtype, order: NormOrder | None, tree: Tree | None) -> GPTModel:
    family = family_of(config)
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_experts if family.experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=family.qk_norm,
        normalization="RMSNorm",
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SpecAttention
    if tree is not None:
        row_parallel = ModuleSpec(SpecRowParallel, params={"tree": tree})
        attention.linear_proj = layer.submodules.mlp.submodules.linear_fc2 = row_parallel
    block: Any = layer
    if order is not None:
        norm = ModuleSpec(SpecNorm, params={"order": order})
        if family.qkv_bias:
            attention.linear_qkv = SpecColumnParallel
        if family.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if family.experts:
            layer.submodules.mlp = experts.in_order(layer.submodules.mlp, family.experts.divided)
        layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add(order)
        block = TransformerBlockSubmodules([layer] * config.num_hidden_layers, norm)
    return GPTModel(
        config=_transformer_config(config, family, dtype, order is not None),
        transformer_layer_spec=block,
        vocab_size=padded_rows(config.vocab_size, mpu.get_tensor_model_parallel_world_size()),
        parallel_output=False,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )


def _transformer_config(config: Any, family: Family, dtype: torch.dtype, ordered: bool) -> TransformerConfig:
    return TransformerConfig(
        **_named("config", config),
        qk_layernorm=family.qk_norm,
        add_qkv_bias=family.qkv_bias,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        context_parallel_size=mpu.get_context_parallel_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **DECODER,
        **(_experts(config, family.experts, ordered) if family.experts else {}),
    )


def _named(part: str, config: Any) -> dict[str, Any]:
    """Return the fields of a TransformerConfig that a Hugging Face config gives."""
    return {ours: getattr(config, theirs) for ours, theirs in NAMES[part].items()}


def _experts(config: Any, how: Experts, ordered: bool) -> dict[str, Any]:
    fields = _named("experts", config) | {"moe_router_pre_softmax": ordered or not how.divided}
    if how.shared:
        width = config.shared_expert_intermediate_size
        fields |= {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}
    return fields | experts.RUNS_HERE


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
    """Keep RoPE on the CPU: Megatron moves its table to `torch.cuda.current_device()` at each use."""
    return patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))


def one_rank() -> None:
    """Make Megatron's groups of one rank, unless this process has groups already."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel()


@dataclass(frozen=True)
class Shard:
    """A shard is one rank's part of a model.

    rank, ranks: the place of the rank among all ranks, which share out each weight of two dimensions.
    groups: the number of key-value heads in the whole model.
    decoder: the prefix of the decoder's weights in Hugging Face's names.
    """

    rank: int
    ranks: int
    groups: int
    decoder: str = "model"

    def parameter(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Build a parameter, given by Megatron's name, from weights by Hugging Face's names."""
        module, _, kind = name.replace(*SHARED_GATE).rpartition(".")  # weight or bias
        if module in NAMES["ends"]:
            held, source = NAMES["ends"][module]
            return HELD[held]([weights[f"{source.replace('*', self.decoder)}.{kind}"]], self)
        _, _, index, part = module.split(".", 3)
        expert = re.search(r"local_experts\.(\d+)", part)
        part = part if expert is None else part.replace(expert[0], "local_experts.*")
        held, *sources = NAMES["layer"][part]
        number = expert[1] if expert else ""
        named = [f"{self.decoder}.layers.{index}.{source.replace('*', number)}.{kind}" for source in sources]
        return HELD[held]([weights[name] for name in named], self)

    def rows(self, weight: Float[Tensor, "N *K"]) -> Float[Tensor, "_ *K"]:
        """Return this rank's share of a weight or a bias, cut along the first dimension."""
        return weight.chunk(self.ranks)[self.rank]


Held = Callable[[Sequence[Tensor], Shard], Tensor]


def padded_rows(vocabulary: int, ranks: int) -> int:
    """Round the rows of an embedding up to a number that the ranks can share."""
    return -(-vocabulary // ranks) * ranks


def _rows_padded(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    """Take a rank's rows of an embedding, padded after the vocabulary; the trainer drops the added logits."""
    [weight] = sources
    missing = padded_rows(len(weight), shard.ranks) - len(weight)
    return shard.rows(F.pad(weight, (0, 0, 0, missing)))


def _rows_by_group(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    """Take a rank's rows of a fused projection, which holds for each query group the rows of q, of k and of v."""
    groups = [source.unflatten(0, (shard.groups, -1)) for source in sources]
    return shard.rows(torch.cat(groups, 1).flatten(0, 1))


HELD: dict[str, Held] = {
    "whole": lambda sources, shard: sources[0],
    "rows padded": _rows_padded,
    "rows by group": _rows_by_group,
    "rows of each": lambda sources, shard: torch.cat([shard.rows(source) for source in sources]),  # gate, then up
    "columns": lambda sources, shard: sources[0].chunk(shard.ranks, 1)[shard.rank],
}

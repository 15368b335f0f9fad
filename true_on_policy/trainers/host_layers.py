"""Layers of a decoder for `--spec` of Miles and slime on a CPU, under Transformer Engine's names of parameters.

    --spec true_on_policy.trainers.host_layers layers

Stock layers may have a mixture of experts in place of their MLP.

The hosts' converters want Transformer Engine's names, where a norm is a part of the linear layer that follows it.
Megatron's local attention takes no packed sequences, and `SpecAttention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from true_on_policy.contract.norm_order import agreed_order, rms_norm
from true_on_policy.contract.stated import stated_contract
from true_on_policy.errors import ContractError
from true_on_policy.kernels.pin import active_backend
from true_on_policy.kernels.row_parallel import agreed_tree
from true_on_policy.trainers.attention import SpecAttention
from true_on_policy.trainers.megatron import SpecRowParallel, residual_add

Normalize = Callable[[Tensor, Tensor, float], Tensor]  # (stream, weight, eps)


def layers(args: Any, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Build the layers of the contract that the environment states: its order of rounding and its row sums.

    Raises:
        ContractError: the trainer's kernels are not pinned.
    """
    if active_backend() is None:
        raise ContractError(
            "--spec true_on_policy.trainers.host_layers layers: nothing is pinned here; set "
            "--custom-megatron-init-path true_on_policy.hosts.miles_init"
        )
    contract = stated_contract()
    order, tree = agreed_order(contract, "sglang", "megatron"), agreed_tree(contract)
    assert not args.num_experts, "the contract has no experts under a host"
    layer: Any = fused_layer(config, partial(rms_norm, order=order))
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add(order)
    if tree is not None:
        row_parallel = ModuleSpec(SpecRowParallel, params={"tree": tree})
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        attention.submodules.linear_proj = mlp.submodules.linear_fc2 = row_parallel
    return block(config, layer, partial(rms_norm, order=order))


def stock_layers(args: Any, config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Build layers that hold no contract: torch's own RMSNorm and Megatron's own residual and row sums."""
    build = mixture_layer if args.num_experts else fused_layer
    return block(config, build(config, _torch_norm), _torch_norm)


def _torch_norm(stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(stream, weight.shape, weight, eps)


def fused_layer(config: Any, normalize: Normalize) -> ModuleSpec:
    """Build the spec of one layer, in which each norm is a part of the linear layer that follows it."""
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    _fuse_attention(layer, config, normalize)
    layer.submodules.mlp.submodules.linear_fc1 = ModuleSpec(NormedLinear, params={"normalize": normalize})
    layer.submodules.pre_mlp_layernorm = IdentityOp
    return layer


def mixture_layer(config: Any, normalize: Normalize) -> ModuleSpec:
    """Build the spec of one layer with Megatron's own router and dispatcher, and experts that need no GPU."""
    from true_on_policy.trainers.host_experts import SequentialExperts

    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    _fuse_attention(layer, config, normalize)
    layer.submodules.mlp.submodules.experts = ModuleSpec(SequentialExperts)
    layer.submodules.pre_mlp_layernorm = _norm(normalize)
    return layer


def _fuse_attention(layer: Any, config: Any, normalize: Normalize) -> None:
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SpecAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _norm(normalize)
    attention.linear_qkv = ModuleSpec(NormedLinear, params={"normalize": normalize})
    layer.submodules.input_layernorm = IdentityOp


def block(config: Any, layer: ModuleSpec, normalize: Normalize) -> TransformerBlockSubmodules:
    """Build the spec of all layers on this rank, which holds the whole pipeline."""
    assert config.pipeline_model_parallel_size == 1, "one stage"
    return TransformerBlockSubmodules([layer] * config.num_layers, cast(Any, _norm(normalize)))


def _norm(normalize: Normalize) -> ModuleSpec:
    return ModuleSpec(Norm, params={"normalize": normalize})


class Norm(torch.nn.Module):
    """RMSNorm whose weight is marked where tensor-parallel ranks share the sequence."""

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-6, *, normalize: Normalize, **unused: Any
    ):
        super().__init__()
        self.weight = _norm_weight(config, hidden_size)
        self.eps, self.normalize = eps, normalize

    def forward(self, stream: Tensor) -> Tensor:
        return self.normalize(stream, self.weight, self.eps)


class NormedLinear(ColumnParallelLinear):
    """RMSNorm and Megatron's column-parallel layer in one, with Transformer Engine's name of the weight."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, normalize: Normalize, **options: Any
    ):
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.normalize = normalize

    def forward(self, stream: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = self.normalize(stream, self.layer_norm_weight, cast(Any, self.config).layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


def _norm_weight(config: Any, width: int) -> torch.nn.Parameter:
    weight: Any = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel
    return weight

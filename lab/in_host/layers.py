"""Layers of a decoder for `--spec` of Miles and slime on a CPU, under Transformer Engine's names of parameters.

    --spec lab.in_host.layers layers

Stock layers may have a mixture of experts in place of their MLP: Megatron's own experts with Transformer Engine's
names need Transformer Engine, so these are computed one by one.

The hosts' converters want Transformer Engine's names, where a norm is a part of the linear layer that follows it.
Megatron's local attention takes no packed sequences, and `SpecAttention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from true_on_policy.contract.rounding import agreed_order, rms_norm
from true_on_policy.engines.handover import stated_contract
from true_on_policy.errors import ContractError
from true_on_policy.kernels.pin import active_backend
from true_on_policy.kernels.row_parallel import agreed_tree
from true_on_policy.trainers import experts as _names_that_megatron_lacks_here  # noqa: F401
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
            "--spec lab.in_host.layers layers: nothing is pinned here; set "
            "--custom-megatron-init-path lab.in_host.cpu_trainer.miles_init"
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

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, *, normalize: Normalize, **unused: Any):
        super().__init__()
        self.weight = _norm_weight(config, hidden_size)
        self.eps, self.normalize = eps, normalize

    def forward(self, stream: Tensor) -> Tensor:
        return self.normalize(stream, self.weight, self.eps)


class NormedLinear(ColumnParallelLinear):
    """RMSNorm and Megatron's column-parallel layer in one, with Transformer Engine's name of the weight."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, normalize: Normalize, **options: Any):
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


class ExpertWeights(torch.nn.Module):
    """The weights of one linear layer of all experts: `weight0`, `weight1` and so on."""

    def __init__(self, config: Any, experts: int, outputs: int, inputs: int, initialize: Callable[[Tensor], Any]):
        super().__init__()
        for number in range(experts):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            initialize(weight.data)
            self.register_parameter(f"weight{number}", weight)

    def __iter__(self):
        return iter(self.parameters())


class SequentialExperts(MegatronModule):
    """The gated experts of a mixture on one rank, which Megatron's dispatcher feeds with tokens sorted by expert."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None):
        super().__init__(config=config)
        assert config.expert_model_parallel_size == config.tensor_model_parallel_size == 1, "experts on one rank"
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        first, second = config.init_method, config.output_layer_init_method
        self.linear_fc1 = ExpertWeights(config, num_local_experts, 2 * width, hidden, first)
        self.linear_fc2 = ExpertWeights(config, num_local_experts, hidden, width, second)

    def forward(
        self, tokens: Float[Tensor, "N H"], tokens_per_expert: Int64[Tensor, " E"], probs: Float[Tensor, " N"]
    ) -> tuple[Float[Tensor, "N H"], None]:
        """Compute each expert's weighted output; an expert without a token has gradients of zero."""
        counts = tokens_per_expert.tolist()
        pieces = zip(tokens.split(counts), probs.split(counts), self.linear_fc1, self.linear_fc2, strict=True)
        return torch.cat([_expert(*piece) for piece in pieces]), None


def _expert(tokens: Tensor, probs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, up = F.linear(tokens, first).chunk(2, dim=-1)
    weighted = (F.silu(gate) * up * probs.unsqueeze(-1)).to(tokens.dtype)  # Megatron weights before the second layer
    return F.linear(weighted, second)

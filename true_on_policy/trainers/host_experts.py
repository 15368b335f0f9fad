"""Experts computed one by one, for Miles and slime on a CPU, with Transformer Engine's names of weights.

The hosts' converters want a weight for each expert in one layer, as `linear_fc1.weight0`. Megatron's experts
with these names need Transformer Engine, and Megatron's experts that do without have other names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from true_on_policy.trainers import experts as _names_that_megatron_lacks_here  # noqa: F401


class ExpertWeights(torch.nn.Module):
    """The weights of one linear layer of all experts: `weight0`, `weight1` and so on."""

    def __init__(
        self, config: Any, experts: int, outputs: int, inputs: int, initialize: Callable[[Tensor], Any]
    ):
        super().__init__()
        for number in range(experts):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            initialize(weight.data)
            self.register_parameter(f"weight{number}", weight)

    def __iter__(self):
        return iter(self.parameters())


class SequentialExperts(MegatronModule):
    """The gated experts of a mixture on one rank, which Megatron's dispatcher feeds with tokens sorted by expert."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None
    ):
        super().__init__(config=config)
        assert config.expert_model_parallel_size == config.tensor_model_parallel_size == 1, (
            "experts on one rank"
        )
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
    weighted = (F.silu(gate) * up * probs.unsqueeze(-1)).to(
        tokens.dtype
    )  # Megatron weights before the second layer
    return F.linear(weighted, second)

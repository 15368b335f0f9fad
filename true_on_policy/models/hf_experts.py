"""Hugging Face's mixtures of experts in the agreed order of rounding and adding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from true_on_policy.contract.expert_order import chosen, combined
from true_on_policy.contract.specs import HUGGING_FACE, NormOrder
from true_on_policy.models import hf_decoder


def align(model: Any, order: NormOrder) -> None:
    """Make routers and experts follow the order of experts, and norms and layers follow `order`."""
    if order != HUGGING_FACE:
        hf_decoder.align(model, order)
    for layer in model.model.layers:
        for module, ours in ((layer.mlp.gate, OrderedRouter), (layer.mlp.experts, OrderedExperts)):
            module.__class__ = hf_decoder.of_both(ours, type(module))


class OrderedRouter:
    """The forward pass of a router in the order of experts, for `hf_decoder.of_both`."""

    top_k: int
    norm_topk_prob: bool
    weight: Tensor

    def forward(self, hidden_states: Float[Tensor, "T H"]) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight)
        return logits, *chosen(logits, self.top_k, self.norm_topk_prob)


class OrderedExperts:
    """The forward pass of the experts in the order of experts, for `hf_decoder.of_both`."""

    num_experts: int
    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Any

    def forward(
        self,
        hidden_states: Float[Tensor, "T H"],
        top_k_index: Int64[Tensor, "T K"],
        top_k_weights: Float32[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        by_expert = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        received = hidden_states[by_expert // top_k_index.shape[1]].split(counts)
        outputs = torch.cat([self._expert(index, rows) for index, rows in enumerate(received)])
        return combined(outputs, by_expert.argsort().view_as(top_k_index), top_k_weights)

    def _expert(self, index: int, rows: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        gate, up = F.linear(rows, self.gate_up_proj[index]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])

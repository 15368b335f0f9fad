"""Hugging Face's Qwen3 in an agreed order of rounding and adding: the model of the `hf` trainer and `hf` engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from true_on_policy.contract.cpu import DTYPES
from true_on_policy.contract.norm_order import ORDERS, NormOrder, add_residual, rms_norm
from true_on_policy.kernels.row_parallel import Tree


def load(
    checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None
) -> Qwen3ForCausalLM:
    """Load the model with torch's SDPA; in another order than Hugging Face's, its norms and layers are ours.

    With a `tree`, the products that tensor parallelism would split along K add up as the tree.
    """
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=DTYPES[dtype], attn_implementation="sdpa")
    if order is not None and order != ORDERS["hf"]:
        for module in model.modules():
            _follow(module, order)
    if tree is not None:
        add_as(tree, model)
    return model.eval()


def add_as(tree: Tree, model: Qwen3ForCausalLM) -> None:
    """Have the products that tensor parallelism would split along K add up as `tree` says; the weights stay."""
    for name, module in model.named_modules():
        if name.endswith(ROW_PARALLEL):
            _put_on(tree, module)


def _follow(module: Any, order: NormOrder) -> None:
    """Give one module the class that follows `order`, and keep its weights."""
    if type(module) in ORDERED:
        module.__class__ = ORDERED[type(module)]
        module.order = order


class OrderedNorm(Qwen3RMSNorm):
    order: NormOrder

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.order)


class OrderedLayer(Qwen3DecoderLayer):
    order: NormOrder

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **attention)
        stream = add_residual(branch, hidden_states, self.order)
        return add_residual(self.mlp(self.post_attention_layernorm(stream)), stream, self.order)


class TreeLinear(torch.nn.Linear):
    tree: Tree

    def forward(self, input: Tensor) -> Tensor:
        return self.tree.product(input, self.weight)


def _put_on(tree: Tree, module: Any) -> None:
    assert module.bias is None, "Qwen3 has none"
    module.__class__ = TreeLinear
    module.tree = tree


ROW_PARALLEL = (".o_proj", ".down_proj")
ORDERED = {Qwen3RMSNorm: OrderedNorm, Qwen3DecoderLayer: OrderedLayer}

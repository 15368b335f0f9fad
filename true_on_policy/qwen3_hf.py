"""Hugging Face's Qwen3 in an agreed order of rounding: the model of the `hf` trainer and of the `hf` engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from true_on_policy.contract import DTYPES
from true_on_policy.norm_order import ORDERS, NormOrder, add_residual, rms_norm


def load(checkpoint: Path, dtype: str, order: NormOrder | None = None) -> Qwen3ForCausalLM:
    """The model with torch's SDPA. Untouched in its own order; in another one its norms and layers are ours."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=DTYPES[dtype], attn_implementation="sdpa")
    if order is not None and order != ORDERS["hf"]:
        for module in model.modules():
            _follow(module, order)
    return model.eval()


def _follow(module: Any, order: NormOrder) -> None:
    """Give this one module the class that follows `order`; its weights stay."""
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


ORDERED = {Qwen3RMSNorm: OrderedNorm, Qwen3DecoderLayer: OrderedLayer}

"""The forward of aten's CPU flash attention, from a backend's `attend`; its stock backward keeps working."""

from __future__ import annotations

import torch
from torch import Tensor

SERVED = (torch.float32, torch.bfloat16)


def attention(
    backend,
    stock,
    keyset,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by the backend, or by the stock kernel for a dtype that the backend does not serve.

    Returns:
        Output [B, H, Q, D] and logsumexp [B, H, Q], in the memory layout of the stock kernel.
    """
    if query.dtype not in SERVED:
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        return stock.call_boxed(keyset, query, key, value, dropout_p, is_causal, **kwargs)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return backend.attend(query, key, value, _additive(attn_mask), is_causal, scale)


def _additive(attn_mask: Tensor | None) -> Tensor | None:
    """Turn an attention mask into a float32 bias: 0 shows a key, -inf hides it."""
    if attn_mask is None:
        return None
    if attn_mask.dtype == torch.bool:
        return torch.zeros(attn_mask.shape).masked_fill_(~attn_mask, float("-inf"))
    return attn_mask.float()


OVERRIDES = {"_scaled_dot_product_flash_attention_for_cpu": attention}

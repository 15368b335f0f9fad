"""Rope in the model's dtype, as both sides of the CPU contract rotate; another dtype gives other bits.

SGLang on a CPU, Hugging Face and Megatron-core 0.16.1 rotate in the model's dtype by themselves. Miles's fork
of Megatron-core rotates in float32, so `rotated` replaces Megatron's function.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MODULE, NAME = "megatron.core.models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd"


def rotated(
    t: Float[Tensor, "*S D"],
    freqs: Float[Tensor, "*F R"],
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    **unused: Any,
) -> Float[Tensor, "*S D"]:
    """Rotate the first R of D columns: cos and sin are rounded to the dtype of `t`, and so is each product."""
    assert not rotary_interleaved and not multi_latent_attention, "plain rope alone"
    width = freqs.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    first, second = turned.chunk(2, -1)
    cos, sin = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
    half = torch.cat((-second, first), -1)
    return torch.cat((turned * cos + half * sin, rest), -1)

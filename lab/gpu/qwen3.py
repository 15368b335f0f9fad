"""A Qwen3 of random weights on the device, with attention by SDPA or by FlashAttention-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from lab.gpu.attention import next_token, prefill
from lab.gpu.machine import Cuda
from true_on_policy.contract.families import FAMILIES, Shape
from true_on_policy.kernels import flash_attention as fa3
from true_on_policy.models.tiny import config_of

# No name with "flash" in it: transformers would look for a kernel of that name on its hub.
FA3 = "fa3_of_the_session"


def build(shape: Shape, machine: Cuda, attention: str, dtype: torch.dtype = torch.bfloat16) -> Qwen3ForCausalLM:
    """Build a Qwen3 with equal weights for every attention; norms are not ones, which would hide the order of casts."""
    torch.manual_seed(0)
    config = config_of(FAMILIES["qwen3-dense"], shape, dtype)
    AttentionInterface.register(FA3, flash_attention)
    with torch.device(machine.device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand(len(parameter), device=machine.device).to(parameter.dtype) + 0.5
        else:
            parameter.data.normal_(std=parameter.shape[1] ** -0.5)
    return model.eval()


def load(checkpoint: Path, machine: Cuda) -> Qwen3ForCausalLM:
    """Load a checkpoint on FlashAttention-3, in the dtype of its weights."""
    disable_progress_bar()
    AttentionInterface.register(FA3, flash_attention)
    model: Any = Qwen3ForCausalLM.from_pretrained(checkpoint, attn_implementation=FA3, dtype="auto")
    return model.to(machine.device).eval()


def flash_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **unused: Any
) -> tuple[Tensor, None]:
    """Attend [B, H, T, D] by FlashAttention-3: whole sequences packed, the next token of each from a cache."""
    assert mask is None and scaling == query.shape[-1] ** -0.5, "causal attention at the usual scale alone"
    library = fa3.library()
    # In autocast the norms leave q and k in float32, and so does a cache.
    query, key, value = (x.transpose(1, 2).bfloat16().contiguous() for x in (query, key, value))
    if query.shape[1] == key.shape[1]:
        return prefill(library, query, key, value), None
    seen = torch.full((len(key),), key.shape[1], dtype=torch.int32, device=key.device)
    return next_token(library, query, key, value, seen), None


def sampled(
    model: Qwen3ForCausalLM, tokens: Tensor, length: int, random: torch.Generator, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Sample behind tokens [B, T] from a cache, log_softmax in `dtype`; return tokens and log-probs, [B, length]."""
    cache, step, drawn, measured = DynamicCache(config=model.config), tokens, [], []
    for _ in range(length):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1]
        distribution = logits.to(dtype).log_softmax(-1).float()
        step = distribution.exp().multinomial(1, generator=random)
        drawn.append(step)
        measured.append(distribution.gather(1, step))
    return torch.cat(drawn, 1), torch.cat(measured, 1)


def log_probs(model: Qwen3ForCausalLM, tokens: Tensor) -> Tensor:
    """Compute the log-prob of each token but the first, in float32: [B, T - 1]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]

"""The orders in which both sides round and add: norms and residuals, mixtures of experts, and rope.

The stream is the sum of residual and branch, which one layer hands to the next. SGLang normalizes the unrounded sum and
hands on the rounded sum; Megatron-core and Hugging Face round the sum first. Hugging Face rounds again before the
norm's weight. vLLM normalizes the unrounded sum like SGLang, and rounds before the weight like Hugging Face. An
unrounded stream is held in float32, so that the next norm reads every bit; the next sum rounds it.

In a mixture of experts SGLang's `moe_forward_native` sets the order and runs unchanged; Megatron-core and Hugging
Face round and add differently. `tests/support/expert_alignments.py` leaves out one difference at a time.

SGLang on a CPU, Hugging Face and Megatron-core 0.16.1 rotate in the model's dtype by themselves. Miles's fork
of Megatron-core rotates in float32, so `rotated` replaces Megatron's function.
"""

from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.contract.specs import NormOrder

ORDERS = {name: side.order for sides in (ENGINES, TRAINERS) for name, side in sides.items()}


def agreed_order(contract: Contract, engine: str, trainer: str) -> NormOrder:
    """Return the order that both sides take: the engine's or the trainer's, by `contract.norm_order`."""
    return ENGINES[engine].order if contract.norm_order == "engine" else TRAINERS[trainer].order


def add_residual(
    branch: Float[Tensor, "*T H"], stream: Float[Tensor, "*T H"], order: NormOrder
) -> Float[Tensor, "*T H"]:
    """Add a branch to the stream: in the branch's dtype where the order rounds the sum, else in float32."""
    residual = stream.to(branch.dtype)
    return residual + branch if order.rounds_sum else residual.float() + branch.float()


def rms_norm(
    stream: Float[Tensor, "*T H"], weight: Float[Tensor, "H"], eps: float, order: NormOrder
) -> Float[Tensor, "*T H"]:
    """Compute x / sqrt(mean(x^2) + eps) * weight in float32, rounded by `order` to the weight's dtype."""
    x = stream.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if order.rounds_normalized:
        return weight * x.to(weight.dtype)
    return (x * weight).to(weight.dtype)


# SGLang adds this to the sum of a token's weights before it divides by the sum.
EPSILON = 1e-20


def chosen(
    logits: Float[Tensor, "T E"], top_k: int, divided: bool = True
) -> tuple[Float32[Tensor, "T K"], Int64[Tensor, "T K"]]:
    """Choose experts for each token; return the combine weights and the experts, the highest score first.

    Args:
        divided: whether the scores of a token's experts are divided by their sum.
    """
    scores, experts = torch.topk(torch.softmax(logits.float(), -1), top_k, -1)
    return scores / total(scores) if divided else scores, experts


def total(scores: Float32[Tensor, "T K"]) -> Float32[Tensor, "T 1"]:
    """Sum the scores of a token's experts in the order of the choice, and add EPSILON."""
    return scores.sum(-1, keepdim=True) + EPSILON


def combined(
    outputs: Float[Tensor, "N H"], rows: Int64[Tensor, "T K"], weights: Float32[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Add the weighted outputs of each token's experts in the order of the choice, and round once.

    `outputs` holds one row for each token that an expert received, and `rows` the rows that belong to each token.
    """
    weighted = outputs.float()[rows] * weights[..., None]
    return weighted.sum(1).to(outputs.dtype)


ROPE_MODULE, ROPE_NAME = "megatron.core.models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd"


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

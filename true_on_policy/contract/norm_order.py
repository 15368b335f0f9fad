"""The order of rounding around RMSNorm, in which engines and trainers differ in bf16.

The stream is the sum of residual and branch, which one layer hands to the next. SGLang normalizes the
unrounded sum and hands on the rounded sum; Megatron-core and Hugging Face round the sum first. Hugging Face
rounds again before the norm's weight. vLLM normalizes the unrounded sum like SGLang, and rounds before the
weight like Hugging Face. An unrounded stream is held in float32, so that the next norm reads every bit; the
next sum rounds it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
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

"""The order of rounding around RMSNorm, where engines and trainers differ in bf16 and in nothing else.

Between two layers runs the stream `s`. SGLang normalizes the sum of residual and branch before it is rounded, and hands
the rounded sum on; Megatron-core and Hugging Face round first. Hugging Face rounds once more, before the norm's weight.
vLLM takes the sum as SGLang does and the weight as Hugging Face does.
A stream that is not rounded travels in float32, so that the next norm sees it whole; the next sum rounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from true_on_policy.contract.cpu import Contract


@dataclass(frozen=True)
class NormOrder:
    """Attributes:
    rounds_sum: the residual sum is rounded to the model's dtype before it is normalized.
    rounds_normalized: the normalized value is rounded before the norm's weight multiplies it.
    """

    rounds_sum: bool
    rounds_normalized: bool


ORDERS = {
    "sglang": NormOrder(rounds_sum=False, rounds_normalized=False),
    "vllm": NormOrder(rounds_sum=False, rounds_normalized=True),
    "megatron": NormOrder(rounds_sum=True, rounds_normalized=False),
    "hf": NormOrder(rounds_sum=True, rounds_normalized=True),
}


def agreed_order(contract: Contract, engine: str, trainer: str) -> NormOrder:
    """The order that both sides take: the engine's own or the trainer's own, as `contract.norm_order` says."""
    return ORDERS[engine if contract.norm_order == "engine" else trainer]


def add_residual(
    branch: Float[Tensor, "*T H"], stream: Float[Tensor, "*T H"], order: NormOrder
) -> Float[Tensor, "*T H"]:
    """The stream after a branch: in the branch's dtype where the order rounds the sum, else in float32."""
    residual = stream.to(branch.dtype)
    return residual + branch if order.rounds_sum else residual.float() + branch.float()


def rms_norm(
    stream: Float[Tensor, "*T H"], weight: Float[Tensor, "H"], eps: float, order: NormOrder
) -> Float[Tensor, "*T H"]:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 but for the roundings of `order`; in the weight's dtype."""
    x = stream.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if order.rounds_normalized:
        return weight * x.to(weight.dtype)
    return (x * weight).to(weight.dtype)

"""The order of rounding and adding in a mixture of experts, in which engines and trainers differ.

SGLang's `moe_forward_native` sets the order and runs unchanged; Megatron-core and Hugging Face round and add
differently. `lab/expert_alignments.py` leaves out one difference at a time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

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
    return normalized(scores) if divided else scores, experts


def normalized(scores: Float32[Tensor, "T K"]) -> Float32[Tensor, "T K"]:
    """Divide the scores of a token's experts by their sum."""
    return scores / total(scores)


def total(scores: Float32[Tensor, "T K"]) -> Float32[Tensor, "T 1"]:
    """Sum the scores of a token's experts in the order of the choice, and add EPSILON."""
    return scores.sum(-1, keepdim=True) + EPSILON


def combined(
    outputs: Float[Tensor, "N H"], rows: Int64[Tensor, "T K"], weights: Float32[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Add the weighted outputs of each token's experts in the order of the choice, and round once.

    Args:
        outputs: the outputs of all experts, one row for each token that an expert received.
        rows: the rows of `outputs` that belong to each token.
    """
    weighted = outputs.float()[rows] * weights[..., None]
    return weighted.sum(1).to(outputs.dtype)

"""The order of rounding and adding in a mixture of experts, in which engines and trainers differ.

SGLang's `moe_forward_native` sets the order and runs unchanged; Megatron-core and Hugging Face round and add
differently. ALIGNMENTS has a row for each difference, and `lab/expert_alignments.py` leaves out one
row at a time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from true_on_policy.contract.alignment import Alignment

# SGLang adds this to the sum of a token's weights before it divides by the sum.
EPSILON = 1e-20


ALIGNMENTS = (
    Alignment(
        "gate",
        "a product in the model's dtype; scores in fp32 from the rounded logits",
        "in the model's dtype; with --moe-router-dtype fp32 a product in fp32",
        "no --moe-router-dtype; SpecRouter takes the logits to fp32",
    ),
    Alignment(
        "scores",
        "softmax in fp32 over all experts",
        "softmax over the chosen logits, rounded to the model's dtype",
        "--moe-router-pre-softmax on logits in fp32",
    ),
    Alignment(
        "ties",
        "torch.topk of the scores in fp32, on one release of torch",
        "torch.topk of the rounded logits",
        "one torch on both sides; the kernels' probe compares tied rows alone and in a batch",
    ),
    Alignment(
        "combine weight",
        "score / (sum of the chosen scores + 1e-20), in fp32 and kept in fp32",
        "no division after a softmax over all experts; rounded to the model's dtype",
        "SpecRouter divides, in the order of the choice",
    ),
    Alignment(
        "where the weight multiplies",
        "the expert's rounded output, in fp32",
        "the input of the second product, rounded to the model's dtype",
        "SpecDispatcher gives the experts weights of one and multiplies after them",
    ),
    Alignment(
        "sum over experts",
        "in fp32, from the highest score to the lowest, rounded once",
        "scatter_add in the model's dtype, from the first expert to the last",
        "SpecDispatcher adds in the order of the choice",
    ),
)


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

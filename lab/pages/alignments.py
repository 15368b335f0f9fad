"""What a trainer by itself rounds or adds otherwise than SGLang on a CPU, as docs/engines.md lists it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alignment:
    """An alignment is one operation that a trainer takes over from SGLang.

    Attributes:
        name: the operation.
        bits: dtype and order of rounding, equal on both sides.
        megatron: what Megatron-core 0.16.1 does by itself, without Transformer Engine.
        pinned: what makes the trainer of a proof give these bits.
    """

    name: str
    bits: str
    megatron: str
    pinned: str


DENSE = (
    Alignment(
        "products",
        "a row's sum over K in one order, alone or among other rows",
        "torch's kernels: a row alone has other bits than among others",
        "the pinned mm, addmm and bmm of one backend",
    ),
    Alignment(
        "attention",
        "torch's SDPA; keys in the order of the sequence, from its start",
        "products and a softmax of its own, without packed sequences",
        "SpecAttention on the pinned kernel",
    ),
    Alignment(
        "norm and residual",
        "RMSNorm of the unrounded sum, weight in fp32, rounded once; the rounded sum goes on",
        "the sum is rounded before its norm",
        "norms and residuals of the layers' spec",
    ),
    Alignment(
        "rope",
        "q and k rotate in the model's dtype, by cos and sin rounded to it",
        "the model's dtype in NVIDIA's Megatron-core; float32 in Miles's fork (2e64d788)",
        "rotated, in the place of Megatron's function",
    ),
    Alignment(
        "sums over K",
        "ordinary products, or one tree of leaves that the ranks share",
        "one partial sum a tensor-parallel rank, added by an all-reduce",
        "SpecRowParallel with the contract's leaves",
    ),
    Alignment(
        "log-prob",
        "log_softmax(logits / temperature) in fp32 over the whole vocabulary",
        "vocab_parallel_cross_entropy",
        "sampled_log_probs; in a host the function that its loss looks up",
    ),
)

EXPERTS = (
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

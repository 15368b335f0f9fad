"""The rows of the CPU contract of a dense decoder in bf16: what a trainer takes over from SGLang."""

from __future__ import annotations

from true_on_policy.contract.alignment import Alignment

ALIGNMENTS = (
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

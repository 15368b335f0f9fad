"""What a dense transformer computes on each side, operation by operation, and who provides the kernel: data.

Read in Miles v0.1.0, radixark/Megatron-LM miles-main (2e64d788), SGLang 0.5.23 and its branch sglang-miles (29d5285c).
None of it was run on a GPU here.
"""

from __future__ import annotations

from dataclasses import dataclass

PLUGIN = "miles_megatron_plugins/true_on_policy"  # in radixark/Megatron-LM


@dataclass(frozen=True)
class Operation:
    """One row of the contract.

    Attributes:
        name: the operation.
        bits: dtype and order of rounding, the same on both sides.
        trainer: which kernel runs there.
        engine: which kernel runs there.
    """

    name: str
    bits: str
    trainer: str
    engine: str


GEMMS = {
    "deep_gemm": "DeepGEMM bf16_gemm_nn, deterministic",
    "triton_persistent": "Triton persistent, tiles 128 x 128 x 64",
}
ATTENTIONS = {
    "fa3": "FlashAttention-3, num_splits=1",
    "flashinfer": "flashinfer, fixed split tiles",
    "triton": "Triton, fixed split tiles",
}

_NORM = "x / rms in fp32, cast, times fp32 weight; residual stream fp32"
_SHARED = {
    "embedding": Operation("embedding", "fp32 weight", "torch", "SGLang VocabParallelEmbedding, fp32"),
    "rope": Operation(
        "rope",
        "fp32 cos, sin and product; q and k back to bf16",
        "eager, not fused",
        "forward_native; compiled unless TORCH_COMPILE_DISABLE=1",
    ),
    "activation": Operation("silu(gate) * up", "bf16", "F.silu, not fused", "SiluAndMul.forward_native"),
    "log_softmax": Operation(
        "log_softmax",
        "bf16 logits / temperature, over the whole vocabulary, not log(softmax)",
        "torch.log_softmax under the batch-invariant mode",
        "torch.log_softmax under the batch-invariant mode",
    ),
    "mean": Operation(
        "mean of a norm",
        "fp32",
        "aten::mean.dim of the batch-invariant mode",
        "aten::mean.dim of the batch-invariant mode",
    ),
}
_NORMS = {
    "megatron": f"{PLUGIN}/norm.py SGLangNorm, SGLangFinalRMSNorm",
    "fsdp": "Hugging Face RMSNorm on fp32 weights under autocast; final norm of Miles's qwen3.py",
}
_QK_NORMS = {
    "megatron": f"{PLUGIN}/norm.py SGLangQKRMSNorm",
    "fsdp": "Hugging Face RMSNorm on fp32 weights",
}
_ATTENTION = {
    "megatron": "{} varlen, causal, key and value repeated over groups",
    "fsdp": "{} by transformers' flash_attention_3",
}

_COLLECTIVES = {
    "megatron": (
        Operation(
            "sum over tensor-parallel ranks",
            "bf16, one tree; NCCL adds nothing",
            "all-gather, then the tree of tensor_parallel/mappings.py",
            "all-gather, then the tree of tp_invariant_ops.py",
        ),
        Operation("logits of all ranks", "concatenated", "all-gather", "all-gather"),
    ),
    "fsdp": (),
}


def operations(
    backend: str, attention: str, trainer_gemm: str, engine_gemm: str, qk_norm: bool, qkv_bias: bool
) -> tuple[Operation, ...]:
    """The rows of a contract, in the order of a forward pass."""
    kernel = ATTENTIONS[attention]
    gemms = GEMMS[trainer_gemm], GEMMS[engine_gemm]
    norms = [
        Operation("RMSNorm of layers, final norm", _NORM, _NORMS[backend], "RMSNorm, cast_x_before_out_mul")
    ]
    if qk_norm:
        norms.append(
            Operation("q and k norm", "as above, on q and k", _QK_NORMS[backend], "RMSNorm on fp32 weights")
        )
    bias = ", then + bias in bf16" if qkv_bias else ""
    return (
        _SHARED["embedding"],
        norms[0],
        _SHARED["mean"],
        Operation(f"q, k, v product{bias}", "bf16 in and out, fp32 sums in one order of K", *gemms),
        *norms[1:],
        _SHARED["rope"],
        Operation("attention", "bf16", _ATTENTION[backend].format(kernel), f"{kernel}, paged"),
        Operation("o and down product", "bf16; partial sums in one tree (row_sums)", *gemms),
        *_COLLECTIVES[backend],
        Operation("gate and up product", "bf16 in and out", *gemms),
        _SHARED["activation"],
        Operation("LM head", "bf16 in, bf16 logits", *gemms),
        _SHARED["log_softmax"],
    )

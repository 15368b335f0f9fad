"""A table of the operations of a dense transformer on each side, and of who provides each kernel.

The rows were read in Miles v0.1.0, radixark/Megatron-LM miles-main (2e64d788), SGLang 0.5.23 and its branch
sglang-miles (29d5285c, e687c743). This project has not run them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

PLUGIN = "miles_megatron_plugins/true_on_policy"  # in radixark/Megatron-LM


@dataclass(frozen=True)
class Operation:
    """An operation is one row of the contract.

    Attributes:
        bits: dtype and order of rounding, equal on both sides.
        trainer, engine: the kernel that runs on each side.
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

# Where each kernel adds a bias: Triton's to its fp32 accumulator, both callers of DeepGEMM to the rounded result.
BIASES = {
    "deep_gemm": "rounded, then + bias in bf16",
    "triton_persistent": "+ bias in fp32, then rounded",
}

_SHARED = {
    "rope": Operation(
        "rope",
        "cos, sin and product in fp32; q and k back to bf16",
        "eager, not fused",
        "forward_native, eager",
    ),
    "activation": Operation("silu(gate) * up", "bf16", "F.silu, not fused", "SiluAndMul.forward_native"),
    "log_softmax": Operation(
        "log_softmax",
        "of bf16 logits / temperature, whole vocabulary; inside fp32, result bf16; not log(softmax)",
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
_EMBEDDINGS = {
    "megatron": Operation(
        "embedding", "bf16 weight", "torch, bf16", "VocabParallelEmbedding, the same numbers in fp32"
    ),
    "fsdp": Operation("embedding", "fp32 weight", "torch, fp32", "VocabParallelEmbedding, fp32"),
}
# Each trainer's norms: of a layer, of q and k, and after the last layer.
_NORMS = {
    "megatron": (
        f"{PLUGIN}/norm.py SGLangNorm, override_orig_dtype fp32",
        f"{PLUGIN}/norm.py SGLangQKRMSNorm",
        f"{PLUGIN}/norm.py SGLangFinalRMSNorm",
    ),
    "fsdp": (
        "Hugging Face RMSNorm on an fp32 stream",
        "Hugging Face RMSNorm on bf16 q and k",
        "Qwen3FinalRMSNorm of Miles's fsdp_utils/models/qwen3.py",
    ),
}
_ROW_SUMS = {
    "megatron": "bf16 in and out; partial sums of 128 columns, rounded, in one order (row_sums.py)",
    "fsdp": "bf16 in and out, fp32 sums in one order of K",
}
# The engine's kernel of row-parallel products. On several ranks it has a kernel of its own; where a rank's K
# is no multiple of 128, the kernel of the engine's other products runs.
_ROW_KERNELS = {
    "megatron": "Triton, tiles 64 x 128 x 128 (tp_invariant_ops.py); {} where a rank's K is no multiple of 128",
    "fsdp": "{}",
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
        Operation("heads of context-parallel ranks", "moved", "all-to-all of cp_layout.py", "-"),
    ),
    "fsdp": (Operation("weights of all ranks", "concatenated", "all-gather of FSDP2", "-"),),
}

BLOG = "the blog runs torch.compile on parts of the models, rope among them; this contract turns it off on both sides"

# Regions that torch.compile could compile: (side, region, why the region is not compiled or why it may be).
COMPILED = {
    "megatron": (
        (
            "trainer",
            "SwiGLU, cross entropy (jit_fuser)",
            "not called: --no-bias-swiglu-fusion, log_softmax above",
        ),
    ),
    "fsdp": (("trainer", "the model", "eager: Miles compiles none of it"),),
}
COMPILED_ALIKE = (
    ("both", "what the blog compiles, rope too", BLOG),
    (
        "trainer",
        "KL, policy loss, entropy (Miles's loss_hub/math_utils.py)",
        "may be: they take log-probs and give none; off with TORCH_COMPILE_DISABLE=1",
    ),
    (
        "engine",
        "rope (layers/rotary_embedding)",
        "eager in sglang-miles; 0.5.23 compiles it for a trainer's sake, TORCH_COMPILE_DISABLE=1 makes it eager",
    ),
    (
        "engine",
        "ids of a rank's part of the vocabulary, sampling with seeds",
        "may be: integers and draws; off with TORCH_COMPILE_DISABLE=1",
    ),
    ("engine", "whole layers", "only with --sglang-enable-torch-compile: leave it out"),
)


def operations(
    backend: str, attention: str, trainer_gemm: str, engine_gemm: str, qk_norm: bool, qkv_bias: bool
) -> tuple[Operation, ...]:
    """List the operations of a contract in the order of a forward pass."""
    kernel = ATTENTIONS[attention]
    gemms = GEMMS[trainer_gemm], GEMMS[engine_gemm]
    bias = f", {BIASES[trainer_gemm]}" if qkv_bias else ""
    of_layer, of_qk, final = _NORMS[backend]
    cast = "RMSNorm.forward_native, cast_x_before_out_mul"
    bits = "x / rms in fp32, rounded to bf16, times the weight in fp32; fp32 for rope"
    return (
        _EMBEDDINGS[backend],
        Operation(
            "RMSNorm of a layer",
            "x / rms * weight, all fp32; residual stream fp32",
            of_layer,
            "RMSNorm.forward_native, override_orig_dtype fp32",
        ),
        _SHARED["mean"],
        Operation("q, k, v product", f"bf16 in and out, fp32 sums in one order of K{bias}", *gemms),
        *([Operation("q and k norm", bits, of_qk, cast)] if qk_norm else []),
        _SHARED["rope"],
        Operation("attention", "bf16", _ATTENTION[backend].format(kernel), f"{kernel}, paged"),
        Operation("o and down product", _ROW_SUMS[backend], gemms[0], _ROW_KERNELS[backend].format(gemms[1])),
        *_COLLECTIVES[backend],
        Operation("gate and up product", "bf16 in and out, fp32 sums in one order of K", *gemms),
        _SHARED["activation"],
        Operation("final norm", "x / rms in fp32, rounded to bf16, times bf16 weight", final, cast),
        Operation("LM head", "bf16 in, bf16 weight, fp32 sums in one order of K, bf16 logits", *gemms),
        _SHARED["log_softmax"],
    )

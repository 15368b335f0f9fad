"""The outputs of SGLang's own mixture of experts on CPU, by SGLang's python, for weights and hidden states in a file.

    python sglang_experts.py CASES OUTPUTS      files of safetensors

Each case has hidden states, the gate, and the weights of all experts; the kernels of the CPU contract are pinned.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.layers.moe import fused_moe_native  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.moe.topk import StandardTopKOutput, fused_topk_torch_native  # pyright: ignore[reportMissingImports]
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.kernels.pin import pinned


class SiluAndMul:
    """SGLang's activation as its class computes it on CPU, without the server state that the class reads."""

    def __call__(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]


def outputs(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """Compute a layer's outputs by SGLang's choice of experts and its sum over them."""
    logits = F.linear(hidden, gate)
    weights, experts = fused_topk_torch_native(hidden, logits, top_k, renormalize=True)
    layer = SimpleNamespace(num_experts=len(gate), w13_weight=up, w2_weight=down)
    runner = SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None, gemm1_clamp_limit=None
    )
    chosen = StandardTopKOutput(weights, experts, logits)
    return fused_moe_native.moe_forward_native(layer, hidden, chosen, runner)


def main(cases: str, made: str) -> None:
    fused_moe_native.SiluAndMul = SiluAndMul
    found = {}
    with safe_open(cases, "pt") as file, torch.no_grad():
        for name, top_k in json.loads(file.metadata()["top_k"]).items():
            tensors = [file.get_tensor(f"{name}.{part}") for part in ("hidden", "gate", "up", "down")]
            with pinned(Contract(dtype="bf16")):
                found[name] = outputs(*tensors, top_k=top_k)
    save_file(found, made)


if __name__ == "__main__":
    main(*sys.argv[1:])

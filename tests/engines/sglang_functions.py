"""What SGLang's own functions compute on CPU, by SGLang's python, from the tensors in a file.

    python sglang_functions.py experts CASES OUTPUTS      its mixture of experts, on the kernels of the CPU contract
    python sglang_functions.py mrope CASE OUTPUTS         query and key as its M-RoPE rotates them

Files are safetensors.
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
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding  # pyright: ignore[reportMissingImports]
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


def experts(cases: str, made: str) -> None:
    """Compute the outputs of each case, which has hidden states, the gate, and the weights of all experts."""
    fused_moe_native.SiluAndMul = SiluAndMul
    found = {}
    with safe_open(cases, "pt") as file, torch.no_grad():
        for name, top_k in json.loads(file.metadata()["top_k"]).items():
            tensors = [file.get_tensor(f"{name}.{part}") for part in ("hidden", "gate", "up", "down")]
            with pinned(Contract(dtype="bf16")):
                found[name] = outputs(*tensors, top_k=top_k)
    save_file(found, made)


def mrope(case: str, made: str) -> None:
    """Rotate each section with a token's time, height and width alike, and with a height and width of their own."""
    with safe_open(case, "pt") as file:
        heads, positions = file.get_tensor("heads"), file.get_tensor("positions")
        asked = json.loads(file.metadata()["asked"])
    moved = torch.stack([positions, positions + 1, positions + 2])
    width, found = heads.shape[-1], {}
    for interleaved in (False, True):
        for section in asked["sections"]:
            rope = MRotaryEmbedding(width, width, 4096, asked["base"], True, heads.dtype, section, interleaved)
            for name, three in (("alike", positions.expand(3, -1)), ("moved", moved)):
                query, key = rope.forward_native(three, heads.flatten(1), heads[:, :1].flatten(1))
                found[f"{name} {section} {interleaved}"] = torch.cat((query, key), -1)
    save_file(found, made)


if __name__ == "__main__":
    {"experts": experts, "mrope": mrope}[sys.argv[1]](*sys.argv[2:])

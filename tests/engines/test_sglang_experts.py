"""SGLang's own mixture of experts, in the engine's own environment, against Megatron's layer in the agreed order."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_alignments import SIZES, TOKENS, Case
from safetensors.torch import load_file, save_file

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.kernels.pin import pinned

pytestmark = pytest.mark.timeout(600)


def test_sglangs_own_functions_have_the_bits_of_megatrons_layer(
    ran_in_sglang: Callable[..., str], tmp_path: Path
) -> None:
    """Eight, 64 and 128 experts; in the last, gates tie at the border of the choice."""
    cases = {f"{experts}-{top_k}": Case.random(experts, top_k, TOKENS) for experts, top_k in SIZES}
    tensors = {}
    for name, case in cases.items():
        each = case.layer.experts.local_experts
        parts = {
            "hidden": case.hidden,
            "gate": case.layer.router.weight,
            "up": torch.stack([one.linear_fc1.weight for one in each]),
            "down": torch.stack([one.linear_fc2.weight for one in each]),
        }
        tensors |= {f"{name}.{part}": value.detach().contiguous() for part, value in parts.items()}
    given, made = tmp_path / "cases.safetensors", tmp_path / "outputs.safetensors"
    save_file(tensors, given, {"top_k": json.dumps({name: case.top_k for name, case in cases.items()})})
    ran_in_sglang("sglang_experts.py", given, made)
    theirs = load_file(made)
    for name, case in cases.items():
        with torch.no_grad(), pinned(Contract(dtype="bf16")):
            ours = case.output()
        assert equal_bits(ours, theirs[name]), name

"""SGLang's own functions, in the engine's own environment, against the agreed order: its experts, and its M-RoPE."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from expert_alignments import SIZES, TOKENS, Case
from safetensors.torch import load_file, save_file

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import rotated
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
    ran_in_sglang("sglang_functions.py", "experts", given, made)
    theirs = load_file(made)
    for name, case in cases.items():
        with torch.no_grad(), pinned(Contract(dtype="bf16")):
            ours = case.output()
        assert equal_bits(ours, theirs[name]), name


def test_its_mrope_with_equal_positions_is_plain_rope_whatever_the_section(
    ran_in_sglang: Callable[..., str], tmp_path: Path
):
    sections, base, width = [[6, 5, 5], [5, 6, 5], [16, 0, 0], [0, 0, 16], [1, 14, 1], [4, 4, 8]], 5e6, 32
    positions = torch.tensor([0, 1, 2, 3, 100, 511, 512, 2047])
    heads = torch.randn(len(positions), 4, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    given, made = tmp_path / "case.safetensors", tmp_path / "outputs.safetensors"
    asked = json.dumps({"sections": sections, "base": base})
    save_file({"heads": heads, "positions": positions}, given, {"asked": asked})
    ran_in_sglang("sglang_functions.py", "mrope", given, made)
    angles = positions[:, None] * (1.0 / base ** (torch.arange(0, width, 2).float() / width))
    turned = rotated(heads, torch.cat((angles, angles), -1)[:, None])
    plain = torch.cat((turned, turned[:, :1]), 1).flatten(1)
    theirs = load_file(made)
    assert len(theirs) == 4 * len(sections)
    for name, turned in theirs.items():
        assert equal_bits(turned, plain) == (name.startswith("alike") or "[16, 0, 0]" in name), name

"""Emulated precisions against their formats written out, LoRA's two merges, and the command itself."""

import sys

import pytest
import torch

from lab import precision
from lab.precision import E4M3, NVFP4_STEPS, merge_bf16, merge_fp32, mxfp8, nvfp4


def nearest(values: torch.Tensor, numbers: list[float]) -> torch.Tensor:
    """Each value's nearest number of a format, of either sign."""
    steps = torch.tensor(numbers, dtype=torch.float64)
    return steps[(values.abs()[..., None] - steps).abs().argmin(-1)].copysign(values)


def of_e4m3() -> list[float]:
    normal = [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)]
    return sorted({m / 8 * 2.0**-6 for m in range(8)} | {x for x in normal if x <= E4M3})


def drawn(size: int) -> torch.Tensor:
    return torch.randn(4, 2 * size, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1], [30], [0]])


def test_mxfp8_is_the_nearest_e4m3_at_a_power_of_two():
    x = drawn(32)
    for block, found in zip(x.view(-1, 32).double(), mxfp8(x).view(-1, 32).double(), strict=True):
        largest = block.abs().max()
        scale = 2.0 ** (largest.log2().floor() - 8) if largest else 1.0
        assert torch.equal(found, nearest((block / scale).clamp(-E4M3, E4M3), of_e4m3()) * scale)


def test_nvfp4_is_the_nearest_e2m1_at_scales_of_block_and_tensor():
    x = drawn(16)
    whole = x.abs().max().double() / (6 * E4M3)
    for block, found in zip(x.view(-1, 16).double(), nvfp4(x).view(-1, 16).double(), strict=True):
        scale = nearest(block.abs().max() / 6 / whole, of_e4m3())
        units = (block / scale / whole if scale else block * 0).clamp(-6, 6)
        assert torch.allclose(found, nearest(units, list(NVFP4_STEPS)) * scale * whole, rtol=1e-6, atol=0)


def test_a_merge_in_bf16_does_not_come_back_to_the_base_and_one_in_fp32_does():
    random = torch.Generator().manual_seed(0)
    base, product = torch.randn(64, 64, generator=random).bfloat16(), torch.randn(64, 64, generator=random) / 8
    nothing = torch.zeros_like(product)
    assert torch.equal(merge_fp32(base, nothing), base)
    assert not torch.equal(merge_bf16(merge_bf16(base, nothing, product), product, nothing), base)


def test_every_rung_runs(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["precision.py", "--smoke", "--rungs", "fp8-cache", "nvfp4", "lora-bf16"])
    assert precision.main() == 0
    text = (tmp_path / "runs" / "precision.md").read_text()
    assert all(precision.RUNGS[name].words in text for name in ("fp8-cache", "nvfp4", "lora-bf16"))

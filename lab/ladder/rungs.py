"""The rungs: the weights, the head and the engine that sample, each a little further from the trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.host.model.quantize import round_to_int
from true_on_policy.models.tiny import read_weights

Rounding = Callable[[Tensor], Tensor]
LARGEST_FP8 = 448.0  # of torch.float8_e4m3fn
GROUP = 64


@dataclass(frozen=True)
class Rung:
    """A rung is one way to sample.

    words: the rung in words, for the page.
    rounding: rounds the weight of a linear layer; None keeps the weight.
    fp32_head: whether both sides multiply with the LM head in float32.
    engine: the engine that samples, by its name in ENGINES; None takes the engine that the command names.
    """

    words: str
    rounding: Rounding | None = None
    fp32_head: bool = False
    engine: str | None = None

    @property
    def step(self) -> bool:
        """Whether the rung has weights of its own; the other rungs are variants of bf16."""
        return not self.fp32_head and self.engine is None


def fp8(weight: Tensor) -> Tensor:
    """Round to e4m3 with one scale a tensor, `s = max|w| / 448`."""
    scale = weight.abs().max() / LARGEST_FP8
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def in_groups(weight: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Round to `bits` with one scale for each group of inputs of an output."""
    groups = weight.unflatten(1, (-1, group)).flatten(0, 1)
    return round_to_int(groups, bits).view(weight.shape)


RUNGS = {
    "bf16": Rung("bf16"),
    "fp32-head": Rung("bf16, LM head in fp32 on both sides", fp32_head=True),
    "int8": Rung("int8, a scale a row", partial(round_to_int, bits=8)),
    "fp8": Rung("fp8 e4m3, a scale a tensor", fp8),
    "int6": Rung("int6, a scale a row", partial(round_to_int, bits=6)),
    "int5": Rung(f"int5, a scale for {GROUP} inputs", partial(in_groups, bits=5)),
    "vllm-bf16": Rung("bf16, sampled by vLLM", engine="vllm"),
    "int4": Rung(f"int4, a scale for {GROUP} inputs", partial(in_groups, bits=4)),
    "int3": Rung(f"int3, a scale for {GROUP} inputs", partial(in_groups, bits=3)),
}
USUAL = [name for name in RUNGS if name not in ("int4", "int3")]
"""The rungs that are measured unless others are asked for: int4 and int3, which break the model, test the report."""


def write_rollout_weights(source: Path, folder: Path, rung: Rung) -> Path:
    """Write the checkpoint that the engine of a rung loads: linear layers rounded, everything in bf16.

    The embedding, which a tied head shares, and the norms stay as they are.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    held = {name: rounded(name, weight, rung.rounding) for name, weight in read_weights(source).items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    if rung.fp32_head:  # SGLang reads this field
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"enable_lm_head_fp32": True}))
    return folder


def rounded(name: str, weight: Tensor, rounding: Rounding | None) -> Tensor:
    """Return a weight as the engine of a rung holds it: a linear layer rounded, everything in bf16."""
    linear = name.endswith("_proj.weight")
    return (rounding(weight.float()) if rounding and linear else weight).bfloat16()

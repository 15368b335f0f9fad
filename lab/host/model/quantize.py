"""Rollout precisions, emulated: the weights an engine of lower precision would multiply with.

Only weights change: `int8`, `int4` and `int3` compute in float32, `bf16` computes in bfloat16. Under intN
the linear layers are rounded, the output head among them; the embedding and the norms stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

LINEAR_SUFFIXES = ("_proj.weight", "lm_head.weight")


def round_to_int(weight: Float[Tensor, "out in"], bits: int) -> Float[Tensor, "out in"]:
    """Symmetric round-to-nearest, one scale an output: `s round(w / s)`, `s = max|w| / (2^(bits-1) - 1)`.

    The error of an element is at most half its output's `s`. A row of zeros stays zero.
    """
    scale = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    steps = torch.round(weight / torch.where(scale > 0, scale, 1.0))
    return steps * scale


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": torch.Tensor.float,
    "bf16": torch.Tensor.bfloat16,
    "int8": partial(round_to_int, bits=8),
    "int4": partial(round_to_int, bits=4),
    "int3": partial(round_to_int, bits=3),
}
"""What happens to a linear layer's weight, by the name `--rollout-weights` takes."""


def at_precision(name: str, weight: Tensor, precision: str) -> Tensor:
    """A copy of the Hugging Face parameter `name` as the rollout engine would hold it."""
    linear = name.endswith(LINEAR_SUFFIXES)
    held = LINEAR[precision](weight.detach().float()) if linear else weight.detach()
    # The dtype of a weight is that of activations and of every matrix product.
    return held.to(torch.bfloat16 if precision == "bf16" else torch.float32, copy=True)

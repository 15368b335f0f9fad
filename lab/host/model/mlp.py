"""What follows the attention in a layer of the rollout engine: one SwiGLU, or a mixture of experts.

The mixture chooses, weighs and adds in the order of SGLang (`true_on_policy/contract/rounding.py`). Megatron-core's
own layer rounds and adds otherwise, so that engine and trainer mismatch as in real runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from true_on_policy.contract.rounding import chosen, combined


@dataclass(frozen=True)
class SwiGlu:
    """`down (silu(gate x) * up x)`, with gate and up joined into one matrix."""

    gate_up: Float[Tensor, "F2 E"]
    down: Float[Tensor, "E F"]

    @classmethod
    def of(cls, held: Mapping[str, Tensor], prefix: str) -> SwiGlu:
        """Join the weights that Hugging Face names behind `prefix`."""
        gate, up, down = (held[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return cls(torch.cat([gate, up]), down)

    def __call__(self, x: Float[Tensor, "*T E"]) -> Float[Tensor, "*T E"]:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which each token takes `top_k`."""

    router: Float[Tensor, "X E"]
    experts: tuple[SwiGlu, ...]
    top_k: int

    @classmethod
    def of(cls, held: Mapping[str, Tensor], prefix: str, top_k: int) -> Experts:
        """Take the router and all experts that Hugging Face names behind `prefix`."""
        router = held[f"{prefix}.gate.weight"]
        experts = (SwiGlu.of(held, f"{prefix}.experts.{number}") for number in range(len(router)))
        return cls(router, tuple(experts), top_k)

    def __call__(self, x: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T E"], Int64[Tensor, "T K"]]:
        """Mix the outputs of each token's experts; return the experts too, the highest score first."""
        weights, experts = chosen(F.linear(x, self.router), self.top_k)
        by_expert = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        received = x[by_expert // self.top_k].split(counts)
        pairs = zip(self.experts, received, strict=True)
        outputs = torch.cat([expert(rows) for expert, rows in pairs if len(rows)])
        return combined(outputs, by_expert.argsort().view_as(experts), weights), experts

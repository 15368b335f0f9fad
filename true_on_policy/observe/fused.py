"""Kernels of Transformer Engine and NVIDIA's Apex that change bits in Megatron's trainer, and which of them are on.

A flag of the host asks for a kernel, and Megatron runs the kernel only where its library is installed. A row of the
doctor says both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from mis_plugins.config.view import view
from true_on_policy.kernels.provider import findable

TE = "transformer_engine"
OFF = "off"


@dataclass(frozen=True)
class Fused:
    """A fused kernel gives other bits than torch's operators.

    Attributes:
        row: the name of the kernel's row in the doctor.
        attribute: the name in the host's parsed arguments that asks for the kernel.
        off: values of the attribute that do not ask for the kernel.
        remedy: the flag that switches the kernel off where the contract has its own kernel; empty where the
            contract's log-probs do not depend on the kernel.
    """

    row: str
    attribute: str
    module: str
    off: tuple[Any, ...] = (False, None)
    remedy: str = ""

    @property
    def wanted(self) -> tuple[str, ...]:
        """List the values that the contract accepts; empty where no log-prob depends on the kernel."""
        return (OFF, self._absent) if self.remedy else ()

    def value(self, asked: Any) -> str:
        """Tell whether the kernel is on where the host's argument is `asked`."""
        if asked in self.off:
            return OFF
        if not findable(self.module):
            return self._absent
        return "on" if self.module in sys.modules else f"asked for, {self.module} not imported"

    @property
    def _absent(self) -> str:
        return f"{OFF}, no {self.module}"


FUSED = (
    Fused(
        "RMSNorm and linear layers of Transformer Engine",
        "transformer_impl",
        TE,
        ("local",),
        "--transformer-impl local",
    ),
    Fused("fused rope (Transformer Engine)", "apply_rope_fusion", TE, remedy="--no-rope-fusion"),
    Fused(
        *("fused attention (Transformer Engine)", "attention_backend", TE),
        off=("flash", "unfused", "local"),
        remedy="--attention-backend flash",
    ),
    Fused("fused cross entropy (Transformer Engine)", "cross_entropy_loss_fusion", TE),
    Fused("router fusion (Transformer Engine)", "moe_router_fusion", TE),
    Fused("fused softmax (Apex)", "masked_softmax_fusion", "scaled_upper_triang_masked_softmax_cuda"),
    Fused("persistent layer norm (Apex)", "persist_layer_norm", "apex.contrib.layer_norm"),
    Fused(
        "gradient accumulation fusion (Apex)",
        "gradient_accumulation_fusion",
        "fused_weight_gradient_mlp_cuda",
    ),
)

# (row, module, name): modules of Megatron-core that choose torch, Apex or Transformer Engine when they are imported.
CHOSEN = (
    ("norm of Megatron's block", "megatron.core.transformer.transformer_block", "LayerNormImpl"),
    ("fused layer norm (Apex)", "megatron.core.fusions.fused_layer_norm", "HAVE_FUSED_LAYER_NORM"),
    ("Adam of Megatron's optimizer", "megatron.core.optimizer", "Adam"),
)


def of_host(args: Any) -> dict[str, str]:
    """Read the state of each fused kernel that the host's parsed arguments mention, by its row."""
    stated = view(args)
    # Megatron makes an enum's member of an attention backend.
    named = {name: getattr(value, "name", value) for name, value in stated.items()}
    return {fused.row: fused.value(named[fused.attribute]) for fused in FUSED if fused.attribute in named}


def chosen(module: str, name: str) -> str:
    """Tell what a module of Megatron-core chose: a class and its library, or whether it found a kernel."""
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        return "not imported"
    if isinstance(found, bool):
        return "found" if found else "absent"
    return f"{found.__name__} of {found.__module__.partition('.')[0]}"

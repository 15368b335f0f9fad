"""Kernels of Transformer Engine and NVIDIA's Apex that change bits in Megatron's trainer, and which of them are on.

A flag of the host asks for a kernel, and Megatron runs the kernel only where its library is installed. A row of the
doctor says both.
"""

from __future__ import annotations

import sys
from typing import Any

from mis_plugins.config.view import view
from true_on_policy.contract.settings import FUSED, Setting
from true_on_policy.kernels.provider import findable


def of_host(args: Any) -> dict[str, str]:
    """Read the state of each fused kernel that the host's parsed arguments mention, by its row."""
    stated = view(args)
    # Megatron makes an enum's member of an attention backend.
    named = {name: getattr(value, "name", value) for name, value in stated.items()}
    return {kernel.name: _state(kernel, named[kernel.host]) for kernel in FUSED if kernel.host in named}


def _state(kernel: Setting, asked: Any) -> str:
    """Tell whether a kernel is on where the host's argument is `asked`."""
    if asked in kernel.off:
        return "off"
    if not findable(kernel.module):
        return f"off, no {kernel.module}"
    return "on" if kernel.module in sys.modules else f"asked for, {kernel.module} not imported"


def chosen(module: str, name: str) -> str:
    """Tell what a module of Megatron-core chose: a class and its library, or whether it found a kernel."""
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        return "not imported"
    if isinstance(found, bool):
        return "found" if found else "absent"
    return f"{found.__name__} of {found.__module__.partition('.')[0]}"

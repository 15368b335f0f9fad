"""Read from torch's dispatcher which kernel serves an operator: a mode's flag does not prove an override."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

# Since 2.13 the CUDA builds of torch override some operators in Python from this folder: these kernels are stock.
OWN = Path(torch.__file__).parent / "_native"


def accelerator_key() -> str:
    """Name the dispatch key that batch-invariant modes override: the accelerator's, or CPU where torch has none."""
    return getattr(torch.accelerator.current_accelerator(), "type", "cpu").upper()


def registration(operator: str, key: str) -> str:
    """Return the dispatcher's line on the kernel of aten::`operator` at `key`; empty where none is registered."""
    lines = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
    return next((line for line in lines if line.startswith(f"{key}:")), "")


def holder(operator: str, key: str) -> str | None:
    """Return the Python file that overrides an operator; None where the kernel is torch's own, in C++ or Python."""
    found = re.search(r"registered at (.+\.py):\d+", registration(operator, key))
    return None if found is None or OWN in Path(found[1]).parents else found[1]


def described(operator: str, key: str) -> str:
    """Describe the kernel that serves an operator: `stock`, or the file of the override and its package."""
    file = holder(operator, key)
    if file is None:
        return "stock"
    module = next((name for name, module in list(sys.modules.items()) if _file(module) == file), None)
    return f"{Path(file).name} of {module.partition('.')[0] if module else Path(file).parent.name}"


def _file(module) -> str | None:
    return getattr(module, "__dict__", {}).get("__file__")

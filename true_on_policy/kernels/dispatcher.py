"""What the dispatcher runs for an operator, in its own words: a flag is no evidence that an override stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

# From here torch's CUDA builds override some of its own operators in Python, since 2.13: that is stock.
OWN = Path(torch.__file__).parent / "_native"


def accelerator_key() -> str:
    """The dispatch key that batch-invariant modes override: the accelerator's, CPU where torch knows none."""
    return getattr(torch.accelerator.current_accelerator(), "type", "cpu").upper()


def registration(operator: str, key: str) -> str:
    """The dispatcher's line about what runs for aten::`operator` on `key`; empty where nothing is registered."""
    lines = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
    return next((line for line in lines if line.startswith(f"{key}:")), "")


def holder(operator: str, key: str) -> str | None:
    """The Python file whose kernel runs; None where a stock one does, or one of torch's own in Python."""
    found = re.search(r"registered at (.+\.py):\d+", registration(operator, key))
    return None if found is None or OWN in Path(found[1]).parents else found[1]


def described(operator: str, key: str) -> str:
    """`stock`, or the file that holds the operator and the package it belongs to."""
    file = holder(operator, key)
    if file is None:
        return "stock"
    module = next((name for name, module in list(sys.modules.items()) if _file(module) == file), None)
    return f"{Path(file).name} of {module.partition('.')[0] if module else Path(file).parent.name}"


def _file(module) -> str | None:
    return getattr(module, "__dict__", {}).get("__file__")

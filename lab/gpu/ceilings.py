"""What can this device do at most? A copy and a product, with which other figures can be compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.results import Result


def ceilings(plan: Plan, machine: Cuda) -> Iterator[Result]:
    source = torch.randn(plan.copied // 4, device=machine.device)
    target = torch.empty_like(source)
    copy = machine.milliseconds(lambda: target.copy_(source))
    x, y = (torch.randn(plan.product, plan.product, device=machine.device).bfloat16() for _ in range(2))
    product = machine.milliseconds(lambda: x @ y)
    yield Result(
        "Ceilings",
        ("what", "size", "ms", "rate", "unit"),
        (
            ("copy, bytes read and written", 2 * plan.copied, copy, 2 * plan.copied / copy / 1e9, "TB/s"),
            ("bf16 product", plan.product, product, 2 * plan.product**3 / product / 1e9, "TFLOP/s"),
        ),
    )

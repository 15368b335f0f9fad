"""What does the correction of mis_plugins cost on the device, against a loop over sequences and a mere copy?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lab.gpu.machine import Call, Cuda
from lab.gpu.plan import Plan
from lab.gpu.results import Result
from lab.peer_cost import LOOP, OURS, called, hook_args, hook_kwargs, load

# In: float32 log-probs of engine and trainer, pg_loss and an int32 mask. Out: pg_loss and a float32 mask.
BYTES_A_TOKEN = 24
AT_LEAST = 1000  # milliseconds: one call of the loop may take as long


def correction(plan: Plan, machine: Cuda) -> Iterator[Result]:
    sequences, length = plan.corrected
    kwargs = _on(machine, hook_kwargs([length] * sequences, cp=1, rank=0))
    ours = called(load(OURS), hook_args("full"), kwargs)
    loop = called(load(LOOP), hook_args("full"), kwargs)
    floor = _floor(machine, sequences * length)
    yield Result(
        f"The correction of {sequences} x {length} tokens",
        ("what", "ms", "times the copy", "MB at most", "waits for the device"),
        (
            ("a copy of what goes in and out", floor, 1.0, 0.0, "none"),
            ("ours", *_measured(machine, ours, floor)),
            ("a loop", *_measured(machine, loop, floor)),
        ),
        _waits(machine, ours) == "",
        "Every metric is read. A loop: ours, a sequence at a time. Only of ours on all at once is no wait demanded.",
    )


def _on(machine: Cuda, kwargs: dict[str, Any]) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(machine.device).requires_grad_(value.requires_grad)
        if isinstance(value, list) and isinstance(value[0], torch.Tensor):
            return [moved(each) for each in value]
        return value

    return {name: moved(value) for name, value in kwargs.items()}


def _floor(machine: Cuda, tokens: int) -> float:
    source = torch.randn(tokens * BYTES_A_TOKEN // 8, device=machine.device)
    target = torch.empty_like(source)
    return machine.milliseconds(lambda: target.copy_(source))


def _measured(machine: Cuda, call: Call, floor: float) -> tuple[float, float, float, str]:
    took = machine.milliseconds(call, AT_LEAST)
    return took, took / floor, machine.peak_bytes(call) / 1e6, _waits(machine, call) or "none"


def _waits(machine: Cuda, call: Call) -> str:
    """Return what torch's sync debug mode says of the first wait for the device; empty where there is no wait."""
    try:
        with machine.without_waits():
            call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""

"""What does the correction of mis_plugins cost on the device, beside Miles's `mis.py`, a loop and a mere copy?"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist

from lab.gpu.machine import Call, Cuda, moved
from lab.gpu.plan import Plan
from lab.gpu.receipt import Result
from lab.host_checkout import stand_in_for_missing_packages, start_groups
from lab.peer_cost import called, hook_args, hook_kwargs, of_hooks, sequence_by_sequence
from mis_plugins import mis
from mis_plugins.hosts.step_report import Recorder

# In: float32 log-probs of engine and trainer, pg_loss and an int32 mask. Out: pg_loss and a float32 mask.
BYTES_A_TOKEN = 24
AT_LEAST = 300  # milliseconds of each way; one call of the loop takes longer
OURS = "ours, mis.yaml"  # weight, rejection by sequence, normalization, and every metric that mis.py has


def correction(plan: Plan, machine: Cuda) -> Iterator[Result]:
    with_miles = _groups_of_miles()
    mis.RECORDER = Recorder(step=(1, 0))
    for sequences, length in plan.corrected:
        kwargs = moved(hook_kwargs([length] * sequences, cp=1, rank=0), machine.device)
        ways = of_hooks(kwargs, with_miles)
        ways["a loop, mis.yaml"] = called(sequence_by_sequence, hook_args("full"), kwargs)
        floor = _floor(machine, sequences * length)
        copied = ("a copy of what goes in and out", floor, 1.0, 0.0, "none")
        yield Result(
            f"The correction of {sequences} x {length} tokens",
            ("way", "ms", "times the copy", "MB at most", "waits for the device"),
            (copied, *((name, *_measured(machine, way, floor)) for name, way in ways.items())),
            not any(_waits(machine, way) for name, way in ways.items() if name.startswith("ours")),
            "Every metric that is handed back is read. `+ host`: and averaged as Miles does, a sequence at a time. "
            "A loop: ours, a sequence at a time. Of ours no wait is demanded.",
        )


def _groups_of_miles() -> bool:
    """Whether a checkout of Miles can be imported; its groups, of this one rank, stand then."""
    if importlib.util.find_spec("miles") is None:
        return False
    stand_in_for_missing_packages()
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    start_groups("miles", 1)
    return True


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

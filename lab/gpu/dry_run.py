"""A dry run of a session on a CPU, at tiny sizes: every line runs on swapped kernels, and no figure means anything.

Triton's kernels are interpreted. The tests' stand-ins replace FlashAttention-3 and DeepGEMM, `StandIn` replaces
SGLang. A wait is counted where an operator would wait on CUDA.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from lab.gpu.machine import Call, Cuda
from lab.gpu.plan import CONTRACT, TINY
from lab.tallies import Tallying, peak_bytes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.kernels.provider import Undo

TESTS = Path(__file__).resolve().parents[2] / "tests" / "support"
DEVICE = torch.device("cpu")
SHORTER = {"SIZES": (1, 40), "LENGTHS": (1, 3), "FEW": (1, 2)}


class Cpu:
    """The CPU in place of the accelerator; times are of the host's clock."""

    device = DEVICE

    def name(self) -> str:
        return "none: a dry run"

    def milliseconds(self, call: Call, at_least: int = 100) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def peak_bytes(self, call: Call) -> int:
        return peak_bytes(call)

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        with Tallying() as counting:
            yield
        if counting.tally.waits:
            raise RuntimeError(f"operators that wait on CUDA: {', '.join(counting.tally.waits)}")


def interpret() -> None:
    """Switch Triton's interpreter on, before anything imports Triton's kernels."""
    sys.path.append(str(TESTS))
    importlib.import_module("triton_interpreter")


@contextmanager
def swapped() -> Iterator[Cuda]:
    """Swap kernels for stand-ins, and the contract's model for a tiny one, in the body; yield the machine."""
    interpret()
    import triton_interpreter
    from stand_ins import FLASH_ATTENTION, deep_gemm_source

    from true_on_policy.kernels import deep_gemm, flash_attention, gpu, megatron, probes

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name, source in {"fa3_fwd_interface": FLASH_ATTENTION, "deep_gemm": deep_gemm_source()}.items():
            Path(folder, f"{name}.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        for module in (megatron, flash_attention, deep_gemm, gpu):
            stack.enter_context(mock.patch.object(module, "device", lambda: DEVICE))
        for name, value in SHORTER.items():
            stack.enter_context(mock.patch.object(probes, name, value))
        stack.enter_context(mock.patch.object(gpu, "PROBED", TINY.size))
        interpreted = _interpreted(megatron.pin, triton_interpreter.on_cpu)
        stack.enter_context(mock.patch.object(megatron, "pin", interpreted))
        machine = cast(Cuda, Cpu())
        _swap_sglang(stack, machine)
        yield machine


def _swap_sglang(stack: ExitStack, machine: Cuda) -> None:
    from lab.gpu import kernels, sglang_server
    from true_on_policy.kernels import gpu

    swapped = {
        "start": partial(sglang_server.StandIn, machine),
        "kernels": kernels.installed,
        "in_force": partial(gpu.observe, CONTRACT),
    }
    for name, value in swapped.items():
        stack.enter_context(mock.patch.object(sglang_server, name, value))


def _interpreted(pin: Callable[[GpuContract], Undo], on_cpu: Callable[[], Any]) -> Callable[[GpuContract], Undo]:
    """Wrap a pin so that, until its undo, Triton is interpreted and tensors claim to lie on a GPU."""

    def interpreted(contract: GpuContract) -> Undo:
        with ExitStack() as stack:
            stack.enter_context(on_cpu())
            stack.callback(pin(contract))
            return stack.pop_all().close

    return interpreted

"""What happens to the real SGLang's batch-invariant mode, by its own python: prints one JSON object, a key a scenario.

    python sglang_mode.py SITE_PACKAGES      where Megatron-core is, for the scenario of two copies

Its Triton kernels are interpreted on CPU; DeepGEMM is the stand-in of tests/support/stand_ins.py.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import triton_interpreter

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.errors import PinError
from true_on_policy.kernels import megatron, mode, probes, sglang
from true_on_policy.kernels.probes import aten_failures

CONTRACT = gpu_contract("qwen3-dense", "fsdp")
CPU = torch.device("cpu")
SHAPES = Shapes(linear=((64, 96), (80, 64)), hidden=(64,))


def registrations() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{name}") for name in mode.OVERRIDABLE]


def state(library: Any) -> tuple:
    """The flag, whether aten::mm and aten::mean.dim are SGLang's, and whether torch.bmm is its own."""
    found = sglang.settings()
    held = [found[f"aten::{name}"] == "batch_invariant_ops.py of sglang" for name in ("mm", "mean.dim")]
    return found["batch-invariant flag"], *held, torch.bmm is library.bmm_batch_invariant


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except PinError as error:
        return str(error)
    return "not refused"


def a_pin(library: Any) -> dict:
    undo = sglang.pin(CONTRACT)
    inside = state(library), sglang.settings()["MM DeepGEMM"]
    failures = [str(failure) for dtype in ("bf16", "fp32") for failure in aten_failures(dtype, SHAPES, CPU)]
    undo()
    return {"inside": inside, "failures": failures}


def a_nested_context(library: Any) -> dict:
    undo = sglang.pin(CONTRACT)
    with library.set_batch_invariant_mode(True):
        pass
    lie, again = state(library), refused(lambda: sglang.pin(CONTRACT))
    undo()
    return {"lie": lie, "again": again}


def a_failing_context(library: Any) -> dict:
    with suppress(ZeroDivisionError), library.set_batch_invariant_mode(True):
        raise ZeroDivisionError
    left, pinned = state(library), refused(lambda: sglang.pin(CONTRACT))
    still = state(library)
    library.disable_batch_invariant_mode()
    return {"left": left, "pinned": pinned, "still": still}


def half_an_enable(library: Any) -> dict:
    with mock.patch.object(library, "_mm_dtype_compat", "no function"):
        return {"message": refused(lambda: sglang.pin(CONTRACT))}


def variants(library: Any) -> dict:
    with mock.patch.object(library, "_ENABLE_MM_FALLBACK_VARIANT", True):
        einsum = refused(lambda: sglang.pin(CONTRACT))
    with mock.patch.object(library, "ENABLE_JIT_DEEPGEMM", False):
        triton = refused(lambda: sglang.pin(CONTRACT))
    return {"einsum": einsum, "triton": triton}


def a_silent_fallback(library: Any) -> dict:
    undo = sglang.pin(CONTRACT)
    fits = refused(lambda: sglang._refuse_fallback(CONTRACT, SHAPES, CPU))
    odd = refused(lambda: sglang._refuse_fallback(CONTRACT, Shapes(linear=((64, 96), (64, 37))), CPU))
    undo()
    return {"fits": fits, "odd": odd}


def two_copies(library: Any) -> dict:
    undo = sglang.pin(CONTRACT)
    second = refused(lambda: megatron.pin(gpu_contract(CONTRACT.family.name, "megatron")))
    kept = state(library)
    undo()
    undo = megatron.pin(gpu_contract(CONTRACT.family.name, "megatron"))
    first = refused(lambda: sglang.pin(CONTRACT))
    undo()
    return {"megatron_second": second, "kept": kept, "sglang_second": first}


SCENARIOS = (*(a_pin, a_nested_context, a_failing_context, half_an_enable), *(variants, a_silent_fallback, two_copies))


def facts(scenario: Callable[[Any], dict], library: Any) -> dict:
    """What a scenario tells, how it leaves the mode, and whether the dispatcher is as it was before."""
    before = registrations()
    return scenario(library) | {"after": state(library), "restored": registrations() == before}


def main() -> None:
    sys.path.append(sys.argv[1])
    library: Any = mode.load(sglang.MODE)
    import deep_gemm  # pyright: ignore[reportMissingImports]

    probes.SIZES = (1, 2, 40)
    here = {
        "get_dispatch_device_backend": lambda: "CPU",
        "get_device_core_count": lambda: 2,
        "ENABLE_JIT_DEEPGEMM": True,
        "deep_gemm": deep_gemm,
    }
    with triton_interpreter.on_cpu(), mock.patch.multiple(library, create=True, **here):
        print(json.dumps({scenario.__name__: facts(scenario, library) for scenario in SCENARIOS}))


if __name__ == "__main__":
    main()

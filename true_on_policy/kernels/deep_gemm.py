"""DeepGEMM's bf16 products: since 0.2 they are batch-invariant only after a switch, whose name depends on the fork."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import torch

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels.probes import Failure, product_failures
from true_on_policy.kernels.provider import Undo, device, imported, installed, undone_on_error

NAME = "deep_gemm"
# (setter, getter): of sgl-deep-gemm since 0.2, and of the fork that slime builds. Off, cuBLASLt may serve a product.
SWITCHES = (
    ("use_deterministic_algorithms", "get_deterministic_algorithms"),
    ("set_batch_invariant", "get_batch_invariant"),
)


def version() -> str | None:
    return installed("deep_gemm", "sgl-deep-gemm", "deep-gemm")


def settings() -> dict[str, str]:
    if version() is None:
        return {}
    library = sys.modules.get("deep_gemm")
    if library is None:
        return {"DeepGEMM switch": "not imported", "DeepGEMM mode": "not imported"}
    getters = [getter for _, getter in SWITCHES if hasattr(library, getter)]
    if not getters:
        return {"DeepGEMM switch": "none", "DeepGEMM mode": "always invariant"}
    on = all(getattr(library, getter)() for getter in getters)
    return {"DeepGEMM switch": ", ".join(getters), "DeepGEMM mode": "deterministic" if on else "cuBLASLt"}


def pin(contract: GpuContract) -> Undo:
    switches = _switches(imported("deep_gemm", "DeepGEMM"))
    states = [get() for _, get in switches]

    def undo() -> None:
        for (turn, _), before in zip(switches, states, strict=True):
            turn(before)

    with undone_on_error(undo, "DeepGEMM: the deterministic mode cannot be switched on"):
        for turn, get in switches:
            turn(True)
            if not get():
                raise RuntimeError(f"{turn.__name__}(True) has no effect")
    return undo


def probe(contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
    where = device()
    if version() is None:
        raise NotSeenError("not seen: deep_gemm is not installed")
    yield from product_failures("deep_gemm.bf16_gemm_nt", contract.dtype, shapes, where, product)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [M, K] by weight [N, K].T in DeepGEMM itself, whatever kernel aten::mm runs."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    import_module("deep_gemm").bf16_gemm_nt(x, weight, out)
    return out


def _switches(library: ModuleType) -> list[tuple[Callable, Callable]]:
    """List the library's setters and getters; none in versions whose products are always invariant."""
    switches = []
    for setter, getter in SWITCHES:
        if hasattr(library, setter) != hasattr(library, getter):
            raise PinError(f"DeepGEMM: of {setter} and {getter} it has one alone, so it cannot be read back")
        if hasattr(library, setter):
            switches.append((getattr(library, setter), getattr(library, getter)))
    return switches

"""Megatron-core's batch-invariant mode: Triton kernels under aten, and under Transformer Engine where it is present."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from torch import Tensor

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels import mode
from true_on_policy.kernels.probes import Failure, Product, aten_failures, over_ranks
from true_on_policy.kernels.provider import Held, Undo, device, findable, held, held_by, imported, installed

NAME = "megatron"
MODE = mode.Mode("Megatron-core", "megatron.core.transformer.custom_layers.batch_invariant_kernels")
# Megatron-core's name for the GEMM of a contract, in the versions that have several.
BACKENDS = {"triton_persistent": "triton", "deep_gemm": "deepgemm"}
# The module that row-parallel layers call in the fork radixark/Megatron-LM, branch miles-main.
FORK = "miles_megatron_plugins.true_on_policy.matmul"
TE = "transformer_engine"
TE_GEMM = f"{TE}.pytorch.cpp_extensions"
# Importing these two modules imports every module in which the mode replaces functions.
TE_ROOT, TE_WRAPPER = f"{TE}.pytorch", "megatron.core.extensions.transformer_engine"


def version() -> str | None:
    return installed("megatron.core", "megatron-core")


def settings() -> dict[str, str]:
    if version() is None:
        return {}
    return mode.settings(MODE) | {"te general_gemm": _te_gemm()}


def pin(contract: GpuContract) -> Undo:
    library, te = mode.load(MODE), _te_functions()
    arguments = _backend(library, BACKENDS[contract.trainer_gemm])

    def enable() -> None:
        with _without_te():
            library.enable_batch_invariant_mode(**arguments)

    def disable() -> None:
        try:
            with _without_te():
                library.disable_batch_invariant_mode()
        finally:
            for function in te:
                function.put_back()

    undo = mode.switch_on(MODE, enable, disable)
    if has_te() and _te_gemm() != MODE.module:
        undo()
        raise PinError(f"Megatron-core: the mode is on, but Transformer Engine multiplies by {_te_gemm()}")
    return undo


def probe(contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
    yield from aten_failures(contract.dtype, shapes, device())


def row_parallel() -> Product:
    """Build the o or down product over Megatron's tensor-parallel ranks from the fork's own function.

    The fork's function asks Megatron's groups for both sides' ranks; raises NotSeenError where either is missing.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if not findable(FORK):
        raise NotSeenError(f"not seen: no {FORK}, which the fork's o and down products run")
    if state is None or not state.model_parallel_is_initialized():
        raise NotSeenError("not seen: Megatron's groups, which the o and down products ask for the ranks")
    multiply = import_module(FORK).sglang_reference_matmul

    def share(x: Tensor, weight: Tensor) -> Tensor:
        off = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
        return multiply(x, weight, None, **dict.fromkeys(off, False), row_parallel=True)

    return over_ranks(share, state.get_tensor_model_parallel_world_size())


def has_te() -> bool:
    return findable(TE)


def _te_gemm() -> str:
    """Name the module of the function by which Transformer Engine multiplies; `absent` without Transformer Engine."""
    if not has_te():
        return "absent"
    module = sys.modules.get(TE_GEMM)
    return "not imported" if module is None else module.general_gemm.__module__


def _backend(library: ModuleType, wanted: str) -> dict[str, str]:
    """Return the argument that chooses the GEMM; none where this version of Megatron-core has Triton's alone."""
    if "backend" not in inspect.signature(library.enable_batch_invariant_mode).parameters:
        if wanted != "triton":
            raise PinError(f"Megatron-core: {version()} has Triton's GEMM alone; the contract wants {wanted}")
        return {}
    if library.is_batch_invariant_mode_enabled() and library.get_batch_invariant_backend() != wanted:
        raise PinError(
            f"Megatron-core: the mode is on with {library.get_batch_invariant_backend()!r}, and enabling "
            f"the mode again would keep that backend. Set --batch-invariant-backend {wanted}"
        )
    return {"backend": wanted}


@contextmanager
def _without_te() -> Iterator[None]:
    """Ignore the missing Transformer Engine: Megatron-core 0.16 raises for it after all overrides are in place."""
    try:
        yield
    except ModuleNotFoundError as error:
        if has_te() or (error.name or "").partition(".")[0] != TE:
            raise


def _te_functions() -> list[Held]:
    """Note which functions Transformer Engine's modules and its RMSNorm hold, before the mode replaces any."""
    if not has_te():
        return []
    root, _ = (imported(module, "Megatron-core, Transformer Engine") for module in (TE_ROOT, TE_WRAPPER))
    originals = held_by((TE, TE_WRAPPER))
    if hasattr(root, "RMSNorm"):
        originals.append(held(root.RMSNorm, "forward"))
    return originals

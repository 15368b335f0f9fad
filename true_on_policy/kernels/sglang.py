"""SGLang's batch-invariant mode in the trainer: DeepGEMM where a shape allows it, Triton elsewhere."""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import torch

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import PinError
from true_on_policy.kernels import mode
from true_on_policy.kernels.mode import accelerator_key, holder
from true_on_policy.kernels.probes import Failure, aten_failures, linear_once
from true_on_policy.kernels.provider import Undo, counted, device, installed

NAME = "sglang"
MODE = mode.Mode("SGLang", "sglang.srt.batch_invariant_ops.batch_invariant_ops")
# SGLang reads these two from the environment when it is imported, and not again.
MM_DEEPGEMM = "_ENABLE_MM_DEEPGEMM"
MM_FALLBACK_VARIANT = "_ENABLE_MM_FALLBACK_VARIANT"
VARIABLE = "SGLANG_BATCH_INVARIANT_OPS"


def version() -> str | None:
    return installed("sglang", "sglang")


def settings() -> dict[str, str]:
    if version() is None:
        return {}
    module = sys.modules.get(MODE.module)
    if module is None:
        own = dict.fromkeys(("MM DeepGEMM", "MM fallback variant"), "not imported")
    else:
        variant = getattr(module, MM_FALLBACK_VARIANT)
        own = {"MM DeepGEMM": _on(_takes_deep_gemm(module)), "MM fallback variant": _on(variant)}
    return mode.settings(MODE) | own


def pin(contract: GpuContract) -> Undo:
    library = mode.load(MODE)
    _refuse_variants(library, contract)
    undo = mode.switch_on(
        MODE,
        # The trainer's rope calls bmm and the engine's does not: bmm must stay as it is.
        lambda: library.enable_batch_invariant_mode(enable_bmm=False),
        library.disable_batch_invariant_mode,
    )
    if holder("bmm", accelerator_key()) is not None:
        undo()
        raise PinError(
            "SGLang: the mode is on with aten::bmm, which the trainer's rope calls and the engine's does not; "
            "enable the mode with enable_bmm=False"
        )
    return undo


def probe(contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
    where = device()
    if contract.trainer_gemm == "deep_gemm":
        _refuse_fallback(contract, shapes, where)
    yield from aten_failures(contract.dtype, shapes, where)


def _takes_deep_gemm(library: ModuleType) -> bool:
    return getattr(library, MM_DEEPGEMM) and library.ENABLE_JIT_DEEPGEMM


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _refuse_variants(library: ModuleType, contract: GpuContract) -> None:
    """Refuse a GEMM that SGLang has read from the environment and that is not the contract's."""
    if getattr(library, MM_FALLBACK_VARIANT):
        raise PinError(
            f"SGLang: {VARIABLE}_ENABLE_MM_FALLBACK_VARIANT is on, so that shapes which DeepGEMM cannot take run an "
            "einsum whose rows depend on the batch; set it to 0 before SGLang is imported"
        )
    if (contract.trainer_gemm == "deep_gemm") != _takes_deep_gemm(library):
        raise PinError(
            f"SGLang: the contract multiplies by {contract.trainer_gemm}, but DeepGEMM is "
            f"{_on(_takes_deep_gemm(library))} here; see {VARIABLE}_ENABLE_MM_DEEPGEMM, SGLANG_ENABLE_JIT_DEEPGEMM, "
            "and whether deep_gemm is installed"
        )


def _refuse_fallback(contract: GpuContract, shapes: Shapes, where: torch.device) -> None:
    """Refuse a shape that DeepGEMM does not take, for which SGLang silently runs Triton, with other bits."""
    deep_gemm = import_module("deep_gemm")
    for shape in shapes.linear:
        with counted(deep_gemm, "bf16_gemm_nn") as calls:
            linear_once(contract.dtype, shape, where)
        if not calls:
            raise PinError(
                f"SGLang: linear at {shape} in {contract.dtype} falls back from DeepGEMM to Triton; DeepGEMM wants "
                "bf16, at least 16 columns, and rows and columns of whole 16 bytes"
            )

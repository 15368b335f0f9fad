"""SGLang's weight checker, asked for our digests: what `/weights_checker` answers with our plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from true_on_policy.engines.digests import DIGESTS, VALUES, told

TARGET = "sglang.srt.utils.weight_checker.WeightChecker.handle"  # 0.5.23


def answered(
    original: Callable[..., Any],
    checker: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: Sequence[str] | None = None,
    *,
    role: str,
) -> Any:
    """Answer our two actions in the form of SGLang's checksum, and leave every other action to SGLang.

    Args:
        skip_tensor_list: for the action `VALUES`, the names of the weights to return.
    """
    if action not in (DIGESTS, VALUES):
        return original(checker, action, allow_quant_error, skip_tensor_list, role=role)
    held = checker._get_model().state_dict()  # parameters and persistent buffers; rope's tables are neither
    checksums = told(held, action, skip_tensor_list or ())
    parallelism = checker._parallelism_info(role=role).model_dump()
    return {"checksums": checksums, "per_gpu_checksum": "", "parallelism_info": parallelism}

"""SGLang's own server on the device, and its kernels in this process for a trainer; a dry run swaps both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from lab.gpu.plan import CONTRACT
from true_on_policy.engines.protocol import Engine
from true_on_policy.engines.server import inherited, named
from true_on_policy.engines.sglang.engine import Pool, SGLang, common_arguments
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels import flash_attention, precision, sglang
from true_on_policy.kernels.mode import load, switch_on

STOCK, DETERMINISTIC, TARGET = "stock", "deterministic", "on-policy target"
MODES = {STOCK: (), DETERMINISTIC: ("--enable-deterministic-inference",), TARGET: ("--rl-on-policy-target", "fsdp")}
PACKAGES = ("sglang", "sglang-kernel", "torch", "transformers")
ENGINES_FA3 = "sgl_kernel.flash_attn"


class OnGpu(SGLang):
    """SGLang's server in the environment of this process, on FlashAttention-3, with decode in CUDA graphs."""

    def __init__(self, checkpoint: Path, mode: str):
        pool = Pool()
        options = {
            "device": "cuda",
            "attention-backend": "fa3",
            "mem-fraction-static": 0.3,  # the trainer computes on the same device
            "cuda-graph-max-bs-decode": pool.running,
        }
        flags = ["--disable-prefill-cuda-graph", *named(options), *MODES[mode]]
        self._serve(
            checkpoint,
            Path(sys.executable),
            common_arguments(checkpoint, "bf16", pool) + flags,
            inherited() | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            seeded=mode != STOCK,
        )

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in PACKAGES}


def start(checkpoint: Path, mode: str) -> Engine:
    """Start SGLang's server.

    Raises:
        NotSeenError: SGLang is not installed, or the trainer's FlashAttention-3 would not be SGLang's own.
    """
    if sglang.version() is None:
        raise NotSeenError("not seen: no SGLang is installed; scripts/gpu/README.md has the steps")
    if flash_attention.interface() != ENGINES_FA3:
        raise NotSeenError(f"not seen: the trainer would run {flash_attention.interface()}, SGLang runs {ENGINES_FA3}")
    return OnGpu(checkpoint, mode)


@contextmanager
def kernels() -> Iterator[None]:
    """Run the body on the kernels of SGLang's target mode: batch-invariant, FlashAttention-3 in one split, no TF32."""
    library = load(sglang.MODE)
    enable = partial(library.enable_batch_invariant_mode, enable_bmm=False)
    with ExitStack() as stack:
        stack.callback(precision.pin())
        stack.callback(switch_on(sglang.MODE, enable, library.disable_batch_invariant_mode))
        stack.callback(flash_attention.pin(CONTRACT))
        yield


def in_force() -> dict[str, str]:
    """Read which kernels are in force, inside `kernels`."""
    return sglang.settings() | flash_attention.settings()

"""SGLang's own server on the device, and its kernels in this process for a trainer; a dry run swaps both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from lab.gpu import qwen3
from lab.gpu.kernels import installed
from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT
from true_on_policy.engines.protocol import Engine, Request, Sample
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


class StandIn:
    """A stand-in for the server in a dry run: a network that decodes from a cache, on the kernels of the dry run.

    The real server needs a GPU. In the mode of the on-policy target, decode takes log_softmax in bf16, otherwise
    in float32.
    """

    name = "stand-in"

    def __init__(self, machine: Cuda, checkpoint: Path, mode: str):
        self._kernels = nullcontext if mode == STOCK else installed
        self._dtype = torch.bfloat16 if mode == TARGET else torch.float32
        self._machine = machine
        self.update_weights(checkpoint, 0)

    def versions(self) -> dict[str, str]:
        return {}

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        with self._kernels(), torch.autocast("cpu", torch.bfloat16):
            return [self._sample(request) for request in requests]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        with self._kernels(), torch.autocast("cpu", torch.bfloat16):
            scored = (qwen3.log_probs(self._network, torch.tensor([one.sequence]))[0] for one in samples)
            return [row[-len(one.tokens) :] for row, one in zip(scored, samples, strict=True)]

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        self._network, self._version = qwen3.load(checkpoint, self._machine), version

    def close(self) -> None:
        """Do nothing: the stand-in has no process beside this one."""

    def _sample(self, request: Request) -> Sample:
        random, prompt = torch.Generator().manual_seed(request.seed), torch.tensor([request.prompt])
        tokens, log_probs = qwen3.sampled(self._network, prompt, request.length, random, self._dtype)
        return Sample(request, tuple(tokens[0].tolist()), log_probs[0], self._version)

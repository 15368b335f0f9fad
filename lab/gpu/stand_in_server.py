"""A stand-in for SGLang's server in a dry run: a network that decodes from a cache, on the kernels of the dry run.

The real server needs a GPU. In the mode of the on-policy target, decode takes log_softmax in bf16, otherwise
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from lab.gpu import qwen3
from lab.gpu.machine import Cuda
from lab.gpu.pins import installed
from lab.gpu.sglang_server import STOCK, TARGET
from true_on_policy.engines.protocol import Request, Sample


class StandIn:
    name = "stand-in"

    def __init__(self, checkpoint: Path, mode: str, machine: Cuda):
        self._kernels = nullcontext if mode == STOCK else installed
        self._dtype = torch.bfloat16 if mode == TARGET else torch.float32
        self._machine = machine
        self.update_weights(checkpoint, 0)

    def versions(self) -> dict[str, str]:
        return {}

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        with self._kernels():
            return [self._sample(request) for request in requests]

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        with self._kernels():
            return [self._score(sample) for sample in samples]

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        self._network, self._version = qwen3.load(checkpoint, self._machine), version

    def close(self) -> None:
        """Do nothing: the stand-in has no process beside this one."""

    def _sample(self, request: Request) -> Sample:
        random = torch.Generator().manual_seed(request.seed)
        cache, step, tokens, found = DynamicCache(config=self._network.config), request.prompt, [], []
        for _ in range(request.length):
            logits = self._logits(step, past_key_values=cache, use_cache=True)[-1]
            scored = logits.to(self._dtype).log_softmax(-1).float()
            step = (int(scored.exp().multinomial(1, generator=random)),)
            tokens.append(step[0])
            found.append(scored[step[0]])
        return Sample(request, tuple(tokens), torch.stack(found), self._version)

    def _score(self, sample: Sample) -> Tensor:
        scored = self._logits(sample.sequence)[:-1].float().log_softmax(-1)
        sampled = torch.tensor(sample.tokens)
        return scored[-len(sampled) :].gather(1, sampled[:, None])[:, 0]

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int], **cached) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self._network(input_ids=torch.tensor([tokens]), **cached).logits[0]

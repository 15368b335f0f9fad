"""Does a Qwen3 that decodes from its cache sample with the trainer's log-probs? Compared by bytes, in bf16.

Trainer and decode path are Hugging Face's Qwen3 on FlashAttention-3. The trainer computes whole sequences, all in one
batch or each alone; the decode path computes one token of each sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from lab.gpu import qwen3
from lab.gpu.kernels import installed
from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.receipt import Result, compared
from true_on_policy.verify.certificate import link

KERNELS = {"stock": nullcontext, "pinned": installed}


@torch.no_grad()
def model(plan: Plan, machine: Cuda) -> Iterator[Result]:
    network = qwen3.build(plan.model, machine, qwen3.FA3)
    for name, kernels in KERNELS.items():
        with kernels():
            tokens, decoded = _sample(network, plan, machine)
            together = qwen3.log_probs(network, tokens)
            alone = torch.cat([qwen3.log_probs(network, row[None]) for row in tokens])
        sampled = slice(plan.decoded[1] - 1, None)
        found = (
            link("trainer: alone == in one batch", _rows(alone), _rows(together)),
            link("decode == trainer", _rows(decoded), _rows(together[:, sampled])),
        )
        yield compared(f"A Qwen3 on {name} kernels", found, demanded=name == "pinned")


def _sample(network, plan: Plan, machine: Cuda) -> tuple[Tensor, Tensor]:
    """Sample; return prompts with their sampled tokens [B, T], and the log-prob of each sampled token [B, sampled]."""
    count, prompt, length = plan.decoded
    random = torch.Generator(machine.device).manual_seed(0)
    tokens = torch.randint(plan.model.vocab, (count, prompt), generator=random, device=machine.device)
    drawn, measured = qwen3.sampled(network, tokens, length, random)
    return torch.cat([tokens, drawn], 1), measured


def _rows(x: Tensor) -> list[Tensor]:
    return list(x.cpu())

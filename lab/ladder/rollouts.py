"""Rollouts on one rung: sampled by an engine, scored by trainers, kept in one file that a later run takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lab.host.rollout.serving import SERVING
from lab.ladder.shipped import commits
from lab.ladder.statistics import Pair
from mis_plugins.shared.arrays import Safetensors, save_safetensors
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.protocol import Engine
from true_on_policy.trainers.megatron import Megatron

BATCH = 32  # a batch waits for its longest response: batches of 8 would wait four times as often


@dataclass(frozen=True)
class Rollouts:
    """Sampled responses of one rung, packed end to end.

    behavior: log-probs that the engine sampled with.
    proximal: log-probs of each trainer, by its name.
    lengths: the length of each response.
    prompts: the index of each response's prompt.
    words: what made them: versions, settings and commit, as texts.
    """

    behavior: Tensor
    proximal: Mapping[str, Tensor]
    lengths: Tensor
    prompts: Tensor
    words: Mapping[str, str]

    def save(self, path: Path) -> None:
        trained = {f"trainer {name}": values for name, values in self.proximal.items()}
        tensors = {"behavior": self.behavior, "lengths": self.lengths, "prompts": self.prompts, **trained}
        save_safetensors(path, tensors, self.words)

    @classmethod
    def load(cls, path: Path) -> Rollouts:
        tensors, words = load_file(path), Safetensors(path).metadata
        named = {name.removeprefix("trainer "): tensors[name] for name in tensors if name.startswith("trainer ")}
        return cls(tensors["behavior"], named, tensors["lengths"], tensors["prompts"], words)

    def followed_by(self, more: Rollouts) -> Rollouts:
        """Return the rollouts of both files, joined; the words name every commit."""
        return Rollouts(
            torch.cat([self.behavior, more.behavior]),
            {name: torch.cat([self.proximal[name], more.proximal[name]]) for name in self.proximal},
            torch.cat([self.lengths, more.lengths]),
            torch.cat([self.prompts, more.prompts]),
            {**more.words, "commit": commits([self.words, more.words])},
        )

    def pairs(self) -> dict[str, Pair]:
        """Pair the engine's log-probs with the log-probs of each trainer, by the trainer's name."""
        return {
            name: Pair(self.behavior, proximal, self.lengths, self.prompts) for name, proximal in self.proximal.items()
        }


@dataclass(frozen=True)
class Amount:
    """How much is sampled on a rung: the least numbers of prompts and of tokens, and at most how much at a time."""

    prompts: int
    tokens: int
    most: int = BATCH

    def share(self, rollouts: Rollouts | None) -> float:
        """Return the share of the amount that the rollouts hold; 1 or more is enough."""
        if rollouts is None:
            return 0.0
        return min(len(rollouts.lengths) / self.prompts, len(rollouts.behavior) / self.tokens)

    def batch(self, done: int) -> int:
        """Return how many responses to sample next: for missing prompts, or a whole batch for more tokens."""
        lacking = self.prompts - done
        return min(lacking, self.most) if lacking > 0 else self.most


def start_engine(name: str, checkpoint: Path) -> Engine:
    """Start a stock engine in bf16, as a training run would."""
    if name in SERVING:
        return SERVING[name].start(checkpoint, "bf16", None, BATCH)
    return ENGINES[name].start(checkpoint, Contract(dtype="bf16"), None)


def start_trainer(checkpoint: Path, dtype: str, fp32_head: bool) -> Megatron:
    """Start stock Megatron-core; with `fp32_head` its logits are computed in float32."""
    trainer = Megatron(checkpoint, dtype)
    if fp32_head:
        _widen_head(trainer.model)
    return trainer


def _widen_head(model: Any) -> None:
    """Make a Megatron model multiply with its LM head in float32."""
    head = model.output_layer

    def forward(hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        return F.linear(hidden.float(), (head.weight if weight is None else weight).float()), None

    head.forward = forward

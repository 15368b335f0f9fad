"""The opening of a run: how much of the trainer's policy the engine samples, before the run's own config moved both.

A run that starts anew with another config meets the same opening; its later rollouts depend on its own
config.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.metrics.rows import Tokens
from mis_plugins.report.batches import Batch

SHARE = 0.1  # of the steps


@dataclass(frozen=True)
class Opening:
    """Numbers of the first steps of a run.

    steps: number of these first steps.
    of: number of all steps that were read.
    kl_k3: mean over the tokens of these first steps.
    response_overlap: mean of min(1, product of the ratios of a response): 1 less the total variation distance of both
        policies over whole responses. The bound holds its noise below 1 / (2 sqrt(responses)).
    """

    steps: int
    of: int
    kl_k3: float
    response_overlap: float


@dataclass
class FirstSteps:
    """Sums of each step: min(1, product), responses, k3, and tokens."""

    sums: dict[int, Float[Tensor, " 4"]] = field(
        default_factory=lambda: defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    )

    def add(self, batch: Batch, tokens: Tokens) -> None:
        total, usable, k3 = batch.ragged.sums(tokens.log_ratio, tokens.usable, tokens.k3)
        overlap = total.clamp(max=0).exp()[usable > 0]
        added = (overlap.sum(), torch.tensor(float(overlap.numel())), k3.sum(), usable.sum())
        self.sums[batch.step] += torch.stack([value.double() for value in added])

    def numbers(self) -> Opening | None:
        """The numbers of the first tenth of the steps; None without a token whose ratio is known."""
        count = math.ceil(SHARE * len(self.sums))
        first = sum((self.sums[step] for step in sorted(self.sums)[:count]), torch.zeros(4))
        overlap, responses, k3, tokens = first.tolist()
        if not responses:
            return None
        return Opening(count, len(self.sums), k3 / tokens, overlap / responses)

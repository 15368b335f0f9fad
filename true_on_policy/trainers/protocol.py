"""The protocol of a trainer: it computes the log-probs of a batch's sampled tokens under a checkpoint's weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from true_on_policy.engines.protocol import Sample


@runtime_checkable
class Trainer(Protocol):
    """A trainer of the proof; a trainer in this process computes on the kernels that are pinned when it is called."""

    name: str

    def load(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint, whose shapes must be those of the model."""
        ...

    def log_probs(self, batch: Sequence[Sample], temperatures: Sequence[float]) -> list[Float32[Tensor, "_"]]:
        """Compute the log-prob of each sampled token in one pass, each sequence at its temperature."""
        ...

    def close(self) -> None: ...


class InProcess:
    """A trainer in this process, whose log-probs come from the logits of whole sequences."""

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ V"]]:
        """Compute the logits of each sequence, in one pass over all sequences."""
        raise NotImplementedError

    @torch.no_grad()
    def log_probs(self, batch: Sequence[Sample], temperatures: Sequence[float]) -> list[Float32[Tensor, "_"]]:
        parts = self.logits([sample.sequence for sample in batch])
        return [
            sampled_log_probs(logits, sample, temperature)
            for logits, sample, temperature in zip(parts, batch, temperatures, strict=True)
        ]

    def close(self) -> None:
        """Do nothing: the trainer has no process beside this one."""


def sampled_log_probs(logits: Float[Tensor, "T V"], sample: Sample, temperature: float) -> Float32[Tensor, "N"]:
    """Compute log_softmax(logits / temperature) of a sequence's sampled tokens, from the logits at its T positions.

    This formula agrees with SGLang's to the bit: in float32, a division (not a product with the inverse), and
    log_softmax (not logits less logsumexp, nor Megatron's vocab_parallel_cross_entropy).
    """
    first = len(sample.request.prompt) - 1
    rows = logits[first : first + len(sample.tokens)].float() / torch.tensor(temperature)
    picked = torch.log_softmax(rows, -1).gather(1, torch.tensor(sample.tokens)[:, None])
    return picked[:, 0]

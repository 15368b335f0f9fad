"""Log-probs by an engine of the embedded host in one pass over whole sequences, beside what it gave step by step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.host.model.decoder import LeftPadded
from lab.host.model.engine import DecodeEngine


@torch.no_grad()
def teacher_forced(
    engine: DecodeEngine, sequences: Sequence[Sequence[int]], response_lengths: Sequence[int], temperature: float = 1.0
) -> list[Tensor]:
    """Log-probs of the last `response_lengths[i]` tokens of each sequence."""
    batch = LeftPadded.of(sequences)
    logits = engine.decoder.forward(batch.tokens, engine.decoder.cache(batch, 0))[:, :-1]
    log_probs = (logits.float() / temperature).log_softmax(-1)
    picked = log_probs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    return [row[picked.shape[1] - length :] for row, length in zip(picked, response_lengths, strict=True)]

"""Log-probs by the trainer's weights, of sequences that rank 0 asks for and all ranks compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mis_plugins.local.batch import pack
from mis_plugins.local.parallel import ParallelState
from mis_plugins.local.trainer import Trainer

Asked = tuple[Sequence[Sequence[int]], Sequence[int]]


class Scoring:
    """A `recompute.Score`. Within `serving`, rank 0 calls it as often as it likes, while the others answer."""

    def __init__(self, trainer: Trainer, state: ParallelState) -> None:
        self.trainer, self.state = trainer, state

    def __call__(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
        _broadcast((sequences, counts))
        return self._score(sequences, counts)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Collective: rank 0 runs its body, the others leave it at once and answer until that has ended."""
        if dist.get_rank() == 0:
            try:
                yield
            finally:
                _broadcast(None)
            return
        yield
        while (asked := _broadcast(None)) is not None:
            self._score(*asked)

    def _score(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
        tokens = [torch.tensor(sequence) for sequence in sequences]
        scored = self.trainer.log_probs({"tokens": tokens, "response_lengths": list(counts)})
        cp = self.state.cp
        if cp.size > 1:
            whole = torch.zeros(sum(counts))
            whole[pack(tokens, counts, cp.rank, cp.size).response_index] = torch.cat(scored)
            dist.all_reduce(whole, group=cp.group)
            scored = list(whole.split(list(counts)))
        return [one.tolist() for one in scored]


def _broadcast(asked: Asked | None) -> Asked | None:
    shared = [asked]
    dist.broadcast_object_list(shared)
    return shared[0]

"""Log-probs by the trainer's weights, of sequences that rank 0 asks for and all ranks compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lab.host.asynchronous.pool import Batch
from lab.host.train.batch import pack
from lab.host.train.parallel import ParallelState, of_each_rank, of_rank_0
from lab.host.train.trainer import Trainer

Scores = list[list[float]]


class Scoring:
    """A `recompute.Score`, of up to as many batches as there are data-parallel ranks.

    Within `serving`, rank 0 calls it as often as it likes, while the others answer.
    """

    def __init__(self, trainer: Trainer, state: ParallelState) -> None:
        self.trainer, self.state = trainer, state

    def __call__(self, batches: Sequence[Batch]) -> list[Scores]:
        assert 0 < len(batches) <= self.state.effective_dp.size
        of_rank_0(batches)
        return self._answer(batches)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Rank 0 runs the body; other ranks leave it at once and answer until rank 0 is done. Collective."""
        if dist.get_rank() == 0:
            try:
                yield
            finally:
                of_rank_0(None)
            return
        yield
        while (asked := of_rank_0(None)) is not None:
            self._answer(asked)

    def _answer(self, batches: Sequence[Batch]) -> list[Scores]:
        """Each data-parallel rank scores the batch that has its number; every rank gets all scores."""
        dp = self.state.effective_dp
        mine = self._score(*batches[dp.rank]) if dp.rank < len(batches) else []
        return of_each_rank(mine, dp.group)[: len(batches)]

    def _score(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> Scores:
        tokens = [torch.tensor(sequence) for sequence in sequences]
        data = {"tokens": tokens, "response_lengths": list(counts)}
        scored = self.trainer.log_probs(data, micro_batch_size=len(tokens))
        cp = self.state.cp
        if cp.size > 1:
            whole = torch.zeros(sum(counts))
            whole[pack(tokens, counts, cp.rank, cp.size).response_index] = torch.cat(scored)
            dist.all_reduce(whole, group=cp.group)
            scored = list(whole.split(list(counts)))
        return [one.tolist() for one in scored]

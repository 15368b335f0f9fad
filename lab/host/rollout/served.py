"""A rollout engine of `true_on_policy` behind the loop's protocol: one for all ranks, fed by checkpoints on disk.

The engine samples as many tokens as it is asked for; a response is cut after its first end of sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling
from lab.host.model.engine import Generation
from lab.host.train.parallel import of_each_rank, of_rank_0
from true_on_policy.engines.protocol import Cut, Engine, Request, Sample
from true_on_policy.errors import DifferenceError
from true_on_policy.models.tiny import config_of
from true_on_policy.weights.comparison import compare


class Served:
    """An engine of `true_on_policy` that the first weights start, and that takes weights as checkpoints on disk.

    Args:
        start: makes the engine from the first checkpoint.
    """

    def __init__(self, config: ModelConfig, start: Callable[[Path], Engine]) -> None:
        self.version = -1
        self._config, self._start = config, start
        self._folder = TemporaryDirectory(prefix="mis-weights-")
        self._engine: Engine | None = None

    def hand_over(self, weights: Mapping[str, Tensor], version: int, keep_cache: bool = False) -> None:
        """Hand the weights over as a checkpoint on disk.

        Raises:
            EngineError: the engine did not start, or refuses them.
        """
        checkpoint = Path(self._folder.name) / str(version)
        config_of(self._config.family, self._config, next(iter(weights.values())).dtype).save_pretrained(checkpoint)
        save_file(dict(weights), checkpoint / "model.safetensors", {"format": "pt"})
        if self._engine is None:
            self._engine = self._start(checkpoint)
        self._engine.update_weights(checkpoint, version, keep_cache)
        rmtree(checkpoint)

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
        self._folder.cleanup()


class ServedEngine(Served):
    """A `RolloutEngine` whose methods are collective: rank 0 holds the engine and samples for all in one batch.

    Args:
        start: makes the engine from the first checkpoint; called on rank 0 alone.
        cut: what top-p and top-k leave to sample from; None is the whole vocabulary.
    """

    def __init__(self, config: ModelConfig, start: Callable[[Path], Engine], cut: Cut | None = None) -> None:
        super().__init__(config, start)
        self._cut = cut

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        if dist.get_rank() == 0:
            self.hand_over(weights, version)
        self.version = version
        dist.barrier()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Generation]:
        requests = [
            Request(tuple(prompt), sampling.max_new_tokens, seed, sampling.temperature, self._cut)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [_until(sampling.eos, sample) for sample in self._on_rank_0(requests)]

    def _on_rank_0(self, requests: list[Request]) -> list[Sample]:
        """Sample the requests of all ranks in one batch on rank 0, and return the samples of this rank."""
        asked, answers = of_each_rank(requests), None
        if dist.get_rank() == 0:
            assert self._engine is not None
            samples = iter(self._engine.generate([request for share in asked for request in share]))
            answers = [[next(samples) for _ in share] for share in asked]
        return of_rank_0(answers)[dist.get_rank()]

    def check_weights(self, weights: Mapping[str, Tensor]) -> int:
        """Compare every tensor of the engine with the trainer's weights, and return how many there are.

        Raises:
            DifferenceError: a tensor differs; on every rank.
            NotSeenError: the engine does not tell its weights.
        """
        engine: Any = self._engine  # the command line asks only engines that return digests of their weights
        comparison = of_rank_0(compare(engine.weights_checker, weights) if dist.get_rank() == 0 else None)
        if not comparison.equal:
            raise DifferenceError(f"--check-weights-every, weights {self.version}: {comparison}")
        return comparison.compared


def _until(eos: int, sample: Sample) -> Generation:
    """The response up to its first end of sequence; whole where there is none."""
    ends = [place for place, token in enumerate(sample.tokens, 1) if token == eos]
    length = ends[0] if ends else len(sample.tokens)
    log_probs = tuple(sample.log_probs[:length].tolist())
    kept = None if sample.kept is None else sample.kept[:length]
    return Generation(sample.tokens[:length], log_probs, sample.version, kept=kept)

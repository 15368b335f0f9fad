"""The rollouts of an asynchronous run, the same on every rank, and what it cost to get them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from lab.host.asynchronous.controller import Controller, Settings, Wanted
from lab.host.asynchronous.measure import measured, segment_wise
from lab.host.asynchronous.pool import recompute
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.scoring import Scoring
from lab.host.cli.arguments import register_hooks
from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling
from lab.host.model.engine import Generation
from lab.host.rollout.sample import Sample, make_samples
from lab.host.rollout.sampler import Rollout, draw, judged
from lab.host.rollout.tasks import Problem, Task
from lab.host.train.parallel import ParallelState, of_rank_0
from lab.host.train.trainer import RolloutData, Trainer
from mis_plugins.metrics.staleness import AGES, COLUMNS
from mis_plugins.versions.segment_wise import STORED_FROM
from mis_plugins.versions.spans import run_lengths

Row = dict[str, int | float]


class AsynchronousRollouts:
    """The loop's source of rollouts with `--async`, in place of an engine. Rank 0 generates.

    Args:
        excluded: prompts that are held out.
        weights: the trainer's weights before rollout `first`.
    """

    def __init__(
        self,
        args: Namespace,
        task: Task,
        config: ModelConfig,
        state: ParallelState,
        trainer: Trainer,
        excluded: Collection[tuple[int, ...]],
        weights: Mapping[str, Tensor],
        first: int,
    ) -> None:
        self.args, self.task, self.state, self.trainer = args, task, state, trainer
        self.excluded, self.published = excluded, weights
        self.measures = segment_wise(args)
        self.scoring = Scoring(trainer, state)
        self.row: Row = {}
        self._seconds_a_token: dict[int, float] = defaultdict(float)
        self.controller = self._controller(config, first) if dist.get_rank() == 0 else None
        if self.controller is not None:
            if self.recomputes:
                self.controller.hooks.register("pre_pause", self._recompute, "recompute")
            register_hooks(self.controller.hooks, args)

    @property
    def recomputes(self) -> bool:
        """Whether any token may grow old enough to need a stored log-prob under its next version."""
        stored = self.measures is not None and self.measures.enabled and self.measures.method == "recompute"
        return stored and self.args.max_head_offpolicyness >= STORED_FROM

    def rollout(self, rollout_id: int) -> Rollout:
        """Wait for a rollout. Collective."""
        problems, _ = self._drawn(rollout_id)
        responses = of_rank_0(self.controller.rollout(rollout_id) if self.controller else None)
        self.row |= ages(rollout_id, responses, self._seconds_a_token)
        samples = samples_of(self.task, problems, responses, self.args.n_samples_per_prompt)
        return judged(self.args, samples, rollout_id)

    def measure(self, data: RolloutData) -> None:
        """Note a rollout's weights by age. Collective."""
        if self.measures is not None:
            self.row |= measured(self.state, data, self.measures)

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Score the tokens that need the present weights, then publish the next version's. Collective."""
        if self.recomputes:
            with self.trainer.holding(self.published), self.scoring.serving():
                self._update(weights)
        else:
            self._update(weights)

    def take_row(self) -> Row:
        """Numbers that were noted since the last call."""
        taken, self.row = self.row, {}
        if self.controller is not None:
            tally = self.controller.take_tally()
            taken |= {"wait_seconds": tally.waited, "pause_seconds": tally.paused}
        return taken

    def close(self) -> None:
        """End generation."""
        if self.controller is not None:
            self.controller.close()

    def _update(self, weights: Mapping[str, Tensor]) -> None:
        if self.controller is None:
            self.published = weights
            return
        before = self.controller.version
        try:
            self.controller.update(weights)
        finally:  # a hook that raises may do so after the weights have moved
            if self.controller.version != before:
                self.published = weights

    def _controller(self, config: ModelConfig, first: int) -> Controller:
        args = self.args
        sampling = Sampling(self.task.max_response, args.rollout_temperature, self.task.eos)
        settings = Settings(
            config,
            args.rollout_weights,
            sampling,
            args.pause_generation_mode,
            args.rollout_step_seconds,
            args.rollout_steps_per_update,
            args.max_concurrent_rollouts,
            args.rollout_engine,
            shares=dist.get_world_size(),
        )
        rollouts = range(first, args.num_rollout)
        return Controller(settings, args.max_head_offpolicyness, self._wanted, rollouts, self.published)

    def _drawn(self, rollout_id: int) -> tuple[list[Problem], list[int]]:
        return draw(self.args, self.task, (self.args.seed, "rollout", rollout_id), self.excluded)

    def _wanted(self, rollout_id: int) -> list[Wanted]:
        return [Wanted(problem.prompt, seed) for problem, seed in zip(*self._drawn(rollout_id), strict=True)]

    def _recompute(self) -> None:
        """The hook before a pause: the trainer holds the weights that still generate."""
        assert self.controller is not None
        began, version = time.perf_counter(), self.controller.version
        done = recompute(
            self.controller.pool,
            version,
            self.args.recompute_token_budget,
            self.scoring,
            ranks=self.state.effective_dp.size,
        )
        seconds = time.perf_counter() - began
        self._seconds_a_token[version - 1] = seconds / max(1, done.tokens)
        self.row |= {
            "recompute/seconds": seconds,
            "recompute/tokens": done.tokens,
            "recompute/scored": done.scored,
            "recompute/batches": done.batches,
        }


def ages(version: int, responses: Sequence[Response], seconds_a_token: Mapping[int, float]) -> Row:
    """Number of tokens of each age, and the seconds that recomputing them took.

    Args:
        version: the trainer's version.
        seconds_a_token: seconds of the recompute, by the version that wrote the token.
    """
    count: Row = defaultdict(int)
    seconds: Row = defaultdict(float)
    for response in responses:
        for wrote, stored in zip(response.versions, response.recomputed, strict=True):
            column = COLUMNS[min(version - wrote, AGES - 1)]
            count[f"staleness/tokens/{column}"] += 1
            if stored is not None:
                seconds[f"recompute/seconds/{column}"] += seconds_a_token[wrote]
    stale = sum(sum(response.stale_cache) for response in responses)
    return {**dict(sorted(count.items())), **dict(sorted(seconds.items())), "stale_cache_tokens": stale}


def samples_of(task: Task, problems: Sequence[Problem], responses: Sequence[Response], group_size: int) -> list[Sample]:
    """Samples of `make_samples` with the version of each token and the recomputed log-probs."""
    generations = [Generation(one.tokens, one.log_probs, one.newest) for one in responses]
    samples = make_samples(task, problems, generations, group_size)
    return [
        replace(
            sample,
            weight_versions=[str(version) for version in run_lengths(response.versions)[::2]],
            output_versions=list(response.versions),
            recomputed_log_probs=list(response.recomputed),
        )
        for sample, response in zip(samples, responses, strict=True)
    ]

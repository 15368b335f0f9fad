"""A sampled response on its way to the trainer, as the hosts hand it to `--rollout-sample-filter-path`."""

from __future__ import annotations

import enum
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lab.host.cli.loading import load_function
from lab.host.model.engine import Generation
from lab.host.rollout.tasks import Problem, Task
from lab.host.train.parallel import of_rank_0
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS


class Status(enum.Enum):
    """How a response ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """A sampled response with the fields of the hosts' `Sample` that a run on CPU has. A filter may change them.

    tokens: the prompt, then the response.
    rollout_log_probs: log-probs of the response's tokens under the rollout engine.
    weight_versions: for each generation call, the version of its last token.
    output_versions: the version of each token of the response, -1 where no version wrote it; None where nobody knows.
    recomputed_log_probs: log-prob of each token under the version after the token's; None where it was not stored.
    loss_mask: which tokens of the response are valid; None makes all of them valid.
    rollout_routed_experts: [tokens - 1, layers, top k], the experts that each token took in the rollout engine; None
        in a dense model, and from an engine that does not tell.
    rollout_top_p_token_ids, rollout_top_p_token_offsets: the tokens that each token of the response was sampled from,
        set after set, and where each set begins and the last one ends, as in slime; None without top-p and top-k.
    rollout_topk_token_ids, rollout_topk_log_probs: the engine's likeliest tokens at each position of the response, as
        in Miles; None where none were asked for.
    remove_sample: whether to leave the sample out of the loss, though not out of its group's advantages.
    """

    index: int
    group_index: int
    tokens: list[int]
    response_length: int
    reward: float
    rollout_log_probs: list[float] | None
    weight_versions: list[str]
    status: Status
    output_versions: list[int] | None = None
    recomputed_log_probs: list[float | None] | None = None
    loss_mask: list[int] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout_routed_experts: Tensor | None = field(default=None, compare=False)
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_topk_token_ids: Tensor | None = field(default=None, compare=False)
    rollout_topk_log_probs: Tensor | None = field(default=None, compare=False)

    @property
    def mask(self) -> list[int]:
        """The loss mask in force."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask


def make_samples(
    task: Task, problems: Sequence[Problem], generations: Sequence[Generation], group_size: int
) -> list[Sample]:
    """Make a sample with a reward of each response; responses of one prompt lie next to each other."""
    pairs = zip(problems, generations, strict=True)
    return [
        Sample(
            index=index,
            group_index=index // group_size,
            tokens=[*problem.prompt, *generation.tokens],
            response_length=len(generation.tokens),
            reward=task.reward(problem, generation.tokens),
            rollout_log_probs=list(generation.log_probs),
            weight_versions=[str(generation.version)],
            output_versions=[generation.version] * len(generation.tokens),
            rollout_routed_experts=generation.routes,
            **_kept(generation),
            **dict(zip((HEAD_IDS, HEAD_LOG_PROBS), generation.named or (None, None), strict=True)),
            status=Status.COMPLETED if generation.tokens[-1:] == (task.eos,) else Status.TRUNCATED,
        )
        for index, (problem, generation) in enumerate(pairs)
    ]


def _kept(generation: Generation) -> dict[str, Any]:
    """The two fields that hold what each token was sampled from, where the engine cut."""
    if generation.kept is None:
        return {}
    ids, offsets = chain.from_iterable(generation.kept), accumulate(map(len, generation.kept), initial=0)
    return {"rollout_top_p_token_ids": list(ids), "rollout_top_p_token_offsets": list(offsets)}


def filtered(args: Namespace, samples: list[Sample]) -> list[Sample]:
    """Samples after `--rollout-sample-filter-path`, called on rank 0 with groups of samples. Collective."""
    path, size = args.rollout_sample_filter_path, args.n_samples_per_prompt
    if path is None:
        return samples
    if dist.get_rank() == 0:
        groups = [samples[start : start + size] for start in range(0, len(samples), size)]
        load_function(path, "--rollout-sample-filter-path")(args, groups)
    return of_rank_0(samples)

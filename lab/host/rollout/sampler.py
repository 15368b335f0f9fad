"""One rollout: prompts, sampled responses, rewards, and the shard of them that a data-parallel rank trains on.

Every random choice is derived from `--seed`, the rollout and the sample. So a resumed run, another layout of ranks or
a paired run sees the same prompts and the same draws.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from lab.host.asynchronous.response import written
from lab.host.model.decoding import Sampling
from lab.host.model.engine import Generation, RolloutEngine
from lab.host.model.replay import ROUTES
from lab.host.rollout.sample import Sample, filtered, make_samples
from lab.host.rollout.tasks import Problem, Task
from lab.host.train.batch import Layout, pack
from lab.host.train.log_probs import IDS, OFFSETS
from lab.host.train.parallel import ParallelState, of_each_rank
from lab.host.train.trainer import RolloutData
from mis_plugins.config import reading
from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import uncorrected
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS
from mis_plugins.versions.segment_wise import Written, admitted

MAX_DRAWS = 1000


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for one named random choice."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_problems(
    task: Task, count: int, seed: int, excluded: Collection[tuple[int, ...]] = frozenset()
) -> list[Problem]:
    """`count` problems whose prompts are not among `excluded`.

    Raises:
        ConfigError: hardly any prompt is left.
    """
    generator = torch.Generator().manual_seed(seed)
    problems: list[Problem] = []
    for _ in range(MAX_DRAWS):
        drawn = task.sample(count - len(problems), generator)
        problems += [problem for problem in drawn if problem.prompt not in excluded]
        if len(problems) == count:
            return problems
    raise ConfigError("--eval-prompts holds out nearly every prompt there is; give fewer, or more --num-digits")


def sample_responses(
    engine: RolloutEngine,
    task: Task,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    temperature: float,
    named: int = 0,
) -> list[Generation]:
    """One response a problem. Every rank decodes its share of them and receives all. Collective.

    Args:
        named: how many of the likeliest tokens the engine names at each position.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sampling = Sampling(task.max_response, temperature, task.eos, named)
    mine = engine.generate([one.prompt for one in problems[rank::size]], sampling, seeds[rank::size])
    shares = of_each_rank(mine)
    return [shares[index % size][index // size] for index in range(len(problems))]


@dataclass(frozen=True)
class Rollout:
    """A whole rollout, the same on every rank; one entry a sample, those of a prompt next to each other.

    `version` is the trainer's when it trains on the rollout; None where tokens shall have no versions.
    """

    samples: list[Sample]
    advantages: Tensor  # [samples]
    version: int | None = None


def collect(
    args: Namespace,
    task: Task,
    engine: RolloutEngine,
    stream: tuple[int | str, ...],
    excluded: Collection[tuple[int, ...]],
) -> Rollout:
    """Sample each of `--rollout-batch-size` prompts `--n-samples-per-prompt` times, and filter. Collective.

    `stream` names the random choices.
    """
    problems, seeds = draw(args, task, stream, excluded)
    temperature, named = args.rollout_temperature, args.rollout_top_logprobs_num
    generations = sample_responses(engine, task, problems, seeds, temperature, named)
    return judged(args, make_samples(task, problems, generations, args.n_samples_per_prompt), engine.version)


def draw(
    args: Namespace, task: Task, stream: tuple[int | str, ...], excluded: Collection[tuple[int, ...]]
) -> tuple[list[Problem], list[int]]:
    """Problems of a rollout, each repeated as often as it is sampled, and the seed of each sample."""
    prompts = draw_problems(task, args.rollout_batch_size, derive_seed(*stream, "prompts"), excluded)
    problems = [problem for problem in prompts for _ in range(args.n_samples_per_prompt)]
    return problems, [derive_seed(*stream, "sample", index) for index in range(len(problems))]


def judged(args: Namespace, samples: list[Sample], version: int | None) -> Rollout:
    """Filter the samples and compute their advantages, to be trained on at `version`. Collective."""
    samples = filtered(args, samples)
    groups = torch.tensor([sample.reward for sample in samples]).view(-1, args.n_samples_per_prompt)
    return Rollout(samples, ESTIMATORS[args.advantage_estimator](args, groups).flatten(), version)


def training_order(samples: int, global_batch_size: int, dp_rank: int, dp_size: int) -> list[int]:
    """The samples of one data-parallel rank: its part of the first optimizer step, of the second, and so on."""
    steps = range(0, samples, global_batch_size)
    return [index for start in steps for index in range(start + dp_rank, start + global_batch_size, dp_size)]


def shard(args: Namespace, state: ParallelState, rollout: Rollout) -> RolloutData:
    """The part of a rollout for this rank, as the hosts' `rollout_data`.

    Log-probs, advantages and versions are CP-local, masks and tokens whole.

    Raises:
        InputError: a token whose segment-wise weight cannot be known, or a sample without versions beside
            samples with them; the error names the sample.
    """
    order = training_order(
        len(rollout.samples), args.global_batch_size, state.effective_dp.rank, state.effective_dp.size
    )
    samples = [rollout.samples[index] for index in order]
    tokens = [torch.tensor(sample.tokens) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    layout = pack(tokens, lengths, state.cp.rank, state.cp.size)
    behavior = torch.tensor([value for sample in samples for value in sample.rollout_log_probs or ()])
    advantages = rollout.advantages[torch.tensor(order)]
    masks = [torch.tensor(sample.mask, dtype=torch.int) for sample in samples]
    versions, masks = _versions(args, rollout, samples, masks, layout)
    return (
        versions
        | _kept(samples)
        | {name: [getattr(sample, name) for sample in samples] for name in _unchanged(args)}
        | {
            "tokens": tokens,
            "total_lengths": [len(sequence) for sequence in tokens],
            "response_lengths": lengths,
            "loss_masks": masks,
            "rewards": [sample.reward for sample in samples],
            "rollout_log_probs": list(behavior[layout.response_index].split(layout.local_lengths)),
            "advantages": list(advantages[layout.response_sequence].split(layout.local_lengths)),
            "weight_versions": [sample.weight_versions for sample in samples],
        }
    )


def _unchanged(args: Namespace) -> list[str]:
    """The fields of a sample that the rollout data has as they are, of whole responses on every rank."""
    routes = [ROUTES] if args.use_rollout_routing_replay else []
    return [*routes, *((HEAD_IDS, HEAD_LOG_PROBS) if args.rollout_top_logprobs_num else ())]


def _kept(samples: Sequence[Sample]) -> RolloutData:
    """Kept sets of each sample's whole response; empty where the engine did not cut."""
    lacking = [sample.index for sample in samples if sample.rollout_top_p_token_ids is None]
    if lacking and len(lacking) < len(samples):
        raise InputError(
            f"sample {lacking[0]}: no rollout_top_p_token_ids, and other samples of the rollout have them; a filter or "
            "a generate function of yours must leave them on every sample"
        )
    if lacking:
        return {}
    return {name: [torch.tensor(getattr(sample, name)) for sample in samples] for name in (IDS, OFFSETS)}


def _versions(
    args: Namespace, rollout: Rollout, samples: Sequence[Sample], masks: list[Tensor], layout: Layout
) -> tuple[RolloutData, list[Tensor]]:
    """The keys about versions, and the loss masks without tokens whose weight cannot be known.

    The whole rollout decides whether versions are known, so that every rank decides alike.
    """
    current, nameless = rollout.version, [s.index for s in rollout.samples if s.output_versions is None]
    if current is None or len(nameless) == len(rollout.samples):
        return {}, masks
    if nameless:
        raise InputError(
            f"sample {nameless[0]}: no output_versions, which other samples of the rollout have; say of all of them "
            f"who wrote each token, or of none ({len(nameless)} such samples)"
        )
    authors = [_written(sample, current) for sample in samples]
    config = _segment_wise(args)
    if config is not None:
        names = [str(sample.index) for sample in samples]
        kept = admitted(names, authors, [mask.bool() for mask in masks], config)
        masks = [mask * stays for mask, stays in zip(masks, kept, strict=True)]
    versions = torch.cat([one.versions for one in authors])[layout.response_index]
    recomputed = torch.cat([one.recomputed for one in authors])[layout.response_index]
    data = {
        "output_versions": list(versions.split(layout.local_lengths)),
        "recomputed_log_probs": list(recomputed.split(layout.local_lengths)),
        "proximal_version": current,
    }
    return data, masks


def _segment_wise(args: Namespace) -> SegmentWiseConfig | None:
    """Segment-wise settings of a custom loss; None for other losses, which see no versions."""
    if args.loss_type != "custom_loss":
        return None
    config = uncorrected.for_loss_hook(args, reading.from_args(args))
    return config.where_versions_are_known().segment_wise


def _written(sample: Sample, current: int) -> Written:
    assert sample.output_versions is not None
    return written(sample.output_versions, sample.recomputed_log_probs or [None] * sample.response_length, current)


def grpo(args: Namespace, rewards: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
    """`A = R - mean(R)` within each prompt's group, over its deviation but with `--disable-grpo-std-normalization`.

    GRPO: Shao et al. 2024, arxiv.org/abs/2402.03300.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred if args.disable_grpo_std_normalization else centred / (rewards.std(1, keepdim=True) + 1e-6)


def reinforce(args: Namespace, rewards: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
    """`A = R + shift`: REINFORCE with the constant baseline of `--reward-shift`."""
    return rewards + args.reward_shift


ESTIMATORS: dict[str, Callable[[Namespace, Tensor], Tensor]] = {"grpo": grpo, "reinforce": reinforce}
"""`--advantage-estimator`: called with `args` and rewards `[prompts, samples]`."""

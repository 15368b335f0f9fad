"""Group baselines of the samples that train, recomputed once the rules are known and before training.

Hosts subtract a group's mean reward when the rollout arrives. A sample that a rule rejects later has moved that mean,
and so the advantages of its siblings: beside a rejected reward of 100, a correct answer gets -49.5 (verl#6375).
`mis.group_baseline: grpo` takes the mean, and the host's standard deviation, over the samples of the group that train.
`rloo` takes the mean of all others that train: Ahmadian et al. 2024, "Back to Basics", arxiv.org/abs/2402.14740.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View
from mis_plugins.correction.pipeline import correct
from mis_plugins.errors import InputError, logger
from mis_plugins.hosts import megatron
from mis_plugins.hosts.batch import HostBatch, check_sequences
from mis_plugins.hosts.host import ONE_STEP
from mis_plugins.hosts.rank_agreement import check_agreement
from mis_plugins.hosts.registry import current
from mis_plugins.packing.collectives import all_reduce

FIELD = "mis.group_baseline"
NEEDED = ("log_probs", "advantages", "rewards", "sample_indices")
EPSILON = 1e-6  # what the hosts add to a standard deviation
LARGEST_MEAN = 1e-3  # of a group's rewards that a host has normalized, where rewards are near 1
LARGEST_SHARE = 1e-4  # of the squares of a group's rewards in their mean, once a host has normalized in float32
MOST_GROUPS = 2**20
MOVED = "mis_plugins_moved"  # attribute of advantages whose baseline is ours already
PerSample = Float[Tensor, " N"]


def rebase(args: View, rollout_id: int, data: Mapping[str, Any], config_of: Callable[[View], CorrectionConfig]) -> None:
    """Move the advantages of the rollout batch to baselines without the samples that do not train. Collective.

    Args:
        config_of: the config in force; it is asked for only where the arguments carry `group_baseline`.

    Raises:
        InputError: the batch lacks what a baseline is made of, or its groups are not those of the host's rewards.
    """
    asked = args.get("mis")
    if not isinstance(asked, Mapping) or asked.get("group_baseline") is None:
        return
    config = config_of(args)
    if config.group_baseline is None or not megatron.holds_log_probs():
        return  # a run that only watches; a pipeline stage without log-probs
    if lacking := [name for name in NEEDED if data.get(name) is None or any(x is None for x in data[name])]:
        more = f"; {ONE_STEP}" if lacking[0] == "log_probs" else ""
        raise InputError(f"{FIELD} needs {', '.join(lacking)} of the rollout batch, and rollout_data has none{more}")
    check_sequences({name: data[name] for name in (*NEEDED, "loss_masks")})
    trains = samples_that_train(args, data, config)
    host = current(args)
    ranks = host.parallel()[0]
    rewards = torch.as_tensor([float(reward) for reward in data["rewards"]], dtype=torch.float64).to(trains.device)
    indices = torch.as_tensor([int(index) for index in data["sample_indices"]]).to(trains.device)
    size = int(args.n_samples_per_prompt)
    sums = Groups(indices // size, ranks.dp)
    counted, total, squares, trained = sums.of(torch.ones_like(rewards), rewards, rewards**2, trains.double())
    _check_groups(args, size, counted, total, squares)
    by_deviation = config.group_baseline == "grpo" and args.get("grpo_std_normalization", False)
    new = GROUP[config.group_baseline](rewards, trains, sums, by_deviation)
    for place, change in enumerate(torch.where(trains, new - rewards, 0)):
        advantages = data["advantages"][place]
        if not hasattr(advantages, MOVED):  # a function of the user's may call both rollout-data hooks
            data["advantages"][place] = moved = advantages + change.to(advantages)
            setattr(moved, MOVED, True)
    if host.reports(ranks):
        logger.info(
            "%s: rollout %d: %d of %d samples do not train, and left the baselines of their groups",
            FIELD, rollout_id, int((counted - trained).sum()), int(counted.sum()),
        )  # fmt: skip


def samples_that_train(args: View, data: Mapping[str, Any], config: CorrectionConfig) -> Bool[Tensor, " N"]:
    """Which samples have a token that weighs anything, under weights and rules of pi_old against mu."""
    parallel = current(args).parallel()
    weight = config.weight and replace(config.weight, normalize=None)  # the mean does not decide what trains
    rules = replace(config, weight=weight, metrics="none")
    check_agreement(rules, parallel[0])
    batch = HostBatch.of_rollout(args, data, parallel)
    ragged = batch.place()
    correction = correct(batch.proximal, batch.behavior, ragged, rules)
    (tokens,) = ragged.sums(correction.keep & (correction.weights != 0))
    return tokens > 0


class Groups:
    """The groups of a rollout batch, whose samples lie on any data-parallel ranks."""

    def __init__(self, groups: Int[Tensor, " N"], dp: dist.ProcessGroup | None):
        ends = torch.stack([-groups.min(), groups.max()])
        if dp is not None:
            all_reduce(ends, dp, dist.ReduceOp.MAX)
        first, last = -int(ends[0]), int(ends[1])
        self.count = last - first + 1
        if self.count > MOST_GROUPS:
            raise InputError(f"{FIELD}: sample_indices of one rollout span {self.count} groups; hand on the host's own")
        self.place, self.dp = groups - first, dp

    def of(self, *rows: PerSample) -> tuple[Float[Tensor, " groups"], ...]:
        """The sum of each row over each group, over all ranks: one collective."""
        sums = rows[0].new_zeros(len(rows), self.count).index_add_(1, self.place, torch.stack(rows))
        if self.dp is not None:
            all_reduce(sums, self.dp)
        return sums.unbind()


def _check_groups(args: View, size: int, *sums: Float[Tensor, " groups"]) -> None:
    """Refuse groups that the host did not normalize over; equal rewards of a whole group keep their mean's rounding."""
    counted, total, squares = sums
    if counted.max() > size:
        raise InputError(
            f"{FIELD}: a group has {int(counted.max())} samples by sample_indices // {size}, more than "
            f"--n-samples-per-prompt {size}: several samples of one rollout are not served"
        )
    share = total**2 / (counted * squares)  # NaN where every reward is 0
    mean = (total / counted).abs()
    apart = (mean > LARGEST_MEAN) & (share > LARGEST_SHARE) & ((share < 1 - LARGEST_SHARE) | (counted < size))
    if args.get("rewards_normalization", True) and size > 1 and apart.any():
        raise InputError(
            f"{FIELD}: rewards of the groups by sample_indices // {size} have a mean of "
            f"{mean[apart].max():.2g}, and the host subtracts that mean: the groups of the host are "
            "others, or incomplete; leave the key out"
        )


def grpo(rewards: PerSample, trains: Bool[Tensor, " N"], groups: Groups, by_deviation: bool) -> PerSample:
    """Reward less the mean over the group's samples that train, over their standard deviation where asked.

    The hosts' rewards are normalized over all samples already. A mean and a deviation over fewer undo that, as both are
    the same whatever was subtracted and divided by before. A sample alone gets 0: there is nothing to compare it with.
    """
    count, total = groups.of(trains.double(), torch.where(trains, rewards, 0))
    centered = torch.where(trains, rewards - (total / count.clamp(min=1))[groups.place], 0)
    if not by_deviation:
        return centered
    (squares,) = groups.of(centered**2)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return centered / (deviation[groups.place] + EPSILON)


def rloo(rewards: PerSample, trains: Bool[Tensor, " N"], groups: Groups, by_deviation: bool) -> PerSample:
    """Reward less the mean over the group's other samples that train; 0 for a sample alone."""
    sums = groups.of(trains.double(), torch.where(trains, rewards, 0))
    count, total = (of_group[groups.place] for of_group in sums)
    others = (total - rewards) / (count - 1).clamp(min=1)
    return torch.where(trains & (count > 1), rewards - others, 0)


GROUP = {"grpo": grpo, "rloo": rloo}

"""The direction of a rollout's policy gradient, corrected or not, against an on-policy gradient.

The harm of a mismatched rollout engine shows here before a policy collapses, and also where no policy does.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.host.cli.loading import load_function
from lab.host.rollout.sampler import Rollout, shard
from lab.host.train.loss import LOSSES
from lab.host.train.parallel import ParallelState
from lab.host.train.trainer import Trainer
from mis_plugins.hosts.routing import WATCHING, groups
from mis_plugins.routing import watch as routes
from mis_plugins.routing.report import read
from mis_plugins.routing.table import TRAIN


def on_policy(args: Namespace) -> Namespace:
    """Settings without any correction, for samples of the trainer's own policy."""
    plain = {
        "use_tis": False,
        "get_mismatch_metrics": False,
        "use_rollout_logprobs": False,
        "use_rollout_routing_replay": False,
        "custom_megatron_before_log_prob_hook_path": None,
    }
    return Namespace(**{**vars(args), **plain, "loss_type": "policy_loss"})


def before_log_probs(args: Namespace, trainer: Trainer, prefix: str = "") -> None:
    """Call `--custom-megatron-before-log-prob-hook-path`; the hosts' prefix of a reference policy is `ref_`."""
    path = args.custom_megatron_before_log_prob_hook_path
    if path is not None:
        hook = load_function(path, "--custom-megatron-before-log-prob-hook-path")
        hook(args, [trainer.ddp], prefix)


@contextmanager
def routes_apart() -> Iterator[None]:
    """Keep what the watch over routers sees in the block apart, for a gradient that no optimizer step will apply."""
    kept = None
    if (watch := WATCHING.watch) is not None:
        watch.end()
        kept = watch.rollout, watch.sums
        watch.rollout, watch.sums = routes.Rollout(), watch.sums.cleared()
    try:
        yield
    finally:
        if (watch := WATCHING.watch) is not None:
            watch.run, (watch.rollout, watch.sums) = (routes.Pass(), kept or (routes.Rollout(), watch.sums.cleared()))


def _gather_routes(args: Namespace) -> None:
    """Let the loss read what a watched log-prob pass recorded, without logging it."""
    watch = WATCHING.watch
    if watch is not None and watch.run.part is not None:
        read(watch, groups(args))
        watch.begin(TRAIN)


def mean_gradient(args: Namespace, state: ParallelState, trainer: Trainer, rollouts: Sequence[Rollout]) -> Tensor:
    """Gradient of the policy loss at the current weights, averaged over the rollouts. Collective; no step is taken."""
    total = torch.zeros(())
    whole = Namespace(**{**vars(args), "global_batch_size": len(rollouts[0].samples)})
    for rollout in rollouts:
        data = shard(whole, state, rollout)
        before_log_probs(whole, trainer)
        data["log_probs"] = trainer.log_probs(data)
        _gather_routes(whole)
        trainer.accumulate(whole, data, range(len(data["tokens"])), LOSSES[args.loss_type])
        total = total + trainer.gradient()
    return total / len(rollouts)


def cosine(left: Tensor, right: Tensor) -> float:
    return float(F.cosine_similarity(left, right, dim=0))

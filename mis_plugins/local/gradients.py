"""The direction of the policy gradient: that of a rollout, corrected or not, against that of on-policy samples.

What a mismatched rollout engine does to learning shows here before, and whether or not, a policy collapses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mis_plugins.local.loss import policy_loss
from mis_plugins.local.parallel import ParallelState
from mis_plugins.local.rollout import Rollout, shard
from mis_plugins.local.trainer import Trainer


def on_policy(args: Namespace) -> Namespace:
    """The same settings without any correction: what samples of the trainer's own policy need."""
    return Namespace(
        **{**vars(args), "use_tis": False, "get_mismatch_metrics": False, "use_rollout_logprobs": False}
    )


def mean_gradient(
    args: Namespace, state: ParallelState, trainer: Trainer, rollouts: Sequence[Rollout]
) -> Tensor:
    """Gradient of the policy loss at the current weights, averaged over the rollouts; no step is taken.
    Collective.
    """
    total = torch.zeros(())
    whole = Namespace(**{**vars(args), "global_batch_size": len(rollouts[0].problems)})
    for rollout in rollouts:
        data = shard(whole, state, rollout)
        data["log_probs"] = trainer.log_probs(data)
        trainer.accumulate(whole, data, range(len(data["tokens"])), policy_loss)
        total = total + trainer.gradient()
    return total / len(rollouts)


def cosines(
    settings: Mapping[str, Namespace],
    state: ParallelState,
    trainer: Trainer,
    sampled: Sequence[Rollout],
    references: tuple[Sequence[Rollout], Sequence[Rollout]],
) -> dict[str, float]:
    """Cosine of each setting's gradient on ``sampled`` to the on-policy gradient.

    The reference is the mean of two independent on-policy estimates. Their own cosine, under ``"on-policy"``,
    says how much of what is
    missing to 1 is sampling noise: no setting can be expected to do better.
    """
    plain = on_policy(next(iter(settings.values())))
    first, second = (mean_gradient(plain, state, trainer, rollouts) for rollouts in references)
    reference = (first + second) / 2
    found = {
        name: _cosine(mean_gradient(args, state, trainer, sampled), reference)
        for name, args in settings.items()
    }
    return found | {"on-policy": _cosine(first, second)}


def _cosine(left: Tensor, right: Tensor) -> float:
    return float(F.cosine_similarity(left, right, dim=0))

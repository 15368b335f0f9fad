"""Advantages from the rewards of a rollout: one number a sample, the same for all of its tokens."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor


def group_relative(
    rewards: Float[Tensor, "prompts samples"], *, normalize_std: bool
) -> Float[Tensor, "prompts samples"]:
    """`A = R - mean(R)` within each prompt's group, over its deviation if asked.

    GRPO: Shao et al. 2024, arxiv.org/abs/2402.03300.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-6) if normalize_std else centred


def shifted(rewards: Float[Tensor, "*shape"], shift: float) -> Float[Tensor, "*shape"]:
    """`A = R + shift`: REINFORCE with a constant baseline."""
    return rewards + shift


ESTIMATORS: dict[str, Callable[[Namespace, Tensor], Tensor]] = {
    "grpo": lambda args, rewards: group_relative(rewards, normalize_std=not args.disable_grpo_std_normalization),
    "reinforce": lambda args, rewards: shifted(rewards, args.reward_shift),
}
"""`--advantage-estimator`: called with `args` and rewards `[prompts, samples]`."""

"""The choice of a router: which experts its gates pick by themselves, and how far a recorded choice is from that."""

from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.errors import ConfigError


def selection_scores(router: Any, logits: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
    """The gates that Megatron's TopKRouter selects by.

    These are logits, their softmax where it comes before the selection, or their sigmoids with the bias of each expert.

    Raises:
        ConfigError: the router has another score function, whose gates are not known here, or balances its choice over
            a batch.
    """
    _check_known(router)
    scores = logits
    if router.score_function == "sigmoid":
        scores = logits.float().sigmoid().type_as(logits)
        if router.expert_bias is not None:
            scores = scores + router.expert_bias
    elif getattr(router.config, "moe_router_pre_softmax", False):
        # A sum of logits may choose another group than the sum of their softmax.
        scores = logits.softmax(-1, dtype=torch.float32).type_as(logits)
    groups = router.config.moe_router_group_topk
    return scores if not groups else _within_groups(scores, router.config.moe_router_num_groups, groups, router.topk)


def _check_known(router: Any) -> None:
    leave = "leave out `mis.routing` and every rule with `statistic: route`"
    if router.score_function not in ("softmax", "sigmoid"):
        raise ConfigError(
            f"--moe-router-score-function {router.score_function}: routes are compared for softmax and sigmoid alone; "
            f"{leave}"
        )
    if getattr(router, "routing_type", None) == "sinkhorn":
        raise ConfigError(
            "--moe-router-load-balancing-type sinkhorn: sinkhorn chooses for a whole batch at once, so that a token "
            f"has no choice of its own to compare; {leave}"
        )


def _within_groups(scores: Float[Tensor, "T E"], groups: int, chosen: int, topk: int) -> Float[Tensor, "T E"]:
    """Gates outside the chosen groups become -inf; a group counts by the sum of its best `topk / chosen` gates."""
    by_group = scores.view(scores.shape[0], groups, -1)
    best = by_group.topk(topk // chosen, dim=-1).values.sum(-1).topk(chosen, dim=-1, sorted=False).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(outside.unsqueeze(-1), -torch.inf).view_as(scores)


@dataclass(frozen=True)
class Compared:
    """A recorded choice beside the router's own and beside the one that it used, token by token.

    differs: the router alone would have picked another set of experts.
    strange: less than half of the recorded experts are among the router's own.
    margin: gap between the last gate that the router picks and the next one; 0 where the chosen groups hold no other.
    unequal: the router used another set than the recorded one.
    broken: the recorded row names an expert twice, or one that does not exist.
    """

    differs: Bool[Tensor, " T"]
    strange: Bool[Tensor, " T"]
    margin: Float[Tensor, " T"]
    unequal: Bool[Tensor, " T"]
    broken: Bool[Tensor, " T"]


def compare(
    scores: Float[Tensor, "T E"], rows: Int[Tensor, "T k"], used: Bool[Tensor, "T E"], replays: bool
) -> Compared:
    """Compare recorded rows with the gates of a router and with the map of experts that it used.

    Rows of -1, with which a host pads, are equal to everything; without `replays` nothing is unequal.
    """
    topk, experts = rows.shape[1], scores.shape[1]
    gates, own = scores.topk(min(topk + 1, experts), dim=-1)
    margin = (gates[:, topk - 1] - gates[:, -1]).float()
    margin.nan_to_num_(nan=torch.nan, posinf=0.0)  # experts outside of the chosen groups have a gate of -inf
    padding = rows[:, 0] < 0
    index = rows.clamp(0, experts - 1).long()
    named = torch.zeros_like(used).scatter_(1, index, True)
    overlap = named.gather(1, own[:, :topk]).sum(-1)
    broken = ((named.sum(-1) < topk) | (rows != index).any(-1)) & ~padding
    differs = (overlap < topk) & ~padding
    unequal = (named != used).any(-1) & ~padding if replays else torch.zeros_like(differs)
    return Compared(differs, (2 * overlap < topk) & ~padding, margin, unequal, broken)


def strange_at_random(experts: int, topk: int) -> float:
    """How often a row that has nothing to do with a token shares less than half of the router's own experts."""
    shared = range((topk + 1) // 2)
    return sum(comb(topk, n) * comb(experts - topk, topk - n) for n in shared) / comb(experts, topk)

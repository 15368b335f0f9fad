"""The optimal token baseline: a baseline of each token, from returns and gradient norms of the group's responses.

Li et al. 2026, "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", arxiv.org/abs/2602.07078.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mis_plugins.correction.ratios import widened
from mis_plugins.packing.ragged import Ragged


@torch.no_grad()
def token_advantages(
    rewards: Shaped[Tensor, " T"],
    log_probs: Float[Tensor, " T"],
    sum_of_squares: Float[Tensor, " T"],
    ragged: Ragged,
    groups: Int[Tensor, " N"],
    weights: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """A_t = G_t - sum W_t G_t / sum W_t, over the responses of the group that have a t-th valid token.

        G_t = sum_{u >= t} reward_u,    W_t = sum_{u <= t} w_u^2 (1 - 2 pi(y_u) + sum_v pi(v)^2)

    The last bracket is the squared norm of the gradient of log pi(y_u) by its logits. Where one response alone has a
    t-th valid token, nothing is subtracted. For a trainer of your own, once a rollout: the call waits for the device.

    Args:
        log_probs, sum_of_squares: log pi_old(y_t), and the sum of pi_old(v)^2 over the vocabulary.
        ragged: whole responses.
        groups: the prompt of each response, numbered from 0 on.
        weights: importance weights w_t; None is 1.
    """
    assert ragged.responses is None, "a baseline reads whole responses"
    valid = ragged.loss_mask
    energy = (1 - 2 * log_probs.double().exp() + sum_of_squares.double()).clamp(min=0)  # rounded, it may lie below
    energy = energy if weights is None else energy * weights.double().square()
    reward, energy, rank = (torch.where(valid, x.double(), 0) for x in (rewards, energy, valid))
    so_far, path, rank = _running(torch.stack([reward, energy, rank]), ragged)
    returns = ragged.to_tokens(ragged.sums(reward)[0]) - so_far + reward
    place = ragged.to_tokens(groups.long()) * valid.numel() + rank.long()
    _, place = torch.where(valid, place, -1).unique(return_inverse=True)
    total = lambda x: torch.zeros_like(path).index_add_(0, place, torch.where(valid, x, 0))[place]  # noqa: E731
    count, weight, weighted = total(torch.ones_like(path)), total(path), total(path * returns)
    baseline = torch.where((count > 1) & (weight > 0), weighted / weight, 0)
    return torch.where(valid, returns - baseline, 0).to(widened(rewards).dtype)


def _running(rows: Float[Tensor, "K T"], ragged: Ragged) -> Float[Tensor, "K T"]:
    """The sums of a sequence up to a token, the token included; on a CPU, whose running sums are deterministic."""
    whole = rows.cpu()
    parts = [part.cumsum(1) for part in whole.split(ragged.lengths.tolist(), dim=1)]
    return torch.cat([whole[:, :0], *parts], dim=1).to(rows.device)

"""The plain way to correct a mismatch: a Python loop over sequences, each gathered whole over context-parallel ranks.

The module is the baseline of correction_cost.py where a user names no other. Every line is the textbook formula, every
branch is decided on the host, and nothing is shared with mis_plugins. Call and flat keys are those of the hosts' hook.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CLAMP = 20.0


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return (weighted pg_loss, full-response masks, metrics), as the hosts expect them."""
    spans = [_owned(total, response) for total, response in zip(total_lengths, response_lengths, strict=True)]
    weights, masks, metrics = [], [], []
    rows = zip(train_log_probs, rollout_log_probs, loss_masks, spans, strict=True)
    for proximal, behavior, loss_mask, owned in rows:
        proximal, behavior = (_whole(x, owned, len(loss_mask)) for x in (proximal, behavior))
        weight, mask, metric = _correct(args, proximal, behavior, loss_mask.float())
        weights.append(weight)
        masks.append(mask)
        metrics.append(metric)
    if args.tis_batch_normalize:
        mean = _mean_weight(args, weights, loss_masks)
        weights = [weight / mean for weight in weights]
    for metric, weight, loss_mask in zip(metrics, weights, loss_masks, strict=True):
        metric["mis_is_ratio_mean_final"] = (weight * loss_mask).sum() / loss_mask.sum().clamp(min=1)
        metric["mis_is_ratio_min_final"], metric["mis_is_ratio_max_final"] = _extremes(weight, loss_mask)
    flat = torch.cat([_local(weight, owned) for weight, owned in zip(weights, spans, strict=True)])
    return pg_loss * flat, masks, _flat_metrics(metrics, spans, response_lengths)


def _correct(
    args: Namespace, proximal: Tensor, behavior: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compute weight, mask and metrics of one whole response."""
    log_ratio = (proximal - behavior) * loss_mask
    lower = args.tis_lower_bound or 1.0 / args.tis_upper_bound
    unbounded = _ratio(args.tis_level, log_ratio, loss_mask)
    weight = unbounded.clamp(0.0 if args.tis_mode == "truncate" else lower, args.tis_upper_bound) * loss_mask
    mask = loss_mask
    if args.tis_mode == "mask":
        weight = unbounded * loss_mask
        mask = mask * ((unbounded >= lower) & (unbounded <= args.tis_upper_bound))
    if args.use_rs:
        low, high = args.rs_lower_bound or lower, args.rs_upper_bound or args.tis_upper_bound
        ratio = _ratio(args.rs_level, log_ratio, loss_mask)
        mask = mask * ((ratio >= low) & (ratio <= high))
    if args.rs_veto_threshold is not None and bool((log_ratio.exp() < args.rs_veto_threshold).any()):
        mask = torch.zeros_like(mask)
    return weight, mask, _metrics(proximal, behavior, log_ratio, loss_mask, unbounded, weight, mask)


def _ratio(level: str, log_ratio: Tensor, loss_mask: Tensor) -> Tensor:
    """Compute the ratio of each token: exp of its own log ratio, or of its sequence's sum or mean."""
    if level == "sequence":
        log_ratio = log_ratio.sum().expand_as(log_ratio)
    elif level == "geometric":
        log_ratio = (log_ratio.sum() / loss_mask.sum().clamp(min=1)).expand_as(log_ratio)
    return log_ratio.clamp(-CLAMP, CLAMP).exp()


def _metrics(
    proximal: Tensor,
    behavior: Tensor,
    log_ratio: Tensor,
    loss_mask: Tensor,
    unbounded: Tensor,
    weight: Tensor,
    mask: Tensor,
) -> dict[str, Tensor]:
    count = loss_mask.sum().clamp(min=1)
    trainer = -(proximal * loss_mask).sum() / count
    rollout = -(behavior * loss_mask).sum() / count
    ratio = log_ratio.clamp(-CLAMP, CLAMP).exp()
    return {
        "mis_training_log_ppl": trainer,
        "mis_training_ppl": trainer.exp(),
        "mis_rollout_log_ppl": rollout,
        "mis_rollout_ppl": rollout.exp(),
        "mis_kl": -log_ratio,
        "mis_k3_kl": ratio - 1 - log_ratio,
        "mis_log_ppl_diff": trainer - rollout,
        "mis_log_ppl_abs_diff": (trainer - rollout).abs(),
        "mis_ppl_ratio": (trainer - rollout).exp(),
        "mis_chi2_token": (ratio.square() * loss_mask).sum() / count - 1,
        "mis_chi2_seq": (2 * log_ratio.sum().clamp(-CLAMP, CLAMP)).exp() - 1,
        "mis_tis_weight_before_bound": unbounded,
        "mis_tis_weight_after_bound": weight,
        "mis_tis_changed_fraction": (weight != unbounded).float(),
        "mis_kept_fraction": mask,
    }


def _mean_weight(args: Namespace, weights: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> float:
    """Average the weights over valid tokens, or over sequences with a valid token where a sequence has one weight."""
    sums = [float(weight.sum()) for weight in weights]
    counts = [float(loss_mask.sum()) for loss_mask in loss_masks]
    if args.tis_level != "token":
        means = [total / count for total, count in zip(sums, counts, strict=True) if count]
        return sum(means) / len(means) if means and sum(means) > 1e-8 else 1.0
    return sum(sums) / sum(counts) if sum(counts) and sum(sums) > 1e-8 else 1.0


def _extremes(weight: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    live = weight[loss_mask.bool()]
    return (live.min(), live.max()) if len(live) else (weight.new_zeros(()), weight.new_zeros(()))


def _flat_metrics(
    metrics: Sequence[dict[str, Tensor]], spans: Sequence[list[slice]], lengths: Sequence[int]
) -> dict[str, Tensor]:
    def flat(name: str) -> Tensor:
        whole = [metric[name].expand(length) for metric, length in zip(metrics, lengths, strict=True)]
        return torch.cat([_local(x, owned) for x, owned in zip(whole, spans, strict=True)])

    return {name: flat(name) for name in metrics[0]}


def _group() -> dist.ProcessGroup | None:
    """Return Megatron's context-parallel group; None where a rank holds whole responses."""
    from megatron.core import mpu

    if not mpu.model_parallel_is_initialized() or mpu.get_context_parallel_world_size() == 1:
        return None
    group = mpu.get_context_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _owned(total: int, response: int) -> list[slice]:
    """List the pieces of a response that this rank holds, in zigzag order."""
    group = _group()
    if group is None:
        return [slice(0, response)]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk = -(-total // (2 * size))
    first = total - response - 1
    edges = [(n * chunk - first, (n + 1) * chunk - first) for n in (rank, 2 * size - 1 - rank)]
    return [slice(min(max(a, 0), response), min(max(b, 0), response)) for a, b in edges]


def _whole(local: Tensor, owned: list[slice], length: int) -> Tensor:
    """Gather a whole response on every rank, by one all-reduce of its length."""
    group = _group()
    if group is None:
        return local
    full = local.new_zeros(length)
    full[torch.cat([torch.arange(piece.start, piece.stop) for piece in owned])] = local
    dist.all_reduce(full, group=group)
    return full


def _local(whole: Tensor, owned: list[slice]) -> Tensor:
    return torch.cat([whole[piece] for piece in owned])

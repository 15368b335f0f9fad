"""The policy loss of the embedded host, and the place where it calls the TIS hook.

The call, its keyword arguments and what happens to its answer follow Miles's ``policy_loss_function``: the
returned masks rebuild the numerator of the loss only, its denominators and all metrics keep the batch's masks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mis_plugins.local.batch import Layout
from mis_plugins.local.loading import load_function
from mis_plugins.local.parallel import ParallelState

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel rank. Lists have one entry a sample; log-probs are CP-local, masks
    whole.
    """

    layout: Layout
    loss_masks: list[Tensor]
    advantages: list[Tensor]
    proximal: list[Tensor] | None
    behavior: list[Tensor]

    def masked(self, masks: Sequence[Tensor]) -> Tensor:
        """``[R]`` full-response masks, cut to this rank's tokens."""
        return torch.cat(list(masks)).float()[self.layout.response_index]


@dataclass(frozen=True)
class Reducer:
    """``sum_i (1 / n_i) sum_t x_t m_t`` over this rank's tokens, with ``n_i`` the mask sum of the batch; or
    the plain sum over tokens.
    """

    weight: Tensor

    @classmethod
    def of(cls, batch: MicroBatch, masks: Sequence[Tensor], *, per_token: bool) -> Reducer:
        mask = batch.masked(masks)
        if per_token:
            return cls(mask)
        length = torch.stack([mask.sum() for mask in batch.loss_masks]).clamp(min=1)
        return cls(mask / length[batch.layout.response_sequence])

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's ``-min(r A, clip(r, 1 - low, 1 + high) A)`` a token, and whether the clip acted.

    ``log_ratio`` is target - proximal. Schulman et al. 2017, arxiv.org/abs/1707.06347.
    """
    ratio = log_ratio.exp()
    free, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.maximum(free, clipped), (clipped > free).float()


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's ``exp(x) - 1 - x``, with x clamped to +-10 as in Miles; estimates KL(q || p) from samples of
    q, x = log p - log q.
    """
    bounded = log_ratio.clamp(-10, 10)
    return bounded.exp() - 1 - bounded


def policy_loss(
    args: Namespace, state: ParallelState, batch: MicroBatch, log_probs: Tensor
) -> tuple[Tensor, Metrics]:
    """Sum over the samples of the micro-batch of their mean token loss, and metrics summed in the same way.

    Args:
        log_probs: ``[R]`` of the target policy, with gradient.
    """
    behavior = torch.cat(batch.behavior)
    scored = [part.detach() for part in log_probs.split(batch.layout.local_lengths)]
    proximal_list = batch.proximal if batch.proximal is not None else scored
    proximal = behavior if args.use_rollout_logprobs else torch.cat(proximal_list)
    reduce = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)
    log_ratio = log_probs - proximal
    loss, clipped = clipped_surrogate(
        log_ratio, torch.cat(batch.advantages), args.eps_clip, args.eps_clip_high
    )
    metrics = {
        "train_rollout_logprob_abs_diff": reduce((torch.cat(proximal_list) - behavior).abs()),
        "k3_kl": reduce(k3(torch.cat(proximal_list) - behavior)),
    }
    reduce_kept = reduce
    if args.use_tis or args.get_mismatch_metrics:
        loss, masks, mismatch = call_tis_hook(args, state, batch, loss, proximal_list)
        reduce_kept = Reducer.of(batch, masks, per_token=args.calculate_per_token_loss)
        metrics |= {name: reduce(values) for name, values in mismatch.items()}
    total = reduce_kept(loss)
    metrics |= {
        "loss": total,
        "pg_clipfrac": reduce_kept(clipped),
        "ppo_kl": reduce_kept(-log_ratio),
        "kept_fraction": reduce_kept(torch.ones_like(log_ratio)),
    }
    return total, {name: value.detach() for name, value in metrics.items()}


def call_tis_hook(
    args: Namespace, state: ParallelState, batch: MicroBatch, loss: Tensor, proximal: list[Tensor]
) -> tuple[Tensor, Sequence[Tensor], Mapping[str, Tensor]]:
    """Call ``--custom-tis-function-path`` with Miles's keyword arguments."""
    hook = load_function(args.custom_tis_function_path, "--custom-tis-function-path")
    return hook(
        args=args,
        pg_loss=loss,
        train_log_probs=proximal,
        rollout_log_probs=batch.behavior,
        loss_masks=batch.loss_masks,
        total_lengths=batch.layout.total_lengths,
        response_lengths=batch.layout.response_lengths,
        parallel_state=state,
        max_seq_lens=None,
    )


def supervised_loss(
    args: Namespace, state: ParallelState, batch: MicroBatch, log_probs: Tensor
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the responses, reduced as the policy loss is."""
    loss = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)(-log_probs)
    return loss, {"loss": loss.detach()}

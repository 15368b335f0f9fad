"""The losses of the embedded host, and the places where they call a hook.

The calls, their arguments and what happens to the answers follow Miles's `policy_loss_function`: the masks that a
TIS hook returns rebuild the numerator of the loss only, its denominators and all metrics keep the batch's masks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.host.cli.loading import load_function
from lab.host.train.batch import Layout
from lab.host.train.log_probs import IDS, OFFSETS, kept_sets, response_log_probs
from lab.host.train.parallel import ParallelState
from mis_plugins.config.terms.divergence import k3

Metrics = dict[str, Tensor]

MAY_LACK = ("log_probs", "ref_log_probs", "max_seq_lens", "output_versions", "recomputed_log_probs", "proximal_version",
            IDS, OFFSETS)  # fmt: skip
"""Keys of a host's batch that are None where a run has no such thing."""

LOGGED_LIMIT = 10.0
"""Where log ratios are clamped for the metric `k3_kl`: one token of a broken engine shall not hide all others."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a data-parallel rank.

    data: rollout data by key. Lists have one entry a sample; log-probs and versions are CP-local, masks whole.
    """

    layout: Layout
    data: Mapping[str, Any]

    @property
    def loss_masks(self) -> list[Tensor]:
        return self.data["loss_masks"]

    def masked(self, masks: Sequence[Tensor]) -> Tensor:
        """`[R]` full-response masks, cut to this rank's tokens."""
        return torch.cat(list(masks)).float()[self.layout.response_index]


@dataclass(frozen=True)
class Reducer:
    """`sum_i (1 / n_i) sum_t x_t m_t` over this rank's tokens, or the plain sum over tokens.

    `n_i` is the mask sum of sample i in the batch, whatever masks `m_t` come from.
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


Loss = tuple[Tensor, Metrics]
LossFunction = Callable[[Namespace, ParallelState, MicroBatch, Tensor], Loss]
"""Takes this rank's logits, `[1, S, V / tp]`; a loss of log-probs takes those of the responses, `[R]`."""


def of_log_probs(loss: LossFunction) -> LossFunction:
    """A loss of log-probs as one of logits."""

    def of_logits(args: Namespace, state: ParallelState, batch: MicroBatch, logits: Tensor) -> Loss:
        return loss(args, state, batch, response_log_probs(logits, batch.layout, args, kept_sets(batch.data)))

    return of_logits


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's `-min(r A, clip(r, 1 - low, 1 + high) A)` a token, and whether the clip acted.

    `log_ratio` is target - proximal. Schulman et al. 2017, arxiv.org/abs/1707.06347.
    """
    ratio = log_ratio.exp()
    free, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(free, clipped)
    return loss, (clipped > free).float()


def mismatch_metrics(reduce: Reducer, proximal: Tensor, behavior: Tensor) -> Metrics:
    """How far the policies of trainer and rollout engine lie apart, whatever is done about it."""
    log_ratio = proximal - behavior
    return {
        "train_rollout_logprob_abs_diff": reduce(log_ratio.abs()),
        "k3_kl": reduce(k3(log_ratio.clamp(-LOGGED_LIMIT, LOGGED_LIMIT))),
    }


def policy_loss(args: Namespace, state: ParallelState, batch: MicroBatch, log_probs: Tensor) -> Loss:
    """Sum over the samples of the micro-batch of their mean token loss, and metrics summed in the same way.

    Args:
        log_probs: `[R]` of the target policy, with gradient.
    """
    behavior = torch.cat(batch.data["rollout_log_probs"])
    scored = [part.detach() for part in log_probs.split(batch.layout.local_lengths)]
    proximal_list = batch.data.get("log_probs", scored)
    proximal = behavior if args.use_rollout_logprobs else torch.cat(proximal_list)
    reduce = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)
    log_ratio = log_probs - proximal
    advantages = torch.cat(batch.data["advantages"])
    loss, clipped = clipped_surrogate(log_ratio, advantages, args.eps_clip, args.eps_clip_high)
    metrics = mismatch_metrics(reduce, torch.cat(proximal_list), behavior)
    masks: Sequence[Tensor] = batch.loss_masks
    if args.use_tis or args.get_mismatch_metrics:
        loss, masks, mismatch = call_tis_hook(args, state, batch, loss, proximal_list)
        metrics |= {name: reduce(values) for name, values in mismatch.items()}
    reduce_kept = Reducer.of(batch, masks, per_token=args.calculate_per_token_loss)
    total = pg_reducer(args, batch, masks, reduce_kept)(loss)
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
    """Call `--custom-tis-function-path` with Miles's keyword arguments."""
    hook = load_function(args.custom_tis_function_path, "--custom-tis-function-path")
    return hook(
        args=args,
        pg_loss=loss,
        train_log_probs=proximal,
        rollout_log_probs=batch.data["rollout_log_probs"],
        loss_masks=batch.loss_masks,
        total_lengths=batch.layout.total_lengths,
        response_lengths=batch.layout.response_lengths,
        parallel_state=state,
        max_seq_lens=None,
    )


def pg_reducer(
    args: Namespace, batch: MicroBatch, masks: Sequence[Tensor], default: Reducer
) -> Callable[[Tensor], Tensor]:
    """The user's reducer of the policy loss, for the masks after rejection; the default without one."""
    path = args.custom_pg_loss_reducer_function_path
    if path is None:
        return default
    build = load_function(path, "--custom-pg-loss-reducer-function-path")
    lengths = batch.layout.total_lengths, batch.layout.response_lengths
    return build(*lengths, masks, args.calculate_per_token_loss)


def custom_loss(args: Namespace, state: ParallelState, batch: MicroBatch, logits: Tensor) -> Loss:
    """Call `--custom-loss-function-path` with a batch under the hosts' keys, and add mismatch metrics."""
    function = load_function(args.custom_loss_function_path, "--custom-loss-function-path")
    reduce = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)
    loss, metrics = function(args, host_batch(batch), logits, reduce)
    if "mis_kept_fraction" in metrics:
        metrics = {**metrics, "kept_fraction": metrics["mis_kept_fraction"]}
    if "log_probs" in batch.data:
        sides = (torch.cat(batch.data[name]) for name in ("log_probs", "rollout_log_probs"))
        metrics = {**mismatch_metrics(reduce, *sides), **metrics}
    return loss, {"loss": loss.detach(), **{name: value.detach() for name, value in metrics.items()}}


def host_batch(batch: MicroBatch) -> dict[str, Any]:
    """The micro-batch under the hosts' keys, as their custom losses get it."""
    return {
        **dict.fromkeys(MAY_LACK),
        **batch.data,
        "unconcat_tokens": batch.data["tokens"],
        "total_lengths": batch.layout.total_lengths,
        "response_lengths": batch.layout.response_lengths,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in batch.loss_masks]),
    }


def supervised_loss(args: Namespace, state: ParallelState, batch: MicroBatch, log_probs: Tensor) -> Loss:
    """Negative log-likelihood of the responses, reduced as the policy loss is."""
    loss = Reducer.of(batch, batch.loss_masks, per_token=args.calculate_per_token_loss)(-log_probs)
    return loss, {"loss": loss.detach()}


LOSSES: dict[str, LossFunction] = {"policy_loss": of_log_probs(policy_loss), "custom_loss": custom_loss}
"""Losses by the name that `--loss-type` takes."""

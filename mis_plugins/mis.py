"""The functions that Miles and slime load by dotted path. Wiring only.

    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_with_cp   (Megatron)
    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_fsdp      (FSDP)
    --rollout-data-postprocess-path  mis_plugins.mis.normalize_rollout             (`scope: rollout`)

They keep no state that a second call could see: under recompute a hook runs twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_plugins import config as configs
from mis_plugins.config import CorrectionConfig
from mis_plugins.correction import Correction, correct, mean_weight_of
from mis_plugins.diagnostics import diagnose
from mis_plugins.errors import InputError
from mis_plugins.hosts import fsdp, miles, slime
from mis_plugins.layout import Layout, Placed, check_lengths, whole, zigzag
from mis_plugins.notices import warn_once
from mis_plugins.ragged import Ranks

Tensors = Sequence[Tensor]


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Tensors | None,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    parallel_state: Any = None,
    max_seq_lens: Sequence[int] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensors, Mapping[str, Tensor]]:
    """The TIS hook of Miles and slime on Megatron, with or without context parallelism.

    Args:
        args: the host's arguments, with our config in either spelling (see `config.py`).
        pg_loss: `[T]`, this rank's tokens, with gradient.
        train_log_probs, rollout_log_probs: one 1-D tensor a sequence, this rank's tokens, perhaps none.
        loss_masks: one 1-D tensor a sequence, the full response.
        parallel_state: Miles's; without one the groups are Megatron's.
        max_seq_lens: what each sequence was padded to; needed with `qkv_format: bshd`.

    Returns:
        pg_loss weighted; the full-response masks less what was rejected; the metrics, `[T]` each.

    Raises:
        ConfigError, InputError: before any work, naming the key or the sequence.
    """
    ranks = slime.ranks() if parallel_state is None else miles.ranks(parallel_state)
    size, rank = (
        slime.context_parallel() if parallel_state is None else miles.context_parallel(parallel_state)
    )
    layout = _layout(args, total_lengths, response_lengths, max_seq_lens, size, rank)
    return _hook(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, layout, ranks)


def compute_mis_weights_fsdp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Tensors | None,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    parallel_state: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensors, Mapping[str, Tensor]]:
    """The TIS hook of Miles on FSDP: whole responses, no context parallelism. See `compute_mis_weights_with_cp`."""
    layout = whole([mask.numel() for mask in loss_masks])
    return _hook(
        args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, layout, fsdp.ranks(parallel_state)
    )


def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
) -> tuple[Tensors | None, Tensors, dict[str, Tensors]]:
    """Lists in, lists out, one process: for notebooks and for hosts that multiply by themselves.

    Returns:
        weights, one tensor a sequence, or None where `args.use_tis` is off; masks; metrics, without prefix.
    """
    layout = whole([mask.numel() for mask in loss_masks])
    config = _config(args)
    correction, placed = _correct(
        args, config, train_log_probs, rollout_log_probs, loss_masks, layout, Ranks()
    )
    lengths = layout.local_lengths
    metrics = {name: value.split(lengths) for name, value in diagnose(correction, prefix="").items()}
    weights = correction.weights.split(lengths) if args.use_tis else None
    return weights, _masks(args, correction, placed, loss_masks), metrics


def normalize_rollout(args: Any, *rest: Any) -> None:
    """The rollout-data hook of `mis.weight.normalize.scope: rollout`: leaves the mean weight of the batch on `args`.

    slime and the local host call it as `(args, rollout_id, rollout_data)` on every rank, after the trainer's
    log-probs and before training.

    Raises:
        InputError: Miles, which hands this hook no data; a rollout without recomputed log-probs.
    """
    config = _config(args)
    if not config.weight or not config.weight.normalize or config.weight.normalize.scope != "rollout":
        raise configs.ConfigError(
            "--rollout-data-postprocess-path mis_plugins.mis.normalize_rollout has no effect without "
            "mis.weight.normalize.scope: rollout"
        )
    if len(rest) != 2:
        raise InputError(
            "mis.weight.normalize.scope: rollout needs the rollout batch, and this host calls "
            "--rollout-data-postprocess-path with args alone (Miles does); use scope: data_parallel"
        )
    rollout_data = rest[1]
    if not rollout_data.get("log_probs"):
        if slime.holds_log_probs():
            raise InputError(
                "mis.weight.normalize.scope: rollout needs log-probs recomputed by the trainer before training, and "
                "rollout_data has none; use scope: data_parallel"
            )
        return
    size, rank = slime.context_parallel()
    lengths = rollout_data["total_lengths"], rollout_data["response_lengths"]
    layout = _layout(args, *lengths, rollout_data.get("max_seq_lens"), size, rank)
    inputs = rollout_data["log_probs"], rollout_data.get("rollout_log_probs"), rollout_data["loss_masks"]
    placed = _place(*inputs, layout, slime.ranks())
    args._mis_rollout_mean = mean_weight_of(torch.cat(inputs[0]), torch.cat(inputs[1]), placed.ragged, config)


def _hook(
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Tensors | None,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    layout: Layout,
    ranks: Ranks,
) -> tuple[Tensor, Tensors, Mapping[str, Tensor]]:
    config = _config(args)
    if pg_loss.numel() != sum(layout.local_lengths):
        raise InputError(
            f"pg_loss: {pg_loss.numel()} tokens, but this rank holds {sum(layout.local_lengths)}"
        )
    correction, placed = _correct(args, config, train_log_probs, rollout_log_probs, loss_masks, layout, ranks)
    if args.use_tis:
        pg_loss = torch.where(correction.keep, pg_loss * correction.weights, 0)
    return pg_loss, _masks(args, correction, placed, loss_masks), diagnose(correction)


def _correct(
    args: Any,
    config: CorrectionConfig,
    train_log_probs: Tensors | None,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    layout: Layout,
    ranks: Ranks,
) -> tuple[Correction, Placed]:
    placed = _place(train_log_probs, rollout_log_probs, loss_masks, layout, ranks)
    mean = getattr(args, "_mis_rollout_mean", None)
    proximal, behavior = torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs))
    return correct(proximal, behavior, placed.ragged, config, mean), placed


def _config(args: Any) -> CorrectionConfig:
    """The config in force: without --use-tis, one that changes nothing."""
    config = configs.from_args(args)
    if not args.use_tis:
        if getattr(args, "use_rs", False):
            warn_once("use_rs is set but --use-tis is not: metrics only, nothing is rejected")
        return CorrectionConfig(metrics=config.metrics)
    if getattr(args, "get_mismatch_metrics", False):
        warn_once("--get-mismatch-metrics and --use-tis are both set: the loss is corrected")
    return config


def _layout(
    args: Any,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None,
    cp_size: int,
    cp_rank: int,
) -> Layout:
    padded = getattr(args, "qkv_format", "thd") == "bshd"
    if padded and max_seq_lens is None:
        raise InputError("max_seq_lens: missing, and args.qkv_format: bshd needs it")
    if len(total_lengths) != len(response_lengths):
        raise InputError(
            f"total_lengths has {len(total_lengths)} sequences, response_lengths {len(response_lengths)}"
        )
    if cp_size == 1:
        return whole(response_lengths)
    return zigzag(total_lengths, response_lengths, cp_size, cp_rank, max_seq_lens if padded else None)


def _place(
    train_log_probs: Tensors | None,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    layout: Layout,
    ranks: Ranks,
) -> Placed:
    """The batch on this rank, once everything that can be seen to be wrong with it was refused."""
    if not len(loss_masks):
        raise InputError("loss_masks: no sequence in this micro-batch")
    if rollout_log_probs is None:
        raise InputError(
            "rollout_log_probs: None; the rollout engine must return log-probs for each sampled token"
        )
    if train_log_probs is None:
        raise InputError(
            "train_log_probs: None; the trainer's log-probs were neither recomputed nor handed on"
        )
    check_lengths("loss_masks", loss_masks, layout.response_lengths, "response tokens")
    check_lengths("train_log_probs", train_log_probs, layout.local_lengths, "response tokens on this rank")
    check_lengths(
        "rollout_log_probs", rollout_log_probs, layout.local_lengths, "response tokens on this rank"
    )
    return layout.place(torch.cat(list(loss_masks)), ranks)


def _masks(args: Any, correction: Correction, placed: Placed, loss_masks: Tensors) -> Tensors:
    """The host's masks, or copies of them in its own dtype where something can be rejected."""
    tokens, sequences = correction.keep_tokens, correction.keep_sequences
    if not args.use_tis or (tokens is None and sequences is None):
        return loss_masks
    keep = placed.full_mask(tokens, sequences)
    masks = torch.cat(list(loss_masks))
    return torch.where(keep, masks, 0).to(masks.dtype).split([mask.numel() for mask in loss_masks])

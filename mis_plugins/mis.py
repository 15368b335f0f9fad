"""The functions that Miles and slime load by dotted path. Wiring only.

    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_with_cp   (Megatron)
    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_fsdp      (FSDP)
    --rollout-data-postprocess-path  mis_plugins.mis.normalize_rollout             (`scope: rollout`)
    --rollout-sample-filter-path     mis_plugins.mis.drop_broken_samples
    --custom-pg-loss-reducer-function-path  mis_plugins.mis.kept_token_mean
    --custom-loss-function-path      mis_plugins.mis.policy_loss                   (with --loss-type custom_loss)
    --custom-megatron-before-train-step-hook-path  mis_plugins.mis.report_step     (warnings, `metrics: all`)
    mis_plugins.mis.report_last_step(args), by hand where a run of many ranks ends

What they return depends on no earlier call; the mean of `scope: rollout` waits on the host's arguments. Only the
recorder remembers, and a recompute inside a backward, where a hook runs again for its micro-batch, adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import Correction, correct, mean_weight_of
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.explain.words import ONE_STEP
from mis_plugins.hosts import (
    averages,
    denominator_checks,
    loss_batch,
    loss_flags,
    megatron,
    miles,
    miles_fsdp,
    watching,
)
from mis_plugins.hosts.batch import Handed, HostBatch, Tensors, host_layout
from mis_plugins.hosts.rank_agreement import check_agreement
from mis_plugins.hosts.reducer import kept_token_mean as kept_token_mean
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.sample_filter import drop_broken_samples as drop_broken_samples
from mis_plugins.hosts.step_report import RECORDER
from mis_plugins.loss.micro_batch import (
    Reduce,
    counted,
    micro_batch_loss,
    numerator_of,
    scored_by,
    share_of,
    uncorrected,
)
from mis_plugins.metrics.token_metrics import diagnose
from mis_plugins.packing.layout import Placed, whole

Answer = tuple[Tensor, Tensors, Mapping[str, Tensor]]


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Handed,
    rollout_log_probs: Handed,
    loss_masks: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    parallel_state: Any = None,
    max_seq_lens: Sequence[int] | None = None,
    **_: Any,
) -> Answer:
    """The TIS hook of Miles and slime on Megatron, with or without context parallelism.

    Args:
        args: the host's arguments, with our config in either spelling (see `config/model.py`).
        pg_loss: `[T]`, this rank's tokens, with gradient.
        train_log_probs, rollout_log_probs: one 1-D tensor a sequence, this rank's tokens, perhaps none.
        loss_masks: one 1-D tensor a sequence, the full response.
        parallel_state: Miles's; without one the groups are those of the host that runs.
        max_seq_lens: what each sequence was padded to; needed with `qkv_format: bshd`.

    Returns:
        pg_loss weighted, 0 where rejected; the full-response masks less what was rejected; the metrics, `[T]` each.

    Raises:
        ConfigError, InputError: before any work, naming the key or the sequence.
    """
    host = current(args)
    ranks, cp = host.parallel() if parallel_state is None else miles.groups(parallel_state)
    layout = host_layout(args, total_lengths, response_lengths, max_seq_lens, *cp)
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, layout, ranks)
    return _hook(args, pg_loss, batch, by_kept=host.divides_by_kept(args))


def compute_mis_weights_fsdp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Handed,
    rollout_log_probs: Handed,
    loss_masks: Tensors,
    response_lengths: Sequence[int] | None = None,
    parallel_state: Any = None,
    **_: Any,
) -> Answer:
    """The TIS hook of Miles on FSDP: whole responses, no context parallelism. See `compute_mis_weights_with_cp`.

    There the host divides each sequence's loss, entropy and KL by its kept tokens; the loss comes back times what makes
    of that `mis.denominator`. With Miles's flat keys it is left as it is, as by its own `mis.py`.
    """
    ranks = miles_fsdp.ranks(parallel_state)
    layout = whole([mask.numel() for mask in loss_masks] if response_lengths is None else response_lengths)
    miles_fsdp.check_whole(rollout_log_probs, layout.response_lengths)
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, layout, ranks)
    return _hook(args, pg_loss, batch, by_kept=miles_fsdp.divides_by_kept(args))


def compute_mis_weights(
    args: Any, *, train_log_probs: Handed, rollout_log_probs: Handed, loss_masks: Tensors
) -> tuple[Tensors | None, Tensors, Mapping[str, Tensors]]:
    """Lists in, lists out, one process: for notebooks and for hosts that multiply by themselves.

    Returns:
        weights, one tensor a sequence, or None where `args.use_tis` is off; masks; metrics, without prefix.
    """
    config = config_in_force(args)
    lengths = [mask.numel() for mask in loss_masks]
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, whole(lengths))
    correction, placed = _correct(args, batch, config)
    metrics = {name: list(value.split(lengths)) for name, value in diagnose(correction, prefix="").items()}
    weights = list(correction.loss_factor.split(lengths)) if config.corrects else None
    return weights, _masks(batch, correction, placed), metrics


def normalize_rollout(args: Any, *rest: Any) -> None:
    """The rollout-data hook of `mis.weight.normalize.scope: rollout`: leaves the mean weight of the batch on `args`.

    slime and the local host call it as `(args, rollout_id, rollout_data)` on every rank, after the trainer's
    log-probs and before training.

    Raises:
        InputError: Miles, which hands this hook no data; samples, which slime's documentation promises and its code
            does not pass; a rollout without recomputed log-probs.
        ConfigError: without effect; context- or tensor-parallel ranks with different configs.
    """
    by_loss_hook = getattr(args, "loss_type", None) == "custom_loss"
    config = watching.for_loss_hook(args, reading.from_args(args)) if by_loss_hook else config_in_force(args)
    if not config.weight or not config.weight.normalize or config.weight.normalize.scope != "rollout":
        raise ConfigError(
            "--rollout-data-postprocess-path mis_plugins.mis.normalize_rollout has no effect without --use-tis and "
            "mis.weight.normalize.scope: rollout"
        )
    data = _rollout_data(rest)
    if data is None:
        return
    ranks, cp = current(args).parallel()
    layout = host_layout(args, data["total_lengths"], data["response_lengths"], data.get("max_seq_lens"), *cp)
    batch = HostBatch(data["log_probs"], data.get("rollout_log_probs"), data["loss_masks"], layout, ranks)
    log_probs, numerator = (batch.proximal, batch.behavior), None
    if by_loss_hook and loss_batch.knows_versions(data):
        config = config.where_versions_are_known()
    if config.segment_wise_on:
        loss_batch.check_versions(args, data, config)
        numerator = numerator_of(*log_probs, loss_batch.written(data, layout.local_lengths), config)
    check_agreement(config, ranks.cp, ranks.tp, data["loss_masks"][0].device)
    args._mis_rollout_mean = mean_weight_of(*log_probs, batch.place().ragged, config, numerator)
    args._mis_rollout_segment_wise = config.segment_wise_on


def _rollout_data(handed: Sequence[Any]) -> Mapping[str, Any] | None:
    """What a host hands its rollout-data hook behind `args`; None on a pipeline stage that computes no log-probs."""
    if len(handed) != 2:
        lacking = (
            "(args, samples), and samples hold no trainer log-probs"
            if handed
            else "args alone, as Miles does"
        )
        raise InputError(
            "mis.weight.normalize.scope: rollout needs the rollout batch, (args, rollout_id, rollout_data), and this "
            f"host calls --rollout-data-postprocess-path with {lacking}; use scope: data_parallel"
        )
    data = handed[1]
    if data.get("log_probs"):
        return data
    if not megatron.holds_log_probs():
        return None
    raise InputError(
        "mis.weight.normalize.scope: rollout needs log-probs that the trainer recomputed before training, and "
        f"rollout_data has none; {ONE_STEP}; or use scope: data_parallel"
    )


def policy_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss hook of Miles, slime and the embedded host: the host's own policy loss, corrected.

    Pass `--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss`; it needs no `--use-tis`.
    `mis.objective` and `mis.opsm` may say more than the host's flags can; without them the flags alone decide.
    `use_tis: false` in the file, or `--get-mismatch-metrics` without `--use-tis`, leaves the host's loss, and metrics.

    Args:
        batch: the host's micro-batch.
        logits: of the target policy, with gradient.
        sum_of_sample_mean: the host's average over the loss mask, of a `[T]` tensor of this rank.

    Returns:
        the loss; what to log, detached, by the host's own names and ours.

    Raises:
        ConfigError, InputError: before any work, naming the key, the flag or the list.
    """
    host = current(args, sum_of_sample_mean)
    asked = reading.from_args(args)
    config = loss_flags.config_in_force(args, asked, loss_batch.knows_versions(batch))
    flags, reduce_policy = loss_flags.loss_config(args), loss_batch.policy_reducer(args, batch)
    inputs = loss_batch.read(host, args, batch, logits, config, RECORDER.reports_weights(config))
    ranks = inputs.ragged.ranks
    check_agreement(config, ranks.cp, ranks.tp, logits.device)
    correction, numerator = None, numerator_of(inputs.proximal, inputs.behavior, inputs.written, config)
    if inputs.behavior is not None and (config.corrects or config.metrics != "none"):
        rollout_mean = _rollout_mean(args, config)
        scored = scored_by(inputs, config)
        correction = correct(scored, inputs.behavior, inputs.ragged, config, rollout_mean, numerator)
    share = share_of(inputs, correction, config)
    watched = correction
    if watched is None:
        # Nothing to compare with: what OPSM leaves, and advantages that are not finite, are counted all the same.
        proximal = inputs.proximal
        watched = correct(proximal, proximal, inputs.ragged, replace(config, metrics="none"))
    pg_loss = uncorrected(inputs, config, flags) if watched.config.metrics == "all" else None
    RECORDER.record(counted(inputs, watched, share), pg_loss, inputs.written, numerator)
    reducers = sum_of_sample_mean, reduce_policy
    loss, metrics = micro_batch_loss(inputs, correction, share, config, flags, *reducers)
    return loss, metrics | loss_batch.passed_on(batch, sum_of_sample_mean)


def report_step(args: Any, rollout_id: int, step_id: int, *_: Any) -> None:
    """The before-train-step hook: warns of, and with `metrics: all` logs, what the step before this one added up to.

    Miles, slime and the embedded host call it as `(args, rollout_id, step_id, model, optimizer, scheduler)`, on every
    rank.

    Raises:
        MisError: `mis.on_all_rejected: raise`, and a micro-batch of that step was all rejected.
    """
    RECORDER.report(args, rollout_id, step_id, current(args).parallel()[0])


def report_last_step(args: Any, *_: Any) -> None:
    """At the end of a run, on every rank: what `report_step` does for the others.

    slime can call it after each update of weights through the disk (`docs/metrics.md`); nobody else has a hook there.

    Raises:
        MisError: as `report_step`.
    """
    RECORDER.flush(args, current(args).parallel()[0])


def config_in_force(args: Any) -> CorrectionConfig:
    """The config that the host's arguments carry; without --use-tis, one that changes nothing.

    Raises:
        ConfigError: what this hook cannot serve; it says which could.
    """
    config = reading.from_args(args)
    if config.needs_loss_hook:
        key = "opsm" if config.opsm else "objective" if config.objective else "segment_wise"
        unseen = (
            "which version wrote a token" if key == "segment_wise" else "advantages and the target policy"
        )
        flag = (
            "--use-tis" if args.use_tis else "--get-mismatch-metrics, and to watch use_tis: false in the file"
        )
        raise ConfigError(
            f"{{{key}}}: the TIS hook does not see {unseen}; pass --loss-type custom_loss --custom-loss-function-path "
            f"mis_plugins.mis.policy_loss in place of {flag}"
        ).spelled(reading.spelling(args), "mis.")
    if config.denominator == "kept":
        denominator_checks.check(args)
    if not args.use_tis:
        return watching.metrics_alone(args, config, watching.WITHOUT_USE_TIS)
    watching.warn_where_corrected(args)
    if config.rejects and config.denominator == "original":
        denominator_checks.warn_where_kept(args)
    return config


def _hook(args: Any, pg_loss: Tensor, batch: HostBatch, by_kept: bool) -> Answer:
    """by_kept: the host divides by the tokens that the returned masks keep."""
    config = config_in_force(args)
    denominator_checks.warn_of_other_terms(args, config, by_kept)
    tokens = sum(batch.layout.local_lengths)
    if pg_loss.shape != (tokens,):
        said = f"{len(pg_loss)} tokens" if pg_loss.dim() == 1 else f"shape {list(pg_loss.shape)}, not 1-D"
        raise InputError(f"pg_loss: {said}, but this rank holds {tokens} tokens")
    correction, placed = _correct(args, batch, config)
    RECORDER.record(correction, pg_loss)
    if config.corrects:
        rescales = by_kept and reading.says_denominator(args)
        factor = correction.loss_factor_by_kept if rescales else correction.loss_factor
        pg_loss = torch.where(correction.keep, pg_loss * factor, 0)
    metrics = diagnose(correction, average=averages.average(args))
    return pg_loss, _masks(batch, correction, placed), metrics


def _correct(args: Any, batch: HostBatch, config: CorrectionConfig) -> tuple[Correction, Placed]:
    check_agreement(config, batch.ranks.cp, batch.ranks.tp, batch.loss_masks[0].device)
    placed = batch.place()
    rollout_mean = _rollout_mean(args, config)
    return correct(batch.proximal, batch.behavior, placed.ragged, config, rollout_mean), placed


def _rollout_mean(args: Any, config: CorrectionConfig) -> Tensor | None:
    """What `normalize_rollout` left, which must be of weights of the same kind."""
    mean = getattr(args, "_mis_rollout_mean", None)
    if mean is not None and args._mis_rollout_segment_wise != config.segment_wise_on:
        here, there = "the micro-batch", "rollout_data"
        has, lacks = (here, there) if config.segment_wise_on else (there, here)
        raise InputError(
            f"{loss_batch.VERSION}: of {has}, and not of {lacks}, so that with mis.weight.normalize.scope: rollout the "
            "mean would be of other weights; hand it on with both, or with neither"
        )
    return mean


def _masks(batch: HostBatch, correction: Correction, placed: Placed) -> Tensors:
    """The host's masks, or copies of them in its own dtype where something can be rejected."""
    tokens, sequences = correction.keep_tokens, correction.keep_sequences
    if tokens is None and sequences is None:
        return batch.loss_masks
    keep = correction.keep if placed.ragged.responses is None else placed.full_mask(tokens, sequences)
    masks = batch.loss_mask
    # Times the host's own numbers, in a copy, which bools would not be without asking.
    # Unsafe only in that nobody could backpropagate through the parts: a third less time than a split.
    left = keep.to(masks.dtype, copy=True).mul_(masks)
    return list(left.unsafe_split_with_sizes(list(batch.layout.response_lengths)))

"""The rollout-data hooks of `mis.py`: the mean weight of a rollout, and which share of its steps trains."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View
from mis_plugins.correction.pipeline import mean_weight_of
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import baselines, loss_batch, megatron, resplit, tracking, uncorrected
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.batch import HostBatch, check_apart
from mis_plugins.hosts.host import ONE_STEP
from mis_plugins.hosts.rank_agreement import check_agreement, check_everywhere
from mis_plugins.hosts.reducer import valid_tokens
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.rollout_store import ROLLOUT, Counted, Held, asked
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.loss.micro_batch import numerator_of
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ranks, to_device

ROLLOUTS = ("global_batch_sizes", "num_rollouts")  # of each step: slime's key, and Miles's


def normalize_rollout(
    args: View, rest: Sequence[Any], tis_config: Callable[[View], CorrectionConfig], recorder: Recorder
) -> None:
    """The rollout-data hook of `mis.weight.normalize.scope: rollout`: keeps the mean weight of the batch.

    The hook also counts the samples that train, as `count_samples` does. slime and the embedded host call it as
    `(args, rollout_id, rollout_data)` on every rank, after the trainer's log-probs and before training. Miles
    calls it there with `args` alone; the batch is then read from its trainer.

    Raises:
        InputError: samples, which slime's documentation promises and its code does not pass; a rollout without
            recomputed log-probs; `args` alone from another caller than Miles's trainer.
        ConfigError: the hook would have no effect; context- or tensor-parallel ranks have different configs.
    """
    check_everywhere("normalize_rollout", args.get("mis"))
    config = _in_force(args, tis_config)
    if not config.weight or not config.weight.normalize or config.weight.normalize.scope != "rollout":
        raise ConfigError(
            "--rollout-data-postprocess-path mis_plugins.mis.normalize_rollout has no effect without --use-tis and "
            "mis.weight.normalize.scope: rollout"
        )
    rollout_id, data = rollout_data(rest, "mis.weight.normalize.scope: rollout", "use scope: data_parallel")
    recorder.check_rollout(args, rollout_id, current(args).parallel()[0])
    resplit.compare(args, rollout_id, data)
    baselines.rebase(args, rollout_id, data, lambda _: config)
    if not _has_log_probs(data):
        ROLLOUT.keep(Held(rollout_id, asked(args), None, config))
        return
    batch = HostBatch.of_rollout(args, data, current(args).parallel())
    check_apart(batch.train_log_probs, batch.rollout_log_probs, "log_probs")
    log_probs, numerator = (batch.proximal, batch.behavior), None
    if getattr(args, "loss_type", None) == "custom_loss" and loss_batch.knows_versions(data):
        config = config.where_versions_are_known()
    if config.segment_wise_on:
        loss_batch.check_versions(args, data, config)
        numerator = numerator_of(*log_probs, loss_batch.written(data, batch.layout.local_lengths), config)
    check_agreement(config, batch.ranks)
    mean = mean_weight_of(*log_probs, batch.place(), config, numerator)
    ROLLOUT.keep(Held(rollout_id, asked(args), count(args, rollout_id, data, batch.ranks), config, mean))


def count_samples(
    args: View, rest: Sequence[Any], tis_config: Callable[[View], CorrectionConfig], recorder: Recorder
) -> None:
    """The rollout-data hook for metrics beside fully masked samples: keeps which share of a step trains.

    With `mis.resplit_every` the trainer scores some rollouts twice (`hosts/resplit.py`), and with
    `mis.group_baseline` rejected samples leave the baselines (`hosts/baselines.py`), both as in `normalize_rollout`.

    slime and the embedded host call it as `(args, rollout_id, rollout_data)` on every rank, before training. Miles
    calls it there with `args` alone; the batch is then read from its trainer. Metrics that Miles's `mis.py` lacks are
    then means over what trains, however a step is split. A rollout of several steps needs `report_step` as well, which
    says which of them trains.

    Raises:
        InputError: samples, which slime's documentation promises; `args` alone, from another caller than Miles's
            trainer.
    """
    check_everywhere("count_samples", args.get("mis"))
    rollout_id, data = rollout_data(rest, "mis_plugins.mis.count_samples", "drop it: the step hook logs exact means")
    ranks = current(args).parallel()[0]
    recorder.check_rollout(args, rollout_id, ranks)
    resplit.compare(args, rollout_id, data)
    baselines.rebase(args, rollout_id, data, lambda args: _in_force(args, tis_config))
    counted = count(args, rollout_id, data, ranks) if megatron.holds_log_probs() else None
    ROLLOUT.keep(Held(rollout_id, asked(args), counted))


def _in_force(args: View, tis_config: Callable[[View], CorrectionConfig]) -> CorrectionConfig:
    """The config of the hook that makes the loss: one that changes nothing where the run only watches."""
    by_loss_hook = getattr(args, "loss_type", None) == "custom_loss"
    return uncorrected.for_loss_hook(args, reading.from_args(args)) if by_loss_hook else tis_config(args)


def _has_log_probs(data: Mapping[str, Any]) -> bool:
    """Whether the rollout batch holds the trainer's log-probs, which only the last pipeline stage computes."""
    if data.get("log_probs"):
        return True
    if not megatron.holds_log_probs():
        return False
    raise InputError(
        "mis.weight.normalize.scope: rollout needs log-probs that the trainer recomputed before training, and "
        f"rollout_data has none; {ONE_STEP}; or use scope: data_parallel"
    )


def rollout_data(handed: Sequence[Any], what: str, instead: str) -> tuple[int, Mapping[str, Any]]:
    """The rollout's number and batch: what a host hands the hook behind `args`, or what Miles's trainer holds.

    Raises:
        InputError: there is no rollout batch; the message says what needs one, and what to do instead.
    """
    if len(handed) == 2:
        return handed[0], handed[1]
    # Miles calls the hook with `args` alone; the batch is a local variable of the caller.
    held = {} if handed else MILES.train_actor.frame()
    if {"rollout_id", "rollout_data"} <= held.keys():
        return held["rollout_id"], held["rollout_data"]
    lacking = (
        "(args, samples), and samples hold no trainer log-probs"
        if handed
        else "args alone, and not from Miles's train_actor, where the batch could be read"
    )
    raise InputError(
        f"{what} needs the rollout batch, (args, rollout_id, rollout_data), and this "
        f"host calls --rollout-data-postprocess-path with {lacking}; {instead}"
    )


def count(args: Any, rollout_id: int, data: Mapping[str, Any], ranks: Ranks) -> Counted:
    """Share of each step's average that trains: one small sum over data-parallel ranks, without waiting.

    A rollout counts once, however many samples, ranks and micro-batches hold its tokens. Where the host does
    not tell how many rollouts a step has, each sample counts as one.
    """
    masks = data["loss_masks"]
    step_of_sample, steps = _schedule(args, data)
    valid = valid_tokens(torch.cat(list(masks)), [mask.numel() for mask in masks])
    per_token = getattr(args, "calculate_per_token_loss", False)
    divided_by = valid.clamp(min=1)
    of_rollout = data.get("rollout_mask_sums")
    parts = valid if per_token else valid / (divided_by if of_rollout is None else of_rollout.clamp(min=1))
    rows = torch.stack([parts, divided_by if per_token else torch.ones_like(valid)])
    sums = rows.new_zeros(2, steps).index_add_(1, to_device(step_of_sample, rows.device), rows)
    if ranks.dp is not None:
        all_reduce(sums, ranks.dp)
    trained, whole = sums.unbind()
    rollouts = [data[name] for name in ROLLOUTS if name in data]
    if rollouts and not per_token:
        whole = to_device(list(rollouts[0]), rows.device)
    return Counted(rollout_id, torch.where(trained > 0, trained / whole, 1))


def _schedule(args: Any, data: Mapping[str, Any]) -> tuple[list[int], int]:
    """Step of each sample of this rank, and the number of steps; equal parts in order where no schedule is handed."""
    per_step: Sequence[int] | None = data.get("num_microbatches")
    samples = len(data["loss_masks"])
    if per_step is None:
        steps = tracking.steps_per_rollout(args)
        return [i * steps // samples for i in range(samples)], steps
    of_micro_batch = [step for step, number in enumerate(per_step) for _ in range(number)]
    placed = zip(of_micro_batch, data["micro_batch_indices"], strict=True)
    step_of = {sample: step for step, samples_of in placed for sample in samples_of}
    return [step_of[i] for i in range(samples)], len(per_step)

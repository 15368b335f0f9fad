"""The policy loss hook from the host's micro-batch to its loss: what is read, corrected, recorded and handed back."""

from __future__ import annotations

from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.hosts import loss_batch, loss_flags
from mis_plugins.hosts.host import Batch, Host
from mis_plugins.hosts.rank_agreement import check_agreement
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.hosts.routing import WATCHING
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.hosts.uncorrected import warn_of_one_sequence
from mis_plugins.loss import micro_batch
from mis_plugins.loss.micro_batch import LossInputs, Reduce


def policy_loss(
    args: View, batch: Batch, logits: Tensor, reduce: Reduce, host: Host, recorder: Recorder
) -> tuple[Tensor, dict[str, Tensor]]:
    """The host's policy loss, corrected, and what to log; see `mis_plugins.mis.policy_loss`."""
    config = _config(args, batch, host)
    flags, reduce_policy = loss_flags.loss_config(args, recorder.step), loss_batch.policy_reducer(args, batch)
    check_agreement(config, host.parallel()[0])
    inputs = loss_batch.read(host, args, batch, logits, config, recorder.reports_weights(config))
    numerator = micro_batch.numerator_of(inputs.proximal, inputs.behavior, inputs.written, config)
    correction = None
    if inputs.behavior is not None and (config.corrects or config.center or config.metrics != "none"):
        warn_of_one_sequence(config, len(batch["loss_masks"]), inputs.ragged.ranks)
        correction = _corrected(args, batch, inputs, config, host, numerator)
    share = micro_batch.share_of(inputs, correction, config)
    recorded = micro_batch.without_behavior(inputs, config) if correction is None else correction
    pg_loss = micro_batch.uncorrected(inputs, config, flags) if recorded.config.reports_step else None
    recorder.record(micro_batch.for_metrics(inputs, recorded, share), pg_loss, inputs.written, numerator)
    loss, metrics = micro_batch.micro_batch_loss(inputs, recorded, share, config, flags, reduce, reduce_policy)
    return loss, metrics | loss_batch.passed_on(batch, reduce)


def _config(args: View, batch: Batch, host: Host) -> CorrectionConfig:
    asked = reading.from_args(args)
    if asked.resplit_every is not None:
        from mis_plugins.hosts import resplit

        resplit.check_hook(args, asked)
    config = loss_flags.config_in_force(args, asked, host, loss_batch.knows_versions(batch))
    return config if host.step_hook else config.without_step_hook


def _corrected(
    args: View, batch: Batch, x: LossInputs, config: CorrectionConfig, host: Host, numerator: Tensor | None
) -> Correction:
    """Weights and masks of the micro-batch against the rollout engine, and its routes for the watch."""
    assert x.behavior is not None
    rollout_mean = ROLLOUT.mean(args, config)
    flags = loss_batch.flags(host, args, batch, x.target.device)
    routes = WATCHING.routes(args, config, flags)
    compared = micro_batch.compared_log_probs(x, config)
    correction = correct(compared, x.behavior, x.ragged, config, rollout_mean, numerator, routes)
    WATCHING.record(correction, flags)
    return correction

"""The policy loss hook from the host's micro-batch to its loss: what is read, corrected, recorded and handed back.

What the host's flags say of the policy loss completes the config: objective, OPSM, clipping, entropy and KL.
"""

from typing import Any

from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.flat import spelled
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import checks, loss_batch, tracking, uncorrected
from mis_plugins.hosts.batch import layout_of
from mis_plugins.hosts.host import Batch, Host
from mis_plugins.hosts.rank_agreement import check_agreement
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.hosts.routing import WATCHING
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.loss import micro_batch
from mis_plugins.loss.micro_batch import LossConfig, LossInputs, Reduce
from mis_plugins.loss.objective import ESTIMATORS, Clip


def policy_loss(
    args: View, batch: Batch, logits: Tensor, reduce: Reduce, host: Host, recorder: Recorder
) -> tuple[Tensor, dict[str, Tensor]]:
    """The host's policy loss, corrected, and what to log; see `mis_plugins.mis.policy_loss`."""
    config = _config(args, batch, host)
    flags, reduce_policy = loss_config(args, recorder.step), loss_batch.policy_reducer(args, batch)
    check_agreement(config, host.parallel()[0])
    inputs = loss_batch.read(host, args, batch, logits, config, recorder.reports_weights(config))
    numerator = micro_batch.numerator_of(inputs.proximal, inputs.behavior, inputs.written, config)
    correction = None
    if inputs.behavior is not None and (config.corrects or config.center or config.metrics != "none"):
        uncorrected.warn_of_one_sequence(config, len(batch["loss_masks"]), inputs.ragged.ranks)
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
    config = config_in_force(args, asked, host, loss_batch.knows_versions(batch))
    return config if host.step_hook else config.without_step_hook


def _corrected(
    args: View, batch: Batch, x: LossInputs, config: CorrectionConfig, host: Host, numerator: Tensor | None
) -> Correction:
    """Weights and masks of the micro-batch against the rollout engine, and its routes for the watch."""
    assert x.behavior is not None
    rollout_mean = ROLLOUT.mean(args, config)
    flags = None
    if WATCHING.watch is not None:
        layout = layout_of(args, batch, host.parallel()[1])
        flags = WATCHING.flags(args, layout, batch["total_lengths"], x.target.device)
    routes = WATCHING.routes(args, config, flags)
    compared = micro_batch.compared_log_probs(x, config)
    correction = correct(compared, x.behavior, x.ragged, config, rollout_mean, numerator, routes)
    WATCHING.record(correction, flags)
    return correction


def config_in_force(args: Any, config: CorrectionConfig, host: Host, versions_known: bool = False) -> CorrectionConfig:
    """Complete `config` with objective and OPSM of the user, which no flag may contradict, or of the flags.

    In a run that only watches, `config` keeps its metrics alone; objective and OPSM come from the flags.

    Args:
        versions_known: whether the host says which version wrote each token.

    Raises:
        ConfigError: it quotes the setting and the flag.
    """
    config = uncorrected.for_loss_hook(args, config)
    for name in ("unbiased_kl", "weigh_kl"):
        if getattr(config.objective, name, False) and not getattr(args, "use_kl_loss", False):
            raise ConfigError(f"mis.objective.{name}: true has no effect without --use-kl-loss")
    config = uncorrected.with_flags(args, config)
    checks.run("loss", args, config, host)
    return config.where_versions_are_known() if versions_known else config


def _number(args: Any, name: str) -> float:
    return reading.number(getattr(args, name), f"--{name.replace('_', '-')}")


def loss_config(args: Any, step: tuple[int, int] | None = None) -> LossConfig:
    """Read the host's flags about clipping, entropy and KL."""
    kl_type = None
    if getattr(args, "use_kl_loss", False):
        kl_type = args.kl_loss_type
        if kl_type not in ESTIMATORS:
            raise ConfigError(f"--kl-loss-type: got {kl_type!r}; choose one of {', '.join(ESTIMATORS)}")
    with spelled(low="--eps-clip", high="--eps-clip-high", dual="--eps-clip-c"):
        dual = None if getattr(args, "eps_clip_c", None) is None else _number(args, "eps_clip_c")
        clip = Clip(_number(args, "eps_clip"), _number(args, "eps_clip_high"), dual)
    coefs = ("entropy_coef", "kl_loss_coef")
    entropy_coef, kl_coef = (_number(args, name) if getattr(args, name, None) else 0.0 for name in coefs)
    return LossConfig(clip, entropy_coef, kl_type, kl_coef, tracking.average(args, step))

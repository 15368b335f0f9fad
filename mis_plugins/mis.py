"""The functions that Miles and slime load by dotted path. Wiring only.

    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_with_cp   (Megatron)
    --custom-tis-function-path       mis_plugins.mis.compute_mis_weights_fsdp      (FSDP)
    --rollout-data-postprocess-path  mis_plugins.mis.normalize_rollout             (`scope: rollout`)
    --rollout-data-postprocess-path  mis_plugins.mis.count_samples                 (metrics beside masked samples)
    (both functions above also serve `mis.resplit_every` and `mis.group_baseline`)
    --rollout-sample-filter-path     mis_plugins.mis.drop_broken_samples
    --custom-pg-loss-reducer-function-path  mis_plugins.mis.kept_token_mean
    --custom-loss-function-path      mis_plugins.mis.policy_loss                   (with --loss-type custom_loss)
    --custom-megatron-before-train-step-hook-path  mis_plugins.mis.report_step     (warnings, metrics of whole steps)
    --custom-megatron-before-log-prob-hook-path    mis_plugins.mis.watch_routes    (mixture of experts)
    mis_plugins.mis.report_last_step(args), by hand where a run of many ranks ends

Fully asynchronous Miles and slime say with three more which version wrote each token (`docs/async.md`):

    --custom-generate-function-path  mis_plugins.mis.generate_with_versions
    --custom-convert-samples-to-train-data-path  mis_plugins.mis.convert_with_versions
    --custom-megatron-init-path      mis_plugins.mis.carry_versions

A hook's answer depends on no earlier call, except that the rollout-data hooks leave numbers of one rollout in this
process (`hosts/rollout_store.py`). The recorder alone remembers more; it ignores a recompute inside a backward, where
hooks run again. Nothing is written on the host's arguments, which are read through `config/view.py`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View, once, view
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import checks, megatron, tracking
from mis_plugins.hosts.batch import Handed, HostBatch, Lengths, Tensors, check_apart, host_layout, numbers_of
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.rank_agreement import check_agreement, check_everywhere
from mis_plugins.hosts.registry import current
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.hosts.step_report import RECORDER
from mis_plugins.metrics.token_metrics import Average, diagnose
from mis_plugins.packing.layout import whole

if TYPE_CHECKING:
    from mis_plugins.hosts.routing import Watching
    from mis_plugins.loss.micro_batch import Reduce
    from mis_plugins.routing.table import Flags
else:
    Flags = Reduce = Watching = Any  # loaded by the hooks that need them: other jobs pay nothing for them

Answer = tuple[Tensor, Tensors, Mapping[str, Tensor]]

ELSEWHERE = {
    "drop_broken_samples": "sample_filter",
    "turns_checked": "turns",
    "kept_token_mean": "reducer",
    "generate_with_versions": "versions.generate",
    "convert_with_versions": "versions.rollouts",
    "carry_versions": "versions.carrying",
}
"""Hooks of this module that lie whole in a file of `hosts/`, which is loaded where a host asks for one."""


def __getattr__(name: str) -> Any:
    if name not in ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mis_plugins.hosts.{ELSEWHERE[name]}"), name)


@Hook
def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Handed,
    rollout_log_probs: Handed,
    loss_masks: Tensors,
    total_lengths: Lengths,
    response_lengths: Lengths,
    parallel_state: Any = None,
    max_seq_lens: Lengths | None = None,
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
    args = view(args)
    ranks, cp = once(args, current).parallel() if parallel_state is None else megatron.handed(parallel_state)
    layout = host_layout(args, total_lengths, response_lengths, max_seq_lens, *cp, loss_masks)
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, layout, ranks)
    routes = _begun_watch()
    flags = None if routes is None else routes.flags(args, layout, total_lengths, pg_loss.device)
    return _hook(args, pg_loss, batch, once(args, _settled), flags)


@Hook
def compute_mis_weights_fsdp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Handed,
    rollout_log_probs: Handed,
    loss_masks: Tensors,
    response_lengths: Lengths | None = None,
    parallel_state: Any = None,
    **_: Any,
) -> Answer:
    """The TIS hook of Miles on FSDP: whole responses, no context parallelism. See `compute_mis_weights_with_cp`.

    Miles on FSDP divides each sequence's loss, entropy and KL by its kept tokens. The hook scales the loss so
    that `mis.denominator` holds. With Miles's flat keys, `use_mask` aside, it does not scale, as Miles's own
    `mis.py`.
    """
    from mis_plugins.hosts.adapters import miles_fsdp

    args, ranks = view(args), miles_fsdp.ranks(parallel_state)
    sides = {"train_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs}
    layout = whole(numbers_of(loss_masks, response_lengths, **sides))
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, layout, ranks, if_cut=miles_fsdp.IF_CUT)
    return _hook(args, pg_loss, batch, once(args, _settled_on_fsdp), None)


def compute_mis_weights(
    args: Any, *, train_log_probs: Handed, rollout_log_probs: Handed, loss_masks: Tensors
) -> tuple[Tensors | None, Tensors, Mapping[str, Tensors]]:
    """Lists in, lists out, one process: for notebooks and for hosts that multiply by themselves.

    Returns:
        weights, one tensor a sequence, or None where `args.use_tis` is off; masks; metrics, without prefix.
    """
    args = view(args)
    config = config_in_force(args).without_step_hook
    lengths = numbers_of(loss_masks, train_log_probs=train_log_probs, rollout_log_probs=rollout_log_probs)
    batch = HostBatch(train_log_probs, rollout_log_probs, loss_masks, whole(lengths))
    correction = _correct(args, batch, config)
    metrics = {name: list(value.split(lengths)) for name, value in diagnose(correction, prefix="").items()}
    weights = list(correction.loss_factor.split(lengths)) if config.corrects else None
    return weights, _masks(batch, correction), metrics


@Hook
def normalize_rollout(args: Any, *rest: Any) -> None:
    """The rollout-data hook that keeps the mean weight of a rollout; see `hosts/rollout_hooks.py`."""
    from mis_plugins.hosts import rollout_hooks

    rollout_hooks.normalize_rollout(view(args), rest, config_in_force, RECORDER)


@Hook
def count_samples(args: Any, *rest: Any) -> None:
    """The rollout-data hook that counts which share of a step trains; see `hosts/rollout_hooks.py`."""
    from mis_plugins.hosts import rollout_hooks

    rollout_hooks.count_samples(view(args), rest, config_in_force, RECORDER)


@Hook
def policy_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss hook of Miles, slime and the embedded host: the host's own policy loss, corrected.

    Pass `--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss`; it needs no
    `--use-tis`. `mis.objective` and `mis.opsm` may say more than the host's flags can; without them the flags
    alone decide. `use_tis: false` in the file, or `--get-mismatch-metrics` without `--use-tis`, leaves the
    host's loss as it is and adds metrics alone.

    Args:
        batch: the host's micro-batch.
        logits: of the target policy, with gradient.
        sum_of_sample_mean: the host's average over the loss mask, of a `[T]` tensor of this rank.

    Returns:
        the loss; what to log, detached, by the host's own names and ours.

    Raises:
        ConfigError, InputError: before any work, naming the key, the flag or the list.
    """
    from mis_plugins.hosts import loss_hook

    args = view(args)
    host = current(args, sum_of_sample_mean)
    return loss_hook.policy_loss(args, batch, logits, sum_of_sample_mean, host, RECORDER)


@Hook
def watch_routes(args: Any, model: Sequence[Any], store_prefix: str = "", *_: Any) -> None:
    """The before-log-prob hook: watches the routers of a mixture of experts, and the replay of the engine's routes.

    Pass `--custom-megatron-before-log-prob-hook-path mis_plugins.mis.watch_routes` beside `report_step`, which reads
    what was seen, and `--use-rollout-routing-replay`, with which the engine returns its routes (`docs/routing.md`).
    """
    _watch().before_log_probs(view(args), model, store_prefix)


@Hook
def report_step(args: Any, rollout_id: int, step_id: int, *model: Any) -> None:
    """The before-train-step hook: warns about the previous step, and logs its metrics with `metrics: watch` or `all`.

    Miles, slime and the embedded host call it as `(args, rollout_id, step_id, model, optimizer, scheduler)`, on every
    rank.

    Raises:
        MisError: `mis.on_all_rejected: raise`, and a micro-batch of that step was all rejected; `mis.routing.on_fault:
            raise`, and the engine's routes were not replayed.
    """
    args = view(args)
    check_everywhere("report_step", args.get("mis"))
    RECORDER.report(args, rollout_id, step_id, current(args).parallel()[0])
    ROLLOUT.begin(rollout_id)
    stages = model[0] if model else None
    if stages is not None and (_begun_watch() or reading.from_args(args).routing is not None):
        _watch().before_step(args, rollout_id, step_id, stages)


def report_last_step(args: Any, *_: Any) -> None:
    """Report the last step, as `report_step` reports the others; to be called on every rank when a run ends.

    slime can call it after each update of weights through the disk (`docs/metrics.md`); no other host has a
    hook there.

    Raises:
        MisError: as `report_step`.
    """
    RECORDER.flush(view(args), current(view(args)).parallel()[0])


def config_in_force(args: Any, host: Host | None = None) -> CorrectionConfig:
    """The config that the host's arguments carry; without --use-tis, one that changes nothing.

    Args:
        host: the host of the hook that is called; None where it is the host of this process.

    Raises:
        ConfigError: a setting that the TIS hook cannot serve; the error says which hook can.
    """
    args = view(args)
    config = reading.from_args(args)
    if config.resplit_every is not None:
        from mis_plugins.hosts import resplit

        resplit.check_hook(args, config)
    if config.needs_loss_hook:
        from mis_plugins.config import messages

        raise ConfigError(messages.needs_loss_hook(args, config)).spelled(reading.spelling(args), "mis.")
    if not args.use_tis:
        from mis_plugins.hosts import uncorrected

        return uncorrected.metrics_alone(args, config, uncorrected.WITHOUT_USE_TIS)
    checks.run("tis", args, config, host or current(args))
    return config


@dataclass(frozen=True)
class Settled:
    """What the TIS hook makes of the host's arguments, once for as long as they say the same.

    rescales: asks whether the host divides a micro-batch's loss by its kept tokens, so that the loss is scaled; None of
        a host that never does.
    average: how the host averages metrics, where no rollout-data hook has counted samples.
    """

    config: CorrectionConfig
    rescales: Callable[[View], bool] | None
    average: Average | None


def _settled(args: View, host: Host | None = None) -> Settled:
    host = host or current(args)
    config = config_in_force(args, host)
    is_asked = host.divides_by_kept is not Host.divides_by_kept and reading.says_denominator(args)
    return Settled(
        config if host.step_hook else config.without_step_hook,
        host.divides_by_kept if is_asked else None,
        tracking.average_of_host(args),
    )


def _settled_on_fsdp(args: View) -> Settled:
    from mis_plugins.hosts.adapters import miles_fsdp

    if (host := current(args)).megatron:  # which divides otherwise, and whose groups the hook does not know
        raise ConfigError(
            f"compute_mis_weights_fsdp: {host.title} runs; give --custom-tis-function-path {host.tis_hook}"
        )
    return _settled(args, miles_fsdp.HOST)


def _hook(args: View, pg_loss: Tensor, batch: HostBatch, settled: Settled, flags: Flags | None) -> Answer:
    """The TIS hook behind every host.

    Args:
        flags: routes of the tokens, where a watch knows them.
    """
    config = settled.config
    tokens = sum(batch.layout.local_lengths)
    if not isinstance(pg_loss, Tensor) or pg_loss.shape != (tokens,):
        shape = f"shape {list(pg_loss.shape)}" if isinstance(pg_loss, Tensor) else f"a {type(pg_loss).__name__}"
        raise InputError(f"pg_loss: {shape}, not 1-D with the {tokens} tokens that this rank holds")
    correction = _correct(args, batch, config, flags)
    loss = pg_loss
    if config.corrects:
        rescales = settled.rescales is not None and settled.rescales(args)
        factor = correction.loss_factor_by_kept if rescales else correction.loss_factor
        loss = (pg_loss * factor).masked_fill_(~correction.keep, 0)
    masks = _masks(batch, correction)
    RECORDER.record(correction, pg_loss)
    if flags is not None:
        _watch().record(correction, flags)
    average = tracking.average(args, RECORDER.step) if ROLLOUT.held else settled.average
    return loss, masks, diagnose(correction, average=average)


def _correct(args: Any, batch: HostBatch, config: CorrectionConfig, flags: Flags | None = None) -> Correction:
    if config.corrects:
        check_apart(batch.train_log_probs, batch.rollout_log_probs)
    if len(batch.loss_masks) == 1:
        from mis_plugins.hosts.uncorrected import warn_of_one_sequence

        warn_of_one_sequence(config, 1, batch.ranks)
    watched = flags is not None or config.reads_routes or config.routing is not None
    routed = _watch().routes(args, config, flags) if watched else None
    check_agreement(config, batch.ranks)
    rollout_mean = ROLLOUT.mean(args, config) if ROLLOUT.held else None
    return correct(batch.proximal, batch.behavior, batch.place(), config, rollout_mean, routes=routed)


def _begun_watch() -> Watching | None:
    """The watch over routers; None where no hook has begun one."""
    module = sys.modules.get("mis_plugins.hosts.routing")
    return None if module is None or module.WATCHING.watch is None else module.WATCHING


def _watch() -> Watching:
    from mis_plugins.hosts.routing import WATCHING

    return WATCHING


def _masks(batch: HostBatch, correction: Correction) -> Tensors:
    """The host's masks, or copies of them in its own dtype where something can be rejected."""
    tokens, sequences = correction.stage.keep, correction.keep_sequences
    if tokens is None and sequences is None:
        return batch.loss_masks
    keep = correction.keep if correction.ragged.responses is None else correction.ragged.full_mask(tokens, sequences)
    kept = batch.loss_mask * keep  # the host's own numbers, in the host's dtype
    # "Unsafe" only means that no gradient flows through the parts; it takes a third less time than a split.
    return list(kept.unsafe_split_with_sizes(list(batch.layout.response_lengths)))

"""What a custom policy loss needs of each host: its flags, its log-probs, its groups.

A host is known by the module that made the reducer it hands over, and imported only then.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, OpsmConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import averages, denominator_checks, miles, slime, watching
from mis_plugins.hosts.batch import host_layout
from mis_plugins.loss.micro_batch import LossConfig, LossInputs, Reduce
from mis_plugins.loss.objective import ESTIMATORS, Clip
from mis_plugins.packing.ragged import Ranks
from mis_plugins.versions.segment_wise import Written

Batch = Mapping[str, Any]
Scores = tuple[Sequence[Tensor], Sequence[Tensor] | None]  # log-probs and entropy, one tensor a sequence


@dataclass(frozen=True)
class LossHost:
    """One host.

    parallel: process groups, and (size, rank) of context parallelism.
    scores: log-probs of the sampled tokens with gradient, and the entropy where the host computes it.
    recomputes: whether its batches always carry the trainer's log-probs; otherwise pi_theta stands in for them.
    """

    parallel: Callable[[], tuple[Ranks, tuple[int, int]]]
    scores: Callable[[Any, Batch, Tensor], Scores]
    recomputes: Callable[[Any], bool]


def of_reducer(reduce: Reduce) -> LossHost:
    """The host that made `sum_of_sample_mean`.

    Raises:
        InputError: none that we know.
    """
    package = str(getattr(reduce, "__module__", "")).partition(".")[0]
    if package not in HOSTS:
        raise InputError(
            f"mis_plugins.mis.policy_loss: sum_of_sample_mean comes from {package or 'nowhere'}; it serves the losses "
            f"of {', '.join(HOSTS)}"
        )
    return HOSTS[package]


def _miles_parallel() -> tuple[Ranks, tuple[int, int]]:
    from miles.backends.training_utils.parallel import get_parallel_state  # type: ignore[import-not-found]

    return miles.parallel(get_parallel_state())


# Which tokens the engine could have sampled: Miles's keys (its #2595), and slime's, where they reach Miles.
SAMPLING_SUPPORT = (
    "rollout_sampling_mask_ids",
    "rollout_sampling_mask_offsets",
    "rollout_sampling_mask",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)


def _check_whole_vocabulary(args: Any, batch: Batch) -> None:
    """Refuse log-probs of the engine that are renormalized over what top-p or top-k left of the vocabulary.

    Raises:
        InputError: it names the key, or the argument of Miles that says so.
    """
    carried = [name for name in SAMPLING_SUPPORT if any(row is not None for row in _rows(batch, name))]
    if getattr(args, "use_sampling_support_replay", False):
        carried.append("use_sampling_support_replay")
    if carried:
        raise InputError(
            f"{carried[0]}: rollout_log_probs are renormalized over the tokens that top-p or top-k left, and "
            "mis_plugins.mis.policy_loss scores the whole vocabulary on Miles; give --rollout-top-p 1 and "
            "--rollout-top-k -1, or the TIS hook where Miles itself scores those tokens"
        )


def _rows(batch: Batch, name: str) -> Sequence[Any]:
    return () if batch.get(name) is None else batch[name]


def _miles_scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    _check_whole_vocabulary(args, batch)
    from miles.backends.training_utils.loss_hub.logit_processors import (  # type: ignore[import-not-found]
        get_log_probs_and_entropy,
    )

    wants_entropy = args.entropy_coef != 0 or args.observe_training_entropy
    found = get_log_probs_and_entropy(
        logits,
        args=args,
        with_entropy=wants_entropy,
        entropy_requires_grad=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
        **_lengths(batch),
    )
    return found["log_probs"], found.get("entropy")


def _slime_scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    from slime.backends.megatron_utils.loss import (  # type: ignore[import-not-found]
        get_log_probs_and_entropy,
        get_rollout_top_p_logprob_kwargs,
    )

    nucleus = get_rollout_top_p_logprob_kwargs(args, batch)
    _, found = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **_lengths(batch), **nucleus)
    return found["log_probs"], found["entropy"]


def _lengths(batch: Batch) -> dict[str, Any]:
    return {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}


def _embedded_scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    from mis_plugins.local.train.log_probs import get_log_probs_and_entropy

    found = get_log_probs_and_entropy(
        logits, args=args, with_entropy=args.entropy_coef != 0, **_lengths(batch)
    )
    return found["log_probs"], found.get("entropy")


HOSTS = {
    "miles": LossHost(_miles_parallel, _miles_scores, lambda args: not args.skip_actor_forward_only),
    "slime": LossHost(slime.parallel, _slime_scores, lambda args: False),
    "mis_plugins": LossHost(slime.parallel, _embedded_scores, lambda args: False),
}


# The flags.


def config_in_force(args: Any, config: CorrectionConfig, versions_known: bool = False) -> CorrectionConfig:
    """`config` with an objective and OPSM: the user's own, which must not contradict the host's flags, or the flags'.

    Where the run only watches, metrics are left of `config`, and the flags' objective and OPSM.

    Args:
        versions_known: whether the host says which version wrote each token.

    Raises:
        ConfigError: it quotes both.
    """
    config = watching.for_loss_hook(args, config)
    asked, opsm = config.objective, config.opsm
    objective = _objective(args, asked)
    if getattr(args, "use_opsm", False):
        if opsm is not None:
            raise ConfigError("--use-opsm and mis.opsm are both set; keep one of them")
        opsm = OpsmConfig(args.opsm_delta, reference=objective.old)
    if config.denominator == "kept":
        denominator_checks.check(args)
    denominator_checks.check_reducer(args, drops=config.rejects or opsm is not None)
    normalize = config.weight and config.weight.normalize
    if normalize and normalize.scope == "rollout" and objective.old == "behavior":
        raise ConfigError(
            "mis.weight.normalize.scope: rollout is computed before training, but with mis.objective.old: behavior "
            "the weights are those of pi_theta, which every step changes; use scope: data_parallel"
        )
    try:
        config = dataclasses.replace(config, objective=objective, opsm=opsm)
    except ConfigError as error:
        implied = (
            ""
            if asked or not args.use_rollout_logprobs
            else " (--use-rollout-logprobs means mis.objective.old: behavior)"
        )
        raise ConfigError(error.template + implied).spelled(reading.spelling(args), "mis.") from None
    return config.where_versions_are_known() if versions_known else config


# A host's flag, and what it says of the objective.
IMPLIED: tuple[tuple[str, Callable[[Any], bool], dict[str, Any]], ...] = (
    (
        "--advantage-estimator gspo",
        lambda args: args.advantage_estimator == "gspo",
        {"surrogate": "clip", "ratio": "sequence"},
    ),
    (
        "--advantage-estimator cispo",
        lambda args: args.advantage_estimator == "cispo",
        {"surrogate": "cispo"},
    ),
    ("--use-rollout-logprobs", lambda args: args.use_rollout_logprobs, {"old": "behavior"}),
    ("--use-unbiased-kl", lambda args: getattr(args, "use_unbiased_kl", False), {"unbiased_kl": True}),
)


def _objective(args: Any, asked: ObjectiveConfig | None) -> ObjectiveConfig:
    said = [(flag, fields) for flag, is_set, fields in IMPLIED if is_set(args)]
    coupled = asked is not None and reading.areal_keys(vars(args)).get("use_decoupled_loss") is False
    if coupled:  # AReaL's key speaks of `old` alone: the rest is the flags'
        said.append(("use_decoupled_loss: false", {"old": "behavior"}))
    if asked is None or coupled:
        return ObjectiveConfig(**{name: value for _, fields in said for name, value in fields.items()})
    for flag, fields in said:
        for name, value in fields.items():
            if getattr(asked, name) != value:
                raise ConfigError(
                    f"mis.objective.{name}: {_yaml(getattr(asked, name))} contradicts {flag}, which means "
                    f"{name}: {_yaml(value)}; change one of them"
                )
    for name in ("unbiased_kl", "weigh_kl"):
        if getattr(asked, name) and not getattr(args, "use_kl_loss", False):
            raise ConfigError(f"mis.objective.{name}: true has no effect without --use-kl-loss")
    return asked


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def loss_config(args: Any) -> LossConfig:
    """What the host's flags say of clipping, entropy and KL.

    Raises:
        ConfigError: it quotes the flag.
    """
    kl_type = None
    if getattr(args, "use_kl_loss", False):
        kl_type = args.kl_loss_type
        if kl_type not in ESTIMATORS:
            raise ConfigError(f"--kl-loss-type: got {kl_type!r}; choose one of {', '.join(ESTIMATORS)}")
    try:
        clip = Clip(args.eps_clip, args.eps_clip_high, getattr(args, "eps_clip_c", None))
    except ConfigError as error:
        raise error.spelled({"dual": "--eps-clip-c"}) from None
    entropy_coef, kl_coef = getattr(args, "entropy_coef", 0.0), getattr(args, "kl_loss_coef", 0.0)
    return LossConfig(clip, entropy_coef, kl_type, kl_coef, averages.average(args))


def policy_reducer(args: Any, batch: Batch) -> Reduce | None:
    """Reducer of `--custom-pg-loss-reducer-function-path`, on the masks before rejection: rejected tokens are 0."""
    path = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if path is None:
        return None
    build = pkgutil.resolve_name(path)
    masks, per_token = batch["loss_masks"], args.calculate_per_token_loss
    return build(batch["total_lengths"], batch["response_lengths"], masks, per_token)


# The batch.


def read(
    host: LossHost,
    args: Any,
    batch: Batch,
    logits: Tensor,
    config: CorrectionConfig,
    reports_weights: bool = False,
) -> LossInputs:
    """Score the tokens with the host's own helper, and lay everything out flat.

    Args:
        reports_weights: whether the weights will be logged by age, which takes versions also where they are standard.

    Raises:
        ConfigError, InputError: a layout that is not read; a list that is missing or does not fit.
    """
    ranks, cp = host.parallel()
    lengths = batch["total_lengths"], batch["response_lengths"]
    layout = host_layout(args, *lengths, batch.get("max_seq_lens"), *cp)
    reads_versions = _reads_versions(batch, config, reports_weights)
    _check_present(host, args, batch, config, reads_versions)
    masks = _flat("loss_masks", batch["loss_masks"], layout.response_lengths)
    log_probs, entropy = host.scores(args, batch, logits)

    def constant(name: str) -> Tensor | None:
        return _flat(name, batch[name], layout.local_lengths).detach() if batch.get(name) else None

    target = _on_the_tape(_flat("log-probs of the logits", log_probs, layout.local_lengths), logits)
    proximal = None if getattr(args, "skip_actor_forward_only", False) else constant("log_probs")
    return LossInputs(
        ragged=layout.place(masks, ranks).ragged,
        target=target,
        proximal=target.detach() if proximal is None else proximal,
        behavior=constant("rollout_log_probs"),
        reference=constant("ref_log_probs"),
        advantages=_flat("advantages", batch["advantages"], layout.local_lengths).detach(),
        entropy=None if entropy is None else _flat("entropy", entropy, layout.local_lengths),
        written=written(batch, layout.local_lengths) if reads_versions else None,
    )


def _on_the_tape(target: Tensor, logits: Tensor) -> Tensor:
    """log pi_theta with a graph, also where a host scores no token without one.

    The model's own collectives wait for the backward of every rank. So do those of the loss where it is checkpointed,
    which runs it again there, and on a rank whose loss kept nothing for a backward not at all.
    """
    return target if target.numel() else target + logits[..., :0].flatten().to(target.dtype)


VERSIONS = "output_versions"  # which version wrote each token
VERSION = "proximal_version"  # which one the proximal policy is


def knows_versions(batch: Batch) -> bool:
    """Whether the host knows who wrote a token: it says which version the proximal policy is.

    That number is the trainer's own, so that every rank decides alike. The versions of the tokens come with samples:
    ranks that decided by them would weigh, and communicate, differently where one got samples without.

    Raises:
        InputError: versions of tokens without that of the proximal policy.
    """
    if batch.get(VERSION) is None and batch.get(VERSIONS):
        raise InputError(
            f"{VERSION}: none beside {VERSIONS}; hand on the version of the weights that log_probs are of"
        )
    return batch.get(VERSION) is not None


def written(batch: Batch, lengths: Sequence[int]) -> Written:
    """Who wrote each token of a micro-batch, or of a rollout: three keys, which `docs/async.md` describes.

    Raises:
        InputError: a list that does not fit.
    """
    versions = _flat(VERSIONS, batch[VERSIONS], lengths).long()
    if batch.get("recomputed_log_probs"):
        recomputed = _flat("recomputed_log_probs", batch["recomputed_log_probs"], lengths).detach()
    else:
        recomputed = torch.full(versions.shape, torch.nan, device=versions.device)
    return Written(versions, recomputed, batch[VERSION])


def _reads_versions(batch: Batch, config: CorrectionConfig, reports_weights: bool) -> bool:
    by_age = config.metrics == "all" or reports_weights
    return config.segment_wise_on or (by_age and knows_versions(batch))


def _check_present(
    host: LossHost, args: Any, batch: Batch, config: CorrectionConfig, reads_versions: bool
) -> None:
    wanted = {
        "rollout_log_probs": config.corrects or config.bypass,
        "ref_log_probs": getattr(args, "use_kl_loss", False),
        "log_probs": host.recomputes(args) and not config.bypass,
    }
    why = {
        "rollout_log_probs": "the rollout engine must return one for each sampled token",
        "ref_log_probs": "--use-kl-loss needs those of a reference policy",
        "log_probs": "the trainer's log-probs were neither recomputed nor handed on",
    }
    for name, is_wanted in wanted.items():
        if is_wanted and not batch.get(name):
            raise InputError(f"{name}: none in this micro-batch; {why[name]}")
    if reads_versions:
        check_versions(args, batch, config)


def check_versions(args: Any, batch: Batch, config: CorrectionConfig) -> None:
    """Refuse a micro-batch, or a rollout, without what segment-wise weights and metrics by age read.

    Raises:
        InputError: it names the key.
    """
    lacks = _lacking(batch, config)
    if lacks is not None:
        raise InputError(lacks).spelled(reading.spelling(args), "mis.")


def _lacking(batch: Batch, config: CorrectionConfig) -> str | None:
    if not knows_versions(batch):
        return (
            f"{VERSIONS}: none here; {{segment_wise}} needs to know which version wrote each token, which this host "
            "does not say (see docs/async.md); leave {segment_wise} out, and give its bounds as {weight}"
        )
    if not batch.get(VERSIONS):
        return (
            f"{VERSIONS}: none here, and {VERSION}: {batch[VERSION]} says that this host knows who wrote each token; "
            "hand it on with every micro-batch, and leave out, or refuse, samples without"
        )
    if config.segment_wise_on and _stores(config) and not batch.get("recomputed_log_probs"):
        return (
            f"recomputed_log_probs: none here; beside {VERSIONS}, segment-wise weights need what the version after "
            "each token's gives it (see docs/async.md); without, say {segment_wise.method}: loglinear, or "
            "{segment_wise.enabled}: false"
        )
    return None


def _stores(config: CorrectionConfig) -> bool:
    """Whether weights read what was recomputed while the batch was written."""
    return config.segment_wise is not None and config.segment_wise.method == "recompute"


def _flat(name: str, tensors: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor:
    present = [x for x in tensors if x is not None]
    counts = [None if x is None else x.numel() for x in tensors]
    if counts != list(lengths):
        raise InputError(f"{name}: {counts} tokens a sequence, but this rank expects {list(lengths)}")
    return torch.cat(present)


def passed_on(batch: Batch, reduce: Reduce) -> dict[str, Tensor]:
    """What the hosts themselves only report: the KL to a distillation teacher."""
    if not batch.get("opd_reverse_kl"):
        return {}
    return {"opd_reverse_kl": reduce(torch.cat(list(batch["opd_reverse_kl"]))).detach()}

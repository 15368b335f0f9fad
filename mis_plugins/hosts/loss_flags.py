"""Read a host's flags about the policy loss: objective, OPSM, clipping, entropy and KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, OpsmConfig
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import checks, tracking, watching
from mis_plugins.hosts.host import Host
from mis_plugins.loss.micro_batch import LossConfig
from mis_plugins.loss.objective import ESTIMATORS, Clip


def config_in_force(args: Any, config: CorrectionConfig, host: Host, versions_known: bool = False) -> CorrectionConfig:
    """Complete `config` with objective and OPSM of the user, which no flag may contradict, or of the flags.

    In a run that only watches, `config` keeps its metrics alone; objective and OPSM come from the flags.

    Args:
        versions_known: whether the host says which version wrote each token.

    Raises:
        ConfigError: it quotes the setting and the flag.
    """
    config = watching.for_loss_hook(args, config)
    asked, opsm = config.objective, config.opsm
    objective = _objective(args, asked)
    if getattr(args, "use_opsm", False):
        if opsm is not None:
            raise ConfigError("--use-opsm and mis.opsm are both set; keep one of them")
        opsm = OpsmConfig(_number(args, "opsm_delta"), reference=objective.old)
    try:
        config = dataclasses.replace(config, objective=objective, opsm=opsm)
    except ConfigError as error:
        by_flag = args.use_rollout_logprobs and not asked
        implied = " (--use-rollout-logprobs means mis.objective.old: behavior)" if by_flag else ""
        raise ConfigError(error.template + implied).spelled(reading.spelling(args), "mis.") from None
    checks.run("loss", args, config, host)
    return config.where_versions_are_known() if versions_known else config


# A host's flag, whether it is set, and the fields of the objective that it decides.
IMPLIED: tuple[tuple[str, Callable[[Any], bool], dict[str, Any]], ...] = (
    (
        "--advantage-estimator gspo",
        lambda args: args.advantage_estimator == "gspo",
        {"surrogate": "clip", "ratio": "sequence"},
    ),
    ("--advantage-estimator cispo", lambda args: args.advantage_estimator == "cispo", {"surrogate": "cispo"}),
    ("--use-rollout-logprobs", lambda args: args.use_rollout_logprobs, {"old": "behavior"}),
    ("--use-unbiased-kl", lambda args: getattr(args, "use_unbiased_kl", False), {"unbiased_kl": True}),
)


def _objective(args: Any, asked: ObjectiveConfig | None) -> ObjectiveConfig:
    implied = [(flag, fields) for flag, is_set, fields in IMPLIED if is_set(args)]
    if asked is None:
        return ObjectiveConfig(**{name: value for _, fields in implied for name, value in fields.items()})
    for flag, fields in implied:
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


def _number(args: Any, name: str) -> float:
    return reading.number(getattr(args, name), f"--{name.replace('_', '-')}")


def loss_config(args: Any, step: tuple[int, int] | None = None) -> LossConfig:
    """Read the host's flags about clipping, entropy and KL."""
    kl_type = None
    if getattr(args, "use_kl_loss", False):
        kl_type = args.kl_loss_type
        if kl_type not in ESTIMATORS:
            raise ConfigError(f"--kl-loss-type: got {kl_type!r}; choose one of {', '.join(ESTIMATORS)}")
    try:
        dual = None if getattr(args, "eps_clip_c", None) is None else _number(args, "eps_clip_c")
        clip = Clip(_number(args, "eps_clip"), _number(args, "eps_clip_high"), dual)
    except ConfigError as error:
        raise error.spelled({"dual": "--eps-clip-c"}) from None
    entropy_coef, kl_coef = getattr(args, "entropy_coef", 0.0), getattr(args, "kl_loss_coef", 0.0)
    return LossConfig(clip, entropy_coef, kl_type, kl_coef, tracking.average(args, step))

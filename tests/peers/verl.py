"""verl 0.9.1, imported as it is but for a cluster, a config reader and a timer that none of this calls."""

from __future__ import annotations

from typing import Any

from peers.loading import Peer, load
from peers.rows import Rows
from torch import Tensor

ABSENT = ("ray", "omegaconf", "codetiming", "orjson")
PEERS = {
    name: Peer(module, absent=ABSENT)
    for name, module in {
        "helper": "verl.trainer.ppo.rollout_corr_helper",
        "losses": "verl.trainer.ppo.core_algos",
        "config": "verl.trainer.config.algorithm",
        "debug": "verl.utils.debug.metrics",
        "protocol": "verl.protocol",
    }.items()
}


BYPASS = ("bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is",
          "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis",
          "bypass_pg_geo_rs_token_tis")  # fmt: skip
DECOUPLED = ("decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs",
             "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs",
             "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "disabled")  # fmt: skip
PRESETS = DECOUPLED + BYPASS


class Settings(dict):
    """A config that is read both as `config.key` and as `config.get(key)`."""

    __getattr__ = dict.__getitem__


def preset_names() -> list[str]:
    """As the installed package has them."""
    return [name for name, value in vars(rollout_config()).items() if isinstance(value, classmethod)]


def preset(name: str) -> Any:
    return getattr(rollout_config(), name)()


def rollout_config() -> type:
    return load(PEERS["config"]).RolloutCorrectionConfig


KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


def correction(
    batch: Rows, settings: dict, proximal: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights `[N, L]`, 1 where they are off; mask; metrics) of `algorithm.rollout_correction` settings."""
    compute = load(PEERS["helper"]).compute_rollout_correction_and_rejection_mask
    weights, mask, metrics = compute(
        batch.proximal if proximal is None else proximal,
        batch.behavior,
        batch.mask,
        **{key: settings[key] for key in KEYS if key in settings},
    )
    found = batch.mask if weights is None else weights.batch["rollout_is_weights"]
    return found, mask, metrics


def actor_config(settings: Any, **clip: float) -> Settings:
    """What the losses read of an actor's config."""
    widths = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0} | clip
    return Settings(policy_loss=Settings(rollout_correction=settings), global_batch_info={}, **widths)


def decoupled_loss(batch: Rows, target: Tensor, settings: Any, mode: str, **clip: float) -> Tensor:
    """PPO against the proximal policy, after the rollout correction of the trainer has been put into the batch."""
    weights, mask, _ = correction(batch, settings)
    loss, _ = load(PEERS["losses"]).compute_policy_loss_vanilla(
        batch.proximal, target, batch.token_advantages, mask, mode, actor_config(settings, **clip), weights
    )
    return loss


def bypass_loss(batch: Rows, target: Tensor, settings: Any, mode: str, **clip: float) -> Tensor:
    """The behavior policy in the place of the proximal one."""
    loss, _ = load(PEERS["losses"]).compute_policy_loss_bypass_mode(
        batch.behavior, target, batch.token_advantages, batch.mask, mode, actor_config(settings, **clip)
    )
    return loss


def debug_metrics(batch: Rows) -> dict[str, float]:
    """`training/...`: how far the probabilities are apart."""
    tensors = {
        "rollout_log_probs": batch.behavior,
        "old_log_probs": batch.proximal,
        "response_mask": batch.mask.long(),
        "responses": batch.mask.long(),
    }
    data = load(PEERS["protocol"]).DataProto.from_dict(tensors=tensors)
    return load(PEERS["debug"]).calculate_debug_metrics(data)


def mapping_of(settings: Any) -> dict:
    """Our words for verl's settings: weights and rules."""
    weight, rules = None, []
    if settings.get("rollout_is"):
        weight = {"level": settings.get("rollout_is"), **bound_of(settings.get("rollout_is_threshold"))}
        if settings.get("rollout_is_batch_normalize"):
            weight["normalize"] = {"scope": "micro_batch", "over": "valid"}
    options = [x for x in (settings.get("rollout_rs") or "").split(",") if x]
    thresholds = str(settings.get("rollout_rs_threshold")).split(",")
    for i, option in enumerate(options):
        rules.append(rule_of(option, thresholds[i if len(thresholds) > 1 else 0]))
    return {"weight": weight, "reject": rules}


def bound_of(threshold: float | str) -> dict:
    """`2.0` truncates; `0.5_5.0` sets the weights outside to 0 and leaves the mask."""
    numbers = [float(x) for x in str(threshold).split("_")]
    if len(numbers) == 1:
        return {"bound": "truncate", "upper": numbers[0]}
    return {"bound": "zero", "lower": numbers[0], "upper": numbers[1]}


def rule_of(option: str, threshold: str) -> dict:
    """`seq_mean_k1` bounds mu / pi_old and not pi_old / mu, so that the bounds on our ratio are the inverse ones."""
    over, statistic = option.removeprefix("seq_").rsplit("_", 1)
    numbers = [float(x) for x in threshold.split("_")]
    if statistic != "k1":
        return {"statistic": statistic, "over": over, "upper": numbers[0]}
    low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
    return {"statistic": "ratio", "over": over, "lower": 1 / high, "upper": 1 / low}

"""verl 0.9.1, imported as it is but for a cluster, a config reader and a timer that none of this calls."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import documented
import numpy as np
import yaml
from torch import Tensor

from mis_plugins.explain.translate.verl import translate
from mis_plugins.loss.objective import Clip
from peers.loading import Peer, bare, defaults, load
from peers.rows import Metric, Rows

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
PRESETS = tuple(documented.VERL)


class Settings(dict):
    """A config that is read both as `config.key` and as `config.get(key)`."""

    __getattr__ = dict.__getitem__


def folder() -> Path:
    """Of its yaml."""
    return Path(load(PEERS["config"]).__file__ or "").parent


def sources() -> list[Path]:
    """Every Python file of the installed package that computes or logs."""
    package = folder().parents[1]
    return [path for part in ("trainer", "workers", "utils") for path in (package / part).rglob("*.py")]


def preset(name: str) -> Any:
    return getattr(rollout_config(), name)()


def rollout_config() -> type:
    return load(PEERS["config"]).RolloutCorrectionConfig


# Their names, without `rollout_corr/` and `rollout_corr/rollout_is_`, and ours.
MISMATCH: dict[str, Metric] = {
    "training_ppl": "train_ppl", "training_log_ppl": "train_log_ppl", "rollout_ppl": "rollout_ppl",
    "rollout_log_ppl": "rollout_log_ppl", "kl": "kl_k1", "k3_kl": "kl_k3", "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff", "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min", "ppl_ratio": "ppl_ratio", "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
}  # fmt: skip
WEIGHT: dict[str, Metric] = {
    "mean": "weight_mean", "std": "weight_std", "max": "weight_max", "min": "weight_min",
    "eff_sample_size": "ess_bounded", "ratio_fraction_high": "weight_high_fraction",
    "ratio_fraction_low": "weight_low_fraction", "seq_mean": "sequence_weight_mean",
    "seq_std": lambda m: m.get("sequence_weight_std", 0.0),  # of one sequence 0 there, and not known here
    "seq_max": "sequence_weight_max", "seq_min": "sequence_weight_min",
    "seq_max_deviation": "sequence_weight_max_deviation", "seq_fraction_high": "sequence_ratio_high_fraction",
    "seq_fraction_low": "sequence_ratio_low_fraction", "batch_norm_factor": "normalization_factor",
    "oob_ratio": "outside_bound_fraction",
}  # fmt: skip
SEQUENCE_WEIGHT = WEIGHT | {  # before truncation, unlike at token level
    "max": lambda m: math.exp(min(m["sequence_log_ratio_max"], 20)),
    "min": lambda m: math.exp(m["sequence_log_ratio_min"]),
}
REJECTION = {"masked_fraction": "rejected_fraction", "seq_masked_fraction": "touched_sequences"}
RULE = ("mean", "std", "max", "min", "fraction_high", "fraction_low", "masked_fraction", "seq_masked_fraction",
        "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation", "seq_fraction_high",
        "seq_fraction_low")  # fmt: skip
MIRRORED = {"mean": "mean", "max": "min", "min": "max", "fraction_high": "fraction_low",
            "fraction_low": "fraction_high"}  # fmt: skip
PROBABILITIES = {
    "training/rollout_probs_diff_max": "prob_diff_abs_max",
    "training/rollout_probs_diff_mean": "prob_diff_abs_mean",
    "training/rollout_probs_diff_std": "prob_diff_abs_std",
    "training/rollout_actor_probs_pearson_corr": "prob_correlation",
}

FLOOR = 1e-8  # added to what a mean is divided by
KEYS = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")


def correction(batch: Rows, settings: dict, proximal: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, float]]:
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


def actor_config(settings: Any, **own: Any) -> Settings:
    """What the losses read of an actor's config."""
    widths = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    return Settings({"global_batch_info": {}} | widths | own, policy_loss=Settings(rollout_correction=settings))


def decoupled_loss(batch: Rows, target: Tensor, settings: Any, mode: str, **own: Any) -> Tensor:
    """PPO against the proximal policy, after the rollout correction of the trainer has been put into the batch."""
    weights, mask, _ = correction(batch, settings)
    loss, _ = load(PEERS["losses"]).compute_policy_loss_vanilla(
        batch.proximal, target, batch.token_advantages, mask, mode, actor_config(settings, **own), weights
    )
    return loss


def bypass_loss(batch: Rows, target: Tensor, settings: Any, mode: str) -> Tensor:
    """The behavior policy in the place of the proximal one."""
    loss, _ = load(PEERS["losses"]).compute_policy_loss_bypass_mode(
        batch.behavior, target, batch.token_advantages, batch.mask, mode, actor_config(settings)
    )
    return loss


def surrogate_loss(
    batch: Rows, target: Tensor, settings: dict, name: str, mode: str, clip: Clip, **more: float
) -> Tensor:
    """Another of its policy losses (gspo, dppo, sapo, geo_mean, ...) on the same weights, by an actor's own config."""
    weights, mask, _ = correction(batch, settings)
    losses = load(PEERS["losses"])
    config = bare(
        losses.ActorConfig,
        clip_ratio=clip.low,
        clip_ratio_low=clip.low,
        clip_ratio_high=clip.high,
        clip_ratio_c=clip.dual,
        global_batch_info={},
        **more,
    )
    compute = getattr(losses, f"compute_policy_loss_{name}")
    return compute(batch.proximal, target, batch.token_advantages, mask, mode, config, weights)[0]


def token_advantages(
    batch: Rows, rewards: Tensor, squares: Tensor, groups: list[int], weights: Tensor | None
) -> Tensor:
    """The optimal token baseline over turns, `[N, L]`; of a response without holes the same as without turns."""
    compute = load(PEERS["losses"]).compute_multi_turn_optimal_token_baseline_advantage
    index = np.array(groups)
    return compute(rewards, batch.mask, index, batch.proximal, squares, weights, epsilon=0.0)[0]


def actor_defaults() -> dict[str, Any]:
    """What an actor's config sets where the user sets nothing."""
    return defaults(load(PEERS["losses"]).ActorConfig)


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


def metric_table(settings: Any) -> dict[str, Metric]:
    """Their name of every metric of these settings, and ours; a rule of ours has its place in the list for a name."""
    table = dict(MISMATCH)
    if settings.get("rollout_is"):
        weight = SEQUENCE_WEIGHT if settings.get("rollout_is") == "sequence" else WEIGHT
        table |= {f"rollout_is_{name}": value for name, value in weight.items()}
    options = options_of(settings)
    if options:
        table |= {f"rollout_rs_{name}": value for name, value in REJECTION.items()}
    for i, option in enumerate(options, 1):
        table |= {f"rollout_rs_{option}_{name}": rule_metric(i, option, name) for name in RULE}
    return {f"rollout_corr/{name}": value for name, value in table.items()}


def rule_metric(i: int, option: str, name: str) -> Metric:
    """A k1 is the negative of our log ratio; what lies above its bound lies below ours."""
    part, mirrored = name.removeprefix("seq_"), option.endswith("k1")
    by_sequence = name.startswith("seq_") or (option.startswith("seq_") and part.startswith("fraction"))
    if mirrored:
        part = MIRRORED.get(part, part)
    sign = -1 if mirrored and part in ("mean", "max", "min") else 1
    words = {"fraction_high": "high_fraction", "fraction_low": "low_fraction", "masked_fraction": "rejected_fraction"}
    ours = f"rule_{i}_{'unit_' if by_sequence else ''}{words.get(part, part)}"
    if part == "std":
        return lambda m: m.get(ours, 0.0)  # of one sequence 0 there, and not known here
    return lambda m: sign * m[ours]


def options_of(settings: Any) -> list[str]:
    return [x for x in (settings.get("rollout_rs") or "").split(",") if x]


def mapping_of(settings: Mapping) -> dict:
    """What `config from-verl` makes of these settings, for a rollout that is one micro-batch."""
    mapping = {"weight": None, "reject": []} | dict(translate(yaml.safe_dump(dict(settings))).mis)
    if mapping["weight"] and "normalize" in mapping["weight"]:
        mapping["weight"] = mapping["weight"] | {"normalize": {"scope": "micro_batch", "over": "valid"}}
    return mapping

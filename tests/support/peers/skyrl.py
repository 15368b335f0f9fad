"""SkyRL 0.3.0: the off-policy correction and the PPO loss, without the packages around them, which start engines.

It exponentiates in float32 whatever it is given, so that its weights carry a float32 rounding of their own.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mis_plugins.loss.objective import Clip
from peers.loading import Peer, load
from peers.rows import Metric, Rows

BARE = ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils", "skyrl.train")
ABSENT = ("omegaconf", "ray", "loguru", "skyrl.train.config")
CORRECTION = Peer("skyrl.backends.skyrl_train.utils.off_policy_correction_utils", BARE, ABSENT)
LOSSES = Peer("skyrl.backends.skyrl_train.utils.ppo_utils", BARE, ABSENT)
DEFAULTS = {
    "tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None, "geo_mask_high": 1.01, "geo_mask_low": 0.99, "product_mask_high": 2.0,
    "product_mask_low": 0.5, "outlier_token_is_threshold_low": None, "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None, "token_mask_is_threshold_high": None,
}  # fmt: skip


def settings(**keys: Any) -> SimpleNamespace:
    """`trainer.algorithm.off_policy_correction`."""
    return SimpleNamespace(**DEFAULTS | keys)


def correction(batch: Rows, config: SimpleNamespace) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(weights `[N, L]`, 1 where they are off; mask; metrics)."""
    compute = load(CORRECTION).compute_off_policy_correction
    weights, metrics, mask = compute(batch.proximal, batch.behavior, batch.mask, config)
    return batch.mask if weights is None else weights.expand_as(batch.mask), mask, metrics


def policy_loss(name: str, batch: Rows, target: Tensor, config: SimpleNamespace, **keys: Any) -> Tensor:
    """The sum over tokens of one of its policy losses, by these keys of `trainer.algorithm`."""
    compute = getattr(load(LOSSES), f"{name}_policy_loss")
    algorithm = SimpleNamespace(off_policy_correction=config, **keys)
    return compute(target, batch.proximal, batch.token_advantages, algorithm, batch.mask, batch.behavior)[0]


def loss(batch: Rows, target: Tensor, config: SimpleNamespace, dual: float | None = None) -> Tensor:
    """PPO's loss, corrected."""
    keys = {"policy_loss_type": "dual_clip" if dual else "regular", "clip_ratio_c": dual}
    return policy_loss("ppo", batch, target, config, eps_clip_low=0.2, eps_clip_high=0.28, **keys)


def dppo_loss(batch: Rows, target: Tensor, kind: str, clip: Clip) -> Tensor:
    """DPPO's loss against the rollout engine, without a correction."""
    keys = SimpleNamespace(dppo_type=kind, delta_low=clip.low, delta_high=clip.high)
    return policy_loss("dppo", batch, target, settings(), dppo=keys)


def sapo_loss(batch: Rows, target: Tensor, **taus: float) -> Tensor:
    """SAPO's loss, without a correction."""
    keys = SimpleNamespace(**taus)
    return policy_loss("sapo", batch, target, settings(), sapo=keys, loss_reduction="sequence_mean")


def mapping_of(config: SimpleNamespace) -> dict:
    """Our words for the chain: outliers, tokens, weights, sequences.

    Of its statistics, outliers alone are those of before the token mask.
    """
    c, weight, before = config, None, {"aggregate": "valid"} if narrows(config) else {}
    if c.tis_ratio_type:
        upper = c.token_tis_ratio_clip_high if c.tis_ratio_type == "token" else c.sequence_tis_ratio_clip_high
        weight = {"level": c.tis_ratio_type, "bound": "truncate", "upper": upper}
    rules = []
    if c.outlier_token_is_threshold_low is not None:
        rules.append({"over": "min", "lower": c.outlier_token_is_threshold_low, **before})
    if c.outlier_token_is_threshold_high is not None:
        rules.append({"over": "max", "upper": c.outlier_token_is_threshold_high, **before})
    if c.token_mask_is_threshold_low is not None and c.token_mask_is_threshold_high is not None:
        ends = {"lower": c.token_mask_is_threshold_low, "upper": c.token_mask_is_threshold_high}
        rules.append({"over": "token", **ends})
    if c.sequence_mask_metric == "geometric":
        rules.append({"over": "mean", "lower": c.geo_mask_low, "upper": c.geo_mask_high})
    if c.sequence_mask_metric == "product":
        rules.append({"over": "sum", "lower": c.product_mask_low, "upper": c.product_mask_high})
    mapping: dict = {"weight": weight, "reject": rules}
    if narrows(config):
        mapping["aggregate"] = "kept"
    return mapping


def narrows(config: SimpleNamespace) -> bool:
    """Whether its token mask hides tokens from what is added up over a sequence afterwards."""
    tokens = config.token_mask_is_threshold_low is not None and config.token_mask_is_threshold_high is not None
    return tokens and (config.sequence_mask_metric is not None or config.tis_ratio_type == "sequence")


def padded_ratios(cells: int) -> dict[str, Metric]:
    """Its spread and minimum, of the ratios and a 0 for every one of the `[N, L]` cells without a valid token."""

    def deviation(m: Mapping[str, float]) -> float:
        mean = m["ratio_mean"] * m["tokens"] / cells
        squares = (m["chi2_token"] + 1) * m["tokens"]
        return math.sqrt(max(squares - cells * mean**2, 0) / (cells - 1)) if cells > 1 else math.nan

    smallest: Metric = lambda m: m["ratio_min"] if m["tokens"] == cells else 0.0  # noqa: E731
    return {"is_ratio_std": deviation, "is_ratio_min": smallest}


def metric_table(config: SimpleNamespace, cells: int) -> dict[str, Metric]:
    """Their name of every metric of these settings, and ours; cells: N times L, the padding included."""
    table: dict[str, Metric] = {"is_ratio_mean": "ratio_mean", "is_ratio_max": "ratio_max", **padded_ratios(cells)}
    names = {"token": "tis_token_clip_high_ratio", "sequence": "tis_seq_clip_high_ratio"}
    if config.tis_ratio_type:
        table[names[config.tis_ratio_type]] = "weight_high_fraction"
    if config.sequence_mask_metric:
        name = {"geometric": "geo", "product": "product"}[config.sequence_mask_metric]
        parts = {"masked": "rejected", "over_high": "high", "under_low": "low"}
        table |= {f"{name}_sequence_mask_{x}_ratio": f"rule_1_unit_{y}_fraction" for x, y in parts.items()}
    if config.token_mask_is_threshold_low is not None:
        table["token_mask_ratio"] = "rule_1_rejected_fraction"
    if config.outlier_token_is_threshold_low is not None:
        table["outlier_seq_under_low_ratio"] = "rule_1_unit_low_fraction"
        table["outlier_seq_over_high_ratio"] = "rule_2_unit_high_fraction"
        table["outlier_seq_masked_ratio"] = lambda m: 1 - m["kept_sequences"]
    return table


CHAIN = {
    "tis_ratio_type": "token", "sequence_mask_metric": "geometric",
    "outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0,
}  # fmt: skip

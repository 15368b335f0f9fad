"""OpenRLHF 0.11.2: `PolicyLoss`, without the actor beside it, which needs DeepSpeed."""

from __future__ import annotations

from typing import Any

from peers.loading import Peer, load
from peers.rows import Metric, Rows
from torch import Tensor

LOSS = Peer("openrlhf.models.loss", bare=("openrlhf", "openrlhf.models"), absent=("deepspeed",))
PRESETS: dict[str, dict[str, Any]] = {
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "seq-mask-tis": {"is_correction_level": "seq", "is_correction_mode": "mask"},
}


BOUNDS = (0.5, 5.0)


def loss(
    batch: Rows, target: Tensor, bounds: tuple[float, float], by_token: bool = True, **settings: Any
) -> tuple[Tensor, ...]:
    """(loss; clip ratio; KL to the proximal policy; KL to the rollout engine; share of units out of bounds)."""
    widths = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "token_level_loss": by_token}
    module = load(LOSS).PolicyLoss(is_correction_threshold=bounds, **widths, **settings)
    return module(target, batch.proximal, batch.token_advantages, batch.mask, batch.behavior)


def metric_table(name: str) -> dict[str, Metric]:
    """What `filter` counts: tokens beyond either bound, or sequences that are dropped."""
    if name == "seq-mask-tis":
        return {"vllm_kl": "kl_k1", "is_filter_ratio": "rule_1_unit_rejected_fraction"}
    outside = lambda m: m["weight_high_fraction"] + m["weight_low_fraction"]  # noqa: E731
    return {"vllm_kl": "kl_k1", "is_filter_ratio": outside}


def mapping_of(bounds: tuple[float, float], settings: dict) -> dict:
    """Our words: `clip` clips the token's ratio, `mask` sets it to 0, both leaving the loss mask as it is."""
    low, high = bounds
    ends = {"lower": low, "upper": high}
    if settings["is_correction_mode"] == "clip":
        return {"weight": {"level": "token", "bound": "clip", **ends}}
    if settings["is_correction_level"] == "token":
        return {"weight": {"level": "token", "bound": "zero", **ends}}
    return {"weight": {"level": "token", "bound": "none"}, "reject": [{"over": "mean", **ends}]}

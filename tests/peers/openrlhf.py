"""OpenRLHF 0.11.2: `PolicyLoss`, without the actor beside it, which needs DeepSpeed."""

from __future__ import annotations

from typing import Any

from peers.loading import Peer, load
from peers.rows import Rows
from torch import Tensor

LOSS = Peer("openrlhf.models.loss", bare=("openrlhf", "openrlhf.models"), absent=("deepspeed",))
PRESETS = {
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "seq-mask-tis": {"is_correction_level": "seq", "is_correction_mode": "mask"},
}


def loss(batch: Rows, target: Tensor, bounds: tuple[float, float], **settings: Any) -> tuple[Tensor, ...]:
    """(loss; clip ratio; KL to the proximal policy; KL to the rollout engine; share of units out of bounds)."""
    module = load(LOSS).PolicyLoss(
        clip_eps_low=0.2, clip_eps_high=0.28, is_correction_threshold=bounds, **settings
    )
    return module(target, batch.proximal, batch.token_advantages, batch.mask, batch.behavior)


def mapping_of(bounds: tuple[float, float], settings: dict) -> dict:
    """Our words: `clip` clips the token's ratio, `mask` sets it to 0, both leaving the loss mask as it is."""
    low, high = bounds
    ends = {"lower": low, "upper": high}
    if settings["is_correction_mode"] == "clip":
        return {"weight": {"level": "token", "bound": "clip", **ends}}
    if settings["is_correction_level"] == "token":
        return {"weight": {"level": "token", "bound": "zero", **ends}}
    return {"weight": {"level": "token", "bound": "none"}, "reject": [{"over": "mean", **ends}]}

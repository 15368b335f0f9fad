"""OpenRLHF 0.11.2: `PolicyLoss`, without the actor beside it, which needs DeepSpeed."""

import contextlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import assume
from torch import Tensor

from peers.loading import Peer, load
from peers.rows import Metric, Rows

LOSS = Peer("openrlhf.models.loss", bare=("openrlhf", "openrlhf.models"), absent=("deepspeed",))
PRESETS: dict[str, dict[str, Any]] = {
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token", "is_correction_mode": "mask"},
    "seq-mask-tis": {"is_correction_level": "seq", "is_correction_mode": "mask"},
} | {
    f"{level}-{gate.replace('_', '-')}": {
        "is_correction_level": level, "is_correction_mode": "mask", "is_correction_gating": gate
    }
    for level in ("token", "seq") for gate in ("binary_kl", "tv")
}  # fmt: skip
LEVELS, MODES, GATES = ("token", "seq"), ("mask", "clip"), ("ratio", "binary_kl", "tv")
STATISTICS = {"binary_kl": "binary_kl", "tv": "abs_prob_diff"}
BOUNDS = (0.5, 5.0)  # the default, of ratios; divergences have none


def bounds_of(settings: Mapping[str, str]) -> tuple[float, float]:
    """Those of our presets."""
    return {"binary_kl": (0.0, 5e-3), "tv": (0.0, 0.05)}.get(settings.get("is_correction_gating", ""), BOUNDS)


def settings_taken() -> list[dict[str, str]]:
    """Every combination of level, mode and gate that its constructor takes."""
    taken = []
    for level, mode, gate in itertools.product(LEVELS, MODES, GATES):
        chosen = {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gate}
        with contextlib.suppress(ValueError):
            load(LOSS).PolicyLoss(is_correction_threshold=(0.0, 1.0), **chosen)
            taken.append(chosen)
    return taken


def within_clamp(batch: Rows) -> None:
    """Skip a batch with a probability that its divergences would move into [1e-6, 1 - 1e-6], be it above 1."""
    log_probs = torch.cat([x[batch.mask.bool()] for x in (batch.proximal, batch.behavior)])
    assume(bool((log_probs > math.log(1e-6)).all() and (log_probs < -2e-6).all()))


def loss(
    batch: Rows, target: Tensor, bounds: tuple[float, float], by_token: bool = True, **settings: Any
) -> tuple[Tensor, ...]:
    """(loss; clip ratio; KL to the proximal policy; KL to the rollout engine; share of units out of bounds)."""
    widths = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "token_level_loss": by_token}
    module = load(LOSS).PolicyLoss(is_correction_threshold=bounds, **widths, **settings)
    return module(target, batch.proximal, batch.token_advantages, batch.mask, batch.behavior)


def metric_table(name: str) -> dict[str, Metric]:
    """What `filter` counts: tokens beyond either bound, or sequences that are dropped."""
    if PRESETS[name]["is_correction_level"] == "seq":
        return {"vllm_kl": "kl_k1", "is_filter_ratio": "rule_1_unit_rejected_fraction"}
    filtered = "rule_1_rejected_fraction" if "is_correction_gating" in PRESETS[name] else "outside_bound_fraction"
    return {"vllm_kl": "kl_k1", "is_filter_ratio": filtered}


def mapping_of(bounds: tuple[float, float], settings: dict) -> dict:
    """Our words: `clip` clips the token's ratio, `mask` sets it to 0, both leaving the loss mask as it is.

    A divergence is a rule, whose tokens leave the loss mask too; with the original denominator the loss is the same.
    """
    low, high = bounds
    statistic = STATISTICS.get(settings.get("is_correction_gating", ""))
    if statistic:
        over = "token" if settings["is_correction_level"] == "token" else "mean"
        return {"weight": {"level": "token", "bound": "none"},
                "reject": [{"statistic": statistic, "over": over, "upper": high}]}  # fmt: skip
    ends = {"lower": low, "upper": high}
    if settings["is_correction_mode"] == "clip":
        return {"weight": {"level": "token", "bound": "clip", **ends}}
    if settings["is_correction_level"] == "token":
        return {"weight": {"level": "token", "bound": "zero", **ends}}
    return {"weight": {"level": "token", "bound": "none"}, "reject": [{"over": "mean", **ends}]}

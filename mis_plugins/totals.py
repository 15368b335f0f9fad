"""What is summed over each sequence: everything of a micro-batch that crosses context-parallel ranks, in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import CorrectionConfig, WeightConfig
from mis_plugins.ragged import Ragged
from mis_plugins.ratios import exp_clamped, finite, log_ratio
from mis_plugins.rejection import passes
from mis_plugins.weights import bounded_weight, in_bounds


@dataclass(frozen=True)
class TokenStage:
    """What a rank knows of its tokens before it asks anybody.

    log_ratio: log pi_old - log mu; 0 where it is not usable.
    usable: in loss_mask, and both log-probs finite.
    ratio: exp(log_ratio), clamped; 0 where it is not usable.
    weight: bounded token weight; None at the other levels.
    counted: tokens that a mean of the weights counts before rejection: usable, and not dropped by a mask bound.
    keep: `counted`, and passing every rule over tokens; None where nothing can drop a single token.
    """

    loss_mask: Bool[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    usable: Bool[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    weight: Float[Tensor, " T"] | None
    counted: Bool[Tensor, " T"]
    keep: Bool[Tensor, " T"] | None

    @property
    def applied(self) -> Float[Tensor, " T"]:
        """Token weight where the token is kept, else 0."""
        assert self.weight is not None
        return self.weight if self.keep is None else torch.where(self.keep, self.weight, 0)


def token_stage(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    config: CorrectionConfig,
) -> TokenStage:
    """Everything that needs no other token than itself."""
    log_r, usable = log_ratio(proximal, behavior, loss_mask)
    ratio = torch.where(usable, exp_clamped(log_r), 0)
    token_weight = config.weight if config.weight and config.weight.level == "token" else None
    masked = token_weight if token_weight and token_weight.bound == "mask" else None
    counted = usable & in_bounds(log_r, masked) if masked else usable
    weight = None if token_weight is None else bounded_weight(ratio, usable, token_weight)
    keep = counted if drops_tokens(config) else None
    for rule in config.reject:
        if keep is not None and rule.over == "token":
            keep = passes(log_r, rule, keep)
    return TokenStage(loss_mask, log_r, usable, ratio, weight, counted, keep)


@dataclass(frozen=True)
class LogProbs:
    """Of the sampled tokens: trainer before the update (proximal), rollout engine (behavior)."""

    proximal: Float[Tensor, " T"]
    behavior: Float[Tensor, " T"]


SUMS: dict[str, Callable[[TokenStage, LogProbs], Tensor | None]] = {
    "valid": lambda stage, _: stage.loss_mask,
    "usable": lambda stage, _: stage.usable,
    "log_ratio": lambda stage, _: stage.log_ratio,
    "proximal": lambda stage, log_probs: torch.where(stage.usable, log_probs.proximal.float(), 0),
    "weight": lambda stage, _: stage.weight,
    "counted": lambda stage, _: stage.counted,
    "counted_weight": lambda stage, _: (
        None if stage.weight is None else torch.where(stage.counted, stage.weight, 0)
    ),
    "kept": lambda stage, _: stage.keep,
    "applied": lambda stage, _: stage.applied,
}

SQUARES: dict[str, Callable[[TokenStage], Tensor]] = {
    "ratio_squared": lambda stage: stage.ratio,
    "applied_squared": lambda stage: stage.applied,
}

COUNTS: dict[str, Callable[[TokenStage, LogProbs], Tensor]] = {
    "nonfinite_train": lambda stage, log_probs: stage.loss_mask & ~finite(log_probs.proximal),
    "nonfinite_rollout": lambda stage, log_probs: stage.loss_mask & ~finite(log_probs.behavior),
}

MINIMA: dict[str, Callable[[TokenStage], Tensor]] = {
    "log_ratio_min": lambda stage: torch.where(stage.usable, stage.log_ratio, torch.inf),
    "counted_min": lambda stage: torch.where(stage.counted, stage.log_ratio, torch.inf),
}

MAXIMA: dict[str, Callable[[TokenStage], Tensor]] = {
    "log_ratio_max": lambda stage: torch.where(stage.usable, stage.log_ratio, -torch.inf),
    "counted_max": lambda stage: torch.where(stage.counted, stage.log_ratio, -torch.inf),
}


def over_sequences(
    stage: TokenStage, log_probs: LogProbs, ragged: Ragged, config: CorrectionConfig
) -> dict[str, Float[Tensor, " ..."]]:
    """The totals that this config needs, by the names above; nothing is computed or sent where it needs none.

    Each has one value a sequence, those of `COUNTS` one for the micro-batch.
    """
    sums, squares, minima, maxima, counts = needed(config)
    if not (sums or minima or maxima):
        return {}
    rows, marked = ragged.over_sequence(
        (_row(name, stage, log_probs) for name in sums),
        (SQUARES[name](stage) for name in squares),
        (MINIMA[name](stage) for name in minima),
        (MAXIMA[name](stage) for name in maxima),
        (COUNTS[name](stage, log_probs) for name in counts),
    )
    totals = dict(zip(sums + squares + minima + maxima, rows.unbind(), strict=True))
    return totals | dict(zip(counts, marked.unbind(), strict=False))


def _row(name: str, stage: TokenStage, log_probs: LogProbs) -> Tensor:
    row = SUMS[name](stage, log_probs)
    assert row is not None, name
    return row


def needed(config: CorrectionConfig) -> list[list[str]]:
    """Names of `SUMS`, `SQUARES`, `MINIMA`, `MAXIMA` and `COUNTS`: none for token level without mean and metrics."""
    names = _needed_sums(config) | _needed_extremes(config)
    if config.metrics != "none":
        names |= set(COUNTS)
    return [[name for name in table if name in names] for table in (SUMS, SQUARES, MINIMA, MAXIMA, COUNTS)]


def _needed_sums(config: CorrectionConfig) -> set[str]:
    names: set[str] = set()
    by_token = config.weight is not None and config.weight.level == "token"
    if any(rule.over != "token" for rule in config.reject) or (config.weight and not by_token):
        names |= {"valid", "usable", "log_ratio"}
    if config.weight and config.weight.normalize:
        names |= _needed_for_mean(config, config.weight, by_token)
    if config.metrics != "none":
        names |= {"valid", "usable", "log_ratio"}
        names |= {"applied", "applied_squared"} if by_token else ({"kept"} if drops_tokens(config) else set())
    if config.metrics == "full":
        names |= {"proximal", "ratio_squared"} | ({"weight"} if by_token else set())
    return names


def _needed_for_mean(config: CorrectionConfig, weight: WeightConfig, by_token: bool) -> set[str]:
    assert weight.normalize is not None
    if weight.normalize.over == "kept":
        return {"kept" if drops_tokens(config) else "usable"} | ({"applied"} if by_token else set())
    if not by_token:
        return set()
    return {"counted", "counted_weight"} if weight.bound == "mask" else {"usable", "weight"}


def _needed_extremes(config: CorrectionConfig) -> set[str]:
    names = {f"log_ratio_{rule.over}" for rule in config.reject if rule.over in ("min", "max")}
    if config.metrics != "none":
        names |= {"log_ratio_max"}
    if config.metrics == "full":
        weight = config.weight
        masks = weight is not None and (weight.level, weight.bound) == ("token", "mask")
        names |= {"log_ratio_min"} | ({"counted_min", "counted_max"} if masks else set())
    return names


def drops_tokens(config: CorrectionConfig) -> bool:
    """Whether single tokens can be rejected."""
    masks = config.weight and config.weight.level == "token" and config.weight.bound == "mask"
    return bool(masks) or any(rule.over == "token" for rule in config.reject)

"""What is known of one token before its sequence is known: ratio, weight, and whether rules over tokens keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.terms.statistics import STATISTICS, Evidence, statistic_of
from mis_plugins.correction.ratios import LogProbs, bits, exp_clamped, log_ratios, nonfinite, only, only_
from mis_plugins.correction.rejection import down_weights, in_bounds, kept_tokens
from mis_plugins.correction.weights import bounded_weight


@dataclass(frozen=True)
class TokenStage:
    """What is known of each local token before its sequence is known.

    log_ratio: log pi_old - log mu; 0 where the token is not usable.
    usable: tokens in loss_mask with both log-probs finite, and with segment-wise weights that of pi_{v+1}
        too.
    usable_bits: `usable` as `bits` makes it.
    ratio: exp(log_ratio), clamped; 0 where the token is not usable.
    unit_log_ratio: log ratio that the weight bounds. At token level it is the token's own (with segment-wise
        weights log pi_{v+1} - log mu), 0 where the token is not usable. At segment level it is the segment's,
        NaN where the segment is not known, any value at a masked token. None at the other levels.
    bounded: the weight after its bound, of the token or of its segment; None at the other levels.
    passing: usable, and inside the weight's bound where that bound gives no weight outside.
    keep: tokens that mask bound and rules over tokens and segments keep; None where these can drop nothing.
    routes: number of layers that route the token otherwise than the engine; None where nothing watched.
    down_weight: the factor of rules that down-weigh, 1 within their bounds; None where no rule does.
    """

    config: CorrectionConfig
    log_probs: LogProbs
    loss_mask: Bool[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    usable: Bool[Tensor, " T"]
    usable_bits: Int[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    unit_log_ratio: Float[Tensor, " T"] | None
    bounded: Float[Tensor, " T"] | None
    passing: Bool[Tensor, " T"]
    keep: Bool[Tensor, " T"] | None
    routes: Float[Tensor, " T"] | None = None
    down_weight: Float[Tensor, " T"] | None = None

    @cached_property
    def weight(self) -> Float[Tensor, " T"] | None:
        """The bounded weight times the factor of rules that down-weigh, 0 where the token is not usable.

        Without a weight of tokens or segments it is the rules' factor alone; None where there is neither.
        """
        if self.down_weight is None:
            return self.bounded
        if self.bounded is None:
            return only(self.down_weight, self.usable_bits)
        return self.bounded * self.down_weight

    @property
    def weighed(self) -> Float[Tensor, " T"]:
        """What the weight bounds: the token's ratio, the segment-wise one, or its segment's; 0 where not known."""
        by_segment = self.config.weight is not None and self.config.weight.by_segment
        if not (self.config.segment_wise_on or by_segment):
            return self.ratio
        assert self.unit_log_ratio is not None
        return only_(exp_clamped(self.unit_log_ratio).nan_to_num_(0.0), self.usable_bits)

    @property
    def kept_weight(self) -> Float[Tensor, " T"]:
        """Weight of the token where it is kept, else 0."""
        assert self.weight is not None
        return self.weight if self.keep is None else torch.where(self.keep, self.weight, 0)

    def statistic(self, name: str) -> Float[Tensor, " T"]:
        """Values that a rule compares; 0 at tokens that are not usable."""
        record = STATISTICS[name]
        proximal, behavior = self.log_probs.proximal, self.log_probs.behavior
        value = record.value(Evidence(self.log_ratio, proximal, behavior, self.routes))
        return only(value, self.usable_bits) if record.reads_probabilities or record.reads_routes else value

    def row(self, name: str) -> Shaped[Tensor, " T"]:
        """A row of `ROWS`, or the statistic that adds up to this name."""
        return ROWS[name](self) if name in ROWS else self.statistic(statistic_of(name))

    def extreme(self, name: str, otherwise: float) -> Float[Tensor, " T"]:
        """The row of `EXTREMES` for a smallest or largest value, or the statistic of each usable token."""
        if name in EXTREMES:
            return EXTREMES[name](self, otherwise)
        return torch.where(self.usable, self.statistic(statistic_of(name)), otherwise)


def token_stage(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    config: CorrectionConfig,
    numerator: Float[Tensor, " T"] | None = None,
    routes: Float[Tensor, " T"] | None = None,
) -> TokenStage:
    """Ratio, weight and rules of each token as far as no other token is needed.

    Args:
        numerator: log-probs of pi_{v+1}, which segment-wise weights, and nothing else, compare with mu.
        routes: number of layers that routed each token otherwise, for rules that read it.
    """
    log_r, unit_log_ratio, usable, usable_bits = log_ratios(proximal, behavior, loss_mask, numerator)
    ratio = only_(exp_clamped(log_r), usable_bits)
    unit_ratio = ratio if numerator is None else only_(exp_clamped(unit_log_ratio), usable_bits)
    weight = config.weight if config.weight and config.weight.level == "token" else None
    passing = in_bounds(unit_log_ratio, usable, weight) if weight else usable
    stage = TokenStage(
        config=config,
        log_probs=LogProbs(proximal, behavior),
        loss_mask=loss_mask,
        log_ratio=log_r,
        usable=usable,
        usable_bits=usable_bits,
        ratio=ratio,
        unit_log_ratio=unit_log_ratio if weight else None,
        bounded=bounded_weight(unit_ratio, usable, passing, weight) if weight else None,
        passing=passing,
        keep=None,
        routes=routes,
    )
    if config.down_weighing:
        stage = replace(stage, down_weight=down_weights(config, stage.statistic))
    if not config.drops_below("sequence"):
        return stage
    in_mask = passing if weight and weight.record.drops_token else usable
    return replace(stage, keep=kept_tokens(in_mask, config, stage.statistic))


def narrowed(stage: TokenStage) -> TokenStage:
    """The stage with the kept tokens alone as its valid and usable tokens."""
    assert stage.keep is not None
    log_ratio = torch.where(stage.keep, stage.log_ratio, 0)
    return replace(
        stage, loss_mask=stage.keep, usable=stage.keep, usable_bits=bits(stage.keep), log_ratio=log_ratio
    )


def _weight(stage: TokenStage) -> Float[Tensor, " T"]:
    assert stage.weight is not None
    return stage.weight


def _keep(stage: TokenStage) -> Bool[Tensor, " T"]:
    assert stage.keep is not None
    return stage.keep


ROWS: dict[str, Callable[[TokenStage], Shaped[Tensor, " T"]]] = {
    "valid": lambda stage: stage.loss_mask,
    "usable": lambda stage: stage.usable,
    "proximal": lambda stage: only(stage.log_probs.proximal.float(), stage.usable_bits),
    "ratio": lambda stage: stage.ratio,
    "weighed": lambda stage: stage.weighed,
    "weight": _weight,
    "passing": lambda stage: stage.passing,
    "passing_weight": lambda stage: torch.where(stage.passing, _weight(stage), 0),
    "kept": _keep,
    "kept_weight": lambda stage: stage.kept_weight,
    # In float32, as ratios are computed: a finite float64 may overflow there.
    "nonfinite_train": lambda stage: stage.loss_mask & nonfinite(stage.log_probs.proximal.float()),
    "nonfinite_rollout": lambda stage: stage.loss_mask & nonfinite(stage.log_probs.behavior.float()),
}
"""Rows that are added up or counted, by the name of their total: 0 at each token that shall not enter."""

EXTREMES: dict[str, Callable[[TokenStage, float], Float[Tensor, " T"]]] = {
    "ratio": lambda stage, otherwise: stage.ratio,  # 0 at unusable tokens; a usable ratio is above 0
    "passing": lambda stage, otherwise: torch.where(stage.passing, stage.log_ratio, otherwise),
    "weight": lambda stage, otherwise: torch.where(stage.usable, _weight(stage), otherwise),
    "passing_weight": lambda stage, otherwise: torch.where(stage.passing, _weight(stage), otherwise),
}
"""Rows of which the smallest or largest value is taken, called with what stands where a token shall not enter."""

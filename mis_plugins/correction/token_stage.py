"""What is known of one token before its sequence is known: ratio, weight, and whether rules over tokens keep it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Population, RejectRule
from mis_plugins.config.terms.statistics import STATISTICS, Evidence, statistic_of
from mis_plugins.correction.plan import SUMS, Plan, Reads, UnitPlan
from mis_plugins.correction.ratios import exp_clamped, log_ratios, nonfinite
from mis_plugins.correction.rejection import Totals, bounded_weight, in_bounds, passes, within
from mis_plugins.packing.ragged import Ragged


@dataclass(frozen=True)
class TokenStage:
    """What is known of each local token before its sequence is known.

    proximal_log_probs, behavior_log_probs: under the trainer before the update, and under the engine; any float dtype.
    log_ratio: log pi_old - log mu; 0 where the token is not usable.
    usable: tokens in loss_mask with both log-probs finite, and with segment-wise weights that of pi_{v+1} too.
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
    proximal_log_probs: Float[Tensor, " T"]
    behavior_log_probs: Float[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    usable: Bool[Tensor, " T"]
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
            return self.down_weight * self.usable
        return self.bounded * self.down_weight

    @property
    def weighed(self) -> Float[Tensor, " T"]:
        """What the weight bounds: the token's ratio, the segment-wise one, or its segment's; 0 where not known."""
        by_segment = self.config.weight is not None and self.config.weight.by_segment
        if not (self.config.segment_wise_on or by_segment):
            return self.ratio
        assert self.unit_log_ratio is not None
        return torch.where(self.usable, exp_clamped(self.unit_log_ratio).nan_to_num_(0.0), 0)

    @cached_property
    def kept_weight(self) -> Float[Tensor, " T"]:
        """Weight of the token where it is kept, else 0; a weight is always finite, so that a product serves."""
        assert self.weight is not None
        return self.weight if self.keep is None else self.weight * self.keep

    @property
    def passing_weight(self) -> Float[Tensor, " T"]:
        """Weight of the token where it passes the bound, else 0."""
        assert self.weight is not None
        return self.weight * self.passing

    @property
    def proximal(self) -> Float[Tensor, " T"]:
        """log pi_old; 0 where the token is not usable."""
        return self.proximal_log_probs.float().masked_fill(self.unusable, 0)

    # In float32, as ratios are computed: a finite float64 may overflow there.

    @cached_property
    def _nonfinite(self) -> Sequence[Bool[Tensor, " T"]]:
        pair = torch.stack([self.proximal_log_probs.float(), self.behavior_log_probs.float()])
        return (self.loss_mask & nonfinite(pair)).unbind()

    @property
    def nonfinite_train(self) -> Bool[Tensor, " T"]:
        """Valid tokens whose log pi_old is NaN or infinite."""
        return self._nonfinite[0]

    @property
    def nonfinite_rollout(self) -> Bool[Tensor, " T"]:
        """Valid tokens whose log mu is NaN or infinite."""
        return self._nonfinite[1]

    @cached_property
    def unusable(self) -> Bool[Tensor, " T"]:
        return ~self.usable

    def statistic(self, name: str) -> Float[Tensor, " T"]:
        """Values that a rule compares; 0 at tokens that are not usable."""
        record = STATISTICS[name]
        policies = self.proximal_log_probs, self.behavior_log_probs
        value = record.value(Evidence(self.log_ratio, *policies, self.routes))
        reads_more = record.reads_probabilities or record.reads_routes
        return value.masked_fill(self.unusable, 0) if reads_more else value

    def row(self, name: str) -> Shaped[Tensor, " T"]:
        """The row that is added up to a total of this name, 0 at each token that shall not enter."""
        if name in ROWS:
            return getattr(self, ROWS[name])
        return self.statistic(statistic_of(name))

    def extreme(self, name: str, otherwise: float) -> Float[Tensor, " T"]:
        """The row whose smallest or largest value is taken; `otherwise` stands at tokens that do not enter."""
        if name == "ratio":
            return self.ratio  # 0 at unusable tokens; a usable ratio is above 0
        outside = ~self.passing if name in ("passing", "passing_weight") else self.unusable
        values = EXTREMES.get(name)
        row = self.statistic(statistic_of(name)) if values is None else getattr(self, values)
        return row.masked_fill(outside, otherwise)


ROWS = {name: name for name in (*SUMS, "ratio")} | {"valid": "loss_mask", "kept": "keep"}
"""For each row that is added up, the attribute of the stage; a statistic adds up to its own row."""
EXTREMES = {"passing": "log_ratio", "passing_weight": "weight", "weight": "weight"}
"""For each row of extremes, the attribute of the stage that it takes its values from."""


def token_stage(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    plan: Plan,
    numerator: Float[Tensor, " T"] | None = None,
    routes: Float[Tensor, " T"] | None = None,
) -> TokenStage:
    """Ratio, weight and rules of each token as far as no other token is needed.

    `numerator` holds log-probs of pi_{v+1}, which segment-wise weights, and nothing else, compare with mu. `routes`
    holds the number of layers that routed each token otherwise, for rules that read it.
    """
    log_r, unit_log_ratio, usable = log_ratios(proximal, behavior, loss_mask, numerator)
    unusable = ~usable  # filling is faster than a product, for which a CPU makes floats of the mask first
    ratio = exp_clamped(log_r).masked_fill_(unusable, 0)
    unit_ratio = ratio if numerator is None else exp_clamped(unit_log_ratio).masked_fill_(unusable, 0)
    weight = plan.weight
    passing = in_bounds(unit_log_ratio, usable, weight) if weight else usable
    stage = TokenStage(
        config=plan.config,
        proximal_log_probs=proximal,
        behavior_log_probs=behavior,
        loss_mask=loss_mask,
        log_ratio=log_r,
        usable=usable,
        ratio=ratio,
        unit_log_ratio=unit_log_ratio if weight else None,
        bounded=bounded_weight(unit_ratio, usable, passing, weight) if weight else None,
        passing=passing,
        keep=None,
        routes=routes,
    )
    if plan.down_weighing:
        stage = replace(stage, down_weight=_down_weight(stage, plan.down_weighing))
    if not plan.drops_parts:
        return stage
    keep = passing if weight and weight.record.drops_token else usable
    for rule in plan.token_rules:
        keep = passes(stage.statistic(rule.statistic), rule, keep)
    return replace(stage, keep=keep)


def _down_weight(stage: TokenStage, rules: tuple[RejectRule, ...]) -> Float[Tensor, " T"]:
    """What rules multiply the weight of each token by: 1 within their bounds."""
    factors = (
        torch.where(
            within(stage.statistic(rule.statistic), *rule.limits), 1.0, stage.ratio.new_full((), rule.down_weigh)
        )
        for rule in rules
        if rule.down_weigh is not None
    )
    return reduce(torch.mul, factors)


def narrowed(stage: TokenStage) -> TokenStage:
    """The stage with the kept tokens alone as its valid and usable tokens."""
    assert stage.keep is not None
    log_ratio = torch.where(stage.keep, stage.log_ratio, 0)
    return replace(stage, loss_mask=stage.keep, usable=stage.keep, log_ratio=log_ratio)


def totals_of(stage: TokenStage, ragged: Ragged, reads: Reads) -> Totals:
    """Totals of each unit of `ragged`, a sequence or a segment; no collective where the plan reads none."""
    if not (reads.sums or reads.squares or reads.minima or reads.maxima):
        return Totals()
    return Totals(
        ragged.totals(
            {name: stage.row(row) for name, row in reads.sums.items()},
            {name: stage.row(row) for name, row in reads.squares.items()},
            {name: stage.extreme(row, torch.inf) for name, row in reads.minima.items()},
            {name: stage.extreme(row, -torch.inf) for name, row in reads.maxima.items()},
        )
    )


def totals_by_population(stage: TokenStage, ragged: Ragged, plan: UnitPlan) -> Mapping[Population, Totals]:
    """Totals of each unit over all valid tokens, or over the kept tokens, as its weight and rules ask."""
    return {
        population: totals_of(narrowed(stage) if population == "kept" else stage, ragged, reads)
        for population, reads in plan.reads.items()
    }

"""What to correct and how, as frozen dataclasses. `config/reading.py` makes them of what a user wrote.

Each dataclass checks itself when it is made: a bound that cannot hold or a setting without effect is a `ConfigError`.
"""

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Annotated, Literal

from mis_plugins.config.terms import bounds, statistics
from mis_plugins.errors import ConfigError

Level = Literal["token", "segment", "segment_geometric", "sequence", "geometric"]
Scope = Literal["micro_batch", "data_parallel", "rollout"]
Population = Literal["valid", "kept"]
Over = Literal["token", "sum", "mean", "min", "max"]
Unit = Literal["sequence", "segment"]
Metrics = Literal["watch", "all", "full", "core", "none"]
GroupBaseline = Literal["grpo", "rloo"]


def _surrogate_names() -> tuple[str, ...]:
    from mis_plugins.config.terms.surrogates import SURROGATES  # loaded where a config has an objective

    return tuple(SURROGATES)


# A name from a table that may grow; the annotation holds the function that lists them: see `reading.choices_of`.
BoundName = Annotated[str, lambda: tuple(bounds.BOUNDS)]
CappingBoundName = Annotated[str, lambda: tuple(name for name, bound in bounds.BOUNDS.items() if bound.has_ceiling)]
StatisticName = Annotated[str, lambda: tuple(statistics.STATISTICS)]
SurrogateName = Annotated[str, _surrogate_names]
DEFAULT_UPPER = 2.0
LEVEL_OVER: dict[Level, Over] = {
    "token": "token",
    "segment": "sum",
    "segment_geometric": "mean",
    "sequence": "sum",
    "geometric": "mean",
}


def check_ratio_bounds(lower: float | None, upper: float | None, unbounded: str = "null") -> None:
    """Refuse bounds that no ratio, or every ratio, crosses; `unbounded` is the user's word for no lower bound."""
    if lower is not None and not 0 < lower < math.inf:
        raise ConfigError(
            f"{{lower}}: got {lower:g}; a ratio is never below 0, so give a finite number above 0, or {unbounded} for "
            "no lower bound"
        )
    if upper is not None and not 0 < single(upper) < math.inf:
        raise ConfigError(f"{{upper}}: got {upper:g}; every ratio is above 0, so give a finite number above 0")
    _check_order(lower, upper)


def _check_order(lower: float | None, upper: float | None) -> None:
    if lower is not None and upper is not None and single(lower) >= single(upper):
        also = "" if lower >= upper else " in a float of 32 bits, in which the hooks compute"
        raise ConfigError(f"{{lower}}: {lower:g} is not below {{upper}}: {upper:g}{also}")


def single(number: float) -> float:
    """A number as a float of 32 bits holds it, in which the hooks compute."""
    return ctypes.c_float(number).value


@dataclass(frozen=True)
class NormalizeConfig:
    """Divide the weights by their mean.

    scope: whose mean. `micro_batch`; `data_parallel`, all-reduced over the ranks of this micro-batch; `rollout`,
        the whole rollout batch, computed once by `--rollout-data-postprocess-path mis_plugins.mis.normalize_rollout`.
        With dynamic batches a host's micro-batch holds `max_tokens_per_gpu` times the context-parallel size of tokens,
        so that `micro_batch` and `data_parallel` change with either number.
    over: `valid`, everything in the loss mask; `kept`, what also passes rejection. A token or unit that a
        mask bound drops enters neither mean; what a zero bound sets to 0 enters both as 0.
    """

    scope: Scope = "micro_batch"
    over: Population = "valid"


@dataclass(frozen=True)
class WeightConfig:
    """The importance weight: a ratio of `level`, bounded.

    level: `token` r_t; `sequence`, the product over the sequence; `geometric`, its geometric mean; `segment`
        and `segment_geometric`, product and geometric mean over a segment, a run of ones in the loss mask
        (one turn of the model).
    bound: a row of `terms/bounds.py`, which says what becomes of a ratio within [lower, upper] and outside.
    lower: None is 1 / upper, 0 is no lower bound. Only a bound with a floor takes a `lower`.
    upper: 2 where it is not given. Only a bound with a ceiling takes an `upper`.
    """

    level: Level = "token"
    bound: BoundName = "truncate"
    lower: float | None = None
    upper: float | None = None
    normalize: NormalizeConfig | None = None

    def __post_init__(self) -> None:
        if not self.record.has_ceiling:
            for name in ("lower", "upper"):
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(f"{{{name}}}: {value:g} has no effect with {{bound}}: {self.bound}; drop it")
            return
        if self.upper is None:
            object.__setattr__(self, "upper", DEFAULT_UPPER)  # so that saying 2 and saying nothing are equal
        check_ratio_bounds(self.lower or None, self.upper, unbounded="0" if self.record.has_floor else "null")
        if not self.record.has_floor:
            if self.lower is not None:
                raise ConfigError(
                    f"{{lower}}: {self.lower:g} has no effect with {{bound}}: {self.bound}; drop it, or use "
                    "{bound}: clip"
                )
        elif self.lower is None and single(self.ceiling) <= 1:
            raise ConfigError(
                f"{{lower}}: unset means 1 / {{upper}}: {1 / self.ceiling:g}, not below {{upper}}: {self.ceiling:g}"
            )

    @cached_property
    def record(self) -> bounds.Bound:
        """The row of `terms/bounds.py` that describes the bound."""
        return bounds.BOUNDS[self.bound]

    @cached_property
    def ceiling(self) -> float:
        """The upper bound in force: infinite without a bound."""
        return math.inf if self.upper is None else self.upper

    @cached_property
    def floor(self) -> float:
        """The lower bound in force: 0 for a bound without a floor, 1 / upper where none is given."""
        if not self.record.has_floor:
            return 0.0
        return 1 / self.ceiling if self.lower is None else self.lower

    @cached_property
    def by_segment(self) -> bool:
        return self.level in ("segment", "segment_geometric")

    @cached_property
    def by_sequence(self) -> bool:
        return self.level in ("sequence", "geometric")


@dataclass(frozen=True)
class RejectRule:
    """Drop or down-weigh tokens or units whose statistic lies outside [lower, upper].

    statistic: a row of `terms/statistics.py`, with its value, its range and its formula.
    over: `token` drops tokens; the others drop units, by the `sum`, `mean`, `min` or `max` over the unit's tokens.
        Ratios multiply: their `sum` is the ratio of the whole unit and their `mean` the geometric mean (geometric
        masking). `min` with `lower` is a veto.
    unit: what is dropped: `sequence`, or `segment`, a run of ones in the loss mask.
    aggregate: which tokens of the unit the rule reads; None takes the `aggregate` of `CorrectionConfig`.
    down_weigh: factor on the weight of a token outside the bounds; the token stays in the loss mask. None
        drops instead. Normalization at token level averages the weights with this factor; at the other levels
        it averages the weights of segments or sequences, without it.
    """

    statistic: StatisticName = "ratio"
    over: Over = "token"
    lower: float | None = None
    upper: float | None = None
    unit: Unit = "sequence"
    aggregate: Population | None = None
    down_weigh: float | None = None

    def __post_init__(self) -> None:
        self._check_down_weigh()
        if self.over == "token" and self.unit == "segment":
            raise ConfigError("{unit}: segment has no effect with {over}: token, which drops single tokens")
        if self.over == "token" and self.aggregate is not None:
            raise ConfigError(
                f"{{aggregate}}: {self.aggregate} has no effect with {{over}}: token, which adds nothing up"
            )
        if self.record.factor is not None:
            check_ratio_bounds(self.lower, self.upper)
        else:
            self._check_range()
            _check_order(self.lower, self.upper)
        if self.lower is None and self.upper is None:
            raise ConfigError("{lower} and {upper} are both unset: the rule rejects nothing; give at least one")

    def _check_down_weigh(self) -> None:
        if self.down_weigh is None:
            return
        if not 0 < single(self.down_weigh) < 1:
            raise ConfigError(
                f"{{down_weigh}}: got {self.down_weigh:g}; give a factor above 0 and below 1, or drop the key, and the "
                "rule drops what it finds"
            )
        if self.over != "token":
            raise ConfigError(
                f"{{down_weigh}}: {self.down_weigh:g} needs {{over}}: token; over {self.over} a rule drops whole "
                "sequences or segments"
            )

    def _check_range(self) -> None:
        low, high = self.record.low, self.record.high
        if self.over == "sum":
            low, high = (-math.inf if low else 0), math.inf
        for name in ("lower", "upper"):
            bound = getattr(self, name)
            if bound is not None and not low < bound < high:
                raise ConfigError(
                    f"{{{name}}}: got {bound:g}; {self.statistic} over {self.over} lies between {low:g} and {high:g}, "
                    "so that nothing or everything would be rejected"
                )

    @cached_property
    def record(self) -> statistics.Statistic:
        """The row of `terms/statistics.py` that describes the statistic."""
        return statistics.STATISTICS[self.statistic]

    @cached_property
    def drops(self) -> bool:
        """Whether what lies outside leaves the loss mask."""
        return self.down_weigh is None

    @cached_property
    def multiplies(self) -> bool:
        """Whether the rule looks at a product over the tokens of a unit."""
        return self.record.factor is not None and self.over == "sum"

    @cached_property
    def limits(self) -> tuple[float | None, float | None]:
        """Bounds on the value that is compared: the logarithm of a ratio; of one token a number of 32 bits."""
        compared = float if self.record.factor is None else math.log
        held = float if self.over in ("sum", "mean") else single
        return tuple(None if x is None else held(compared(x)) for x in (self.lower, self.upper))  # type: ignore[return-value]


@dataclass(frozen=True)
class OpsmConfig:
    """Off-policy sequence masking: drop tokens with A < 0 where mean_t(log mu - log pi_theta) > delta.

    delta: nats a token. Miles uses 1e-4.
    advantage: `token`, a token is dropped by its own advantage; `sequence`, by the mean over its sequence.
    reference: whose log-probs stand for mu: `behavior` (the rollout engine; `proximal` where it gave none, with a
        warning) or `proximal`.

    DeepSeek-AI 2025, "DeepSeek-V3.2", arxiv.org/abs/2512.02556, section 3.1.
    """

    delta: float
    advantage: Literal["token", "sequence"] = "token"
    reference: Literal["behavior", "proximal"] = "behavior"

    def __post_init__(self) -> None:
        if not 0 <= self.delta < math.inf:
            raise ConfigError(f"{{delta}}: got {self.delta:g}; give a finite number of nats, at least 0")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The policy loss of `--custom-loss-function-path mis_plugins.mis.policy_loss`; clip widths are the host's flags.

    surrogate: a row of `terms/surrogates.py`, with its formula and its own settings.
    old: what pi_theta is compared with: `proximal`, the trainer before the update (decoupled PPO), or `behavior`,
        the rollout engine (bypass; weights and rules then compare pi_theta with mu).
    ratio: of one `token`, or of the `sequence`, its geometric mean (GSPO).
    unbiased_kl: multiply the KL term by pi_theta / old (DeepSeek-V3.2).
    weigh_kl: multiply the KL term by the importance weight, and drop it also where OPSM masks. Tokens that
        the rules reject leave KL and entropy in any case, as in the hosts.
    kl_tau: factor of a penalty (log pi_theta - log old)^2 on each token, which weight and rules act on too.
    tau_pos, tau_neg: temperatures of `sapo` where A > 0, and elsewhere.
    k_pos, lambda_pos, k_neg, lambda_neg: power and decay of `vespo` where A >= 0, and elsewhere.
    """

    surrogate: SurrogateName = "clip"
    old: Literal["proximal", "behavior"] = "proximal"
    ratio: Literal["token", "sequence"] = "token"
    unbiased_kl: bool = False
    weigh_kl: bool = False
    kl_tau: float = 0.0
    tau_pos: float | None = None
    tau_neg: float | None = None
    k_pos: float | None = None
    lambda_pos: float | None = None
    k_neg: float | None = None
    lambda_neg: float | None = None

    def __post_init__(self) -> None:
        from mis_plugins.config.terms import surrogates

        for name, default in surrogates.check(self).items():
            object.__setattr__(self, name, default)


@dataclass(frozen=True)
class SegmentWiseConfig:
    """Segment-wise decoupled PPO: a token that version v wrote has the behavior weight bound(pi_{v+1} / pi_v).

    enabled: false is standard decoupled PPO, bound(pi_old / pi_v).
    weight_cap: the largest ratio; null is no bound.
    weight_floor: the smallest ratio, for a mode with a floor; null is 1 / weight_cap, 0 is no bound.
    mode: what becomes of a ratio beyond cap or floor, by the names of `mis.weight.bound`.
    method: where the log-probs of pi_{v+1} come from at age 2 and above: stored by a `recompute` before the weights
        moved on, or `loglinear`, interpolated between pi_v and pi_old.
    fresh_tokens: what stands for pi_{v+1} at ages 0 and 1. `proximal` is pi_old at both, which at age 1 is pi_{v+1}.
        `behavior` is mu at both, so that their weight is 1. `behavior_at_age_0` is mu at age 0 and pi_old at age 1, the
        rule of AReaL's branch.
    clip_against: the policy that PPO's ratio and clip compare pi_theta with: `next` is pi_{v+1}, so that weight and
        ratio multiply to pi_theta / pi_v; `proximal` is pi_old, the rule of AReaL's branch.
    too_old: what to do with a token that lacks the stored log-prob it needs: `raise`, naming the sample, or
        `drop` it from the loss mask.
    """

    enabled: bool = True
    weight_cap: float | None = 5.0
    weight_floor: float | None = None
    mode: CappingBoundName = "truncate"
    method: Literal["recompute", "loglinear"] = "recompute"
    fresh_tokens: Literal["proximal", "behavior", "behavior_at_age_0"] = "proximal"
    clip_against: Literal["next", "proximal"] = "next"
    too_old: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        if self.weight_cap is None and self.mode != SegmentWiseConfig.mode:
            raise ConfigError(f"{{mode}}: {self.mode} needs a {{weight_cap}}; give one, or drop {{mode}}")
        if self.method == "loglinear" and self.too_old == "drop":
            raise ConfigError("{too_old}: drop has no effect with {method}: loglinear, which lacks nothing")
        for name in ("method", "fresh_tokens", "clip_against", "too_old"):
            value = getattr(self, name)
            if not self.enabled and value != getattr(SegmentWiseConfig, name):
                raise ConfigError(f"{{{name}}}: {value} has no effect with {{enabled}}: false; drop it")
        try:
            _ = self.weight
        except ConfigError as error:
            names = {"lower": "{weight_floor}", "upper": "{weight_cap}", "bound": "{mode}"}
            raise error.spelled(names) from None

    @cached_property
    def weight(self) -> WeightConfig:
        """The bounds of segment-wise weights as a weight of the correction pipeline."""
        bound = "none" if self.weight_cap is None else self.mode
        return WeightConfig("token", bound, self.weight_floor, self.weight_cap)


@dataclass(frozen=True)
class RoutingConfig:
    """The watch over the routers of a mixture of experts.

    experts: whose routes the trainer uses where the host replays: the `engine`'s, or the `trainer`'s own.
        With `trainer` the recorded routes are only compared.
    on_fault: what follows where a replay did not happen: `warn`, or `raise` at the next optimizer step.
    """

    experts: Literal["engine", "trainer"] = "engine"
    on_fault: Literal["warn", "raise"] = "warn"


@dataclass(frozen=True)
class CenterConfig:
    """Score centering: subtract the mean of the weighted score, with which any mismatch moves the policy.

    top_k: the largest head, in tokens of the vocabulary that the rollout engine names at each position.

    Marek and Ryabinin 2026, arxiv.org/abs/2609.20807.
    """

    top_k: int = 32

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError(f"{{top_k}}: got {self.top_k}; give at least 1 token")


WEIGHT_BOUNDS = ("weight_cap", "weight_floor", "mode")  # fields that `weight` has too


@dataclass(frozen=True)
class CorrectionConfig:
    """The whole config. `weight: null` multiplies by 1; a token is kept if every rule of `reject` that drops keeps it.

    segment_wise: which policy the weight compares with mu, where it is known which version wrote a token. Alone it sets
        `weight` to a weight of tokens with its bounds; a `weight` of tokens beside it bounds and normalizes instead.
        null leaves it to the host: on where the host knows versions and tokens have a weight, else off.
    metrics: `watch` hands the host five metrics a token, and leaves all others to the step hook, which logs them
        of whole steps; where a host has no step hook it is `full`, which hands every metric back. `all` is both
        `full` and the step hook's. `core` is at most eight, `none` none. Miles's flat keys have `full`.
    m2_threshold: M2PO. The tokens with the largest (log r)^2 of a micro-batch leave the loss, until the mean of those
        that are left is below the threshold. Rules follow.
    opsm, objective, center: only the loss hook can serve them, and segment-wise weights: `--loss-type custom_loss
        --custom-loss-function-path mis_plugins.mis.policy_loss`.
    denominator: what a sequence's loss is divided by once tokens are rejected: its `original` number of tokens, or
        the `kept` ones. The TIS hook changes the policy term alone; the loss hook changes KL and entropy too.
    aggregate: which tokens add up to the ratio or statistic of a sequence or segment: all `valid` tokens, or
        (SkyRL) the tokens `kept` by mask bound and rules over smaller units: tokens, for a sequence also
        segments. A rule's own `aggregate` wins.
    on_all_rejected: what to do with a micro-batch in which every sequence is rejected: `skip` trains on
        nothing, `keep` rejects nothing, so that all its tokens enter a mean over ranks too, `raise` stops the job at
        the next optimizer step and skips until then. Each is logged.
    keep_floor: warn where less than this share of a step's tokens is kept.
    routing: how to watch the routers of a mixture of experts; null watches where a hook of the watch is given.
    resplit_every: N scores every N-th rollout twice: the trainer computes its log-probs again, from micro-batches that
        are cut otherwise, and logs what differs. null is never. The rollout-data hooks do it.
    group_baseline: the baseline of a group's rewards, over the samples that train: `grpo`, their mean and the host's
        standard deviation, or `rloo`, the mean of the others. null leaves the host's, over all samples. The
        rollout-data hooks do it.
    """

    weight: WeightConfig | None = None
    reject: tuple[RejectRule, ...] = ()
    metrics: Metrics = "watch"
    opsm: OpsmConfig | None = None
    objective: ObjectiveConfig | None = None
    denominator: Literal["original", "kept"] = "original"
    aggregate: Population = "valid"
    on_all_rejected: Literal["skip", "keep", "raise"] = "skip"
    keep_floor: float = 0.1
    segment_wise: SegmentWiseConfig | None = None
    routing: RoutingConfig | None = None
    resplit_every: int | None = None
    m2_threshold: float | None = None
    group_baseline: GroupBaseline | None = None
    center: CenterConfig | None = None

    def __post_init__(self) -> None:
        if self.segment_wise is not None and self.weight is None and not self.bypass:
            object.__setattr__(self, "weight", self.segment_wise.weight)
        if any(x is not None for x in (self.segment_wise, self.m2_threshold, self.center, self.group_baseline)):
            from mis_plugins.config import contradictions

            contradictions.check(self)
        self._check_kept()
        self._check_all_rejected()
        normalize = self.weight and self.weight.normalize
        if self.reads_routes and normalize and normalize.scope == "rollout":
            raise ConfigError(
                "{weight.normalize.scope}: rollout is computed before the routes of tokens are known, which a rule "
                "with statistic: route reads; use data_parallel"
            )
        if not 0 <= self.keep_floor <= 1:
            raise ConfigError(f"{{keep_floor}}: got {self.keep_floor:g}; give a share between 0 and 1")
        if self.resplit_every is not None and self.resplit_every < 1:
            raise ConfigError(
                f"{{resplit_every}}: got {self.resplit_every}; give at least 1 rollout, or null for never"
            )
        if self.weight and self.objective and self.bypass and self.objective.surrogate != "reinforce":
            raise ConfigError(
                "{weight}: with {objective.old}: behavior the clipped ratio is pi_theta / mu already, and a weight "
                "would count it twice; set {weight}: null"
            )

    def _check_kept(self) -> None:
        """Refuse `kept` where nothing is dropped, or where no setting reads the kept tokens."""
        normalize = self.weight and self.weight.normalize
        if normalize and normalize.over == "kept" and not self.rejects:
            raise ConfigError("{weight.normalize.over}: kept has no effect where nothing is rejected; use valid")
        if self.denominator == "kept" and not (self.rejects or self.opsm):
            raise ConfigError("{denominator}: kept has no effect where nothing is rejected; use original")
        if self.aggregate == "kept" and not any(map(self.drops_below, self._units_that_follow)):
            raise ConfigError(
                "{aggregate}: kept has no effect without a rule or mask bound on tokens or segments, and a weight or "
                "rule on larger units that does not say otherwise"
            )
        for i, rule in enumerate(self.reject):
            if rule.aggregate == "kept" and not self.drops_below(rule.unit):
                raise ConfigError(
                    f"{{reject}}[{i}].aggregate: kept has no effect without a rule or mask bound on "
                    f"{'tokens' if rule.unit == 'segment' else 'tokens or segments'}"
                )

    def _check_all_rejected(self) -> None:
        if self.on_all_rejected != "skip" and not (self.can_end_empty or self.opsm):
            raise ConfigError(f"{{on_all_rejected}}: {self.on_all_rejected} has no effect where nothing is rejected")
        if self.on_all_rejected == "keep" and self.weight and not self.weight.record.weighs_outside:
            bound = "{segment_wise.mode}" if self.weighs_by_segment_wise else "{weight.bound}"
            raise ConfigError(
                f"{{on_all_rejected}}: keep cannot give back what {bound}: {self.weight.bound} takes, as that bound "
                f"leaves no bounded weight; use skip, or {bound}: clip"
            )
        normalize = self.weight and self.weight.normalize
        if self.on_all_rejected == "keep" and normalize and (normalize.scope, normalize.over) == ("rollout", "kept"):
            raise ConfigError(
                "{weight.normalize.over}: kept with {weight.normalize.scope}: rollout is a mean over the rollout, and "
                "{on_all_rejected}: keep gives tokens back by micro-batch; use valid"
            )
        if self.on_all_rejected == "keep" and self.looks_at_kept:
            raise ConfigError(
                "{on_all_rejected}: keep has nothing to add up where {aggregate}: kept dropped every token; use skip, "
                "or {aggregate}: valid"
            )

    @cached_property
    def bypass(self) -> bool:
        """Whether weights and rules compare pi_theta with mu, and not the trainer before the update."""
        return self.objective is not None and self.objective.old == "behavior"

    @cached_property
    def segment_wise_on(self) -> bool:
        """Whether the weight is pi_{v+1} / pi_v, and not pi_old / pi_v."""
        return self.segment_wise is not None and self.segment_wise.enabled

    @cached_property
    def clips_against_next(self) -> bool:
        """Whether PPO's ratio compares pi_theta with pi_{v+1}, and not with what `objective.old` names."""
        setting = self.segment_wise
        return setting is not None and setting.enabled and setting.clip_against == "next"

    @cached_property
    def weighs_by_segment_wise(self) -> bool:
        """Whether `segment_wise` gives the bounds of the weight."""
        return self.segment_wise is not None and self.weight == self.segment_wise.weight

    @cached_property
    def weighs_behavior(self) -> bool:
        """Whether there is a weight of tokens by pi_{v+1} / pi_v, or by pi_old / pi_v where `segment_wise` is off."""
        return self.weight is not None and self.weight.level == "token" and not self.bypass

    def where_versions_are_known(self) -> "CorrectionConfig":
        """The config on a host that knows each token's version: segment-wise unless set otherwise."""
        if self.segment_wise is not None or not self.weighs_behavior:
            return self
        try:
            return replace(self, segment_wise=SegmentWiseConfig())
        except ConfigError as error:
            raise error.spelled({}, "mis.") from None

    @cached_property
    def without_step_hook(self) -> "CorrectionConfig":
        """The config with `metrics: full` in place of `watch`: no step hook logs what the TIS hook leaves out."""
        return replace(self, metrics="full") if self.metrics == "watch" else self

    @cached_property
    def rejects(self) -> bool:
        """Whether anything can be dropped from the loss mask, OPSM aside."""
        by_rule = self.m2_threshold is not None or any(rule.drops for rule in self.reject)
        return by_rule or (self.weight is not None and self.weight.record.drops_token)

    @cached_property
    def down_weighing(self) -> tuple[RejectRule, ...]:
        """The rules that multiply the weight of a token, and drop none."""
        return tuple(rule for rule in self.reject if not rule.drops)

    @cached_property
    def reads_routes(self) -> bool:
        """Whether a rule reads in how many layers a token was routed differently."""
        return any(rule.record.reads_routes for rule in self.reject)

    def drops_below(self, unit: Unit) -> bool:
        """Whether rules or the weight's bound can drop parts of a unit: tokens, or segments of a sequence."""
        masks = self.weight if self.weight and self.weight.record.drops_token else None
        by_token = any(rule.over == "token" and rule.drops for rule in self.reject)
        tokens = by_token or self.m2_threshold is not None or (masks and masks.level == "token")
        segments = any(rule.unit == "segment" for rule in self.reject) or (masks and masks.by_segment)
        return bool(tokens or (unit == "sequence" and segments))

    @property
    def _units_that_follow(self) -> list[Unit]:
        """Units of the weight and of the rules that read the population of tokens which `aggregate` names."""
        units: list[Unit] = [rule.unit for rule in self.reject if rule.over != "token" and rule.aggregate is None]
        if self.weight is not None and self.weight.level != "token":
            units.append("segment" if self.weight.by_segment else "sequence")
        return units

    @cached_property
    def looks_at_kept(self) -> bool:
        """Whether a weight or rule over sequences or segments adds up kept tokens alone."""
        weighs = self.weight is not None and self.weight.level != "token" and self.aggregate == "kept"
        return weighs or any(rule.over != "token" and self.population(rule) == "kept" for rule in self.reject)

    @cache  # noqa: B019  (configs are few, and `plan_of` holds them as well)
    def population(self, rule: RejectRule) -> Population:
        """Population of tokens that a rule over a unit reads: all valid tokens where nothing smaller can be dropped."""
        return (rule.aggregate or self.aggregate) if self.drops_below(rule.unit) else "valid"

    @cached_property
    def weight_population(self) -> Population:
        """Population of tokens that the weight of a sequence or segment reads."""
        unit = "segment" if self.weight is not None and self.weight.by_segment else "sequence"
        return self.aggregate if self.drops_below(unit) else "valid"

    @cached_property
    def can_end_empty(self) -> bool:
        """Whether a micro-batch may end without any token that has a weight, OPSM aside."""
        return self.rejects or (self.weight is not None and self.weight.record.zeroes)

    @cached_property
    def reports_step(self) -> bool:
        """Whether the step hook logs metrics of whole optimizer steps."""
        return self.metrics in ("watch", "all")

    @cached_property
    def corrects(self) -> bool:
        """Whether the config can change a loss, OPSM and objective aside."""
        return self.weight is not None or bool(self.reject) or self.m2_threshold is not None

    @cached_property
    def reads_behavior(self) -> bool:
        """Whether the engine's log-probs can change a loss, by a weight, a rule, OPSM or PPO's ratio."""
        opsm = self.opsm is not None and self.opsm.reference == "behavior"
        return self.corrects or self.bypass or opsm

    @cached_property
    def needs_loss_hook(self) -> bool:
        """Whether the config needs advantages, the target policy or versions, which the TIS hook does not get."""
        return self.opsm is not None or self.objective is not None or self.segment_wise_on

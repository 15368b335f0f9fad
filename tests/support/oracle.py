"""The whole correction a second time: float64, one Python loop a sequence, formula for formula.

Imports nothing of `mis_plugins`. The config is the plain nested `mis:` mapping, with every key optional:
`{"weight": {"level", "bound", "lower", "upper", "normalize": {"scope", "over"}},
"reject": [{"statistic", "over", "unit", "lower", "upper", "down_weigh"}], "denominator", "on_all_rejected",
"m2_threshold"}`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

CLAMP = 20.0
MEAN_FLOOR = 1e-8

Tokens = list[float]
Metrics = dict[str, list[Tokens]]


def is_log_prob(x: float) -> bool:
    """False for what stands in for a log-prob: no token is sampled whose probability is 0."""
    return math.isfinite(x) and math.exp(x) > 0


@dataclass(frozen=True)
class Sample:
    """One sequence: log-probs of the trainer and of the rollout engine, and the host's mask, a response token each.

    numerator: log pi_{v+1}, which segment-wise weights, and they alone, compare with mu; NaN where it is not known.
    """

    proximal: Sequence[float]
    behavior: Sequence[float]
    mask: Sequence[bool]
    # By unit, the tokens that smaller units leave; where `aggregate`, or a rule's own, is kept, they alone add up.
    pools: dict[str, list[bool]] = field(default_factory=dict)
    aggregate: str = "valid"
    numerator: Sequence[float] | None = None
    routes: Sequence[float] | None = None  # how many layers route each token otherwise than the engine
    outliers: Sequence[bool] | None = None  # what M2PO drops

    @cached_property
    def valid(self) -> list[int]:
        return [t for t, valid in enumerate(self.mask) if valid]

    @cached_property
    def log_ratios(self) -> Tokens:
        return [p - b for p, b in zip(self.proximal, self.behavior, strict=True)]

    @cached_property
    def weighed(self) -> Tokens:
        """What weighs a token by itself."""
        if self.numerator is None:
            return self.log_ratios
        return [p - b for p, b in zip(self.numerator, self.behavior, strict=True)]

    @cached_property
    def usable(self) -> list[int]:
        rows = [self.proximal, self.behavior, *([] if self.numerator is None else [self.numerator])]
        return [t for t in self.valid if all(is_log_prob(row[t]) for row in rows)]

    @property
    def faulty(self) -> bool:
        return self.usable != self.valid

    def run(self, t: int) -> list[int]:
        """The run of ones in the mask around t; empty where t is masked."""
        first = t
        while first >= 0 and self.mask[first]:
            first -= 1
        return list(itertools.takewhile(lambda i: self.mask[i], range(first + 1, len(self.mask)))) if first < t else []


@dataclass(frozen=True)
class Corrected:
    """`weights`, `bounded`, `keep` and every metric: one list a sequence, one number a response token."""

    weights: list[Tokens]
    bounded: list[Tokens]
    keep: list[list[bool]]
    factor: float
    metrics: Metrics
    margin: float  # distance, in the statistic's own units, from the nearest decision to its bound
    scale: list[float]  # original over kept number of tokens; 1 with the original denominator
    config: dict


def correct(batch: Sequence[Sample], config: dict, others: Iterable[Sequence[Sample]] = ()) -> Corrected:
    """Correct one micro-batch; `others` are the batches (of other ranks, other steps) that share its normalization."""
    own = judged(batch, config)
    batch, keep, after_bound = own.batch, own.keep, own.bounded
    factor = 1.0
    if normalizes(config.get("weight")):
        factor = normalizer([own, *(judged(other, config) for other in others)])
    bounded = [down_weighed(s, w, config) for s, w in zip(batch, after_bound, strict=True)]
    weights = [[w / factor for w in tokens] for tokens in bounded]
    metrics = all_metrics(batch, config, after_bound, weights, keep, factor)
    scale = [1.0 if own.restored else denominator_scale(s, k, config) for s, k in zip(batch, keep, strict=True)]
    return Corrected(weights, bounded, keep, factor, metrics, decision_margin(batch, config), scale, config)


@dataclass(frozen=True)
class Judged:
    """A micro-batch after its rules. `config` has the rules that are left: where all is rejected, perhaps none."""

    batch: list[Sample]
    bounded: list[Tokens]
    keep: list[list[bool]]
    config: dict
    restored: bool = False


def judged(batch: Sequence[Sample], config: dict) -> Judged:
    batch = [pooled(s, config) for s in without_outliers(batch, config)]
    bounded = [bounded_weights(s, config.get("weight")) for s in batch]
    keep = [kept_tokens(s, config) for s in batch]
    if config.get("on_all_rejected") != "keep" or not all_rejected(batch, bounded, keep):
        return Judged(batch, bounded, keep, config)
    left = {**config, "reject": [rule for rule in config.get("reject", []) if "down_weigh" in rule]}
    whole = [[bool(valid) for valid in s.mask] for s in batch]
    return Judged([replace(s, outliers=None) for s in batch], bounded, whole, left, True)


def all_rejected(batch: Sequence[Sample], weights: list[Tokens], keep: list[list[bool]]) -> bool:
    rows = list(zip(batch, weights, keep, strict=True))
    any_valid = any(s.valid for s in batch)
    return any_valid and not any(k[t] and w[t] > 0 for s, w, k in rows for t in s.usable)


def denominator_scale(sample: Sample, keep: list[bool], config: dict) -> float:
    kept = sum(keep)  # tokens without a weight too, where no rule drops them
    if config.get("denominator", "original") == "original":
        return 1.0
    return len(sample.valid) / kept if kept else 0.0


# ---------------------------------------------------------------------------------------------- ratios and weights


def clamp(x: float) -> float:
    return max(-CLAMP, min(CLAMP, x))


UNITS = {"token": "token", "segment": "segment", "segment_geometric": "segment", "sequence": "sequence",
         "geometric": "sequence"}  # fmt: skip


def members(sample: Sample, t: int, unit: str, aggregate: str | None = None) -> list[int]:
    """The tokens of the unit that t belongs to, that add up in it."""
    every = {"token": lambda: [t], "segment": lambda: sample.run(t), "sequence": lambda: sample.valid}[unit]()
    pool = sample.pools.get(unit) if (aggregate or sample.aggregate) == "kept" else None
    return [i for i in every if pool is None or pool[i]]


def pooled(sample: Sample, config: dict) -> Sample:
    """With `aggregate: kept` a unit adds up what smaller units leave."""
    if "kept" not in {config.get("aggregate"), *(rule.get("aggregate") for rule in config.get("reject", []))}:
        return sample
    sample = replace(sample, aggregate=config.get("aggregate", "valid"))
    for unit, smaller in (("segment", ("token",)), ("sequence", ("token", "segment"))):
        weight = config.get("weight")
        part = {"reject": [r for r in config.get("reject", []) if unit_of(r) in smaller and "down_weigh" not in r],
                "weight": weight if weight and UNITS[weight["level"]] in smaller else None}  # fmt: skip
        if not part["reject"] and not drops(part["weight"]) and sample.outliers is None:
            continue  # nothing smaller is dropped, and a token that is not known leaves its unit unknown
        pool = [kept and t in sample.usable for t, kept in enumerate(kept_tokens(sample, part))]
        sample = replace(sample, pools={**sample.pools, unit: pool})
    return sample


def unit_log_ratio(sample: Sample, t: int, level: str) -> float:
    """The log ratio that weighs token t: its own, or the sum or the mean over its segment or sequence."""
    each = sample.weighed if level == "token" else sample.log_ratios
    terms = [each[i] for i in members(sample, t, UNITS[level])]
    return mean(terms) if "geometric" in level else math.fsum(terms)


def raw_weight(sample: Sample, t: int, level: str) -> float:
    return math.exp(clamp(unit_log_ratio(sample, t, level)))


@dataclass(frozen=True)
class Bound:
    """The twin of one bound of a weight.

    value: the weight that a ratio gets, of ratio, lower and upper.
    drops, zeroes: whether a token beyond the limits leaves the loss mask, or stays there with the weight 0.
    """

    value: Callable[[float, float, float], float]
    drops: bool = False
    zeroes: bool = False
    has_floor: bool = True
    has_ceiling: bool = True


BOUNDS = {
    "none": Bound(lambda ratio, lower, upper: ratio, has_floor=False, has_ceiling=False),
    "truncate": Bound(lambda ratio, lower, upper: min(ratio, upper), has_floor=False),
    "clip": Bound(lambda ratio, lower, upper: max(lower, min(ratio, upper))),
    "mask": Bound(lambda ratio, lower, upper: ratio, drops=True),
    "zero": Bound(lambda ratio, lower, upper: ratio if lower <= ratio <= upper else 0.0, zeroes=True),
}
"""The twin of every bound; `tests/terms/test_twins.py` fails for a record without one."""

OF_MIS_PY = ("truncate", "clip", "mask")
"""The bounds that the hosts' own mis.py has."""


def upper_of(weight: dict) -> float:
    return weight.get("upper", 2.0) if BOUNDS[weight["bound"]].has_ceiling else math.inf


def lower_of(weight: dict) -> float:
    lower = weight.get("lower")
    return 1.0 / upper_of(weight) if lower is None else lower


def bounded(ratio: float, weight: dict) -> float:
    return BOUNDS[weight["bound"]].value(ratio, lower_of(weight), upper_of(weight))


def drops(weight: dict | None) -> bool:
    """Whether the weight's bound takes tokens out of the loss mask."""
    return weight is not None and BOUNDS[weight["bound"]].drops


def has_weight(sample: Sample, t: int, level: str) -> bool:
    """False for a token outside the mask, and for one whose unit holds a non-finite log ratio."""
    unit = members(sample, t, UNITS[level])
    return t in sample.usable and bool(unit) and set(unit) <= set(sample.usable)


def bounded_weights(sample: Sample, weight: dict | None) -> Tokens:
    tokens = []
    for t in range(len(sample.mask)):
        if weight is None:
            tokens.append(1.0 if t in sample.usable else 0.0)
        elif has_weight(sample, t, weight["level"]):
            tokens.append(bounded(raw_weight(sample, t, weight["level"]), weight))
        else:
            tokens.append(0.0)
    return tokens


def down_weighed(sample: Sample, weights: Tokens, config: dict) -> Tokens:
    """The weights of tokens, each times what every rule that it fails multiplies by."""
    rules = [rule for rule in config.get("reject", []) if "down_weigh" in rule]
    return [
        w * math.prod(rule["down_weigh"] for rule in rules if not passes(sample, t, rule)) if w else 0.0
        for t, w in enumerate(weights)
    ]


# ------------------------------------------------------------------------------------------------------- rejection


def k3(log_ratio: float) -> float:
    x = min(log_ratio, CLAMP)
    return math.expm1(x) - x


def binary_kl(proximal: float, behavior: float) -> float:
    q, p = (min(max(x, 1e-6), 1 - 1e-6) for x in (proximal, behavior))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@dataclass(frozen=True)
class Token:
    """What a statistic may be made of: log pi_old, log mu, and how many layers route otherwise than the engine."""

    proximal: float
    behavior: float
    routes: float

    @property
    def log_ratio(self) -> float:
        return self.proximal - self.behavior

    @property
    def difference(self) -> float:
        return math.exp(self.proximal) - math.exp(self.behavior)


STATISTICS: dict[str, Callable[[Token], float]] = {
    "ratio": lambda token: token.log_ratio,
    "k1": lambda token: -token.log_ratio,
    "k2": lambda token: token.log_ratio**2 / 2,
    "k3": lambda token: k3(token.log_ratio),
    "binary_kl": lambda token: binary_kl(math.exp(token.proximal), math.exp(token.behavior)),
    "prob_diff": lambda token: token.difference,
    "abs_prob_diff": lambda token: abs(token.difference),
    "proximal_prob": lambda token: math.exp(token.proximal),
    "behavior_prob": lambda token: math.exp(token.behavior),
    "route": lambda token: token.routes,
}
"""The twin of every statistic; `tests/terms/test_twins.py` fails for a record without one."""

LOGARITHMS = {"ratio"}
"""Statistics whose twin is the logarithm of the value that a config bounds."""


def token_statistic(sample: Sample, t: int, name: str) -> float:
    """The statistic of one token; of a ratio the logarithm."""
    routes = math.nan if sample.routes is None else sample.routes[t]
    return STATISTICS[name](Token(sample.proximal[t], sample.behavior[t], routes))


def unit_of(rule: dict) -> str:
    return "token" if rule["over"] == "token" else rule.get("unit", "sequence")


def statistic(sample: Sample, t: int, rule: dict) -> float:
    """What a rule looks at for token t; NaN where a non-finite log-prob enters it."""
    unit = members(sample, t, unit_of(rule), rule.get("aggregate"))
    if not unit or not set(unit) <= set(sample.usable):
        return math.nan
    terms = [token_statistic(sample, i, rule.get("statistic", "ratio")) for i in unit]
    return {"token": math.fsum, "sum": math.fsum, "mean": mean, "min": min, "max": max}[rule["over"]](terms)


def limit(rule: dict, side: str) -> float | None:
    bound = rule.get(side)
    return math.log(bound) if bound is not None and rule.get("statistic", "ratio") in LOGARITHMS else bound


def too_low(x: float, rule: dict) -> bool:
    bound = limit(rule, "lower")
    return bound is not None and x < bound


def too_high(x: float, rule: dict) -> bool:
    bound = limit(rule, "upper")
    return bound is not None and x > bound


def passes(sample: Sample, t: int, rule: dict) -> bool:
    x = statistic(sample, t, rule)
    return not (math.isnan(x) or too_low(x, rule) or too_high(x, rule))


def passing(sample: Sample, t: int, weight: dict | None) -> bool:
    """The weight of t is known, and within a mask or zero bound."""
    if weight is None:
        return t in sample.usable
    if not has_weight(sample, t, weight["level"]):
        return False
    twin = BOUNDS[weight["bound"]]
    if not (twin.drops or twin.zeroes):
        return True
    return lower_of(weight) <= raw_weight(sample, t, weight["level"]) <= upper_of(weight)


def inside(sample: Sample, t: int, weight: dict | None) -> bool:
    """Whether the bound leaves t in the loss mask."""
    return not drops(weight) or passing(sample, t, weight)


def kept_tokens(sample: Sample, config: dict) -> list[bool]:
    rules = [rule for rule in config.get("reject", []) if "down_weigh" not in rule]
    return [
        bool(valid)
        and not (sample.outliers and sample.outliers[t])
        and inside(sample, t, config.get("weight"))
        and all(passes(sample, t, rule) for rule in rules)
        for t, valid in enumerate(sample.mask)
    ]


def without_outliers(batch: Sequence[Sample], config: dict) -> list[Sample]:
    """M2PO: what the micro-batch drops so that the squares of the other log ratios have a mean below the threshold."""
    if config.get("m2_threshold") is None:
        return list(batch)
    squares, stay = squares_of(batch, config["m2_threshold"])
    first = [*squares, math.inf][stay]
    return [
        replace(s, outliers=[t not in s.usable or s.log_ratios[t] ** 2 >= first for t in range(len(s.mask))])
        for s in batch
    ]


def squares_of(batch: Sequence[Sample], threshold: float) -> tuple[list[float], int]:
    """The squares of all log ratios, ascending, and the largest number of them with a mean below the threshold."""
    squares = sorted(s.log_ratios[t] ** 2 for s in batch for t in s.usable)
    return squares, max((n for n in range(1, len(squares) + 1) if mean(squares[:n]) < threshold), default=0)


# ---------------------------------------------------------------------------------------------------- normalization


def normalizes(weight: dict | None) -> bool:
    return weight is not None and weight.get("normalize") is not None


def normalizer(groups: Sequence[Judged]) -> float:
    """Mean of the bounded weights over units with a valid token: tokens, or sequences at the other levels."""
    weight = groups[0].config["weight"]
    level, over = weight["level"], weight["normalize"].get("over", "valid")
    units = []
    for sample, config in ((sample, group.config) for group in groups for sample in group.batch):
        tokens = bounded_weights(sample, weight)
        tokens = down_weighed(sample, tokens, config) if level == "token" else tokens
        enters = (
            kept_tokens(sample, config) if over == "kept" else [inside(sample, t, weight) for t in range(len(tokens))]
        )
        by_unit = {members(sample, t, UNITS[level])[0]: tokens[t] for t in sample.valid
                if has_weight(sample, t, level) and enters[t]}  # fmt: skip
        units += list(by_unit.values())
    mean = math.fsum(units) / len(units) if units else 0.0
    return mean if mean > MEAN_FLOOR else 1.0


# -------------------------------------------------------------------------------------------------------- metrics


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def all_metrics(batch, config, bounded_tokens, weights, keep, factor) -> Metrics:
    """Every metric at valid tokens of sequences without a non-finite log-prob; NaN elsewhere (not compared)."""
    rows: Metrics = {}
    for i, sample in enumerate(batch):
        values: dict[str, list[float]] = {}
        for t in range(len(sample.mask)):
            blank = t not in sample.valid or sample.faulty
            here = {} if blank else token_metrics(sample, t, config, bounded_tokens[i], weights[i], keep[i], factor)
            for name in metric_names(config):
                values.setdefault(name, []).append(here.get(name, math.nan))
        for name in metric_names(config):
            rows.setdefault(name, []).append(values.get(name, []))
    return rows


def token_metrics(sample, t, config, bounded_tokens, weights, keep, factor) -> dict[str, float]:
    found = mismatch_metrics(sample, t)
    found |= {"kept_fraction": float(keep[t]), "saturated_fraction": float(abs(sample.log_ratios[t]) > CLAMP)}
    if config.get("weight"):
        found |= weight_metrics(sample, t, config["weight"], bounded_tokens, weights, factor)
    rules = config.get("reject", [])
    for i, rule in enumerate(rules):
        earlier = sum(is_veto(other) == is_veto(rule) for other in rules[:i])
        suffix = f"_{earlier + 1}" if earlier else ""
        found |= {name + suffix: value for name, value in rule_metrics(sample, t, rule).items()}
    return found


def mismatch_metrics(sample: Sample, t: int) -> dict[str, float]:
    p = mean([sample.proximal[i] for i in sample.valid])
    b = mean([sample.behavior[i] for i in sample.valid])
    squares = [math.exp(clamp(sample.log_ratios[i])) ** 2 for i in sample.valid]
    total = clamp(math.fsum(sample.log_ratios[i] for i in sample.valid))
    return {
        "training_log_ppl": -p, "training_ppl": math.exp(-p), "rollout_log_ppl": -b, "rollout_ppl": math.exp(-b),
        "kl": -sample.log_ratios[t], "k3_kl": k3(sample.log_ratios[t]),
        "log_ppl_diff": b - p, "log_ppl_abs_diff": abs(b - p), "ppl_ratio": math.exp(b - p),
        "chi2_token": mean(squares) - 1.0, "chi2_seq": math.exp(total) ** 2 - 1.0,
    }  # fmt: skip


def weight_metrics(sample: Sample, t: int, weight: dict, bounded_tokens, weights, factor) -> dict[str, float]:
    unit = UNITS[weight["level"]]
    empty = not members(sample, t, unit)  # all of its tokens dropped before the rule
    log_ratio = 0.0 if empty else unit_log_ratio(sample, t, weight["level"])
    ratio = math.exp(clamp(log_ratio))
    found = {"tis_weight_before_bound": 0.0 if empty else ratio, "tis_weight_after_bound": bounded_tokens[t]}
    found["is_ratio_mean_after_tis_rs"] = bounded_tokens[t]
    if unit != "token":
        found[f"saturated_{unit}_fraction"] = float(abs(log_ratio) > CLAMP)
    twin = BOUNDS[weight["bound"]]
    if twin.has_ceiling and not twin.has_floor:
        found[f"tis_{weight['bound']}_fraction"] = float(ratio > upper_of(weight))
    elif twin.has_floor:
        found[f"tis_{weight['bound']}_fraction_low"] = float(ratio < lower_of(weight))
        found[f"tis_{weight['bound']}_fraction_high"] = float(ratio > upper_of(weight))
    final = [weights[i] for i in sample.valid]
    found |= {"is_ratio_mean_final": mean(final), "is_ratio_min_final": min(final), "is_ratio_max_final": max(final)}
    if normalizes(weight):
        found["batch_norm_factor"] = factor
    return found


def is_veto(rule: dict) -> bool:
    return rule["over"] == "min" and rule.get("upper") is None and unit_of(rule) == "sequence"


def rule_metrics(sample: Sample, t: int, rule: dict) -> dict[str, float]:
    x = statistic(sample, t, rule)
    if is_veto(rule):
        fatal = too_low(token_statistic(sample, t, rule.get("statistic", "ratio")), rule)
        return {"rs_catastrophic_token_fraction": float(fatal), "rs_catastrophic_seq_fraction": float(too_low(x, rule))}
    found = {}
    if rule.get("lower") is not None:
        found["rs_mask_fraction_low"] = float(too_low(x, rule))
    if rule.get("upper") is not None:
        found["rs_mask_fraction_high"] = float(too_high(x, rule))
    return found


def metric_names(config: dict) -> list[str]:
    """The names that mis.py and this project share for this config, without the prefix `mis_`."""
    probe = Sample([0.0], [0.0], [True], routes=[0.0])
    return sorted(token_metrics(probe, 0, config, [1.0], [1.0], [True], 1.0))


def batch_metrics(batch: Sequence[Sample], config: dict, corrected: Corrected) -> dict[str, float]:
    """One number a micro-batch. Extremes and fractions of nothing are 0."""
    batch = [pooled(s, config) for s in without_outliers(batch, config)]
    ratios = [math.exp(clamp(s.log_ratios[t])) for s in batch for t in s.usable]
    rows = zip(batch, corrected.weights, corrected.keep, strict=True)
    applied = [w[t] if keep[t] else 0.0 for s, w, keep in rows for t in s.valid]
    squares = len(applied) * math.fsum(w * w for w in applied)
    weight = config.get("weight")
    passed = [w[t] for s, w in zip(batch, corrected.weights, strict=True) for t in s.valid if passing(s, t, weight)]
    restored = config.get("on_all_rejected") == "keep" and any(map(any, corrected.keep)) and not any(
        any(kept_tokens(s, config)) for s in batch)  # fmt: skip
    stay = [restored or sequence_kept(s, config) for s in batch if s.valid]
    return {
        "ess_mb": math.fsum(applied) ** 2 / squares if squares else 0.0,
        "ratio_min_mb": min(ratios, default=0.0), "ratio_max_mb": max(ratios, default=0.0),
        "weight_min_mb": min(passed, default=0.0), "weight_max_mb": max(passed, default=0.0),
        "kept_sequences_mb": sum(stay) / len(stay) if stay else 0.0,
        "nonfinite_train_mb": float(sum(not is_log_prob(s.proximal[t]) for s in batch for t in s.valid)),
        "nonfinite_rollout_mb": float(sum(not is_log_prob(s.behavior[t]) for s in batch for t in s.valid)),
    }  # fmt: skip


def host_scale(name: str, batch: Sequence[Sample], per_token: bool = False) -> float:
    """What a metric that mis.py lacks is multiplied by, so that the host's mean is over samples with a valid token.

    A host adds up what those samples have, and divides by all of them: by their number, or by their tokens, of which it
    counts one for a fully masked sample.
    """
    counts = [len(sample.valid) for sample in batch]
    numbered = name[-2:-1] == "_" and name[-1].isdigit()  # of a second rule; mis.py has but one
    bounds = tuple(f"tis_{bound}_" for bound in BOUNDS if bound not in OF_MIS_PY)
    ours = name.startswith(("kept_", "saturated_", *bounds)) or name.endswith("_mb") or numbered
    if not ours or not any(counts):
        return 1.0
    if per_token:
        return sum(max(n, 1) for n in counts) / sum(counts)
    return len(counts) / sum(n > 0 for n in counts)


def sequence_kept(sample: Sample, config: dict) -> bool:
    """What rules over sequences, and a mask bound at a level above the token, say of a sequence with a valid token."""
    t, weight = sample.valid[0], config.get("weight")
    rules = [rule for rule in config.get("reject", []) if unit_of(rule) == "sequence"]
    return all(passes(sample, t, rule) for rule in rules) and (
        weight is None or UNITS[weight["level"]] != "sequence" or inside(sample, t, weight)
    )


# -------------------------------------------------------------------------------------------------------- margins


def margin(batch: Sequence[Sample], config: dict) -> float:
    """The margin of `correct`, without weights and metrics, which take most of its time."""
    return decision_margin(judged(batch, config).batch, config)


def decision_margin(batch: Sequence[Sample], config: dict) -> float:
    """How far the nearest decision lies from its bound, in the units of what is compared (the logarithm of a ratio):
    near 0, rounding could take it either way.
    """
    gaps = [math.inf]
    weight = config.get("weight")
    for sample in batch:
        for t in sample.usable:
            gaps.append(abs(abs(sample.log_ratios[t]) - CLAMP))
            if weight and has_weight(sample, t, weight["level"]):
                bounds = [upper_of(weight), lower_of(weight), math.exp(CLAMP), math.exp(-CLAMP)]
                gaps += [
                    abs(unit_log_ratio(sample, t, weight["level"]) - math.log(b)) for b in bounds if 0 < b < math.inf
                ]
            for rule in config.get("reject", []):
                gaps += rule_gaps(sample, t, rule)
    if normalizes(weight):
        gaps.append(abs(mean_gap(batch, config)))
    if config.get("m2_threshold") is not None:
        squares, stay = squares_of(batch, config["m2_threshold"])
        gaps += [abs(mean(squares[:n]) - config["m2_threshold"]) for n in range(1, len(squares) + 1)]
        gaps += [b - a for a, b in [squares[max(stay - 1, 0) : stay + 1]] if b > a] if 0 < stay < len(squares) else []
    return min(gaps)


def rule_gaps(sample: Sample, t: int, rule: dict) -> list[float]:
    bounds = [limit(rule, side) for side in ("lower", "upper")]
    values = [statistic(sample, t, rule), token_statistic(sample, t, rule.get("statistic", "ratio"))]
    return [abs(v - b) for b in bounds if b is not None for v in values if not math.isnan(v)]


def mean_gap(batch: Sequence[Sample], config: dict) -> float:
    """Distance of the mean weight from the floor under which nothing is divided."""
    factor = normalizer([judged(batch, config)])
    return math.inf if factor == 1.0 else math.log(factor) - math.log(MEAN_FLOOR)


# --------------------------------------------------------------------------------------------------- hosts' layout


def zigzag(total: int, response: int, cp: int, rank: int, padded: int | None = None) -> list[int]:
    """Response tokens that `rank` owns, in its order: chunks `rank` and `2 cp - 1 - rank` of the logits.

    `padded` is the row length of a `bshd` batch; None is `thd`. Token t of the response is scored by logit
    `prompt - 1 + t`.
    """
    chunk = math.ceil((total if padded is None else padded) / (2 * cp))
    prompt = total - response
    if cp == 1:
        return list(range(response))
    owned = []
    for number in (rank, 2 * cp - 1 - rank):
        logits = range(number * chunk, (number + 1) * chunk)
        owned += [logit - prompt + 1 for logit in logits if prompt - 1 <= logit < total - 1]
    return owned

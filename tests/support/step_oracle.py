"""The metrics of a step a second time: numpy, float64, over all of the step's tokens at once.

Imports nothing of `mis_plugins`. Weights and masks are those of `oracle.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import oracle
from loss_oracle import Response, opsm_keep
from oracle import Corrected, Sample

CLAMP = 20.0
LEVEL_OF_TOKENS = ("token", "segment", "segment_geometric")


def step_metrics(
    samples: Sequence[Sample], config: dict, corrected: Corrected, loss: Sequence[Sequence[float]] | None = None
) -> tuple[dict[str, float], Everything]:
    """Every metric of one step but the percentiles, NaN where it is not known; and what it was made of.

    With `aggregate: kept`, not those of what a unit adds up from the tokens that are left of it.
    """
    step = Everything(samples, config, corrected)
    found = counts(step) | by_token(step) | by_sequence(step) | kept(step) | by_turn(step)
    if config.get("weight"):
        found |= of_bounds(step, config["weight"])
    for i, rule in enumerate(config.get("reject", []), 1):
        if rule.get("over") == "token" or (rule.get("aggregate") or config.get("aggregate")) != "kept":
            of_this, size = of_rule(step, rule)
            found |= {f"rule_{i}_{name}": value for name, value in of_this.items()}
            step.sizes |= {f"rule_{i}_{name}": size for name in of_this}
    return found | (losses(step, loss) if loss is not None else {}), step


class Everything:
    """Token arrays of the whole step: `valid` ones, of which some are `usable`; and one entry a sequence."""

    def __init__(self, samples: Sequence[Sample], config: dict, corrected: Corrected):
        self.samples, self.config, self.corrected = samples, config, corrected
        self.places = places = [(i, t) for i, s in enumerate(samples) for t in s.valid]
        known = [t in samples[i].usable for i, t in places]
        pick = lambda rows: np.array([rows[i][t] for i, t in places], dtype=float)  # noqa: E731
        self.usable = np.array(known, dtype=bool)
        self.p = pick([s.proximal for s in samples])[self.usable]
        self.q = pick([s.behavior for s in samples])[self.usable]
        self.x = self.p - self.q
        routed = all(s.routes is not None for s in samples)
        self.routes = pick([s.routes for s in samples])[self.usable] if routed else None
        self.c = np.clip(self.x, -CLAMP, CLAMP)
        self.keep = pick(corrected.keep).astype(bool)
        self.bounded = pick(corrected.bounded)
        self.weights = pick(corrected.weights)
        self.applied = np.where(self.keep, self.weights, 0)
        self.owner = np.array([i for i, _ in places], dtype=int)
        self.valid_sequences = [i for i, s in enumerate(samples) if s.valid]
        self.usable_sequences = [i for i, s in enumerate(samples) if s.usable]
        self.gaps: list[float] = [1.0]  # distances of decisions that only metrics make from their bounds
        self.sizes: dict[str, float] = {}  # of what enters a metric, where that is more than the metric itself

    def std(self, name: str, x: np.ndarray, unbiased: bool = False) -> dict[str, float]:
        self.sizes[name] = float(np.max(np.abs(x), initial=1.0))
        return {name: float(np.std(x, ddof=int(unbiased))) if len(x) > unbiased else math.nan}

    def of(self, i: int) -> np.ndarray:
        """Which valid tokens are those of sequence i."""
        return self.owner == i

    def each(self, values: np.ndarray) -> np.ndarray:
        """Mean over the valid tokens of each sequence that has a usable one."""
        return np.array([values[self.of(i)].mean() for i in self.usable_sequences])

    def mean_x(self) -> np.ndarray:
        return np.array(
            [np.mean([self.samples[i].log_ratios[t] for t in self.samples[i].usable]) for i in self.usable_sequences]
        )

    def sum_x(self) -> np.ndarray:
        return np.array(
            [math.fsum(self.samples[i].log_ratios[t] for t in self.samples[i].usable) for i in self.usable_sequences]
        )


def mean(x) -> float:
    return float(np.mean(x)) if len(x) else math.nan


def ends(x) -> tuple[float, float]:
    return (float(np.min(x)), float(np.max(x))) if len(x) else (math.nan, math.nan)


def divide(a: float, b: float) -> float:
    return a / b if b else math.nan


def kish(w, n: int) -> float:
    return divide(float(np.sum(w)) ** 2, n * float(np.sum(np.square(w))))


def correlation(a, b) -> float:
    centered = [v - np.mean(v) for v in (a, b)] if len(a) else [np.zeros(1)] * 2
    return divide(float(np.sum(centered[0] * centered[1])), math.sqrt(float(np.prod([np.sum(v**2) for v in centered]))))


def log_mean_exp(x) -> float:
    if not len(x):
        return math.nan
    return float(np.max(x) + np.log(np.mean(np.exp(x - np.max(x)))))


def counts(s: Everything) -> dict[str, float]:
    def wrong(rows) -> float:
        return float(sum(not oracle.is_log_prob(rows[i][t]) for i in s.valid_sequences for t in s.samples[i].valid))

    return {
        "tokens": float(len(s.usable)), "sequences": float(len(s.valid_sequences)),
        "live_sequences_fraction": len(s.valid_sequences) / len(s.samples) if s.samples else math.nan,
        "nonfinite_train_tokens": wrong([x.proximal for x in s.samples]),
        "nonfinite_rollout_tokens": wrong([x.behavior for x in s.samples]),
    }  # fmt: skip


def k3(x: np.ndarray) -> np.ndarray:
    bounded = np.minimum(x, CLAMP)
    return np.expm1(bounded) - bounded


def by_token(s: Everything) -> dict[str, float]:
    x, c, r, diff = s.x, s.c, np.exp(s.c), np.abs(np.exp(s.p) - np.exp(s.q))
    found = {
        "kl_k1": -mean(x), "kl_k2": mean(x**2 / 2), "kl_k3": mean(k3(x)),
        "reverse_kl_k1": mean(r * x), "reverse_kl_k2": mean(r * x**2 / 2), "reverse_kl_k3": mean(r * x - np.expm1(c)),
        "log_prob_diff_abs_mean": mean(np.abs(x)), "log_prob_diff_abs_max": ends(np.abs(x))[1],
        "ratio_mean": mean(r), "ratio_min": ends(r)[0], "ratio_max": ends(r)[1],
        "chi2_token": mean(r**2) - 1, "ess_ratio": kish(r, len(r)),
        "prob_diff_abs_mean": mean(diff), **s.std("prob_diff_abs_std", diff, unbiased=True),
        "prob_diff_abs_max": ends(diff)[1], "prob_correlation": correlation(np.exp(s.p), np.exp(s.q)),
        "log_prob_correlation": correlation(s.p, s.q), "saturated_tokens": mean(np.abs(x) > CLAMP),
    }  # fmt: skip
    s.gaps += [float(np.min(np.abs(diff - b), initial=1.0)) for b in (0.05, 0.2, 0.5)]
    s.gaps += [float(np.min(np.abs(np.abs(x) - b), initial=1.0)) for b in (0.1, 1.0)]
    found |= {f"log_ratio_tail_high_{bound}": mean(x > bound) for bound in (0.1, 1.0)}
    found |= {f"log_ratio_tail_low_{bound}": mean(x < -bound) for bound in (0.1, 1.0)}
    return found | {f"prob_diff_tail_{bound}": mean(diff > bound) for bound in (0.05, 0.2, 0.5)}


def by_turn(s: Everything) -> dict[str, float]:
    """Numbers of the first three turns, and of all later ones together; NaN where nobody speaks twice."""
    turns = []
    for (i, t), usable in zip(s.places, s.usable, strict=True):
        mask = [0, *map(int, s.samples[i].mask)]
        rises = sum(before < after for before, after in zip(mask[: t + 1], mask[1 : t + 2], strict=True))
        turns += [min(rises, 4)] if usable else []
    numbers, keep, found = np.array(turns, dtype=int), s.keep[s.usable], {}
    for turn in (1, 2, 3, 4):
        mine = numbers == turn
        here = {
            "share": mean(mine), "kl_k1": -mean(s.x[mine]), "kl_k3": mean(k3(s.x[mine])),
            "log_prob_diff_abs_mean": mean(np.abs(s.x[mine])), "ratio_mean": mean(np.exp(s.c[mine])),
            "kept_fraction": mean(keep[mine]),
        }  # fmt: skip
        found |= {f"turn_{turn}_{name}": value for name, value in here.items()}
    return found if max(turns, default=0) > 1 else dict.fromkeys(found, math.nan)


def by_sequence(s: Everything) -> dict[str, float]:
    m, total = s.mean_x(), s.sum_x()
    usable = [(s.samples[i], s.samples[i].usable) for i in s.usable_sequences]
    train = np.array([-np.mean([x.proximal[t] for t in known]) for x, known in usable])
    rollout = np.array([-np.mean([x.behavior[t] for t in known]) for x, known in usable])
    first, second = log_mean_exp(total), log_mean_exp(2 * total)
    return {
        "train_log_ppl": mean(train), "train_ppl": mean(np.exp(train)),
        "rollout_log_ppl": mean(rollout), "rollout_ppl": mean(np.exp(rollout)),
        "log_ppl_diff": mean(train - rollout), "log_ppl_abs_diff": mean(np.abs(m)),
        "log_ppl_diff_max": -ends(m)[0], "log_ppl_diff_min": -ends(m)[1], "ppl_ratio": mean(np.exp(-m)),
        "chi2_sequence": mean(np.exp(2 * np.clip(total, -CLAMP, CLAMP))) - 1,
        "log_chi2_sequence": second, "log_mean_product": first,
        "chi2_geometric": mean(np.exp(2 * np.clip(m, -CLAMP, CLAMP))) - 1,
        "sequence_log_ratio_mean": mean(total), "sequence_log_ratio_abs_mean": mean(np.abs(total)),
        "sequence_log_ratio_min": ends(total)[0], "sequence_log_ratio_max": ends(total)[1],
        "saturated_sequences": mean(np.abs(total) > CLAMP),
    }  # fmt: skip


def percentile_data(s: Everything) -> dict[str, np.ndarray]:
    """What percentiles are of: in logarithms, since it is these whose error the sketch bounds."""
    with np.errstate(divide="ignore"):
        weights = np.log(s.bounded[s.usable])
    return {"ratio": s.x, "weight": weights, "sequence_log_ratio": s.sum_x(), "geometric_ratio": s.mean_x()}


def kept(s: Everything) -> dict[str, float]:
    n, weights, applied = len(s.usable), s.each(s.bounded), s.each(s.applied)
    keeps = [s.keep[s.of(i)] & s.usable[s.of(i)] for i in s.valid_sequences]
    x = np.zeros(n)
    x[s.usable] = s.x
    return {
        "weight_mean": mean(s.bounded), **s.std("weight_std", s.bounded),
        "weight_min": ends(s.bounded[s.usable])[0], "weight_max": ends(s.bounded[s.usable])[1],
        "normalization_factor": divide(float(s.bounded.sum()), float(s.weights.sum())),
        "applied_mean": mean(s.applied[s.keep & s.usable]), "applied_valid_mean": mean(s.applied),
        "applied_min": ends(s.applied[s.usable])[0], "applied_max": ends(s.applied[s.usable])[1],
        "ess": kish(s.applied, n), "ess_bounded": kish(s.bounded, n),
        "sequence_weight_mean": mean(weights), **s.std("sequence_weight_std", weights, unbiased=True),
        "sequence_weight_min": ends(weights)[0], "sequence_weight_max": ends(weights)[1],
        "sequence_weight_max_deviation": ends(np.abs(weights - 1))[1],
        "sequence_applied_mean": mean(applied), "sequence_applied_min": ends(applied)[0],
        "sequence_applied_max": ends(applied)[1],
        "kept_fraction": mean(s.keep), "rejected_fraction": 1 - mean(s.keep),
        "kept_sequences": mean([bool(k.any()) for k in keeps]), "touched_sequences": mean([not k.all() for k in keeps]),
        "kept_log_ratio_mean": mean(x[s.keep & s.usable]),
        "kept_weight_min": ends(s.weights[s.keep & s.usable])[0],
        "kept_log_ratio_min": ends(x[s.keep & s.usable])[0], "kept_log_ratio_max": ends(x[s.keep & s.usable])[1],
    }  # fmt: skip


def of_bounds(s: Everything, weight: dict) -> dict[str, float]:
    twin = oracle.BOUNDS[weight["bound"]]
    upper = weight["upper"] if twin.has_ceiling else math.inf
    lower = weight.get("lower") if twin.has_floor else None
    floor, lower = lower, 1 / upper if not lower else lower
    found = {}
    ratio_rules = [rule for rule in s.config.get("reject", []) if rule.get("statistic", "ratio") == "ratio"]
    uppers = [upper, *(rule["upper"] for rule in ratio_rules if rule.get("upper"))]
    lifting = next((bound for bound in uppers if bound < math.inf), None)
    if lifting:
        lifted = np.minimum(np.maximum(s.applied, 1 / lifting), lifting)
        found["ess_lifted"] = kish(lifted, len(lifted))
    low, high = math.log(lower) if lower else -math.inf, math.log(upper)
    level, samples = weight["level"], [oracle.pooled(sample, s.config) for sample in s.samples]

    def ratio_of(i: int, t: int) -> float:
        """Of what weighs token t, in logarithms; NaN, which is neither low nor high, where it is not known."""
        known = oracle.has_weight(samples[i], t, level)
        return oracle.unit_log_ratio(samples[i], t, level) if known else math.nan

    each = [np.array([ratio_of(i, t) for t in samples[i].usable]) for i in s.usable_sequences]
    if level in LEVEL_OF_TOKENS:
        unit = np.concatenate(each) if each else np.zeros(0)
        totals = [np.nansum(np.exp(np.clip(x, -CLAMP, CLAMP))) for x in each]
        with np.errstate(divide="ignore"):
            raw = np.log([x / len(samples[i].valid) for i, x in zip(s.usable_sequences, totals, strict=True)])
    else:
        unit = raw = np.array([np.nan if np.isnan(x).all() else np.nanmax(x) for x in each])
    s.gaps += [*nearest(unit, lower, upper), *nearest(raw, lower, upper)]
    for name, ratios in (("weight", unit), ("sequence_ratio", raw)):
        found[f"{name}_low_fraction"], found[f"{name}_high_fraction"] = (mean(ratios < low), mean(ratios > high))
    acts = math.log(lower) if lower and twin.has_floor and floor != 0 else -math.inf
    tokens = unit if level in LEVEL_OF_TOKENS else np.repeat(unit, [len(x) for x in each])
    found["outside_bound_fraction"] = mean((tokens < acts) | (tokens > high))
    return found


def nearest(logs: np.ndarray, *bounds: float) -> list[float]:
    finite = [math.log(b) for b in bounds if 0 < b < math.inf]
    known = logs[~np.isnan(logs)]
    return [float(np.min(np.abs(known - b), initial=1.0)) for b in finite]


def statistic_of(rule: dict, s: Everything) -> np.ndarray:
    twin = oracle.STATISTICS[rule.get("statistic", "ratio")]
    routes = np.full(len(s.p), np.nan) if s.routes is None else s.routes
    tokens = zip(s.p.tolist(), s.q.tolist(), routes.tolist(), strict=True)
    return np.array([twin(oracle.Token(*token)) for token in tokens])


def of_rule(s: Everything, rule: dict) -> tuple[dict[str, float], float]:
    """The metrics of one rule, and the size of what enters them."""
    logs = rule.get("statistic", "ratio") in oracle.LOGARITHMS
    low, high = (None if rule.get(k) is None else math.log(rule[k]) if logs else rule[k] for k in ("lower", "upper"))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    tokens = statistic_of(rule, s)
    over, places = rule.get("over", "token"), units(s, rule.get("unit", "sequence"))
    groups = [tokens[of_usable] for of_usable, _ in places]
    valid = np.array([n for _, n in places])
    faulty = np.array([len(g) < n for g, n in zip(groups, valid, strict=True)], dtype=bool)
    if over == "token":
        unit = np.array([g.mean() for g in groups])
        touched = np.array([bool(((g < low) | (g > high)).any()) for g in groups], dtype=bool) | faulty
        values, sizes = tokens, np.ones(len(tokens))
    else:
        fold = {"sum": np.sum, "mean": np.sum, "min": np.min, "max": np.max}[over]
        unit = np.array([float(fold(g)) for g in groups]) / (valid if over == "mean" else 1)
        touched = (unit < low) | (unit > high) | faulty
        values, sizes = unit, valid
    weighted = lambda v: divide(float(np.sum(v * sizes)), float(np.sum(sizes)))  # noqa: E731
    bounded = np.clip(values, max(low, 0) if low == -math.inf else low, high)
    size = float(
        np.sum(np.abs(tokens)) + np.sum(np.exp(s.c)) + np.max(np.abs(bounded[np.isfinite(bounded)]), initial=1)
    )
    return {
        "mean": weighted(values), "min": ends(values)[0], "max": ends(values)[1],
        "std": math.sqrt(max(weighted(bounded**2) - weighted(bounded) ** 2, 0)),
        "low_fraction": weighted(values < low), "high_fraction": weighted(values > high),
        "rejected_fraction": weighted((values < low) | (values > high)),
        "unit_mean": mean(unit), **s.std("unit_std", unit, unbiased=True),
        "unit_min": ends(unit)[0], "unit_max": ends(unit)[1],
        "unit_max_deviation": ends(np.abs(unit))[1],
        "unit_low_fraction": mean(unit < low), "unit_high_fraction": mean(unit > high),
        "unit_rejected_fraction": mean(touched),
    }, size  # fmt: skip


def units(s: Everything, kind: str) -> list[tuple[np.ndarray, int]]:
    """Of each sequence or segment with a usable token: which of the usable tokens are its, and its valid ones."""
    names = np.array([(i, tuple(s.samples[i].run(t)) if kind == "segment" else ()) for i, t in s.places], dtype=object)
    found = []
    for name in dict.fromkeys(map(tuple, names.tolist())):
        mine = np.array([tuple(other) == name for other in names.tolist()], dtype=bool)
        if (mine & s.usable).any():
            found.append((mine[s.usable], int(mine.sum())))
    return found


def losses(s: Everything, loss: Sequence[Sequence[float]]) -> dict[str, float]:
    valid = np.array([loss[i][t] for i in s.valid_sequences for t in s.samples[i].valid], dtype=float)
    total = float(np.sum(valid * s.applied))
    return {
        "loss_uncorrected": mean(valid),
        "loss_original_denominator": divide(total, len(valid)),
        "loss_kept_denominator": divide(total, float(s.keep.sum())),
    }


def departures(responses: Sequence[Response], behavior: Sequence[Sequence[float]], opsm: dict) -> dict[str, np.ndarray]:
    """What OPSM looks at: one number a sequence that has a valid token and finite log-probs, by the metric's name."""
    taking_part = [(x, b) for x, b in zip(responses, behavior, strict=True) if x.valid]

    def gaps(rows: Sequence[tuple]) -> np.ndarray:
        pairs = zip(rows, taking_part, strict=True)
        return np.array([np.mean([p[t] - q[t] for t in x.valid]) for (p, q), (x, _) in pairs])

    mismatch, staleness = (
        gaps([(b, x.old) for x, b in taking_part]),
        gaps([(x.old, x.target) for x, _ in taking_part]),
    )
    divergence = staleness if opsm.get("reference") == "proximal" else gaps([(b, x.target) for x, b in taking_part])
    advantage = np.array([np.mean([x.learned[t] for t in x.valid]) for x, _ in taking_part])
    found = {
        "divergence": divergence, "divergence_negative": divergence[advantage < 0],
        "divergence_positive": divergence[advantage > 0], "mismatch": mismatch, "staleness": staleness,
    }  # fmt: skip
    return {f"opsm_{name}": x[np.isfinite(x)] for name, x in found.items()}


def opsm(responses: Sequence[Response], behavior: Sequence[Sequence[float]], config: dict) -> dict[str, float]:
    """The metrics of OPSM, percentiles aside."""
    data, tokens = departures(responses, behavior, config), sum(len(x.valid) for x in responses)
    reference = [x.old for x in responses] if config.get("reference") == "proximal" else behavior
    by_sequence = config.get("advantage") == "sequence"
    keeps = [opsm_keep(x, r, config["delta"], by_sequence) for x, r in zip(responses, reference, strict=True)]
    return {f"{name}_mean": mean(x) for name, x in data.items()} | {
        "opsm_masked_fraction": divide(tokens - sum(map(sum, keeps)), tokens),
        "opsm_unknown_sequences": float(sum(bool(x.valid) for x in responses) - len(data["opsm_divergence"])),
    }

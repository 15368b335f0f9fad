"""Corrections of other packages: settings of theirs at random, and what the loss of each token is multiplied by.

Each formula is written down anew in float64. It takes log pi_old - log mu of the valid tokens of each sequence. A token
that the package drops has weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

Row = list[float]
Formula = Callable[[list[Row]], list[Row]]
CLAMP, MEAN_FLOOR = 20.0, 1e-8
PENALTY = 1e-3  # `kl_tau` of prime-rl where nothing is set
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")  # of TRL and of ms-swift
VERL_RULES = ("", "token_k1", "token_k2", "token_k3", "seq_mean_k1", "seq_sum_k1", "seq_mean_k3", "seq_max_k3")
uppers, lowers = st.sampled_from([1.0001, 1.05, 2.0, 5.0]), st.sampled_from([0.1, 0.5, 0.9])


@st.composite
def verl_settings(draw: st.DrawFn) -> dict[str, Any]:
    level, rule = draw(st.sampled_from(["token", "sequence", "null"])), draw(st.sampled_from(VERL_RULES))
    rule = rule or ("token_k1" if level == "null" else "")
    upper, lower = draw(uppers), draw(st.none() | lowers)
    settings: dict[str, Any] = {} if level == "null" else {"rollout_is": level}
    settings["rollout_is_threshold"] = upper if lower is None else f"{lower}_{upper}"
    if rule:
        settings["rollout_rs"] = rule
        settings["rollout_rs_threshold"] = "0.8_1.3" if rule.endswith("k1") else draw(st.sampled_from([0.02, 0.1]))
    return settings


@st.composite
def areal_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Any block but k3, whose help contradicts the code on any input, and a clamp by another than the mean."""
    metric = draw(st.sampled_from(["ratio", "ratio", "kl_k1", "kl_k2"]))
    settings = {"metric": metric, "level": draw(st.sampled_from(["token", "sequence"])), "action": "mask"}
    if metric == "ratio":
        settings["action"] = draw(st.sampled_from(["mask", "clamp"]))
    if settings["level"] == "sequence" and settings["action"] == "mask":
        settings["agg"] = draw(st.sampled_from(["sum", "mean", "max"]))
    ends = (uppers, lowers) if metric == "ratio" else (st.sampled_from([0.01, 0.1, 1.0]), st.none())
    return settings | {"upper": draw(ends[0]), "lower": draw(st.none() | ends[1])}


def clamped(x: float) -> float:
    return max(-CLAMP, min(CLAMP, x))


def exp(x: float) -> float:
    """e^x, and infinity beyond the largest float."""
    return math.exp(x) if x < 700 else math.inf


def mean(values: Row) -> float:
    return math.fsum(values) / len(values)


def of_each(weights: Callable[..., Row]) -> Callable[..., Formula]:
    """The formula, by its settings, of a package that weighs each sequence by itself."""
    return lambda *settings, **named: lambda rows: [weights(row, *settings, **named) if row else [] for row in rows]


def of_mis_py(said: Mapping[str, Any]) -> Formula:
    """Miles's and slime's mis.py by its flat keys."""
    upper = said["tis_upper_bound"]
    lower = 1.0 / upper if said["tis_lower_bound"] is None else said["tis_lower_bound"]
    least = lower if said["rs_lower_bound"] is None else said["rs_lower_bound"]
    most = upper if said["rs_upper_bound"] is None else said["rs_upper_bound"]
    veto = said["rs_veto_threshold"] if said["use_rs"] else None
    level, mode = said["tis_level"], said["tis_mode"]

    def ratios(row: Row, level: str) -> Row:
        if level == "token":
            return [exp(clamped(x)) for x in row]
        return [exp(clamped(math.fsum(row) if level == "sequence" else mean(row)))] * len(row)

    def weights(rows: list[Row]) -> list[Row]:
        found, kept = [], []
        for row in rows:
            raw = ratios(row, level) if row else []
            judged = ratios(row, said["rs_level"]) if row else []
            fatal = veto is not None and any(x < math.log(veto) for x in row)
            bounded = {"truncate": lambda r: min(r, upper), "clip": lambda r: max(lower, min(r, upper)),
                       "mask": lambda r: r}[mode]  # fmt: skip
            found.append([bounded(r) for r in raw])
            kept.append([not fatal and (mode != "mask" or lower <= r <= upper)
                         and (not said["use_rs"] or least <= j <= most)
                         for r, j in zip(raw, judged, strict=True)])  # fmt: skip
        if said["tis_batch_normalize"]:
            found = normalized(found, level)
        return [[w if k else 0.0 for w, k in zip(*pair, strict=True)] for pair in zip(found, kept, strict=True)]

    return weights


def normalized(rows: list[Row], level: str) -> list[Row]:
    """The weights over their mean: over tokens, or over sequences with a valid token."""
    units = [w for row in rows for w in (row if level == "token" else row[:1])]
    factor = mean(units) if units else 0.0
    return [[w / factor for w in row] for row in rows] if factor > MEAN_FLOOR else rows


@of_each
def of_swift(row: Row, mode: str, upper: float) -> Row:
    logs = [clamped(x) for x in row]
    ratios, geometric = [exp(x) for x in logs], exp(mean(logs))
    return {
        "token_truncate": [min(r, upper) for r in ratios],
        "token_mask": [r if r <= upper else 0.0 for r in ratios],
        "sequence_truncate": [min(geometric, upper)] * len(row),
        "sequence_mask": [r if geometric <= upper else 0.0 for r in ratios],
    }[mode]


@of_each
def of_trl(row: Row, mode: str, upper: float, lower: float) -> Row:
    level, _, action = mode.partition("_")
    each = [exp(math.fsum(row))] * len(row) if level == "sequence" else [exp(x) for x in row]
    if action == "mask":
        return [r if lower <= r <= upper else 0.0 for r in each]
    return [max(lower, min(r, upper)) for r in each]


@of_each
def of_verl(row: Row, settings: Mapping[str, Any]) -> Row:
    """rollout_is truncates, or zeroes outside of a pair of bounds; rollout_rs drops tokens or sequences."""
    *low, upper = map(float, str(settings["rollout_is_threshold"]).split("_"))
    lower, level = low[0] if low else None, settings.get("rollout_is", "null")
    rule, limit = settings.get("rollout_rs", ""), settings.get("rollout_rs_threshold", 1.0)
    least, most = map(float, limit.split("_")) if isinstance(limit, str) else (1.0, limit)
    each = [exp(clamped(math.fsum(row)))] * len(row) if level == "sequence" else [exp(clamped(x)) for x in row]
    weights = [min(r, upper) if lower is None else r if lower <= r <= upper else 0.0 for r in each]
    weights = weights if level != "null" else [1.0] * len(row)
    logs = [clamped(x) for x in row]
    k2, k3 = [x * x / 2 for x in logs], [math.expm1(x) - x for x in logs]
    within = lambda x: -math.log(most) <= x <= -math.log(least)  # noqa: E731
    kept = {
        "": lambda t: True,
        "token_k1": lambda t: within(logs[t]),
        "seq_mean_k1": lambda t: within(mean(logs)),
        "seq_sum_k1": lambda t: within(math.fsum(logs)),
        "token_k2": lambda t: k2[t] <= most,
        "token_k3": lambda t: k3[t] <= most,
        "seq_mean_k3": lambda t: mean(k3) <= most,
        "seq_max_k3": lambda t: max(k3) <= most,
    }[rule]
    return [w if kept(t) else 0.0 for t, w in enumerate(weights)]


@of_each
def of_areal(
    row: Row, level: str, action: str, metric: str, upper: float, lower: float | None, agg: str = "mean"
) -> Row:
    """`rejection_sampling`: a ratio weighs and is masked or clamped; k1 (log r) and k2 mask alone."""
    logs = [mean(row)] * len(row) if (level, metric) == ("sequence", "ratio") else row
    found = [exp(x) for x in logs]
    if action == "clamp":
        return [max(lower or 0.0, min(w, upper)) for w in found]
    each = [x * x / 2 for x in row] if metric == "kl_k2" else row
    judged = each if level == "token" else [{"sum": math.fsum, "mean": mean, "max": max}[agg](each)] * len(row)
    judged = [exp(x) for x in judged] if metric == "ratio" else judged
    return [w if (lower is None or lower <= x) and x <= upper else 0.0 for w, x in zip(found, judged, strict=True)]


@of_each
def of_openrlhf(row: Row, level: str, mode: str, low: float, high: float) -> Row:
    ratios = [exp(x) for x in row]
    judged = ratios if level == "token" else [exp(mean(row))] * len(row)
    if mode == "clip":
        return [max(low, min(r, high)) for r in ratios]
    return [r if low <= j <= high else 0.0 for r, j in zip(ratios, judged, strict=True)]


SETTINGS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Formula]]] = {
    "verl": (verl_settings(), of_verl),
    "TRL": (
        st.tuples(st.sampled_from(MODES), uppers, st.none() | lowers),
        lambda said: of_trl(said[0], said[1], said[2] or 0.0),
    ),
    "ms-swift": (st.tuples(st.sampled_from(MODES), uppers), lambda said: of_swift(*said)),
    "AReaL": (areal_settings(), lambda said: of_areal(**said)),
}
"""By package, settings of its own at random, and its formula under them."""


def slope_of_prime_rl(
    target: float, mu: float, advantage: float, kind: str, low: float, high: float, tau: float
) -> float:
    """The derivative of prime-rl's loss of one token by log pi_theta: -A r + tau (log r)^2, masked by probabilities."""
    moved, log_ratio = math.exp(target) - math.exp(mu), target - mu
    up, down = moved > high, moved < -low
    masked = up or down if kind == "ipo" else (up if advantage > 0 else down)
    return -(not masked) * advantage * math.exp(log_ratio) + 2 * tau * log_ratio

"""Segment-wise decoupled PPO a second time: Python floats, one token after the other. Imports nothing of ours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """One token: log-probs of the proximal policy at version `current`, of the behavior policy, and as stored."""

    proximal: float
    behavior: float
    recomputed: float | None
    version: int
    current: int
    valid: bool = True

    @property
    def age(self) -> int:
        return self.current - self.version


@dataclass(frozen=True)
class Spec:
    cap: float | None = 5.0
    floor: float | None = None
    mode: str = "truncate"
    method: str = "recompute"
    fresh: str = "proximal"


def numerator(token: Token, spec: Spec) -> float | None:
    """Log pi_{v+1}; None where nobody knows it."""
    if token.version < 0 or token.age < 0:
        return None
    if token.age == 0 or token.age == 1:
        weighs_one = spec.fresh == "behavior" or (spec.fresh == "behavior_at_age_0" and token.age == 0)
        return token.behavior if weighs_one else token.proximal
    if spec.method == "loglinear":
        alpha = 1 / token.age
        return (1 - alpha) * token.behavior + alpha * token.proximal
    return token.recomputed


def weight(token: Token, spec: Spec) -> tuple[float, bool]:
    """w_t, and whether the token stays."""
    log_prob = numerator(token, spec) if token.valid else None
    if log_prob is None:
        return 0.0, token.valid and spec.mode != "mask"
    ratio = math.exp(max(-20.0, min(20.0, log_prob - token.behavior)))
    cap = math.inf if spec.cap is None else spec.cap
    floor = (1 / cap if spec.floor is None else spec.floor) if spec.mode != "truncate" else 0.0
    outside = not floor <= ratio <= cap
    if spec.mode == "zero":
        return 0.0 if outside else ratio, True
    if spec.mode == "mask":
        return ratio, not outside
    return max(floor, min(ratio, cap)), True


def variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / len(values)


def effective_share(weights: Sequence[float]) -> float:
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))

"""Policy losses a second time: Python floats, one loop a sequence, formula for formula. Imports nothing of ours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Row = Sequence[float]


@dataclass(frozen=True)
class Response:
    """One sequence, a number a token: log-probs of the policies, and what enters its loss."""

    target: Row
    old: Row
    reference: Row
    advantages: Row
    factor: Row
    mask: Sequence[bool]

    @property
    def valid(self) -> list[int]:
        return [t for t, valid in enumerate(self.mask) if valid]

    @property
    def learned(self) -> list[float]:
        """Advantages, 0 where one is no number."""
        return [a if math.isfinite(a) else 0.0 for a in self.advantages]

    @property
    def log_ratios(self) -> list[float]:
        return [p - q for p, q in zip(self.target, self.old, strict=True)]


@dataclass(frozen=True)
class Spec:
    """Which loss: `surrogate` by its name in a config, of the `ratio` of a token or a sequence."""

    surrogate: str = "clip"
    ratio: str = "token"
    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    kl_tau: float = 0.0
    taus: tuple[float, float] = (1.0, 1.05)
    gammas: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)

    @property
    def settings(self) -> dict[str, float]:
        """The keys of a config that belong to the surrogate."""
        own = {
            "sapo": dict(zip(("tau_pos", "tau_neg"), self.taus, strict=True)),
            "vespo": dict(zip(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), self.gammas, strict=True)),
        }
        return {"kl_tau": self.kl_tau} | own.get(self.surrogate, {})

    @property
    def by_divergence(self) -> bool:
        return self.surrogate in ("dppo_tv", "dppo_kl", "ipo")

    @property
    def of_sequence(self) -> bool:
        """Whether one unknown ratio leaves its whole sequence without a loss."""
        return self.ratio == "sequence" or self.surrogate in ("vespo", "gmpo")

    @property
    def kinks(self) -> list[float]:
        """Ratios at which the loss has no derivative."""
        if self.by_divergence or self.surrogate in ("sapo", "vespo"):
            return []
        if self.surrogate == "gmpo":
            return [math.exp(-self.low), math.exp(self.high)]
        return [1 - self.low, 1 + self.high] + ([] if self.dual is None else [self.dual])


def unit_log_ratio(response: Response, t: int, spec: Spec) -> float:
    if spec.ratio == "token":
        return response.log_ratios[t]
    return math.fsum(response.log_ratios[i] for i in response.valid) / len(response.valid)


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def surrogate(response: Response, frozen: Response, t: int, spec: Spec) -> float:
    """The loss of one token. `frozen` is what a stop-gradient sees."""
    return _without_penalty(response, frozen, t, spec) + spec.kl_tau * response.log_ratios[t] ** 2


def _without_penalty(response: Response, frozen: Response, t: int, spec: Spec) -> float:
    ratio, advantage = math.exp(unit_log_ratio(response, t, spec)), response.learned[t]
    if spec.surrogate == "reinforce":
        return -advantage * response.target[t]
    if spec.surrogate == "sapo":
        tau = spec.taus[0] if advantage > 0 else spec.taus[1]
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if spec.surrogate == "vespo":
        k, lam = spec.gammas[:2] if advantage >= 0 else spec.gammas[2:]
        product = math.exp(math.fsum(frozen.log_ratios[i] for i in frozen.valid))
        return -advantage * response.target[t] * math.exp(lam * (1 - product)) * product**k
    if spec.surrogate == "gmpo":
        bounded = [gmpo_log_ratio(response, i, spec) for i in response.valid]
        return -advantage * math.exp(math.fsum(bounded) / len(bounded))
    if spec.by_divergence:
        constant = 0.0 if away(frozen, t, spec) else min(math.exp(frozen.log_ratios[t]), spec.dual or 20.0)
        return -constant * advantage * response.target[t]
    if spec.surrogate == "cispo":
        constant = math.exp(unit_log_ratio(frozen, t, spec))
        return -clamp(constant, 1 - spec.low, 1 + spec.high) * advantage * response.target[t]
    gain = min(ratio * advantage, clamp(ratio, 1 - spec.low, 1 + spec.high) * advantage)
    if spec.dual is not None and advantage < 0:
        gain = max(gain, spec.dual * advantage)
    return -gain


def gmpo_log_ratio(response: Response, t: int, spec: Spec) -> float:
    """The token's log ratio, clipped on the side to which its advantage pushes it."""
    log_ratio = response.log_ratios[t]
    return min(log_ratio, spec.high) if response.learned[t] > 0 else max(log_ratio, -spec.low)


def divergence(response: Response, t: int, spec: Spec) -> float:
    """DPPO's divergence over two outcomes, the sampled token and any other: |p - q|, or KL(q || p), clamped."""
    p, q = math.exp(response.target[t]), math.exp(response.old[t])
    if spec.surrogate in ("dppo_tv", "ipo"):
        return abs(p - q)
    p, q = clamp(p, 1e-6, 1 - 1e-6), clamp(q, 1e-6, 1 - 1e-6)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def away(response: Response, t: int, spec: Spec) -> bool:
    """DPPO's mask: the probability lies beyond the trust region on the side to which A pushes it; IPO's: on any."""
    if spec.surrogate == "ipo":
        bound = spec.high if response.target[t] > response.old[t] else spec.low
        return divergence(response, t, spec) > bound
    if response.learned[t] > 0:
        return response.target[t] > response.old[t] and divergence(response, t, spec) > spec.high
    if response.learned[t] < 0:
        return response.target[t] < response.old[t] and divergence(response, t, spec) > spec.low
    return False


def policy_sums(batch: Sequence[Response], spec: Spec, frozen: Sequence[Response]) -> list[float]:
    """Of each sequence, the sum of factor times surrogate over its valid tokens."""
    pairs = zip(batch, frozen, strict=True)
    return [math.fsum(x.factor[t] * surrogate(x, f, t, spec) for t in x.valid) for x, f in pairs]


def held_back(response: Response, t: int, spec: Spec) -> bool:
    """PPO's fraction: the clip decides against the ratio; CISPO's: the ratio lies outside; DPPO's: its mask."""
    if spec.by_divergence:
        return away(response, t, spec)
    if spec.surrogate == "gmpo":
        return response.learned[t] != 0 and gmpo_log_ratio(response, t, spec) != response.log_ratios[t]
    ratio = math.exp(unit_log_ratio(response, t, spec))
    inside = clamp(ratio, 1 - spec.low, 1 + spec.high)
    if spec.surrogate == "clip":
        return inside * response.learned[t] < ratio * response.learned[t]
    return spec.surrogate == "cispo" and inside != ratio


def kl(response: Response, t: int, kind: str, unbiased: bool = False) -> float:
    x = response.reference[t] - response.target[t]
    estimate = {"k1": -x, "k2": x * x / 2, "k3": math.expm1(x) - x, "low_var_kl": math.expm1(x) - x}[kind]
    if unbiased:
        estimate *= math.exp(response.log_ratios[t])
    return clamp(estimate, -10, 10) if kind == "low_var_kl" else estimate


def kl_sums(batch: Sequence[Response], kind: str, unbiased: bool) -> list[float]:
    return [math.fsum(x.factor[t] * kl(x, t, kind, unbiased) for t in x.valid) for x in batch]


def gradient(total: Callable[[Sequence[Response]], float], batch: Sequence[Response], step: float) -> list[list[float]]:
    """d total / d target, by central differences."""

    def moved(i: int, t: int, by: float) -> float:
        target = [p + by * (u == t) for u, p in enumerate(batch[i].target)]
        return total([*batch[:i], replace(batch[i], target=target), *batch[i + 1 :]])

    return [
        [(moved(i, t, step) - moved(i, t, -step)) / (2 * step) for t in range(len(x.target))]
        for i, x in enumerate(batch)
    ]


def margin(batch: Sequence[Response], spec: Spec) -> float:
    """How far, in log units, the nearest ratio lies from a kink; how far a divergence lies from its bound."""
    if spec.by_divergence:
        found = [divergence(x, t, spec) for x in batch for t in x.valid]
        return min((abs(d - bound) for d in found for bound in (spec.low, spec.high)), default=math.inf)
    gaps = [
        abs(unit_log_ratio(x, t, spec) - math.log(kink))
        for x in batch
        for t in x.valid
        for kink in spec.kinks
        if kink > 0
    ]
    return min(gaps, default=math.inf)


def magnitude(batch: Sequence[Response]) -> float:
    """What the terms of any of these losses add up to at most, in absolute value."""
    return math.fsum(
        abs(x.factor[t])
        * (1 + abs(x.learned[t]))
        * math.exp(abs(x.log_ratios[t]))
        * math.exp(abs(x.target[t] - x.reference[t]))
        * (1 + abs(x.target[t]))
        for x in batch
        for t in x.valid
    )


def opsm_keep(response: Response, behavior: Row, delta: float, by_sequence: bool) -> list[bool]:
    """not (A < 0 and mean(log mu - log pi_theta) > delta), token by token; False outside the mask."""
    if not response.valid:
        return [False] * len(response.mask)
    gaps = [behavior[t] - response.target[t] for t in response.valid]
    far = not math.fsum(gaps) / len(gaps) <= delta  # NaN counts as far
    mean = math.fsum(response.learned[t] for t in response.valid) / len(response.valid)
    keep = []
    for t, valid in enumerate(response.mask):
        advantage = mean if by_sequence else response.learned[t]
        keep.append(bool(valid) and not (advantage < 0 and far))
    return keep

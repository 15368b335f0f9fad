"""Score centering in float64 over the whole vocabulary, one position at a time; nothing of the pack is imported.

Marek and Ryabinin 2026, arxiv.org/abs/2609.20807, equations 9, 12 and 14, and appendix A.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = Sequence[float]
Weigh = Callable[[float], float]

WEIGHTS: dict[str, Callable[[float, float, float], float]] = {
    "none": lambda r, low, high: r,
    "truncate": lambda r, low, high: min(r, high),
    "clip": lambda r, low, high: max(low, min(r, high)),
    "mask": lambda r, low, high: r if low <= r <= high else 0.0,
    "zero": lambda r, low, high: r if low <= r <= high else 0.0,
}


def weigh_of(bound: str | None, low: float, high: float) -> Weigh:
    return lambda ratio: 1.0 if bound is None else WEIGHTS[bound](ratio, low, high)


def weight(bound: str | None, low: float, high: float) -> dict[str, Any] | None:
    """The config of a weight: the bound, with the limits that it takes."""
    limits = {"none": {}, "truncate": {"upper": high}}.get(bound or "", {"lower": low, "upper": high})
    return None if bound is None else {"bound": bound, **limits}


@dataclass(frozen=True)
class Position:
    """One position: logits of the trainer, probabilities of the engine, what was sampled, and the head.

    head: ids of tokens that the engine named. whole: they are all that it could sample.
    """

    logits: Row
    engine: Row
    sampled: int
    head: Sequence[int]
    whole: bool = False


def surrogate(one: Position, logits: Tensor, weigh: Weigh) -> Tensor:
    """sg(w) log p of the sampled token less the centering term, with gradient to `logits`."""
    logits = logits if not one.whole else torch.where(support(one), logits, -torch.inf)
    log_p = logits - torch.logsumexp(logits, 0)
    p = [float(x) for x in log_p.detach().exp()]
    tails = [max(1 - sum(side[v] for v in one.head), 1e-6) for side in (one.engine, p)]
    alpha = 0.0 if one.whole else tails[0] / tails[1] * weigh(tails[1] / tails[0])
    term = weigh(p[one.sampled] / one.engine[one.sampled]) * log_p[one.sampled]
    for v in one.head:
        term = term - (one.engine[v] * weigh(p[v] / one.engine[v]) - alpha * p[v]) * log_p[v]
    return term


def dense_surrogate(one: Position, logits: Tensor, weigh: Weigh) -> Tensor:
    """The surrogate of equation 12: the mean of the weighted score is taken over every token that can be sampled."""
    everything = [v for v, q in enumerate(one.engine) if q > 0]
    return surrogate(Position(one.logits, one.engine, one.sampled, everything, whole=True), logits, weigh)


def support(one: Position) -> Tensor:
    return torch.tensor([v in one.head for v in range(len(one.logits))])


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two gradients, over the largest entry of the gradient that is wanted."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def gradient(one: Position, weigh: Weigh, term: Callable[..., Tensor] = surrogate) -> Tensor:
    """Gradient of the surrogate by the logits, over the whole vocabulary."""
    logits = torch.tensor(one.logits, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(term(one, logits, weigh), logits)
    return found

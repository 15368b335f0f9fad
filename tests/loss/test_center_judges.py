"""Score centering by the formulas of the packages that have it: Miles, vime and prime-rl.

None of the three is on the package index, and SkyRL 0.3.0 and verl 0.9.1, which are, have no score centering. Each
formula is written down anew from the package's page or file: of the log-probs of the sampled token and the head alone.
Miles 8ad2099d4, examples/infra_features/score_centering/README.md; vime 2b83ea209, vime/utils/score_centering.py;
prime-rl 349283dbb, src/prime_rl/trainer/rl/score_centering.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_centering import TEMPERATURE, candidates_of, logits_of, positions, surrogates
from tolerances import EPS64
from torch import Tensor

from mis_plugins.config.model import WeightConfig
from mis_plugins.loss.centering import weigh_with

Function = Callable[[Tensor], Tensor]
Judge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TAIL = 1e-6
ROUNDED = 16 * EPS64 / TAIL  # a sum of probabilities is rounded, and what is left of 1 may be a millionth


def one(ratio: Tensor) -> Tensor:
    return torch.ones_like(ratio)


def tis(ratio: Tensor) -> Tensor:
    """Miles's `tis` with its default clip, and vime's with `--tis-clip-low 0 --tis-clip 2`."""
    return ratio.clamp(0, 2)


def mis(ratio: Tensor) -> Tensor:
    """Miles's `mis` with its default range, and vime's `icepop_function` with the same range."""
    return ratio * ((ratio >= 0.5) & (ratio <= 5))


def miles(p_a: Tensor, p_head: Tensor, q_a: Tensor, q_head: Tensor, f: Function) -> Tensor:
    """Miles's surrogate, which is vime's too: f(p_a/q_a) log p_a - sum_H (q f(p/q) - alpha p) log p, from log-probs."""
    with torch.no_grad():
        p, q = p_head.exp(), q_head.exp()
        rho = (1 - q.sum(-1)).clamp(min=TAIL) / (1 - p.sum(-1)).clamp(min=TAIL)
        alpha = rho * f(1 / rho)
        c = q * f(p / q) - alpha[:, None] * p
        weight = f((p_a - q_a).exp())
    return weight * p_a - (c * p_head).sum(-1)


def prime(p_a: Tensor, p_head: Tensor, q_a: Tensor, q_head: Tensor) -> Tensor:
    """prime-rl's surrogate without a weight: log p_a - sum_H (q - rho p) log p, from log-probs."""
    with torch.no_grad():
        p, q = p_head.exp(), q_head.exp()
        rho = (1 - q.sum(-1)).clamp(min=TAIL) / (1 - p.sum(-1)).clamp(min=TAIL)
        c = q - rho[:, None] * p
    return p_a - (c * p_head).sum(-1)


JUDGES: dict[str, tuple[Judge, WeightConfig | None]] = {
    "miles none": (partial(miles, f=one), None),
    "miles tis": (partial(miles, f=tis), WeightConfig("token", "truncate", upper=2.0)),
    "vime tis": (partial(miles, f=tis), WeightConfig("token", "clip", lower=0.0, upper=2.0)),
    "miles mis": (partial(miles, f=mis), WeightConfig("token", "zero", lower=0.5, upper=5.0)),
    "vime icepop": (partial(miles, f=mis), WeightConfig("token", "mask", lower=0.5, upper=5.0)),
    "prime-rl": (prime, None),
}


@pytest.mark.parametrize("sharpness", [1.5, 9.0], ids=["wide tails", "tiny tails"])
@pytest.mark.parametrize("name", JUDGES)
def test_surrogate_and_gradient_are_the_packages(name: str, sharpness: float) -> None:
    """Sampled tokens lie within the head and outside; with 9.0 the tails are at the floor of a millionth."""
    (judge, weight), batch = JUDGES[name], positions(61, 4, sharpness=sharpness, count=40)
    logits, head = logits_of(batch, torch.float64), candidates_of(batch, torch.float64)
    log_q = torch.tensor([each.engine for each in batch], dtype=torch.float64).log()
    rows = (logits[1:-1] / TEMPERATURE).log_softmax(-1)
    sampled = torch.tensor([[each.sampled] for each in batch])
    theirs = judge(rows.gather(-1, sampled)[:, 0], rows.gather(-1, head.ids.long()),
                   log_q.gather(-1, sampled)[:, 0], head.behavior)  # fmt: skip
    ours, _ = surrogates(batch, weigh_with(weight), logits)
    torch.testing.assert_close(ours, theirs, rtol=ROUNDED, atol=ROUNDED)
    gradients = [torch.autograd.grad(value.sum(), logits, retain_graph=True)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=ROUNDED, atol=ROUNDED)
    inside = [each.sampled in each.head for each in batch]
    assert any(inside) and not all(inside)

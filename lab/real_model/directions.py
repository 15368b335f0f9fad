"""Cosines between policy gradients, with intervals over prompts.

Only inner products of the prompts' own gradients are needed: a gradient over prompts is their sum, so that leaving a
prompt out subtracts a row and a column. The interval is a jackknife's, because a bootstrap that draws a prompt twice
would add noise to every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NORMAL = 1.96  # standard errors on either side of a 95% interval
COLUMNS = 1 << 20  # of the gradients that are multiplied at a time


def gram(gradients: Sequence[Tensor]) -> Tensor:
    """Inner products of gradients, in float64, a part of their columns at a time."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for start in range(0, gradients[0].numel(), COLUMNS):
        part = torch.stack([one[start : start + COLUMNS].double() for one in gradients])
        total += part @ part.T
    return total


def cosines(products: Tensor, sets: Sequence[str], prompts: int) -> dict[str, list[float] | None]:
    """Cosines with their intervals: of each set with the on-policy mean, and of the two on-policy halves.

    Args:
        products: the Gram matrix of the prompts' gradients, set after set, each with the same prompts in one order.
        sets: names of the sets; `first` and `second` are the on-policy halves.

    Returns:
        `{"agreement": [cosine, low, high], SET: ...}` for every other set; None where a gradient is zero.
    """
    compared = {"agreement": (("first",), ("second",))}
    compared |= {name: ((name,), ("first", "second")) for name in sets if name not in ("first", "second")}

    def sums(left_out: int | None) -> Callable[[tuple[str, ...]], Tensor]:
        kept = torch.ones(prompts, dtype=torch.float64)
        if left_out is not None:
            kept[left_out] = 0
        return lambda names: torch.cat([kept * float(one in names) for one in sets])

    return {
        name: _with_interval(lambda out, pair=pair: _cosine(products, *map(sums(out), pair)), prompts)
        for name, pair in compared.items()
    }


def _cosine(products: Tensor, left: Tensor, right: Tensor) -> float:
    across, own, other = (float(a @ products @ b) for a, b in ((left, right), (left, left), (right, right)))
    return across / math.sqrt(own * other) if own > 0 and other > 0 else math.nan


def _with_interval(statistic: Callable[[int | None], float], prompts: int) -> list[float] | None:
    """A statistic of all prompts, and its 95% interval from those of all but one."""
    without = torch.tensor([statistic(index) for index in range(prompts)], dtype=torch.float64)
    error = math.sqrt((prompts - 1) * float(without.var(unbiased=False)))
    whole = statistic(None)
    found = [whole, whole - NORMAL * error, whole + NORMAL * error]
    return None if math.isnan(sum(found)) else found

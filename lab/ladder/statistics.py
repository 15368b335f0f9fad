"""Statistics of the mismatch of one rung: means, tails, products, by position and by probability, with intervals.

`log r = log pi - log mu`, trainer over engine. Intervals are of a bootstrap over prompts, because responses
to one prompt are not independent samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config.terms.divergence import k1, k3

RESAMPLES = 400
POSITIONS = (0, 16, 64, 256, 1024)
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True)
class Pair:
    """Log-probs that one engine and one trainer give to one set of sampled tokens.

    behavior, proximal: log-probs of engine and trainer, packed end to end.
    lengths: the length of each response.
    prompts: the index of each response's prompt.
    """

    behavior: Tensor
    proximal: Tensor
    lengths: Tensor
    prompts: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.proximal.double() - self.behavior.double()

    @property
    def owners(self) -> Tensor:
        """The response of each token."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths.tolist()])


def summary(pair: Pair) -> dict[str, Any]:
    """All statistics of a pair, as numbers for a json."""
    log_ratio, product = pair.log_ratio, _per_response(pair, pair.log_ratio)
    token_prompts = pair.prompts[pair.owners]
    return {
        "tokens": len(log_ratio),
        "responses": len(pair.lengths),
        "prompts": int(pair.prompts.unique().numel()),
        **_sizes(log_ratio, token_prompts),
        "max": log_ratio.abs().max().item(),
        "log product": _mean(product, pair.prompts),
        "log product sd": _with_interval(lambda x: x.std(), product, pair.prompts),
        "k3 by position": _binned(k3(log_ratio), pair.positions, POSITIONS, token_prompts),
        "k3 by probability": _binned(k3(log_ratio), pair.behavior.exp(), PROBABILITIES, token_prompts),
    }


def by_turn(pair: Pair, turns: int) -> dict[str, Any]:
    """Return the statistics of each turn of chats; the turns of a chat follow one another as responses."""
    turn = (torch.arange(len(pair.lengths)) % turns)[pair.owners]
    prompts = pair.prompts[pair.owners]
    found = {}
    for number in range(turns):
        log_ratio, owners = pair.log_ratio[turn == number], prompts[turn == number]
        found[str(number + 1)] = {"tokens": len(log_ratio), **_sizes(log_ratio, owners)}
    return found


def _sizes(log_ratio: Tensor, prompts: Tensor) -> dict[str, list[float]]:
    """The mean k1 and k3 of tokens, and their percentile 99, each with its interval."""
    return {
        "k1": _mean(k1(log_ratio), prompts),
        "k3": _mean(k3(log_ratio), prompts),
        "p99": _with_interval(lambda x: x.abs().quantile(0.99), log_ratio, prompts),
    }


def _per_response(pair: Pair, values: Tensor) -> Tensor:
    return torch.zeros(len(pair.lengths), dtype=values.dtype).index_add_(0, pair.owners, values)


def _mean(values: Tensor, prompts: Tensor) -> list[float]:
    """Mean, and the 95% interval of a bootstrap over prompts, from the sums of each prompt."""
    _, owner = prompts.unique(return_inverse=True)
    count = int(owner.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, owner, values.double())
    sizes = torch.bincount(owner, minlength=count).double()
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    return [values.mean().item(), *_ends(means)]


def _with_interval(statistic: Callable[[Tensor], Tensor], values: Tensor, prompts: Tensor) -> list[float]:
    """A statistic, and the 95% interval of a bootstrap over prompts, from the values of the drawn prompts."""
    _, owner = prompts.unique(return_inverse=True)
    parts = [values[owner == index] for index in range(int(owner.max()) + 1)]
    random = torch.Generator().manual_seed(0)
    draws = (torch.randint(len(parts), (len(parts),), generator=random).tolist() for _ in range(RESAMPLES))
    found = torch.stack([statistic(torch.cat([parts[index] for index in draw])) for draw in draws])
    return [statistic(values).item(), *_ends(found.nan_to_num())]


def _ends(values: Tensor) -> list[float]:
    return values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()


def _binned(values: Tensor, where: Tensor, edges: tuple[float, ...], prompts: Tensor) -> dict[str, list[float]]:
    """The mean of `values` in each bin that holds a token, with its interval; the last bin holds its upper edge."""
    found = {}
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (where >= low) & ((where < high) | (where == high) & (high == edges[-1]))
        if inside.any():
            found[f"{low:g} to {high:g}"] = _mean(values[inside], prompts[inside])
    return found

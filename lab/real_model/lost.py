"""What a window costs: the gradient of the responses that it keeps, beside as many responses drawn at random.

The cosine with an on-policy reference says how good a gradient is. A random draw loses responses and nothing else, so
that what a window loses beyond the draw is direction: a bias, or worse responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.host.rollout.sampler import derive_seed
from lab.host.train.advantages import ESTIMATORS
from lab.ladder.presets_at import window_values
from lab.ladder.statistics import k3
from lab.real_model.correction import NONE, UNBIASED, loss, pair
from lab.real_model.policy import Batch
from lab.real_model.task import Problem
from lab.real_model.unit import Row, Unit

ROWS = 8  # gradients that are held at a time


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        policies: rollouts of training after which a policy is measured.
        prompts: prompts of every set of responses.
        reference: responses to each prompt in the reference.
        samples: responses to each prompt in a measured set.
        sets: measured sets of each policy.
        draws: random draws from a set.
    """

    policies: tuple[int, ...] = (10, 20)
    prompts: int = 16
    reference: int = 64
    samples: int = 16
    sets: int = 4
    draws: int = 8


def measured(
    unit: Unit, scope: Scope, window: tuple[float, float], tell: Callable[[str], None]
) -> Iterator[Row]:
    """Train the unit, and yield a row for every measured set.

    Args:
        window: bounds of `(prod r)^(1/n)`.
        tell: hears what is done, after each rollout and each set.
    """
    last = max(scope.policies)
    for index in range(last + 1):
        if index in scope.policies:
            for row in _at(unit, index, scope, window):
                tell(f"set {row['set'] + 1} of {scope.sets} after {index} rollouts")
                yield row
        if index < last:
            unit.rollout(index)
            tell(f"rollout {index + 1} of {last}")


def _at(unit: Unit, index: int, scope: Scope, window: tuple[float, float]) -> Iterator[Row]:
    problems = unit.problems("direction", index, scope.prompts)
    watched = list(unit.trainer.model.model.layers[-unit.recipe.layers :].parameters())
    reference = reference_of(unit, watched, problems, scope.reference, index)
    for number in range(scope.sets):
        batches = unit.sampled(unit.of_arm, problems, scope.samples, f"lost {number}", index)
        inside, told = _inside(unit, batches, window)
        random = torch.Generator().manual_seed(derive_seed(unit.seed, "draws", index, number))
        masks = torch.stack(
            [torch.ones(len(inside)), inside.double(), *random_masks(inside, scope.draws, random)]
        )
        sums = masked_sums(unit, watched, batches, advantages_of(unit, batches, problems), masks)
        every, kept, *drawn = torch.cosine_similarity(sums, reference[None], dim=1).tolist()
        yield {"rollout": index, "set": number, **told, "all": every, "window": kept, "random": drawn}


def reference_of(
    unit: Unit, watched: Sequence[Tensor], problems: Sequence[Problem], samples: int, index: int
) -> Tensor:
    """The gradient of many responses, each weighted with its whole ratio, so that what sampled leaves no bias."""
    batches = unit.sampled(unit.of_arm, problems, samples, "reference", index)
    advantages = advantages_of(unit, batches, problems).split(unit.recipe.batch)
    total = torch.zeros(sum(one.numel() for one in watched), dtype=torch.float64)
    for batch, part in zip(batches, advantages, strict=True):
        log_probs = unit.trainer.log_probs(batch.prompts, batch.tokens)
        total += _flat(torch.autograd.grad(loss(UNBIASED, batch, part, log_probs)[0], watched))
    return total


def advantages_of(unit: Unit, batches: Sequence[Batch], problems: Sequence[Problem]) -> Tensor:
    """GRPO's advantages in groups as large as in training."""
    groups = unit.rewards(batches, problems).view(-1, unit.recipe.samples)
    return ESTIMATORS["grpo"](NONE, groups).flatten()


@torch.no_grad()
def _inside(unit: Unit, batches: Sequence[Batch], window: tuple[float, float]) -> tuple[Tensor, Row]:
    """Which responses the window keeps, and what explains how many."""
    scored = [unit.trainer.log_probs(batch.prompts, batch.tokens) for batch in batches]
    found = pair(batches, scored)
    means = torch.tensor(window_values(found)["ratio"]["mean"], dtype=torch.float64).exp()
    inside = (means >= window[0]) & (means <= window[1])
    length = float(found.lengths.double().mean())
    told = {"kept": float(inside.double().mean()), "k3": float(k3(found.log_ratio).mean()), "length": length}
    return inside, told


def random_masks(inside: Tensor, draws: int, random: torch.Generator) -> list[Tensor]:
    """Masks of as many responses as are inside, at random places."""
    return [inside[torch.randperm(len(inside), generator=random)].double() for _ in range(draws)]


def masked_sums(
    unit: Unit, watched: Sequence[Tensor], batches: Sequence[Batch], advantages: Tensor, masks: Tensor
) -> Tensor:
    """`[masks, parameters]`: the gradient of the responses in each mask."""
    singles = [one for batch in batches for one in batch.split(1)]
    total = torch.zeros(len(masks), sum(one.numel() for one in watched), dtype=torch.float64)
    for places in filter(len, advantages.nonzero()[:, 0].split(ROWS)):  # an advantage of 0 has no gradient
        gradients = torch.stack([_of_one(unit, watched, singles[at], advantages[at]) for at in places])
        total += masks[:, places] @ gradients
    return total


def _of_one(unit: Unit, watched: Sequence[Tensor], response: Batch, advantage: Tensor) -> Tensor:
    log_probs = unit.trainer.log_probs(response.prompts, response.tokens)
    return _flat(torch.autograd.grad(loss(NONE, response, advantage[None], log_probs)[0], watched))


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts]).double()

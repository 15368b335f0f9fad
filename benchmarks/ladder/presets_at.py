"""What presets and windows keep of the rollouts of a rung, and how presets weigh it, by the length of a response."""

from __future__ import annotations

from typing import Any

import torch

from ladder.statistics import Pair
from mis_plugins.__main__ import load
from mis_plugins.config.model import CorrectionConfig, Over, RejectRule
from mis_plugins.config.reading import presets
from mis_plugins.config.terms.statistics import STATISTICS
from mis_plugins.correction import correct, mean_weight_of
from mis_plugins.correction.rejection import aggregate
from mis_plugins.packing.ragged import Ragged

OVERS: tuple[Over, ...] = ("mean", "min", "max")
ANY_BOUND = 0.5  # within the range of every statistic; it is not read
NEEDS_ADVANTAGES, NEEDS_ROUTES = "needs advantages", "needs routes"


def kept_and_weighed(pair: Pair) -> dict[str, Any]:
    """For every preset: shares of kept tokens and sequences, mean weight and effective sample size of kept tokens.

    OPSM masks by advantages, which rollouts alone do not have, and a dense model has no routes.
    """
    return {name: kept_by(load(file), pair) for name, file in presets().items()}


def kept_by(config: CorrectionConfig, pair: Pair) -> Any:
    if config.opsm is not None:
        return NEEDS_ADVANTAGES
    if config.reads_routes:
        return NEEDS_ROUTES
    ragged = _ragged(pair)
    sides = pair.proximal.float(), pair.behavior.float()
    numerator = sides[0] if config.segment_wise_on else None  # the trainer has not moved since it sampled
    scope = config.weight and config.weight.normalize and config.weight.normalize.scope
    mean = mean_weight_of(*sides, ragged, config, numerator) if scope == "rollout" else None
    made = correct(*sides, ragged, config, mean, numerator)
    kept, weights = made.keep, made.weights[made.keep].double()
    sequences = torch.zeros(len(pair.lengths)).index_add_(0, pair.owners, kept.float()) > 0
    return {
        "tokens": kept.double().mean().item(),
        "sequences": sequences.double().mean().item(),
        "weight": weights.mean().item() if len(weights) else None,
        "ess": (weights.sum() ** 2 / weights.square().sum() / len(kept)).item() if weights.any() else 0.0,
    }


def of_length(pair: Pair, length: int) -> Pair:
    """Responses of at least `length` tokens, cut there, so that all are equally long."""
    long = pair.lengths >= length
    inside = (pair.positions < length) & long[pair.owners]
    lengths = torch.full((int(long.sum()),), length)
    return Pair(pair.behavior[inside], pair.proximal[inside], lengths, pair.prompts[long])


def window_values(pair: Pair) -> dict[str, dict[str, list[float]]]:
    """What a rule over sequences compares with its bounds, of each response: by statistic, and by what it is over.

    A sum is left out: among responses of one length it is that length times the mean.
    """
    named = [name for name, record in STATISTICS.items() if not record.reads_routes]
    rules = {(name, over): RejectRule(name, over, upper=ANY_BOUND) for name in named for over in OVERS}
    config = CorrectionConfig(reject=tuple(rules.values()), metrics="none")
    made = correct(pair.proximal.float(), pair.behavior.float(), _ragged(pair), config)
    totals = made.verdict.by_population["valid"]
    return {name: {over: aggregate(totals, rules[name, over]).tolist() for over in OVERS} for name in named}


def _ragged(pair: Pair) -> Ragged:
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), pair.lengths.cumsum(0)])
    return Ragged(bounds, torch.ones(len(pair.behavior), dtype=torch.bool))

"""What presets keep of a rung's rollouts, how presets weigh them, and what windows compare, by length."""

from __future__ import annotations

from typing import Any

import torch

from lab.ladder.statistics import Pair
from mis_plugins.__main__ import load
from mis_plugins.config.loading import presets
from mis_plugins.config.model import CorrectionConfig, Over, RejectRule
from mis_plugins.config.terms.statistics import STATISTICS
from mis_plugins.correction import correct, mean_weight_of
from mis_plugins.correction.rejection import aggregate
from mis_plugins.packing.ragged import Ragged

OVERS: tuple[Over, ...] = ("mean", "min", "max")
ANY_BOUND = 0.5  # within the range of every statistic; the bound is not read
NEEDS_ADVANTAGES, NEEDS_ROUTES = "needs advantages", "needs routes"


def kept_and_weighed(pair: Pair) -> dict[str, Any]:
    """Return, for every preset, the kept shares of tokens and sequences, and mean weight and ESS of the kept.

    A preset with OPSM or with routes has the reason in place of numbers: rollouts alone have no advantages,
    and a dense model has no routes.
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
    """Return the responses of at least `length` tokens, cut at `length`, so that all are equally long."""
    long = pair.lengths >= length
    inside = (pair.positions < length) & long[pair.owners]
    lengths = torch.full((int(long.sum()),), length)
    return Pair(pair.behavior[inside], pair.proximal[inside], lengths, pair.prompts[long])


def window_values(pair: Pair) -> dict[str, dict[str, list[float]]]:
    """Return what a rule over sequences compares with its bounds, per response, by statistic and `over`.

    The sum is left out: among responses of one length, the sum is the length times the mean.
    """
    named = [name for name, record in STATISTICS.items() if not record.reads_routes]
    rules = {(name, over): RejectRule(name, over, upper=ANY_BOUND) for name in named for over in OVERS}
    config = CorrectionConfig(reject=tuple(rules.values()), metrics="none")
    made = correct(pair.proximal.float(), pair.behavior.float(), _ragged(pair), config)
    totals = made.by_population["valid"]
    return {name: {over: aggregate(totals, rules[name, over]).tolist() for over in OVERS} for name in named}


def _ragged(pair: Pair) -> Ragged:
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), pair.lengths.cumsum(0)])
    return Ragged(bounds, torch.ones(len(pair.behavior), dtype=torch.bool))

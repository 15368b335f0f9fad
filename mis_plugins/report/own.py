"""The run's own config: which it was, and whether it did what its author meant at this mismatch.

A bound and a window are meant for outliers: one that acts on much of the data shapes what is learned.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.report.proposal import Judged
from mis_plugins.report.readers.settings import Settings
from mis_plugins.report.readers.source import Problems
from mis_plugins.report.sweep import Candidate, judged

RARE = 0.05  # share up to which a bound acts on outliers: docs/metrics.md calls more than a few percent bad
WORSE = 0.02  # of a cosine, by which a direction counts as further off
MOST_RULES = 32  # each token is judged by every rule
LOSS_HOOK = "custom_loss_function_path"


def found_config(held: Iterable[Settings], problems: Problems) -> Candidate | None:
    """The config that a run's own arguments say; None where they say none, or switch the correction off."""
    for file, arguments in held:
        said = {name: value for name, value in arguments.items() if name in reading.READ_KEYS}
        if said.get("use_tis") is False and not arguments.get(LOSS_HOOK):
            continue
        with problems.guarded(file, "the run's own config cannot be read"):
            if judged(config := _own(said)):
                return Candidate(f"the config in {file.name}", config)
    return None


def _own(said: Mapping[str, Any]) -> CorrectionConfig:
    """The config that arguments of a stranger's run say.

    Raises:
        ConfigError: the arguments cannot work, or name more rules than `MOST_RULES`.
    """
    config = reading.from_args(Namespace(**said))
    if len(config.reject) > MOST_RULES:
        raise ConfigError(f"has {len(config.reject)} rules, more than {MOST_RULES}")
    return config


@dataclass(frozen=True)
class Intent:
    """What the run's config did.

    as_meant: whether no part acts on more than outliers, and nothing speaks against the whole.
    told: one sentence for each part, and for all of it together.
    """

    name: str
    as_meant: bool
    told: tuple[str, ...]


def intent(own: Candidate, whole: Mapping[str, float], ranking: Sequence[Judged]) -> Intent:
    """Whether the run's own config did what its author meant.

    Args:
        whole: metrics of the run with that config.
        ranking: all candidates; the own one is among them unless nothing was swept.
    """
    mine = next((one for one in ranking if one.candidate.config == own.config), None)
    none = next((one for one in ranking if not one.candidate.config.corrects), None)
    parts = list(_parts(own.config, whole))
    against = mine.reasons if mine else ()
    told = (*starmap(_said, parts), *against, *(_direction(mine, none) if mine and none else ()))
    return Intent(own.name, not against and all(share <= RARE for _, _, share in parts), told)


def _parts(config: CorrectionConfig, whole: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """For each part of a config its key, a verb for what it does, and the share of the tokens concerned."""
    weight = config.weight
    if weight is not None and weight.record.has_ceiling:
        yield f"weight.bound: {weight.bound}", "acts on", whole.get("outside_bound_fraction", 0.0)
    for number, rule in enumerate(config.reject):
        verb = "drops" if rule.drops else "down-weighs"
        yield f"reject[{number}]", verb, whole.get(f"rule_{number + 1}_rejected_fraction", 0.0)


def _said(key: str, verb: str, share: float) -> str:
    if not share:
        return f"{key} never acts: no token lies outside"
    if share <= RARE:
        return f"{key} {verb} {share:.2%} of the tokens: outliers, for which a bound is meant"
    return f"{key} {verb} {share:.0%} of the tokens, which is more than outliers"


def _direction(own: Judged, none: Judged) -> Iterator[str]:
    if own is none or own.cosine is None or none.cosine is None:
        return
    if own.cosine < none.cosine - WORSE:
        yield f"the gradient's direction is further off ({own.cosine:.3f}) than without correction ({none.cosine:.3f})"
    else:
        yield f"the gradient's direction goes from {none.cosine:.3f} without correction to {own.cosine:.3f}"

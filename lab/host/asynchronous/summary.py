"""The asynchronous part of a run's summary, from its records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MEANS = ("behav_imp_weight/var/segment_wise", "behav_imp_weight/var/standard", "behav_kl/avg", "staleness/avg")
"""Means over the rollouts, each with the weight of its tokens."""

SUMS = (
    "staleness/tokens",
    "staleness/unknown",
    "stale_cache_tokens",
    "recompute/seconds",
    "recompute/tokens",
    "recompute/scored",
    "wait_seconds",
    "pause_seconds",
)

AGE = re.compile(r"(/age_\d+(?:_up)?)?$")


def asynchronous_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums and means over the run, also by age; `recompute/share` is a share of the run's seconds.

    Empty for a run that was not asynchronous.
    """
    names = sorted({name for record in records for name in record})
    found: dict[str, float] = {}
    for name in names:
        base, age = AGE.sub("", name), _age(name)
        if base in SUMS:
            found[name] = sum(record.get(name) or 0 for record in records)
        elif base in MEANS:
            found |= _mean(name, f"staleness/tokens{age}", records)
    seconds = sum(record.get("seconds") or 0 for record in records)
    if "recompute/seconds" in found and seconds:
        found["recompute/share"] = found["recompute/seconds"] / seconds
    return found


def _age(name: str) -> str:
    match = AGE.search(name)
    assert match is not None
    return match.group()


def _mean(name: str, weight: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = [record for record in records if record.get(name) is not None and record.get(weight)]
    tokens = sum(record[weight] for record in known)
    return {name: sum(record[name] * record[weight] for record in known) / tokens} if tokens else {}

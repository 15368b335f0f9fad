"""The metrics of routing: how much engine and trainer route differently, and what that does to log ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mis_plugins.metrics.quantity import Metric, ratio_of


@dataclass(frozen=True)
class RoutingSums:
    """Sums of `mis_plugins/routing/table.py` over some layers and positions, and of some classes of tokens.

    routed: sums over (token, layer) by name.
    tokens: sums over tokens by name.
    all_tokens: tokens of all classes.
    all_k3: their k3.
    """

    routed: Mapping[str, float]
    tokens: Mapping[str, float]
    all_tokens: float = 0.0
    all_k3: float = 0.0


ROUTED: dict[str, Metric] = {
    "route_differs": lambda s: ratio_of(s.routed["differs"], s.routed["tokens"]),
    "route_strange": lambda s: ratio_of(s.routed["strange"], s.routed["tokens"]),
    "route_margin": lambda s: ratio_of(s.routed["margin"], s.routed["differs"]),
    "route_unequal": lambda s: ratio_of(s.routed["unequal"], s.routed["rows"]),
}
SPLIT: dict[str, Metric] = {
    "route_tokens": lambda s: ratio_of(s.tokens["tokens"], s.all_tokens),
    "route_kl_k3": lambda s: ratio_of(s.tokens["k3"], s.tokens["tokens"]),
    "route_share_of_k3": lambda s: ratio_of(s.tokens["k3"], s.all_k3),
    "route_tail": lambda s: ratio_of(s.tokens["tail"], s.tokens["tokens"]),
    "route_kept": lambda s: ratio_of(s.tokens["kept"], s.tokens["tokens"]),
}


def routing_metrics(
    by_layer: Sequence[Mapping[str, float]],
    by_position: Mapping[int, Mapping[str, float]],
    by_class: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Every known metric of a step's routing, by name; those of a layer or a place behind a slash."""
    found = dict(_routed("", _added(by_position.values())))
    for layer, sums in enumerate(by_layer):
        found |= _routed(f"/layer_{layer}", sums)
    for start, sums in by_position.items():
        found |= _routed(f"/position_{start}", sums)
    everything = _added(by_class.values())
    for kind, sums in by_class.items():
        step = RoutingSums({}, sums, everything["tokens"], everything["k3"])
        found |= {f"{name}/{kind}": metric(step) for name, metric in SPLIT.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _routed(suffix: str, sums: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((name + suffix, metric(RoutingSums(sums, {}))) for name, metric in ROUTED.items())


def _added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    return total

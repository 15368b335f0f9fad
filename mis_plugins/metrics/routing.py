"""The metrics of routing: how much engine and trainer route differently, and what that does to log ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mis_plugins.metrics.quantity import known, ratio_of

ROUTED = {
    "route_differs": ("differs", "tokens"),
    "route_strange": ("strange", "tokens"),
    "route_margin": ("margin", "differs"),
    "route_unequal": ("unequal", "rows"),
}
"""A metric of some layers and positions is one sum over (token, layer) divided by another (`routing/table.py`)."""
SPLIT = {
    "route_tokens": ("tokens", "all_tokens"),
    "route_kl_k3": ("k3", "tokens"),
    "route_share_of_k3": ("k3", "all_k3"),
    "route_tail": ("tail", "tokens"),
    "route_kept": ("kept", "tokens"),
}
"""A metric of one class of tokens is a sum over the class divided by a sum over that class or over all classes."""


def routing_metrics(
    by_layer: Sequence[Mapping[str, float]],
    by_position: Mapping[int, Mapping[str, float]],
    by_class: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Every known metric of a step's routing, by name; those of a layer or a place behind a slash."""
    places = {"": _added(by_position.values())}
    places |= {f"/layer_{layer}": sums for layer, sums in enumerate(by_layer)}
    places |= {f"/position_{start}": sums for start, sums in by_position.items()}
    every = {f"all_{name}": value for name, value in _added(by_class.values()).items()}
    classes = {f"/{kind}": {**sums, **every} for kind, sums in by_class.items()}
    return known(
        {
            name + place: ratio_of(sums[part], sums[whole])
            for metrics, of in ((ROUTED, places), (SPLIT, classes))
            for place, sums in of.items()
            for name, (part, whole) in metrics.items()
        }
    )


def _added(rows: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
    total = Counter[str]()
    for row in rows:
        total.update(row)
    return total

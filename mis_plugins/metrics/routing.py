"""The metrics of routing: how much engine and trainer route differently, and what that does to log ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mis_plugins.metrics.metric import Metric
from mis_plugins.metrics.step import ratio_of


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
    "route_differs": Metric(
        lambda s: ratio_of(s.routed["differs"], s.routed["tokens"]),
        "Share of (token, layer) at which the trainer's router by itself picks another set of experts than the "
        "engine's.",
        range="0 to 1; 0.02 with 8 experts and 0.14 with 64 have been measured in bf16.",
        bad="a rise, or one layer far above the others.",
        do="compare the gate's dtype on both sides; replay (R3), or drop or down-weigh such tokens with `statistic: "
        "route`.",
    ),
    "route_strange": Metric(
        lambda s: ratio_of(s.routed["strange"], s.routed["tokens"]),
        "Share of (token, layer) at which less than half of the engine's experts are among the router's own.",
        range="0 to 1; near 0.",
        bad="above 0.01: recorded rows belong to another layer, token or sample.",
        do="read the warnings, which name the layer and the sample.",
    ),
    "route_margin": Metric(
        lambda s: ratio_of(s.routed["margin"], s.routed["differs"]),
        "Mean gap, where the routes differ, between the last gate that the trainer picks and the next gate.",
        range="0 and above, in the unit of the gates (logits, their softmax before the selection, or sigmoids).",
        bad="far above a rounding of the gates: the routes differ by more than numerics.",
        do="compare the weights of both sides.",
    ),
    "route_unequal": Metric(
        lambda s: ratio_of(s.routed["unequal"], s.routed["rows"]),
        "Share of recorded rows that a router should have replayed, and used other experts than recorded.",
        range="0 to 1; exactly 0 where replay works.",
        bad="above 0.",
        do="stop (`mis.routing.on_fault: raise`): the host does not replay what the engine did.",
    ),
}
SPLIT: dict[str, Metric] = {
    "route_tokens": Metric(
        lambda s: ratio_of(s.tokens["tokens"], s.all_tokens),
        "Share of tokens of the class.",
        range="0 to 1.",
        bad="a rise of `other`.",
        do="as route_differs.",
    ),
    "route_kl_k3": Metric(
        lambda s: ratio_of(s.tokens["k3"], s.tokens["tokens"]),
        "KL(mu || pi_old), estimator k3, of the tokens of the class.",
        range="0 and above.",
        bad="`other` far above `same`: routing makes the mismatch, and replay would remove it.",
        do="replay, or drop such tokens.",
    ),
    "route_share_of_k3": Metric(
        lambda s: ratio_of(s.tokens["k3"], s.all_k3),
        "Share of the whole k3 that the tokens of the class carry.",
        range="0 to 1.",
        bad="as route_kl_k3.",
        do="as route_kl_k3.",
    ),
    "route_tail": Metric(
        lambda s: ratio_of(s.tokens["tail"], s.tokens["tokens"]),
        "Share of the tokens of the class whose log ratio lies beyond 0.5 on either side.",
        range="0 to 1.",
        bad="as route_kl_k3.",
        do="as route_kl_k3.",
    ),
    "route_kept": Metric(
        lambda s: ratio_of(s.tokens["kept"], s.tokens["tokens"]),
        "Share of the tokens of the class that every rule of the config keeps.",
        range="0 to 1.",
        bad="`same` far below 1: the rules drop tokens that routing does not explain.",
        do="look at the rules.",
    ),
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
        found |= {f"{name}/{kind}": metric.value(step) for name, metric in SPLIT.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _routed(suffix: str, sums: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((name + suffix, metric.value(RoutingSums(sums, {}))) for name, metric in ROUTED.items())


def _added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    return total

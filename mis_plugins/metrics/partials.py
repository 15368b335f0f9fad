"""What a micro-batch adds to the metrics and warnings of its optimizer step, and the metrics that all of it make.

Most metrics are made of one quantity and stand in its record: `metrics/tokens.py` and `metrics/sequences.py` have these
records; `lab/pages/metrics.yaml` has the words of each, for `docs/metrics.md`. Notation: r_t = pi_old(y_t) / mu(y_t) is
a token's ratio, trainer over rollout engine; w_t is its bounded weight. Means over tokens are over usable tokens, means
over sequences over sequences with a usable token. log r is clamped at +-20 inside exp. A metric that cannot be known,
such as a mean of nothing, is NaN and is not reported.
"""

import math
from collections.abc import Callable, Iterator
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Population, Unit
from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.rejection import Totals
from mis_plugins.metrics import sequences, sketch, tokens
from mis_plugins.metrics.quantity import Quantity, Step, known, log_of
from mis_plugins.metrics.tokens import OF_TURNS, Tokens, rules
from mis_plugins.metrics.totals import Partials, Places, powers, reduced


@torch.no_grad()
def partials(
    correction: Correction,
    pg_loss: Float[Tensor, " T"] | None = None,
    ages: Int[Tensor, " T"] | None = None,
    counts_sequences: bool = True,
) -> Partials:
    """What one micro-batch adds on this rank, without a collective and without waiting for the device.

    Args:
        pg_loss: the policy loss of each token before correction.
        ages: the age of each token, negative where it is not known; None where the host knows no versions.
        counts_sequences: true on exactly one of the context-parallel ranks that hold the same sequences.
    """
    edges = sketch.edges_on_cpu() if correction.log_ratio.is_cpu else sketch.edges(correction.log_ratio.device)
    parts = Tokens.of(correction, pg_loss, ages, correction.ragged.turns).parts()
    by_part = ([*_of_tokens(part, edges)] for part in parts)
    of_tokens = reduce(lambda some, more: [x.merge(y) for x, y in zip(some, more, strict=True)], by_part)
    of_sequences = _of_sequences(correction, edges)
    if not counts_sequences:
        of_sequences = (part.uncounted() for part in of_sequences)
    return Partials.beside([*of_tokens, *of_sequences])


def _of_tokens(t: Tokens, edges: Tensor) -> Iterator[Partials]:
    yield from reduced(tokens.of_usable(t), t.where, t.places(), edges, marked=t.usable)
    yield from reduced(tokens.of_valid(t), marked=t.stage.loss_mask)
    yield from reduced(tokens.of_kept(t), t.kept)


def _of_sequences(c: Correction, edges: Tensor) -> Iterator[Partials]:
    """Totals over sequences and segments, which are equal on all context-parallel ranks."""
    for totals, quantities in _of_units(c):
        where = totals.any_usable.double()
        places = Places(("", "tokens/"), torch.stack([where, where * totals["valid"]], 1))
        yield from reduced(quantities, where, places, edges)
    yield powers(c.totals["log_ratio"], c.totals.any_usable)
    yield from reduced(sequences.of_valid_sequences(c))
    yield _of_micro_batch(c)
    if c.departure is not None:
        for name, row in sequences.DEPARTURES.items():
            values = row(c.departure)
            known = c.any_valid & values.isfinite()
            yield from reduced(sequences.of_departure(name, torch.where(known, values, 0)), known.double(), edges=edges)


def _of_units(c: Correction) -> Iterator[tuple[Totals, list[Quantity]]]:
    """The quantities of units with a usable token, with the totals of each kind of unit and population of tokens."""
    by_kind: dict[tuple[Unit, Population], list[Quantity]] = {("sequence", "valid"): [*sequences.of_sequences(c)]}
    for name, rule in tokens.rules(c.config):
        if rule.over != "token":
            kind = rule.unit, c.config.population(rule)
            by_kind.setdefault(kind, []).extend(sequences.of_unit_rule(name, rule, _totals(c, kind)))
    product = sequences.multiplies(c.config)
    if product is not None:
        by_kind.setdefault(product, []).extend(sequences.of_product(_totals(c, product)))
    return ((_totals(c, kind), quantities) for kind, quantities in by_kind.items())


def _totals(c: Correction, kind: tuple[Unit, Population]) -> Totals:
    unit, population = kind
    if unit == "sequence":
        return c.by_population[population]
    assert c.segments is not None
    return c.segments.by_population[population]


def _of_micro_batch(c: Correction, **numbers: Tensor) -> Partials:
    """Counts of one micro-batch, some of which the host knows, and numbers that it does not know."""
    counts = {"micro_batches": 1.0} | ({} if c.config.metrics == "none" else {"sequences": float(c.ragged.size)})
    if c.all_rejected is None:
        counts["all_rejected"] = 0.0
    else:
        numbers["all_rejected"] = c.all_rejected
    if not numbers:
        return Partials(counts=counts)
    return Partials({"sums": tuple(numbers)}, counts=counts, added={"sums": torch.stack([*numbers.values()])})


@torch.no_grad()
def watch(correction: Correction, counts_sequences: bool = True, relates: bool = False) -> Partials:
    """The few sums that warnings need, and nothing else of `partials`.

    Args:
        counts_sequences: true on exactly one of the context-parallel ranks that hold the same sequences.
        relates: whether log pi_old shall be compared with log mu, for `metrics/slope.py`: 18 operators more.
    """
    of_sequences = _watched_sequences(correction)
    if not counts_sequences:
        of_sequences = (part.uncounted() for part in of_sequences)
    return Partials.beside([*_watched_tokens(correction, relates), *of_sequences])


def _watched_tokens(c: Correction, relates: bool) -> Iterator[Partials]:
    marks = {"valid": c.ragged.loss_mask, "kept": c.keep, "usable": c.stage.usable}
    if c.nonfinite_advantages is not None:
        marks["nonfinite_advantages"] = c.nonfinite_advantages
    # A CPU copies the marks into numbers before it adds them up: the narrowest that hold the tokens of a rank's step.
    yield Partials({"sums": tuple(marks)}, added={"sums": torch.stack([*marks.values()]).sum(-1, dtype=torch.int32)})
    if relates:
        yield from reduced(tokens.related(Tokens.of(c)), c.stage.usable.double())


def _watched_sequences(c: Correction) -> Iterator[Partials]:
    live = {} if c.config.metrics == "none" else {"any_valid": c.valid_count.count_nonzero()}
    yield _of_micro_batch(c, **live)
    product = sequences.multiplies(c.config)
    if product is not None:
        totals = _totals(c, product)
        yield from reduced(sequences.of_product(totals), totals.any_usable.double())


METRICS: dict[str, Callable[[Step], float]] = {
    "live_sequences_fraction": lambda s: s.over("any_valid", "sequences"),
    "nonfinite_advantage_tokens": lambda s: s.sums["nonfinite_advantages"] if s.sums["with_advantage"] else math.nan,
    "prob_correlation": lambda s: s.correlation("proximal_prob", "behavior_prob", "prob_product"),
    "log_prob_correlation": lambda s: s.correlation("proximal", "behavior", "log_prob_product"),
    "slope": lambda s: s.related("slope"),
    "slope_error": lambda s: s.related("slope_error"),
    "ratio_mean_error": lambda s: s.related("mean_ratio_error"),
    "log_chi2_sequence": lambda s: s.log_products[2] - log_of(s.sums["any_usable"]),
    "log_mean_product": lambda s: s.log_products[1] - log_of(s.sums["any_usable"]),
    "normalization_factor": lambda s: s.over("weight", "normalized"),
    "all_rejected_fraction": lambda s: s.over("all_rejected", "micro_batches"),
    "loss_kept_denominator": lambda s: s.over("corrected_loss", "kept") if s.sums["with_loss"] else math.nan,
}
"""Metrics that are made of several quantities."""


def finalize(partials: Partials, config: CorrectionConfig) -> dict[str, float]:
    """Every known metric of a step from its merged partials, which should be on the host by now."""
    step = partials.step()
    values = {
        name: reduction.of(step, quantity, count)
        for quantity, metrics, count in partials.records
        for name, reduction in metrics.items()
    }
    values |= {name: metric(step) for name, metric in METRICS.items()}
    for name, _ in rules(config):
        values[f"{name}_rejected_fraction"] = values[f"{name}_low_fraction"] + values[f"{name}_high_fraction"]
    if not any(step.sums[f"{turn}usable"] for turn in OF_TURNS[1:]):
        values = {name: value for name, value in values.items() if not name.startswith("turn_")}
    return known(values)

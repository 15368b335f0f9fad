"""What a micro-batch adds to the metrics of its optimizer step: sums, maxima and histograms of a size the config fixes.

The split of a step into micro-batches, data-parallel and context-parallel ranks does not change what its partials merge
into: sums agree to float64 rounding, maxima and histograms exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mis_plugins.config.model import Population, RejectRule, Unit
from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.rejection import Totals
from mis_plugins.metrics import sketch
from mis_plugins.metrics.by_age import ByAge, TokenRows, by_age, no_ages
from mis_plugins.metrics.by_turn import by_turn
from mis_plugins.metrics.rows import (
    DEPARTURES,
    SQUARED,
    TOKEN_SUMS,
    Rows,
    Sequences,
    TokenRow,
    Tokens,
    departure_sums,
    departures,
    multiplies,
    product_sums,
    sequence_counts,
    sequence_extremes,
    sequence_sums,
    token_extremes,
    token_maxima,
    token_squares,
    token_sums,
    unit_rule_extremes,
    unit_rule_sums,
    unit_rules,
    usable_token_sums,
)
from mis_plugins.metrics.slope import RELATED_SUMS
from mis_plugins.packing.collectives import all_reduce

RELATED: dict[str, TokenRow] = {name: TOKEN_SUMS[name] for name in RELATED_SUMS if name in TOKEN_SUMS}
RELATED_SQUARES = [name for name in SQUARED if f"{name}_squared" in RELATED_SUMS]

AGE_SUMS = ("tokens", "log_ratio", "k3", "ratio", "kept")
TURN_SUMS = (*AGE_SUMS, "log_ratio_abs")

SKETCHES = ("log_ratio", "log_weight", "sequence_log_ratio", "mean_log_ratio", *DEPARTURES)

# Sums of exponentials that overflow a float64: one sum a window of the exponent, each scaled by its window's start.
WINDOW, WINDOWS = 64.0, 128
POWERS = (1, 2)  # powers of a whole sequence's ratio that are added up

ROWS_AT_ONCE = 64  # how many rows stand in memory together
# A CPU reads rows this long faster one at a time (2.5 times at 65,536 tokens): a stack of them leaves its cache.
LONG_ON_CPU = 65_536


@dataclass(frozen=True)
class Partials:
    """Sums, maxima and histograms of one micro-batch, or of many merged.

    sum_names, maximum_names: names of the sums and the maxima; equal for all micro-batches of a config.
    maxima: the largest value of each row; -inf where there was none.
    histograms: one sketch for each of `SKETCHES`, the sketches of OPSM only where OPSM is on.
    products: sums over sequences of `POWERS` of their ratios, by window of the exponent.
    by_age: sums over usable tokens by their age; empty where the config has no such metrics.
    by_turn: sums over usable tokens by their turn, a row for each of `TURN_SUMS`; empty where the config has no such
        metrics.
    """

    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums: Float[Tensor, " S"]
    maxima: Float[Tensor, " M"]
    histograms: Int[Tensor, "H B"]
    products: Float[Tensor, "P W"]
    by_age: ByAge
    by_turn: Float[Tensor, "K U"]

    def merge(self, other: Partials) -> Partials:
        """Add the sums and histograms of two, and take the larger of their maxima."""
        assert self.sum_names == other.sum_names and self.maximum_names == other.maximum_names
        added = [x + y if x.numel() else x for x, y in zip(self._added, other._added, strict=True)]
        return self._with(added, torch.maximum(self.maxima, other.maxima))

    def over_ranks(self, groups: Iterable[dist.ProcessGroup]) -> Partials:
        """Merge over all ranks: one sum and one maximum over each group. A float64 holds counts exactly."""
        packed, maxima = torch.cat([x.flatten().double() for x in self._added]), self.maxima.clone()
        for group in groups:
            all_reduce(packed, group)
            all_reduce(maxima, group, dist.ReduceOp.MAX)
        parts = packed.split([x.numel() for x in self._added])
        added = [part.view_as(x).to(x.dtype) for part, x in zip(parts, self._added, strict=True)]
        return self._with(added, maxima)

    @property
    def named_sums(self) -> dict[str, float]:
        """Sums by name, as numbers: they should be on the host by now."""
        return dict(zip(self.sum_names, self.sums.tolist(), strict=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> Partials:
        """Apply a function to every tensor, such as a copy to the host."""
        return self._with([function(x) for x in self._added], function(self.maxima))

    @property
    def _added(self) -> tuple[Tensor, ...]:
        return self.sums, self.histograms, self.products, self.by_age.sums, self.by_turn

    def _with(self, added: list[Tensor], maxima: Tensor) -> Partials:
        sums, histograms, products, of_ages, of_turns = added
        by_age = replace(self.by_age, sums=of_ages)
        names = self.sum_names, self.maximum_names
        return Partials(*names, sums, maxima, histograms, products, by_age, of_turns)


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
    tokens, sequences = Tokens(correction, pg_loss), Sequences(correction)
    ruled = _units_with_rules(correction)
    once = (lambda x: x) if counts_sequences else torch.zeros_like
    sums = [_summed(token_sums(tokens)), _squares(token_squares(tokens))]
    sums.append(_summed(usable_token_sums(tokens), tokens.usable))
    sums += [(names, once(values)) for names, values in _sums_over_sequences(sequences, ruled)]
    maxima = [
        _largest(token_maxima(tokens), tokens.usable),
        _extremes(token_extremes(tokens), tokens.usable),
        _extremes(sequence_extremes(sequences), sequences.any_usable),
        *(_extremes(unit_rule_extremes(rules, totals), totals["usable"] > 0) for rules, totals in ruled),
    ]
    of_tokens, *of_sequences = _histograms(tokens, sequences)
    placed = _rows_by_place(tokens)
    return Partials(
        _names(sums),
        _names(maxima),
        torch.cat([values for _, values in sums]),
        torch.cat([values for _, values in maxima]),
        torch.cat([of_tokens, *map(once, of_sequences)]),
        once(_powers(sequences)),
        _by_age(placed, tokens.usable, ages),
        by_turn([placed[name] for name in TURN_SUMS], correction.ragged.turns),
    )


@torch.no_grad()
def watch(correction: Correction, counts_sequences: bool = True, relates: bool = False) -> Partials:
    """The few sums that warnings need, and nothing else of `partials`.

    Args:
        counts_sequences: true on exactly one of the context-parallel ranks that hold the same sequences.
        relates: whether log pi_old shall be compared with log mu, for `metrics/slope.py`: 18 operators more.
    """
    marks = torch.stack([correction.ragged.loss_mask, correction.keep, correction.stage.usable])
    tokens = marks.sum(-1, dtype=torch.float64)
    one, rejected = tokens.new_ones(()), correction.all_rejected
    once = [one, one - one if rejected is None else rejected]
    names = ["valid", "kept", "usable", "micro_batches", "all_rejected"]
    if correction.config.metrics != "none":
        once += [one * correction.ragged.size, correction.any_valid.sum()]
        names += ["sequences", "any_valid"]
    if not counts_sequences:
        once = [torch.zeros_like(one)] * len(once)
    sums = torch.cat([tokens, torch.stack(once)])
    if correction.nonfinite_advantages is not None:
        lost = correction.nonfinite_advantages.count_nonzero().double()
        names, sums = [*names, "nonfinite_advantages"], torch.cat([sums, lost.unsqueeze(0)])
    if multiplies(correction.config) is not None:
        product_names, products = _products(correction)
        names, sums = names + product_names, torch.cat([sums, products if counts_sequences else 0 * products])
    if relates:
        tokens_of = Tokens(correction)
        added = _summed((name, row(tokens_of)) for name, row in RELATED.items())
        squared = _squares(token_squares(tokens_of, RELATED_SQUARES))
        names, sums = names + added[0] + squared[0], torch.cat([sums, added[1], squared[1]])
    none = sums.new_zeros(0, 0)
    return Partials(tuple(names), (), sums, sums[:0], none.long(), none, ByAge((), (), none, none), none)


def _unit_totals(correction: Correction) -> Mapping[Unit, Mapping[Population, Totals]]:
    """Totals of sequences and of segments, by population of tokens; no segments where the config has none."""
    verdict = correction.verdict
    kinds: dict[Unit, Mapping[Population, Totals]] = {"sequence": verdict.by_population}
    if verdict.segments is not None:
        kinds["segment"] = verdict.segments.by_population
    return kinds


Named = tuple[list[str], Float[Tensor, " _"]]
Ruled = list[tuple[list[tuple[str, RejectRule]], Totals]]


def _units_with_rules(correction: Correction) -> Ruled:
    """Rules over units, with the totals that they read: one entry for each kind of unit and population of tokens."""
    found = [
        (unit_rules(correction.config, unit, population), totals)
        for unit, by_population in _unit_totals(correction).items()
        for population, totals in by_population.items()
    ]
    return [(rules, totals) for rules, totals in found if rules]


def _sums_over_sequences(s: Sequences, ruled: Ruled) -> list[Named]:
    """Sums over sequences, which are equal on all context-parallel ranks, so that one of the ranks counts them."""
    return [
        _summed(sequence_sums(s), s.any_usable),
        _summed(sequence_counts(s), s.correction.any_valid),
        _nonfinite(s),
        _of_micro_batch(s.correction),
        _products(s.correction),
        *_departures(s.correction),
        *(_unit_rules(rules, totals) for rules, totals in ruled),
    ]


def _departures(correction: Correction) -> list[Named]:
    """Sums of the divergences that OPSM compares; an empty list where OPSM is off."""
    if correction.departure is None:
        return []
    return [_summed(departure_sums(correction.departure), correction.any_valid)]


def _histograms(t: Tokens, s: Sequences) -> list[Int[Tensor, "_ B"]]:
    """Sketches in the order of `SKETCHES`: two of tokens, two of sequences, then those of OPSM where it is on."""
    edges = sketch.edges(t.log_ratio.device)
    by_token, by_sequence = (
        torch.stack([t.log_ratio, t.weight.log()]),
        torch.stack([s.log_ratio, s.mean_log_ratio]),
    )
    found = [
        sketch.histograms(by_token, t.usable, edges),
        sketch.histograms(by_sequence, s.any_usable, edges),
    ]
    if s.correction.departure is None:
        return found
    values = departures(s.correction.departure)
    return [*found, sketch.histograms(values, s.correction.any_valid & values.isfinite(), edges)]


def _names(parts: Iterable[Named]) -> tuple[str, ...]:
    return tuple(itertools.chain.from_iterable(names for names, _ in parts))


def _summed(rows: Rows, where: Bool[Tensor, " *"] | None = None) -> Named:
    """Add up each row over the tokens or sequences that `where` marks; None marks all."""
    marked = (lambda x: x) if where is None else lambda x: torch.where(where, x, 0)
    return _reduced(rows, lambda x: marked(x).sum(-1, dtype=torch.float64))


def _squares(rows: Rows) -> Named:
    """Add up the square of each row."""
    return _reduced(rows, lambda x: x.square().sum(-1))


def _reduced(rows: Rows, reduce: Callable[[Tensor], Tensor]) -> Named:
    names, values = [], []
    for group, stacked in _groups(rows):
        names += group
        values.append(reduce(stacked))
    return names, values[0] if len(values) == 1 else torch.cat(values)


def _unit_rules(rules: list[tuple[str, RejectRule]], units: Totals) -> Named:
    rows = list(unit_rule_sums(rules, units))
    stacked = torch.where(units["usable"] > 0, torch.stack([row for _, row in rows]), 0)
    names = [name for name, _ in rows]
    names += [name.replace("_unit", "") for name in names]
    return names, torch.cat([stacked.sum(-1), (stacked * units["valid"]).sum(-1)])


def _largest(rows: Rows, where: Bool[Tensor, " *"]) -> Named:
    """Largest value of each row; minus infinity of nothing, since a context-parallel rank may own no token."""
    outside = ~where

    def largest(x: Tensor) -> Tensor:
        values = x.double().masked_fill(outside, -torch.inf)
        return values.amax(-1) if where.numel() else values.new_full((len(x),), -torch.inf)

    return _reduced(rows, largest)


def _extremes(rows: Rows, where: Bool[Tensor, " *"]) -> Named:
    """Largest value of each row (`_max`) and of the negated row (`_min`)."""
    outside = ~where

    def ends(x: Tensor) -> Tensor:
        both = torch.stack([x, -x], 1).double().masked_fill(outside, -torch.inf)
        return both.amax(-1).flatten() if where.numel() else both.new_full((2 * len(x),), -torch.inf)

    names, values = _reduced(rows, ends)
    return [f"{name}_{side}" for name in names for side in ("max", "min")], values


def _groups(rows: Rows) -> Iterable[tuple[list[str], Shaped[Tensor, "_ K"]]]:
    for first in rows:
        _, row = first
        others = 0 if row.is_cpu and row.numel() >= LONG_ON_CPU else ROWS_AT_ONCE - 1
        group = [first, *itertools.islice(rows, others)]
        yield (
            [name for name, _ in group],
            torch.stack([row for _, row in group]) if others else row.unsqueeze(0),
        )


def _nonfinite(s: Sequences) -> Named:
    names = ["nonfinite_train", "nonfinite_rollout"]
    return names, torch.stack([s.totals[name].sum() for name in names])


def _of_micro_batch(correction: Correction) -> Named:
    one = torch.ones((), dtype=torch.float64, device=correction.log_ratio.device)
    rejected = correction.all_rejected
    return ["micro_batches", "sequences", "all_rejected"], torch.stack(
        [one, one * correction.ragged.size, one * 0 if rejected is None else rejected.double()]
    )


def _products(correction: Correction) -> Named:
    """How far products of ratios go, where the config multiplies ratios; no rows elsewhere."""
    product = multiplies(correction.config)
    if product is None:
        return [], torch.zeros(0, dtype=torch.float64, device=correction.log_ratio.device)
    unit, population = product
    totals = _unit_totals(correction)[unit][population]
    return _summed(product_sums(totals["log_ratio"]), totals["usable"] > 0)


def _powers(s: Sequences) -> Float[Tensor, "P W"]:
    exponents = torch.stack([s.log_ratio * power for power in POWERS])
    window = (exponents / WINDOW).floor().clamp(-WINDOWS // 2, WINDOWS // 2 - 1)
    within = torch.where(s.any_usable, (exponents - window * WINDOW).exp(), 0)
    sums = exponents.new_zeros(len(POWERS), WINDOWS)
    return sums.scatter_add_(1, (window + WINDOWS // 2).long(), within)


def _rows_by_place(t: Tokens) -> dict[str, Float[Tensor, " T"]]:
    """Rows in float64 that are added up by age and by turn, 0 at tokens that are not usable."""
    rows = {"tokens": t.usable, "log_ratio": t.log_ratio, "log_ratio_abs": t.abs_log_ratio, "k3": t.k3}
    rows |= {"ratio": t.ratio, "kept": t.usable & t.correction.keep}
    return {name: row.double() for name, row in rows.items()}


def _by_age(
    rows: Mapping[str, Float[Tensor, " T"]], usable: Bool[Tensor, " T"], ages: Int[Tensor, " T"] | None
) -> ByAge:
    """Sums over usable tokens whose version is known, by age; 0 where the host knows no versions."""
    named = {name: rows[name] for name in AGE_SUMS}
    if ages is None:
        return no_ages(named, usable.device)
    return by_age([TokenRows(usable & (ages >= 0), named)], ages)

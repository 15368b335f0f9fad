"""Batches as the peers take them (padded rows, float64) and as we do (packed, float32), and both answers compared.

The peers' functions take any float type. In float64 their answer is the formula's, so that ours may differ from it by
our own float32 rounding alone.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import oracle
import torch
import yaml
from batches import Batch, make_batch, masks
from drive import assert_close, spread
from hypothesis import assume
from hypothesis import strategies as st
from tolerances import DECISION, metric_atol, normalized_rtol
from torch import Tensor

from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.loss.objective import Clip, policy_term
from mis_plugins.metrics.partials import finalize, partials
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ragged, Ranks

# How far a response's log ratios spread, none beyond the clamp of 20: what a peer does there is a test of its own. The
# smallest is for rules over 0.999 to 1.001.
SPREADS = (2**-11, 2**-7, 0.3, 1.5)
Metric = str | Callable[[Mapping[str, float]], float]  # one of ours by name, or what a peer makes of several
ADVANTAGES = [-2.0, -1.0, -0.25, 0.5, 1.0]


@dataclass(frozen=True)
class Rows:
    """N responses of R tokens in all; target: log-probs of pi_theta; advantages: one a response."""

    batch: Batch
    target: list[Tensor]
    advantages: Tensor

    @property
    def mask(self) -> Tensor:
        """The loss mask, `[N, L]` as float64."""
        return self.pad([m.double() for m in self.batch.loss_masks])

    @property
    def proximal(self) -> Tensor:
        return self.pad(self.batch.proximal)

    @property
    def behavior(self) -> Tensor:
        return self.pad(self.batch.behavior)

    @property
    def log_ratio(self) -> Tensor:
        return self.proximal - self.behavior

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages[:, None].expand_as(self.mask)

    @property
    def ragged(self) -> Ragged:
        return whole(self.batch.response_lengths).place(self.batch.flat_mask, Ranks())

    def pad(self, responses: list[Tensor]) -> Tensor:
        """`[N, L]` in float64, 0 where there is no token."""
        return torch.nn.utils.rnn.pad_sequence([x.double() for x in responses], batch_first=True)

    def padded(self, flat: Tensor) -> Tensor:
        """One of our `[R]` answers."""
        return self.pad(list(flat.split(self.batch.response_lengths)))

    def flat(self, padded: Tensor) -> Tensor:
        """One of their `[N, L]` as `[R]`."""
        return torch.cat([row[:n] for row, n in zip(padded, self.batch.response_lengths, strict=True)])

    def packed(self, padded: Tensor) -> Tensor:
        """One of their `[N, L]` as `[R]` in float32."""
        return self.flat(padded).float()

    @property
    def rtol(self) -> float:
        """Of a weight, normalized or not."""
        return normalized_rtol(max(spread(s) for s in self.batch.samples))


@st.composite
def rows(draw: Callable, max_responses: int = 4, dead: bool = False) -> Rows:
    """1 to 4 responses, each with a valid token unless `dead`, with holes where a tool spoke, finite everywhere."""
    count = draw(st.integers(1, max_responses))
    drawn = [draw(responses(draw(st.integers(1, 6)), dead)) for _ in range(count)]
    batch = make_batch([row[:3] for row in drawn])
    advantages = draw(st.lists(st.sampled_from(ADVANTAGES), min_size=count, max_size=count))
    return Rows(batch, [torch.tensor(row[3]) for row in drawn], torch.tensor(advantages, dtype=torch.float64))


@st.composite
def responses(draw: Callable, length: int, dead: bool) -> tuple:
    """(pi_old, mu, mask, pi_theta). Numbers at random: hypothesis's own are mostly 0, 1 and the ends of an interval."""
    rng, size = random.Random(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from(SPREADS))
    drift = lambda: rng.choice([0.0, *[rng.uniform(-size, size)] * 9])  # noqa: E731
    mask = draw(masks(length))
    if not dead:
        mask[draw(st.integers(0, length - 1))] = 1
    behavior = [rng.uniform(-12, 0) for _ in range(length)]
    proximal = [b + drift() for b in behavior]
    return proximal, behavior, mask, [p + drift() for p in proximal]


def fixed_rows(log_ratios: list[list[float]], masks: list[list[int]] | None = None) -> Rows:
    """Rows with these log ratios and advantages of 1; the behavior policy gives a token -2, and pi_theta is pi_old."""
    valid = [[1] * len(row) for row in log_ratios] if masks is None else masks
    batch = make_batch(
        [([x - 2.0 for x in row], [-2.0] * len(row), m) for row, m in zip(log_ratios, valid, strict=True)]
    )
    return Rows(batch, batch.proximal, torch.ones(len(log_ratios), dtype=torch.float64))


def ours(batch: Rows, mapping: dict, stand_for_proximal: list[Tensor] | None = None) -> Correction:
    """Our answer; `stand_for_proximal` is pi_theta where a peer compares that with mu."""
    proximal = batch.batch.proximal if stand_for_proximal is None else stand_for_proximal
    flat = lambda x: torch.cat(x).float()  # noqa: E731
    return correct(flat(proximal), flat(batch.batch.behavior), batch.ragged, from_mapping(mapping))


def clear_answer(batch: Rows, mapping: dict, stand_for_proximal: list[Tensor] | None = None) -> Correction:
    """Our answer to a batch of which rounding could take no decision either way; others are skipped."""
    keep_away(batch, mapping, stand_for_proximal)
    return ours(batch, mapping, stand_for_proximal)


@functools.cache
def preset(name: str) -> dict:
    """What stands under `mis:` in one of our files, whose names have dashes where a peer's have underscores."""
    return yaml.safe_load(preset_path(name.replace("_", "-")).read_text())["mis"]


def our_metrics(batch: Rows, mapping: dict) -> dict[str, float]:
    """Those of a step of one micro-batch under `metrics: all`."""
    correction = ours(batch, mapping | {"metrics": "all"})
    return finalize(partials(correction), correction.config)


def keep_away(batch: Rows, mapping: dict, proximal: list[Tensor] | None = None) -> None:
    """Skip a batch of which rounding could take a decision either way."""
    weight = mapping.get("weight")
    compared = batch.batch if proximal is None else replace(batch.batch, proximal=proximal)
    known = {"weight": weight and {"bound": "truncate", "level": "token"} | weight, "reject": mapping.get("reject", [])}
    assume(oracle.decision_margin(compared.samples, known) > DECISION)


def assert_same_weights(batch: Rows, correction: Correction, weights: Tensor, mask: Tensor) -> None:
    """Masks exactly; what the loss of each token is multiplied by, to our rounding.

    Args:
        weights, mask: theirs, `[N, L]`; a weight counts where their mask holds.
    """
    keep = batch.padded(correction.keep).bool()
    assert torch.equal(keep, mask.bool() & batch.mask.bool()), f"ours {keep}, theirs {mask}"
    applied = torch.where(keep, batch.padded(correction.weights), 0)
    assert_all_close(applied, torch.where(keep, weights.double(), 0), batch.rtol, "weight")


def assert_same_metrics(
    batch: Rows,
    found: Mapping[str, float],
    theirs: Mapping[str, float],
    table: Mapping[str, Metric],
    floor: float = 0.0,
) -> None:
    """Each of theirs against ours, to our rounding of the batch's largest number.

    Args:
        floor: what they add to the number that they divide a mean by; a variance is off by twice that share.
    """
    tokens = torch.cat([x.abs() for x in batch.batch.proximal + batch.batch.behavior])
    size, total, count = tokens.max().item(), max(spread(s) for s in batch.batch.samples), tokens.numel() // 2
    for name, metric in table.items():
        if name in theirs:
            value = metric(found) if callable(metric) else found[metric]
            scale = max(abs(theirs[name]), *(abs(x) for x in extremes(name, theirs)))
            atol = metric_atol(total, size, count, scale)
            if name.endswith("std"):
                atol = math.sqrt(atol**2 + 2 * floor * scale**2)
            assert_close(value, theirs[name], 0.0, atol, name)


def extremes(name: str, theirs: Mapping[str, float]) -> list[float]:
    """A deviation is as uncertain as the largest number that it is of."""
    stem = name.removesuffix("std")
    return [theirs[stem + x] for x in ("max", "min") if name.endswith("std") and stem + x in theirs] or [0.0]


def clear_of(batch: Rows, bounds: list[float]) -> None:
    """Skip a batch of which a ratio of any level is at one of the bounds that metrics alone compare it with."""
    mask, count = batch.mask, batch.mask.sum(-1).clamp(min=1)
    total = (batch.log_ratio * mask).sum(-1)
    logs = [batch.log_ratio[mask.bool()], total, total / count]
    logs.append(((batch.log_ratio.exp() * mask).sum(-1) / count).log())
    gaps = [(x - math.log(bound)).abs().min() for x in logs for bound in bounds]
    assume(all(gap > DECISION for gap in gaps))


def assert_all_close(found: Tensor, expected: Tensor, rtol: float, what: str, atol: float = 0.0) -> None:
    for i, (a, b) in enumerate(zip(found.flatten().tolist(), expected.flatten().tolist(), strict=True)):
        assert_close(a, b, rtol, atol, f"{what} {i}")


def surrogate_loss(
    batch: Rows, target: Tensor, old: Tensor, correction: Correction, objective: dict, clip: Clip
) -> Tensor:
    """Our corrected loss of every token, `[N, L]`, with gradient to `target` `[N, L]`, in float64."""
    factor = torch.where(correction.keep, correction.weights, 0)
    config, flat = ObjectiveConfig(**objective), batch.flat
    term = policy_term(flat(target), flat(old), flat(batch.token_advantages), factor, batch.ragged, config, clip)
    return batch.padded(term.loss)

"""What other configs would have done to the same data: kept shares, weights, bias by length and sign, direction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config import reading, writing
from mis_plugins.config.loading import file_of
from mis_plugins.config.loading import load as load_file
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.correction.ratios import exp_clamped
from mis_plugins.errors import ConfigError
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.batches import Batch
from mis_plugins.report.numbers import with_own_mean
from mis_plugins.report.places import PLACES, doubling

LENGTHS, SIGNS = (len(PLACES[name].labels) for name in ("length", "advantage"))
# Weights are counted by their logarithm, in steps of 1%.
STEP, HALF = 0.01, 2000
USUAL = 0.05  # least share of the tokens with which a bucket of lengths can show a bias
SEQUENCES = 32  # least number of responses with which products of ratios are read
LEAST_ESS = 0.25  # least effective share of the responses with which products of ratios are read
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
NAMES_OF_ALL = ("all", "own")


@dataclass(frozen=True)
class Candidate:
    """A config under the name that a person gave it."""

    name: str
    config: CorrectionConfig


@dataclass(frozen=True)
class Direction:
    """Products of A (1 - p) and v A (1 - p), the coefficients that unbounded weights v give the scores of tokens.

    A is the advantage, and p the trainer's probability: the score of a token, grad log pi, has a size of about 1 - p.

    both, squares: A (1 - p) times v A (1 - p), and times itself.
    wanted: sum of the squares of v A (1 - p).
    """

    both: Float[Tensor, " T"]
    squares: Float[Tensor, " T"]
    wanted: float

    @classmethod
    def of(cls, plain: Float[Tensor, " T"], weights: Float[Tensor, " T"]) -> Direction:
        wanted = plain * weights
        return cls(plain * wanted, plain * plain, float(wanted @ wanted))


def _plain(batch: Batch) -> Float[Tensor, " T"] | None:
    if batch.advantages is None:
        return None
    plain = _finite(batch.advantages) * (1 - _finite(batch.proximal).exp())
    return plain.double()


def _finite(x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """0 where a number is NaN or infinite; `nan_to_num` makes an infinite one 3.4e38, which outweighs all others."""
    return torch.where(x.isfinite(), x, 0)


def _products(ragged: Ragged, ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"] | None:
    """Ratio of each token's whole response, 0 where its own is unknown; None where few responses bear the sum."""
    usable = ratio > 0
    total, tokens = ragged.sums(torch.where(usable, ratio, 1).log(), usable)
    products = exp_clamped(total)[tokens > 0]
    if products.numel() < SEQUENCES or _ess(products) < LEAST_ESS:
        return None
    return ragged.to_tokens(exp_clamped(total)) * usable


def _ess(weights: Float[Tensor, " N"]) -> float:
    return float(weights.sum() ** 2 / (weights.numel() * weights.square().sum()))


@dataclass(frozen=True)
class Shared:
    """What every candidate reads of a batch, computed once.

    valid: valid tokens of each sequence.
    lengths: bucket of each sequence's length.
    by_length, by_sign: valid tokens in each bucket.
    signs: which valid tokens lie in each bucket of signs; empty without advantages.
    by_token, by_response: directions of unbounded weights of tokens, and of whole responses where those can be known.
    """

    batch: Batch
    valid: Float[Tensor, " N"]
    lengths: Int[Tensor, " N"]
    by_length: Float[Tensor, " L"]
    signs: tuple[Bool[Tensor, " T"], ...]
    by_sign: Float[Tensor, " S"]
    by_token: Direction | None
    by_response: Direction | None

    @classmethod
    def of(cls, batch: Batch, ratio: Float[Tensor, " T"]) -> Shared:
        mask, bucket = batch.ragged.loss_mask, PLACES["advantage"].bucket(batch)
        (valid,) = batch.ragged.sums(mask)
        lengths = doubling(batch.ragged.cu_seqlens.diff())
        by_length = torch.bincount(lengths, valid, LENGTHS)
        signs = () if bucket is None else tuple(mask & (bucket == sign) for sign in range(SIGNS))
        shared = cls(batch, valid, lengths, by_length, signs, _counts(signs), None, None)
        plain, products = _plain(batch), _products(batch.ragged, ratio)
        if plain is None:
            return shared
        by_response = None if products is None else Direction.of(plain, products)
        return replace(shared, by_token=Direction.of(plain, ratio.double()), by_response=by_response)


def _counts(masks: Sequence[Bool[Tensor, " T"]]) -> Float[Tensor, " S"]:
    counts = [mask.count_nonzero() for mask in masks]
    return torch.stack(counts).double() if counts else torch.zeros(SIGNS, dtype=torch.float64)


@dataclass
class Outcome:
    """Sums of one candidate over the data.

    by_length, by_sign: valid tokens, and among them kept ones, in each bucket.
    histogram: kept tokens by the logarithm of their weight.
    """

    candidate: Candidate
    sums: dict[str, float] = field(default_factory=dict)
    by_length: Float[Tensor, "2 L"] = field(
        default_factory=lambda: torch.zeros(2, LENGTHS, dtype=torch.float64)
    )
    by_sign: Float[Tensor, "2 S"] = field(default_factory=lambda: torch.zeros(2, SIGNS, dtype=torch.float64))
    histogram: Float[Tensor, " B"] = field(
        default_factory=lambda: torch.zeros(2 * HALF + 1, dtype=torch.float64)
    )

    @cached_property
    def config(self) -> CorrectionConfig:
        return with_own_mean(replace(self.candidate.config, metrics="none", segment_wise=None))

    def add(self, shared: Shared) -> None:
        batch = shared.batch
        correction = correct(batch.proximal, batch.behavior, batch.ragged, self.config)
        keep = correction.keep & correction.stage.usable
        weights = torch.where(keep, correction.weights, 0)
        (kept,) = batch.ragged.sums(keep)
        mean = 1.0 if correction.mean_weight is None else correction.mean_weight
        wide = weights.double()
        self._plus(
            valid=shared.valid.sum(), kept=kept.sum(), weight=wide.sum(), weight_squared=wide @ wide,
            sequences=(shared.valid > 0).sum(), kept_sequences=(kept > 0).sum(), batches=1, factor=mean,
        )  # fmt: skip
        kept_by_sign = _counts([keep & sign for sign in shared.signs])
        self.by_length += torch.stack([shared.by_length, torch.bincount(shared.lengths, kept, LENGTHS)])
        self.by_sign += torch.stack([shared.by_sign, kept_by_sign])
        self._add_weights(weights, float(kept.sum()))
        if shared.by_token is not None:
            self._add_direction(wide, shared.by_token)
        if shared.by_response is not None:
            self._plus(response_cosine=_cosine(wide, shared.by_response), with_responses=1)

    def _add_weights(self, weights: Float[Tensor, " T"], kept: float) -> None:
        """Count the weights of kept tokens; others weigh 0, and are taken out of the first bucket again."""
        if self.config.weight is None:
            self.histogram[HALF] += kept
            return
        steps = weights.clamp(min=1e-30).log_().mul_(1 / STEP).round_().clamp_(-HALF, HALF).add_(HALF)
        self.histogram += torch.bincount(steps.short(), minlength=2 * HALF + 1)
        self.histogram[0] -= weights.numel() - kept

    def _add_direction(self, weights: Float[Tensor, " T"], direction: Direction) -> None:
        given = weights.square() @ direction.squares
        self._plus(dot=weights @ direction.both, given=given, wanted=direction.wanted)

    def _plus(self, **added: Any) -> None:
        for name, value in added.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def numbers(self) -> dict[str, Any]:
        """Numbers for the report; those that docs/metrics.md knows have its names."""
        s = self.sums
        valid = max(s.get("valid", 0.0), 1.0)
        found: dict[str, Any] = {
            "kept_fraction": s["kept"] / valid,
            "kept_sequences": s["kept_sequences"] / max(s["sequences"], 1.0),
            "applied_mean": s["weight"] / max(s["kept"], 1.0),
            "applied_valid_mean": s["weight"] / valid,
            "ess": s["weight"] ** 2 / (valid * s["weight_squared"]) if s["weight_squared"] else 0.0,
            "normalization_factor": s["factor"] / s["batches"],
        }
        found |= {f"weight_p{percent:g}": value for percent, value in self._quantiles()}
        found["kept_by_length"] = _shares("length", self.by_length)
        found["kept_by_usual_length"] = _shares(
            "length", self.by_length * (self.by_length[0] >= USUAL * valid)
        )
        found["kept_by_advantage"] = _shares("advantage", self.by_sign)
        if s.get("given") and s.get("wanted"):
            found["coefficient_cosine"] = s["dot"] / math.sqrt(s["given"] * s["wanted"])
        if s.get("with_responses"):
            found["response_cosine"] = s["response_cosine"] / s["with_responses"]
        return found

    def _quantiles(self) -> list[tuple[float, float]]:
        cumulative = self.histogram.cumsum(0)
        if not cumulative[-1]:
            return []
        ranks = torch.tensor(QUANTILES, dtype=torch.float64) * cumulative[-1]
        places = torch.searchsorted(cumulative, ranks.clamp(min=1)).tolist()
        return [
            (100 * q, math.exp((place - HALF) * STEP)) for q, place in zip(QUANTILES, places, strict=True)
        ]


@dataclass
class Sweep:
    """The outcomes of all candidates, in one pass over the data."""

    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Sweep:
        return cls(tuple(map(Outcome, candidates)))

    def add(self, batch: Batch, ratio: Float[Tensor, " T"]) -> None:
        if not self.outcomes:
            return
        shared = Shared.of(batch, ratio)
        for outcome in self.outcomes:
            outcome.add(shared)

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Numbers of each candidate by its name."""
        return {outcome.candidate.name: outcome.numbers() for outcome in self.outcomes if outcome.sums}


def candidates(asked: str, own: Candidate | None) -> list[Candidate]:
    """The configs that `--sweep` names: `all` presets, `own` ones of this pack, names, or a grid `KEY=V1,V2;KEY=...`.

    Presets that need what a dump does not hold (the target policy, versions, routes) are left out; equal configs count
    once.

    Raises:
        ConfigError: a name or a key is unknown, or a value of the grid cannot work.
    """
    if "=" in asked:
        found = _grid(asked, own)
    else:
        presets = reading.presets()
        ours_first = sorted(presets, key=lambda name: presets[name].parent.name == "peers")
        names = ours_first if asked == "all" else asked.split(",")
        if asked == "own":
            names = [name for name, path in presets.items() if path.parent.name != "peers"]
        if asked in NAMES_OF_ALL:
            names = [name for name in names if judged(load_file(file_of(name)))]
        found = [Candidate(name, load(name)) for name in names]
    none = Candidate("none", CorrectionConfig())
    return _distinct([none, *([own] if own else []), *found])


def load(target: str) -> CorrectionConfig:
    """The config of a preset or of a file.

    Raises:
        ConfigError: it cannot work, or reads what no dump holds.
    """
    return _told(target, load_file(file_of(target)))


def _told(name: str, config: CorrectionConfig) -> CorrectionConfig:
    """The config, refused where it reads a statistic that no dump holds."""
    if config.reads_routes:
        raise ConfigError(
            f"{name}: statistic: route reads what the trainer's routers did, which no dump holds; leave the rule out"
        )
    return config


def judged(config: CorrectionConfig) -> bool:
    """Whether a config corrects, and a dump holds everything that it reads."""
    return config.corrects and not (config.needs_loss_hook or config.reads_routes)


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    kept: dict[CorrectionConfig, Candidate] = {}
    for candidate in found:
        kept.setdefault(replace(with_own_mean(candidate.config), metrics="none"), candidate)
    return list(kept.values())


def _grid(asked: str, own: Candidate | None) -> list[Candidate]:
    """Every combination of the values of a grid, on the run's own config, or on a truncated token weight."""
    axes = [axis.partition("=") for axis in asked.split(";")]
    base = writing.as_mapping(
        own.config if own else CorrectionConfig(reading.from_mapping({"weight": {}}).weight)
    )
    found = []
    for values in itertools.product(*(values.split(",") for _, _, values in axes)):
        named = [(key.strip(), value) for (key, _, _), value in zip(axes, values, strict=True)]
        mapping: Mapping[str, Any] = base
        for key, value in named:
            mapping = _with(mapping, key.removeprefix("mis.").split("."), value)
        name = " ".join(f"{key}={value}" for key, value in named)
        found.append(Candidate(name, _told(name, reading.from_mapping(mapping))))
    return found


def _with(mapping: Mapping[str, Any], path: Sequence[str], value: str) -> dict[str, Any]:
    head, *rest = path
    inner = mapping.get(head)
    if rest and inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"mis.{'.'.join(path)}: --sweep sets keys of mappings, and {head} is none")
    return {**mapping, head: _with(inner or {}, rest, value) if rest else value}


def _cosine(weights: Float[Tensor, " T"], direction: Direction) -> float:
    size = float(weights.square() @ direction.squares) * direction.wanted
    return float(weights @ direction.both) / math.sqrt(size) if size else 0.0


def _shares(place: str, both: Float[Tensor, "2 K"]) -> dict[str, float]:
    columns = zip(PLACES[place].labels, both.T.tolist(), strict=True)
    return {label: kept / valid for label, (valid, kept) in columns if valid}

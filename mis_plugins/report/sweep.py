"""What other configs would have done to these tokens: kept shares, weights, bias by length and sign, direction."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.loading import file_of, is_of_peer, presets
from mis_plugins.config.loading import load as load_file
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.correction.ratios import exp_clamped
from mis_plugins.errors import ConfigError
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.places import PLACES
from mis_plugins.report.record import Batch

USUAL = 0.05  # least share of the tokens with which a bucket of lengths can show a bias
SEQUENCES = 32  # least number of responses with which products of ratios are read
LEAST_ESS = 0.25  # least effective share of the responses with which products of ratios are read
PARTS = 16  # of the responses, each of which is left out in turn for the interval of a cosine


def with_own_mean(config: CorrectionConfig) -> CorrectionConfig:
    """The config with normalization over the batch at hand, whatever scope it names."""
    weight = config.weight
    if weight is None or weight.normalize is None:
        return config
    return replace(config, weight=replace(weight, normalize=replace(weight.normalize, scope="micro_batch")))


def essence(config: CorrectionConfig) -> CorrectionConfig:
    """What a config does to the tokens of a batch, by which configs are equal."""
    return replace(with_own_mean(config), metrics="none")


@dataclass(frozen=True)
class Candidate:
    """A config under the name that a person gave it."""

    name: str
    config: CorrectionConfig


def _plain(batch: Batch) -> Float[Tensor, " T"] | None:
    """A (1 - p) of each token, of advantage A and the trainer's probability p; None without advantages.

    The score of a token, grad log pi, has a size of about 1 - p.
    """
    if batch.advantages is None:
        return None
    advantages, log_probs = (torch.where(x.isfinite(), x, 0) for x in (batch.advantages, batch.proximal))
    return (advantages * (1 - log_probs.exp())).double()


def _products(ragged: Ragged, ratio: Float[Tensor, " T"]) -> Float[Tensor, " N"]:
    """The product of the ratios of each response, over its tokens of a known ratio; 0 of none."""
    usable = ratio > 0
    total, tokens = ragged.sums(torch.where(usable, ratio, 1).log(), usable)
    return exp_clamped(total) * (tokens > 0)


@dataclass(frozen=True)
class Shared:
    """What every candidate reads of a batch, computed once.

    valid: valid tokens of each sequence.
    buckets: of the length and of the advantage's sign, where it is known, the bucket of each token, from 1 on.
    plain: as of `_plain`; the cosines are of `weight * plain` and of `wanted`, by the cosine's name.
    products: as of `_products`.
    wanted: `plain` times unbounded weights of tokens, or of whole responses.
    """

    batch: Batch
    valid: Float[Tensor, " N"]
    buckets: Mapping[str, Int[Tensor, " T"]]
    plain: Float[Tensor, " T"] | None
    products: Float[Tensor, " N"]
    wanted: Mapping[str, Float[Tensor, " T"]]

    @classmethod
    def of(cls, batch: Batch, ratio: Float[Tensor, " T"]) -> "Shared":
        (valid,) = batch.ragged.sums(batch.ragged.loss_mask)
        buckets = {name: PLACES[name].bucket(batch) for name in ("length", "advantage")}
        buckets = {name: bucket + 1 for name, bucket in buckets.items() if bucket is not None}
        plain, products = _plain(batch), _products(batch.ragged, ratio)
        of_response = batch.ragged.to_tokens(products) * (ratio > 0)
        weights = {"coefficient_cosine": ratio, "response_cosine": of_response}
        wanted = {name: plain * w for name, w in weights.items() if plain is not None}
        return cls(batch, valid, buckets, plain, products, wanted)

    @cached_property
    def all_valid(self) -> dict[str, Float[Tensor, " K"]]:
        return self.counts(self.batch.ragged.loss_mask)

    def counts(self, tokens: Bool[Tensor, " T"]) -> dict[str, Float[Tensor, " K"]]:
        """Number of some tokens in each of the `buckets`."""
        sizes = {name: len(PLACES[name].labels) + 1 for name in self.buckets}
        return {name: torch.bincount(x * tokens, tokens.double(), sizes[name])[1:] for name, x in self.buckets.items()}


@dataclass
class Outcome:
    """Sums of one candidate over the data.

    shares: by length and by advantage the valid tokens, and among them kept ones, in each bucket.
    parts: for each cosine its three sums over every `PARTS`-th response.
    """

    candidate: Candidate
    sums: Counter[str] = field(default_factory=Counter)
    shares: dict[str, Float[Tensor, "2 K"]] = field(default_factory=dict)
    parts: dict[str, Float[Tensor, "3 P"]] = field(default_factory=dict)

    @cached_property
    def config(self) -> CorrectionConfig:
        return with_own_mean(replace(self.candidate.config, metrics="none", segment_wise=None))

    def add(self, shared: Shared) -> None:
        batch = shared.batch
        correction = correct(batch.proximal, batch.behavior, batch.ragged, self.config)
        keep = correction.keep & correction.stage.usable
        weights = torch.where(keep, correction.weights, 0)
        (kept,) = batch.ragged.sums(keep)
        wide = weights.double()
        added = {
            "valid": shared.valid.sum(), "kept": kept.sum(), "weight": wide.sum(), "weight_squared": wide @ wide,
            "sequences": (shared.valid > 0).sum(), "kept_sequences": (kept > 0).sum(), "read": batch.ragged.size,
            "products": shared.products.sum(), "products_squared": shared.products.square().sum(),
            "known": (shared.products > 0).sum(),
        }  # fmt: skip
        part = (torch.arange(batch.ragged.size) + int(self.sums["read"])) % PARTS
        self.sums.update({name: float(value) for name, value in added.items()})
        for name, counts in shared.counts(keep).items():
            self.shares[name] = self.shares.get(name, 0) + torch.stack([shared.all_valid[name], counts])
        turned = wide if shared.plain is None else wide * shared.plain
        for name, wanted in shared.wanted.items():
            rows = batch.ragged.sums(turned * wanted, turned.square(), wanted.square())
            held = self.parts.setdefault(name, torch.zeros(3, PARTS, dtype=torch.float64))
            held.index_add_(1, part, torch.stack(rows))

    def numbers(self) -> dict[str, Any]:
        """Numbers for the report, by the names of docs/metrics.md where it has them."""
        s = self.sums
        valid = max(s["valid"], 1.0)
        lengths = self.shares["length"]
        numbers: dict[str, Any] = {
            "kept_fraction": s["kept"] / valid,
            "kept_sequences": s["kept_sequences"] / max(s["sequences"], 1.0),
            "applied_mean": s["weight"] / max(s["kept"], 1.0),
            "ess": s["weight"] ** 2 / (valid * s["weight_squared"]) if s["weight_squared"] else 0.0,
            "kept_by_length": _shares("length", lengths),
            "kept_by_usual_length": _shares("length", lengths * (lengths[0] >= USUAL * valid)),
            "kept_by_advantage": _shares("advantage", self.shares.get("advantage")),
        }
        borne = s["known"] >= SEQUENCES and s["products"] ** 2 >= LEAST_ESS * s["known"] * s["products_squared"]
        for name, parts in self.parts.items():
            if name == "response_cosine" and not borne:
                continue
            dot, given, wanted = parts.sum(1).tolist()
            if given and wanted:
                left = parts.sum(1, keepdim=True) - parts
                numbers[name] = dot / math.sqrt(given * wanted)
                numbers[f"{name}_without"] = (left[0] / (left[1] * left[2]).clamp(min=1e-300).sqrt()).tolist()
        return numbers


def candidates(asked: str, own: Candidate | None) -> list[Candidate]:
    """The configs that `--sweep` names: `all` presets, `own` ones of this pack, or presets and files.

    Presets that need what a dump does not hold (the target policy, versions, routes) are left out; equal configs count
    once. Raises ConfigError where a name is unknown, or the config cannot work.
    """
    if "=" in asked:
        gone = "there are no grids any more: write each config to a file, and name the files with commas between them"
        raise ConfigError(f"--sweep: got {asked}; {gone}")
    names = asked.split(",")
    if asked in ("all", "own"):
        files = presets()
        names = sorted(files, key=lambda name: is_of_peer(name, files[name]))
        names = [name for name in names if asked == "all" or not is_of_peer(name, files[name])]
        names = [name for name in names if judged(load_file(file_of(name)))]
    first = [Candidate("none", CorrectionConfig()), *([own] if own else [])]
    kept: dict[CorrectionConfig, Candidate] = {}
    for candidate in (*first, *(Candidate(name, load(name)) for name in names)):
        kept.setdefault(essence(candidate.config), candidate)
    return list(kept.values())


def load(target: str) -> CorrectionConfig:
    """The config of a preset or a file; raises ConfigError where it cannot work, or reads what no dump holds."""
    config = load_file(file_of(target))
    if beyond := _beyond_dumps(config):
        raise ConfigError(f"{target}: {beyond}")
    return config


def judged(config: CorrectionConfig) -> bool:
    """Whether a config corrects, and a dump holds everything that it reads."""
    return config.corrects and not (config.needs_loss_hook or _beyond_dumps(config))


def _beyond_dumps(config: CorrectionConfig) -> str:
    """What a config reads that no dump holds, in words; empty of any other config."""
    if config.reads_routes:
        return "statistic: route reads what the trainer's routers did, which no dump holds; leave the rule out"
    if config.m2_threshold is not None:
        return (
            "m2_threshold compares the tokens of a micro-batch, and no dump says how micro-batches were cut; leave "
            "m2_threshold out"
        )
    return ""


def _shares(place: str, both: Float[Tensor, "2 K"] | None) -> dict[str, float]:
    """Kept share of each bucket that holds valid tokens."""
    columns = zip(PLACES[place].labels, [] if both is None else both.T.tolist(), strict=both is not None)
    return {label: kept / valid for label, (valid, kept) in columns if valid}

"""How bad the mismatch is and what the correction did about it, read from a finished `Correction`.

There are three kinds of metric. A metric per token or per sequence becomes a mean over tokens or sequences when a host
averages it over the loss mask. A metric per micro-batch (`_mb`) has one value on every token, exact over
context-parallel ranks; a host averages it over micro-batches, weighted by their tokens or samples.

A name that Miles's `mis.py` has means what it means there. A host divides by fully masked samples too, which lowers
metrics of these names. All other metrics are scaled back, by what is known within a micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.terms.divergence import k1, k3
from mis_plugins.correction.pipeline import Correction, kept_below
from mis_plugins.correction.ratios import saturated
from mis_plugins.packing.ragged import as_bytes

Value = Callable[[Correction], Tensor]
Kind = Literal["token", "sequence", "micro_batch"]
Side = Literal["min", "max"]
Average = Literal["sequences", "tokens"] | Tensor  # a 0-d tensor: the share of the step that trains
OF_MIS_PY = frozenset(
    """training_log_ppl training_ppl rollout_log_ppl rollout_ppl kl k3_kl log_ppl_diff log_ppl_abs_diff ppl_ratio
    chi2_token chi2_seq tis_weight_before_bound tis_weight_after_bound tis_truncate_fraction tis_clip_fraction_low
    tis_clip_fraction_high tis_mask_fraction_low tis_mask_fraction_high rs_mask_fraction_low rs_mask_fraction_high
    rs_catastrophic_token_fraction rs_catastrophic_seq_fraction batch_norm_factor is_ratio_mean_after_tis_rs
    is_ratio_mean_final is_ratio_min_final is_ratio_max_final""".split()
)
"""Names of Miles's `mis.py`, with the meaning that they have there: a fully masked sample counts as 0."""


class Metric(NamedTuple):
    """A metric as a function of the Correction, and whether a token, a sequence or a micro-batch has one value."""

    of: Kind
    value: Value


Catalogue = dict[str, Metric]


def of(kind: Kind, **values: Value) -> Catalogue:
    """The metrics of which a token, a sequence or a micro-batch has one value, by name."""
    return {name: Metric(kind, value) for name, value in values.items()}


class TokenMetrics(Mapping[str, Tensor]):
    """Every metric as the host wants it: a local `[T]` tensor, made when it is read.

    A host reads one metric, reduces it and drops it, so that the twenty-odd tensors of a batch never exist together.
    Metrics per sequence are computed together when the first of them is read; so are metrics per micro-batch.
    """

    def __init__(self, correction: Correction, catalogue: Catalogue, prefix: str, average: Average | None = None):
        self._correction, self._catalogue, self._prefix = correction, catalogue, prefix
        self._average: Average | None = average

    @cached_property
    def _by_sequence(self) -> dict[str, Float[Tensor, " N"]]:
        names = [name for name, metric in self._catalogue.items() if metric.of == "sequence"]
        return dict(zip(names, self._stacked(names).float().unbind(), strict=True))

    @cached_property
    def _by_micro_batch(self) -> dict[str, Float[Tensor, " T"]]:
        names = [name for name, metric in self._catalogue.items() if metric.of == "micro_batch"]
        tokens = self._correction.ragged.loss_mask.numel()
        of_mis_py = {name: self._value(name).float().expand(tokens) for name in names if name in OF_MIS_PY}
        ours = [name for name in names if name not in OF_MIS_PY]
        values = self._stacked(ours) if self._share is None else self._stacked(ours) / self._share
        at_tokens = values.float().unsqueeze(1).expand(-1, tokens).unbind()  # not one operator each
        return of_mis_py | dict(zip(ours, at_tokens, strict=True))

    @cached_property
    def _share(self) -> Float[Tensor, ""] | None:
        return _live_share(self._correction, self._average)

    def _value(self, name: str) -> Tensor:
        return self._catalogue[name].value(self._correction)

    def _stacked(self, names: Iterable[str]) -> Float[Tensor, "K ..."]:
        return torch.stack([self._value(name) for name in names])

    def __getitem__(self, key: str) -> Float[Tensor, " T"]:
        if not key.startswith(self._prefix):
            raise KeyError(key)
        name = key.removeprefix(self._prefix)
        kind = self._catalogue[name].of
        if kind == "micro_batch":
            return self._by_micro_batch[name]
        if kind == "token":
            value = self._value(name)
        else:
            value = self._correction.ragged.to_tokens(self._by_sequence[name])
        share = None if name in OF_MIS_PY else self._share
        return (value if share is None else value / share).float()

    def __iter__(self) -> Iterator[str]:
        return (self._prefix + name for name in self._catalogue)

    def __len__(self) -> int:
        return len(self._catalogue)


def scaled_back(value: Float[Tensor, " T"], correction: Correction, average: Average | None) -> Float[Tensor, " T"]:
    """A metric of a token, scaled so that fully masked samples of the micro-batch do not lower the host's mean."""
    share = _live_share(correction, average)
    return value if share is None else value / share


def _live_share(c: Correction, average: Average | None) -> Float[Tensor, ""] | None:
    """What the host adds up over what it divides by, in this step where that is known: fully masked samples add 0."""
    if average is None or isinstance(average, Tensor):
        return average
    if average == "sequences":
        return c.sequence_count / c.ragged.size
    valid = c.valid_count.sum().clamp(min=1)
    return (valid / (valid - c.sequence_count + c.ragged.size)).float()


def diagnose(correction: Correction, prefix: str = "mis_", average: Average | None = None) -> TokenMetrics:
    """The metrics that `config.metrics` asks for. Their names depend on the config alone.

    Args:
        average: what the host takes the mean over. A host counts fully masked samples as 0; metrics that Miles's
            `mis.py` lacks are scaled to undo that, by a share of the step or else of this micro-batch. None leaves
            every metric unscaled.
    """
    return TokenMetrics(correction, catalogue(correction.config), prefix, average)


@cache
def catalogue(config: CorrectionConfig) -> Catalogue:
    """The metrics that a config has."""
    if config.metrics == "none":
        return {}
    of_correction = OF_CORRECTION if config.corrects else {}
    if config.metrics == "watch":
        return WATCH | of_correction
    normalizes = config.weight is not None and config.weight.normalize is not None
    normalization = of("micro_batch", batch_norm_factor=_mean_weight) if normalizes else {}
    if config.metrics == "core":
        return CORE | of_correction | normalization
    from mis_plugins.metrics.full import metrics_of

    return CORE | of_correction | normalization | metrics_of(config)


def _mean_weight(c: Correction) -> Float[Tensor, ""]:
    assert c.mean_weight is not None
    return c.mean_weight


def end_of(values: Float[Tensor, " N"], side: Side) -> Float[Tensor, ""]:
    """Smallest or largest value over sequences; 0 where no sequence has one."""
    if not values.numel():
        return values.sum()
    return (values.amin() if side == "min" else values.amax()).nan_to_num(posinf=0.0, neginf=0.0)


def effective_sample_size(c: Correction) -> Float[Tensor, ""]:
    """Effective sample size of the weights as multiplied into the loss, as a share of the n valid tokens. (Kish)

    ESS / n = (sum w)^2 / (n sum w^2), with w = 0 where a token is dropped.
    """
    kept = kept_below(c.totals)
    total, squares = (c.totals.get(name, kept) for name in ("kept_weight", "kept_weight_squared"))
    if c.sequence_weight is not None:
        total, squares = c.sequence_weight * total, c.sequence_weight.square() * squares
    if c.keep_sequences is not None:
        total, squares = (torch.where(c.keep_sequences, x, 0) for x in (total, squares))
    return total.sum() ** 2 / (c.totals["valid"].sum() * squares.sum()).clamp(min=torch.finfo(torch.float64).tiny)


KL = of("token", kl=lambda c: k1(c.log_ratio), k3_kl=lambda c: k3(c.log_ratio))
SATURATED = of("token", saturated_fraction=lambda c: saturated(c.log_ratio))
# Of the ratios before any bound, their log clamped; 0 where no token is usable.
RATIO_MAX = of("micro_batch", ratio_max_mb=lambda c: end_of(c.totals["ratio_max"], "max"))
NONFINITE = of(
    "micro_batch",
    nonfinite_train_mb=lambda c: c.totals["nonfinite_train"].sum(),
    nonfinite_rollout_mb=lambda c: c.totals["nonfinite_rollout"].sum(),
)
OF_CORRECTION = of("token", kept_fraction=lambda c: as_bytes(c.keep)) | of("micro_batch", ess_mb=effective_sample_size)
PPL_RATIO = of("sequence", ppl_ratio=lambda c: c.means.perplexities[2])
WATCH = {"k3_kl": KL["k3_kl"]} | SATURATED | PPL_RATIO
CORE = KL | RATIO_MAX | NONFINITE

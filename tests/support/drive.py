"""Runs a loadable function as a host does, and compares what it returned with the oracle."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import oracle
import torch
from batches import Batch, host_args
from tolerances import metric_atol, normalized_rtol
from torch import Tensor

from mis_plugins import mis
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks


@dataclass(frozen=True)
class Outcome:
    """What the host gets, split by sequence again.

    weights: what the loss was multiplied by, as its gradient tells; 0 for a token that was dropped.
    """

    loss: Tensor
    weights: list[Tensor]
    masks: list[Tensor]
    metrics: dict[str, list[Tensor]]


def one_rank() -> SimpleNamespace:
    """Miles's `parallel_state` of a single process."""
    alone = SimpleNamespace(rank=0, size=1, group=None)
    return SimpleNamespace(cp=alone, tp=alone, pp=alone, effective_dp=alone, effective_dp_cp=alone, is_ulysses_cp=False)


def sum_of_sample_mean(x: Tensor, masks: Sequence[Tensor], per_token: bool = False) -> Tensor:
    """The hosts' sum over sequences of the mean over the mask, or over tokens. It multiplies: a NaN survives a 0."""
    rows = zip(x.split([len(mask) for mask in masks]), masks, strict=True)
    return torch.stack([(row * m).sum() / (1 if per_token else m.sum().clamp(min=1)) for row, m in rows]).sum()


def call(
    batch: Batch, config: dict | None = None, **settings: object
) -> tuple[Tensor, Tensor, Sequence[Tensor], Mapping[str, Tensor]]:
    """(loss in, loss out, masks, metrics) of the Megatron hook on one rank; nested `config` or flat `settings`."""
    nested = {} if config is None else {"mis": config}
    kwargs = batch.hook_kwargs()
    loss, masks, metrics = mis.compute_mis_weights_with_cp(
        host_args(**nested, **settings), **kwargs, parallel_state=one_rank(), max_seq_lens=None
    )
    return kwargs["pg_loss"], loss, masks, metrics


def run(batch: Batch, config: dict | None = None, **settings: object) -> Outcome:
    loss_in, loss, masks, metrics = call(batch, config, **settings)
    (weights,) = torch.autograd.grad(loss.sum(), loss_in)
    lengths = batch.response_lengths
    split = {name: list(value.split(lengths)) for name, value in metrics.items()}
    return Outcome(loss, list(weights.split(lengths)), list(masks), split)


def corrected(batch: Batch, config: dict | CorrectionConfig, routes: Tensor | None = None) -> Correction:
    """The correction of a batch on one rank, without a host."""
    parsed = from_mapping(config) if isinstance(config, dict) else config
    ragged = whole(batch.response_lengths).place(batch.flat_mask, Ranks())
    return correct(*batch.joined(), ragged, parsed, routes=routes)


def assert_matches_oracle(
    outcome: Outcome,
    batch: Batch,
    expected: oracle.Corrected,
    full: bool = True,
    per_token: bool = False,
    counted: Sequence[oracle.Sample] | None = None,
) -> None:
    """Masks exactly, weights and (under `metrics: full`) every metric that the oracle knows to float32 rounding.

    Args:
        full: whether there are metrics to compare.
        per_token: whether the host averages over tokens.
        counted: the samples of the whole step, over all ranks, where a rollout-data hook has counted them.
    """
    samples = batch.samples
    rtol = normalized_rtol(max(spread(s) for s in samples))
    for i, sample in enumerate(samples):
        assert outcome.masks[i].bool().tolist() == expected.keep[i], f"mask of sequence {i}"
        for t in sample.valid:
            applied = expected.weights[i][t] * expected.scale[i] if expected.keep[i][t] else 0.0
            assert_close(outcome.weights[i][t].item(), applied, rtol, 0.0, f"weight {i}:{t}")
    if full:
        assert_metrics_match(outcome.metrics, batch, expected, per_token, counted)


def assert_metrics_match(
    metrics: dict[str, list[Tensor]],
    batch: Batch,
    expected: oracle.Corrected,
    per_token: bool = False,
    counted: Sequence[oracle.Sample] | None = None,
) -> None:
    """Metrics of tokens and of sequences, and with a correction those of micro-batches.

    The latter are at worst (sum w)^2 / sum w^2: four weights' relative errors.
    """
    scale_of = partial(oracle.host_scale, batch=counted or batch.samples, per_token=per_token)
    config, rtol = expected.config, 4 * normalized_rtol(max(spread(s) for s in batch.samples))
    corrects = config.get("weight") or config.get("reject") or config.get("m2_threshold") is not None
    of_batch = oracle.batch_metrics(batch.samples, config, expected) if corrects else {}
    for name, value in of_batch.items():
        for found in torch.cat(metrics[f"mis_{name}"]).unique().tolist():
            assert_close(found, value * scale_of(name), rtol, 0.0, name)
    for name, rows in expected.metrics.items():
        assert f"mis_{name}" in metrics, name
        scale = scale_of(name)
        for i, sample in enumerate(batch.samples):
            largest = max(
                [abs(x) for t in sample.usable for x in (sample.proximal[t], sample.behavior[t])], default=0.0
            )
            for t in sample.valid:
                value = rows[i][t] * scale
                if not math.isnan(value):
                    atol = metric_atol(spread(sample), largest, len(sample.valid), value)
                    found = metrics[f"mis_{name}"][i][t].item()
                    assert_close(found, value, 0.0, atol, f"{name} {i}:{t}")


def spread(sample: oracle.Sample) -> float:
    """Sum of |log ratio| over usable tokens, which is what float32 rounding of a sequence's ratio grows with."""
    return math.fsum(abs(sample.log_ratios[t]) for t in sample.usable)


def assert_close(actual: float, expected: float, rtol: float, atol: float, what: str) -> None:
    assert abs(actual - expected) <= rtol * abs(expected) + atol, f"{what}: got {actual!r}, expected {expected!r}"


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Shape, dtype and bits: NaN equals NaN, 0.0 differs from -0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(_bytes(first), _bytes(second)))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same_bytes(first: Outcome, second: Outcome) -> None:
    assert same_bytes(first.loss, second.loss), "loss"
    assert_all_same(first.weights, second.weights, "weights")
    assert_all_same(first.masks, second.masks, "masks")
    assert first.metrics.keys() == second.metrics.keys()
    for name in first.metrics:
        assert_all_same(first.metrics[name], second.metrics[name], name)


def assert_all_same(first: Sequence[Tensor], second: Sequence[Tensor], what: str) -> None:
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert same_bytes(a, b), f"{what} of sequence {i}: {a} and {b}"

"""Segment-wise and standard weights of a rollout's tokens, by age, and what of them a run's summary tells."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lab.host.train.batch import pack
from lab.host.train.parallel import ParallelState
from lab.host.train.trainer import RolloutData
from mis_plugins.config.model import CorrectionConfig, SegmentWiseConfig, WeightConfig
from mis_plugins.config.reading import from_args
from mis_plugins.correction.pipeline import correct
from mis_plugins.correction.ratios import finite
from mis_plugins.metrics.quantity import Quantity, largest, mean, mean_square
from mis_plugins.metrics.staleness import by_age, metrics_by_age, weight_metrics, weights_by_age
from mis_plugins.metrics.totals import Partials
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks
from mis_plugins.versions.segment_wise import STORED_FROM, BehaviorWeight, Written, loglinear, proximal_t

OURS = "mis_plugins."


def segment_wise(args: Namespace) -> SegmentWiseConfig | None:
    """Segment-wise weights to measure, and to recompute for where they are on.

    None where no proximal policy is scored, and in bypass. Without settings the default weights are measured,
    whether the loss uses them or not. With `enabled: false` the standard weights are measured.
    """
    if args.use_rollout_logprobs and not args.get_mismatch_metrics:
        return None
    hooks = (args.custom_tis_function_path, args.custom_loss_function_path)
    ours = "mis" in vars(args) or any(path is not None and path.startswith(OURS) for path in hooks)
    config = from_args(args).where_versions_are_known() if ours else CorrectionConfig()
    found = config.segment_wise or SegmentWiseConfig()
    if config.bypass:
        return None
    return found if config.weight is None or config.weighs_by_segment_wise else _bounded(found, config.weight)


def _bounded(config: SegmentWiseConfig, weight: WeightConfig) -> SegmentWiseConfig:
    """The segment-wise config with the bounds of a `weight` that stands beside it."""
    if weight.level != "token" or not weight.record.has_ceiling:
        return replace(config, weight_cap=None, weight_floor=None, mode=SegmentWiseConfig.mode)
    return replace(config, weight_cap=weight.upper, weight_floor=weight.lower, mode=weight.bound)


def measured(state: ParallelState, data: RolloutData, config: SegmentWiseConfig) -> dict[str, float]:
    """`weight_metrics` of a whole rollout before it is trained on, and its errors where they exist. Collective."""
    layout = pack(data["tokens"], data["response_lengths"], state.cp.rank, state.cp.size)
    mask = torch.cat(data["loss_masks"]).bool()[layout.response_index]
    proximal, behavior = torch.cat(data["log_probs"]), torch.cat(data["rollout_log_probs"])
    versions, recomputed = torch.cat(data["output_versions"]), torch.cat(data["recomputed_log_probs"])
    written = Written(versions, recomputed, data["proximal_version"])
    numerator = proximal_t(proximal, behavior, written, config)
    row = whole([mask.numel()]).place(mask, Ranks())  # weights of tokens know no sequences
    bounded = correct(numerator, behavior, row, CorrectionConfig(config.weight, metrics="none"))
    applied = BehaviorWeight(bounded.weights, bounded.keep)
    weights = weights_by_age(numerator, proximal, behavior, written, mask, applied)
    error = loglinear_error_by_age(proximal, behavior, written, mask)
    ranks = [state.effective_dp_cp.group] if state.effective_dp_cp.group is not None else []
    applied_metrics = weight_metrics(weights.over_ranks(ranks), config.enabled)
    return applied_metrics | metrics_by_age(error.over_ranks(ranks))


rms = mean_square.then(math.sqrt)


@torch.no_grad()
def loglinear_error_by_age(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], written: Written, loss_mask: Bool[Tensor, " T"]
) -> Partials:
    """Error of the interpolated log pi_{v+1} against the stored one, in nats, for `metrics_by_age`.

    The sums are over valid tokens of age 2 and more whose log pi_{v+1} was stored. `step_rms` is the root mean square
    of log pi_{v+1} - log pi_v, the size to compare the error with.
    """
    drawn, stored = loglinear(proximal, behavior, written.age).double(), written.recomputed.double()
    error, step = drawn - stored, stored - behavior.double()
    where = loss_mask & written.known & (written.age >= STORED_FROM) & finite(error) & finite(step)
    error, step = error.masked_fill(~where, 0), step.masked_fill(~where, 0)
    quantities = (
        Quantity("tokens", where, also="sum"),
        Quantity("error", error, {"loglinear/error/avg": mean, "loglinear/error/rms": rms}, over="tokens"),
        Quantity("absolute", error.abs(), {"loglinear/error/abs": mean, "loglinear/error/max": largest}, over="tokens"),
        Quantity("step", step, {"loglinear/error/step_rms": rms}, over="tokens"),
    )
    return Partials.beside(by_age(quantities, where, written.known_age))


MEANS = ("behav_imp_weight/var/segment_wise", "behav_imp_weight/var/standard", "behav_kl/avg", "staleness/avg")
"""Means over the rollouts, each with the weight of its tokens."""

SUMS = (
    "staleness/tokens",
    "staleness/unknown",
    "stale_cache_tokens",
    "recompute/seconds",
    "recompute/tokens",
    "recompute/scored",
    "wait_seconds",
    "pause_seconds",
)


def asynchronous_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums and means over the run, also by age; `recompute/share` is a share of the run's seconds.

    Empty for a run that was not asynchronous.
    """
    names = sorted({name for record in records for name in record})
    found: dict[str, float] = {}
    for name in names:
        base, slash, age = name.partition("/age_")
        if base in SUMS:
            found[name] = sum(record.get(name) or 0 for record in records)
        elif base in MEANS:
            found |= _mean(name, f"staleness/tokens{slash}{age}", records)
    seconds = sum(record.get("seconds") or 0 for record in records)
    if "recompute/seconds" in found and seconds:
        found["recompute/share"] = found["recompute/seconds"] / seconds
    return found


def _mean(name: str, weight: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = [record for record in records if record.get(name) is not None and record.get(weight)]
    tokens = sum(record[weight] for record in known)
    return {name: sum(record[name] * record[weight] for record in known) / tokens} if tokens else {}

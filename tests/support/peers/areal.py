"""AReaL 1.0.4: the functional module, its config and its KL estimators, without engines, launchers and loaders.

It widens its arguments to float32 itself, so that its answer carries a float32 rounding of its own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import yaml
from torch import Tensor

from mis_plugins.explain.translate.areal import translate
from peers.loading import Peer, defaults, load
from peers.rows import Metric, Rows

BARE = ("areal", "areal.api", "areal.utils", "areal.utils.functional")
ABSENT = ("hydra", "omegaconf", "uvloop", "einops", "torchdata", "areal.infra", "areal.engine", "areal.utils.logging",
          "areal.utils.name_resolve", "areal.utils.seqpack")  # fmt: skip
FUNCTIONAL = Peer("areal.utils.functional.functional", BARE, ABSENT)
CONFIG = Peer("areal.api.cli_args", BARE, ABSENT)
ACTOR = Peer(
    "areal.trainer.ppo.actor",
    ("areal", "areal.trainer", "areal.trainer.ppo", "areal.utils"),
    (*ABSENT, "areal.api", "areal.experimental", "areal.trainer.ppo.stats", "areal.utils.data",
     "areal.utils.functional", "areal.utils.perf_tracer", "areal.utils.stats_tracker"),
)  # fmt: skip
TRACKER = Peer("areal.utils.stats_tracker", BARE, ABSENT)


def said_of(key: str) -> Mapping[str, Any]:
    """What its config says of a key of rejection sampling: `help`, and `choices`."""
    fields = dataclasses.fields(load(CONFIG).RejectionSamplingConfig)
    return next(field.metadata for field in fields if field.name == key)


def settings(**keys: Any) -> Any:
    """`actor.rejection_sampling`."""
    return load(CONFIG).RejectionSamplingConfig(**keys)


def correction(batch: Rows, config: Any, packed: bool = False) -> tuple[Tensor, Tensor, float]:
    """(weights `[N, L]`; mask; filtered fraction), from padded rows or from packed ones."""
    compute = load(FUNCTIONAL).apply_rejection_sampling
    if not packed:
        found = compute(batch.proximal, batch.behavior, batch.mask.bool(), None, config)
        return found.behave_imp_weight, found.loss_mask, found.filtered_fraction
    flat = (torch.cat(x) for x in (batch.batch.proximal, batch.batch.behavior))
    found = compute(*flat, batch.batch.flat_mask, batch.ragged.cu_seqlens, config)
    weights, mask = (batch.padded(x) for x in (found.behave_imp_weight, found.loss_mask))
    return weights, mask, found.filtered_fraction


def loss(batch: Rows, target: Tensor, config: Any, **keys: Any) -> tuple[Tensor, dict]:
    """`ppo_actor_loss_fn`: (the mean over the tokens that were valid before rejection; its statistics)."""
    return load(FUNCTIONAL).ppo_actor_loss_fn(
        target, batch.proximal, batch.behavior, batch.token_advantages, 0.2, batch.mask.bool(),
        eps_clip_higher=0.28, rejection_sampling=config, **keys,
    )  # fmt: skip


def sapo_loss(batch: Rows, target: Tensor, old: Tensor, level: str, **taus: float) -> Tensor:
    """`sapo_loss_fn`: the mean over all valid tokens."""
    return load(FUNCTIONAL).sapo_loss_fn(
        target, old, batch.token_advantages, loss_mask=batch.mask.bool(), importance_sampling_level=level, **taus
    )[0]  # fmt: skip


def actor_defaults() -> dict[str, Any]:
    """What its actor's config sets where the user sets nothing."""
    return defaults(load(CONFIG).PPOActorConfig)


def m2po_mask(batch: Rows, threshold: float) -> Tensor:
    """`_apply_m2po_masking`: the loss mask `[N, L]` that is left."""
    return load(ACTOR)._apply_m2po_masking(batch.behavior, batch.proximal, batch.mask.bool(), threshold)


def metrics(batch: Rows, config: Any) -> dict[str, float]:
    """What its tracker makes of the statistics of the loss, as its actor hands them over."""
    _, found = loss(batch, batch.pad(batch.target), config)
    tracker, names = load(TRACKER).DistributedStatsTracker(), ("behave_imp_weight", "behave_approx_kl")
    tracker.denominator(unclipped_behave_tokens=found["behave_mask"])
    tracker.stat("unclipped_behave_tokens", **{name: found[name].float() for name in names})
    exported = {key: value for name in names for key, value in tracker.export(name, reset=False).items()}
    return exported | {"rs_filtered_fraction": found["filtered_fraction"]}


def metric_table(config: Any) -> dict[str, Metric]:
    """Of tokens, whatever the level."""
    return {
        "behave_imp_weight/avg": "applied_mean",
        "behave_imp_weight/min": "kept_weight_min",
        "behave_imp_weight/max": "applied_max",
        "behave_approx_kl/avg": "kept_log_ratio_mean",
        "behave_approx_kl/min": "kept_log_ratio_min",
        "behave_approx_kl/max": "kept_log_ratio_max",
        "rs_filtered_fraction": "rejected_fraction" if config.action == "mask" else "outside_bound_fraction",
    }


def mapping_of(block: Mapping[str, Any]) -> dict:
    """What `config from-areal` makes of a file's `actor.rejection_sampling`.

    Raises:
        ConfigError: for settings that the command refuses.
    """
    tree = {"actor": {"use_decoupled_loss": True, "rejection_sampling": dict(block)}}
    return {"weight": None, "reject": []} | dict(translate(yaml.safe_dump(tree)).mis)

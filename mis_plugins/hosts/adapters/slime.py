"""slime hands a hook no groups: they are Megatron's own. Hosts that are made from slime are served alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import VERSION_FLAGS, Batch, Host, LogProbs, Scores, Tensor, sequences_of
from mis_plugins.hosts.needs.record import Needs
from mis_plugins.hosts.needs.slime import SLIME

FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def hands_on_kept_sets(keys: Mapping[str, Any]) -> bool:
    """Whether slime asks its engine for the tokens that it samples from: by top-p alone, whatever top-k says."""
    return keys.get("rollout_top_p", 1) != 1


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """slime's own log-probs, over the tokens that top-p left, and its entropy, of the whole vocabulary."""
    return scored(SLIME, args, batch, logits, SLIME.kept_sets.get()(args, batch))


def scored(needs: Needs, args: Any, batch: Batch, logits: Tensor, more: Mapping[str, Any] | None = None) -> Scores:
    """Log-probs and entropy by the host's own function, which returns them behind an empty tensor."""
    _, by_name = needs.scores.get()(logits, args=args, with_entropy=True, **sequences_of(batch), **(more or {}))
    return by_name["log_probs"], by_name["entropy"]


def tracks(needs: Needs) -> Callable[[Any], bool]:
    """Whether this process has the host's tracking, whatever its arguments say."""
    return lambda args: needs.tracking.is_loaded


HOST = Host(
    name="slime",
    title="slime",
    package="slime",
    runs=tracks(SLIME),
    parallel=megatron.parallel,
    scores=scores,
    own_loss=SLIME.own_loss.get,
    log_probs=LogProbs(SLIME.log_probs.owner, beside_entropy=True),
    reports=megatron.reports,
    tracking=SLIME.tracking.loaded,
    needs=SLIME,
    one_sample_a_rollout=True,
    records=("slime", "megatron", "sglang"),
    version_flags=f"{FULLY_ASYNC} {VERSION_FLAGS}",
    head_flags=VERSION_FLAGS,
    rollout_batch=True,
    kept_set=hands_on_kept_sets,
    rescore=partial(megatron.rescore, SLIME),
)

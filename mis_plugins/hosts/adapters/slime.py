"""slime hands a hook no groups: they are Megatron's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import (
    VERSION_FLAGS,
    Batch,
    Host,
    LogProbs,
    Ranks,
    Scores,
    Tensor,
    Trainer,
    sequences_of,
)

TRAINER = "slime.backends.megatron_utils.actor"
TRACKING = "slime.observability.logging_utils"
FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def runs(args: Any) -> bool:
    """Whether this process has slime's tracking."""
    return TRACKING in sys.modules


def hands_on_kept_sets(keys: Mapping[str, Any]) -> bool:
    """Whether slime asks its engine for the tokens that it samples from: by top-p alone, whatever top-k says."""
    return keys.get("rollout_top_p", 1) != 1


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """slime's own log-probs, over the tokens that top-p left, and its entropy, of the whole vocabulary."""
    from slime.backends.megatron_utils.loss import (  # type: ignore[import-not-found]
        get_log_probs_and_entropy,
        get_rollout_top_p_logprob_kwargs,
    )

    nucleus = get_rollout_top_p_logprob_kwargs(args, batch)
    _, found = get_log_probs_and_entropy(
        logits, args=args, with_entropy=True, **sequences_of(batch), **nucleus
    )
    return found["log_probs"], found["entropy"]


def rescore(args: Any, data: Batch, ranks: Ranks) -> Sequence[Tensor] | None:
    """A second log-prob pass of slime's trainer."""
    from mis_plugins.hosts.resplit import rescored

    return rescored(TRAINER, args, data, ranks)


def with_versions(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """slime's train data of the samples, with a `Note` of each sample."""
    from mis_plugins.hosts.versions.slime.train_data import convert

    return convert(args, samples)


def versioned() -> Trainer:
    """The interface to slime's trainer through which versions are carried."""
    from mis_plugins.hosts.versions.slime.trainer import SlimeTrainer

    return SlimeTrainer()


HOST = Host(
    name="slime",
    title="slime",
    package="slime",
    runs=runs,
    parallel=megatron.parallel,
    scores=scores,
    own_loss="slime.backends.megatron_utils.loss.policy_loss_function",
    log_probs=LogProbs(  # seen at 624b824a
        "slime.utils.ppo_utils", "_calculate_log_probs_and_entropy_chunk", beside_entropy=True
    ),
    reports=megatron.reports,
    tracking=TRACKING,
    one_sample_a_rollout=True,
    records=("slime", "megatron", "sglang"),
    version_flags=f"{FULLY_ASYNC} {VERSION_FLAGS}",
    with_versions=with_versions,
    versioned=versioned,
    rollout_batch=True,
    kept_set=hands_on_kept_sets,
    rescore=rescore,
)

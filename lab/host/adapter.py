"""The record of the embedded host, which `lab.host` registers when it is imported."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Batch, Host, Ranks, Scores, Tensor, sequences_of


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """The embedded host's log-probs, over kept sets where there are any, and its entropy where the loss has it."""
    from lab.host.train.log_probs import IDS, OFFSETS, get_log_probs_and_entropy

    found = get_log_probs_and_entropy(
        logits,
        args=args,
        with_entropy=args.entropy_coef != 0,
        top_p_token_ids=batch.get(IDS),
        top_p_token_offsets=batch.get(OFFSETS),
        **sequences_of(batch),
    )
    return found["log_probs"], found.get("entropy")


def rescore(args: Any, data: Batch, ranks: Ranks) -> Sequence[Tensor] | None:
    """Score the rollout again in micro-batches of half the samples, or of two samples where they held one.

    Returns None, with a warning, for a rollout of a single sample.

    Raises:
        InputError: the loop does not call the hook.
    """
    from lab.host.train.gradients import before_log_probs
    from mis_plugins.errors import warn_once
    from mis_plugins.hosts.needs import held_by
    from mis_plugins.hosts.resplit import ONE_SPLIT, PREFIX

    held = held_by(("lab.host.loop", "prepare"))
    if "self" not in held:
        raise InputError("mis.resplit_every: the loop of the embedded host does not call this hook")
    samples = len(data["tokens"])
    if samples == 1:
        warn_once(ONE_SPLIT)
        return None
    trainer, size = held["self"].trainer, min(args.micro_batch_size, samples)
    before_log_probs(args, trainer, PREFIX)
    return trainer.log_probs(data, 2 if size == 1 else (size + 1) // 2)


def own_loss() -> Callable[..., Any]:
    """The policy loss that the embedded host trains with."""
    return pkgutil.resolve_name("mis_plugins.mis.policy_loss")


def tracking() -> Callable[..., Any] | None:
    """The embedded host's tracker; None in a process that runs none of its loops."""
    module = sys.modules.get("lab.host.tracking")
    return None if module is None else module.log


HOST = Host(
    name="embedded",
    title="the embedded host",
    package="lab",
    runs=lambda args: True,
    told_by="registration",
    parallel=megatron.parallel,
    scores=scores,
    megatron=False,
    own_loss=own_loss,
    reports=megatron.reports,
    tracking=tracking,
    rollout_batch=True,
    rescore=rescore,
    versions=True,
    head_flags="--rollout-top-logprobs-num 32",
    kept_set=lambda keys: True,  # of top-p and of top-k
)

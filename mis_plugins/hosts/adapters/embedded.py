"""The embedded host, `mis_plugins.local`: imported where it runs, as every host is."""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import Any

from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Batch, Host, Scores, Tensor, sequences_of


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """The embedded host's log-probs, and its entropy where the loss has a term of it."""
    from mis_plugins.local.train.log_probs import get_log_probs_and_entropy

    found = get_log_probs_and_entropy(
        logits, args=args, with_entropy=args.entropy_coef != 0, **sequences_of(batch)
    )
    return found["log_probs"], found.get("entropy")


@cache
def arguments() -> Set[str]:
    """The names of its arguments; its parser is at hand, and checks what it takes."""
    from mis_plugins.local.cli.parser import build_parser

    return frozenset(action.dest for action in build_parser()._actions)


HOST = Host(
    name="embedded",
    title="the embedded host",
    package="mis_plugins",
    runs=lambda args: True,
    told_by="nothing",
    parallel=megatron.parallel,
    scores=scores,
    megatron=False,
    own_loss="mis_plugins.mis.policy_loss",
    reports=megatron.reports,
    tracking="mis_plugins.local.tracking",
    more_arguments=arguments,
    rollout_batch=True,
    versions=True,
)

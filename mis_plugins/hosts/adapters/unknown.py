"""A host that no record describes, or a notebook: groups are Megatron's own, and metrics go to the log alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Batch, Host, Scores, Tensor
from mis_plugins.shared.notices import warn_once

NOTICE = (
    "No host that mis_plugins knows runs in this process: process groups are Megatron's own where it is initialized, "
    "and metrics of the optimizer step go to the log alone"
)
NO_LOSS = (
    "mis_plugins.mis.policy_loss: no host that mis_plugins knows runs in this process, so nothing says how it scores "
    "tokens; docs/hosts.md says how to register a host"
)


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """Refuse: how this host scores tokens is not known."""
    raise InputError(NO_LOSS)


def own_loss() -> Callable[..., Any]:
    """Refuse: which loss this host trains with is not known."""
    raise InputError(NO_LOSS)


def tracking() -> None:
    """Say once that metrics go to the log alone."""
    warn_once(NOTICE)


HOST = Host(
    name="unknown",
    title="a host that is not known",
    package="unknown",
    runs=lambda args: True,
    told_by="nothing",
    parallel=megatron.parallel,
    scores=scores,
    megatron=False,
    own_loss=own_loss,
    reports=megatron.reports,
    tracking=tracking,
)

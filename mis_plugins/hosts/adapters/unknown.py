"""A host that no record describes, or a notebook: groups are Megatron's own, and metrics go to the log alone."""

from typing import Any

from mis_plugins.errors import InputError, warn_once
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Host

NOTICE = (
    "No host that mis_plugins knows runs in this process: process groups are Megatron's own where it is initialized, "
    "and metrics of the optimizer step go to the log alone"
)
NO_LOSS = (
    "mis_plugins.mis.policy_loss: no host that mis_plugins knows runs in this process, so nothing says how it scores "
    "tokens; docs/hosts.md says how to register a host"
)


def refuse(*_: Any) -> Any:
    """Refuse: neither how this host scores tokens nor its loss is known."""
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
    scores=refuse,
    megatron=False,
    own_loss=refuse,
    reports=megatron.reports,
    tracking=tracking,
)

"""The hosts, and the one that runs this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import embedded, miles, miles_fsdp, slime
from mis_plugins.hosts.host import Host

HOSTS: dict[str, Host] = {}


def register(host: Host) -> None:
    """Serve `host`: hooks find it from now on, and `config check --host` where it records its arguments."""
    HOSTS[host.name] = host


for known in (miles.HOST, slime.HOST, miles_fsdp.HOST, embedded.HOST):
    register(known)


def current(args: Any = None, reduce: Callable[..., Any] | None = None) -> Host:
    """The host that runs this process: the embedded one where no other says that it does.

    Args:
        args: the host's arguments, where a hook is handed any.
        reduce: the reducer that the host hands to a loss, which says for certain whose it is.

    Raises:
        InputError: `reduce` of no host that we know.
    """
    hosts = list(HOSTS.values()) if reduce is None else _that_made(reduce)
    unsaid = embedded.HOST if reduce is None else hosts[0]
    return next((host for host in hosts if host.runs(args)), unsaid)


def _that_made(reduce: Callable[..., Any]) -> list[Host]:
    package = str(getattr(reduce, "__module__", "")).partition(".")[0]
    hosts = [host for host in HOSTS.values() if host.package == package]
    if not hosts:
        packages = dict.fromkeys(host.package for host in HOSTS.values())
        raise InputError(
            f"mis_plugins.mis.policy_loss: sum_of_sample_mean comes from {package or 'nowhere'}; it serves the losses "
            f"of {', '.join(packages)}"
        )
    return hosts

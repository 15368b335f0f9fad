"""The hosts: files of `adapters/`, entry points of other packages, and the one that runs this process."""

import sys
from collections.abc import Callable, Container
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import accumulate
from pkgutil import iter_modules
from typing import Any, get_args

from mis_plugins.config.view import LAST
from mis_plugins.errors import InputError
from mis_plugins.hosts import adapters
from mis_plugins.hosts.adapters import unknown
from mis_plugins.hosts.host import Host, Sign

HOSTS: dict[str, Host] = {"unknown": unknown.HOST}
"""The hosts that this process has asked for or registered; `every_host` has all."""
GROUP = "mis_plugins.hosts"  # entry points, each the address of a `Host`


def register(host: Host) -> None:
    """Serve `host`: hooks find it from now on, and `config check --host` where it records its arguments."""
    HOSTS[host.name] = host
    LAST.clear()  # another host may run by the arguments that were read last


def every_host() -> dict[str, Host]:
    """All hosts by name: registered hosts, then the hosts of `adapters/` in the order of their files."""
    for module in _modules(*adapters.__path__):
        host = _record(module)
        HOSTS[host.name] = HOSTS.pop(host.name, host)
    return HOSTS


@cache
def _modules(*folders: str) -> dict[str, set[str]]:
    """The adapters, each with the packages that the beginning of its name may mean: none for a backend of another."""
    names = {module.name for module in iter_modules(folders)}
    meant = {name: set(accumulate(name.split("_"), "{}_{}".format)) for name in sorted(names)}
    return {name: some if some & names == {name} else set() for name, some in meant.items()}


def _record(module: str) -> Host:
    return import_module(f"{adapters.__name__}.{module}").HOST


def _load(packages: Container[str], backend: str | None = None) -> None:
    """Serve the hosts of these packages, and of a training backend: `PACKAGE.py` and `PACKAGE_BACKEND.py`."""
    for module, names in _modules(*adapters.__path__).items():
        if any(name in packages for name in names) or (backend and module.endswith(f"_{backend}")):
            host = _record(module)
            HOSTS.setdefault(host.name, host)


def find_installed() -> None:
    """Serve the hosts of other distributions, which the entry-point group `mis_plugins.hosts` names.

    Raises:
        InputError: an entry point does not load, is no `Host`, or has the name of another host.
    """
    for point in entry_points(group=GROUP):
        entry = f"{GROUP}: {point.name} = {point.value}"
        try:
            host = point.load()
        except Exception as error:
            raise InputError(f"{entry} does not load: {error!r}") from error
        if not isinstance(host, Host):
            raise InputError(f"{entry} is no mis_plugins.hosts.host.Host")
        if every_host().get(host.name, host) != host:
            raise InputError(f"{entry} takes the name {host.name} of another host; give it its own")
        register(host)


def current(args: Any = None, reduce: Callable[..., Any] | None = None) -> Host:
    """The host that runs this process, by the surest sign of one; no order of hosts decides.

    Args:
        args: the host's arguments, where a hook is handed any.
        reduce: the reducer that the host hands to a loss, which says for certain whose it is.

    Raises:
        InputError: `reduce` of no host that we know, or two hosts whose signs are equally sure.
        NeedError: a trainer of a host that has moved what tells us of it.
    """
    _load(sys.modules, getattr(args, "train_backend", None))
    hosts = list(HOSTS.values()) if reduce is None else _that_made(reduce)
    running = [host for host in hosts if host.runs(args)] or hosts
    first, *others = (host for sign in get_args(Sign) for host in running if host.told_by == sign)
    if others and others[0].told_by == first.told_by:
        raise InputError(
            f"{first.title} and {others[0].title}: {first.told_by} of both say that this process is theirs; load the "
            "modules of one host alone"
        )
    if first.told_by in ("registration", "nothing"):
        # The trainer of a host whose tracking lies at no address of ours would count as the host that is left.
        for host in hosts:
            if host.needs is not None and host.needs.train_actor.is_loaded:
                raise host.needs.tracking.error()
    return first


def of_package(name: str) -> list[Host]:
    """The hosts of the package that a module or function of this dotted name belongs to."""
    package = name.partition(".")[0]
    _load((package,))
    return [host for host in HOSTS.values() if host.package == package]


def _that_made(reduce: Callable[..., Any]) -> list[Host]:
    package = str(getattr(reduce, "__module__", "")).partition(".")[0]
    hosts = of_package(package)
    if not hosts:
        packages = dict.fromkeys(host.package for host in every_host().values() if host.told_by != "nothing")
        raise InputError(
            f"mis_plugins.mis.policy_loss: sum_of_sample_mean comes from {package or 'nowhere'}; the hook serves "
            f"losses of {', '.join(packages)}"
        )
    return hosts


# At the end: a host of another package may import this module.
find_installed()

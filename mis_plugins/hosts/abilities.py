"""Which settings of a config a host can serve, for a command line; hooks find out when they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.host import Host


def check_served(config: CorrectionConfig, host: Host, names: Mapping[str, str]) -> None:
    """Refuse settings that the hooks would refuse in the first step of a job.

    Args:
        names: what the user calls the fields of the config, as `reading.spelling` says.

    Raises:
        ConfigError: it names the field and the host.
    """
    normalize = config.weight and config.weight.normalize
    if normalize and normalize.scope == "rollout" and not host.rollout_batch:
        raise ConfigError(
            f"{{weight.normalize.scope}}: rollout needs the rollout batch, which no hook of {host.title} sees; use "
            "data_parallel"
        ).spelled(names, "mis.")
    if config.segment_wise_on and not (host.versions or host.version_flags):
        raise ConfigError(
            f"{{segment_wise}}: {host.title} does not say which version wrote each token (see docs/async.md); leave "
            "it out, and give its bounds as {weight}"
        ).spelled(names, "mis.")
    check_routes(config, host, names)
    if config.resplit_every is not None and host.rescore is None:
        raise ConfigError(
            f"{{resplit_every}} needs the rollout-data hook, which {host.title} does not call; leave it out"
        ).spelled(names, "mis.")
    if not host.step_hook and config.on_all_rejected == "raise":
        raise ConfigError(
            f"{{on_all_rejected}}: raise needs a hook before each train step, which {host.title} does not call; use "
            "skip"
        ).spelled(names, "mis.")


def check_routes(config: CorrectionConfig, host: Host, names: Mapping[str, str]) -> None:
    """Refuse settings that read the routes of the trainer's routers on a host where nothing can watch them.

    Args:
        names: what the user calls the fields of the config, as `reading.spelling` says.

    Raises:
        ConfigError: it names the field and the host.
    """
    if host.routers or not (config.reads_routes or config.routing):
        return
    what = "{reject}: statistic: route" if config.reads_routes else "{routing}"
    raise ConfigError(
        f"{what} needs a hook before each log-prob pass, which {host.title} does not call: nothing can watch its "
        "routers; leave it out, or train with Megatron on Miles or slime"
    ).spelled(names, "mis.")


def unserved(config: CorrectionConfig, host: Host) -> Iterator[str]:
    """Warnings about settings that on `host` do less than the config says, or need more flags."""
    if config.segment_wise_on and not host.versions:
        yield f"mis.segment_wise on {host.title} needs {host.version_flags}"
    if not host.step_hook and config.metrics == "all":
        yield (
            f"mis.metrics: all needs a hook before each train step, which {host.title} does not call: there is no "
            "more than with mis.metrics: full"
        )

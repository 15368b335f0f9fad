"""What a host named on the command line can serve of a config; the hooks themselves find out when they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.arguments import TITLES, Host


def check_served(config: CorrectionConfig, host: Host, names: Mapping[str, str]) -> None:
    """Refuse what the hooks would refuse in the first step of a job.

    Args:
        names: what the user calls the fields of the config, as `reading.spelling` says.

    Raises:
        ConfigError: it names the field and the host.
    """
    normalize = config.weight and config.weight.normalize
    if normalize and normalize.scope == "rollout" and host != "slime":
        raise ConfigError(
            f"{{weight.normalize.scope}}: rollout needs the rollout batch, which {TITLES[host]} hands to no hook; use "
            "data_parallel"
        ).spelled(names, "mis.")
    if config.segment_wise_on:
        raise ConfigError(
            f"{{segment_wise}}: {TITLES[host]} does not say which version wrote each token (see docs/async.md); leave "
            "it out, and give its bounds as {weight}"
        ).spelled(names, "mis.")
    if host == "fsdp" and config.on_all_rejected == "raise":
        raise ConfigError(
            f"{{on_all_rejected}}: raise needs a hook before each train step, which {TITLES[host]} does not call; use "
            "skip"
        ).spelled(names, "mis.")


def unserved(config: CorrectionConfig, host: Host) -> Iterator[str]:
    """What runs on `host` and does less there than the config says."""
    if host == "fsdp" and config.metrics == "all":
        yield (
            f"mis.metrics: all needs a hook before each train step, which {TITLES[host]} does not call: there is no "
            "more than with mis.metrics: full"
        )

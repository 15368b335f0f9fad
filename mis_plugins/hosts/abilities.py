"""What a host named on the command line can serve of a config; the hooks themselves find out when they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.host import Host


def check_served(config: CorrectionConfig, host: Host, names: Mapping[str, str]) -> None:
    """Refuse what the hooks would refuse in the first step of a job.

    Args:
        names: what the user calls the fields of the config, as `reading.spelling` says.

    Raises:
        ConfigError: it names the field and the host.
    """
    normalize = config.weight and config.weight.normalize
    if normalize and normalize.scope == "rollout" and not host.rollout_batch:
        raise ConfigError(
            f"{{weight.normalize.scope}}: rollout needs the rollout batch, which {host.title} hands to no hook; use "
            "data_parallel"
        ).spelled(names, "mis.")
    if config.segment_wise_on and not host.versions:
        raise ConfigError(
            f"{{segment_wise}}: {host.title} does not say which version wrote each token (see docs/async.md); leave "
            "it out, and give its bounds as {weight}"
        ).spelled(names, "mis.")
    if not host.step_hook and config.on_all_rejected == "raise":
        raise ConfigError(
            f"{{on_all_rejected}}: raise needs a hook before each train step, which {host.title} does not call; use "
            "skip"
        ).spelled(names, "mis.")


def unserved(config: CorrectionConfig, host: Host) -> Iterator[str]:
    """What runs on `host` and does less there than the config says."""
    if not host.step_hook and config.metrics == "all":
        yield (
            f"mis.metrics: all needs a hook before each train step, which {host.title} does not call: there is no "
            "more than with mis.metrics: full"
        )

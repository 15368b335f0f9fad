"""The hooks of `mis.py` with which a fully asynchronous host says which version wrote each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.registry import current


@Hook
async def generate_with_versions(
    input: Any, sample: Any = None, sampling_params: Any = None, evaluation: bool = False
) -> Any:
    """The generate function of Miles and slime: the host's own, with the version of every token on the sample.

    Miles calls it with `input` alone, and needs `--sglang-stream-interval 1` and
    `--sglang-incremental-streaming-output` beside it. slime calls it as
    `(args, sample, sampling_params, evaluation)`. An evaluation runs the host's own function unchanged.

    Raises:
        InputError: on Miles, the engine does not name the version of each token; on slime the conversion raises it.
    """
    from mis_plugins.hosts.versions import generate

    if sample is None:
        return await generate.miles(input)
    return await generate.slime(input, sample, sampling_params, evaluation)


@Hook
def convert_with_versions(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The conversion of Miles and slime: the host's own train data, with versions for `carry_versions`.

    Raises:
        ConfigError, InputError: as `mis_plugins.hosts.versions.rollouts.convert` says.
    """
    from mis_plugins.hosts.versions import rollouts

    host = _served(args, "--custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions")
    return rollouts.convert(args, samples, host.needs)


@Hook
def carry_versions(args: Any) -> None:
    """The init hook of Miles and slime on Megatron: the loss hook gets versions, and log pi_{v+1} by recompute.

    Raises:
        ConfigError: an argument of the host under which versions would say something else, or a host on which
            versions are not carried.
    """
    from mis_plugins.hosts.versions import carrying

    carrying.install(args, _served(args, "--custom-megatron-init-path mis_plugins.mis.carry_versions"))


def _served(args: Any, flag: str) -> Host:
    host = current(args)
    if not host.version_flags:
        raise ConfigError(f"{flag}: versions are not carried on {host.title}; leave the flag out")
    return host

"""Whether the ranks of a job were given one config, key by key: loaded where a job has other ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist

from mis_plugins.errors import ConfigError, shown
from mis_plugins.packing.roll_call import heard

SHOWN_KEYS = 3  # how many differing keys an error names
Known = dict[str, dict[str, int]]  # by key, and by what a rank was given there: the first such rank


def compare(config: Any, axes: Mapping[str, Collection[int] | None]) -> None:
    """Compare the config with that of all ranks that the axes of the grid reach, one axis after the other.

    Args:
        axes: numbers of the ranks along each axis; None is every rank of the job.

    Raises:
        ConfigError: the configs differ; every rank raises, and names the keys and a rank for each value.
        MisError: a rank was not heard of, which the error names.
    """
    known: Known = {key: {value: dist.get_rank()} for key, value in flat(config, "mis").items()}
    for axis, ranks in axes.items():
        said = heard(f"the mis config, {axis}", json.dumps(known), ranks)
        known = joined([json.loads(text) for text in said.values()])
    differing = {key: given for key, given in known.items() if len(given) > 1}
    if differing:
        raise ConfigError(f"ranks have different mis configs: {told(differing)}; give all ranks one config")


def flat(given: Any, key: str) -> dict[str, str]:
    """Every setting below a key, each by its own key; a block also by what it holds.

    >>> flat({"weight": {"upper": 2.0}}, "mis")
    {'mis': 'weight', 'mis.weight': 'upper', 'mis.weight.upper': '2.0'}
    """
    if is_dataclass(given):
        inner, own = {f"{key}.{field.name}": getattr(given, field.name) for field in fields(given)}, "given"
    elif isinstance(given, Mapping):
        inner, own = {f"{key}.{name}": value for name, value in given.items()}, ", ".join(sorted(map(str, given)))
    elif isinstance(given, list | tuple):
        inner, own = {f"{key}[{number}]": value for number, value in enumerate(given)}, f"{len(given)} entries"
    else:
        return {key: shown(given)}
    return {key: own} | {name: said for at, value in inner.items() for name, said in flat(value, at).items()}


def joined(parts: Sequence[Known]) -> Known:
    """What several ranks know together."""
    every: Known = {}
    for key, value, rank in ((key, *one) for part in parts for key, given in part.items() for one in given.items()):
        of_key = every.setdefault(key, {})
        of_key[value] = min(rank, of_key.get(value, rank))
    return every


def told(differing: Known) -> str:
    """The first of the differing keys, and what they are on which rank."""
    said = []
    for key in list(differing)[:SHOWN_KEYS]:
        by_rank = sorted((rank, value) for value, rank in differing[key].items())
        said.append(f"{key} is {', '.join(f'{value} on rank {rank}' for rank, value in by_rank)}")
    return "; ".join(said)

"""What each process of a side runs, on disk, for `python -m true_on_policy doctor`: one file a rank, read as one side.

The ordinary accident is one rank with another environment, so every rank writes, and none is believed for the others.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from mis_plugins.shared.storage import replaced
from true_on_policy.contract.gpu import GpuContract, Size, gpu_contract
from true_on_policy.errors import TrueOnPolicyError
from true_on_policy.observe.process import Observation, observe

FORMAT = 2
RANKS = "ranks that were seen"
CONTRACT = "contract"
TRAINER = "trainer.json"


class DumpError(TrueOnPolicyError):
    """A file that `write` did not write."""


@dataclass(frozen=True)
class Process:
    """Of one side.

    Attributes:
        rank, ranks: which of how many.
        url: of the server that it is a part of, empty where it serves nothing.
        host, pid: where it ran.
    """

    rank: int = 0
    ranks: int = 1
    url: str = ""
    host: str = ""
    pid: int = 0

    @property
    def ended(self) -> bool:
        """Whether it ran on this machine, and does no more."""
        return self.host == socket.gethostname() and not Path("/proc", str(self.pid)).exists()


@dataclass(frozen=True)
class Dump:
    """One file: a process, what it runs, and the contract that it was given, if it knows one."""

    process: Process
    seen: Observation
    contract: GpuContract | None


def this_process(url: str = "") -> Process:
    """By torch.distributed, where it is initialized."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Process(rank, ranks, url, socket.gethostname(), os.getpid())


def place(path: Path, process: Process) -> Path:
    """Where a rank writes: rank 0 to `path`, the others beside it."""
    return path if process.rank == 0 else path.with_stem(f"{path.stem}.rank{process.rank}")


def dump(path: Path, contract: GpuContract, args: argparse.Namespace | None = None) -> Path:
    """Write this trainer's side, once it has pinned; returns the file, which other ranks write beside."""
    return write(path, Dump(this_process(), observe(contract, args), contract))


def write(path: Path, dumped: Dump) -> Path:
    """Write one process's file, whose folder is made; whole or not at all."""
    contract = dumped.contract and asdict(dumped.contract) | {"family": dumped.contract.family.name}
    stated = {"format": FORMAT, "process": asdict(dumped.process), "contract": contract}
    file = place(path, dumped.process)
    with replaced(file) as partial:
        partial.write_text(json.dumps(stated | asdict(dumped.seen), indent=2) + "\n", encoding="utf-8")
    return file


def remove(path: Path) -> None:
    """Remove what this rank wrote in an earlier run: a rank that fails now shall not show it."""
    place(path, this_process()).unlink(missing_ok=True)


def load(path: Path) -> tuple[GpuContract, Observation]:
    """A trainer's side, of every rank. `path` is the file of rank 0, or the folder that holds trainer.json.

    Raises:
        DumpError: `dump` did not write it.
        ContractError: its contract cannot hold.
    """
    first = path / TRAINER if path.is_dir() else path
    dumps = _side(first)
    contract = dumps[0].contract
    if contract is None:
        raise DumpError(f"{first}: no trainer's file, it states no contract")
    seen = merged(dumps)
    if any(other.contract != contract for other in dumps):
        split = {CONTRACT: _by_rank({each.process.rank: str(each.contract) for each in dumps})}
        return contract, Observation(
            {**seen.settings, **split}, seen.unseen, seen.configured, (*seen.split, CONTRACT)
        )
    return contract, seen


def load_engine(path: Path, url: str | None) -> Observation:
    """An engine's side, of every rank. `path` is the file of its rank 0, or a folder that holds files of engines.

    Args:
        url: of the engine that is meant, where there are several in the folder.

    Raises:
        DumpError: not written by an engine that runs, or not clear by which.
    """
    dumps = _side(path if not path.is_dir() else _one_engine(path, url))
    ended = [each.process for each in dumps if each.process.ended]
    if ended:
        raise DumpError(
            f"{path}: process {ended[0].pid} of {ended[0].host}, which wrote it, has ended; start the engine again "
            "with its environment"
        )
    return merged(dumps)


def _one_engine(folder: Path, url: str | None) -> Path:
    firsts = [file for file in sorted(folder.glob("engine-*.json")) if ".rank" not in file.name]
    processes = {file: read(file).process for file in firsts}
    meant = [file for file in firsts if url is None or _port(processes[file].url) == _port(url)]
    if url is not None and len(meant) > 1:  # hosts give their engines the same ports on each machine
        meant = [file for file in meant if _same_host(processes[file], url)]
    if len(meant) != 1:
        named = ", ".join(file.name for file in firsts) or "none"
        raise DumpError(
            f"{folder}: {len(meant)} engines at {url or 'any URL'}; there are: {named}; name one file"
        )
    return meant[0]


def _port(url: str) -> str:
    return url.rstrip("/").rpartition(":")[2]


def _same_host(process: Process, url: str) -> bool:
    """As the engine was told to call itself, or this machine by its loopback."""
    asked = urlsplit(url).hostname or ""
    here = asked == "localhost" or asked.startswith("127.") or asked == "::1"
    return process.host == socket.gethostname() if here else urlsplit(process.url).hostname == asked


def _side(first: Path) -> list[Dump]:
    """The files of all ranks of the run that wrote `first`; what is left of a run with more ranks is not among them."""
    zero = read(first)
    pattern = glob.escape(f"{first.stem}.rank") + "*" + first.suffix
    others = [read(file) for file in sorted(first.parent.glob(pattern))]
    return [zero, *(each for each in others if each.process.rank < zero.process.ranks)]


def read(path: Path) -> Dump:
    """One file.

    Raises:
        DumpError: it is something else.
        ContractError: its contract cannot hold.
    """
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        if stated["format"] != FORMAT:
            raise DumpError(f"{path}: format {stated['format']}, this version reads {FORMAT}")
        seen = Observation(
            dict(stated["settings"]),
            dict(stated["unseen"]),
            configured=tuple(stated["configured"]),
            split=tuple(stated["split"]),
        )
        process, contract = Process(**stated["process"]), _parts(stated["contract"])
    except FileNotFoundError as error:
        raise DumpError(
            f"{path}: no such file; true_on_policy.hosts.miles_init writes a trainer's, our plugin that of an engine "
            "which is started with TRUE_ON_POLICY_ENGINE_DUMP"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(
            f"{path}: not written by true_on_policy.observe.dumps ({type(error).__name__}: {error})"
        ) from error
    return Dump(process, seen, contract and gpu_contract(*contract[0], **contract[1]))


def _parts(stated: dict[str, Any] | None) -> tuple[tuple[str, str], dict[str, Any]] | None:
    """Names and the rest of a contract."""
    if stated is None:
        return None
    rest = dict(stated)
    size = rest.pop("size")
    names = rest.pop("family"), rest.pop("backend")
    return names, rest | {"size": size and Size(**size)}


def merged(dumps: Sequence[Dump]) -> Observation:
    """One side: a row in which ranks differ has the value of each, and one that a rank lacks is not seen."""
    sides = {each.process.rank: each.seen for each in dumps}
    settings: dict[str, str] = {}
    unseen = {name: why for side in sides.values() for name, why in side.unseen.items()}
    split: list[str] = []
    for name in dict.fromkeys(name for side in sides.values() for name in side.settings):
        values = {rank: side.settings[name] for rank, side in sides.items() if name in side.settings}
        if len(set(values.values())) > 1:
            settings[name] = _by_rank(values)
            split.append(name)
        elif len(values) == len(sides):
            settings[name] = next(iter(values.values()))
        else:
            lacking = min(sides.keys() - values.keys())
            unseen[name] = f"rank {lacking}: {sides[lacking].why(name)}"
    silent = set(range(dumps[0].process.ranks)) - sides.keys()
    if silent:
        unseen[RANKS] = f"{_ranks(sorted(silent))} of {dumps[0].process.ranks} wrote nothing"
    else:
        settings[RANKS] = "all"
    configured = {name for side in sides.values() for name in side.configured}
    return Observation(settings, unseen, tuple(sorted(configured)), tuple(split))


def _by_rank(values: Mapping[int, str]) -> str:
    """`Ring on ranks 0, 1; Tree on rank 2`."""
    alike: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        alike.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in alike.items())


SHOWN = 4  # ranks that are named one by one


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > SHOWN:
        return f"{len(ranks)} ranks from {ranks[0]} on"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

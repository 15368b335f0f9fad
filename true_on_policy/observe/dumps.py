"""Dumps: files that say what each process of a side runs, one file a rank, for `python -m true_on_policy doctor`.

A common mistake is one rank with another environment, so every rank writes a file of its own. The doctor
reads all files of a side as one.
"""

import glob
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from mis_plugins.errors import UserError
from mis_plugins.shared.files import replaced
from mis_plugins.shared.terminal import printable
from true_on_policy.contract.gpu import GpuContract, Size, gpu_contract
from true_on_policy.errors import TrueOnPolicyError
from true_on_policy.observe.process import Observation, observe

FORMAT = 3
MOST_RANKS = 1 << 20
RANKS = "ranks that were seen"
CONTRACT = "contract"
TRAINER = "trainer.json"


class DumpError(TrueOnPolicyError):
    """A dump is missing, is not a file of `write`, or does not tell which engine wrote it."""


@dataclass(frozen=True)
class Process:
    """One process of a side.

    rank, ranks: the rank of the process, and how many ranks its side has.
    url: the URL of the server that the process is a part of; empty where the process serves nothing.
    host, pid, began: the machine of the process, its process id there, and when it began, as `_began` tells.
    """

    rank: int = 0
    ranks: int = 1
    url: str = ""
    host: str = ""
    pid: int = 0
    began: int = 0

    @property
    def ended(self) -> bool:
        """Whether the process ran on this machine and has ended; another one may have its process id by now."""
        return self.host == socket.gethostname() and self.began != _began(self.pid)


def _began(pid: int) -> int:
    """Return when a process of this machine began, in ticks since the machine did; -1 where it has ended."""
    try:
        state, *fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(fields[18])  # a zombie has ended too


@dataclass(frozen=True)
class Dump:
    """The content of one file: a process, the observation of what it runs, and its contract, if any."""

    process: Process
    seen: Observation
    contract: GpuContract | None


def this_process(url: str = "") -> Process:
    """Describe this process; its rank is torch.distributed's, and 0 of 1 where that is not initialized."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Process(rank, ranks, url, socket.gethostname(), os.getpid(), _began(os.getpid()))


def place(path: Path, process: Process) -> Path:
    """Return the file of a rank: `path` for rank 0, a file beside `path` for every other rank."""
    return path if process.rank == 0 else path.with_stem(f"{path.stem}.rank{process.rank}")


def dump(path: Path, contract: GpuContract, args: Any = None) -> Path:
    """Write the dump of this rank of the trainer after its pin, and return the file."""
    return write(path, Dump(this_process(), observe(contract, args), contract))


def write(path: Path, dumped: Dump) -> Path:
    """Write the file of one process whole or not at all, and return its path; the folder is made."""
    contract = dumped.contract and asdict(dumped.contract) | {"family": dumped.contract.family.name}
    stated = {"format": FORMAT, "process": asdict(dumped.process), "contract": contract}
    file = place(path, dumped.process)
    with replaced(file) as partial:
        partial.write_text(json.dumps(stated | asdict(dumped.seen), indent=2) + "\n", encoding="utf-8")
    return file


def remove(path: Path) -> None:
    """Remove this rank's file of an earlier run, so that a rank that fails now leaves no file."""
    place(path, this_process()).unlink(missing_ok=True)


def load(path: Path) -> tuple[GpuContract, Observation]:
    """Load the trainer's side from the files of all its ranks; `path` is rank 0's, or the folder with trainer.json.

    Raises:
        DumpError: a file is missing, or `dump` did not write it.
        ContractError: the contract in a file cannot hold.
    """
    first = path / TRAINER if path.is_dir() else path
    dumps = _side(first)
    contract = dumps[0].contract
    if contract is None:
        raise DumpError(f"{first}: no trainer's file, it states no contract")
    seen = merged(dumps)
    if all(other.contract == contract for other in dumps):
        return contract, seen
    values = _by_rank({each.process.rank: str(each.contract) for each in dumps})
    return contract, replace(seen, settings={**seen.settings, CONTRACT: values}, split=(*seen.split, CONTRACT))


def load_engine(path: Path, url: str | None) -> Observation:
    """Load an engine's side from the files of all its ranks.

    Args:
        path: the file of the engine's rank 0, or a folder that holds files of engines.
        url: the URL of the engine to load, where the folder holds several.

    Raises:
        DumpError: the engine that wrote the file has ended, or the folder and the URL do not name one engine.
    """
    dumps = _side(path if not path.is_dir() else _one_engine(path, url))
    if any(each.contract for each in dumps):
        raise DumpError(f"{path}: states a contract, as a trainer's file does; name the engine's")
    ended = [each.process for each in dumps if each.process.ended]
    if ended:
        raise DumpError(
            f"{path}: process {ended[0].pid} of {ended[0].host}, which wrote it, has ended; start the engine again "
            "with its environment"
        )
    return merged(dumps)


def _one_engine(folder: Path, url: str | None) -> Path:
    firsts = [file for file in sorted(folder.glob("engine-*.json")) if ".rank" not in file.name]
    processes = {}
    for file in firsts:
        try:
            processes[file] = read(file).process
        except (UserError, OSError) as error:  # a file that cannot be read must hide no other
            print(printable(f"not read: {error}"), file=sys.stderr)
    meant = [file for file in processes if url is None or _port(processes[file].url) == _port(url)]
    if url is not None and len(meant) > 1:  # hosts give their engines the same ports on each machine
        meant = [file for file in meant if _same_host(processes[file], url)]
    if len(meant) != 1:
        named = ", ".join(file.name for file in firsts) or "none"
        raise DumpError(f"{folder}: {len(meant)} engines at {url or 'any URL'}; there are: {named}; name one file")
    return meant[0]


def _port(url: str) -> str:
    return url.rstrip("/").rpartition(":")[2]


def _same_host(process: Process, url: str) -> bool:
    """Whether an engine's process is the host of `url`: by the engine's own name, or this machine by its loopback."""
    asked = urlsplit(url).hostname or ""
    here = asked == "localhost" or asked.startswith("127.") or asked == "::1"
    return process.host == socket.gethostname() if here else urlsplit(process.url).hostname == asked


def _side(first: Path) -> list[Dump]:
    """Read the files of all ranks of a run; files of an earlier run on another number of ranks are skipped."""
    zero = read(first)
    pattern = glob.escape(f"{first.stem}.rank") + "*" + first.suffix
    others = [read(file) for file in sorted(first.parent.glob(pattern))]
    dumps = [zero, *(each for each in others if each.process.ranks == zero.process.ranks)]
    if twice := [rank for rank, count in Counter(each.process.rank for each in dumps).items() if count > 1]:
        raise DumpError(f"{first}: more than one file of {_ranks(twice)}; remove those of an earlier run")
    return dumps


def read(path: Path) -> Dump:
    """Read the dump of one process.

    Raises:
        DumpError: the file is missing, or `write` did not write it.
        ContractError: the contract in the file cannot hold.
    """
    try:
        if path.exists() and not path.is_file():
            raise DumpError(f"{path}: is no regular file; a pipe or a device is not read")
        stated = json.loads(path.read_text(encoding="utf-8"))
        if stated["format"] != FORMAT:
            raise DumpError(f"{path}: format {short(stated['format'])}, this version reads {FORMAT}")
        return Dump(_process(stated["process"]), _seen(stated), _contract(stated["contract"]))
    except FileNotFoundError as error:
        raise DumpError(
            f"{path}: no such file; true_on_policy.hosts.miles_init writes a trainer's, our plugin that of an engine "
            "which is started with TRUE_ON_POLICY_ENGINE_DUMP"
        ) from error
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DumpError(
            f"{path}: not written by true_on_policy.observe.dumps ({type(error).__name__}: {error})"
        ) from error


def _process(stated: Any) -> Process:
    process = Process(**stated)
    for name, kind in (("rank", int), ("ranks", int), ("url", str), ("host", str), ("pid", int), ("began", int)):
        if type(getattr(process, name)) is not kind:
            raise TypeError(f"{name} is {short(getattr(process, name))}")
    if not 0 <= process.rank < process.ranks <= MOST_RANKS:
        raise ValueError(f"rank {process.rank} of {process.ranks}")
    urlsplit(process.url)
    return process


def _seen(stated: Any) -> Observation:
    settings, unseen = dict(stated["settings"]), dict(stated["unseen"])
    configured, split = tuple(stated["configured"]), tuple(stated["split"])
    texts = (*settings.values(), *unseen.values(), *configured, *split)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a setting that is no text")
    return Observation(settings, unseen, configured, split)


def _contract(stated: Any) -> GpuContract | None:
    if stated is None:
        return None
    rest = dict(stated)
    size, names = rest.pop("size"), (rest.pop("family"), rest.pop("backend"))
    return gpu_contract(*names, **rest, size=size and Size(**size))


def merged(dumps: Sequence[Dump]) -> Observation:
    """Merge the dumps of all ranks into one side.

    A row in which ranks differ has the value of each rank, and is split. A row that a rank lacks is not seen.
    """
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
    """Write each value with its ranks, for example `Ring on ranks 0, 1; Tree on rank 2`."""
    alike: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        alike.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in alike.items())


SHOWN = 4  # at most this many ranks are named one by one


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > SHOWN:
        return f"{len(ranks)} ranks, the first {ranks[0]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

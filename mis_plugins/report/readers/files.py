"""Files of strangers: opened and parsed as JSON within the budgets of `shared/budget.py`.

What a path holds becomes sources of records or of curves, and what could not be read is listed in `Problems`.
"""

import gzip
import importlib
import io
import itertools
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from mis_plugins.report.record import Record
from mis_plugins.shared.arrays import once
from mis_plugins.shared.budget import INFLATED, ITEMS, LINE, Clock, RecordError
from mis_plugins.shared.opened import Opened, reason

GZIP, ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"  # the first bytes
Lines = io.BufferedIOBase  # an opened file, or what unpacks it
HEAD = 64  # lines in which a file shows what it is
SKIPPED = 16  # budgets of one line: how far the end of an overlong line is looked for


def unpacked(file: BinaryIO, path: Path) -> Lines:
    """The lines within a file that gzip or zstd packed, by its first bytes; the file itself where nothing is packed."""
    start = file.read(4)
    file.seek(0)
    if start[:3] == GZIP:
        return gzip.GzipFile(fileobj=file)
    if start != ZSTD:
        return file  # pyright: ignore[reportReturnType]
    pyarrow = library("pyarrow", path, "zstd needs pyarrow, which is not installed")
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def library(name: str, path: Path, lacking: str) -> Any:
    """Import a library of the extra `report`, which one kind of file needs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RecordError(f"{path}: {lacking}; pip install 'mis-plugins[report]'") from error


def parsed(text: bytes, path: Path) -> Any:
    """What a line of JSON holds."""
    LINE.check(len(text), len(text), path)
    ITEMS.check(sum(map(text.count, (b",", b"[", b"{"))), len(text), path)
    return json.loads(text.decode("utf-8-sig", "surrogatepass"), object_pairs_hook=once)


def objects(path: Path, problems: "Problems", head: bool = False) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and object of each line of a file; a line without an object is told and left out.

    `head` stops after the first lines, by which a file is known.
    """
    with Opened(path).file as packed, unpacked(packed, path) as file:
        size, inflated = size_of(path), 0
        for number in itertools.count(1):
            line, goes_on = _line(file)
            inflated += len(line)
            INFLATED.check(inflated if file is not packed else 0, size, path)
            place = f"line {number}"
            mapping = problems.read(partial(_object, line, path), path, place, torn=not line.endswith(b"\n"))
            problems.bytes_read = packed.tell()
            if mapping is not None:
                yield place, mapping
            if not goes_on or (head and (number == HEAD or problems.bytes_read > SKIPPED * LINE.base)):
                return


def _line(file: Lines) -> tuple[bytes, bool]:
    """The next line, cut where it is overlong, and whether another may follow."""
    line = file.readline(int(LINE.base) + 1)
    if len(line) <= LINE.base:
        return line, bool(line)
    rests = (file.readline(int(LINE.base)) for _ in range(SKIPPED))
    return line, any(rest.endswith(b"\n") for rest in rests)


def _object(line: bytes, path: Path) -> Mapping[str, Any] | None:
    """The object of a line; None of a blank line."""
    if not line.strip():
        return None
    value = parsed(line, path)
    if not isinstance(value, dict):
        raise RecordError(f"holds {type(value).__name__}, no object; write one object a line")
    return value


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Let the process allocate no more than twice the inflated bytes that a file of `size` bytes may ask for.

    A library that reads a format by itself checks no budget: its allocation fails, and the library raises an error.
    """
    held, (soft, hard) = _held_memory(), resource.getrlimit(resource.RLIMIT_DATA)
    if held is None:
        yield
        return
    most = held + 2 * int(INFLATED.most(size))
    resource.setrlimit(resource.RLIMIT_DATA, (most if soft < 0 else min(soft, most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _held_memory() -> int | None:
    """Bytes of the process's own memory; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")), None)


T = TypeVar("T")
LONGEST = 300  # letters of a reason


@dataclass(frozen=True)
class Problem:
    """A file, or a record of it, that was not read.

    place: the line, row, sample or step within the file; empty of a whole file.
    """

    file: str
    place: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.reason) if part)


@dataclass
class Problems:
    """What could not be read. The first `EACH` of a file and `MOST` of all are kept, the others are counted.

    bytes_read: how far the reader of a long file has come.
    torn: files that could not be read to their end, in order.
    """

    MOST, EACH = 100, 10
    bytes_read: int = 0
    kept: list[Problem] = field(default_factory=list)
    of_file: Counter[str] = field(default_factory=Counter)
    torn: dict[str, None] = field(default_factory=dict)

    def add(self, reason: str, file: object = "", place: object = "", torn: bool = False) -> None:
        """Tell what was not read, and why; `torn` says that the file could not be read to its end."""
        self.torn |= {str(file): None} if torn else {}
        problem = Problem(str(file), str(place), reason)
        self.of_file[problem.file] += 1
        if self.of_file[problem.file] <= self.EACH and len(self.kept) < self.MOST:
            self.kept.append(problem)

    def read(self, function: Callable[[], T], file: object, place: object = "", torn: bool = False) -> T | None:
        """What `function` reads of one file or one record; None where it fails, which is told as by `add`."""
        try:
            return function()
        except BaseException as error:
            why = reason(error).removeprefix(f"{file}: ").removeprefix(f"{place}: ")
            self.add(why if len(why) <= LONGEST else f"{why[:LONGEST]}...", file, place, torn)
            return None

    def each(self, items: Iterator[T], file: object, size: int, place: object = "") -> Iterator[T]:
        """Items that a reader makes of a file of `size` bytes, until the reader ends, fails, or takes too long.

        Errors of whoever takes the items pass: they are no fault of the file.
        """
        clock = Clock(size, file)

        def following() -> list[T]:
            clock.check()
            return [item for item in (next(items, clock),) if item is not clock]  # pyright: ignore[reportReturnType]

        while item := self.read(following, file, place, torn=True):
            yield from item

    def first(self, most: int = MOST) -> list[Problem]:
        """The first `most` problems, and how many more there are."""
        more = self.of_file.total() - min(most, len(self.kept))
        return [*self.kept[:most], *([Problem("", "", f"and {more} more")] if more > 0 else [])]


@dataclass(frozen=True)
class Curve:
    """Numbers of a run by step, without tokens.

    values: of each step the numbers by their name on our pages, or by the name in the file where we have none.
    replaced: numbers that have a limit, with their steps, which the log holds anew, as where a run was started again.
    """

    label: str
    values: Mapping[int, Mapping[str, float]]
    replaced: Sequence[tuple[int, Mapping[str, float]]] = ()


@dataclass(frozen=True)
class Source:
    """Files that belong together, such as all ranks of one rollout.

    kind: the format, in words.
    records: yields what the files hold; a file that is broken is told to `Problems` and left out.
    twice: folders or files that hold one part of a rollout each, where there are several of one part.
    """

    kind: str
    files: tuple[Path, ...]
    records: Callable[[Problems], Iterator[Record]]
    twice: tuple[Path, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(map(size_of, self.files))

    @property
    def name(self) -> str:
        """The file, or the kind of several files and the first one's folder."""
        first, *others = self.files or (Path(self.kind),)
        return f"{first.parent}: {self.kind}" if others else str(first)


def size_of(file: Path) -> int:
    """Bytes of a file; 0 where the file is gone."""
    try:
        return file.stat().st_size
    except OSError:
        return 0

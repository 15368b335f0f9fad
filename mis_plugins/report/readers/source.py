"""What a path holds: sources of records or of curves, and the list of what could not be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mis_plugins.report.record import Record
from mis_plugins.shared.budget import Clock
from mis_plugins.shared.opened import reason

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

    def add(self, reason: str, file: object = "", place: object = "") -> None:
        """Tell what was not read, and why."""
        problem = Problem(str(file), str(place), reason)
        self.of_file[problem.file] += 1
        if self.of_file[problem.file] <= self.EACH and len(self.kept) < self.MOST:
            self.kept.append(problem)

    @property
    def told(self) -> list[str]:
        """All that is kept, in words."""
        return list(map(str, self.kept))

    def read(self, function: Callable[[], T], file: object, place: object = "") -> T | None:
        """What `function` reads of one file or one record; None where it fails, which is told.

        Args:
            place: the line, row, sample or step within the file.
        """
        try:
            return function()
        except BaseException as error:
            why = reason(error).removeprefix(f"{file}: ").removeprefix(f"{place}: ")
            self.add(why if len(why) <= LONGEST else f"{why[:LONGEST]}...", file, place)
            return None

    def each(self, items: Iterator[T], file: object, size: int, place: object = "") -> Iterator[T]:
        """Items that a reader makes of a file of `size` bytes, until the reader ends, fails, or takes too long.

        Errors of whoever takes the items pass: they are no fault of the file.
        """
        clock = Clock(size, file)

        def following() -> list[T]:
            clock.check()
            return [item for item in (next(items, clock),) if item is not clock]  # pyright: ignore[reportReturnType]

        while item := self.read(following, file, place):
            yield from item
        if item is None:
            self.torn[str(file)] = None

    def first(self, most: int = MOST) -> list[Problem]:
        """The first `most` of them, and how many more there are."""
        more = self.of_file.total() - min(most, len(self.kept))
        return [*self.kept[:most], *([Problem("", "", f"and {more} more")] if more > 0 else [])]


@dataclass(frozen=True)
class Curve:
    """Numbers of a run by step, without tokens.

    values: of each step the numbers by their name on our pages, or by the name in the file where we have none.
    """

    label: str
    values: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Source:
    """Files that belong together, such as all ranks of one rollout.

    kind: the format, in words.
    records: yields what the files hold; a file that is broken is told to `Problems` and left out.
    folders: those of several that hold parts of one rollout.
    """

    kind: str
    files: tuple[Path, ...]
    records: Callable[[Problems], Iterator[Record]]
    folders: tuple[Path, ...] = ()

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


def natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which rollout 9 stands before rollout 10."""
    parts = enumerate(re.split(r"(\d+)", str(path)))
    return [(len(digits := part.lstrip("0")), digits) if place % 2 else (-1, part) for place, part in parts]

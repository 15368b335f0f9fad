"""What a path holds: sources of records or of curves, and the list of what could not be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mis_plugins.report.record import Record


@dataclass
class Problems:
    """What could not be read, in words. The first `MOST` are kept, the others are counted.

    bytes_read: how far the reader of a long file has come.
    """

    MOST = 100
    bytes_read: int = 0
    told: list[str] = field(default_factory=list)
    more: int = 0

    def add(self, what: str) -> None:
        if len(self.told) < self.MOST:
            self.told.append(what)
        else:
            self.more += 1

    @contextmanager
    def guarded(self, file: object, place: object = "") -> Iterator[None]:
        """Run a block that reads one file or one record: an error of any kind is told, and reading goes on behind it.

        Args:
            place: the line, row, sample or step within the file.
        """
        try:
            yield
        except Exception as error:
            where = f"{file}: {place}" if place != "" else f"{file}"
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.add(reason if reason.startswith(where) else f"{where}: {reason}")

    def first(self, most: int = MOST) -> list[str]:
        """The first `most` of them, and how many more there are."""
        more = len(self.told) + self.more - most
        return [*self.told[:most], *([f"and {more} more"] if more > 0 else [])]


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
    """

    kind: str
    files: tuple[Path, ...]
    records: Callable[[Problems], Iterator[Record]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files if file.exists())


def natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which rollout 9 stands before rollout 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]

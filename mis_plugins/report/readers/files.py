"""Open a stranger's file and parse its JSON, within the budgets of `shared/budget.py`."""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mis_plugins.report.readers.source import Problems, size_of
from mis_plugins.shared.arrays import once
from mis_plugins.shared.budget import INFLATED, ITEMS, LINE, RecordError
from mis_plugins.shared.opened import Opened

GZIP, ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"  # the first bytes
Lines = io.BufferedIOBase  # what every file and what unpacks it is, opened for reading bytes
HEAD = 64  # lines in which a file shows what it is
SKIPPED = 16  # budgets of one line: how far the end of an overlong line is looked for


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device could block, or never end.

    Raises:
        RecordError: the path is no regular file, or cannot be opened.
    """
    return Opened(path).file


def unpacked(file: BinaryIO, path: Path) -> Lines:
    """The lines within a file that gzip or zstd packed, by its first bytes; the file itself where nothing is packed.

    Raises:
        RecordError: zstd is asked for, and pyarrow is not installed.
    """
    start = file.read(4)
    file.seek(0)
    if start[:3] == GZIP:
        return gzip.GzipFile(fileobj=file)
    if start != ZSTD:
        return file  # pyright: ignore[reportReturnType]
    pyarrow = library("pyarrow", path, "zstd needs pyarrow, which is not installed")
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def library(name: str, path: Path, lacking: str) -> Any:
    """Import a library of the extra `report`, which one kind of file needs.

    Raises:
        RecordError: the library is not installed; the message says what is `lacking` then, and what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RecordError(f"{path}: {lacking}; pip install 'mis-plugins[report]'") from error


def parsed(text: bytes, path: Path) -> Any:
    """What a line of JSON holds.

    Raises:
        RecordError: the line is beyond a budget, or a name stands twice in one object.
        ValueError: the line is no JSON.
    """
    LINE.check(len(text), len(text), path)
    ITEMS.check(sum(map(text.count, (b",", b"[", b"{"))), len(text), path)
    return json.loads(text.decode("utf-8-sig", "surrogatepass"), object_pairs_hook=once)


def objects(path: Path, problems: Problems, head: bool = False) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and object of each line of a file; a line without an object is told and left out.

    Args:
        head: stop after the first lines, by which a file is known.
    """
    with opened(path) as packed, unpacked(packed, path) as file:
        size, inflated = size_of(path), 0
        for number in itertools.count(1):
            line, goes_on = _line(file)
            inflated += len(line)
            INFLATED.check(inflated if file is not packed else 0, size, path)
            place = f"line {number}"
            mapping = problems.read(partial(_object, line, path), path, place)
            if mapping is None and line.strip() and not line.endswith(b"\n"):
                problems.torn[str(path)] = None
            problems.bytes_read = packed.tell()
            if mapping is not None:
                yield place, mapping
            if not goes_on or (head and (number == HEAD or problems.bytes_read > SKIPPED * LINE.base)):
                return


def _line(file: Lines) -> tuple[bytes, bool]:
    """The next line, of which an overlong one is cut, and whether another may follow."""
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

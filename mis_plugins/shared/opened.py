"""A file that is opened once and read at places of its own, never mapped.

A mapped file that another process cuts short ends a reader by a signal (SIGBUS), which no code can catch. A read that
comes back short is an error that names the file.
"""

import errno
import importlib
import mmap
import os
import re
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from mis_plugins.shared.budget import MEGABYTE, RecordError
from mis_plugins.shared.shell import not_installed

T = TypeVar("T")
IN_MEMORY = 256 * MEGABYTE  # bytes of a tensor; a larger tensor is copied to a temporary file, which is mapped
PIECE = 16 * MEGABYTE


def read(path: Path, function: Callable[[], T]) -> T:
    """Call `function`, and turn whatever it raises into a `RecordError` that names the file.

    The libraries raise a dozen kinds of errors on damaged files: the kind depends on the place of the damage.
    """
    try:
        return function()
    except RecordError as error:
        raise error if str(error).startswith(str(path)) else RecordError(f"{path}: {error}") from error
    except BaseException as error:
        raise RecordError(f"{path}: cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An error of reading in one line; any other error, such as Ctrl-C, is raised again."""
    # A library in Rust raises a `PanicException`, which is no `Exception`.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 ({error.reason})"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.strip().partition("\n")[0].rstrip(".") or type(error).__name__


def natural(name: object) -> list[tuple[int, str]]:
    """Sort key of a name by which rollout 9 stands before rollout 10, and 09 before 9; no two names share one."""
    parts = enumerate(re.split(r"(\d+)", str(name)))
    key = [(len(digits := part.lstrip("0")), digits) if place % 2 else (-1, part) for place, part in parts]
    return [*key, (-1, str(name))]


def optional(module: str) -> ModuleType:
    """Import a library of the extra `verify`, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecordError(not_installed(error, "verify")) from error


class Opened:
    """A regular file, opened for reading; raises RecordError for a folder, pipe or device, or what cannot be opened."""

    def __init__(self, path: Path):
        self.path = path
        try:
            _check_regular(path, os.stat(path))  # before the opening, which is an act of its own on some devices
            self.file = os.fdopen(_descriptor(path), "rb")
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
        status = os.fstat(self.file.fileno())
        _check_regular(path, status)
        self.size = status.st_size

    def bytes_at(self, offset: int, count: int) -> bytearray:
        """The `count` bytes at `offset`; raises RecordError where the file ends before them."""
        self._check(offset, count)
        buffer = bytearray(count)
        self._fill(offset, memoryview(buffer))
        return buffer

    def tensor_at(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """The `count` numbers at `offset`, in memory or a mapped copy; raises RecordError where file or disk ends."""
        size = count * dtype.itemsize
        if not size:
            return torch.empty(count, dtype=dtype)
        self._check(offset, size)
        content = self.bytes_at(offset, size) if size <= IN_MEMORY else self._copied(offset, size)
        return torch.frombuffer(content, dtype=dtype)

    def _check(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise RecordError(f"{self.path}: {'names bytes beyond its end' if self.size else 'is empty'}")

    def _fill(self, offset: int, room: memoryview) -> None:
        done = 0
        while done < len(room):
            got = os.preadv(self.file.fileno(), [room[done : done + PIECE]], offset + done)
            if not got:
                raise RecordError(f"{self.path}: became shorter while it was read")
            done += got

    def _copied(self, offset: int, size: int) -> mmap.mmap:
        try:
            with TemporaryFile() as copy:
                copy.truncate(size)
                for done in range(0, size, PIECE):
                    copy.write(self.bytes_at(offset + done, min(PIECE, size - done)))
                copy.flush()
                return mmap.mmap(copy.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise RecordError(
                f"{self.path}: a tensor of {size:,} bytes needs as much room in a temporary file: "
                f"{error.strerror}; TMPDIR names its folder"
            ) from error


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RecordError(f"{path}: is no regular file; a pipe or a device is not read")


def _descriptor(path: Path) -> int:
    """A descriptor of the file. A run of a thousand ranks has more files than a process may have open at first."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # without O_NONBLOCK opening a pipe would wait for a writer
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return os.open(path, flags)

"""Files that are written whole or not at all, alone or together, whatever ends the process that writes them.

New files lie in a folder `.partial-*` beside the old ones until they are whole. Its process holds a lock on the folder.
The next process that writes there removes the folders of processes that were killed.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.shell import undisturbed

PREFIX, LOCK, COMPLETE = ".partial-", ".lock-of-partial", "complete"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TORCH_FULL = "file write failed"  # torch.save raises a RuntimeError without a number
MOST_LINKS = 40  # of a path, as in the kernel
DAY = 24 * 3600.0
LONGEST = 256  # bytes of what `_machine` says


@contextmanager
def replaced(path: Path, size: int | None = None) -> Iterator[Path]:
    """Yield a partial file, which replaces `path` when the block ends well and is removed otherwise.

    Where `path` is a link, the file to which it leads is replaced, and the link stays. The new file has the mode and,
    as far as permitted, the owner of the old one; other hard links keep the old content. A device, a pipe or an open
    file such as /dev/stdout is yielded itself, because a rename would replace it by a file.

    Args:
        size: bytes that are to be written, for the message of a full disk.

    Raises:
        RecordError: the disk is full, or no file can be made there.
    """
    target = _target(path)
    if target is None:
        with _told_if_full(path, path, size):
            yield path
        return
    with _partial_folder(target.parent, path) as folder:
        partial = folder / target.name
        with _told_if_full(path, partial, size):
            yield partial
            _settle(partial, target)
        partial.replace(target)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, whole or not at all."""
    data = text.encode()
    with replaced(path, len(data)) as partial:
        partial.write_bytes(data)


def replace_together(folder: Path, texts: Mapping[str, str], obsolete: Iterable[str] = ()) -> None:
    """Write files of a folder, and remove the obsolete ones, so that all its files are of one run.

    All files are whole and on the disk before the first is moved, and signals wait for the last. Only SIGKILL can fall
    between two moves. The old files go before the new ones come, so that even then no file stands beside one of another
    run; `finish_killed`, or the next process that writes there, moves the others.

    Args:
        texts: of each file, not empty, by its name.

    Raises:
        RecordError: the disk is full, or no file can be made there.
    """
    with _partial_folder(folder, folder) as partial:
        made = partial / "made"
        made.mkdir()
        for name in obsolete:
            (made / name).touch()  # an empty file: its name goes
        for name, text in texts.items():
            data = text.encode()
            with _told_if_full(folder / name, made / name, len(data)):
                (made / name).write_bytes(data)
                _settle(made / name, folder / name)
        with undisturbed():
            _move(made.rename(partial / COMPLETE), folder)


def finish_killed(folder: Path) -> None:
    """Move the files that a killed process had begun to move, and remove what killed processes had not completed."""
    for partial in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), _opened(partial / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where its process lives
            if lock.read(LONGEST) == _machine():
                if (partial / COMPLETE).is_dir():
                    _move(partial / COMPLETE, folder)
                shutil.rmtree(partial)
        with suppress(OSError):  # without a lock, or with one that another machine need not show us
            if time.time() - partial.stat().st_mtime > DAY:
                shutil.rmtree(partial)


def check_writable(path: Path, flag: str) -> None:
    """Check, before the work begins, that its outcome can be written to `path`.

    Raises:
        RecordError: `path` cannot be written; the message names the flag.
    """
    if path.is_dir():
        raise RecordError(f"{flag} {path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"{flag} {path}: the folder of the file cannot be made: {error.strerror}"
        ) from error
    if path.exists() and not os.access(path, os.W_OK):
        raise RecordError(f"{flag} {path}: may not be written")
    target = _target(path)
    if target is not None and not os.access(target.parent, os.W_OK):
        raise RecordError(f"{flag} {path}: the folder of the file may not be written, where a new file is made first")


def _target(path: Path) -> Path | None:
    """The file that a rename replaces: `path`, or where its links lead. None where only writing into it is right."""
    for _ in range(MOST_LINKS):
        if not path.is_symlink():
            return path if path.is_file() or not path.exists() else None
        folder = path.parent.resolve()
        if folder.is_relative_to("/proc"):  # /dev/stdout leads here, to a file that the shell holds open
            return None
        path = folder / os.readlink(path)
    return None


@contextmanager
def _partial_folder(parent: Path, path: Path) -> Iterator[Path]:
    """Make a folder for partial files in `parent`, locked while this process lives, and remove it at the end.

    Ranks of several machines may write beside each other, with equal process ids: the folder's name is drawn.

    Raises:
        RecordError: no folder can be made there; the message names `path`.
    """
    made = ExitStack()
    try:
        with undisturbed():
            folder = _made_folder(parent, path, made)
        yield folder
    finally:
        with undisturbed():
            made.close()


def _made_folder(parent: Path, path: Path, made: ExitStack) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _finish_once(parent.resolve())
        folder = TemporaryDirectory(dir=parent, prefix=PREFIX, ignore_cleanup_errors=True)
        lock_file = Path(made.enter_context(folder), LOCK)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
    with suppress(OSError):  # some shared disks have no locks
        lock = made.enter_context(lock_file.open("wb", buffering=0))
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(
            _machine()
        )  # after the lock: who reads it, and gets the lock, knows that the process is gone
    return lock_file.parent


_finish_once = functools.cache(finish_killed)  # a trainer writes a file a step


def _opened(lock: Path) -> BinaryIO:
    """Open a lock. A stranger's archive may have brought a pipe by this name, which would never answer."""
    if not lock.is_file():
        raise FileNotFoundError(lock)
    return lock.open("r+b", buffering=0)


@functools.cache
def _machine() -> bytes:
    """The machine, since its start: its containers give one answer, and see the locks of each other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return platform.node().encode()


def _settle(partial: Path, target: Path) -> None:
    """Flush a file to the disk, and give it mode and owner of the file that it will replace."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    with suppress(OSError):  # there is none, or the disk keeps no modes
        old = target.stat()
        with suppress(PermissionError):
            os.chown(partial, old.st_uid, old.st_gid)
        partial.chmod(stat.S_IMODE(old.st_mode))


def _move(complete: Path, folder: Path) -> None:
    """Move files into a folder: one after the other, the old ones of all names first out of the way."""
    pairs = [(file, folder / file.name) for file in sorted(complete.iterdir())]
    with _locked(folder):
        for _, path in pairs:
            if _target(path) == path:
                path.unlink(missing_ok=True)
        for file, path in pairs:
            if not file.stat().st_size:
                file.unlink()
            elif _target(path) == path:
                file.replace(path)
            else:  # a link, perhaps to another disk, or a device
                with replaced(path) as partial:
                    shutil.copyfile(file, partial)
                file.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time move files into a folder, and have its names on the disk at the end."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some shared disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told_if_full(path: Path, partial: Path, size: int | None) -> Iterator[None]:
    """Let an error of a full disk name the file and its bytes.

    Raises:
        RecordError: the disk, a quota or a limit on files is used up.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.errno in FULL else ""
        if not reason and TORCH_FULL not in str(error):
            raise
        written = f"ended after {partial.stat().st_size:,} bytes" if size is None else f"takes {size:,} bytes"
        raise RecordError(
            f"{path}: cannot be written: {reason or TORCH_FULL}; the file {written}: make room, or name another place"
        ) from error

"""Files that are written whole or not at all, alone or together, whatever ends the process that writes them.

New files lie in a folder `.partial-*` beside the old ones until they are whole. Its process holds a lock on the folder.
The next process that writes there removes the folders of processes that were killed.
"""

import errno
import fcntl
import functools
import os
import platform
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.shell import undisturbed

PREFIX, COMPLETE = ".partial-", "complete"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
OF_TORCH = "inline_container"  # where torch.save fails on a full disk, with a RuntimeError that has no number
MOST_LINKS = 40  # of a path, as in the kernel
DAY = 24 * 3600.0


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


def replace_together(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files of a folder by their names, so that all of them are of one run.

    All files are whole and on the disk before the first is moved, and signals wait for the last. Only SIGKILL can fall
    between two moves. The old files go before the new ones come, so that even then no file stands beside one of another
    run; `finish_killed`, or the next process that writes there, moves the others. It raises RecordError where the disk
    is full, or no file can be made there.
    """
    with _partial_folder(folder, folder) as partial:
        made = partial / "made"
        made.mkdir()
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
        with suppress(OSError), _opened(partial) as descriptor:
            dead = partial.name.startswith(_own_prefix()) and _got_lock(descriptor)
            if dead and (partial / COMPLETE).is_dir():
                _move(partial / COMPLETE, folder)
            if dead or time.time() - partial.stat().st_mtime > DAY:  # other machines need not show us their locks
                shutil.rmtree(partial)


def _got_lock(descriptor: int) -> bool:
    """Take the lock of a folder: false while its process lives, and on a disk that has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_writable(path: Path, flag: str) -> None:
    """Check, before the work begins, that its outcome can be written to `path`; a RecordError names the flag."""
    if path.is_dir():
        raise RecordError(f"{flag} {path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{flag} {path}: the folder of the file cannot be made: {error.strerror}") from error
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
    """
    made = ExitStack()
    try:
        with undisturbed():
            try:
                parent.mkdir(parents=True, exist_ok=True)
                _finish_once(parent.resolve())
                while not (folder := _locked_folder(parent, made)).exists():
                    pass  # another process got the lock first, and took the folder for a dead one's
            except OSError as error:
                raise RecordError(f"{path}: cannot be written: {error.strerror}") from error
        yield folder
    finally:
        with undisturbed():
            made.close()


def _locked_folder(parent: Path, made: ExitStack) -> Path:
    folder = Path(mkdtemp(dir=parent, prefix=_own_prefix()))
    made.callback(shutil.rmtree, folder, ignore_errors=True)
    with suppress(OSError):  # some shared disks have no locks
        fcntl.flock(made.enter_context(_opened(folder)), fcntl.LOCK_SH)
    return folder


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, and no link to another, for locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


_finish_once = functools.cache(finish_killed)  # a trainer writes a file a step


@functools.cache
def _own_prefix() -> str:
    """How partial folders of this machine begin, since its start: its containers agree, and see each other's locks."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        machine = platform.node().encode()
    return f"{PREFIX}{blake2b(machine, digest_size=6).hexdigest()}-"


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
    """Move files into a folder, after the old ones are gone. What takes time comes before the first move."""
    pairs = [(file, folder / file.name) for file in sorted(complete.iterdir())]
    with _opened(folder.resolve()) as descriptor:
        with suppress(OSError):  # some shared disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # two runs do not move at once
        moves = [(str(file), str(path)) for file, path in pairs if _target(path) == path]
        gone = [path for _, path in moves[1:] if os.path.exists(path)]  # the first move replaces its own
        for path in gone:
            os.unlink(path)
        for file, path in moves:
            os.rename(file, path)
        with suppress(OSError):
            os.fsync(descriptor)
    for file, path in pairs:
        if file.exists():  # `path` is a link, perhaps to another disk, or a device
            with replaced(path) as partial:
                shutil.copyfile(file, partial)


@contextmanager
def _told_if_full(path: Path, partial: Path, size: int | None) -> Iterator[None]:
    """Let an error of a full disk name the file and its bytes."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.errno in FULL else ""
        if not reason and OF_TORCH not in str(error):
            raise
        ended = partial.stat().st_size if partial.exists() else 0
        written = f"ended after {ended:,} bytes" if size is None else f"takes {size:,} bytes"
        reason = reason or "torch wrote a part of it"
        raise RecordError(
            f"{path}: cannot be written: {reason}; the file {written}: make room, or name another place"
        ) from error

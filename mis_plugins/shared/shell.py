"""How every command of this repository ends in a shell: a reader that left, Ctrl-C, a package that is not installed.

A command's file starts with the lines below, before its other imports. Imports may take seconds, during which Ctrl-C
may come.

    if __name__ == "__main__":
        from mis_plugins.shared.shell import run_command

        run_command("demo:main", extra="local")
"""

from __future__ import annotations

import argparse
import io
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, NoReturn

from mis_plugins import __version__

REFUSED, INTERRUPTED, UNREAD = 2, 130, 141
"""Exit codes: the command could not do its work; Ctrl-C; nobody reads on, which a shell reports as 128 + SIGPIPE."""

OURS = ("mis_plugins", "true_on_policy")


class Unread(BaseException):
    """Raised where a command writes to a pipe that nobody reads any more, after `| head` for example.

    The class is no `Exception`, so that no handler of errors catches it: a command that compares would say "not equal".
    """


def run_command(command: str, extra: str | None = None) -> NoReturn:
    """Call `package.module:function` and leave the process with the exit code that it returns.

    Args:
        extra: the extra of `setup.py` that installs the packages which the command needs.
    """
    sys.stdout, sys.stderr = watched(sys.stdout), watched(sys.stderr)
    # torch warns of a missing numpy, which an extra installs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        code = _call(command, extra)
    except Unread:
        code = _leave_unread()
    sys.exit(code)


def mis_plugins_command() -> NoReturn:
    """The console script `mis-plugins`."""
    run_command("mis_plugins.__main__:main")


def true_on_policy_command() -> NoReturn:
    """The console script `true-on-policy`."""
    run_command("true_on_policy.__main__:main")


def _call(command: str, extra: str | None) -> int:
    try:
        with importing():
            main = pkgutil.resolve_name(command)
        return main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if extra is None or not is_foreign(error):
            raise
        print(f"error: {not_installed(error, extra)}", file=sys.stderr)
        return REFUSED
    finally:  # flushing here still raises `Unread` for a closed pipe
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once while modules are imported.

    An exception in the middle of an import of torch or numpy becomes a crash in C++, an endless recursion or a hang.
    """
    previous = signal.signal(signal.SIGINT, _end_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end_now(signum: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def is_foreign(error: ModuleNotFoundError) -> bool:
    """Whether the module that is missing belongs to another package than ours."""
    return error.name is not None and error.name.partition(".")[0] not in OURS


def not_installed(error: ModuleNotFoundError, extra: str) -> str:
    """What to install for a module that is missing, in one line."""
    package = (error.name or "").partition(".")[0]
    return f"{package} is not installed; pip install 'mis-plugins[{extra}]' (from a checkout: pip install '.[{extra}]')"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Give a command `--version`."""
    parser.add_argument("--version", action="version", version=f"mis-plugins {__version__}")


def watched(stream: Any) -> Any:
    """A standard stream whose writes raise `Unread` where nobody reads on; None, a closed stream, stays None."""
    if stream is None:
        return None
    stream.flush()
    raw = _Watched(stream.fileno(), "w", closefd=False)
    # PYTHONUNBUFFERED, which containers set: nothing may stay in a buffer, as in Python's own stream.
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Watched(io.FileIO):
    """A file descriptor whose writes tell a closed pipe from every other error, such as a broken socket's."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise Unread from error


def _leave_unread() -> int:
    """Drop buffered output: Python would flush the buffers at exit and complain about the closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    streams: tuple[IO[str] | None, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
    return UNREAD

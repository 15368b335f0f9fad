"""How every command of this repository speaks to a shell, and how it ends there: by a reader that left, by Ctrl-C, by
SIGTERM, for a package that is not installed.

A command's file starts with the lines below, before its other imports. Imports may take seconds, during which Ctrl-C
may come.

    if __name__ == "__main__":
        from mis_plugins.shared.shell import run_command

        run_command("demo:main", extra="verify")
"""

import argparse
import errno
import io
import os
import pkgutil
import re
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from mis_plugins import __version__
from mis_plugins.shared.terminal import Shown, print_error

REFUSED, INTERRUPTED, UNREAD, TERMINATED = 2, 130, 141, 143
"""Exit codes: the command could not do its work, or write its output; Ctrl-C; nobody reads on, which a shell reports as
128 + SIGPIPE; SIGTERM."""
STOPS = (signal.SIGINT, signal.SIGTERM)
OURS = ("mis_plugins", "true_on_policy")
NO_MEMORY = re.compile("allocate memory|bad_alloc|failed to map segment")
"""What torch, the C++ library and the loader of shared libraries say where no memory is left."""


class Unread(BaseException):
    """Raised where what a command prints cannot be written: nobody reads the pipe any more, after `| head` for example,
    the device is full, or the shell has closed standard output.

    The class is no `Exception`, so that no handler of errors catches it: a command that compares would say "not equal".
    """

    def __init__(self, error: OSError):
        closed = error.errno == errno.EBADF
        super().__init__(f"cannot write the output: {'the shell has closed it' if closed else error.strerror}")
        self.code = UNREAD if isinstance(error, BrokenPipeError) else REFUSED


class Terminated(BaseException):
    """Raised at SIGTERM, so that blocks which wrote partial files or started servers clean up."""


def run_command(command: str, extra: str | None = None) -> NoReturn:
    """Call `package.module:function` and leave the process with the exit code that it returns.

    Args:
        extra: the extra of `setup.py` that installs the packages which the command needs.
    """
    sys.stdin = sys.stdin or open(os.devnull)
    # In place of a stream that the shell has closed: one that refuses every line, and for errors one that takes all.
    sys.stdout = watched(sys.stdout or open(os.open(os.devnull, os.O_RDONLY), "w", closefd=False))
    sys.stderr = watched(sys.stderr or open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))
    # torch warns of a missing numpy, which an extra installs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python colours a traceback by escapes, which the streams show
    try:
        with _ended_by_sigterm():
            code = _call(command, extra)
    except Unread as error:
        code = _leave_unread(error)
    except Terminated:
        _end_now(signal.SIGTERM)
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
        print_error(f"error: {not_installed(error, extra)}")
        return REFUSED
    except Exception as error:
        if not (isinstance(error, MemoryError) or NO_MEMORY.search(str(error))):
            raise
    finally:  # flushing here still raises `Unread` for a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    # Behind the handler, so that what the failed call held is free again.
    print_error("error: no memory left: give this process more (`ulimit -v` tells its limit), or less to read")
    return REFUSED


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM. A second one ends the process at once, and so does one in a forked process."""

    def end(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)
    with _answered(end, (signal.SIGTERM,)):
        yield


def importing() -> AbstractContextManager[None]:
    """Let Ctrl-C and SIGTERM end the process at once while modules are imported.

    An exception in the middle of an import of torch or numpy becomes a crash in C++, an endless recursion or a hang.
    """
    return _answered(_end_now, STOPS)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM while the block runs; they take effect at its end."""
    came: list[int] = []
    try:
        with _answered(lambda signum, frame: came.append(signum), STOPS):
            yield
    finally:
        for signum in came:
            signal.raise_signal(signum)


@contextmanager
def _answered(answer: Callable[[int, FrameType | None], None], signals: Sequence[int]) -> Iterator[None]:
    """Answer signals by a function while the block runs. Only the main thread may; an ignored signal stays ignored."""
    main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in signals if main}
    before = {signum: handler for signum, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for signum in before:
            signal.signal(signum, answer)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_now(signum: int, frame: FrameType | None = None) -> NoReturn:
    """End without Python's way out, which would wait for child processes."""
    with suppress(OSError):
        os.write(2, b"interrupted\n" if signum == signal.SIGINT else b"terminated\n")
    os._exit(INTERRUPTED if signum == signal.SIGINT else TERMINATED)


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


class Gone(argparse.Action):
    """An argument that is gone: no help lists it, and giving it is an error that names its successor."""

    def __init__(self, option_strings: Sequence[str], dest: str, successor: str):
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self.successor = successor

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is gone: {self.successor}")


def watched(stream: Any) -> Any:
    """A standard stream that shows foreign text safely, and raises `Unread` where it cannot be written."""
    stream.flush()
    raw = _Watched(stream.fileno(), "w", closefd=False)
    # PYTHONUNBUFFERED, which containers set: nothing may stay in a buffer, as in Python's own stream.
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return Shown(
        buffer,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Watched(io.FileIO):
    """A file descriptor whose writes tell their own errors from every other, such as a broken socket's."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                written = super().write(left)
                if written is None:  # a full pipe that does not block
                    select.select((), [self], ())
                left = left[written or 0 :]
        except OSError as error:
            raise Unread(error) from error
        return len(data)


def _leave_unread(error: Unread) -> int:
    """Say what cannot be written, and drop it: Python would flush the buffers at exit and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    with suppress(Unread):
        if error.code == REFUSED:
            print_error(f"error: {error}")
        sys.stderr.flush()
    os.dup2(nowhere, sys.stderr.fileno())
    return error.code

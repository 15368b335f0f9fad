"""Compile the C kernels once for this machine, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from true_on_policy.errors import PinError

SOURCE = Path(__file__).with_name("batch_invariant.c")

# No -ffast-math and no contraction. The source writes fma where it fuses, alike in every instance of a kernel.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-fopenmp",
)


@cache
def library() -> ctypes.CDLL:
    """Load the compiled kernels, and build them at first use.

    Raises:
        PinError: there is no C compiler, or it cannot compile the kernels.
    """
    compiler = find_compiler()
    path = cache_folder() / f"batch_invariant-{_fingerprint(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return ctypes.CDLL(str(path))


def find_compiler() -> str:
    """Find a C compiler: $CC, else cc, gcc or clang on the path.

    Raises:
        PinError: none of them is installed.
    """
    found = (shutil.which(name) for name in (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise PinError(
            "contract.backend: 'native' needs a C compiler and none was found; install gcc or clang"
        )
    return compiler


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "true_on_policy"


def _fingerprint(compiler: str) -> str:
    """Hash the source, the flags and the compiler's macros, which tell what `-march=native` means on this machine."""
    macros = _run(compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull)
    parts = (SOURCE.read_text(encoding="utf-8"), " ".join(FLAGS), macros)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Write the library under a temporary name and rename it, so that no process loads half a file.

    The OpenMP calls stay unresolved on purpose: they bind to the runtime that torch has loaded and use its threads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        compiled = Path(folder) / "batch_invariant.o"
        _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled))
        _run(compiler, "-shared", str(compiled), "-lm", "-o", str(unfinished))
        unfinished.replace(path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PinError(
            f"contract.backend: 'native' does not build here ({done.stderr.strip()}); set CC to gcc or clang"
        )
    return done.stdout

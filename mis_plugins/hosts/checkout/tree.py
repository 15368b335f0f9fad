"""Files of a host's source: of a folder, or of a commit in a git directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from mis_plugins.errors import InputError
from mis_plugins.hosts.checkout.module import Module

OFFLINE = {**os.environ, "GIT_NO_LAZY_FETCH": "1"}  # an absent object is an error, and no download


@runtime_checkable
class Tree(Protocol):
    """Modules by dotted path."""

    def module(self, name: str) -> Module | None:
        """Parse a module; None where the tree has no such file."""
        ...


def paths(module: str) -> tuple[str, str]:
    """The two files that a module may be."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


@dataclass(frozen=True)
class Folder:
    """A checkout on disk."""

    root: Path
    _parsed: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        if name not in self._parsed:
            found = next((path for path in paths(name) if (self.root / path).is_file()), None)
            self._parsed[name] = (
                None if found is None else Module.of((self.root / found).read_bytes(), found, name)
            )
        return self._parsed[name]

    def modules(self, package: str) -> Iterator[Module]:
        """Each module of a package."""
        for file in sorted((self.root / package).rglob("*.py")):
            name = ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")
            if (found := self.module(name)) is not None:
                yield found


class Blobs:
    """Objects of a git directory, read by one process; each blob is parsed once."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._parsed: dict[tuple[str, str], Module] = {}

    def module(self, commit: str, path: str, name: str) -> Module | None:
        blob = self._asked(f"{commit}:{path}", contents=False)
        if blob is None:
            return None
        if (blob[0], path) not in self._parsed:
            whole = self._asked(blob[0], contents=True)
            if whole is None:
                raise InputError(
                    f"{path} of {commit}: listed, and its contents {blob[0]} are absent; fetch them first"
                )
            self._parsed[blob[0], path] = Module.of(whole[1], path, name)
        return self._parsed[blob[0], path]

    def _asked(self, name: str, contents: bool) -> tuple[str, bytes] | None:
        """The hash of a blob, and its contents where asked for; None where git has no blob of this name."""
        given, told = self._process.stdin, self._process.stdout
        assert given is not None and told is not None
        given.write(f"{'contents' if contents else 'info'} {name}\n".encode())
        given.flush()
        head = told.readline().decode().split()
        if len(head) != 3 or head[1] != "blob":
            if len(head) == 3 and contents:
                told.read(int(head[2]) + 1)
            return None
        return head[0], told.read(int(head[2]) + 1)[:-1] if contents else b""


@dataclass(frozen=True)
class Commit:
    """The tree of one commit."""

    blobs: Blobs
    name: str

    def module(self, name: str) -> Module | None:
        found = (self.blobs.module(self.name, path, name) for path in paths(name))
        return next((module for module in found if module is not None), None)


@contextmanager
def blobs(directory: Path) -> Iterator[Blobs]:
    """Read objects of a git directory."""
    command = [*git(directory), "cat-file", "--batch-command"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=OFFLINE) as process:
        try:
            yield Blobs(process)
        finally:
            process.terminate()


def git(directory: Path) -> list[str]:
    """The git command over a directory that nobody's configuration of hooks or filters reaches."""
    inner = directory / ".git"
    return ["git", f"--git-dir={inner if inner.exists() else directory}"]


def lines(directory: Path, *command: str) -> list[str]:
    """Lines that a git command prints.

    Raises:
        InputError: git refuses; the message holds git's own.
    """
    done = subprocess.run([*git(directory), *command], capture_output=True, text=True, env=OFFLINE)
    if done.returncode:
        raise InputError(f"{directory}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.splitlines()

"""When each need of a host broke: its main line, commit by commit, and the heads of pull requests.

    python -m lab.host_history ~/miles --since 2026-03-01

The argument is a git directory, or a folder with one. Objects that are absent are an error, and never downloaded. The
tables say where each need broke, and how long each hook would have worked.

Exit codes: 0 nothing broke; 1 something broke on the way, and is served at the end; 2 a hook would fail at the end, or
there is no git directory.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.host_history:main")

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

from mis_plugins.errors import InputError
from mis_plugins.hosts.checkout import search
from mis_plugins.hosts.checkout.command import FAILS, GOOD, MOVED, host_among, packages
from mis_plugins.hosts.checkout.source import Module, paths
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs.record import Address
from mis_plugins.shared.table import print_table
from mis_plugins.shared.terminal import print_error

SINCE = "2026-03-01"
HEADS = "refs/pull/*/head"
OFFLINE = {**os.environ, "GIT_NO_LAZY_FETCH": "1"}  # an absent object is an error, and no download


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 nothing broke, 1 something broke on the way, 2 a hook would fail at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.host_history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--since", default=SINCE, metavar="DAY", help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        return told(arguments.directory, arguments.since)
    except InputError as error:
        print_error(f"{arguments.directory}: {error}")
        return FAILS


def told(directory: Path, since: str) -> int:
    """Print the history of a host's needs, and return the exit code."""
    listed = set(lines(directory, "ls-tree", "--name-only", "HEAD"))
    host = host_among(name for name in packages() if name in listed)
    if host is None:
        raise InputError(f"no folder {' or '.join(packages())} at its HEAD; give the git directory of a host")
    points, of_needs = courses(host, directory, since)
    if not points:
        raise InputError(f"no commit of its main line since {since}")
    number, broken = heads(host, directory, since)
    print(
        f"{host.title}: {len(points)} commits of its main line, {points[0]} to {points[-1]}, and {number} stored"
    )
    print("heads of pull requests\n")
    columns = ("need", "answered since", "broke at", "moved at", "pull requests that break it")
    print_table(columns, rows(host, of_needs, broken))
    print()
    print_table(("hook", "works since", "days", "breaks", "moves"), lasted(host, points, of_needs))
    days = lifetimes(points, of_needs)
    print(
        f"\nOne set of addresses answered all needs for {min(days)} to {max(days)} days, {len(days)} sets in all."
    )
    unanswered = any(course.since is None for course in of_needs.values())
    broke = any(course.broke for course in of_needs.values())
    return FAILS if unanswered else MOVED if broke else GOOD


@dataclass(frozen=True)
class Point:
    """A commit: its hash, and the day on which it was committed."""

    commit: str
    day: date

    @classmethod
    def of(cls, line: str) -> Point:
        commit, day = line.split()
        return cls(commit, date.fromisoformat(day))

    def __str__(self) -> str:
        return f"{self.day} {self.commit[:9]}"


@dataclass
class Course:
    """What became of one need over a main line.

    since: where it began to be answered, the last time; None where it is not answered at the end.
    broke: where it stopped to be answered, each time.
    moved: where another address began to answer, each time.
    """

    since: Point | None = None
    broke: list[Point] = field(default_factory=list)
    moved: list[Point] = field(default_factory=list)
    _at: Address | None = None

    def add(self, point: Point, at: Address | None) -> None:
        """Take in the address that answers at the next commit; None where none does."""
        if at is None and self._at is not None:
            self.since = None
            self.broke.append(point)
        elif at is not None and self._at is None:
            self.since = point
        elif at != self._at:
            self.moved.append(point)
        self._at = at


def courses(host: Host, directory: Path, since: str = SINCE) -> tuple[list[Point], dict[str, Course]]:
    """The course of each need, from the first commit since a day to the last one of the main line."""
    points = _points(directory, "--first-parent", "--reverse", f"--since={since}", "HEAD")
    found = {name: Course() for name in vars(host.needs)}
    with blobs(directory) as objects:
        for number, point in enumerate(points):
            _progress(number, len(points), f"{host.title}, main line")
            answers = search.find_all(host.needs, Commit(objects, point.commit).module)
            for name, course in found.items():
                course.add(point, answers[name].address)
    return points, found


def heads(host: Host, directory: Path, since: str = SINCE) -> tuple[int, dict[str, list[str]]]:
    """How many stored heads of pull requests there are since a day, and which of them break each need.

    A head breaks a need that the commit answers at which the request left the main line.
    """
    form = "--format=%(committerdate:short) %(objectname) %(refname)"
    rows = (line.split() for line in lines(directory, "for-each-ref", form, HEADS))
    young = [(commit, ref) for day, commit, ref in rows if day >= since]
    broken: dict[str, list[str]] = {name: [] for name in vars(host.needs)}
    with blobs(directory) as objects:
        for number, (commit, ref) in enumerate(young):
            _progress(number, len(young), f"{host.title}, pull requests")
            for name in _broken_by(host, directory, objects, commit):
                broken[name].append(ref.split("/")[2])
    return len(young), broken


def _broken_by(host: Host, directory: Path, objects: Blobs, commit: str) -> Iterator[str]:
    missing = _missing(host, objects, commit)
    if not missing:
        return
    base = lines(directory, "merge-base", "--all", "HEAD", commit) or [commit]
    yield from missing - _missing(host, objects, base[0])


def _missing(host: Host, objects: Blobs, commit: str) -> set[str]:
    found = search.find_all(host.needs, Commit(objects, commit).module)
    return {name for name, one in found.items() if one.place is None}


def _points(directory: Path, *which: str) -> list[Point]:
    return [Point.of(line) for line in lines(directory, "log", "--format=%H %cs", *which)]


def rows(
    host: Host, found: Mapping[str, Course], broken: Mapping[str, Sequence[str]]
) -> list[tuple[str, ...]]:
    """One row a need: since when it is answered, where it broke or moved, and which requests would break it."""
    table = []
    for name, course in found.items():
        need = vars(host.needs)[name]
        broke, moved = (", ".join(map(str, points)) or "never" for points in (course.broke, course.moved))
        requests = ", ".join(broken.get(name, ())) or "none"
        table.append((need.what, str(course.since or "not answered at the end"), broke, moved, requests))
    return table


def lasted(host: Host, points: Sequence[Point], found: Mapping[str, Course]) -> list[tuple[str, ...]]:
    """One row a hook: since when all its needs are answered, the days since then, and how often one broke or moved."""
    table = []
    hooks = dict.fromkeys(hook for need in vars(host.needs).values() for hook in need.hooks)
    for hook in hooks:
        of_hook = [course for name, course in found.items() if hook in vars(host.needs)[name].hooks]
        starts = [course.since for course in of_hook if course.since is not None]
        whole = len(starts) == len(of_hook)
        start = max(starts, key=lambda point: points.index(point)) if whole else None
        days = "0" if start is None else str((points[-1].day - start.day).days)
        breaks, moves = (
            sum(map(len, kind)) for kind in zip(*((one.broke, one.moved) for one in of_hook), strict=True)
        )
        table.append((hook, "no" if start is None else str(start), days, str(breaks), str(moves)))
    return table


def lifetimes(points: Sequence[Point], found: Mapping[str, Course]) -> list[int]:
    """Days between the commits at which some need began, ended or moved: how long one set of addresses lasted."""
    changed = {
        each.day for one in found.values() for each in (one.since, *one.broke, *one.moved) if each is not None
    }
    days = sorted({points[0].day, *changed, points[-1].day})
    return [(later - day).days for day, later in pairwise(days)]


def _progress(number: int, whole: int, what: str) -> None:
    if number % 100 == 0:
        print(f"{what}: {number} of {whole}", file=sys.stderr)


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

"""When each need of a host broke: its main line, commit by commit, and the heads of pull requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

from mis_plugins.hosts.checkout import search, tree
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs.record import Address

SINCE = "2026-03-01"
HEADS = "refs/pull/*/head"


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
    with tree.blobs(directory) as blobs:
        for number, point in enumerate(points):
            _progress(number, len(points), f"{host.title}, main line")
            answers = search.find_all(host.needs, tree.Commit(blobs, point.commit))
            for name, course in found.items():
                course.add(point, answers[name].address)
    return points, found


def heads(host: Host, directory: Path, since: str = SINCE) -> tuple[int, dict[str, list[str]]]:
    """How many stored heads of pull requests there are since a day, and which of them break each need.

    A head breaks a need that the commit answers at which the request left the main line.
    """
    form = "--format=%(committerdate:short) %(objectname) %(refname)"
    rows = (line.split() for line in tree.lines(directory, "for-each-ref", form, HEADS))
    young = [(commit, ref) for day, commit, ref in rows if day >= since]
    broken: dict[str, list[str]] = {name: [] for name in vars(host.needs)}
    with tree.blobs(directory) as blobs:
        for number, (commit, ref) in enumerate(young):
            _progress(number, len(young), f"{host.title}, pull requests")
            for name in _broken_by(host, directory, blobs, commit):
                broken[name].append(ref.split("/")[2])
    return len(young), broken


def _broken_by(host: Host, directory: Path, blobs: tree.Blobs, commit: str) -> Iterator[str]:
    missing = _missing(host, blobs, commit)
    if not missing:
        return
    base = tree.lines(directory, "merge-base", "--all", "HEAD", commit) or [commit]
    yield from missing - _missing(host, blobs, base[0])


def _missing(host: Host, blobs: tree.Blobs, commit: str) -> set[str]:
    found = search.find_all(host.needs, tree.Commit(blobs, commit))
    return {name for name, one in found.items() if one.place is None}


def _points(directory: Path, *which: str) -> list[Point]:
    return [Point.of(line) for line in tree.lines(directory, "log", "--format=%H %cs", *which)]


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

"""`python -m mis_plugins hosts check`: what of a host's source our hooks need, found or not."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from mis_plugins.errors import InputError
from mis_plugins.hosts.checkout import flags, history, search, tree
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.registry import HOSTS
from mis_plugins.shared.table import print_table

GOOD, MOVED, FAILS = 0, 1, 2


def run(arguments: argparse.Namespace) -> int:
    """Check a checkout, or walk the history of a git directory."""
    if arguments.history:
        return _history(arguments.checkout, arguments.since)
    return _check(arguments.checkout)


def _check(root: Path) -> int:
    host = _host(name for name in _packages() if (root / name).is_dir())
    if host is None:
        raise InputError(f"no folder {' or '.join(_packages())} in it; give the root of a host's checkout")
    folder = tree.Folder(root)
    found = {name: search.elsewhere(one, folder) for name, one in search.find_all(host.needs, folder).items()}
    print(f"{host.title}: what our hooks need of it")
    print_table(("need", "where", "hooks"), [_row(one) for one in found.values()])
    print()
    hooks = search.hooks_of(found)
    print_table(("hook", "with this checkout"), [(hook, _state(needs)) for hook, needs in hooks.items()])
    missing = flags.unknown(host, root / host.package) if host.records else {}
    for flag, place in missing.items():
        print(f"{flag}: given in {place}, and nothing in {host.package}/ defines it any more")
    if not flags.SCRIPTS.is_dir():
        print(
            "flags: not compared; our launch scripts are not installed, run the command in a checkout of ours"
        )
    return _code(list(found.values()), bool(missing))


def _code(found: Sequence[search.Found], flags_gone: bool) -> int:
    if any(one.place is None for one in found) or flags_gone:
        return FAILS
    return MOVED if any(one.moved for one in found) else GOOD


def _row(one: search.Found) -> tuple[str, str, str]:
    where = f"MISSING: {'; '.join(one.tried)}" if one.place is None else str(one.place)
    return one.need.what, f"{where} (moved)" if one.moved else where, ", ".join(one.need.hooks)


def _state(needs: Sequence[search.Found]) -> str:
    missing = [one.need.what for one in needs if one.place is None]
    if missing:
        return f"FAILS without {', '.join(missing)}"
    return "works, at a new address" if any(one.moved for one in needs) else "works"


def _history(directory: Path, since: str) -> int:
    listed = set(tree.lines(directory, "ls-tree", "--name-only", "HEAD"))
    host = _host(name for name in _packages() if name in listed)
    if host is None:
        raise InputError(
            f"no folder {' or '.join(_packages())} at its HEAD; give the git directory of a host"
        )
    points, courses = history.courses(host, directory, since)
    if not points:
        raise InputError(f"no commit of its main line since {since}")
    number, broken = history.heads(host, directory, since)
    print(
        f"{host.title}: {len(points)} commits of its main line, {points[0]} to {points[-1]}, and {number} stored"
    )
    print("heads of pull requests\n")
    columns = ("need", "answered since", "broke at", "moved at", "pull requests that break it")
    print_table(columns, history.rows(host, courses, broken))
    print()
    print_table(("hook", "works since", "days", "breaks", "moves"), history.lasted(host, points, courses))
    days = history.lifetimes(points, courses)
    print(
        f"\nOne set of addresses answered all needs for {min(days)} to {max(days)} days, {len(days)} sets in all."
    )
    unanswered = any(course.since is None for course in courses.values())
    broke = any(course.broke for course in courses.values())
    return FAILS if unanswered else MOVED if broke else GOOD


def _packages() -> list[str]:
    return list(dict.fromkeys(host.package for host in HOSTS.values() if host.needs is not None))


def _host(packages: Iterable[str]) -> Host | None:
    """The first host of these packages."""
    named = {host.package: host for host in reversed(HOSTS.values()) if host.needs is not None}
    return next((named[package] for package in packages), None)

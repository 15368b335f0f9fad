"""Since which commit of a host each hook of this version works: `hosts check` over its main line, commit by commit.

    python -m lab.served ~/miles ~/slime

Each argument is a checkout with its history. The record keeps what it holds of other versions of ours;
`python -m lab.pages.served` then writes the table of `docs/hosts.md`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.served:main")

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from lab.provenance import parser_of, provenance, tracked, write_json
from mis_plugins import __version__
from mis_plugins.hosts import checkout
from mis_plugins.hosts.checkout import by_package
from mis_plugins.hosts.host import Host
from mis_plugins.shared.provenance import git

RECORD = Path(__file__).parent / "results" / "served.json"
SINCE = "2026-03-01"


@dataclass(frozen=True)
class Commit(checkout.Folder):
    """The source of a host at a commit, in the git directory `root`: parsed from git, never checked out."""

    name: str = "HEAD"

    def module(self, name: str) -> checkout.Module | None:
        path = next((path for path in checkout.paths(name) if path in self.blobs), None)
        return None if path is None else parsed(self.root, self.blobs[path], path, name)

    def modules(self, package: str) -> Iterator[checkout.Module]:
        for path in self.blobs:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if path.startswith(f"{package}/") and (module := self.module(name)) is not None:
                yield module

    @cached_property
    def blobs(self) -> dict[str, str]:
        """Git's name of the content of each Python file, by path."""
        lines = (line.split(maxsplit=3) for line in git(self.root, "ls-tree", "-r", self.name).splitlines())
        return {path: blob for _, _, blob, path in lines if path.endswith(".py")}


@cache
def parsed(root: Path, blob: str, path: str, name: str) -> checkout.Module:
    """A file's syntax; most commits leave most files as they were."""
    return checkout.Module.of(git(root, "cat-file", "blob", blob).encode(), path, name)


def works(host: Host, folder: checkout.Folder) -> set[str]:
    """The hooks whose needs are all found."""
    found = [checkout.find(need, folder) for need in vars(host.needs).values()]
    failing = {hook for one in found if one.place is None for hook in one.need.hooks}
    return {hook for one in found for hook in one.need.hooks} - failing


def served(root: Path) -> tuple[Host, Mapping[str, Any]]:
    """The ends of a host's main line, and for each hook the commit from which it works up to the newest."""
    host = next((host for package, host in by_package().items() if (root / package).is_dir()), None)
    if host is None:
        raise SystemExit(f"{root}: no checkout of {' or '.join(by_package())}; name one with its history")
    form = ("--first-parent", "--reverse", f"--since={SINCE}", "--format=%cs %H")
    points = git(root, "log", *form).splitlines()
    since: dict[str, str] = {}
    for point in tracked(points, host.title):
        now = works(host, Commit(root, name=point.split()[1]))
        since = {hook: since.get(hook, point) for hook in sorted(now)}
    short = {hook: _short(point) for hook, point in since.items()}
    return host, {"from": _short(points[0]), "to": _short(points[-1]), "hooks": short}


def _short(point: str) -> str:
    day, commit = point.split()
    return f"{commit[:9]} of {day}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    found = {host.title: told for host, told in map(served, parser.parse_args().checkouts)}
    versions = json.loads(RECORD.read_text(encoding="utf-8"))["versions"] if RECORD.exists() else {}
    write_json(RECORD, {"measured with": provenance(), "versions": versions | {__version__: found}})
    print(f"wrote {RECORD}")
    return 0

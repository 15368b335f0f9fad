"""`python -m mis_plugins hosts check`: what of a host's source our hooks need, found or not."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from mis_plugins.errors import InputError
from mis_plugins.hosts import arguments as recorded
from mis_plugins.hosts.checkout import search
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.registry import every_host
from mis_plugins.shared.terminal import print_table

GOOD, MOVED, FAILS = 0, 1, 2
SCRIPTS = Path(__file__).parents[3] / "scripts"


def run(arguments: argparse.Namespace) -> int:
    """Check a checkout."""
    root = arguments.checkout
    hosts = by_package()
    host = next((host for package, host in hosts.items() if _is_root(root, package)), None)
    if host is None:
        raise InputError(f"no folder {' or '.join(hosts)} in it; give the root of a host's checkout")
    folder = search.Folder(root)
    findings = {
        name: search.elsewhere(finding, folder) for name, finding in search.find_all(host.needs, folder.module).items()
    }
    print(f"{host.title}: what our hooks need of it")
    print_table(("need", "where", "hooks"), [_row(finding) for finding in findings.values()])
    print()
    hooks = dict.fromkeys(hook for finding in findings.values() for hook in finding.need.hooks)
    print_table(("hook", "with this checkout"), [(hook, _state(hook, findings.values())) for hook in hooks])
    missing = _unknown_flags(host, folder) if host.records else {}
    for flag, place in missing.items():
        print(f"{flag}: given in {place}, and nothing in {host.package}/ defines it any more")
    if not SCRIPTS.is_dir():
        print("flags: not compared; our launch scripts are not installed, run the command in a checkout of ours")
    if missing or any(finding.place is None for finding in findings.values()):
        return FAILS
    return MOVED if any(finding.moved for finding in findings.values()) else GOOD


def _is_root(root: Path, package: str) -> bool:
    """Whether the package lies in this folder, and no checkout of its name, which holds the package."""
    return (root / package).is_dir() and not (root / package / package).is_dir()


def by_package() -> dict[str, Host]:
    """The first host of each package that has a table of needs."""
    first_hosts = dict[str, Host]()
    for host in every_host().values():
        if host.needs is not None:
            first_hosts.setdefault(host.package, host)
    return first_hosts


def _row(finding: search.Found) -> tuple[str, str, str]:
    where = f"MISSING: {'; '.join(finding.tried)}" if finding.place is None else str(finding.place)
    return finding.need.what, f"{where} (moved)" if finding.moved else where, ", ".join(finding.need.hooks)


def _state(hook: str, findings: Iterable[search.Found]) -> str:
    of_hook = [finding for finding in findings if hook in finding.need.hooks]
    missing = [finding.need.what for finding in of_hook if finding.place is None]
    if missing:
        return f"FAILS without {', '.join(missing)}"
    return "works, at a new address" if any(finding.moved for finding in of_hook) else "works"


def given_flags(host: Host) -> dict[str, str]:
    """Flags of the host's own parser that our scripts for it give, and the first place of each."""
    own, places = recorded.flags(host.records[0]), dict[str, str]()
    for script in sorted(SCRIPTS.glob("*.sh")):
        if ("slime" in script.name) != (host.package == "slime"):
            continue
        for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
            words = [] if line.lstrip().startswith("#") else line.split()
            for word in words:
                if word in own:
                    places.setdefault(word, f"scripts/{script.name}:{number}")
    return places


def _unknown_flags(host: Host, folder: search.Folder) -> dict[str, str]:
    """Flags that our scripts give and that nothing in the host's package defines any more."""
    defined = {flag for module in folder.modules(host.package) for flag in _defined(module)}
    return {flag: place for flag, place in given_flags(host).items() if flag not in defined}


def _defined(module: search.Module) -> Iterator[str]:
    """Texts that begin as flags do, and flags of the fields of classes, from which typed arguments are made."""
    for node in (node for statement in module.body for node in ast.walk(statement)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield node.value
        elif isinstance(node, ast.ClassDef):
            yield from (f"--{name.replace('_', '-')}" for name in search.fields(node))

"""Flags of our launch scripts that a host's source no longer defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mis_plugins.hosts import arguments
from mis_plugins.hosts.checkout.module import bound
from mis_plugins.hosts.host import Host

SCRIPTS = Path(__file__).parents[3] / "scripts"


def given(host: Host) -> dict[str, str]:
    """Flags of the host's own parser that our scripts for it give, and the first place of each."""
    own, found = arguments.flags(host.records[0]), dict[str, str]()
    for script in sorted(SCRIPTS.glob("*.sh")):
        if ("slime" in script.name) != (host.package == "slime"):
            continue
        for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
            words = [] if line.lstrip().startswith("#") else line.split()
            for word in words:
                if word in own:
                    found.setdefault(word, f"scripts/{script.name}:{number}")
    return found


def unknown(host: Host, package: Path) -> dict[str, str]:
    """Flags that our scripts give and that nothing in the host's package defines any more."""
    known = set(_defined(package))
    return {flag: place for flag, place in given(host).items() if flag not in known}


def _defined(package: Path) -> Iterator[str]:
    """Texts that begin as flags do, and flags of the fields of classes, from which typed arguments are made."""
    for file in package.rglob("*.py"):
        source = file.read_bytes()
        if b"--" not in source and b"class " not in source:
            continue
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                yield node.value
            elif isinstance(node, ast.ClassDef):
                fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
                yield from (f"--{name.replace('_', '-')}" for each in fields for name in bound(each))

"""The part of `docs/hosts.md` that says since which commit of a host each hook works, by version of this pack.

python -m lab.pages.served
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.served:main")

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lab.pages import parts
from lab.provenance import markdown_table
from lab.served import RECORD


def part(_: str) -> str:
    """A table for each version, the newest first."""
    versions = json.loads(RECORD.read_text(encoding="utf-8"))["versions"]
    told = (text for version in reversed(versions) for text in _version(version, versions[version]))
    return "\n".join(told).rstrip()


def _version(version: str, hosts: Mapping[str, Any]) -> Iterator[str]:
    yield f"**Version {version}**, searched in these commits:\n"
    yield markdown_table(
        ("host", "first commit", "newest commit"), ((title, told["from"], told["to"]) for title, told in hosts.items())
    )
    hooks = dict.fromkeys(hook for told in hosts.values() for hook in told["hooks"])
    rows = ([f"`{hook}`", *(told["hooks"].get(hook, "-") for told in hosts.values())] for hook in hooks)
    yield markdown_table(("hook", *(f"{title} from" for title in hosts)), rows)


def main() -> int:
    """Write the part."""
    return parts.write("hosts.md", part, __doc__)

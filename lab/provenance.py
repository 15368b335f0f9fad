"""What commands of the lab share: a command line, what a figure was measured with, and the record."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mis_plugins.shared.files import write_text
from mis_plugins.shared.provenance import REPOSITORY, commit, cpu_lines, cpu_name, git
from mis_plugins.shared.terminal import steered

T = TypeVar("T")
FLAT = re.compile(r"(?<=[\[{])\n[^][{}]*(?=[\]}])")  # what an innermost list or mapping holds
MEASURED = ("mis_plugins", "true_on_policy", "lab", ":!lab/host", ":!lab/results")


def parser_of(doc: str | None) -> ArgumentParser:
    """Build the command line of a command, whose help begins with the docstring of its module as it stands."""
    return ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table of markdown, one line a row."""
    head, *lines = (f"| {' | '.join(map(str, line))} |\n" for line in (headings, *rows))
    return "".join([head, "|---" * len(headings), "|\n", *lines])


def write_record(path: Path, content: Mapping[str, Any], text: str) -> None:
    """Write a record to `path` as JSON for programs, and to a .md beside it for people, each whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    write_text(path.with_suffix(".md"), text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is complete whenever it exists, an innermost list or mapping on one line."""
    text = json.dumps(content, indent=1)
    write_text(path, FLAT.sub(lambda inside: re.sub(r"\n\s*", " ", inside[0]).strip(), text) + "\n")


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """Describe this run by `measured_with`, for the code that the lab measures."""
    path = Path(sys.argv[0]).resolve()
    inside = path.with_suffix("").relative_to(REPOSITORY).parts if path.is_relative_to(REPOSITORY) else (path.stem,)
    name = ".".join(part for part in inside if part != "__main__")
    command = as_given(f"python -m {name}", sys.argv[1:])
    return measured_with(command, MEASURED, checkouts)


def target(text: str) -> Path:
    """Parse the file for the figures; a file that cannot be written is refused before minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written; name a file in a folder that is there")
    return path


def measured_with(command: str, measured: Sequence[str], checkouts: Mapping[str, Path] | None = None) -> dict[str, str]:
    """The command, versions, commits and processor that somebody needs to repeat a figure.

    Args:
        measured: git's paths of the code that the figures follow from; uncommitted changes there are told.
        checkouts: any folder of each other repository, by the repository's name.
    """
    cores = sum(line.startswith("processor") for line in cpu_lines())
    found = {"command": command, "python": platform.python_version(), "cpu": f"{cpu_name()}, {cores} cores"}
    found |= {name: _version(name) for name in ("torch", "megatron-core")}
    found["mis-plugins commit"] = commit(REPOSITORY, measured)
    return found | {f"{name} commit": commit(_top(path), (".",)) for name, path in (checkouts or {}).items()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def as_given(program: str, words: Sequence[str]) -> str:
    """A command as a shell reads it, with absolute paths cut to their last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return " ".join([program, *map(shlex.quote, shown)])


def as_markdown(found: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in found.items() if key != "command")
    return f"```\n{found['command']}\n```\n\n| measured with | |\n|---|---|\n{rows}\n"


def committed_tree(folder: str) -> str | None:
    """Git's name of a folder's content at HEAD; None where the folder holds changes that no commit has."""
    changed = git(REPOSITORY, "status", "--porcelain", "--", folder)
    return None if changed else git(REPOSITORY, "rev-parse", "--quiet", "--verify", f"HEAD:{folder}") or None


def _top(folder: Path) -> Path:
    """Top folder of the repository that holds a folder; the folder itself where no repository does."""
    return Path(git(folder, "rev-parse", "--show-toplevel") or folder)


def tracked(items: Sequence[T], what: str, silent: bool = False) -> Iterable[T]:
    """Yield the items, under a bar that rich draws on stdout."""
    from rich.console import Console  # of the extra `local`
    from rich.progress import track

    return track(items, what, console=Console(file=steered(sys.stdout)), disable=silent)

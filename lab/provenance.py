"""What commands of the lab share: a command line, what a figure was measured with, and the record."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mis_plugins.shared.files import write_text
from mis_plugins.shared.provenance import as_given, as_markdown, measured_with

__all__ = ["as_markdown", "markdown_table", "parser_of", "provenance", "target", "write_record"]

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
    write_text(path, json.dumps(content, indent=1) + "\n")
    write_text(path.with_suffix(".md"), text)


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """Describe this run by `measured_with`, for the code that the lab measures."""
    command = as_given(f"python -m lab.{Path(sys.argv[0]).stem}", sys.argv[1:])
    return measured_with(command, MEASURED, checkouts)


def target(text: str) -> Path:
    """Parse the file for the figures; a file that cannot be written is refused before minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written; name a file in a folder that is there")
    return path

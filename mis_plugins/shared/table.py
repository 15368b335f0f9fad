"""Tables for a terminal: drawn by rich where rich is installed and stdout is a terminal, plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, one line a row. Plain text cuts off no column."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(columns, cells):
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """Text without control characters: names come from foreign files and must not steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Print a table by rich; false if rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return True

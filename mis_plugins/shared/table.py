"""Tables for a terminal: rich's where it is installed and someone looks, plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One line a row; the first column may be anything, none is cut off in plain text."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(columns, cells):
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """Names come from files of others: no control characters reach the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """False if rich is not installed."""
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

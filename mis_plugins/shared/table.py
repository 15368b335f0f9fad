"""Tables for a terminal: drawn by rich where rich is installed and stdout is a terminal, plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mis_plugins.shared.terminal import printable, steered


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, one line a row. Plain text cuts off no column."""
    lines = [[printable(str(cell)) for cell in line] for line in (columns, *rows)]
    if sys.stdout.isatty() and _print_rich(lines):
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_rich(lines: Sequence[Sequence[str]]) -> bool:
    """Print a table by rich, its first line as titles; false if rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False)
    for title in lines[0]:  # as Text: of a plain string rich would read `[link=...]` as markup
        table.add_column(Text(title))
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    Console(file=steered(sys.stdout)).print(table)
    return True

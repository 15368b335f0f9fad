"""What a terminal shows: text of strangers that steers nothing, tables, and the progress of long work.

Names and texts of strangers' files are shown on a page by the same escapes.
"""

import functools
import io
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, TypeVar

UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode's categories of what steers or hides: controls, bidi and zero width, surrogates, private use, unassigned,
and separators of lines and paragraphs."""
BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0" + "".join(map(chr, range(0xE0100, 0xE01F0)))
"""Letters and marks without a glyph, which hide text in a name."""


def printable(text: str, keep: str = "") -> str:
    """Text in which every character is seen: one that steers a terminal, or has no glyph, becomes its escape.

    ESC becomes `\\x1b`, a bidi override `\\u202e`, a lone surrogate `\\udcff`, and a line break `\\n`. So the text is
    one line, can be encoded, and stays what it is when escaped twice. Control characters in `keep` stay, such as the
    line breaks of a text of several lines.
    """
    return text.translate(_escapes(keep))


def print_error(message: str) -> None:
    """Print an error on stderr. Lines after the first are indented, so that no name in it passes for another error."""
    print(printable(message.rstrip("\n"), keep="\n").replace("\n", "\n  "), file=sys.stderr)


class Shown(io.TextIOWrapper):
    """A standard stream in which whatever a command or a library prints is `printable`: no print can forget it."""

    def write(self, text: str, /) -> int:
        super().write(printable(text, keep="\n\t"))
        return len(text)


def steered(stream: Any) -> Any:
    """A standard stream for rich, which colours and redraws by escapes. Foreign text goes there as `Text` alone."""
    return _Steered(stream) if isinstance(stream, Shown) else stream


class _Steered:
    def __init__(self, stream: Shown):
        self.write: Callable[[str], int] = functools.partial(io.TextIOWrapper.write, stream)
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Escapes(dict[int, str]):
    """What `str.translate` writes for each character, made when a text first holds the character."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        unseen = unicodedata.category(character) in UNSEEN or character in BLANK
        self[code] = character.encode("unicode_escape").decode() if unseen else character
        return self[code]


@functools.cache
def _escapes(keep: str) -> _Escapes:
    return _Escapes((ord(character), character) for character in keep)


T = TypeVar("T")
SECONDS = 2.0


def tell(what: str) -> None:
    """Print on stderr what happens now, at once, so that a user sees why nothing else is printed yet."""
    print(what, file=sys.stderr, flush=True)


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items, and print every two seconds on stderr how many of them are done."""
    printed, total = time.monotonic(), f" of {len(items)}" if isinstance(items, Sized) else ""
    for done, item in enumerate(items):
        if time.monotonic() - printed >= SECONDS:
            tell(f"{done}{total} {what}")
            printed = time.monotonic()
        yield item


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

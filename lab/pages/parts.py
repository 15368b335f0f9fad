"""Pages whose prose is written by hand: a part that is made lies between two comments, the first of which names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lab.provenance import parser_of

DOCS = Path(__file__).parents[2] / "docs"
END = "<!-- end of what was made -->"
PART = re.compile(rf"<!-- made: (\S+) -->\n.*?{END}", re.DOTALL)
Maker = Callable[[str], str]


def filled(text: str, maker: Maker) -> str:
    """The page with each of its parts made anew, by name."""
    return PART.sub(lambda found: f"<!-- made: {found[1]} -->\n\n{maker(found[1])}\n\n{END}", text)


def named(page: str) -> list[str]:
    """The parts that a page has, in its order."""
    return PART.findall((DOCS / page).read_text(encoding="utf-8"))


def current(page: str, maker: Maker) -> bool:
    """Whether a page holds what would be made now."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return filled(text, maker) == text


def write(page: str, maker: Maker, command: str | None) -> int:
    """Make the parts of a page anew; `command` describes the command line, which has no options."""
    parser_of(command).parse_args()
    path = DOCS / page
    path.write_text(filled(path.read_text(encoding="utf-8"), maker), encoding="utf-8")
    print(f"wrote {path}")
    return 0

"""The parser of bash, tree-sitter's, with guards against what it gets wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from mis_plugins.errors import ConfigError
from mis_plugins.shared.shell import not_installed

if TYPE_CHECKING:
    from tree_sitter import Language, Node, Query

OLDEST = (0, 26, 1)  # in an older one every progress callback ends the process, before Python 3.14
# Behind a brace the parser looks a character up in C's table of 256, also one that the table does not hold.
LOOKED_UP = re.compile(r"(\{[0-9]*(?:\.\.[0-9]*)?)([^\x00-\xff])")
# Behind a line of several assignments the parser takes a keyword for a command, and loses where the branch ends.
LOST = '((command_name (word) @word) (#any-of? @word "then" "elif" "else" "fi" "do" "done" "esac"))'


def parsed(script: str, is_over: Callable[[], bool]) -> tuple[Node, list[Node]]:
    """The tree of a script, and the keywords in it that the parser took for commands.

    Args:
        is_over: asked while the parser works; True stops it.

    Raises:
        ConfigError: the parser is not installed, is too old, or was stopped.
    """
    try:
        import tree_sitter
        import tree_sitter_bash
    except ModuleNotFoundError as error:
        raise ConfigError(not_installed(error, "scripts")) from None
    check_version()
    language = tree_sitter.Language(tree_sitter_bash.language())
    # The parser reads letters in place of what it would look up. Nodes read their text later, by the same function.
    read = LOOKED_UP.sub(lambda found: found[1] + "x" * len(found[2].encode()), script).encode()

    def piece(begin: int, _: object) -> bytes:
        return read[begin : begin + 4096]

    try:
        tree = tree_sitter.Parser(language).parse(piece, progress_callback=lambda *_: is_over())
    except ValueError:
        raise ConfigError("bash's parser finds no end; give the part that starts train.py") from None
    read = script.encode()
    return tree.root_node, tree_sitter.QueryCursor(_lost(language)).captures(tree.root_node).get("word", [])


@cache
def check_version() -> None:
    """Refuse a parser that crashes.

    Raises:
        ConfigError: it is older than `OLDEST`.
    """
    installed = version("tree-sitter")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        raise ConfigError(f"tree-sitter {installed} crashes while it parses; pip install 'tree-sitter>=0.26.1'")


@cache
def _lost(language: Language) -> Query:
    from tree_sitter import Query

    return Query(language, LOST)

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

OLDEST = "0.26.1"  # an older one ends the process where it is asked to stop, below Python 3.14
# Behind a brace the parser looks a character up in a table of 256, even one that the table does not hold.
LOOKED_UP = re.compile(r"(\{[0-9]*(?:\.\.[0-9]*)?)([^\x00-\xff])")
# A comment in backticks within a command that goes on, of which bash makes no word; the parser finds no end to it.
WITHIN = re.compile(rb"(?:(?<=[ \t])|^)`#[^`\n]*`(?=[ \t]*\\?\n)", re.M)
# A command whose last line goes on where the script ends, which is an error to the parser and none to bash.
LAST = re.compile(rb"(?<!\\)\\((?:\n\s*)?)\Z")
# Behind a line of several assignments the parser takes a keyword for a command, and loses where the branch ends.
KEYWORDS = '((command_name (word) @word) (#any-of? @word "then" "elif" "else" "fi" "do" "done" "esac"))'


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
    parser = tree_sitter.Parser(language)
    # The parser reads letters in place of what it would look up; nodes get the text of the script as it is.
    script = WITHIN.sub(lambda match: b" " * len(match[0]), LAST.sub(rb" \1", script.encode())).decode()
    source = bytearray(LOOKED_UP.sub(lambda match: match[1] + "x" * len(match[2].encode()), script).encode())
    # The parser can be stopped only where it asks for pieces. Nodes are safe to read only where it had the whole: a
    # function that fails while a node asks it for text ends the process.
    try:
        parser.parse(lambda at, _: bytes(source[at : at + 4096]), progress_callback=lambda *_: is_over())
    except ValueError:
        raise ConfigError("bash's parser finds no end; give the part that starts train.py") from None
    tree = parser.parse(source)
    source[:] = script.encode()
    lost = tree_sitter.QueryCursor(_keywords(language)).captures(tree.root_node).get("word", [])
    return tree.root_node, sorted(lost, key=lambda keyword: keyword.start_byte)


@cache
def check_version() -> None:
    """Refuse a parser that crashes.

    Raises:
        ConfigError: it is older than `OLDEST`.
    """
    installed = version("tree-sitter")
    if _numbers(installed) < _numbers(OLDEST):
        raise ConfigError(f"tree-sitter {installed} crashes while it parses; pip install 'tree-sitter>={OLDEST}'")


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:3]]


@cache
def _keywords(language: Language) -> Query:
    from tree_sitter import Query

    return Query(language, KEYWORDS)

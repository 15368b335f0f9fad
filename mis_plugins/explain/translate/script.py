"""Launch scripts: the words of each command as a shell splits them, with the variables that the script itself sets.

A variable is replaced where its value is sure: one plain assignment outside of `if`, loops and functions. Any
other variable stays in the word as the user wrote it, for an error to quote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from mis_plugins.errors import ConfigError

COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
CONTINUED = re.compile(r"\\\r?\n")
ASSIGNMENT = re.compile(
    r"\s*(?:(?:export|readonly|declare)\s+)?(?P<name>\w+)=(?P<value>\"[^\"`\\]*\"|'[^']*'|[^\s\"'`\\;&|()<>]*)\s*;?\s*"
)
ASSIGNED = re.compile(r"(?<![\w.$/{-])(\w+)(?:\[[^\]]*\])?(?:[-+*/%]?=(?!=)|\+\+|--)")
BY_DEFAULT = re.compile(r"\$\{(\w+):?=")
BY_COMMAND = re.compile(r"\b(?:for|select|read|unset|mapfile|readarray|getopts|let|printf\s+-v)\b([^;|&\n]*)")
READS_ANOTHER = re.compile(r"(?:^|[;&|])\s*(?:source|\.|eval)\s")
ONLY_PRINTS = re.compile(r"\s*echo\s[^;&|`]*")
OPENS = re.compile(r"(?<![\w.-])(?:if|for|while|until|case|select)(?![\w.=-])|[({]\s*$")
CLOSES = re.compile(r"(?:^|;)\s*(?:(?:fi|done|esac)\b|[)}])")
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
PLAIN = re.compile(r"[\w.,:/+@%=-]*")
QUOTED = re.compile(r"\\.|'[^']*'|\"(?P<inner>(?:\\.|[^\"\\])*)\"|\$(?:\{(?P<braced>\w+)\}|(?P<bare>\w+))")
IN_QUOTES = re.compile(r"\\.|\$(?:\{(?P<braced>\w+)\}|(?P<bare>\w+))")


def without_comments(text: str) -> str:
    return COMMENT.sub("", text)


def commands(script: str, relevant: re.Pattern[str]) -> Iterator[list[str]]:
    """The words of each line that can be split; lines that a backslash continues are one.

    Raises:
        ConfigError: a line that says something relevant and cannot be split.
    """
    lines = CONTINUED.sub(" ", without_comments(script)).splitlines()
    sure = _sure(lines)
    known: dict[str, str] = {}
    for line, plain in zip(lines, sure, strict=True):
        if READS_ANOTHER.search(line):
            known.clear()
        if plain is not None:
            _assign(known, *plain)
        yield _words(_expanded(line, known), relevant)


def _assign(known: dict[str, str], name: str, value: str) -> None:
    """Keep the value of a variable, or forget it where another variable in it is not known."""
    literal = value[1:-1] if value.startswith("'") else _expanded(value, known).strip('"')
    known.pop(name, None)
    if PLAIN.fullmatch(literal):
        known[name] = literal


def _sure(lines: list[str]) -> list[tuple[str, str] | None]:
    """For each line the variable that the line surely sets and the text of its value, or None."""
    plain: list[tuple[str, str] | None] = []
    unsure: set[str] = set()
    depth, heredoc = 0, ""
    for line in lines:
        found = ASSIGNMENT.fullmatch(line) if depth == 0 and not heredoc else None
        plain.append((found["name"], found["value"]) if found else None)
        if not found:
            unsure |= _set_somehow(line)
        depth = max(0, depth + len(OPENS.findall(line)) - len(CLOSES.findall(line)))
        begun = HEREDOC.search(line)
        heredoc = "" if line.strip() == heredoc else heredoc or (begun[1] if begun else "")
    return [None if said and said[0] in unsure else said for said in plain]


def _set_somehow(line: str) -> set[str]:
    """The variables that a line may set in other ways than by one plain assignment."""
    if ONLY_PRINTS.fullmatch(line):
        return set(BY_DEFAULT.findall(line))
    by_command = " ".join(BY_COMMAND.findall(line))
    return {*ASSIGNED.findall(line), *BY_DEFAULT.findall(line), *re.findall(r"\w+", by_command)}


def _expanded(line: str, known: dict[str, str]) -> str:
    """The line with the values of known variables, but within single quotes, where a shell leaves them."""

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        return known.get(name, found[0]) if name else found[0]

    def piece(found: re.Match[str]) -> str:
        inner = found["inner"]
        return value(found) if inner is None else '"' + IN_QUOTES.sub(value, inner) + '"'

    return QUOTED.sub(piece, line)


def _words(line: str, relevant: re.Pattern[str]) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        if relevant.search(line):
            raise ConfigError(
                f"{line.strip()!r}: {error}; give the flags of this line without the rest"
            ) from None
        return []  # one line of a quotation that spans several lines

"""Launch scripts: the words of each command as a shell splits them, with the variables that the script itself sets.

A variable is replaced where its value is sure: one plain assignment outside of `if`, loops and functions. Any
other variable stays in the word as the user wrote it, for an error to quote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator

from mis_plugins.errors import ConfigError
from mis_plugins.shared.budget import EXPANDED
from mis_plugins.shared.numerals import cut, shown

COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
CONTINUED = re.compile(r"\\\r?\n")
ASSIGNMENT = re.compile(
    r"\s*(?:(?:export|readonly|declare)\s+)?(?P<name>\w+)=(?P<value>\"[^\"`\\]*\"|'[^']*'|[^\s\"'`\\;&|()<>]*)\s*+;?\s*+"
)
ASSIGNED = re.compile(r"(?<![\w.$/{-])(\w+)(?:\[[^\]]{0,80}\])?(?:[-+*/%]?=(?!=)|\+\+|--)")
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


def commands(script: str, relevant: Callable[[str], object]) -> Iterator[list[str]]:
    """The words of each line that can be split; lines that a backslash continues are one.

    Raises:
        ConfigError: a line that says something relevant and cannot be split.
        RecordError: the variables are longer than the script's budget.
    """
    lines = CONTINUED.sub(" ", without_comments(script)).splitlines()
    sure = _sure(lines)
    variables = Variables(len(script))
    for line, plain in zip(lines, sure, strict=True):
        if READS_ANOTHER.search(line):
            variables.known.clear()
        if plain is not None:
            variables.assign(*plain)
        yield _words(variables.expand(line), relevant)


class Variables:
    """The variables of a script whose values are known."""

    def __init__(self, size: int):
        """`size` is the length of the script, by which `EXPANDED` bounds what all its expansions put in."""
        self.known: dict[str, str] = {}
        self.size, self.letters = size, 0

    def assign(self, name: str, value: str) -> None:
        """Keep the value of a variable, or forget it where another variable in it is not known."""
        literal = value[1:-1] if value.startswith("'") else self.expand(value).strip('"')
        self.known.pop(name, None)
        if PLAIN.fullmatch(literal):
            self.known[name] = literal

    def expand(self, line: str) -> str:
        """The line with the values of known variables, but within single quotes, where a shell leaves them.

        Raises:
            RecordError: all lines so far expand to more letters than the budget.
        """
        return QUOTED.sub(self._piece, line)

    def _piece(self, found: re.Match[str]) -> str:
        inner = found["inner"]
        return self._value(found) if inner is None else '"' + IN_QUOTES.sub(self._value, inner) + '"'

    def _value(self, found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        value = self.known.get(name, found[0]) if name else found[0]
        self.letters += len(value) if name else 0
        EXPANDED.check(self.letters, self.size, f"the variable {cut(name or '')}")
        return value


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


def _words(line: str, relevant: Callable[[str], object]) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        if relevant(line):
            raise ConfigError(
                f"{shown(line.strip())}: {error}; give the flags of this line without the rest"
            ) from None
        return []  # one line of a quotation that spans several lines

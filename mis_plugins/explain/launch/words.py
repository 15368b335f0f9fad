"""Texts of a launch script as far as they are known, and the words that a shell makes of them."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

HOLE = "\ue000"  # stands for a part that is not known; a letter of no alphabet, and of no meaning to a shell
COMMAND_LINE = 0  # the line of what the user gave to the script
Lines = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    text: None where only running the script would tell.
    source: what the script says in that place, for a part that is not known.
    lines: the first and the last line of the literal.
    branch: the condition under which the part is there; None is always.
    span: the bytes of the word in a shell script, where the script says it as one literal.
    at: where the literal stands: the number of the text among the script and what it sources, and its bytes.
    """

    text: str | None
    source: str = ""
    lines: Lines = (COMMAND_LINE, COMMAND_LINE)
    branch: str | None = None
    span: tuple[int, int] | None = None
    at: tuple[int, int, int] | None = None


Text = tuple[Piece, ...]


def literal(text: str, lines: Lines = (COMMAND_LINE, COMMAND_LINE)) -> Text:
    return (Piece(text, lines=lines),) if text else ()


def hole(source: str, lines: Lines = (COMMAND_LINE, COMMAND_LINE)) -> Text:
    return (Piece(None, source, lines),)


def known(text: Text) -> str | None:
    """The whole text, or None where a part is not known or not sure."""
    parts = [piece.text for piece in text if piece.text is not None and not piece.branch]
    return "".join(parts) if len(parts) == len(text) else None


def shown(text: Text) -> str:
    """The text with what the script says where a part is not known."""
    return "".join(piece.source if piece.text is None else piece.text for piece in text)


def under(text: Text, branch: str) -> Text:
    return tuple(replace(piece, branch=piece.branch or branch) for piece in text)


def spaced(words: Iterable[Text]) -> Text:
    """Words in one text, with a blank between each two, which is no surer than they are."""
    pieces: list[Piece] = []
    for count, word in enumerate(words):
        branch = next((piece.branch for piece in (*pieces[-1:], *word) if piece.branch), None)
        pieces += [Piece(" ", branch=branch), *word] if count else word
    return tuple(pieces)


def in_quotes(words: Iterable[Text], lines: Lines) -> Text:
    """The words of a list as one command line of a shell."""
    ends = Piece("'", lines=lines), Piece("' ", lines=lines)
    escaped = ([replace(part, text=part.text and part.text.replace("'", r"'\''")) for part in word] for word in words)
    return tuple(piece for word in escaped for piece in (ends[0], *word, ends[1]))


def fields(text: Text, blanks: str = "[ \t\n]") -> list[Text]:
    """The words of a text, cut at blanks."""
    words: list[list[Piece]] = [[]]
    for piece in text:
        first, *more = re.split(blanks, piece.text or "")
        words[-1] += [replace(piece, text=first)] if first else [piece] if piece.text is None else []
        words += [[replace(piece, text=part)] if part else [] for part in more]
    return [tuple(part) for part in words if part]


@dataclass(frozen=True)
class Word:
    """One argument of a command.

    text: with `HOLE` where a part is not known.
    source: as the script says it.
    span: the bytes of the word in a shell script, where it stands there as one literal.
    in_config: whether it is no word of the command, but a value of the config file.
    """

    text: str
    source: str
    lines: Lines = (COMMAND_LINE, COMMAND_LINE)
    branch: str | None = None
    span: tuple[int, int] | None = None
    in_config: bool = False

    @property
    def is_known(self) -> bool:
        return HOLE not in self.text

    @property
    def place(self) -> str:
        first, last = self.lines
        if not first:
            outside = "given on the command line, outside this script, or in a text that it runs"
            return "in the config file" if self.in_config else outside
        return f"line {first}" if first == last else f"lines {first} to {last}"

    @property
    def behind_equals(self) -> "Word":
        """The value of KEY=VALUE."""
        parts = self.text.partition("=")[2], self.source.partition("=")[2]
        return replace(self, text=parts[0], source=parts[1], span=None)


def word_of(text: Text) -> Word:
    """A word of a text; parts that branches give are not known, and are told with the branches."""
    branches, spans = {piece.branch for piece in text}, {piece.span for piece in text}
    if len(branches) > 1:
        groups = groupby(text, lambda part: part.branch is not None)
        text = tuple(piece for is_open, part in groups for piece in (_alternatives(tuple(part)) if is_open else part))
    lines = text[0].lines if text else (COMMAND_LINE, COMMAND_LINE)
    branch = next(iter(branches)) if len(branches) == 1 else None
    span = next(iter(spans)) if len(spans) == 1 else None
    return Word(with_holes(text), shown(text), lines, branch, span)


def _alternatives(text: Text) -> Text:
    source = " or ".join(f"{shown((piece,))} (if {piece.branch})" for piece in text)
    return hole(source, text[0].lines)


def flags_of(words: Sequence[Word], short: Sequence[str] = ()) -> Iterator[tuple[str, Word, Word | None]]:
    """Each flag of a command, or of `short` with one dash, with its word, and its value or None."""
    for word, after in pairwise([*words, None]):
        flag, equals, _ = word.text.partition("=") if word else ("", "", "")
        if word and (flag.startswith("--") or flag in short):
            stands_alone = after is None or after.text.startswith("--")
            yield flag, word, word.behind_equals if equals else None if stands_alone else after


def with_holes(text: Text) -> str:
    return "".join(HOLE if piece.text is None else piece.text for piece in text)


def with_places(words: Iterable[Word], text: Text) -> Iterator[Word]:
    """The words of the command line `text`, each with the lines and the branch of the pieces that it comes from."""
    ends = list(accumulate(len(with_holes((piece,)).encode()) for piece in text))
    for word in words:
        begin, end = word.span or (0, 0)
        pieces = text[bisect_right(ends, begin) : bisect_left(ends, end) + 1]
        holes = iter([piece.source for piece in pieces if piece.text is None])
        source = "".join(next(holes, "?") if letter == HOLE else letter for letter in word.text)
        branches = {piece.branch for piece in pieces if piece.text is None or piece.text.strip()}
        branch = next(iter(branches)) if len(branches) == 1 else None
        lines = next((piece.lines for piece in pieces), word.lines)
        yield Word(word.text if len(branches) < 2 else HOLE, source, lines, branch)

"""Texts of a launch script as far as they are known, and the words that a shell makes of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mis_plugins.shared.budget import VALUES, Clock

HOLE = "\ue000"  # stands for a part that is not known; a letter of no alphabet, and of no meaning to a shell
COMMAND_LINE = 0  # the line of what the user gave to the script


@dataclass(frozen=True)
class Piece:
    """A part of a text.

    text: None where only running the script would tell.
    source: what the script says in that place, for a part that is not known.
    lines: the first and the last line of the literal.
    branch: the condition under which the part is there; None is always.
    """

    text: str | None
    source: str = ""
    lines: tuple[int, int] = (COMMAND_LINE, COMMAND_LINE)
    branch: str | None = None


Text = tuple[Piece, ...]


def known(text: Text) -> str | None:
    """The whole text, or None where a part is not known or not sure."""
    parts = [piece.text for piece in text]
    if any(part is None for part in parts) or any(piece.branch for piece in text):
        return None
    return "".join(part for part in parts if part is not None)


def shown(text: Text) -> str:
    """The text with what the script says where a part is not known."""
    return "".join(piece.source if piece.text is None else piece.text for piece in text)


def literal(text: str, lines: tuple[int, int]) -> Text:
    return (Piece(text, lines=lines),) if text else ()


def joined(one: Text, other: Text, branch: str) -> Text:
    """The text of a place that either branch may have reached: what both begin with is sure."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count] + under(one[count:], branch) + under(other[count:], f"not: {branch}")


def under(text: Text, branch: str) -> Text:
    return tuple(replace(piece, branch=piece.branch or branch) for piece in text)


@dataclass(frozen=True)
class Word:
    """One argument of a command.

    text: with `HOLE` where a part is not known.
    source: as the script says it.
    span: the bytes of the word in a shell script, where it stands there as one literal.
    """

    text: str
    source: str
    lines: tuple[int, int]
    branch: str | None = None
    span: tuple[int, int] | None = None

    @property
    def is_known(self) -> bool:
        return HOLE not in self.text


def with_places(words: Iterable[Word], text: Text) -> list[Word]:
    """The words of a command line, each with the lines and branch of the pieces that it comes from.

    Args:
        words: whose spans count bytes of the command line.
        text: the command line; its pieces follow one another.
    """
    ends = list(accumulate(len((piece.text if piece.text is not None else HOLE).encode()) for piece in text))
    return [_placed(word, text, ends) for word in words]


def _placed(word: Word, text: Text, ends: Sequence[int]) -> Word:
    begin, end = word.span or (0, 0)
    pieces = text[bisect_right(ends, begin) : bisect_left(ends, end) + 1]
    holes = iter([piece.source for piece in pieces if piece.text is None])
    source = "".join(next(holes, "?") if letter == HOLE else letter for letter in word.text)
    lines = next((piece.lines for piece in pieces), word.lines)
    branches = {piece.branch for piece in pieces if piece.text is None or piece.text.strip()}
    branch = next(iter(branches)) if len(branches) == 1 else None
    return Word(word.text if len(branches) < 2 else HOLE, source, lines, branch)


@dataclass
class Reading:
    """What reading one script costs, and what the reader could not tell.

    unread: parts that only running the script would tell, by the line where they stand.
    assumed: what was taken for granted, in words.
    files: texts that the script writes, by the name of the file.
    ended: where the script stops before its end, in words.
    """

    size: int
    where: str
    unread: dict[int, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    files: dict[str, Text] = field(default_factory=dict)
    spent: int = 0
    ended: str = ""

    def __post_init__(self) -> None:
        self.clock = Clock(self.size, self.where)

    def spend(self, amount: int = 1) -> None:
        """Count steps, letters and words against the budget.

        Raises:
            RecordError: the script asks for more than its budget, or takes longer.
        """
        self.spent += amount
        VALUES.check(self.spent, self.size, self.where)
        if amount > 1 or self.spent % 256 == 0:
            self.clock.check()

    def assume(self, told: str) -> None:
        if told not in self.assumed:
            self.assumed.append(told)


@dataclass(frozen=True)
class Launch:
    """One start of train.py.

    line: where the script starts it.
    words: what follows train.py.
    hosts: names of hosts that the script imports or whose folder it names.
    place: where further flags can be written, for `change`; zeros are nowhere.
    branch: the condition under which the script starts it; None is always.
    in_python: whether the script is in Python; `place` then is the expression of the flags.
    """

    line: int
    words: tuple[Word, ...]
    hosts: frozenset[str]
    place: tuple[int, int]
    branch: str | None = None
    in_python: bool = False


def is_train(word: str) -> bool:
    """Whether a word names the file that trains, of either host."""
    return word.rpartition("/")[2] in ("train.py", "train_async.py")


def after_train(words: Iterable[Word]) -> tuple[Word, ...] | None:
    """What follows train.py in a command; None where the command does not name it."""
    listed = list(words)
    for index, word in enumerate(listed):
        if is_train(word.text):
            return tuple(listed[index + 1 :])
    return None

"""Texts of a launch script as far as they are known, the words that a shell makes of them, and branches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.shared.budget import VALUES, Clock

HOLE = "\ue000"  # stands for a part that is not known; a letter of no alphabet, and of no meaning to a shell
PACKAGES = {"miles", "slime", "vime"}  # of the hosts whose launch scripts are read
COMMAND_LINE = 0  # the line of what the user gave to the script
DEEPEST = 32  # functions, sourced files and evaluated texts within one another
Lines = tuple[int, int]
Joined = dict[tuple[int, int], tuple[Any, Any, Any]]  # of two branches: the values of either, and both in one
Clause = tuple[str, bool | None, Callable[[], object]]  # a condition, whether it holds where that is known, the work


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


def cost(text: Text) -> int:
    return 1 + sum(1 + len(piece.text or "") for piece in text)


def spaced(words: Iterable[Text]) -> Text:
    """Words in one text, with a blank between each two."""
    pieces = [piece for word in words for piece in (*word, Piece(" "))]
    return tuple(pieces[:-1])


def fields(text: Text) -> list[Text]:
    """The words of a text, cut at blanks."""
    found: list[list[Piece]] = [[]]
    for piece in text:
        first, *more = (piece.text or "").replace("\t", " ").replace("\n", " ").split(" ")
        found[-1] += [replace(piece, text=first)] if first else [piece] if piece.text is None else []
        found += [[replace(piece, text=part)] if part else [] for part in more]
    return [tuple(part) for part in found if part]


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
    def behind_equals(self) -> Word:
        """The value of KEY=VALUE."""
        parts = self.text.partition("=")[2], self.source.partition("=")[2]
        return replace(self, text=parts[0], source=parts[1], span=None)


def word_of(text: Text) -> Word:
    """A word of a text; parts that branches give are not known, and are told with the branches."""
    branches, spans = {piece.branch for piece in text}, {piece.span for piece in text}
    if len(branches) > 1:
        text = tuple(
            piece
            for is_open, pieces in groupby(text, lambda one: one.branch is not None)
            for piece in (_alternatives(tuple(pieces)) if is_open else pieces)
        )
    lines = text[0].lines if text else (COMMAND_LINE, COMMAND_LINE)
    branch = next(iter(branches)) if len(branches) == 1 else None
    span = next(iter(spans)) if len(spans) == 1 else None
    return Word(with_holes(text), shown(text), lines, branch, span)


def _alternatives(text: Text) -> Text:
    said = " or ".join(f"{shown((piece,))} (if {piece.branch})" for piece in text)
    return hole(said, text[0].lines)


def flags_of(words: Sequence[Word], short: Sequence[str] = ()) -> Iterator[tuple[str, Word, Word | None]]:
    """Each flag of a command with its word and its value, `--flag VALUE` or `--flag=VALUE`; None where it has none.

    Args:
        short: flags with one dash.
    """
    for word, after in pairwise([*words, None]):
        flag, equals, _ = word.text.partition("=") if word else ("", "", "")
        if word and (flag.startswith("--") or flag in short):
            stands_alone = after is None or after.text.startswith("--")
            yield flag, word, word.behind_equals if equals else None if stands_alone else after


def with_holes(text: Text) -> str:
    return "".join(HOLE if piece.text is None else piece.text for piece in text)


def with_places(words: Iterable[Word], text: Text) -> Iterator[Word]:
    """The words of a command line, each with the lines and branch of the pieces that it comes from.

    Args:
        words: whose spans count bytes of the command line.
        text: the command line; its pieces follow one another.
    """
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


@dataclass
class Reading:
    """What reading one script costs, and what the reader could not tell.

    unread: parts that only running the script would tell, by the line where they stand.
    assumed: what was taken for granted, in words.
    files: texts that the script writes, by the name of the file.
    handed: words that a launcher in Python hands to functions that it imports, which may write a file of that name.
    ended: where the script stops before its end, in words.
    """

    size: int
    where: str
    unread: dict[int, str] = field(default_factory=dict)
    assumed: dict[str, None] = field(default_factory=dict)
    files: dict[str, Text] = field(default_factory=dict)
    handed: set[str] = field(default_factory=set)
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

    def paid(self, text: Text) -> Text:
        self.spend(cost(text))
        return text

    def assume_unset(self, name: str) -> None:
        self.assumed[f"{'$' * name.isdigit()}{name} is not set"] = None


@dataclass(frozen=True)
class Launch:
    """One start of train.py.

    line: where the script starts it.
    words: what follows train.py.
    hosts: names of hosts that the script imports or whose folder it names.
    place: where further flags can be written, for a diff; zeros are nowhere.
    branch: the condition under which the script starts it; None is always.
    in_python: whether the script is in Python; `place` then is the expression of the flags.
    folder: where the script has changed to, as it says it; empty where it has not.
    """

    line: int
    words: tuple[Word, ...]
    hosts: frozenset[str]
    place: tuple[int, int]
    branch: str | None = None
    in_python: bool = False
    folder: str = ""


def any_of(found: Sequence[bool | None]) -> bool | None:
    """Whether one of some conditions holds; None where that is not known."""
    return True if True in found else None if None in found else False


def all_of(found: Sequence[bool | None]) -> bool | None:
    return False if False in found else None if None in found else True


def is_train(word: str) -> bool:
    """Whether a word names the file that trains, of either host."""
    return word.rpartition("/")[2] in ("train.py", "train_async.py")


class Ended(Exception):
    """The script exits or raises."""


class Returned(Ended):
    """A function or a sourced file returns."""

    def __init__(self, value: Any = None):
        self.value = value


class Reader:
    """What both readers share: scopes of names, branches that are read both ways, and files that are written.

    returned: what one branch of the function that is read returns, by the branch.
    """

    def __init__(self, reading: Reading):
        self.reading = reading
        self.found: list[Launch] = []
        self.depth = 0
        self.branch: str | None = None
        self.returned: list[tuple[str, Any]] = []

    def scopes(self) -> list[dict[str, Any]]:
        """The names that a branch may set, by scope."""
        raise NotImplementedError

    def remember(self, branch: str, ended: Ended) -> None:
        """Keep what one of two branches returns."""
        if isinstance(ended, Returned):
            self.returned.append((branch, ended.value))

    def write(self, file: str, text: Text, adds: bool = False) -> None:
        """Keep what the script writes into a file; what only a branch writes is not sure."""
        before = self.reading.files.get(file, hole("what it holds before")) if adds else ()
        self.reading.files[file] = self.reading.paid(before + (under(text, self.branch) if self.branch else text))

    @contextmanager
    def now(self, **values: Any) -> Iterator[None]:
        """Attributes of the reader have other values for a while."""
        before = {name: getattr(self, name) for name in values}
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """One call within another."""
        with self.now(depth=self.depth + 1):
            if self.depth > DEEPEST:
                raise ConfigError(f"functions or sourced files call each other more than {DEEPEST} levels deep")
            yield

    def attempt(self, work: Callable[[], object]) -> Ended | None:
        """Do some work; what ended it, if it ended the script or a function."""
        try:
            work()
        except Ended as ended:
            return ended
        return None

    def fork(self, label: str, one: Callable[[], object], other: Callable[[], object]) -> None:
        """Read two branches, of which only running the script would tell the one that is taken."""
        outer, before = self.branch, [dict(scope) for scope in self.scopes()]
        with self.now(branch=label if outer is None or outer.startswith("not: ") else outer):
            ended = self.attempt(one)
        first = [dict(scope) for scope in self.scopes()]
        self._restore(before)
        with self.now(branch=outer or f"not: {label}"):
            ended_other = self.attempt(other)
        if ended:
            self.remember(label, ended)
        if ended and ended_other:
            raise ended_other
        if ended_other:
            self._restore(first)
            self.remember(f"not: {label}", ended_other)
        elif not ended:
            joined: Joined = {}
            for scope, names in zip(self.scopes(), first, strict=False):  # a branch may open scopes of its own
                self.join(names, scope, label, joined)

    def join(self, names: Mapping[str, Any], scope: dict[str, Any], branch: str, joined: Joined | None = None) -> None:
        """Give a scope what `names`, of the branch, and the scope itself hold.

        Args:
            joined: what the scopes before have been given, so that two names of one list keep one list.
        """
        joined = {} if joined is None else joined
        for name in {**names, **scope}:
            one, other = names.get(name, ()), scope.get(name, ())
            is_sure = one or other or (name in names) == (name in scope)  # an empty text is not a name that is gone
            value = self.either(one, other, branch) if is_sure else hole(f"a value that depends on {branch}")
            # Both lists are kept beside what they make, so that no later one gets the address of either.
            is_list = isinstance(one, list) or isinstance(other, list)
            scope[name] = joined.setdefault((id(one), id(other)), (one, other, value))[2] if is_list else value

    def choose(self, clauses: Sequence[Clause]) -> None:
        """Run the first clause that holds; those before it that may hold are read both ways."""
        if not clauses:
            return
        (label, truth, work), *rest = clauses
        if truth is None:
            self.fork(label, work, lambda: self.choose(rest))
        elif truth:
            work()
        else:
            self.choose(rest)

    def _restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        for scope, names in zip(self.scopes(), state, strict=False):
            scope.clear()
            scope.update(names)

    def either(self, one: Any, other: Any, branch: str) -> Any:
        """The value of a place that either branch may have reached: what both begin with is sure."""
        if one is other or type(one) is type(other) and isinstance(one, PLAIN) and one == other:
            return one
        if () in (one, other) and list in map(type, (one, other)):  # a name that one branch alone makes a list
            one, other = one or [], other or []
        if not isinstance(one, tuple | list) or type(one) is not type(other):
            return hole(f"a value that depends on {branch}")
        self.reading.spend(1 + len(one) + len(other))
        differs = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        count = next(differs, min(len(one), len(other)))
        ends = ((one[count:], branch), (other[count:], f"not: {branch}"))
        if isinstance(one, tuple):
            pieces = (replace(piece, branch=piece.branch or label) for text, label in ends for piece in text)
            return (*one[:count], *pieces)
        return one[:count] + [_item(item, label) for items, label in ends for item in items]


PLAIN = (tuple, list, str, int, float)


def _item(item: Any, branch: str) -> Text:
    """An item of a list that one branch adds."""
    return under((item or (Piece(""),)) if isinstance(item, tuple) else hole("a value"), branch)

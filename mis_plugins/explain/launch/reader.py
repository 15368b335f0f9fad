"""What the readers of launch scripts share: branches that are read both ways, what is found, and what it costs."""

import os.path
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.words import Piece, Text, Word, hole, under
from mis_plugins.shared.budget import VALUES, Clock

PACKAGES = {"miles", "slime", "vime"}  # of the hosts whose launch scripts are read
HERE = ("$PWD", "${PWD}", "$(pwd)")  # the folder where a script is started
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")  # endings of what a shell reads
UNCALLED = "may start train.py too, and nothing that is read here calls it"
DEEPEST = 32  # functions, sourced files and evaluated texts within one another
Joined = dict[tuple[int, int], tuple[Any, Any, Any]]  # of two branches: the values of either, and both in one
Clause = tuple[str, bool | None, Callable[[], object]]  # a condition, whether it holds where that is known, the work


@dataclass
class Reading:
    """What reading one script costs, and what the reader could not tell.

    unread: parts that only running the script would tell, by the line where they stand.
    assumed: what was taken for granted, in words.
    files: texts that the script writes, by the name of the file from the folder where the script is started.
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
        """Count steps, letters and words against the budget; raises RecordError beyond it, or after too long."""
        self.spent += amount
        VALUES.check(self.spent, self.size, self.where)
        if amount > 1 or self.spent % 256 == 0:
            self.clock.check()

    def paid(self, text: Text) -> Text:
        self.spend(1 + sum(1 + len(piece.text or "") for piece in text))
        return text

    def assume_unset(self, name: str) -> None:
        self.assumed[f"{'$' * name.isdigit()}{name} is not set"] = None


@dataclass(frozen=True)
class Launch:
    """One start of train.py.

    line: where the script starts it.
    words: what follows train.py.
    hosts: names of hosts that the script imports or whose folder it names.
    place: where further flags can be written, in Python the expression of the flags; zeros are nowhere.
    branch: the condition under which the script starts it; None is always.
    folder: where the script has changed to, as it says it; empty where it has not.
    """

    line: int
    words: tuple[Word, ...]
    hosts: frozenset[str]
    place: tuple[int, int]
    branch: str | None = None
    folder: str = ""


def any_of(truths: Sequence[bool | None]) -> bool | None:
    """Whether one of some conditions holds; None where that is not known."""
    return True if True in truths else None if None in truths else False


def all_of(truths: Sequence[bool | None]) -> bool | None:
    return False if False in truths else None if None in truths else True


def from_start(folder: str, file: str) -> str:
    """The name of a file, from the folder where a script is started."""
    name = os.path.join(folder, file)
    for here in HERE:
        name = name.removeprefix(f"{here}/")
    return os.path.normpath(name)


def is_train(word: str) -> bool:
    """Whether a word names the file by which a host trains."""
    return word.rpartition("/")[2] in ("train.py", "train_async.py")


class Ended(Exception):
    """The script exits or raises."""


class Returned(Ended):
    """A function or a sourced file returns."""

    def __init__(self, value: Any = None):
        self.value = value


class Reader(ABC):
    """What both readers share: scopes of names, branches that are read both ways, and files that are written.

    returned: what one branch of the function that is read returns, by the branch.
    """

    def __init__(self, reading: Reading):
        self.reading = reading
        self.found: list[Any] = []
        self.depth = 0
        self.branch: str | None = None
        self.returned: list[tuple[str, Any]] = []

    @abstractmethod
    def scopes(self) -> list[dict[str, Any]]:
        """The names that a branch may set, by scope."""

    @abstractmethod
    def working_folder(self) -> str:
        """The folder that the script has changed to, from the one where it is started."""

    def write(self, file: str, text: Text, adds: bool = False) -> None:
        """Keep what the script writes into a file; what only a branch writes is not sure."""
        file = from_start(self.working_folder(), file)
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

    def fork(self, label: str, then: Callable[[], object], otherwise: Callable[[], object]) -> None:
        """Read two branches, of which only running the script would tell the one that is taken."""
        outer, before = self.branch, [dict(scope) for scope in self.scopes()]
        with self.now(branch=label if outer is None or outer.startswith("not: ") else outer):
            ended = self.attempt(then)
        first = [dict(scope) for scope in self.scopes()]
        self._restore(before)
        with self.now(branch=outer or f"not: {label}"):
            ended_other = self.attempt(otherwise)
        if isinstance(ended, Returned) and ended_other and not isinstance(ended_other, Returned):
            self._restore(first)
            raise ended  # the other branch ends the script
        if isinstance(ended, Returned):
            self.returned.append((label, ended.value))
        if ended and ended_other:
            raise ended_other
        if ended_other:
            self._restore(first)
            self.returned += [(f"not: {label}", ended_other.value)] if isinstance(ended_other, Returned) else []
        elif not ended:
            joined: Joined = {}
            for scope, names in zip(self.scopes(), first, strict=False):  # a branch may open scopes of its own
                self.join(names, scope, label, joined)

    def join(self, names: Mapping[str, Any], scope: dict[str, Any], branch: str, joined: Joined | None = None) -> None:
        """Give a scope what it and `names`, of the branch, hold. By `joined` two names of one list keep one list."""
        joined = {} if joined is None else joined
        for name in {**names, **scope}:
            first, second = names.get(name, ()), scope.get(name, ())
            is_sure = first or second or (name in names) == (name in scope)  # an empty text is not a name that is gone
            value = self.either(first, second, branch) if is_sure else hole(f"a value that depends on {branch}")
            # Both lists are kept beside what they make, so that no later one gets the address of either.
            is_list = isinstance(first, list) or isinstance(second, list)
            scope[name] = joined.setdefault((id(first), id(second)), (first, second, value))[2] if is_list else value

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

    def either(self, first: Any, second: Any, branch: str) -> Any:
        """The value of a place that either branch may have reached: what both begin with is sure."""
        if first is second or type(first) is type(second) and isinstance(first, PLAIN) and first == second:
            return first
        if () in (first, second) and list in map(type, (first, second)):  # a name that one branch alone makes a list
            first, second = first or [], second or []
        if not isinstance(first, tuple | list) or type(first) is not type(second):
            return hole(f"a value that depends on {branch}")
        self.reading.spend(1 + len(first) + len(second))
        differs = (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
        count = next(differs, min(len(first), len(second)))
        ends = ((first[count:], branch), (second[count:], f"not: {branch}"))
        if isinstance(first, tuple):
            pieces = (replace(piece, branch=piece.branch or label) for text, label in ends for piece in text)
            return (*first[:count], *pieces)
        return first[:count] + [_item(item, label) for items, label in ends for item in items]


PLAIN = (tuple, list, str, int, float)


def _item(item: Any, branch: str) -> Text:
    """An item of a list that one branch adds."""
    return under((item or (Piece(""),)) if isinstance(item, tuple) else hole("a value"), branch)

"""The variables of a shell as far as they are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mis_plugins.explain.launch.bash.nodes import Node, says
from mis_plugins.explain.launch.reader import Reader, Reading
from mis_plugins.explain.launch.words import Lines, Text, fields, hole, literal, spaced

EXPORTED, FOLDER, LEFT, LAST_PIPE = literal("x"), "~+", "~-", "-p"
Value = Text | list[Text]  # of a variable, of an array


class Variables(Reader):
    """The variables of a shell as far as they are known.

    texts: the script, and every text that it sources or evaluates; `source` numbers the one that is read, the script 0.
    variables: by name; "@" are the arguments, `FOLDER` is where `cd` leads to and `LEFT` whence, "-x NAME" says that
        a variable or function is exported, "-a" that all that are set are, and `LAST_PIPE` that `shopt -s lastpipe` is.
    locals: what the variables that a function declares as its own were before; None outside functions.
    held: what variables become behind the functions, and the commands with assignments in front, that are read.
    returned: of a branch, the variables with which it returns.
    ran: the statements that were read, by number of the text and id of the node.
    """

    def __init__(self, path: Path, reading: Reading):
        super().__init__(reading)
        self.path, self.source = path, 0
        self.texts: list[Node] = []
        self.variables: dict[str, Value] = {"@": []}
        self.functions: dict[str, tuple[Node, int]] = {}
        self.locals: dict[str, Value | None] | None = None
        self.held: list[dict[str, Value | None]] = []
        self.own_name = literal(str(path))
        self.ran: set[tuple[int, int]] = set()

    @property
    def positional(self) -> list[Text]:
        """The arguments of the script, or of the function that is read."""
        return as_words(self.variables["@"])

    @positional.setter
    def positional(self, words: list[Text]) -> None:
        self.variables["@"] = words

    def scopes(self) -> list[dict[str, Value]]:
        return [self.variables]

    def lines(self, node: Node) -> Lines:
        return (0, 0) if self.source else (node.start_point[0] + 1, node.end_point[0] + 1)

    def unknown(self, node: Node) -> Text:
        return hole(says(node), self.lines(node))

    def unread(self, node: Node, why: str) -> None:
        first, _, more = ("a sourced file" if self.source else says(node)).partition("\n")
        self.reading.unread.setdefault(self.lines(node)[0], f"{first}{' ...' if more else ''}: {why}")

    def run_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.run(node)

    @contextmanager
    def _kept(self, held: dict[str, Value | None]) -> Iterator[None]:
        """Variables are afterwards what is held; None is not set."""
        try:
            with self.now(held=[*self.held, held]):
                yield
        finally:
            for name, value in held.items():
                self.variables.pop(name, None)
                self.variables |= {} if value is None else {name: value}

    def _folder(self) -> Text:
        return spaced(as_words(self.variables.get(FOLDER, ())))

    def _valued(self, node: Node, name: str, whole: bool = False) -> Text:
        """`$NAME`, and `$1`, `$0`, `$@`; of an array its first item, or all items with `whole`."""
        if name == "0":
            return self.own_name
        if name.isdigit():
            return next(iter(self._argument(name)), self.unknown(node))
        value = self.positional if name in ("@", "*") else self.variables.get(name)
        if value is None:
            return self.unknown(node)
        if not isinstance(value, list):
            return value
        if not whole and name not in ("@", "*"):
            return self._first(value, node)
        return self.unknown(node) if "IFS" in self.variables else spaced(value)

    def _first(self, items: list[Text], node: Node) -> Text:
        """The first item of an array, which its name alone means and sets; not known where a branch gives it."""
        first = next(iter(items), ())
        return self.unknown(node) if depends(first) else first

    def _argument(self, name: str) -> list[Text]:
        """`$NAME` of the script's own arguments, which is not known behind a word that may be several."""
        words = self.positional[: int(name[:3])]
        return words[int(name[:3]) - 1 :] if all(map(is_one, words)) else [hole(f"${name}")]

    def run(self, node: Node) -> None:
        """Read a statement."""
        raise NotImplementedError


def is_one(word: Text) -> bool:
    """Whether a word is surely one: an unquoted expansion may be none or several, and a branch may give none."""
    return not word or any(piece.text is not None or piece.span for piece in word) and not depends(word)


def depends(word: Text) -> bool:
    return any(piece.branch for piece in word)


def as_words(value: Value) -> list[Text]:
    return value if isinstance(value, list) else fields(value)

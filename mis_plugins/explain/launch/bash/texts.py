"""Variables, words and texts of a script in bash: quotes, braces and expansions."""

import codecs
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mis_plugins.explain.launch.bash import grammar
from mis_plugins.explain.launch.bash.grammar import EXPANSIONS, QUOTED, Node, blanks_before, says, set_within
from mis_plugins.explain.launch.reader import Reader, Reading
from mis_plugins.explain.launch.words import Lines, Piece, Text, fields, hole, known, literal, shown, spaced, under

EXPORTED, FOLDER, LEFT, PUSHED = literal("x"), "~+", "~-", "~0"
Value = Text | list[Text]  # of a variable, of an array
# A home in a word, and a variable of the shell, or a command in backticks, that the parser leaves within a word.
EXPANDED = re.compile(r"(?:^(?:[A-Za-z_]\w*=)?|:)~(?:[\w+-]*(?:[/:]|$)|[\w.+-]*/)|(?<!\\)(?:\$[@*#?!$-]|`)")
BRACES = re.compile(r"([^{}'\"\\$`~]*)\{([^{}'\"\\$`~]*,[^{}'\"\\$`~]*)\}([^{}'\"\\$`~]*)")
# The few letters that a backslash quotes within double quotes.
ESCAPED = re.compile(r'\\(["$`\\\n])')
DEFAULTS, ALTERNATIVES = (":-", "-", ":=", "="), ("+", ":+")
# Items of a list that may be empty under `set -u`: `${A[@]+"${A[@]}"}`, `${1+"$@"}` and `"${A[@]:-}"`.
GUARDED = re.compile(r'\$\{(?:(\w+\[@\]|@):?(?:-|\+("?)\$\{\1\}\2)|[1@]:?\+("?)\$(@)\3)\}')
# A word in whose place bash puts the names of files that fit it; no file is named as `KEY=*` is.
PATTERN = re.compile(r"(?:[^\\=*?]|\\.)*[*?]")
# An argument in a heredoc, of which the parser makes no node behind other text.
ARGUMENT = re.compile(r"(?<!\\)\$([0-9@*#?])")
# Letters of what `${!A}` takes for the name of a variable.
OF_A_NAME = re.compile(r"[\w@*#?!$\[\]-]*")
# A part of an evaluated text that is not known.
UNKNOWN = re.compile(r"\$\{(unknown_\d+)\}")


class Texts(Reader):
    """The variables of a shell as far as they are known, and what it makes of the words of a script.

    texts: the script, and every text that it sources or evaluates; `source` numbers the one that is read, the script 0.
    variables: by name; "@" are the arguments, `FOLDER` is where `cd` leads to and `LEFT` whence, `PUSHED` what `pushd`
        keeps, "-x NAME" says that a variable or function is exported, "-a" that all that are set are, and "-O NAME"
        that the option NAME of `shopt` is on.
    locals: what the variables that a function declares as its own were before; None outside functions.
    held: what variables become behind the functions, and the commands with assignments in front, that are read.
    returned: of a branch, the variables with which it returns.
    ran: the statements and the expansions that were read, by number of the text and id of the node.
    unused: the expansions whose default or alternative was not taken, likewise.
    replaced, used: the literals in variables that are set anew, and those that an expansion has read.
    """

    def __init__(self, path: Path, reading: Reading):
        super().__init__(reading)
        self.path, self.source = path, 0
        self.texts: list[Node] = []
        self.variables: dict[str, Value] = {"@": []}
        self.functions: dict[str, tuple[Node, int]] = {}
        self.locals: dict[str, Value | None] | None = None
        self.held: list[dict[str, Value | None]] = []
        self.own_name = hole("$0") if path.suffix == ".py" else literal(str(path))
        self.ran: set[tuple[int, int]] = set()
        self.unused: set[tuple[int, int]] = set()
        self.replaced: set[tuple[int, int, int]] = set()
        self.used: set[tuple[int, int, int]] = set()

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

    def working_folder(self) -> str:
        return shown(self._folder())

    def _valued(self, node: Node, name: str, whole: bool = False) -> Text:
        """`$NAME`, and `$1`, `$0`, `$@`; of an array its first item, or all items with `whole`."""
        if name == "0":
            return self.own_name
        if name.isdigit():
            is_whole = not name[1:] or node.type == "expansion"  # `$10` is `$1`, and a letter behind it
            return next(iter(self._argument(name) if is_whole else ()), self.unknown(node))
        value = self.positional if name in ("@", "*") else self.variables.get(name)
        if value is None:
            return self.unknown(node)
        self.used |= literals_of(value)
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

    @abstractmethod
    def run(self, node: Node) -> None:
        """Read a statement."""

    def settle(self, node: Node) -> None:
        """Forget the variables that a statement sets in the midst of its words, less those whose default was read."""
        for name, place in set_within(node):
            is_item = place.type != "expansion" or "[" in says(place).partition("=")[0]
            if is_item or (self.source, place.id) not in self.ran:
                self.variables[name] = self.unknown(place)

    def either(self, first: Any, second: Any, branch: str) -> Any:
        """Join two branches; where one makes a variable an array, the text of the other is its first item."""
        if isinstance(first, list) or isinstance(second, list):
            first, second = (x if isinstance(x, list) else [x] if x else [] for x in (first, second))
        return super().either(first, second, branch)

    def words(self, node: Node) -> list[Text]:
        """The words that a shell makes of one argument."""
        if node.type == "comment":
            return []
        listed = self._listed(node)
        if listed is not None:
            self.reading.spend(1 + len(listed))
            return listed
        braces = BRACES.fullmatch(says(node)) if node.type in ("word", "concatenation") else None
        if braces and not is_pattern(node):
            expanded = [f"{braces[1]}{item}{braces[3]}" for item in braces[2].split(",")]
            return [self.literal(item, node) for item in expanded if item]
        if is_braced(node) or is_pattern(node):
            self.text(node)  # sets what its expansions set
            return [self.unknown(node)]
        text = self.text(node)
        if node.type in EXPANSIONS:
            split = self._split(self.reading.paid(text))
            is_given = (self.source, node.id) not in self.unused
            return [self.unknown(node)] if is_given and split != [text] and self._holds_blanks(node) else split
        if node.type in ("concatenation", "string") and any(map(self._may_be_several, node.named_children)):
            return [hole(shown(self.quoted(says(node), node)), self.lines(node))]
        span = None if self.source else (node.start_byte, node.end_byte)
        return [tuple(replace(piece, lines=self.lines(node), span=span) for piece in text)]

    def command_words(self, node: Node) -> list[Text]:
        name, parent = node.child_by_field_name("name"), node.parent
        whole = parent if parent is not None and parent.type == "redirected_statement" else node
        own = [*(name.named_children if name else ()), *node.children_by_field_name("argument")]
        return self.joined(whole, [*own, *grammar.behind_redirects(whole)])

    def joined(self, node: Node, parts: list[Node]) -> list[Text]:
        """The words of parts; one with a backslash behind it goes on where the next line begins without a blank.

        A word behind an expansion is not known: its letters may belong to the expansion's name, or begin a word.
        """
        source, gathered, words = node.text or b"", list[Text](), list[Text]()
        for before, part in zip([None, *parts], parts, strict=False):
            is_made, words = bool(words), self.words(part)
            between = source[before.end_byte - node.start_byte : part.start_byte - node.start_byte] if before else b""
            if before and between in (b"", b"\\\n") and words:
                last = before.named_children[-1] if before.type == "concatenation" else before
                is_open, first = last.type in EXPANSIONS, gathered.pop() if is_made else ()
                words[0] = hole(says(before) + says(part), self.lines(part)) if is_open else first + words[0]
            gathered += words
        return gathered

    def _holds_blanks(self, node: Node) -> bool:
        """Whether quotes in a default hold blanks together, or make a word of nothing."""
        if node.type in QUOTED:
            text = self.text(node)
            return not text or any(piece.text is not None and piece.text.split() != [piece.text] for piece in text)
        is_word = node.type == "word" and "\\" in says(node)
        return is_word or node.type != "command_substitution" and any(map(self._holds_blanks, node.named_children))

    def _split(self, text: Text) -> list[Text]:
        """The words of an expansion without quotes; not known where the script sets other letters to cut at."""
        if text and "IFS" in self.variables:
            return [hole(shown(text))]
        return [hole(shown(word)) if PATTERN.match(shown(word)) else word for word in fields(text)]

    def _may_be_several(self, part: Node) -> bool:
        """Whether a part of a word makes several words: items of an array, or blanks that no quotes hold."""
        if any(several in says(part) for several in ("$@", "${@", "[@]")):
            return True
        is_split = part.type in EXPANSIONS and part.parent is not None and part.parent.type == "concatenation"
        texts = (piece.text for piece in self.text(part)) if is_split else ()
        return any(text is not None and (text.split() != [text] or PATTERN.match(text)) for text in texts)

    def _listed(self, node: Node) -> list[Text] | None:
        """The words of an array that stands alone, quoted or not."""
        if node.type not in ("string", "simple_expansion", "expansion"):
            return None
        is_quoted = node.type == "string"
        source = says(node)[1:-1] if is_quoted else says(node)
        guarded = GUARDED.fullmatch(source)
        if guarded is None:
            return self._items(node, source, is_quoted)
        words = self._items(node, f"${{{guarded[1] or guarded[4]}}}", is_quoted or '"' in source)
        of_first = source[2] == "1"
        is_null = words and ":" in source and known(words[0]) == "" and (of_first or len(words) == 1)
        empty = [literal("", self.lines(node))] if is_quoted and (of_first or "+" not in source) else []
        return empty if is_null or words == [] else words

    def _items(self, node: Node, source: str, holds_blanks: bool) -> list[Text] | None:
        """The words of `${NAME[@]}`, `$@` or `${@:2}`; None where a source is none of these."""

        def items(listed: list[Text]) -> list[Text]:
            return listed[:] if holds_blanks else [word for item in listed for word in self._split(item)]

        if source in ("$@", "${@}"):
            return items(self.positional)
        name = source[2:].partition("[@]")[0]
        if source.startswith("${@:"):
            first = int(source[4:-1]) if source[4:-1].isdigit() and len(source) < 8 else 0
            is_sure = first > 0 and all(map(is_one, self.positional[: first - 1]))
            return items(self.positional[first - 1 :]) if is_sure else None
        if source != f"${{{name}[@]}}" or not name.isidentifier():
            return None
        value = self.variables.get(name)
        if value is None:
            return [hole(source, self.lines(node))]
        self.used |= literals_of(value)
        return items(value if isinstance(value, list) else [value])

    def text(self, node: Node) -> Text:
        self.reading.spend()
        return TEXT[node.type](self, node) if node.type in TEXT else self.unknown(node)

    def literal(self, text: str, node: Node, begin: int | None = None, end: int | None = None) -> Text:
        """A text that stands in the script as it is: in the whole node, or in the bytes from `begin` to `end`."""
        at = self.source, node.start_byte if begin is None else begin, node.end_byte if end is None else end
        return (Piece(text, lines=self.lines(node), at=at),) if text else ()

    def _plain(self, node: Node) -> Text:
        """A word without the backslashes that quote one letter; not known where bash makes something else of it."""
        if EXPANDED.search(says(node)):
            return self.unknown(node)
        letters = iter(says(node))
        text = "".join(next(letters, "") if letter == "\\" else letter for letter in letters)
        return self.literal(text.replace("\n", ""), node)

    def quoted(self, text: str, node: Node) -> Text:
        """A text that a shell takes as it is, with the values of the parts of an evaluated text that are not known."""
        parts = enumerate(UNKNOWN.split(text))
        texts = (self._valued(node, part) if place % 2 else self.literal(part, node) for place, part in parts)
        return tuple(piece for part in texts for piece in part)

    def _ansi(self, node: Node) -> Text:
        """The text of `$'...'`; not known where bash and Python read a letter behind a backslash differently."""
        source = says(node)[2:-1]
        if UNKNOWN.search(source) or re.search(r"\\[^abfnrtv'\"]", source.replace(r"\\", "")):
            return self.unknown(node)
        return self.literal(re.sub(r"\\.", lambda match: codecs.decode(match[0], "unicode_escape"), source), node)

    def mixed(self, node: Node, begin: int, end: int) -> Text:
        """Text with expansions in it; the parser gives no node to some of the plain parts."""
        source, place, parts = node.text or b"", begin, list[Text]()
        if node.type == "concatenation" and node.children[-1].type == "$":  # where the parser ends the word `{a$1`
            return self.unknown(node)

        def add(upto: int) -> None:
            text = source[place - node.start_byte : upto - node.start_byte].decode(errors="replace")
            if "`" in text.replace("\\`", ""):  # a command in backticks, of which a heredoc has no node
                parts.append(hole(text, self.lines(node)))
                return
            for count, part in enumerate(ARGUMENT.split(text) if node.type == "heredoc_body" else [text]):
                plain = part if node.type == "concatenation" else ESCAPED.sub(lambda match: match[1].strip("\n"), part)
                parts.append(self._valued(node, part) if count % 2 else self.literal(plain, node, place, upto))

        for child in node.named_children:
            if child.type not in ("string_content", "heredoc_content"):
                add(child.start_byte + blanks_before(child))
                parts.append(self.text(child))
                place = child.end_byte
        add(end)
        return self.reading.paid(tuple(piece for part in parts for piece in part))

    def _braced(self, node: Node) -> Text:
        """`${NAME}`, `${NAME:-default}` and the like; all that cuts or counts is not known."""
        self.ran.add((self.source, node.id))
        named = next(iter(node.named_children), None)
        if named is None:
            return self.unknown(node)
        name, whole = says(named).partition("[")[0], named.type == "subscript"
        if name == "BASH_SOURCE":
            return literal(str(self.path))
        if whole and not says(named).endswith(("[@]", "[*]")):
            return self._item(node, name)
        value = self.variables.get("@" if name == "*" else name, self._argument(name) if name.isdigit() else None)
        if isinstance(value, list) and not whole and name not in ("@", "*"):
            value = self._first(value, node) if value else None
        text = spaced(value) if isinstance(value, list) else value or ()
        if says(node).endswith("#*=}") and (content := known(text)) is not None:
            cut = content.rpartition if "##" in says(node) else content.partition  # the key of `--key=value`
            return literal(cut("=")[2] if "=" in content else content, self.lines(node))
        self.used |= literals_of(text)
        return self._operated(node, name, value, text, whole)

    def _operated(self, node: Node, name: str, value: Value | None, text: Text, whole: bool) -> Text:
        """What the operator of `${NAME...}` makes of the value, which `text` holds with blanks between items."""
        marks = (child.type for child in node.children if not child.is_named and child.type not in ("${", "}"))
        operator = next(marks, "")
        self._check_indirect(node, name, text, operator == "!" and not whole)
        is_set = any(piece.text != "" for piece in text)
        if operator in ("-", "=", "+"):
            is_set = value is not None and value != []
        if operator in ("", ":?", "?") or is_set and operator in DEFAULTS:
            self.unused |= set() if known(text) is None else {(self.source, node.id)}
            return self._valued(node, name, whole)
        if operator in ALTERNATIVES and not is_set:
            self.unused.add((self.source, node.id))
            return self.unknown(node) if value is None else ()
        if operator not in (*DEFAULTS, *ALTERNATIVES) or len(node.named_children) < 2:
            return self.unknown(node)
        return self._instead(node, name, operator, value)

    def _check_indirect(self, node: Node, name: str, text: Text, is_indirect: bool) -> None:
        """Tell of `${!NAME}` whose text is no name of a variable; `${!NAME*}` lists names."""
        is_name = text != () and all(piece.text is None or OF_A_NAME.fullmatch(piece.text) for piece in text)
        if is_indirect and not is_name and not says(node).endswith(("*}", "@}")):
            self.unread(node, f"bash stops where {name} holds no name of a variable")

    def _instead(self, node: Node, name: str, operator: str, value: Value | None) -> Text:
        """`${NAME:-default}`, and `${NAME:=default}`, which sets the variable; both of one that is not set.

        `${NAME:+alternative}` is not known where branches alone set the variable, nor is any text in double quotes with
        a single quote in it, which is a letter there.
        """
        text = tuple(piece for child in node.named_children[1:] for piece in self.text(child))
        is_quoted = node.parent is not None and node.parent.type in ("string", "heredoc_body")
        text = self.unknown(node) if is_quoted and "'" in says(node) else text
        self.unused.discard((self.source, node.id))
        if operator in ALTERNATIVES:
            return text if _is_sure(value) else self.unknown(node)
        self.reading.assume_unset(name)
        if operator.endswith("="):
            self._store(node, says(node.named_children[0]), text)
        return text

    def _store(self, node: Node, name: str, value: Value) -> None:
        """Give a variable its value, as its attributes have it; a text for an array becomes the array's first item.

        Of an array with another item set, as `NAME[1]` sets one, no item is known.
        """
        name, item, _ = name.partition("[")
        value = [maybe(says(node), self.lines(node))] if item else value
        if f"-n {name}" in self.variables:
            self.unread(node, "which variable it sets is not known")
        if f"-r {name}" in self.variables:
            return self.unread(node, f"bash refuses it, since {name} is readonly")
        before, is_computed = self.variables.get(name), f"-i {name}" in self.variables
        if isinstance(value, list):
            value = [self.unknown(node)] if is_computed else value
        elif is_computed and not re.fullmatch(r"0|[1-9]\d*", known(value) or ""):
            value = self.unknown(node)
        if isinstance(before, list) and not isinstance(value, list):
            is_sure = not before or is_one(before[0])
            value = [value, *(before[1:] if is_sure else [maybe(says(node), self.lines(node))])]
        self.variables[name] = value
        if "-a" in self.variables:
            self.variables.setdefault(f"-x {name}", self.variables["-a"])

    def _item(self, node: Node, name: str) -> Text:
        """`${NAME[2]}`; not known where an item before it may be none or several."""
        index, value = says(node)[len(name) + 3 : -2], self.variables.get(name)
        if not isinstance(value, list) or not re.fullmatch(r"\d{1,4}", index):
            return self.unknown(node)
        items = value[: int(index) + 1]
        self.used |= literals_of(items)
        return items[-1] if len(items) > int(index) and all(map(is_one, items)) else self.unknown(node)

    @abstractmethod
    def _substituted(self, node: Node) -> Text:
        """The output of commands within a word."""


TEXT: dict[str, Callable[[Texts, Node], Text]] = {
    **dict.fromkeys(("word", "number", "variable_name", "extglob_pattern", "test_operator"), Texts._plain),
    "raw_string": lambda shell, node: shell.quoted(says(node)[1:-1], node),
    "ansi_c_string": Texts._ansi,
    "string": lambda shell, node: shell.mixed(node, node.start_byte + 1, node.end_byte - 1),
    "translated_string": lambda shell, node: shell.text(node.named_children[-1]),
    "concatenation": lambda shell, node: shell.mixed(node, node.start_byte, node.end_byte),
    "simple_expansion": lambda shell, node: shell._valued(node, says(node).removeprefix("$")),
    "expansion": Texts._braced,
    "command_substitution": lambda shell, node: shell._substituted(node),
}
"""How each kind of word is read; any other is not known."""


def is_one(word: Text) -> bool:
    """Whether a word is surely one: an unquoted expansion may be none or several, and a branch may give none."""
    return not word or any(piece.text is not None or piece.span for piece in word) and not depends(word)


def _is_sure(value: Value | None) -> bool:
    """Whether a variable surely holds letters, or an array an item."""
    items = value if isinstance(value, list) else [value or ()]
    has_item = isinstance(value, list) and any(map(is_one, items))
    return has_item or any(piece.text and not piece.branch for item in items for piece in item)


def maybe(source: str, lines: Lines) -> Text:
    """An item of an array that may be none."""
    return under(hole(source, lines), f"{source} leaves it there")


def is_braced(word: Node) -> bool:
    """Whether braces may make several words of one."""
    open_parts = (says(part) if part.type in ("word", "brace_expression") else "x" for part in word.children)
    if word.type != "concatenation":
        return False
    within = re.sub(r"\\.", "", "".join(open_parts)).partition("{")[2].rpartition("}")[0]
    return "," in within or bool(re.search(r"\w\.\.\w", within))


def is_pattern(word: Node) -> bool:
    """Whether bash may put names of files in place of a word."""
    parts = word.named_children if word.type == "concatenation" else [word]
    return PATTERN.match("".join(says(part) for part in parts if part.type == "word")) is not None


def depends(word: Text) -> bool:
    return any(piece.branch for piece in word)


def literals_of(value: Value) -> set[tuple[int, int, int]]:
    """Where the literals of a variable or an array stand."""
    return {piece.at for text in (value if isinstance(value, list) else [value]) for piece in text if piece.at}


def as_words(value: Value) -> list[Text]:
    return value if isinstance(value, list) else fields(value)

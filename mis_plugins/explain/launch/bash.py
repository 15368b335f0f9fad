"""Shell scripts, read by a parser of bash and never executed: what each start of train.py is given.

Variables, arrays, functions, heredocs and sourced files are followed. A branch whose condition is not known is read
both ways, and what only one way gives is marked with the condition.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import operator
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mis_plugins.config.file import text_of
from mis_plugins.config.loading import file_of, watching
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.launch.grammar import parsed
from mis_plugins.explain.launch.words import (
    HOLE,
    PACKAGES,
    Clause,
    Ended,
    Launch,
    Lines,
    Piece,
    Reader,
    Reading,
    Returned,
    Text,
    all_of,
    any_of,
    fields,
    hole,
    is_train,
    known,
    literal,
    shown,
    spaced,
    under,
    word_of,
)

if TYPE_CHECKING:
    from tree_sitter import Node

SHELLS = ("bash", "sh", "zsh", "dash")
ENDS_ROUND = ("break", "continue")
PRINTS = ("echo", "printf", "cat", "tee")
STARTS_NOTHING = (":", "true", "pkill", "pgrep", "grep", "ps", "kill", *ENDS_ROUND)
# Commands that start nothing and write no file that they name, and those that write one.
LEAVES_FILES = ("ls", "test", "chmod", "mkdir", "touch", "head", "tail", "less", "vim", "wc", "diff", "stat", "git",
                "basename", "dirname", "realpath", "which")  # fmt: skip
COPIES, EDITS = ("cp", "mv", "ln", "rm", "install", "rsync", "scp", "tee"), ("sed", "yq", "perl", "wget", "curl")
FILLS = ("read", "mapfile", "readarray", "getopts", "let")
OUR_PATH = ("-m mis_plugins config path ", "mis-plugins config path ")
ASSIGNMENTS = ("variable_assignment", "variable_assignments")
SUCCEEDS = (*ASSIGNMENTS, "declaration_command", "function_definition")
LEAVES_VARIABLES = ("command", "negated_command", "pipeline", "subshell", "test_command")
DECLARES = ("export", "readonly", "declare", "typeset", "local", "unset")
OF_FUNCTION = ("local", "declare", "typeset")
ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
# A home in a word, and a variable of the shell that the parser leaves within a word.
EXPANDED = re.compile(r"(?:^|:)~[+-]?(?:[/:]|$)|(?<!\\)\$[@*#?!$-]")
EXPANSIONS = ("simple_expansion", "expansion", "command_substitution")
QUOTED = ("string", "raw_string", "ansi_c_string")
# What bash and `fnmatch` read differently in a pattern.
OTHER_PATTERN = re.compile(r"[\\('\"$`~]|\[\^|\[:")
BRACES = re.compile(r"([^{}'\"\\$`~]*)\{([^{}'\"\\$`~]*,[^{}'\"\\$`~]*)\}([^{}'\"\\$`~]*)")
# What gives a shell the variables that the script exports, but for some flags; of other commands that is not known.
HANDS_ON = ("env", "exec", "nohup", "nice", "timeout", "setsid", "stdbuf", "srun")
LETS_GO = ("-i", "-u", "--ignore", "--unset", "--export")
# What starts a program in Python, wherever it stands before train.py; and that a text names train.py.
PYTHON = re.compile(r"(i?python|pypy)[\d.]*|torchrun|accelerate|deepspeed|uv|poetry")
NAMES_TRAIN = re.compile(r"\btrain(_async)?\.py\b")
# What sets up a shell, and no variable of a training.
OF_A_SHELL = re.compile(r"\$\((?:[^\s()]*/)?(?:conda|mamba|micromamba|pyenv|ssh-agent)\s[^()]*\)")
# A part of an evaluated text that is not known, and one that is but for its branch: words that need no quotes.
UNKNOWN, PLAIN_WORDS = re.compile(r"\$\{(unknown_\d+)\}"), re.compile(r"( [\w./:=,@+-]+)+ *")
EXPORTED, FOLDER, LEFT = literal("x"), "~+", "~-"
Value = Text | list[Text]  # of a variable, of an array


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a shell script.

    Args:
        path: where the script lies; files that it sources are looked for from there.
        arguments: what the user starts the script with: NAME=VALUE of its environment, then its own arguments.

    Raises:
        ConfigError: the script nests deeper than any launch script does, or the parser of bash is not installed.
    """
    shell = Shell(path, reading)
    shell.run_script(script, arguments)
    return shell.found


class Shell(Reader):
    """The variables of a shell as far as they are known.

    texts: the script, and every text that it sources or evaluates; `source` numbers the one that is read.
    variables: by name; "@" are the arguments, `FOLDER` is where `cd` leads to and `LEFT` whence, "-x NAME" says that
        a variable is exported, and "-a" that all that are set are.
    locals: what the variables that a function declares as its own were before; None outside functions.
    held: what variables become behind the functions, and the commands with assignments in front, that are read.
    returned: the variables with which one branch of the function that is read returns, by the branch.
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
        self.returned: list[tuple[str, dict[str, Value]]] = []
        self.ran: set[tuple[int, int]] = set()

    @property
    def positional(self) -> list[Text]:
        """The arguments of the script, or of the function that is read."""
        return _as_words(self.variables["@"])

    @positional.setter
    def positional(self, words: list[Text]) -> None:
        self.variables["@"] = words

    @property
    def elsewhere(self) -> bool:
        """Whether the statement that is read stands in a sourced or evaluated text."""
        return self.source > 0

    def scopes(self) -> list[dict[str, Value]]:
        return [self.variables]

    # Running statements.

    def run_script(self, script: str, arguments: Sequence[str]) -> None:
        """Read a whole script as `launches` does."""
        given = list(arguments)
        while given and given[0].partition("=")[0].isidentifier() and "=" in given[0]:
            name, _, value = given.pop(0).partition("=")
            self.variables |= {name: literal(value), f"-x {name}": EXPORTED}
        self.positional = [literal(one) for one in given]
        try:
            self.attempt(lambda: self.run_text(script))
        except RecursionError:
            raise ConfigError("nested deeper than any launch script; give the part that starts the training") from None

    def run_text(self, script: str) -> None:
        root, lost = parsed(script, self.reading.clock.is_over)
        self.texts.append(root)
        for keyword in lost:
            self.unread(keyword, "the parser of bash loses the branch before it; write one assignment a line")
        self.run_all(root.children)

    def run_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.run(node)

    def run(self, node: Node) -> None:
        self.reading.spend()
        self.ran.add((self.source, node.id))
        if node.type in RUN and _is_apart(node):
            before = dict(self.variables)
            self.attempt(lambda: RUN[node.type](self, node))
            self.variables = before
        elif node.type in RUN:
            RUN[node.type](self, node)
        elif node.type == "ERROR":
            self.unread(node, "no bash that the parser knows")

    def _children(self, node: Node) -> None:
        self.run_all(node.named_children)

    def _status(self, node: Node, trusts: bool = True) -> bool | None:
        """Run a part of a list; whether it succeeds, None where only running the script would tell.

        Args:
            trusts: whether a part of which nothing is known is taken to succeed, as `cd` before a start is. What
                decides a value, or where a loop ends, takes nothing so.
        """
        if node.type != "list":
            truth = self.truth(node)
            if node.type != "test_command":
                self.run(node)
            is_test = node.type == "test_command" or node.children[0].type == "(("
            return True if truth is None and not is_test and (trusts or _succeeds(node)) else truth
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        status = self._status(left, trusts and not self._decides(right))
        if status is None:
            nothing, run = (lambda: None), (lambda: self.run(right))
            self.fork(_said(left), *((run, nothing) if is_and else (nothing, run)))
        elif status == is_and:
            return self._status(right, trusts)
        return status

    def _decides(self, node: Node) -> bool:
        """Whether a statement may set a variable, or end a function, a loop or the script."""
        node = node.child_by_field_name("body") or node if node.type == "redirected_statement" else node
        first = one_line(node).partition(" ")[0]
        return node.type not in LEAVES_VARIABLES or first in {*COMMANDS, *ENDS_ROUND, *FILLS, *self.functions}

    def _if(self, node: Node) -> None:
        clauses = list(_clauses(node))
        for conditions, _ in clauses:
            self.run_all(conditions)
        self.choose(
            [
                (_joined(conditions), self.truth(conditions[-1]) if conditions else True, self._work(body))
                for conditions, body in clauses
            ]
        )

    def _work(self, nodes: Sequence[Node]) -> Callable[[], object]:
        return lambda: self.run_all(nodes)

    def _case(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = self.text(subject) if subject else ()
        said, clauses = known(value), list[Clause]()
        for item in reversed([item for item in node.named_children if item.type == "case_item"]):
            close = next((i for i, child in enumerate(item.children) if child.type == ")"), 0)
            groups = groupby(item.children[item.children[0].type == "(" : close], lambda child: child.type == "|")
            patterns = ["".join(map(self._pattern, parts)) for is_bar, parts in groups if not is_bar]
            fits = any_of(["*" in patterns or None if said is None else _fits(said, pattern) for pattern in patterns])
            label = " or ".join(_said(child) for child in item.children[:close] if child.is_named)
            clauses = [(f"{shown(value)} is {label}", fits, self._arm(item, close, clauses)), *clauses]
        self.choose(clauses)

    def _arm(self, item: Node, close: int, later: Sequence[Clause]) -> Callable[[], object]:
        """The work of a branch of `case`: behind `;&` the next one runs too, behind `;;&` one of the later ones may."""

        def work() -> None:
            self.run_all(child for child in item.children[close:] if child.is_named)
            ending = item.child_by_field_name("fallthrough")
            if ending is not None and later:
                self.choose(later) if _said(ending) == ";;&" else later[0][2]()

        return work

    def _pattern(self, node: Node) -> str:
        """A pattern as `fnmatch` takes it, with quoted letters as they are, and `HOLE` where it is not known."""
        if node.type == "concatenation":
            return "".join(map(self._pattern, node.children))
        said = known(self.text(node)) if node.type in (*QUOTED, *EXPANSIONS) else _said(node)
        if node.type in QUOTED:
            return HOLE if said is None else glob.escape(said)
        said = re.sub(r"\\(.)", lambda found: glob.escape(found[1]), said or HOLE)
        return HOLE if OTHER_PATTERN.search(said) else said

    def _for(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = [word for child in node.children_by_field_name("value") for word in self.words(child)]
        if name is None or body is None:
            return
        if not values or _ends_early(body) or any(known(word) is None for word in values):
            self.variables[_said(name)] = hole(f"${_said(name)}", self.lines(node))
            self._loop(node)
            return
        for word in values:
            self.variables[_said(name)] = word
            self.run(body)

    def _loop(self, node: Node) -> None:
        """Read the body once; what it sets is not known where it may end before its last round."""
        body, before = node.child_by_field_name("body"), dict(self.variables)
        self.run_all(child for child in node.named_children if child != body)
        if body is not None:
            self.fork(one_line(node), lambda: self.run(body), lambda: None)
            changed = [name for name, value in self.variables.items() if before.get(name) != value]
            if _ends_early(body):
                self.variables |= {name: hole(f"${name}", self.lines(node)) for name in changed}

    def _function(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[_said(name)] = body, self.source

    # Commands.

    def _command(self, node: Node) -> None:
        before = _of_lines_before(node)
        self.run_all(before)
        name = node.child_by_field_name("name")
        words = self.command_words(node)
        own = [child for child in node.children if child.type == "variable_assignment" and child not in before]
        keys = [re.split(r"[+=\[]", _said(child))[0] for child in own]
        with self._kept({key: self.variables.get(key) for one in keys for key in (one, f"-x {one}")}):
            self.run_all(own)
            self.variables |= {f"-x {one}": EXPORTED for one in keys}
            self.variables |= {one: hole(f"${one}") for one in keys if isinstance(self.variables.get(one), list)}
            if name is not None and _said(name) in DECLARES:  # the parser takes it for a command then
                said = (node.text or b"")[name.start_byte - node.start_byte :].decode(errors="replace")
                self.evaluate(literal(said, self.lines(node)), shares=True)
            else:
                self.call(node, words)

    @contextmanager
    def _kept(self, held: dict[str, Value | None]) -> Iterator[None]:
        """Variables are afterwards what is held; None is not set."""
        self.held.append(held)
        try:
            yield
        finally:
            self.held.pop()
            for name, value in held.items():
                self.variables.pop(name, None)
                self.variables |= {} if value is None else {name: value}

    def command_words(self, node: Node) -> list[Text]:
        name = node.child_by_field_name("name")
        parts = [*(name.named_children if name else ()), *node.children_by_field_name("argument")]
        return [word for part in parts for word in self.words(part)]

    def call(self, node: Node, words: list[Text]) -> None:
        name = word_of(words[0]).text if words else ""
        if name in self.functions:
            body, source = self.functions[name]
            outer, self.locals = self.locals, {}
            try:
                with self._kept(self.locals):
                    self._within(words[1:], source, lambda: self.run(body))
            finally:
                self.locals = outer
        elif name.startswith("--"):
            self.unread(node, "a command that begins with a flag; does the line above lack its backslash?")
        elif name in COMMANDS:
            COMMANDS[name](self, node, words[1:])
        elif name == "tee":
            self._tee(words, hole("tee"))
        elif name in FILLS or name == "printf" and [known(word) for word in words[1:2]] == ["-v"]:
            self._fill(node, words[1:])
        elif name not in STARTS_NOTHING and name not in PRINTS:
            at, text = _shell_of(words, "c")
            if text < len(words):
                self._other_shell(words[:at], words[text], words[text + 1 :])
            else:
                self._launch(node, words)

    def _other_shell(self, before: Sequence[Text], text: Text, given: Sequence[Text]) -> None:
        """Read a text as another shell, which sees the variables that the script exports.

        Args:
            before: what starts the shell, with variables for it as NAME=VALUE.
            given: its name and its arguments.
        """
        outer = self.variables, self.functions, self.locals, self.own_name
        starts = [shown(word) for word in before]
        is_given = not before or starts[0] in HANDS_ON and not any(word.startswith(LETS_GO) for word in starts)
        self.variables, self.functions = {FOLDER: self._folder()}, dict(self.functions)
        for name, value in outer[0].items():
            mark = outer[0].get(f"-x {name}", hole("-a") if "-a" in outer[0] else ())
            if mark and name.isidentifier() and name != "IFS" and not isinstance(value, list):
                shared = value if is_given and mark == EXPORTED else hole(f"${name}")
                self.variables |= {name: shared, f"-x {name}": hole("-x") if known(shared) is None else EXPORTED}
        for word in before:
            name, value = _pair(word)
            others = {one: hole(shown(word)) for one in re.findall(r"(\w+)=", shown(word))}
            self.variables |= {name: value, f"-x {name}": EXPORTED} if name else others
        self.positional, self.locals, self.own_name = list(given[1:]), None, next(iter(given), hole("$0"))
        self.attempt(lambda: self.evaluate(text))
        self.variables, self.functions, self.locals, self.own_name = outer

    def _within(self, positional: list[Text], source: int, work: Callable[[], object], shares: bool = False) -> None:
        """Run a function, a sourced file or an evaluated text, from which the script may return.

        Args:
            shares: whether the arguments that it sets are those of the script too.
        """
        outer = self.positional, self.source, self.returned
        self.positional, self.source, self.returned = positional, source, []
        try:
            with self.deeper():
                work()
        except Returned:
            pass
        finally:
            for branch, state in self.returned:
                self.join(state, self.variables, branch)
            positional, self.source, self.returned = outer
            self.positional = self.positional if shares else positional

    def _declare(self, node: Node) -> None:
        """`export`, `local` and the like; within a function most of them make a variable of its own."""
        kind, *parts = map(_said, node.children)
        flags = "".join(part for part in parts if part[:1] in ("-", "+"))
        for child in node.named_children:
            is_plain = child.type in ("variable_assignment", "variable_name")
            words = self.words(child) if not is_plain and _said(child)[:1] not in ("-", "+") else []
            for name, value in [(re.split(r"[+=\[]", _said(child))[0], ())] if is_plain else map(_pair, words):
                mark, is_own = f"-x {name}", kind in OF_FUNCTION and not set(flags) & set("gpf")
                if self.locals is not None and is_own and name not in self.locals:
                    self.locals |= {key: self.variables.get(key) for key in (name, mark)}
                    if child.type == "variable_name":
                        self.variables.pop(name, None)
                if "+x" in flags or kind == "export" and "n" in flags:
                    self.variables.pop(mark, None)
                elif kind == "export" or "x" in flags:
                    self.variables[mark] = EXPORTED
                if is_plain:
                    self.run(child)
                elif name:
                    self.variables[name] = value
                if not name or kind in OF_FUNCTION and "n" in flags:
                    self.unread(node, "which variables it sets is not known")
                if kind in OF_FUNCTION and set(flags) & set("ilnu"):
                    self.variables[name] = hole(_said(child), self.lines(node))
                if kind not in OF_FUNCTION or "g" in flags:
                    self._beyond(name, "g" in flags)

    def _beyond(self, name: str, is_global: bool = False) -> None:
        """A variable that a function sets beyond one that is its own, or in front of it, is not known from then on."""
        for held in self.held:
            if name in held and (is_global or held is not self.locals):
                held[name] = self.variables[name] = hole(f"${name}")

    def _launch(self, node: Node, words: list[Text]) -> None:
        said = [word_of(word).text for word in words]
        at = next((place for place, one in enumerate(said) if is_train(one)), None)
        programs = [one.rpartition("/")[2] for one in said[:at] if one[:1] != "-"]
        before = programs[-1] if programs else HOLE
        starts = any(map(PYTHON.fullmatch, programs)) or HOLE in before or before in HANDS_ON
        if at is None or not starts or programs[:1] and programs[0] in (*LEAVES_FILES, *COPIES, *EDITS):
            self._other(node, words)
            return
        name, arguments = node.child_by_field_name("name"), node.children_by_field_name("argument")
        ends = [child.end_byte for child in arguments if _said(child) not in ('"$@"', "$@")]
        if not ends and name is not None and not re.match(r'"?\$\{?[@*\d]', _said(name)):
            ends = [name.end_byte]
        place = (0, 0) if self.elsewhere or not ends else (ends[-1], ends[-1])
        parts = {part.lower() for word in words for part in shown(word).replace(":", "/").split("/")}
        given = tuple(map(word_of, words[at + 1 :]))
        hosts = frozenset(parts & PACKAGES)
        self.found.append(
            Launch(self.lines(name or node)[0], given, hosts, place, self.branch, folder=shown(self._folder()))
        )

    def _other(self, node: Node, words: Sequence[Text]) -> None:
        """A command that is no start: what it may write, and what it may start out of sight."""
        name, *given = [shown(word) for word in words if known(word) != "sudo"] or [""]
        name = name.rpartition("/")[2]
        if name in LEAVES_FILES:
            return
        names = {part for word in given for part in re.split("[= ]", word)}
        self.reading.handed |= names | set(map(os.path.basename, names))
        if name in COPIES:
            within = (os.path.normpath(f"{given[-1]}/{os.path.basename(word)}") for word in given[:-1])
            changed = [*given[-1:], *within]
        else:
            is_edit = name in EDITS and any(re.match(r"-\w*[iOo]|--in|--out", word) for word in given)
            changed = given if is_edit else []
        for file in changed:
            self._write(file, hole(one_line(node)))
        if name in (*COPIES, *EDITS):
            return
        shell, _ = _shell_of(words, "c")
        if NAMES_TRAIN.search(f"{_said(node)} {' '.join(given)}"):
            self.unread(node, "may start train.py too")
        elif shell in (0, *range(len(given))) and words or any(word.endswith(".sh") for word in (name, *given)):
            self.unread(node, "runs another script, which is not read")

    def _exit(self, node: Node, words: list[Text]) -> None:
        self.reading.ended = f": the script exits in line {self.lines(node)[0]}"
        raise Ended

    def _return(self, node: Node, words: list[Text]) -> None:
        raise Returned(dict(self.variables))

    def remember(self, branch: str, ended: Ended) -> None:
        if isinstance(ended, Returned):
            self.returned.append((branch, ended.value))

    def _shift(self, node: Node, words: list[Text]) -> None:
        said = known(words[0]) if words else "1"
        count = int(said) if said and said.isdigit() and len(said) < 8 else 1
        unsure = [word for word in self.positional[:count] if not _is_one(word)]
        self.positional = [*unsure, *self.positional[count:]]

    def _set(self, node: Node, words: list[Text]) -> None:
        """`set -- WORD ...`, which sets the script's own arguments, unless `${!NAME}` finds no name and it fails."""
        said = [known(word) for word in words]
        exports = re.search(r"(?:^| )([-+])(?:\w*a|o allexport)", _said(node).partition(" -- ")[0])
        if exports:
            self.variables["-a"] = EXPORTED if exports[1] == "-" else hole("set -a")
        if "--" in said:
            fails = "${!" in _said(node)
            self.positional = [hole(_said(node), self.lines(node))] if fails else words[said.index("--") + 1 :]

    def _computed(self, node: Node) -> None:
        """`((NAME += 1))`: the value is not known."""
        if any(child.type in ("++", "--") or child.type in ASSIGNS for child in node.children):
            self.variables[_said(node.named_children[0])] = hole(_said(node), self.lines(node))

    def _fill(self, node: Node, words: list[Text]) -> None:
        """Variables whose values come from outside, but for a herestring."""
        here = next((child for child in node.children if child.type == "herestring_redirect"), None)
        names = [shown(word).partition("=")[0].rstrip("+-*/% ") for word in words if shown(word)[:1] != "-"]
        is_whole = here is not None and len(names) == 1 and node.children[0].type == "command_name"
        text = self.text(here.named_children[0]) if here and is_whole else hole(_said(node), self.lines(node))
        value: Value = text
        said = known(text)
        if _said(node.children[0]) in ("mapfile", "readarray"):
            value = [text] if said is None else [literal(line, self.lines(node)) for line in said.split("\n")]
        elif "IFS" in self.variables or said is not None and ("\\" in said or said != said.strip() or "\n" in said):
            value = hole(_said(node), self.lines(node))  # `read` drops what stands around a line and before a letter
        elif any(shown(word)[:1] == "-" and "a" in shown(word) for word in words):  # read -ra NAME
            value = fields(text)
        self.variables |= dict.fromkeys(names, value)

    def _unset(self, node: Node) -> None:
        for word in (word for child in node.named_children for word in self.words(child)):
            name, item, _ = shown(word).partition("[")
            self.variables.pop(name, None)
            self.variables.pop(f"-x {name}", None)
            self.variables |= {name: hole(_said(node), self.lines(node))} if item else {}
            self._beyond(name)

    def _source(self, node: Node, words: list[Text]) -> None:
        """Read a file that the script sources, where it can be found."""
        said, folder = (known(word) or "" for word in (words[0] if words else (), self._folder()))
        name = next((one for one in (os.path.join(folder, said), said) if os.path.isfile(one)), None)
        if name is None:
            self.unread(node, "the file is not here")
            return
        text = text_of(Path(name))
        self.reading.spend(len(text))
        self._within(words[1:] or self.positional, len(self.texts), lambda: self.run_text(text))

    def _folder(self) -> Text:
        return spaced(_as_words(self.variables.get(FOLDER, ())))

    def _cd(self, node: Node, words: list[Text]) -> None:
        """Keep the folder, in which the files that are sourced are looked for first, and the one before."""
        to, before = words[-1] if words else hole("cd"), self._folder()
        there = (*(() if shown(to).startswith("/") else before), *to, Piece("/"))
        self.variables[FOLDER] = self.variables.get(LEFT, hole("-")) if shown(to) == "-" else there
        self.variables[LEFT] = before

    def _eval(self, node: Node, words: list[Text]) -> None:
        self.evaluate(spaced(words), shares=True)
        if known(spaced(words)) is None and not OF_A_SHELL.fullmatch(shown(spaced(words))):
            self.unread(node, "its text is not known")

    def evaluate(self, text: Text, shares: bool = False) -> None:
        """Read a text as a script, with a variable in place of each part that is not known.

        Args:
            shares: whether the variables that it sets are those of the script too.
        """
        before = dict(self.variables)
        said = ""
        for piece in self.reading.paid(text):
            if piece.text is not None and not piece.branch:
                said += piece.text
                continue
            # Words that a branch adds stay words.
            are_words = piece.text is not None and PLAIN_WORDS.fullmatch(piece.text)
            for word in (piece.text or "").split() if are_words else [piece.text]:
                name = f"unknown_{len(self.variables)}"
                self.variables[name] = (replace(piece, text=word, span=None),)
                said += f"{' ' if are_words else ''}${{{name}}}"
        self._within(self.positional, len(self.texts), lambda: self.run_text(said), shares)
        self.variables = self.variables if shares else before

    def _redirected(self, node: Node) -> None:
        """A command, and the files that it writes."""
        body = node.child_by_field_name("body")
        printed = self.printed(body, node) if body is not None else ()
        heredoc, pipe = next(parts_of(node, "heredoc_body"), None), next(parts_of(node, "pipeline"), None)
        self._writes(node, hole(one_line(node)) if printed is None else printed)
        if body is None:
            return
        reader = pipe.named_children[0] if pipe and printed is not None and pipe.named_child_count == 1 else body
        if reader.type == "redirected_statement":  # `cat <<EOF | tee FILE > /dev/null`
            self._writes(reader, hole(one_line(reader)))
            reader = reader.child_by_field_name("body") or reader
        is_plain = reader.type == "command" and reader.children[0].type == "command_name"
        given = [word for word in (self.command_words(reader) if is_plain else []) if known(word) != "--"]
        at, behind = _shell_of(given, "s")
        is_input = all(shown(word)[:1] in "-+" or known(word) == "pipefail" for word in given[at + 1 : behind])
        if heredoc is not None and at < len(given) and is_input:
            self.ran |= {(self.source, body.id), (self.source, reader.id)}
            pipe = pipe if printed is None else None
            text = self._heredoc(heredoc) if printed is None else printed
            self._other_shell(given[:at], text, [given[at], *given[behind:]])
        elif printed is None:
            self.run(body)
            if heredoc is not None and NAMES_TRAIN.search(_said(heredoc)):
                Shell.unread(self, node, "may start train.py too")
        else:
            self.ran.add((self.source, body.id))
            for words in [given] if reader is body else [self.command_words(body), given]:
                if words and known(words[0]) == "tee":
                    self._tee(words, printed)
                    pipe = None if words is given else pipe
        self.run_all(pipe.named_children if pipe is not None else ())
        self.run_all(
            right for one in parts_of(node, "heredoc_redirect") for right in one.children_by_field_name("right")
        )

    def _writes(self, node: Node, text: Text) -> None:
        """Keep what a statement writes into the files behind its `>` and `>>`."""
        for redirect in parts_of(node, "file_redirect"):
            sign = next((child.type for child in redirect.children if not child.is_named), "")
            if ">" in sign and "&" != sign[-1:] and redirect.named_children:
                is_all = redirect.child_by_field_name("descriptor") is None and sign[0] == ">"
                said = text if is_all else hole(one_line(node))
                self._write(shown(self.text(redirect.named_children[-1])), said, adds=sign.endswith(">>"))

    def _tee(self, words: Sequence[Text], text: Text) -> None:
        flags = [shown(word) for word in words[1:] if shown(word)[:1] == "-"]
        for file in (shown(word) for word in words[1:] if shown(word)[:1] != "-"):
            self._write(file, text, adds=bool(flags))

    def _write(self, file: str, text: Text, adds: bool = False) -> None:
        """Keep what the script writes into a file; what only a branch writes is not sure."""
        before = self.reading.files.get(file, hole("what it holds before")) if adds else ()
        self.reading.files[file] = self.reading.paid(before + (under(text, self.branch) if self.branch else text))

    def printed(self, node: Node, redirected: Node | None = None) -> Text | None:
        """What a command prints; None where only running it would tell."""
        words = self.command_words(node) if node.type == "command" else []
        name = word_of(words[0]).text if words else ""
        if name not in PRINTS or name in self.functions:
            return None
        if name == "echo":
            return (*spaced(word for word in words[1:] if known(word) not in ("-e", "-n")), Piece("\n"))
        if name == "printf":
            return _formatted(words[1:])
        body = next(parts_of(redirected, "heredoc_body"), None) if redirected else None
        if body is None or name == "cat" and len(words) > 1:
            file = shown(words[1]) if len(words) == 2 and name == "cat" else ""
            return self.reading.files.get(file, hole(_said(node), self.lines(node)))
        return self._heredoc(body)

    def _heredoc(self, body: Node) -> Text:
        beside = body.parent.children if body.parent else ()
        start = next((child for child in beside if child.type == "heredoc_start"), None)
        if start is not None and _said(start)[:1] in "'\"\\":
            return self.literal(_said(body), body)
        return self.mixed(body, body.start_byte, body.end_byte)

    # Variables.

    def _assignment(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            self.variables[_said(name.named_children[0])] = hole(_said(node), self.lines(node))
            return
        before = self.variables.get(_said(name))
        adds = any(child.type == "+=" for child in node.children)
        made: Value
        if value is not None and value.type == "array":
            kept = [] if before is None or not adds else before if isinstance(before, list) else [before]
            made = [*kept, *(word for child in value.named_children for word in self.words(child))]
            if any(shown(word)[:1] == "[" and "]=" in shown(word) for word in made):
                made = [hole(_said(node), self.lines(node))]
            self.reading.spend(1 + len(made))
        else:
            first = self._first(before, node) if isinstance(before, list) else before or ()
            made = self.reading.paid((first if adds else ()) + (() if value is None else self.text(value)))
            if isinstance(before, list):
                is_sure = not before or not _depends(before[0])
                made = [made, *before[1:]] if is_sure else hole(_said(node), self.lines(node))
        self.variables[_said(name)] = made
        if "-a" in self.variables:
            self.variables.setdefault(f"-x {_said(name)}", self.variables["-a"])

    # Words and texts.

    def words(self, node: Node) -> list[Text]:
        """The words that a shell makes of one argument."""
        if node.type == "comment":
            return []
        listed = self._listed(node)
        if listed is not None:
            self.reading.spend(1 + len(listed))
            return listed
        braces = BRACES.fullmatch(_said(node)) if node.type in ("word", "concatenation") else None
        if braces:
            expanded = [f"{braces[1]}{one}{braces[3]}" for one in braces[2].split(",")]
            return [self.literal(one, node) for one in expanded if one]
        open_parts = [_said(part) if part.type in ("word", "brace_expression") else "x" for part in node.children]
        if node.type == "concatenation" and re.search(r"\{.*(,|\w\.\.\w).*\}", "".join(open_parts), re.S):
            return [hole(_said(node), self.lines(node))]
        text = self.text(node)
        if node.type in EXPANSIONS:
            split = self._split(self.reading.paid(text))
            # Quotes in a default hold blanks together, and make a word of nothing.
            quotes = node.type == "expansion" and any(letter in _said(node) for letter in "\"'\\")
            return [hole(_said(node), self.lines(node))] if quotes and split != [text] else split
        if node.type in ("concatenation", "string") and any(map(self._may_be_several, node.named_children)):
            named = UNKNOWN.sub(lambda found: shown(self._valued(node, found[1])), _said(node))
            return [hole(named, self.lines(node))]
        span = None if self.elsewhere else (node.start_byte, node.end_byte)
        return [tuple(replace(piece, lines=self.lines(node), span=span) for piece in text)]

    def _split(self, text: Text) -> list[Text]:
        """The words of an expansion without quotes; not known where the script sets other letters to cut at."""
        return [hole(shown(text))] if text and "IFS" in self.variables else fields(text)

    def _may_be_several(self, part: Node) -> bool:
        """Whether a part of a word makes several words: items of an array, or blanks that no quotes hold."""
        if any(several in _said(part) for several in ("$@", "${@", "[@]")):
            return True
        is_split = part.type in EXPANSIONS and part.parent is not None and part.parent.type == "concatenation"
        texts = (piece.text for piece in self.text(part)) if is_split else ()
        return any(text is not None and text.split() != [text] for text in texts)

    def _listed(self, node: Node) -> list[Text] | None:
        """The words of an array that stands alone, quoted or not."""
        said = _said(node)
        if node.type == "string":
            said = said[1:-1]
        if node.type not in ("string", "simple_expansion", "expansion"):
            return None
        items = (lambda found: list(found)) if node.type == "string" else self._items_split
        if said in ("$@", "${@}"):
            return items(self.positional)
        name = said[2:].partition("[@]")[0]
        if said.startswith("${@:"):
            first = int(said[4:-1]) if said[4:-1].isdigit() and len(said) < 8 else 0
            is_sure = first > 0 and all(map(_is_one, self.positional[: first - 1]))
            return items(self.positional[first - 1 :]) if is_sure else None
        if said != f"${{{name}[@]}}" or not name.isidentifier():
            return None
        value = self.variables.get(name)
        if value is None:
            return [hole(said, self.lines(node))]
        return items(value if isinstance(value, list) else [value])

    def _items_split(self, items: Iterable[Text]) -> list[Text]:
        """The words of items that no quotes hold."""
        return [word for item in items for word in self._split(item)]

    def text(self, node: Node) -> Text:
        self.reading.spend()
        return TEXT[node.type](self, node) if node.type in TEXT else hole(_said(node), self.lines(node))

    def literal(self, text: str, node: Node, begin: int | None = None, end: int | None = None) -> Text:
        """A text that stands in the script as it is: in the whole node, or in the bytes from `begin` to `end`."""
        at = self.source, node.start_byte if begin is None else begin, node.end_byte if end is None else end
        return (Piece(text, lines=self.lines(node), at=at),) if text else ()

    def _plain(self, node: Node) -> Text:
        """A word without the backslashes that quote one letter; not known where bash makes something else of it."""
        if EXPANDED.search(_said(node)):
            return hole(_said(node), self.lines(node))
        letters = iter(_said(node))
        said = "".join(next(letters, "") if letter == "\\" else letter for letter in letters)
        return self.literal(said.replace("\n", ""), node)

    def _raw(self, node: Node) -> Text:
        return self.literal(_said(node)[1:-1], node)

    def _ansi(self, node: Node) -> Text:
        """The text of `$'...'`; not known where bash and Python read a letter behind a backslash differently."""
        said = _said(node)[2:-1]
        if re.search(r"\\[^abfnrtv'\"]", said.replace(r"\\", "")):
            return hole(_said(node), self.lines(node))
        return self.literal(re.sub(r"\\.", lambda found: codecs.decode(found[0], "unicode_escape"), said), node)

    def _concatenated(self, node: Node) -> Text:
        """The parts of one word; the parser ends the word `{a$1` behind its dollar."""
        if node.children[-1].type == "$":
            return hole(_said(node), self.lines(node))
        return self.mixed(node, node.start_byte, node.end_byte)

    def mixed(self, node: Node, begin: int, end: int) -> Text:
        """Text with expansions in it; the parser gives no node to some of the plain parts."""
        source, place = node.text or b"", begin
        parts: list[Text] = []

        def plain(upto: int) -> None:
            said = source[place - node.start_byte : upto - node.start_byte].decode(errors="replace")
            said = said if node.type == "concatenation" else _unquoted(said)
            parts.append(self.literal(said, node, place, upto))

        for child in node.named_children:
            if child.type not in ("string_content", "heredoc_content"):
                plain(child.start_byte)
                parts.append(self.text(child))
                place = child.end_byte
        plain(end)
        return self.reading.paid(tuple(piece for part in parts for piece in part))

    def _valued(self, node: Node, name: str, whole: bool = False) -> Text:
        """`$NAME`, and `$1`, `$0`, `$@`; of an array its first item, or all items with `whole`."""
        if name == "0":
            return self.own_name
        if name.isdigit():
            return next(iter(self._argument(name)), hole(_said(node), self.lines(node)))
        value = self.positional if name in ("@", "*") else self.variables.get(name)
        if value is None:
            return hole(_said(node), self.lines(node))
        if not isinstance(value, list):
            return value
        if not whole and name not in ("@", "*"):
            return self._first(value, node)
        return hole(_said(node), self.lines(node)) if "IFS" in self.variables else spaced(value)

    def _first(self, items: list[Text], node: Node) -> Text:
        """The first item of an array, which its name alone means and sets; not known where a branch gives it."""
        first = next(iter(items), ())
        return hole(_said(node), self.lines(node)) if _depends(first) else first

    def _argument(self, name: str) -> list[Text]:
        """`$NAME` of the script's own arguments, which is not known behind a word that may be several."""
        words = self.positional[: int(name[:3])]
        return words[int(name[:3]) - 1 :] if all(map(_is_one, words)) else [hole(f"${name}")]

    def _braced(self, node: Node) -> Text:
        """`${NAME}`, `${NAME:-default}` and the like; all that cuts or counts is not known."""
        unknown = hole(_said(node), self.lines(node))
        named = node.named_children[0] if node.named_children else None
        if named is None:
            return unknown
        name = _said(named).partition("[")[0]
        if name == "BASH_SOURCE":
            return literal(str(self.path))
        if named.type == "subscript" and not _said(named).endswith(("[@]", "[*]")):
            return unknown
        operators = [child.type for child in node.children if not child.is_named and child.type not in ("${", "}")]
        value = self.variables.get(name, self._argument(name) if name.isdigit() else None)
        whole = named.type == "subscript"
        if isinstance(value, list) and not whole:
            value = self._first(value, node) if value else None
        if operators and operators[0] in ("-", "=", "+"):
            is_set = value is not None and value != []
        else:
            text = spaced(value) if isinstance(value, list) else value or ()
            is_set = any(piece.text != "" for piece in text)
        if not operators or operators[0] in (":?", "?") or is_set and operators[0] in DEFAULTS:
            return self._valued(node, name, whole)
        is_alternative = is_set and operators[0] in ("+", ":+")
        if not is_alternative and operators[0] not in DEFAULTS or len(node.named_children) < 2:
            return unknown
        text = tuple(piece for child in node.named_children[1:] for piece in self.text(child))
        if "'" in _said(node) and node.parent is not None and node.parent.type in ("string", "heredoc_body"):
            text = unknown  # there a single quote is a letter
        if is_alternative:
            is_sure = isinstance(value, list) or any(piece.text and not piece.branch for piece in value or ())
            return text if is_sure else unknown
        self.reading.assume_unset(name)
        if operators[0].endswith("="):
            self.variables[name] = text
        return text

    def _substituted(self, node: Node) -> Text:
        """The output of commands that name or print files; of others it is not known."""
        inner = [child for child in node.named_children if child.type != "comment"]
        with self.deeper():
            found = self._output(inner) if inner else None
            if found is None and NAMES_TRAIN.search(_said(node)):  # a start whose output is kept
                before = dict(self.variables)
                self.attempt(lambda: self.run_all(inner))
                self.variables = before
        is_known = found is not None and any(piece.text is not None for piece in found)
        if not found or not is_known:
            return hole(_said(node), self.lines(node))
        *parts, last = found
        return (*parts, replace(last, text=last.text.rstrip("\n"))) if last.text is not None else found

    def _output(self, nodes: Sequence[Node]) -> Text | None:
        *before, node = nodes
        if not all(one.type != "list" and _said(one).startswith("cd ") for one in before):
            return None
        if node.type == "list":
            return self._output(node.named_children[:2])
        if node.type == "redirected_statement":
            body = node.child_by_field_name("body")
            return (self.printed(body, node) or self._output([*nodes[:-1], body])) if body else None
        if node.type != "command":
            return None
        words = self.command_words(node)
        name, given = (
            known(words[0]) if words else "",
            [word for word in words[1:] if known(word) not in ("--", "-P")],
        )
        if name == "pwd" and len(nodes) > 1:
            return self._output(nodes[:-1])
        if name == "dirname" and len(given) == 1 and known(given[0]) is not None:
            return literal(str(Path(known(given[0]) or "").parent), given[0][0].lines)
        if name in ("cd", "realpath", "readlink") and given and known(given[-1]) is not None:
            return given[-1]
        return self._ours(node, words) or self.printed(node)

    def _ours(self, node: Node, words: Sequence[Text]) -> Text | None:
        """`python -m mis_plugins config path NAME`: the file of a preset."""
        said = known(spaced(words)) or ""
        name, *options = next((said.partition(mark)[2].split() for mark in OUR_PATH if mark in said), [""])
        try:
            find = watching if "--watch" in options else file_of
            return literal(str(find(name).absolute()), self.lines(node)) if name else None
        except UserError as error:
            self.unread(node, str(error))
            return None

    # Places.

    def lines(self, node: Node) -> Lines:
        return (0, 0) if self.elsewhere else (node.start_point[0] + 1, node.end_point[0] + 1)

    def unread(self, node: Node, why: str) -> None:
        first, _, more = ("a sourced file" if self.elsewhere else _said(node)).partition("\n")
        self.reading.unread.setdefault(self.lines(node)[0], f"{first}{' ...' if more else ''}: {why}")

    # Tests.

    def truth(self, node: Node) -> bool | None:
        """Whether a condition holds; None where only running the script would tell."""
        if node.type == "command":
            words = self.command_words(node)
            return {"true": True, "false": False}.get(known(words[0]) or "") if words else None
        if node.type in ("test_command", "parenthesized_expression"):
            return self.truth(node.named_children[0]) if len(node.named_children) == 1 else None
        if node.type in ("word", *TEXT):
            said = self._tested(node)
            return None if said is None else said != ""
        sign = next(map(_said, node.children_by_field_name("operator")), "")
        sides = [child for child in node.named_children if child.type != "test_operator"]
        if node.type == "binary_expression" and len(sides) == 2:
            return self._compared(sign, *sides)
        if node.type not in ("unary_expression", "negated_command"):
            return None
        sign, last = _said(node.children[0]), node.named_children[-1]
        if sign == "!":
            inner = self.truth(last)
            return None if inner is None else not inner
        said = self._tested(last) if sign in ("-n", "-z") else None
        return None if said is None else (said == "") == (sign == "-z")

    def _compared(self, sign: str, left: Node, right: Node) -> bool | None:
        if sign in ("&&", "||"):
            return (any_of if sign == "||" else all_of)([self.truth(left), self.truth(right)])
        is_number = sign in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le")
        one = self._tested(left) if is_number or sign in ("=", "==", "!=") else None
        if one is None:
            return None
        if is_number:
            both = one, known(self.text(right)) or ""
            are_plain = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", said) for said in both)
            return getattr(operator, sign[1:])(*map(int, both)) if are_plain else None
        fits = _fits(one, self._pattern(right))
        return None if fits is None else fits == (sign != "!=")

    def _tested(self, node: Node) -> str | None:
        """The text of a part of a test; `${NAME:-}` is taken for empty, but where the script may exit."""
        text, top = self.text(node), node
        empty = re.fullmatch(r"\$\{(\w+):?-\}", text[0].source) if len(text) == 1 and not _depends(text) else None
        if empty is None:
            return known(text)
        while top.parent is not None and top.parent.parent is not None:
            top = top.parent
        said = _said(top)
        if any(
            "exit" in one
            for one in (said, *(_said(body) for name, (body, _) in self.functions.items() if name in said))
        ):
            return None
        self.reading.assume_unset(empty[1])
        return ""


DEFAULTS = (":-", "-", ":=", "=")
RUN: dict[str, Callable[[Shell, Node], object]] = {
    **dict.fromkeys(
        ("program", "variable_assignments", "compound_statement", "do_group", "pipeline", "negated_command"),
        Shell._children,
    ),
    "declaration_command": Shell._declare,
    **dict.fromkeys(("binary_expression", "unary_expression", "postfix_expression"), Shell._computed),
    "unset_command": Shell._unset,
    "command": Shell._command,
    "variable_assignment": Shell._assignment,
    "redirected_statement": Shell._redirected,
    "subshell": Shell._children,
    "list": Shell._status,
    "if_statement": Shell._if,
    "case_statement": Shell._case,
    "for_statement": Shell._for,
    "c_style_for_statement": Shell._loop,
    "while_statement": Shell._loop,
    "function_definition": Shell._function,
}
"""How each kind of statement is read; of others nothing is."""
TEXT: dict[str, Callable[[Shell, Node], Text]] = {
    **dict.fromkeys(("word", "number", "variable_name", "extglob_pattern", "test_operator"), Shell._plain),
    "raw_string": Shell._raw,
    "ansi_c_string": Shell._ansi,
    "string": lambda shell, node: shell.mixed(node, node.start_byte + 1, node.end_byte - 1),
    "translated_string": lambda shell, node: shell.text(node.named_children[-1]),
    "concatenation": Shell._concatenated,
    "simple_expansion": lambda shell, node: shell._valued(node, _said(node).removeprefix("$")),
    "expansion": Shell._braced,
    "command_substitution": Shell._substituted,
}
"""How each kind of word is read; any other is not known."""
COMMANDS: dict[str, Callable[[Shell, Node, list[Text]], None]] = {
    "source": Shell._source,
    ".": Shell._source,
    "eval": Shell._eval,
    "exit": Shell._exit,
    "cd": Shell._cd,
    **dict.fromkeys(("exec", "time"), lambda shell, node, words: shell.call(node, words)),
    "return": Shell._return,
    "shift": Shell._shift,
    "set": Shell._set,
}


def _said(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def one_line(node: Node) -> str:
    """The first line of what a node says."""
    return _said(node).partition("\n")[0]


def _of_lines_before(node: Node) -> list[Node]:
    """Assignments of the lines before a command, `A=x B=y`, which the parser puts in front of the command."""
    found: list[Node] = []
    held: list[Node] = []
    for child in node.children:
        end = held[-1].end_byte if held else child.start_byte
        between = (node.text or b"")[end - node.start_byte : child.start_byte - node.start_byte]
        if b"\n" in between.replace(b"\\\n", b""):
            found, held = [*found, *held], []
        if child.type != "variable_assignment":
            break
        held.append(child)
    return found


def _ends_early(node: Node) -> bool:
    """Whether a round of a loop may end before the end of its body."""
    is_such = node.type == "command" and _said(node).partition(" ")[0] in ENDS_ROUND
    return is_such or any(map(_ends_early, node.named_children))


def _joined(nodes: Iterable[Node]) -> str:
    return "; ".join(map(_said, nodes))


def _is_one(word: Text) -> bool:
    """Whether a word is surely one: an unquoted expansion may be none or several, and a branch may give none."""
    return not word or any(piece.text is not None or piece.span for piece in word) and not _depends(word)


def _depends(word: Text) -> bool:
    return any(piece.branch for piece in word)


def _succeeds(statement: Node) -> bool:
    """Whether a statement cannot fail: an assignment fails where a command in it does."""
    runs = statement.type in ASSIGNMENTS and ("$(" in _said(statement) or "`" in _said(statement))
    return statement.type in SUCCEEDS and not runs


def _shell_of(words: Sequence[Text], switch: str) -> tuple[int, int]:
    """Where a shell stands among words, and what follows its switch, as `bash -c TEXT`; the end is nowhere."""
    said = [word_of(word).text.rpartition("/")[2] for word in words]
    at = next((place for place, one in enumerate(said) if one in SHELLS), len(said))
    found = (i for i, one in enumerate(said[at:], at + 1) if re.fullmatch(f"-[A-Za-z]*{switch}", one))
    return at, next(found, len(said))


def _pair(word: Text) -> tuple[str, Text]:
    """The name and the value of NAME=VALUE; no name where that is not known."""
    first, *rest = word or (Piece(""),)
    name, equals, said = (first.text or "").partition("=")
    is_pair = equals and name.isidentifier() and not first.branch
    return (name, (replace(first, text=said, span=None), *rest)) if is_pair else ("", ())


def _is_apart(node: Node) -> bool:
    """Whether a statement runs in a shell of its own: in brackets, in the background, or as a part of a pipeline."""
    if node.type == "subshell" or node.next_sibling is not None and node.next_sibling.type == "&":
        return True
    is_part = node.parent is not None and node.parent.type == "pipeline"
    return is_part or node.type == "redirected_statement" and any(parts_of(node, "pipeline"))


def _as_words(value: Value) -> list[Text]:
    return value if isinstance(value, list) else fields(value)


def _fits(said: str, pattern: str) -> bool | None:
    is_short = len(pattern) < 256 and pattern.replace("[*]", "").count("*") < 4
    return fnmatch.fnmatchcase(said, pattern) if is_short and HOLE not in pattern else None


def _unquoted(said: str) -> str:
    """Text of double quotes, where a backslash quotes a few letters only."""
    for letter in '"$`':
        said = said.replace(f"\\{letter}", letter)
    return said.replace("\\\n", "").replace("\\\\", "\\")


def _formatted(words: Sequence[Text]) -> Text:
    """`printf FORMAT ARGUMENT ...` with %s alone."""
    said = (known(words[0]) or "-").replace("\\n", "\n") if words else "-"
    if said.startswith("-") or re.search(r"%(?!s)|\\", said) or not all(map(_is_one, words)):
        return hole(shown(spaced(words)))
    arguments, count = iter(words[1:]), said.count("%s")
    first, *parts = (said * max(1, -(-len(words[1:]) // max(1, count)) if count else 1)).split("%s")
    return (Piece(first), *(piece for part in parts for piece in (*next(arguments, ()), Piece(part))))


def parts_of(node: Node, kind: str) -> Iterator[Node]:
    """Redirects and pipes of a statement, which the parser may put beside or into a heredoc's."""
    for child in node.children:
        if child.type == kind:
            yield child
        elif child.type == "heredoc_redirect":
            yield from parts_of(child, kind)


def _clauses(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Conditions and body of `if`, of each `elif`, and of `else`, which has no condition."""
    conditions: list[Node] = []
    body: list[Node] = []
    into, rest = body if node.type == "else_clause" else conditions, []
    for child in node.children:
        if child.type == "then":
            into = body
        elif child.type in ("elif_clause", "else_clause"):
            rest.append(child)
        elif child.is_named and child.type != "comment":
            into.append(child)
    yield conditions, body
    for clause in rest:
        yield from _clauses(clause)

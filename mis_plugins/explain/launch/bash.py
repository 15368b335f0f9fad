"""Shell scripts, read by a parser of bash and never executed: what each start of train.py is given.

Variables, arrays, functions, heredocs and sourced files are followed. A branch whose condition is not known is read
both ways, and what only one way gives is marked with the condition.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mis_plugins.config.file import text_of
from mis_plugins.config.loading import file_of
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.launch.fields import (
    Value,
    as_words,
    cost,
    echoed,
    fields,
    fits_pattern,
    formatted,
    joined_words,
    named_hosts,
    spaced,
    text_of_word,
    unescaped,
    unescaped_in_quotes,
    word_of,
)
from mis_plugins.explain.launch.words import (
    Launch,
    Piece,
    Reading,
    Text,
    Word,
    after_train,
    joined,
    known,
    literal,
    shown,
)
from mis_plugins.shared.shell import not_installed

if TYPE_CHECKING:
    from tree_sitter import Node

DEEPEST = 64  # functions, sourced files and evaluated texts within one another
PRINTS = ("echo", "printf", "cat", "tee")
ASKS_PROCESSES = ("pkill", "pgrep", "grep", "ps", "kill")
OUR_PATH = (["-m", "mis_plugins", "config", "path"], ["mis-plugins", "config", "path"])
DEFAULTS = (":-", "-", ":=", "=")


class _Ended(Exception):
    """The script exits."""


class _Returned(_Ended):
    """A function or a sourced file returns."""


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a shell script.

    Args:
        path: where the script lies; files that it sources are looked for from there.
        arguments: what the user starts the script with: NAME=VALUE of its environment, then its own arguments.

    Raises:
        ConfigError: the script nests deeper than any launch script does, or the parser of bash is not installed.
    """
    given = list(arguments)
    shell = Shell(path, reading, [])
    while given and given[0].partition("=")[0].isidentifier() and "=" in given[0]:
        name, _, value = given.pop(0).partition("=")
        shell.variables[name] = literal(value, (0, 0))
    shell.positional = [Word(one, one, (0, 0)) for one in given]
    try:
        shell.run_text(script)
    except RecursionError:
        raise ConfigError(
            "nested deeper than any launch script; give the part that starts train.py"
        ) from None
    except _Ended:
        pass
    return shell.found


def words_of(command: str, path: Path, reading: Reading) -> list[Word]:
    """The words of one command line, each with its bytes in it, up to a control operator."""
    shell = Shell(path, reading, [])
    root = shell.parsed(command)
    commands = [node for node in root.children if node.type == "command"]
    return shell.command_words(commands[0]) if commands else []


class Shell:
    """The variables of a shell as far as they are known."""

    def __init__(self, path: Path, reading: Reading, arguments: list[Word]):
        self.path, self.reading, self.positional = path, reading, arguments
        self.variables: dict[str, Value] = {}
        self.functions: dict[str, tuple[Node, bool]] = {}
        self.found: list[Launch] = []
        self.depth, self.elsewhere = 0, False
        self.branch: str | None = None

    # Running statements.

    def run_text(self, script: str) -> None:
        self.run_all(self.parsed(script).children)

    def parsed(self, script: str) -> Node:
        try:
            import tree_sitter
            import tree_sitter_bash
        except ModuleNotFoundError as error:
            raise ConfigError(not_installed(error, "scripts")) from None
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        source = script.encode()
        # The parser asks whether time is left where it reads by pieces, and gives nodes their text where it does not.
        try:
            parser.parse(lambda at, _: source[at : at + 4096], progress_callback=self._is_late)
        except ValueError:
            raise ConfigError("bash's parser finds no end; give the part that starts train.py") from None
        return parser.parse(source).root_node

    def _is_late(self, *_: object) -> bool:
        return self.reading.clock.is_over()

    def run_all(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.run(node)

    def run(self, node: Node) -> None:
        self.reading.spend()
        RUN.get(node.type, Shell._run_nothing)(self, node)

    def _run_nothing(self, node: Node) -> None:
        if node.type == "ERROR":
            self.unread(node, "no bash that the parser knows")

    def _run_children(self, node: Node) -> None:
        self.run_all(node.named_children)

    def _run_subshell(self, node: Node) -> None:
        before = dict(self.variables)
        self.attempt(lambda: self._run_children(node))
        self.variables = before

    def _run_list(self, node: Node) -> None:
        """`left && right`, `left || right`."""
        self._status(node)

    def _status(self, node: Node) -> bool | None:
        """Run a part of a list; whether it succeeds, which a command is taken to do where nothing is known."""
        if node.type != "list":
            truth = self.truth(node)
            if node.type != "test_command":
                self.run(node)
                return truth is not False
            return truth
        left, right = node.named_children[0], node.named_children[-1]
        status = self._status(left)
        if status is None:
            self.fork(_said(left), lambda: self.run(right), lambda: None)
        elif status == any(child.type == "&&" for child in node.children):
            return self._status(right)
        return status

    def _run_if(self, node: Node) -> None:
        self._choose(list(_clauses(node)))

    def _choose(self, clauses: list[tuple[list[Node], list[Node]]]) -> None:
        if not clauses:
            return
        (conditions, body), rest = clauses[0], clauses[1:]
        truth = self.truth(conditions[-1]) if conditions else True
        if truth is None:
            label = "; ".join(map(_said, conditions))
            self.fork(label, lambda: self.run_all(body), lambda: self._choose(rest))
        elif truth:
            self.run_all(body)
        else:
            self._choose(rest)

    def _run_case(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = self.text(subject) if subject else ()
        said = known(value)
        clauses = [_case_item(item) for item in node.named_children if item.type == "case_item"]
        if said is not None:
            fitting = (body for patterns, body in clauses if any(fits_pattern(said, one) for one in patterns))
            self.run_all(next(fitting, []))
            return
        self._cases(shown(value), clauses)

    def _cases(self, subject: str, clauses: list[tuple[list[str], list[Node]]]) -> None:
        if not clauses:
            return
        (patterns, body), rest = clauses[0], clauses[1:]
        if "*" in patterns:
            self.run_all(body)
        else:
            label = f"{subject} is {' or '.join(patterns)}"
            self.fork(label, lambda: self.run_all(body), lambda: self._cases(subject, rest))

    def _run_for(self, node: Node) -> None:
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        values = [word for child in node.children_by_field_name("value") for word in self.words(child)]
        if name is None or body is None:
            return
        if all(word.is_known for word in values) and values:
            for word in values:
                self.variables[_said(name)] = literal(word.text, word.lines)
                self.run(body)
        else:
            self.variables[_said(name)] = self.hole(node, f"${_said(name)}")
            self.fork(_head(node), lambda: self.run(body), lambda: None)

    def _run_loop(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.fork(_head(node), lambda: self.run(body), lambda: None)

    def _run_function(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[_said(name)] = body, self.elsewhere

    def attempt(self, work: Callable[[], None]) -> _Ended | None:
        """Do some work; what ended it, if it ended the script or a function."""
        try:
            work()
        except _Ended as ended:
            return ended
        return None

    def fork(self, label: str, one: Callable[[], None], other: Callable[[], None]) -> None:
        """Read two branches, of which only running the script would tell the one that is taken."""
        before, outer = dict(self.variables), self.branch
        self.branch = outer or label
        ended = self.attempt(one)
        first, self.variables = self.variables, dict(before)
        self.branch = outer or f"not: {label}"
        ended_other = self.attempt(other)
        self.branch = outer
        if ended and ended_other:
            raise ended_other
        if ended_other:
            self.variables = first
        elif not ended:
            self.variables = self._joined(first, self.variables, label)

    def _joined(self, one: dict[str, Value], other: dict[str, Value], label: str) -> dict[str, Value]:
        both: dict[str, Value] = {}
        for name in one | other:
            left, right = one.get(name, ()), other.get(name, ())
            if left == right:
                both[name] = left
            elif isinstance(left, tuple) and isinstance(right, tuple):
                both[name] = joined(left, right, label)
            else:
                both[name] = joined_words(as_words(left), as_words(right), label)
            self.reading.spend(len(both[name]))
        return both

    # Commands.

    def _run_command(self, node: Node) -> None:
        self.call(node, self.command_words(node))

    def command_words(self, node: Node) -> list[Word]:
        name = node.child_by_field_name("name")
        parts = [*(name.named_children if name else ()), *node.children_by_field_name("argument")]
        return [word for part in parts for word in self.words(part)]

    def call(self, node: Node, words: list[Word]) -> None:
        name = words[0].text if words else ""
        if name in self.functions:
            self._call_function(name, words[1:])
        elif name.startswith("--"):
            self.unread(node, "a command that begins with a flag; does the line above lack its backslash?")
        elif name in COMMANDS:
            COMMANDS[name](self, node, words[1:])
        elif name not in ASKS_PROCESSES and name not in PRINTS:
            self._launch(node, words)

    def _call_function(self, name: str, arguments: list[Word]) -> None:
        self._deeper()
        (body, elsewhere), outer = self.functions[name], (self.positional, self.elsewhere)
        self.positional, self.elsewhere = arguments, elsewhere
        try:
            self.run(body)
        except _Returned:
            pass
        finally:
            self.positional, self.elsewhere = outer
            self.depth -= 1

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ConfigError(f"functions or sourced files call each other more than {DEEPEST} levels deep")

    def _launch(self, node: Node, words: list[Word]) -> None:
        given = after_train(words)
        if given is None:
            return
        arguments = node.children_by_field_name("argument")
        ends = [child.end_byte for child in arguments if _said(child) not in ('"$@"', "$@")]
        place = (0, 0) if self.elsewhere else (ends[-1], ends[-1])
        self.found.append(Launch(self.line(node), given, named_hosts(words), place, self.branch))

    def _exit(self, node: Node, words: list[Word]) -> None:
        self.reading.ended = f": the script exits in line {self.line(node)}"
        raise _Ended

    def _return(self, node: Node, words: list[Word]) -> None:
        raise _Returned

    def _shift(self, node: Node, words: list[Word]) -> None:
        self.positional = self.positional[1:]

    def _fill(self, node: Node, words: list[Word]) -> None:
        """`read`, `mapfile`, `unset`: variables whose values come from outside, but for a herestring."""
        here = next((child for child in node.children if child.type == "herestring_redirect"), None)
        for word in words:
            if not word.text.startswith("-"):
                source = self.text(here.named_children[0]) if here else self.hole(node, _said(node))
                self.variables[word.text] = source

    def _source(self, node: Node, words: list[Word]) -> None:
        """Read a file that the script sources, where it can be found."""
        file = Path(words[0].text) if words and words[0].is_known else None
        if file is None or not file.is_file():
            self.unread(node, "the file is not here")
            return
        self._deeper()
        outer, self.elsewhere = (self.positional, self.elsewhere), True
        self.positional = words[1:] or self.positional
        try:
            text = text_of(file)
            self.reading.spend(len(text))
            self.run_text(text)
        except _Returned:
            pass
        finally:
            self.positional, self.elsewhere = outer
            self.depth -= 1

    def _eval(self, node: Node, words: list[Word]) -> None:
        if not all(word.is_known for word in words):
            self.unread(node, "its text is not known")
            return
        self._deeper()
        outer, self.elsewhere = self.elsewhere, True
        self.run_text(" ".join(word.text for word in words))
        self.elsewhere = outer
        self.depth -= 1

    def _run_declaration(self, node: Node) -> None:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.run(child)

    def _run_redirected(self, node: Node) -> None:
        """A command, and the file that `cat`, `echo`, `printf` or `tee` writes."""
        body = node.child_by_field_name("body")
        if body is None:
            return
        target = next(_descend(node, "file_redirect"), None)
        printed = self.printed(body, node)
        if printed is None:
            self.run(body)
            return
        words = self.command_words(body)
        if words[0].text == "tee" and len(words) > 1:
            self.reading.files[words[-1].source] = printed
        elif target is not None and target.named_children:
            self.reading.files[shown(self.text(target.named_children[-1]))] = printed

    def printed(self, node: Node, redirected: Node | None = None) -> Text | None:
        """What a command prints; None where only running it would tell."""
        words = self.command_words(node) if node.type == "command" else []
        name = words[0].text if words else ""
        if name not in PRINTS or name in self.functions:
            return None
        body = next(_descend(redirected, "heredoc_body"), None) if redirected else None
        if name in ("cat", "tee"):
            if body is not None:
                return self._heredoc(body)
            file = words[1].source if len(words) == 2 else ""
            return self.reading.files.get(file, self.hole(node, _said(node)))
        return formatted(words[1:]) if name == "printf" else echoed(words[1:])

    def _heredoc(self, body: Node) -> Text:
        start = next(_siblings(body, "heredoc_start"), None)
        quoted = start is not None and _said(start)[:1] in "'\"\\"
        return (
            literal(_said(body), self.lines(body))
            if quoted
            else self.mixed(body, body.start_byte, body.end_byte)
        )

    # Variables.

    def _run_assignment(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            base = name.child_by_field_name("name")
            self.variables[_said(base or name)] = self.hole(node, _said(node))
            return
        adds = any(child.type == "+=" for child in node.children)
        self._assign(_said(name), self._value(value), adds)

    def _value(self, node: Node | None) -> Value:
        if node is None:
            return ()
        if node.type == "array":
            return [word for child in node.named_children for word in self.words(child)]
        return self.text(node)

    def _assign(self, name: str, value: Value, adds: bool) -> None:
        before = self.variables.get(name, ()) if adds else ()
        if isinstance(before, list) or isinstance(value, list):
            whole: Value = [*as_words(before), *as_words(value)]
        else:
            whole = before + value
        self.reading.spend(1 + cost(whole))
        self.variables[name] = whole

    # Words and texts.

    def words(self, node: Node) -> list[Word]:
        """The words that a shell makes of one argument."""
        if node.type == "comment":
            return []
        listed = self._listed(node)
        if listed is not None:
            self.reading.spend(1 + cost(listed))
            return listed
        text = self.text(node)
        if node.type in ("simple_expansion", "expansion", "command_substitution"):
            return fields(text)
        return [self._word(node, text)]

    def _word(self, node: Node, text: Text) -> Word:
        word = word_of(text, self.lines(node))
        alone = None if self.elsewhere else (node.start_byte, node.end_byte)
        return replace(word, source=word.source or _said(node), span=alone, lines=self.lines(node))

    def _listed(self, node: Node) -> list[Word] | None:
        """The words of an array that stands alone, quoted or not."""
        inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        if node.type == "string" and inner.end_byte - inner.start_byte != node.end_byte - node.start_byte - 2:
            return None
        if inner.type == "simple_expansion" and _said(inner) == "$@":
            return list(self.positional)
        if inner.type != "expansion":
            return None
        if _said(inner).startswith(("${@}", "${@:")):
            first = _said(inner)[4:-1] or "1"
            return list(self.positional[int(first) - 1 :]) if first.isdigit() and len(first) < 4 else None
        part = next((child for child in inner.named_children if child.type == "subscript"), None)
        name = part and part.child_by_field_name("name")
        if part is None or name is None or len(inner.named_children) > 1 or not _said(part).endswith("[@]"):
            return None
        if any(child.type in "#!" for child in inner.children):
            return None
        value = self.variables.get(_said(name))
        if value is None:
            return [self._word(inner, self.hole(inner, _said(inner)))]
        return list(value) if isinstance(value, list) else fields(value)

    def text(self, node: Node) -> Text:
        self.reading.spend()
        return TEXT.get(node.type, Shell._unknown)(self, node)

    def _unknown(self, node: Node) -> Text:
        return self.hole(node, _said(node))

    def _plain(self, node: Node) -> Text:
        return literal(unescaped(_said(node)), self.lines(node))

    def _raw(self, node: Node) -> Text:
        return literal(_said(node)[1:-1], self.lines(node))

    def _ansi(self, node: Node) -> Text:
        said = _said(node)[2:-1]
        try:
            return literal(
                codecs.decode(said, "unicode_escape") if said.isascii() else said, self.lines(node)
            )
        except UnicodeDecodeError:
            return self.hole(node, _said(node))

    def _quoted(self, node: Node) -> Text:
        return self.mixed(node, node.start_byte + 1, node.end_byte - 1)

    def _concatenated(self, node: Node) -> Text:
        return self.mixed(node, node.start_byte, node.end_byte)

    def mixed(self, node: Node, begin: int, end: int) -> Text:
        """Text with expansions in it; the parser gives no node to some of the plain parts."""
        quoted, source = node.type != "concatenation", node.text or b""
        parts: list[Text] = []
        place = begin

        def plain(upto: int) -> None:
            said = source[place - node.start_byte : upto - node.start_byte].decode(errors="replace")
            parts.append(literal(unescaped_in_quotes(said) if quoted else said, self.lines(node)))

        for child in node.named_children:
            if child.type in ("string_content", "heredoc_content"):
                continue
            plain(child.start_byte)
            parts.append(self.text(child))
            place = child.end_byte
        plain(end)
        text = tuple(piece for part in parts for piece in part)
        self.reading.spend(1 + cost(text))
        return text

    def _expanded(self, node: Node) -> Text:
        """`$NAME`, and `$1`, `$0`, `$@`."""
        return self._valued(node, _said(node).removeprefix("$"))

    def _valued(self, node: Node, name: str) -> Text:
        if name in ("@", "*"):
            return spaced(self.positional)
        if name == "0":
            return literal(str(self.path), (0, 0))
        if name.isdigit():
            at = self.positional[int(name) - 1 :] if len(name) < 4 else []
            return text_of_word(at[0]) if at else self.hole(node, _said(node))
        value = self.variables.get(name)
        if value is None:
            return self.hole(node, _said(node))
        return spaced(value) if isinstance(value, list) else value

    def _braced(self, node: Node) -> Text:
        """`${NAME}`, `${NAME:-default}` and the like; all that cuts or counts is not known."""
        named = node.named_children[0] if node.named_children else None
        operators = [
            child.type for child in node.children if not child.is_named and child.type not in ("${", "}")
        ]
        if named is None:
            return self.hole(node, _said(node))
        name = named.child_by_field_name("name") if named.type == "subscript" else named
        bare = _said(name or named)
        if bare == "BASH_SOURCE":
            return literal(str(self.path), (0, 0))
        if named.type == "subscript" and not _said(named).endswith(("[@]", "[*]")):
            return self.hole(node, _said(node))
        if not operators:
            return self._valued(node, bare)
        return self._defaulted(node, bare, operators[0], node.named_children[1:])

    def _defaulted(self, node: Node, name: str, operator: str, more: Sequence[Node]) -> Text:
        value = self.variables.get(name)
        if operator in (":?", "?") or value or name.isdigit() and self.positional[int(name[:3]) - 1 :]:
            return self._valued(node, name)
        if operator in DEFAULTS and more:
            text = tuple(piece for child in more for piece in self.text(child))
            self.reading.assume(f"{name} is not set")
            if operator.endswith("="):
                self.variables[name] = text
            return text
        return self.hole(node, _said(node))

    def _substituted(self, node: Node) -> Text:
        """The output of commands that name or print files; of others it is not known."""
        if self.depth > DEEPEST:
            return self.hole(node, _said(node))
        inner = [child for child in node.named_children if child.type != "comment"]
        found = self._folder(inner) if inner else None
        return found if found is not None else self.hole(node, _said(node))

    def _folder(self, nodes: Sequence[Node]) -> Text | None:
        node = nodes[-1]
        if node.type == "list":
            return self._folder(node.named_children[:2])
        if node.type == "redirected_statement":
            body = node.child_by_field_name("body")
            return self.printed(body, node) or self._folder([body]) if body else None
        if node.type != "command":
            return None
        words = self.command_words(node)
        name, given = words[0].text if words else "", [word for word in words[1:] if word.text != "--"]
        if name == "pwd" and len(nodes) > 1:
            return self._entered(nodes[-2])
        if name == "dirname" and len(given) == 1 and given[0].is_known:
            return literal(str(Path(given[0].text).parent), given[0].lines)
        if name in ("realpath", "readlink") and given and given[-1].is_known:
            return text_of_word(given[-1])
        return self._ours(node, words) or self.printed(node)

    def _entered(self, node: Node) -> Text | None:
        """The folder that `cd FOLDER` enters."""
        body = node.child_by_field_name("body") if node.type == "redirected_statement" else node
        words = self.command_words(body) if body is not None and body.type == "command" else []
        given = [word for word in words[1:] if word.text not in ("--", "-P")]
        return text_of_word(given[0]) if words and words[0].text == "cd" and len(given) == 1 else None

    def _ours(self, node: Node, words: list[Word]) -> Text | None:
        """`python -m mis_plugins config path NAME`: the file of a preset."""
        said = [word.text for word in words]
        for prefix in OUR_PATH:
            begin = len(prefix) + (prefix[0] == "-m")
            if said[begin - len(prefix) : begin] == prefix and len(said) > begin and words[begin].is_known:
                try:
                    return literal(str(file_of(said[begin]).absolute()), self.lines(node))
                except UserError as error:
                    self.unread(node, str(error))
        return None

    # Places.

    def line(self, node: Node) -> int:
        return 0 if self.elsewhere else node.start_point[0] + 1

    def lines(self, node: Node) -> tuple[int, int]:
        return (0, 0) if self.elsewhere else (node.start_point[0] + 1, node.end_point[0] + 1)

    def hole(self, node: Node, source: str) -> Text:
        return (Piece(None, source, self.lines(node)),)

    def unread(self, node: Node, why: str) -> None:
        first, _, more = ("a sourced file" if self.elsewhere else _said(node)).partition("\n")
        self.reading.unread.setdefault(self.line(node), f"{first}{' ...' if more else ''}: {why}")

    # Tests.

    def truth(self, node: Node) -> bool | None:
        """Whether a condition holds; None where only running the script would tell."""
        if node.type == "command":
            words = self.command_words(node)
            return {"true": True, "false": False}.get(words[0].text) if words else None
        if node.type in ("test_command", "parenthesized_expression") and len(node.named_children) == 1:
            return self._holds(node.named_children[0])
        return None

    def _holds(self, node: Node) -> bool | None:
        if node.type == "binary_expression" and len(node.named_children) == 2:
            return self._compared(node)
        if node.type == "unary_expression":
            return self._unary(node)
        if node.type == "parenthesized_expression":
            return self.truth(node)
        said = known(self.text(node))
        return None if said is None else said != ""

    def _compared(self, node: Node) -> bool | None:
        left, right = node.named_children
        operator = next((child.type for child in node.children if not child.is_named), "")
        if operator in ("&&", "||"):
            found = [self._holds(left), self._holds(right)]
            decides = operator == "||"
            return decides if decides in found else None if None in found else not decides
        one, other = known(self.text(left)), known(self.text(right))
        if one is None or other is None or operator not in ("=", "==", "!="):
            return None
        return fits_pattern(one, other) == (operator != "!=")

    def _unary(self, node: Node) -> bool | None:
        operator = _said(node.children[0])
        if operator == "!":
            inner = self._holds(node.named_children[-1])
            return None if inner is None else not inner
        said = known(self.text(node.named_children[-1]))
        if said is None or operator not in ("-n", "-z"):
            return None
        return (said == "") == (operator == "-z")


RUN: dict[str, Callable[[Shell, Node], None]] = {
    "program": Shell._run_children,
    "command": Shell._run_command,
    "variable_assignment": Shell._run_assignment,
    "variable_assignments": Shell._run_children,
    "declaration_command": Shell._run_declaration,
    "unset_command": lambda shell, node: shell._fill(
        node, [w for c in node.named_children for w in shell.words(c)]
    ),
    "redirected_statement": Shell._run_redirected,
    "compound_statement": Shell._run_children,
    "do_group": Shell._run_children,
    "pipeline": Shell._run_children,
    "negated_command": Shell._run_children,
    "subshell": Shell._run_subshell,
    "list": Shell._run_list,
    "if_statement": Shell._run_if,
    "case_statement": Shell._run_case,
    "for_statement": Shell._run_for,
    "c_style_for_statement": Shell._run_loop,
    "while_statement": Shell._run_loop,
    "function_definition": Shell._run_function,
}
"""How each kind of statement is read; of others nothing is."""
TEXT: dict[str, Callable[[Shell, Node], Text]] = {
    "word": Shell._plain,
    "number": Shell._plain,
    "variable_name": Shell._plain,
    "extglob_pattern": Shell._plain,
    "test_operator": Shell._plain,
    "raw_string": Shell._raw,
    "ansi_c_string": Shell._ansi,
    "string": Shell._quoted,
    "translated_string": lambda shell, node: shell.text(node.named_children[-1]),
    "concatenation": Shell._concatenated,
    "simple_expansion": Shell._expanded,
    "expansion": Shell._braced,
    "command_substitution": Shell._substituted,
}
"""How each kind of word is read; any other is not known."""
COMMANDS: dict[str, Callable[[Shell, Node, list[Word]], None]] = {
    "source": Shell._source,
    ".": Shell._source,
    "eval": Shell._eval,
    "exit": Shell._exit,
    "exec": lambda shell, node, words: shell.call(node, words),
    "return": Shell._return,
    "shift": Shell._shift,
    "read": Shell._fill,
    "mapfile": Shell._fill,
    "readarray": Shell._fill,
    "getopts": Shell._fill,
}


def _said(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _head(node: Node) -> str:
    return _said(node).partition("\n")[0]


def _descend(node: Node, kind: str) -> Iterator[Node]:
    """Redirects of a statement, which the parser may put beside or into a heredoc's."""
    for child in node.children:
        if child.type == kind:
            yield child
        elif child.type == "heredoc_redirect":
            yield from _descend(child, kind)


def _siblings(node: Node, kind: str) -> Iterator[Node]:
    return (child for child in (node.parent.children if node.parent else ()) if child.type == kind)


def _clauses(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Conditions and body of `if`, of each `elif`, and of `else`, which has no condition."""
    conditions: list[Node] = []
    body: list[Node] = []
    into = body if node.type == "else_clause" else conditions
    rest = []
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


def _case_item(node: Node) -> tuple[list[str], list[Node]]:
    close = next((i for i, child in enumerate(node.children) if child.type == ")"), 0)
    patterns = [_said(child).strip("'\"") for child in node.children[:close] if child.is_named]
    return patterns, [child for child in node.children[close:] if child.is_named]

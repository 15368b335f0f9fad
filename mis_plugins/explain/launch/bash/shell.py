"""Statements of a script in bash: lists, conditions, branches, loops, functions and redirects."""

import fnmatch
import glob
import operator
import re
from collections.abc import Callable, Sequence
from itertools import groupby

from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.bash import grammar
from mis_plugins.explain.launch.bash.builtins import DECLARES, NAMES_TRAIN
from mis_plugins.explain.launch.bash.commands import COMMANDS, Commands, RoundEnded, shell_of
from mis_plugins.explain.launch.bash.grammar import EXPANSIONS, QUOTED, Node, one_line, parts_of, says
from mis_plugins.explain.launch.bash.texts import EXPORTED, PATTERN, TEXT, depends, is_one, maybe
from mis_plugins.explain.launch.reader import UNCALLED, Clause, all_of, any_of
from mis_plugins.explain.launch.words import HOLE, hole, known, literal, shown

# The condition of a loop that takes the arguments one by one, as `$# -gt 0`, `(( $# ))` or `-n "${1:-}"`.
OF_ARGUMENTS = re.compile(
    r'(\[{1,2}|\(\(|test) *("?\$\{?#\}?"?( *(-gt|-ne|>|!=) *0| *-ge *1)?|-n +"?\$\{?1(:?-)?\}?"?) *(\]{1,2}|\)\))?'
)
LEAVES_VARIABLES = ("command", "negated_command", "pipeline", "subshell", "test_command")
HOLDS_STATEMENTS = ("program", "variable_assignments", "compound_statement", "do_group", "pipeline", "negated_command",
                    "subshell")  # fmt: skip
# What bash and `fnmatch` read differently in a pattern.
OTHER_PATTERN = re.compile(r"[\\('\"$`~]|\[\^|\[:")


class Shell(Commands):
    """A shell that reads statements and runs none."""

    def run_script(self, script: str, arguments: Sequence[str]) -> None:
        """Read a whole script as `launches` does."""
        given = list(arguments)
        while given and given[0].partition("=")[0].isidentifier() and "=" in given[0]:
            name, _, value = given.pop(0).partition("=")
            self.variables |= {name: literal(value), f"-x {name}": EXPORTED}
        self.positional = [literal(argument) for argument in given]
        try:
            self.attempt(lambda: self.run_text(script))
        except RecursionError:
            raise ConfigError("nested deeper than any launch script; give the part that starts the training") from None
        for body, source in self.functions.values():
            if source == 0 and (source, body.id) not in self.ran and self.may_start(says(body)):
                self.unread(body.parent or body, UNCALLED)

    def run(self, node: Node) -> None:
        self.reading.spend()
        self.ran.add((self.source, node.id))
        is_last = node.parent is not None and node.parent.type == "pipeline" and node.next_named_sibling is None
        if node.type == "ERROR":
            self.unread(node, "no bash that the parser knows")
        elif node.type in RUN and grammar.is_apart(node) and not (is_last and self.variables.get("-O lastpipe")):
            with self.now(variables=dict(self.variables)):
                self.attempt(lambda: self._read(node))
        else:
            self._read(node)

    def _read(self, node: Node) -> None:
        if node.type in RUN:
            RUN[node.type](self, node)
        self.settle(node)

    def _children(self, node: Node) -> None:
        self.run_all(node.named_children)

    def _status(self, node: Node, trusts: bool = True) -> bool | None:
        """Run a part of a list; whether it succeeds, None where only running the script would tell.

        With `trusts` a part of which nothing is known is taken to succeed, as `cd` before a start does. Where the part
        decides a value, or where a loop ends, callers do not trust it.
        """
        if node.type != "list":
            truth = self.truth(node)
            if node.type != "test_command":
                self.run(node)
            is_test = node.type == "test_command" or node.children[0].type == "(("
            return True if truth is None and not is_test and (trusts or grammar.succeeds(node)) else truth
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        status = self._status(left, trusts and not self._decides(right))
        if status is None:
            nothing, run = (lambda: None), (lambda: self.run(right))
            self.fork(says(left), *((run, nothing) if is_and else (nothing, run)))
        elif status == is_and:
            return self._status(right, trusts)
        return status

    def _decides(self, node: Node) -> bool:
        """Whether a statement may set a variable, or end a function, a loop or the script."""
        node = node.child_by_field_name("body") or node if node.type == "redirected_statement" else node
        first = one_line(node).partition(" ")[0]
        return node.type not in LEAVES_VARIABLES or first in {*COMMANDS, *self.functions}

    def _if(self, node: Node) -> None:
        parts, clauses = list(grammar.clauses_of(node)), list[Clause]()
        for conditions, _ in parts:
            self.run_all(condition for condition in conditions if condition.type != "test_command")
        for conditions, body in parts:
            truth = self.truth(conditions[-1]) if conditions else True
            clauses.append(("; ".join(map(says, conditions)), truth, lambda body=body: self.run_all(body)))
        self.choose(clauses)

    def _case(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        value = self.text(subject) if subject else ()
        text, clauses = known(value), list[Clause]()
        for item in reversed([item for item in node.named_children if item.type == "case_item"]):
            close = next((i for i, child in enumerate(item.children) if child.type == ")"), 0)
            groups = groupby(item.children[item.children[0].type == "(" : close], lambda child: child.type == "|")
            patterns = ["".join(map(self._pattern, parts)) for is_bar, parts in groups if not is_bar]
            fits = any_of(["*" in patterns or None if text is None else matches(text, pattern) for pattern in patterns])
            label = " or ".join(says(child) for child in item.children[:close] if child.is_named)
            clauses = [(f"{shown(value)} is {label}", fits, self._arm(item, close, clauses)), *clauses]
        self.choose(clauses)

    def _arm(self, item: Node, close: int, later: Sequence[Clause]) -> Callable[[], object]:
        """The work of a branch of `case`: behind `;&` the next one runs too, behind `;;&` one of the later ones may."""

        def work() -> None:
            self.run_all(child for child in item.children[close:] if child.is_named)
            ending = item.child_by_field_name("fallthrough")
            if ending is not None and later:
                self.choose(later) if says(ending) == ";;&" else later[0][2]()

        return work

    def truth(self, node: Node) -> bool | None:
        """Whether a condition holds; None where only running the script would tell."""
        if node.type == "command":
            words = self.command_words(node)
            always = {"true": True, "false": False} | ({} if self.depth else {"return": False})
            return always.get(known(words[0]) or "") if words else None
        if node.type == "redirected_statement":
            body = node.child_by_field_name("body")
            return self.truth(body) if body is not None and body.type == "command" else None
        if node.type in ("parenthesized_expression", "test_command"):
            truth = self.truth(node.named_children[0]) if len(node.named_children) == 1 else None
            self.settle(node)
            return truth
        if node.type == "list":
            return self._compared(says(node.children[1]), node.named_children[0], node.named_children[-1])
        if node.type in ("word", *TEXT):
            text = self._tested(node)
            return None if text is None else text != ""
        sign = next(map(says, node.children_by_field_name("operator")), "")
        sides = [child for child in node.named_children if child.type != "test_operator"]
        if node.type == "binary_expression" and len(sides) == 2:
            return self._compared(sign, *sides)
        if node.type not in ("unary_expression", "negated_command"):
            return None
        sign, last = says(node.children[0]), node.named_children[-1]
        if sign == "!":
            inner = self.truth(last)
            return None if inner is None else not inner
        text = self._tested(last) if sign in ("-n", "-z") else None
        return None if text is None else (text == "") == (sign == "-z") or grammar.is_bare(last) and text == ""

    def _compared(self, sign: str, left: Node, right: Node) -> bool | None:
        if sign in ("&&", "||"):
            return (any_of if sign == "||" else all_of)([self.truth(left), self.truth(right)])
        is_number = sign in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le")
        tested = self._tested(left) if is_number or sign in ("=", "==", "!=") else None
        if tested is None:
            return None
        if is_number:
            both = tested, known(self.text(right)) or ""
            are_plain = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", number) for number in both)
            return getattr(operator, sign[1:])(*map(int, both)) if are_plain else None
        if "" in [known(self.text(side)) for side in (left, right) if grammar.is_bare(side)]:
            return False  # bash ends the test with an error
        if grammar.is_single(right) and right.type not in QUOTED and PATTERN.search(known(self.text(right)) or "*"):
            return None  # which takes a pattern for text, or for names of files
        fits = matches(tested, self._pattern(right))
        return None if fits is None else fits == (sign != "!=")

    def _tested(self, node: Node) -> str | None:
        """The text of a part of a test; `${NAME:-}` is taken for empty, but where the script may exit."""
        text = self.text(node)
        empty = re.fullmatch(r"\$\{(\w+):?-\}", text[0].source) if len(text) == 1 and not depends(text) else None
        if empty is None:
            words = known(text)
            return None if words and grammar.is_bare(node) and words.split() != [words] else words
        *_, statement, _ = grammar.around(node)
        source = says(statement)
        called = (says(body) for name, (body, _) in self.functions.items() if name in source)
        if any("exit" in script for script in (source, *called)):
            return None
        self.reading.assume_unset(empty[1])
        return ""

    def _pattern(self, node: Node) -> str:
        """A pattern as `fnmatch` takes it, with quoted letters as they are, and `HOLE` where it is not known."""
        if node.type == "concatenation":
            return "".join(map(self._pattern, node.children))
        pattern = known(self.text(node)) if node.type in (*QUOTED, *EXPANSIONS) else says(node)
        if pattern is None or self.variables.get("-O nocasematch") and pattern.swapcase() != pattern:
            return HOLE
        if node.type in QUOTED:
            return glob.escape(pattern)
        pattern = re.sub(r"\\(.)", lambda match: glob.escape(match[1]), pattern or HOLE)
        return HOLE if OTHER_PATTERN.search(pattern) else pattern

    def _for(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = self.joined(node, node.children_by_field_name("value"))
        if name is None or body is None:
            return
        if not values or grammar.ends_early(body) or any(known(word) is None for word in values):
            self.variables[says(name)] = hole(f"${says(name)}", self.lines(node))
            self._loop(node)
            return
        with self.now(is_sure_round=False):
            for word in values:
                self._store(node, says(name), word)
                self.run(body)

    def _loop(self, node: Node) -> None:
        """Read the body once; what it sets is not known where it may end before its last round."""
        body, before = node.child_by_field_name("body"), dict(self.variables)
        condition = node.child_by_field_name("condition")
        is_such = condition is not None and says(node).startswith("while") and OF_ARGUMENTS.fullmatch(says(condition))
        if body is not None and is_such and self._over_arguments(body):
            return
        count, label = len(self.found), re.split(r";? do\b", one_line(node))[0]
        self.run_all(child for child in node.named_children if child != body)
        if body is not None:
            self.fork(label, lambda: self.run(body), lambda: None)
            if len(self.found) > count:  # a start in a later round is given what the rounds before have set
                self.fork(label, lambda: self._children(node), lambda: None)
            changed = [name for name, value in self.variables.items() if before.get(name) != value]
            for name in changed if grammar.ends_early(body) else {"@"}.intersection(changed):  # which rounds use up
                is_array = isinstance(before.get(name), list) or isinstance(self.variables[name], list)
                lost = (maybe if is_array else hole)(f"${name}", self.lines(node))
                self.variables[name] = [lost] if is_array else lost

    def fork(self, label: str, then: Callable[[], object], otherwise: Callable[[], object]) -> None:
        with self.now(is_sure_round=False):
            super().fork(label, then, otherwise)

    def _over_arguments(self, body: Node) -> bool:
        """Read a loop that takes the arguments one by one; False where a round leaves open how it goes on."""
        if not self.positional and self.locals is None:
            self.reading.assume_unset("1")
        with self.now(is_sure_round=True, may_have_ended=False):
            while self.positional and all(map(is_one, self.positional)):
                count = len(self.positional)
                try:
                    self.run(body)
                except RoundEnded as ended:
                    if ended.ends_loop:
                        return True
                if len(self.positional) >= count or self.may_have_ended:
                    return False
        return not self.positional

    def _function(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[says(name)] = body, self.source
            self.variables |= {f"-x {says(name)}": EXPORTED} if "-a" in self.variables else {}

    def _command(self, node: Node) -> None:
        before = grammar.of_lines_before(node)
        self.run_all(before)
        name = node.child_by_field_name("name")
        words = self.command_words(node)
        own = [child for child in node.children if child.type == "variable_assignment" and child not in before]
        keys = [re.split(r"[+=\[]", says(child))[0] for child in own]
        if grammar.is_cut(node):
            self.variables |= {key: hole(one_line(node), self.lines(node)) for key in keys}
            if words[1:]:
                self.unread(node, "the parser of bash cuts the word behind =; put it into quotes")
            return
        with self._kept({key: self.variables.get(key) for var in keys for key in (var, f"-x {var}")}):
            self.run_all(own)
            self.variables |= {f"-x {var}": EXPORTED for var in keys}
            self.variables |= {var: hole(f"${var}") for var in keys if isinstance(self.variables.get(var), list)}
            if name is not None and says(name) in DECLARES:  # the parser takes it for a command then
                rest = (node.text or b"")[name.start_byte - node.start_byte :].decode(errors="replace")
                self.evaluate(literal(rest, self.lines(node)), shares=True)
            else:
                self.call(node, words)

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
        at, behind = shell_of(given, "s")
        is_input = all(shown(word)[:1] in "-+" or known(word) == "pipefail" for word in given[at + 1 : behind])
        if heredoc is not None and at < len(given) and is_input:
            self.ran |= {(self.source, body.id), (self.source, reader.id)}
            pipe = pipe if printed is None else None
            text = self._heredoc(heredoc) if printed is None else printed
            self._other_shell(given[:at], text, [given[at], *given[behind:]])
        elif printed is None:
            self.run(body)
            if heredoc is not None and NAMES_TRAIN.search(says(heredoc)):
                Shell.unread(self, node, "may start train.py too")
        else:
            self.ran.add((self.source, body.id))
            for words in [given] if reader is body else [self.command_words(body), given]:
                if words and known(words[0]) == "tee":
                    self._tee(words, printed)
                    pipe = None if words is given else pipe
        self.run_all(pipe.named_children if pipe is not None else ())
        for redirect in parts_of(node, "heredoc_redirect"):
            self.run_all(redirect.children_by_field_name("right"))


def matches(text: str, pattern: str) -> bool | None:
    is_short = len(pattern) < 256 and pattern.replace("[*]", "").count("*") < 4
    return fnmatch.fnmatchcase(text, pattern) if is_short and HOLE not in pattern else None


RUN: dict[str, Callable[[Shell, Node], object]] = {
    **dict.fromkeys(HOLDS_STATEMENTS, Shell._children),
    "declaration_command": Shell._declare,
    "unset_command": Shell._unset,
    "command": Shell._command,
    "variable_assignment": Shell._assignment,
    "redirected_statement": Shell._redirected,
    "list": Shell._status,
    "if_statement": Shell._if,
    "case_statement": Shell._case,
    "for_statement": Shell._for,
    **dict.fromkeys(("c_style_for_statement", "while_statement"), Shell._loop),
    "function_definition": Shell._function,
}
"""How each kind of statement is read; of others nothing is."""

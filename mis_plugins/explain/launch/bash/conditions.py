"""Conditions of a script in bash, and patterns."""

from __future__ import annotations

import fnmatch
import glob
import operator
import re

from mis_plugins.explain.launch.bash.nodes import EXPANSIONS, QUOTED, Node, says
from mis_plugins.explain.launch.bash.texts import TEXT, Texts
from mis_plugins.explain.launch.bash.variables import depends
from mis_plugins.explain.launch.reader import all_of, any_of
from mis_plugins.explain.launch.words import HOLE, known

# What bash and `fnmatch` read differently in a pattern.
OTHER_PATTERN = re.compile(r"[\\('\"$`~]|\[\^|\[:")


class Conditions(Texts):
    """Whether a condition of a script holds."""

    def truth(self, node: Node) -> bool | None:
        """Whether a condition holds; None where only running the script would tell."""
        if node.type == "command":
            words = self.command_words(node)
            return {"true": True, "false": False}.get(known(words[0]) or "") if words else None
        if node.type in ("test_command", "parenthesized_expression"):
            return self.truth(node.named_children[0]) if len(node.named_children) == 1 else None
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
        return None if text is None else (text == "") == (sign == "-z")

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
        fits = matches(tested, self._pattern(right))
        return None if fits is None else fits == (sign != "!=")

    def _tested(self, node: Node) -> str | None:
        """The text of a part of a test; `${NAME:-}` is taken for empty, but where the script may exit."""
        text, top = self.text(node), node
        empty = re.fullmatch(r"\$\{(\w+):?-\}", text[0].source) if len(text) == 1 and not depends(text) else None
        if empty is None:
            return known(text)
        while top.parent is not None and top.parent.parent is not None:
            top = top.parent
        source = says(top)
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
        if node.type in QUOTED:
            return HOLE if pattern is None else glob.escape(pattern)
        pattern = re.sub(r"\\(.)", lambda match: glob.escape(match[1]), pattern or HOLE)
        return HOLE if OTHER_PATTERN.search(pattern) else pattern


def matches(text: str, pattern: str) -> bool | None:
    is_short = len(pattern) < 256 and pattern.replace("[*]", "").count("*") < 4
    return fnmatch.fnmatchcase(text, pattern) if is_short and HOLE not in pattern else None

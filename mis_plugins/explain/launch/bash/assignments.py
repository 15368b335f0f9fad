"""Statements of a script in bash that set variables."""

from __future__ import annotations

import re
from dataclasses import replace

from mis_plugins.explain.launch.bash.nodes import Node, says
from mis_plugins.explain.launch.bash.output import Output
from mis_plugins.explain.launch.bash.variables import EXPORTED, Value, depends, is_one
from mis_plugins.explain.launch.words import Piece, Text, fields, hole, known, literal, shown

FILLS = ("read", "mapfile", "readarray", "getopts", "let")
OF_FUNCTION = ("local", "declare", "typeset")
ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")


class Assignments(Output):
    """What assignments and commands that set variables leave."""

    def _assignment(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            self.variables[says(name.named_children[0])] = self.unknown(node)
            return
        before = self.variables.get(says(name))
        adds = any(child.type == "+=" for child in node.children)
        made: Value
        if value is not None and value.type == "array":
            kept = [] if before is None or not adds else before if isinstance(before, list) else [before]
            made = [*kept, *self.joined(value, value.named_children)]
            if any(shown(word)[:1] == "[" and "]=" in shown(word) for word in made):
                made = [self.unknown(node)]
            self.reading.spend(1 + len(made))
        else:
            first = self._first(before, node) if isinstance(before, list) else before or ()
            made = self.reading.paid((first if adds else ()) + (() if value is None else self.text(value)))
            if isinstance(before, list):
                is_sure = not before or not depends(before[0])
                made = [made, *before[1:]] if is_sure else self.unknown(node)
        self.variables[says(name)] = made
        if "-a" in self.variables:
            self.variables.setdefault(f"-x {says(name)}", self.variables["-a"])

    def _declare(self, node: Node) -> None:
        """`export`, `local` and the like; within a function most of them make a variable of its own."""
        kind, *parts = map(says, node.children)
        flags = "".join(part for part in parts if part[:1] in ("-", "+"))
        for child in node.named_children:
            is_plain = child.type in ("variable_assignment", "variable_name")
            words = self.words(child) if not is_plain and says(child)[:1] not in ("-", "+") else []
            for name, value in [(re.split(r"[+=\[]", says(child))[0], ())] if is_plain else map(pair, words):
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
                    self.variables[name] = hole(says(child), self.lines(node))
                if kind not in OF_FUNCTION or "g" in flags:
                    self._beyond(name, "g" in flags)

    def _beyond(self, name: str, is_global: bool = False) -> None:
        """A variable that a function sets beyond one that is its own, or in front of it, is not known from then on."""
        for held in self.held:
            if name in held and (is_global or held is not self.locals):
                held[name] = self.variables[name] = hole(f"${name}")

    def _unset(self, node: Node) -> None:
        for word in (word for child in node.named_children for word in self.words(child)):
            name, item, _ = shown(word).partition("[")
            self.variables.pop(name, None)
            self.variables.pop(f"-x {name}", None)
            self.variables |= {name: self.unknown(node)} if item else {}
            self._beyond(name)

    def _computed(self, node: Node) -> None:
        """`((NAME += 1))`: the value is not known."""
        if any(child.type in ("++", "--") or child.type in ASSIGNS for child in node.children):
            self.variables[says(node.named_children[0])] = self.unknown(node)

    def _fill(self, node: Node, words: list[Text]) -> None:
        """Variables whose values come from outside, but for a herestring."""
        here = next((child for child in node.children if child.type == "herestring_redirect"), None)
        names = [shown(word).partition("=")[0].rstrip("+-*/% ") for word in words if shown(word)[:1] != "-"]
        is_whole = here is not None and len(names) == 1 and node.children[0].type == "command_name"
        text = self.text(here.named_children[0]) if here and is_whole else self.unknown(node)
        value: Value = text
        content = known(text)
        if says(node.children[0]) in ("mapfile", "readarray"):
            value = [text] if content is None else [literal(line, self.lines(node)) for line in content.split("\n")]
        elif (
            "IFS" in self.variables
            or content is not None
            and ("\\" in content or content != content.strip() or "\n" in content)
        ):
            value = self.unknown(node)  # `read` drops what stands around a line and before a letter
        elif any(shown(word)[:1] == "-" and "a" in shown(word) for word in words):  # read -ra NAME
            value = fields(text)
        self.variables |= dict.fromkeys(names, value)

    def _set(self, node: Node, words: list[Text]) -> None:
        """`set -- WORD ...`, which sets the script's own arguments, unless `${!NAME}` finds no name and it fails."""
        texts = [known(word) for word in words]
        exports = re.search(r"(?:^| )([-+])(?:\w*a|o allexport)", says(node).partition(" -- ")[0])
        if exports:
            self.variables["-a"] = EXPORTED if exports[1] == "-" else hole("set -a")
        if "--" in texts:
            fails = "${!" in says(node)
            self.positional = [self.unknown(node)] if fails else words[texts.index("--") + 1 :]

    def _shift(self, node: Node, words: list[Text]) -> None:
        number = known(words[0]) if words else "1"
        count = int(number) if number and number.isdigit() and len(number) < 8 else 1
        unsure = [word for word in self.positional[:count] if not is_one(word)]
        self.positional = [*unsure, *self.positional[count:]]


def pair(word: Text) -> tuple[str, Text]:
    """The name and the value of NAME=VALUE; no name where that is not known."""
    first, *rest = word or (Piece(""),)
    name, equals, value = (first.text or "").partition("=")
    is_pair = equals and name.isidentifier() and not first.branch
    return (name, (replace(first, text=value, span=None), *rest)) if is_pair else ("", ())

"""Commands of bash itself in a script: what they print, which files they write, and which variables they set."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mis_plugins.config.loading import file_of, watching
from mis_plugins.errors import UserError
from mis_plugins.explain.launch.bash.grammar import Node, one_line, parts_of, says, set_within
from mis_plugins.explain.launch.bash.texts import EXPORTED, Texts, Value, is_braced, is_one, literals_of, maybe
from mis_plugins.explain.launch.reader import from_start
from mis_plugins.explain.launch.words import Piece, Text, fields, hole, known, literal, shown, spaced, word_of

PRINTS = ("echo", "printf", "cat", "tee")
OUR_PATH = ("-m mis_plugins config path ", "mis-plugins config path ")
NAMES_TRAIN = re.compile(r"\btrain(_async)?\.py\b")
FILLS = ("read", "mapfile", "readarray", "getopts", "let")
OF_FUNCTION = ("local", "declare", "typeset")
DECLARES = ("export", "readonly", "unset", *OF_FUNCTION)


class Builtins(Texts):
    """What commands of bash itself print and set."""

    def _substituted(self, node: Node) -> Text:
        """The output of commands that name or print files; of others it is not known."""
        inner = [child for child in node.named_children if child.type != "comment"]
        with self.deeper(), self.now(variables=dict(self.variables)):  # a shell of its own
            output = self._output(inner) if inner else None
            if output is None and self.may_start(says(node)):  # a start whose output is kept
                self.attempt(lambda: self.run_all(inner))
        if not output or all(piece.text is None for piece in output) or says(node).count("`") > 2:
            return self.unknown(node)  # of several substitutions in backticks the parser makes one
        *parts, last = output
        return (*parts, replace(last, text=last.text.rstrip("\n"))) if last.text is not None else output

    def may_start(self, source: str) -> bool:
        """Whether a text may start a training."""
        return bool(NAMES_TRAIN.search(source))

    def _output(self, nodes: Sequence[Node]) -> Text | None:
        *before, node = nodes
        if not all(earlier.type != "list" and says(earlier).startswith("cd ") for earlier in before):
            return None
        if node.type == "list":
            return self._output(node.named_children[:2])
        if node.type == "redirected_statement":
            body = node.child_by_field_name("body")
            return (self.printed(body, node) or self._output([*nodes[:-1], body])) if body else None
        if node.type != "command":
            return None
        words = self.command_words(node)
        if self.functions.get(shown(words[0]) if words else ""):
            body, source = self.functions[shown(words[0])]
            with self.now(variables={**self.variables, "@": words[1:]}, source=source):
                inner = [child for child in body.named_children if child.type != "comment"]
                return self._output(inner) if len(inner) == 1 else None
        name, given = known(spaced(words[:1])), [word for word in words[1:] if known(word) not in ("--", "-P")]
        if name == "pwd" and len(nodes) > 1:
            return self._output(nodes[:-1])
        if name == "dirname" and len(given) == 1 and known(given[0]) is not None:
            return literal(str(Path(known(given[0]) or "").parent), given[0][0].lines)
        if name in ("cd", "realpath", "readlink") and given and known(given[-1]) is not None:
            return given[-1]
        return self._ours(node, words) or self.printed(node)

    def _ours(self, node: Node, words: Sequence[Text]) -> Text | None:
        """`python -m mis_plugins config path NAME`: the file of a preset."""
        command = known(spaced(words)) or ""
        name, *options = next((command.partition(mark)[2].split() for mark in OUR_PATH if mark in command), [""])
        try:
            find = watching if "--watch" in options else file_of
            return literal(str(find(name).absolute()), self.lines(node)) if name else None
        except UserError as error:
            self.unread(node, str(error))
            return None

    def _writes(self, node: Node, text: Text) -> None:
        """Keep what a statement writes into the files behind its `>` and `>>`."""
        for redirect in parts_of(node, "file_redirect"):
            sign = next((child.type for child in redirect.children if not child.is_named), "")
            if ">" in sign and "&" != sign[-1:] and redirect.named_children:
                is_all = redirect.child_by_field_name("descriptor") is None and sign[0] == ">"
                content = text if is_all else hole(one_line(node))
                file = redirect.child_by_field_name("destination") or redirect.named_children[-1]
                self.write(shown(self.text(file)), content, adds=sign.endswith(">>"))

    def _tee(self, words: Sequence[Text], text: Text) -> None:
        flags = [shown(word) for word in words[1:] if shown(word)[:1] == "-"]
        for file in (shown(word) for word in words[1:] if shown(word)[:1] != "-"):
            self.write(file, text, adds=bool(flags))

    def printed(self, node: Node, redirected: Node | None = None) -> Text | None:
        """What a command prints; None where only running it would tell."""
        words = self.command_words(node) if node.type == "command" else []
        name = word_of(words[0]).text if words else ""
        reads_escapes = re.fullmatch(r"-[neE]*e[neE]*", known(spaced(words[1:2])) or "")
        is_nested = "\\" in says(node) and (reads_escapes or "\\`" in says(node))
        if name not in PRINTS or name in self.functions or name == "echo" and is_nested:
            return None
        if name == "echo":
            return (*spaced(word for word in words[1:] if not re.fullmatch("-[neE]+", known(word) or "")), Piece("\n"))
        if name == "printf":
            return _formatted(words[1:])
        body = next(parts_of(redirected, "heredoc_body"), None) if redirected else None
        if body is None or name == "cat" and len(words) > 1:
            file = shown(words[1]) if len(words) == 2 and name == "cat" else ""
            return self.reading.files.get(from_start(self.working_folder(), file), self.unknown(node))
        return self._heredoc(body)

    def _heredoc(self, body: Node) -> Text:
        beside = body.parent.children if body.parent else ()
        start = next((child for child in beside if child.type == "heredoc_start"), None)
        is_plain = start is not None and says(start)[:1] in "'\"\\"
        with self.now(variables=dict(self.variables)):  # of most commands, bash expands it in a process of its own
            mixed = self.quoted(says(body), body) if is_plain else self.mixed(body, body.start_byte, body.end_byte)
        for name, place in () if is_plain else set_within(body):
            before = self.variables.get(name, ())
            if place.type != "expansion" or isinstance(before, list) or not known(before):
                self.variables[name] = self.unknown(place)
        if not beside or beside[0].type != "<<-":
            return mixed
        begins = (r"(\n)\t+" if place else r"(\A|\n)\t+" for place in range(len(mixed)))  # tabs before its lines
        parts = zip(mixed, begins, strict=True)
        return tuple(replace(piece, text=piece.text and re.sub(tabs, r"\1", piece.text)) for piece, tabs in parts)

    def _assignment(self, node: Node) -> None:
        place, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if place is None:
            return
        name = says(place)
        if place.type == "subscript":
            return self._store(node, name, ())
        before, adds = self.variables.get(name), any(child.type == "+=" for child in node.children)
        made: Value
        if value is not None and value.type == "array":
            kept = [] if before is None or not adds else before if isinstance(before, list) else [before]
            made = [*kept, *self.joined(value, value.named_children)]
            self.reading.spend(1 + len(made))
            has_key = any(shown(word)[:1] == "[" and "]=" in shown(word) for word in made)
            made = [self.unknown(node)] if has_key else made
        else:
            first = self._first(before, node) if isinstance(before, list) else before or ()
            added = self.text(value) if value else self.unknown(node) if node.has_error else ()
            made = self.reading.paid((first if adds else ()) + added)
            made = self.unknown(node) if adds and f"-i {name}" in self.variables else made
        is_kept = adds or not self.variables.keys().isdisjoint((f"-x {name}", f"-r {name}"))
        if before and not is_kept and self.branch is None:
            self.replaced |= literals_of(before)
        self._store(node, name, made)

    def _declare(self, node: Node) -> None:
        """`export`, `local` and the like; within a function most of them make a variable of its own."""
        kind, *parts = map(says, node.children)
        flags = "".join(part for part in parts if part[:1] in ("-", "+"))
        if kind == "local" and self.locals is None:
            return self.unread(node, "bash refuses it outside of a function")
        for child in node.named_children:
            is_plain = child.type in ("variable_assignment", "variable_name")
            words = self.words(child) if not is_plain and says(child)[:1] not in ("-", "+") else []
            for name, value in [(re.split(r"[+=\[]", says(child))[0], ())] if is_plain else map(pair, words):
                marks = [f"-{flag} {name}" for flag in "xnri"]
                mark, is_own = marks[0], kind in OF_FUNCTION and not set(flags) & set("gpf")
                is_new = self.locals is not None and is_own and name not in self.locals
                if is_new and self.locals is not None:
                    self.locals |= {key: self.variables.get(key) for key in (name, *marks)}
                    if child.type == "variable_name":
                        self.variables.pop(name, None)
                if "+x" in flags or kind == "export" and "n" in flags:
                    self.variables.pop(mark, None)
                elif kind == "export" or "x" in flags:
                    self.variables[mark] = EXPORTED
                if kind in OF_FUNCTION and set(flags) & set("ilnuA"):
                    self.variables |= {f"-i {name}": EXPORTED, name: hole(says(child), self.lines(node))}
                if is_plain:
                    self.run(child)
                elif name:
                    self._store(node, name, value)
                made = self.variables.get(name)
                if is_new and "+=" in says(child):
                    self.variables[name] = hole(says(child))
                elif is_new and isinstance(made, list) and "=(" not in says(child):
                    self.variables[name] = made[0]
                if not name or kind in OF_FUNCTION and "n" in flags:
                    self.unread(node, "which variables it sets is not known")
                    self.variables |= {f"-n {name}": EXPORTED}
                if any(map(is_braced, child.children)):
                    self.variables[name] = hole(says(child), self.lines(node))
                if kind == "readonly" or kind in OF_FUNCTION and "r" in flags:
                    self.variables[f"-r {name}"] = EXPORTED
                if kind not in OF_FUNCTION or "g" in flags:
                    self._beyond(name, "g" in flags)

    def _beyond(self, name: str, is_global: bool = False) -> None:
        """A variable that a function sets beyond one that is its own, or in front of it, is not known from then on."""
        for held in self.held:
            if name in held and (is_global or held is not self.locals):
                for key in (name, f"-x {name}"):
                    held[key] = self.variables[key] = hole(f"${key}")

    def _unset(self, node: Node) -> None:
        for word in (word for child in node.named_children for word in self.words(child)):
            name, item, _ = shown(word).partition("[")
            for key in (name, f"-x {name}", f"-i {name}"):
                self.variables.pop(key, None)
            self.variables |= {name: [maybe(says(node), self.lines(node))]} if item else {}
            self._beyond(name)

    def _fill(self, node: Node, words: list[Text]) -> None:
        """Variables whose values come from outside, but for a herestring and a heredoc."""
        first, here = says(node.children[0]), next(parts_of(node, "herestring_redirect"), None)
        beside = node.parent if node.parent and node.parent.type == "redirected_statement" else node
        body = next(parts_of(beside, "heredoc_body"), None)
        ends = [place for place, word in enumerate(words) if known(word) == "" and shown(words[place - 1])[-1:] == "d"]
        words = [word for place, word in enumerate(words) if place not in ends]  # `-d ''` reads more than a line
        names = [shown(word).partition("=")[0].rstrip("+-*/% ") for word in words if shown(word)[:1] != "-"]
        are_lines = first in ("mapfile", "readarray")
        flags = " ".join(shown(word) for word in words if shown(word)[:1] == "-")
        is_plain = re.fullmatch("-t" if are_lines else "(-[aersd]+ ?)*" if ends else "(-[aers]+ ?)*", flags) is not None
        is_whole = len(names) == 1 and node.children[0].type == "command_name" and is_plain
        fed = self.text(here.named_children[0]) if here else self._heredoc(body) if body else ()
        text = fed if is_whole and fed else self.unknown(node)
        if ends and text[-1].text is not None:
            text = (*text[:-1], replace(text[-1], text=text[-1].text.rstrip("\n")))
        value, content = text, known(text) or ""
        is_changed = "\\" in content or not ends and (content != content.strip() or "\n" in content)
        if are_lines:
            value = [text] if known(text) is None else fields(text, "\n")
        elif "IFS" in self.variables or is_changed:
            value = self.unknown(node)  # `read` drops what stands around a line and before a letter
        elif any(shown(word)[:1] == "-" and "a" in shown(word) for word in words):  # read -ra NAME
            value = fields(text)
        for name in names + ["OPTARG", "OPTIND"] * (first == "getopts") or ["MAPFILE" if are_lines else "REPLY"]:
            self._store(node, name, value)

    def _set(self, node: Node, words: list[Text]) -> None:
        """`set -- WORD ...`, which sets the script's own arguments, unless `${!NAME}` finds no name and it fails."""
        exports = re.search(r"(?:^| )([-+])(?:\w*a|o allexport)", says(node).partition(" -- ")[0])
        if exports:
            self.variables["-a"] = EXPORTED if exports[1] == "-" else hole("set -a")
        given = words
        while given and known(given[0]) != "--" and (known(given[0]) or "-")[:1] in "-+":  # `-e`, and `-o NAME`
            has_name = (known(given[0]) or "").endswith("o")
            given = given[1 + has_name :]
        if given:
            given = given[known(given[0]) == "--" :]
            self.positional = [self.unknown(node)] if "${!" in says(node) else given

    def _shift(self, node: Node, words: list[Text]) -> None:
        number, given = known(words[0]) if words else "1", self.positional
        count = int(number) if number and number.isdigit() and len(number) < 8 else None
        unsure = [word for word in given[:count] if not is_one(word)]
        if count is None and given:
            self.positional = [self.unknown(node)]
        elif unsure or count and count <= len(given):  # bash shifts by no more than there are
            self.positional = [*unsure, *given[count:]]


def _formatted(words: Sequence[Text]) -> Text:
    """`printf FORMAT ARGUMENT ...` with %s alone."""
    format_ = (known(words[0]) or "-").replace("\\n", "\n") if words else "-"
    if format_.startswith("-") or re.search(r"%(?!s)|\\", format_) or not all(map(is_one, words)):
        return hole(shown(spaced(words)))
    arguments, count = iter(words[1:]), format_.count("%s")
    first, *parts = (format_ * max(1, -(-len(words[1:]) // max(1, count)) if count else 1)).split("%s")
    return (Piece(first), *(piece for part in parts for piece in (*next(arguments, ()), Piece(part))))


def pair(word: Text) -> tuple[str, Text]:
    """The name and the value of NAME=VALUE; no name where that is not known."""
    name = ""
    for place, piece in enumerate(word):
        part, equals, value = ("" if piece.branch else piece.text or "").partition("=")
        name += part
        if equals and name.isidentifier():
            return name, ((replace(piece, text=value, span=None),) if value else ()) + word[place + 1 :]
        if equals or not part:
            break
    return "", ()

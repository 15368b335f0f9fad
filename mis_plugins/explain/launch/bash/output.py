"""What the commands of a script in bash print, and the files that they write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mis_plugins.config.loading import file_of, watching
from mis_plugins.errors import UserError
from mis_plugins.explain.launch.bash.nodes import Node, one_line, parts_of, says
from mis_plugins.explain.launch.bash.texts import Texts
from mis_plugins.explain.launch.bash.variables import is_one
from mis_plugins.explain.launch.words import Piece, Text, hole, known, literal, shown, spaced, word_of

PRINTS = ("echo", "printf", "cat", "tee")
OUR_PATH = ("-m mis_plugins config path ", "mis-plugins config path ")
NAMES_TRAIN = re.compile(r"\btrain(_async)?\.py\b")


class Output(Texts):
    """What commands print, within words and into files."""

    def _substituted(self, node: Node) -> Text:
        """The output of commands that name or print files; of others it is not known."""
        inner = [child for child in node.named_children if child.type != "comment"]
        with self.deeper():
            output = self._output(inner) if inner else None
            if output is None and NAMES_TRAIN.search(says(node)):  # a start whose output is kept
                with self.now(variables=dict(self.variables)):
                    self.attempt(lambda: self.run_all(inner))
        if not output or all(piece.text is None for piece in output):
            return self.unknown(node)
        *parts, last = output
        return (*parts, replace(last, text=last.text.rstrip("\n"))) if last.text is not None else output

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
                self.write(shown(self.text(redirect.named_children[-1])), content, adds=sign.endswith(">>"))

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
            return self.reading.files.get(file, self.unknown(node))
        return self._heredoc(body)

    def _heredoc(self, body: Node) -> Text:
        beside = body.parent.children if body.parent else ()
        start = next((child for child in beside if child.type == "heredoc_start"), None)
        if start is not None and says(start)[:1] in "'\"\\":
            return self.literal(says(body), body)
        return self.mixed(body, body.start_byte, body.end_byte)


def _formatted(words: Sequence[Text]) -> Text:
    """`printf FORMAT ARGUMENT ...` with %s alone."""
    format_ = (known(words[0]) or "-").replace("\\n", "\n") if words else "-"
    if format_.startswith("-") or re.search(r"%(?!s)|\\", format_) or not all(map(is_one, words)):
        return hole(shown(spaced(words)))
    arguments, count = iter(words[1:]), format_.count("%s")
    first, *parts = (format_ * max(1, -(-len(words[1:]) // max(1, count)) if count else 1)).split("%s")
    return (Piece(first), *(piece for part in parts for piece in (*next(arguments, ()), Piece(part))))

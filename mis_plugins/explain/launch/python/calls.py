"""Calls in a launcher: what they give, start and write, by what the launcher itself defines or imports."""

import ast
import base64
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import PurePosixPath
from typing import Any

from mis_plugins.config.file import INLINE
from mis_plugins.explain.launch import bash, words
from mis_plugins.explain.launch.bash.builtins import NAMES_TRAIN
from mis_plugins.explain.launch.bash.commands import COPIES, EDITS, shell_of
from mis_plugins.explain.launch.python.functions import Functions, decorators
from mis_plugins.explain.launch.python.values import GIVE_PARTS, TELLS, Record, as_text, key_of, lines_of, name_of, says
from mis_plugins.explain.launch.reader import Ended, Launch, is_train
from mis_plugins.explain.launch.words import HOLE, Piece, Text, fields, hole, known, literal, shown, with_holes

STARTS = "execute_train"  # Miles's functions that begin so hand `train_args` to train.py
GIVE_NOTHING = ("get_default_wandb_args", "get_mooncake_object_store_args")  # Miles's helpers: no flag of ours
PLAINLY = {"strip": str.strip, "lower": str.lower}
WRITES = ("write", "writelines", "write_text", "write_bytes")
MOVES = ("copy", "copy2", "copyfile", "move", "rename", "replace")  # what makes the file of its second argument
RUNS_IN_SHELL = re.compile(r"(os|subprocess)\.\w+|(\w+\.)?exec_command")  # functions, the last one Miles's
RUNS_A_FILE = ("run_path", "run_module")  # runpy's functions, in the launcher's own process
NAMES = ("str", "Path")  # functions that return the name of a file
OF_FILES = (*NAMES, *MOVES, "open", "join", "exists", "isfile", "abspath", "realpath", "dirname", "basename")
SET_ANY_NAME = ("exec", "eval", "globals", "locals")
PURE = ("get", "items", "keys", "values", "copy", "index", "count")  # methods that change no list and no dict


class Calls(Functions):
    """What calls give, of the launcher's own functions and of those that it imports."""

    def visit_Call(self, node: ast.Call) -> Any:
        given, named, is_sure = self.arguments(node)
        name, is_kept = name_of(node.func), False
        if isinstance(node.func, ast.Attribute):
            owner = self.visit(node.func.value)
            if isinstance(owner, dict) and name == "get" and given and (key := key_of(given[0])) is not None:
                return owner[key] if key in owner else given[1] if len(given) > 1 else None
            if isinstance(owner, tuple) and (value := self.of_text(owner, name, given, named)) is not None:
                return value
            target, given = self.own_method(owner, name, given)
            is_kept = not isinstance(owner, Record | ast.ClassDef) and self.keeps(owner, name, given)
            if name_of(node.func.value) == "super" and self.locals:
                self.lose(next(iter(self.locals.values())))
        else:
            target = self.visit(node.func)
            self.lose(*([target] if self.is_shared(target) else []))
            is_kept = name in ("getattr", "setattr") and len(given) > 1 and isinstance(given[0], Record)
            pieces = target if isinstance(target, tuple) else ()
            meant = [piece.source.rpartition(".")[2] for piece in pieces if piece.text is None]
            name = next((meaning for meaning in meant if meaning.startswith(STARTS) and meaning.isidentifier()), name)
        if isinstance(target, ast.FunctionDef):
            return self.call(target, given, named, is_sure)
        if isinstance(target, ast.ClassDef):
            fields = [] if is_sure else list(self.fields(target))
            return self.instance(target, given, dict.fromkeys(fields[len(given) :], self.unknown(node)) | named)
        if name.startswith(STARTS):
            first = (given[0] if given else ()) if is_sure else self.unknown(node)
            return self.start(node, named.get("train_args", first))
        if not is_kept:
            with self.now(handing=says(node)):
                self.hand(node, given, named)
        return self.foreign(node, name, given, named)

    def own_method(self, owner: Any, name: str, given: list[Any]) -> tuple[Any, list[Any]]:
        """A method of a class of the launcher's, or what a field holds, and all that a call gives it."""
        if isinstance(owner, Record) and name in owner.fields:
            return owner.fields[name], given
        kind = owner.node if isinstance(owner, Record) else owner
        method = self.method(kind, name) if isinstance(kind, ast.ClassDef) else None
        kinds = decorators(method) if method else set()
        is_bound = "staticmethod" not in kinds if isinstance(owner, Record) else "classmethod" in kinds
        return method, [owner, *given] if is_bound else given

    def keeps(self, owner: Any, name: str, given: Sequence[Any]) -> bool:
        """Whether a method leaves alone what it is given. What it may change of its owner is lost."""
        added = given[:1] if name == "append" else next(iter(given), None) if name == "extend" else None
        if isinstance(owner, list) and isinstance(added, list):
            self.changed(owner, owner + added)
            return True
        if name in PURE:
            self.lose(*self.parts(owner))
        elif self.is_shared(owner) or isinstance(owner, ast.FunctionDef):
            self.lose(owner)
        return isinstance(owner, tuple) and any(piece.text for piece in owner)  # a text

    def hand(self, node: ast.Call, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Lose what an imported function may change, and what it may give back as a part of a value."""
        function, name = self.dotted(node.func), name_of(node.func)
        if function == "functools.partial" and given and isinstance(given[0], ast.FunctionDef):
            return self.may_run(given[0], given[1:], **named)
        for value in (*given, *named.values()):
            is_function = isinstance(value, ast.FunctionDef)
            if not self.leaves(node) or is_function and name not in TELLS:
                self.lose(*(() if is_function and name == "run" else [value]))  # `typer.run` reads a command line
            elif GIVE_PARTS.fullmatch(function):
                self.lose(*self.parts(value), *named.values())

    def arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any], bool]:
        """What a call gives by place and by name, and whether that is all: `*` and `**` may give more."""
        (given, is_sure), named = self.items(node.args), dict[str, Any]()
        for keyword in node.keywords:
            value = self.visit(keyword.value)
            is_sure = is_sure and (keyword.arg is not None or isinstance(value, dict))
            named |= {keyword.arg: value} if keyword.arg is not None else value if isinstance(value, dict) else {}
        return given, named, is_sure

    def foreign(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """A call of what the launcher imports; the value of a function that is not listed here is not known."""
        folder = self.folder_of(named.get("cwd"))
        if name == "chdir" and given:
            self.folder = folder = self.folder_of(given[0])
        if ast.unparse(node.func) == "shlex.split" and given:  # which parts words at the ends of lines too
            pieces = (replace(piece, text=piece.text and piece.text.replace("\n", " ")) for piece in as_text(given[0]))
            given = [tuple(pieces), *given[1:]]
        if name in RUNS_A_FILE and given:
            given = [(*as_text(given[0]), Piece(" "), *hole("sys.argv")), *given[1:]]
        for value in (*given, *named.values()):
            if name not in TELLS:
                with self.now(folder=folder):
                    self.shell(node, value)
            if name not in (*NAMES, *TELLS, "open"):
                self.hand_on(value)
            if id(value) in self.handles:
                self.write(shown(value), self.unknown(node), adds=True)
        if name in GIVE_NOTHING:
            return ()
        owner = name_of(getattr(node.func, "value", None))
        if name in ("exit", "_exit", "quit") and owner in ("", "sys", "os") or owner == "os" and name[:4] == "exec":
            self.reading.ended = f": with these arguments the launcher exits in line {node.lineno}"
            raise Ended
        if name in SET_ANY_NAME:
            self.unread(node, "may set any name")
        given = [*given, *named.values()] if name in MOVES else given
        return self.listed(node, name, given, named) if given else self.unknown(node)

    def listed(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """The value of an imported function that is listed here, by what the launcher gives it."""
        first, text = given[0], as_text(given[0])
        if name == "run" and isinstance(first, ast.FunctionDef):  # typer.run(main)
            return self.command_line(first)
        owner = name_of(getattr(node.func, "value", None))
        if name in ("get", "getenv") and owner in ("environ", "os") and known(text):
            self.reading.assume_unset(shown(text))
            return given[1] if len(given) > 1 else None
        if name == "encode_pseudo_file":  # Miles's: a path that holds the text of a file
            content = known(text)
            whole = None if content is None else base64.b64encode(content.encode()).decode()
            return (Piece(INLINE, lines=lines_of(node)), Piece(whole, says(node), lines_of(node)))
        if name in ("getattr", "setattr") and isinstance(first, Record) and len(given) > 1:
            key = key_of(given[1])
            if name == "getattr" and key in first.fields:
                return first.fields[key]
            self.lose(*([] if name == "setattr" and key else given))
            first.fields |= {key: given[2]} if name == "setattr" and key and len(given) > 2 else {}
        if name == "open":
            return self.opened(text, given[1:], named)
        if name == "join" and owner == "path":
            return reduce(lambda folder, more: self.divided(node, folder, more), map(as_text, given))
        if owner in ("shutil", "os") and name in MOVES and len(given) > 1:
            self.write(shown(as_text(given[1])), self.unknown(node))
        if name == "Path" and len(given) > 1:
            return self.unknown(node)
        if name == "Path" and (content := known(text)) is not None:
            return literal(str(PurePosixPath(content)), lines_of(node))
        return text if name in NAMES else self.unknown(node)

    def of_text(self, owner: Text, name: str, given: list[Any], named: Mapping[str, Any]) -> Any:
        """The value of a method of a text, of a path or of an open file; None where that is not known."""
        content = known(owner)
        if name == "join" and given and isinstance(given[0], list) and content is not None:
            parts = [piece for item in given[0] for piece in (*as_text(item), Piece(content))]
            return self.reading.paid(tuple(parts[:-1]))
        if name == "open":
            return self.opened(owner, given, named)
        if name in MOVES and len(given) == 1:  # of a path; a text is given two
            self.write(shown(as_text(given[0])), hole(name))
        if name in WRITES:
            written = as_text(given[0]) if given and name in ("write", "write_text") else hole(name)
            self.write(shown(owner), written, adds=name in ("write", "writelines"))
        if name == "strip" and content is None and owner:
            return owner  # blanks at its ends part no words
        if name == "split" and not given and not named:
            return fields(owner, r"\s")
        is_plain = name in PLAINLY and not given and content is not None
        return self.reading.paid(literal(PLAINLY[name](content))) if is_plain else None

    def opened(self, path: Text, given: Sequence[Any], named: Mapping[str, Any]) -> Text:
        """An open file, which is a path; one that may be written is known by its address."""
        mode = known(as_text(given[0] if given else named.get("mode", literal("r"))))
        if mode is not None and not set("awx+") & set(mode):
            return path
        self.write(shown(path), (), adds=mode is None or not set("wx") & set(mode))
        file = tuple([*path])
        self.handles[id(file)] = file
        return file

    def start(self, node: ast.Call, text: Any) -> None:
        """`execute_train(train_args=...)`, which appends the text to `python3 train.py`."""
        values = [*(keyword.value for keyword in node.keywords if keyword.arg == "train_args"), *node.args]
        place = self.span(values[0]) if values else (0, 0)
        self.launch(node, (Piece("python3 train.py ", lines=lines_of(node)), *as_text(text)), place)

    def shell(self, node: ast.Call, command: Any) -> None:
        """A command of the shell that the launcher hands on, as one text or as words."""
        listed = [item for item in command if isinstance(item, tuple)] if isinstance(command, list) else []
        if (at := shell_of(listed, "c")[1]) < len(listed):  # of `bash -c TEXT NAME ARGUMENT ...`
            own = words.in_quotes(listed[at + 2 :], lines_of(node))
            listed, command = [], ((Piece("set -- "), *own, Piece("; ")) if own else ()) + listed[at]
        text = words.in_quotes(listed, lines_of(node)) or as_text(command)
        given = [*map(with_holes, listed)] or with_holes(text).split()
        is_run = not listed and known(text) and RUNS_IN_SHELL.fullmatch(ast.unparse(node.func))
        if len(given) == 1 and is_train(given[0]):  # the name of the file alone
            may_start = name_of(node.func) not in OF_FILES
        elif is_run or any(map(is_train, given)) or given and given[0] in (*COPIES, *EDITS):
            return self.launch(node, text, (0, 0))
        elif listed:  # as in ["ssh", HOST, TEXT]
            may_start = any(NAMES_TRAIN.search(shown(word)) for word in listed)
        else:
            may_start = isinstance(command, tuple) and self.may_start(command)
        if may_start:
            self.unread(node, "may start train.py too")

    def may_start(self, text: Text) -> bool:
        """Whether a text may start a training: it goes on behind train.py, or is made from a text that starts one."""
        sources = " ".join(piece.source for piece in text if piece.text is None)
        named = re.findall(r"[\w./-]+", sources)
        starts = (is_train(item) or item.rpartition(".")[2].startswith(STARTS) for item in named)
        goes_on = (is_train(word.partition(HOLE)[0]) for word in with_holes(text).split())
        return any(goes_on) or any(starts) or any(map(self.names_command, re.findall(r"(?<![.\w])\w+", sources)))

    def names_command(self, name: str) -> bool:
        """Whether a name of the launcher holds a command that starts a training."""
        value = self.visit_Name(ast.Name(name))
        command = value if isinstance(value, list) else fields(as_text(value))
        return bool(command[1:]) and any(is_train(with_holes(word)) for word in command if isinstance(word, tuple))

    def hand_on(self, value: Any) -> None:
        """Keep the words that a function gets, which may name a file that it writes; those of a start do not."""
        texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, tuple)]
        named = {word for item in texts for word in shown(item).split()}
        self.reading.handed |= set() if any(map(is_train, named)) else named

    def launch(self, node: ast.Call, text: Text, place: tuple[int, int]) -> None:
        for start in bash.launches(with_holes(text), self.path, self.reading):
            given, branch = tuple(words.with_places(start.words, text)), self.branch or start.branch
            folder = os.path.join(self.folder, start.folder)
            self.found.append(Launch(node.lineno, given, frozenset(self.hosts), place, branch, folder))

    def folder_of(self, value: Any) -> str:
        """The folder in which a command runs, or where it changes to; None is the one that the launcher is in."""
        return self.folder if value is None else os.path.join(self.folder, shown(as_text(value)), "")

    def span(self, node: ast.expr) -> tuple[int, int]:
        """The bytes of an expression in the launcher."""
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[last - 1] + column

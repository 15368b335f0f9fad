"""Launch scripts of other frameworks: what each start of a training is given, by the parser of bash.

A script is never executed. Wherever a key of the framework stands, it is read, or an error or a note names its line.
"""

from __future__ import annotations

import itertools
import os.path
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_plugins.config.file import text_of
from mis_plugins.errors import ConfigError, cut, shown
from mis_plugins.explain.launch.bash.builtins import DECLARES, PRINTS
from mis_plugins.explain.launch.bash.commands import COPIES, EDITS, HANDS_ON, LEAVES_FILES, SHELLS
from mis_plugins.explain.launch.bash.grammar import around, one_line, parts_of, says
from mis_plugins.explain.launch.bash.shell import RUN, Shell
from mis_plugins.explain.launch.reader import Reading, from_start
from mis_plugins.explain.launch.words import HOLE, Text, Word, flags_of, hole, known, word_of
from mis_plugins.explain.translate.translation import Open, listed, load

if TYPE_CHECKING:
    from tree_sitter import Node

Value = Word | None  # of a flag that stands alone
LOCATED = (".sh", ".log", ".txt", ".py", ".yaml", ".yml", ".json", ".jsonl", ".md", ".out", ".err")
ENDS_A_PATH = (b"", b" ", b"\n", b"/", b"'", b'"', b")", b";")
FINDS = ("find", "sudo", "time", *HANDS_ON)  # what may run an editor on files that it finds
PATTERN = re.compile(r"[*?\[]")  # of names of files
SUBSTITUTIONS = ("command_substitution", "process_substitution")
# The names of files in a command, but for those behind a flag, which are read.
YAMLS = re.compile(r"(?<![\w-])--[\w-]++[= ]\S+|(?<![^\s/'\"=()])([^\s/'\"=()]+\.(?:ya?ml|json))\b")


@dataclass(frozen=True)
class Asked:
    """What the user says of a launch script.

    path: where the script lies; files that it sources are looked for from there.
    arguments: what the user starts the script with; NAME=VALUE of its environment come first.
    line: the line of the start of a training to read; None where the script has one.
    """

    path: Path = Path("script")
    arguments: tuple[str, ...] = ()
    line: int | None = None


ASKED = Asked()


@dataclass(frozen=True)
class Dialect:
    """How the command line of a framework says its settings.

    name: of the framework.
    keys: names whose every place in a script is read or refused.
    settings: the settings among the words of a command, by path.
    reads: whether a path is one that the translator reads.
    starts: whether a word tells that its command starts a training.
    file: the yaml that a command names, whose settings count beside those of the command; None where it names none.
    own_yamls: names of the framework's own yamls, which correct nothing and may stand under `defaults`.
    blocks: paths of the blocks of a yaml that the translator reads; none where the framework has no Hydra.
    corrects: the one trainer of the framework that corrects.
    other: the words that tell what a command starts in its place; none where it starts no other.
    """

    name: str
    keys: tuple[str, ...]
    settings: Callable[[Sequence[Word]], Iterator[tuple[str, Value]]]
    reads: Callable[[str], bool]
    starts: Callable[[str], bool]
    file: Callable[[Sequence[Word]], Word | None] = lambda words: setting_of(words, "--config")
    own_yamls: tuple[str, ...] = ()
    blocks: Collection[str] = ()
    corrects: str = ""
    other: Callable[[Sequence[Word]], tuple[Word, ...]] = lambda _: ()

    def unread_bases(self, tree: Mapping[str, Any]) -> Iterator[str]:
        """Names in `defaults: [NAME, GROUP: NAME, GROUP@PATH: NAME]` that may hold settings and are not read."""
        defaults = tree.get("defaults") if self.blocks else None
        for entry in defaults if isinstance(defaults, list) else ():
            group, names = next(iter(entry.items()), ("", "")) if isinstance(entry, Mapping) else ("", entry)
            _, at, package = str(group).partition("@")
            for name in names if isinstance(names, list) else [names]:
                is_own = name in (None, "_self_", *self.own_yamls)
                if not is_own and (not at or package in ("_global_", *self.blocks)):
                    yield f"settings in {cut(str(name), 60)}, which `defaults` names and nothing here reads"


@dataclass(frozen=True)
class Start:
    """One start of a training: its line behind the lines of the functions that lead there, and its settings.

    file: the yaml that it names.
    unset: words that are variables which the script never sets.
    unread: other words that may hold settings and are not known.
    script: another shell script that is given the settings, and may have some of its own.
    folder: where the script has changed to.
    written: what the script has written into the yaml before.
    """

    lines: tuple[int, ...]
    branch: str | None
    settings: tuple[tuple[str, Value], ...]
    file: Word | None
    unset: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    script: str = ""
    folder: str = ""
    written: Text = ()


@dataclass(frozen=True)
class Said:
    """What a script says: text or `Open` by the path of each setting, and what was read and does not count.

    tree: the yaml that the start names, or the file itself where that is a yaml.
    skipped: keys in parts of the script that do not run, that no start of a training is given, or that may stand in a
        yaml which was not found.
    starts: whether the script starts a training.
    """

    settings: Mapping[str, Any]
    tree: Any = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    starts: bool = True

    def beside(self, strays: Sequence[str]) -> Said:
        """What the script says, with keys that stand in a yaml where nothing reads them."""
        notes = (f"not read, since it does not count: {place}." for place in strays)
        return replace(self, notes=(*self.notes, *notes), skipped=(*self.skipped, *strays))

    def prove_nothing(self) -> None:
        """Check that a script corrects nothing; raises ConfigError where it holds the framework's keys all the same."""
        if self.skipped:
            raise ConfigError(
                f"nothing that runs corrects, and yet there are {'; '.join(self.skipped)}; put the values that count "
                "behind the file"
            )


def overrides(words: Sequence[Word]) -> Iterator[tuple[str, Value]]:
    """The settings of a command line of Hydra's: PATH=VALUE, +PATH=VALUE and ~PATH."""
    for word in words:
        path, equals, _ = word.text.partition("=")
        if equals or path.startswith("~"):
            yield path.lstrip("+"), word.behind_equals


def flags(words: Sequence[Word]) -> Iterator[tuple[str, Value]]:
    """The settings of a command line of flags, `--a-key VALUE` or `--a_key=VALUE`, with underscores."""
    for flag, word, value in flags_of(_with_strays(words)):
        branch = value and (value.branch or word.branch)
        yield flag[2:].replace("-", "_"), value and replace(value, branch=branch)


def _with_strays(words: Sequence[Word]) -> list[Word]:
    """The words of a command; in `--a-key 1 2` both values are one word, which no reader of one value takes."""
    joined: list[Word] = []
    for word in words:
        before, last = [Word("", ""), Word("", ""), *joined][-2:]
        flag = last if last.text.startswith("--") else before
        has_value = flag.text.startswith("--") and ("=" in flag.text) == (flag is last)
        if has_value and word.is_known and word.text[:1] != "-":
            word = replace(joined.pop(), text=f"{last.text} {word.text}", source=f"{last.source} {word.source}")
        joined.append(word)
    return joined


def other_of(words: Sequence[Word], programs: Collection[str], commands: Collection[str]) -> tuple[Word, ...]:
    """A program and its command, `trl rloo`, that a command line starts instead of the one that corrects."""
    for before, program, after in zip([Word("", ""), *words], words, words[1:], strict=False):
        is_other = after.text.replace("_", "-") in commands or not before.text and after.text == HOLE
        if program.text.rpartition("/")[2] in programs and is_other and before.text[:1] != "-":
            return program, after
    return ()


def no_values(words: Sequence[Word]) -> Iterator[Word]:
    """The words of a command, but for the value of each flag in two words, as the file behind `--target`.

    A file behind `--config` stays, whose name may tell the trainer.
    """
    for before, word in itertools.pairwise([Word("", ""), *words]):
        is_flag = before.text[:2] == "--" and "=" not in before.text and before.text not in ("--", "--config")
        if not is_flag or word.text.startswith("-"):
            yield word


def setting_of(words: Sequence[Word], *names: str) -> Word | None:
    """The value of the last of some flags of a command; None where none is there."""
    values = [value for flag, _, value in flags_of(words, names) if flag in names]
    return values[-1] if values else None


def tree_or_script(text: str, dialect: Dialect, behind: set[str], asked: Asked) -> Said:
    """What a yaml or a launch script says; raises ConfigError where the text is neither."""
    is_yaml, problem, tree = asked.path.suffix in (".yaml", ".yml"), None, ""
    if asked.path.suffix == ".py":
        raise ConfigError(
            f"a Python file, which is not read for {dialect.name}: give the script or the yaml that it is started with"
        )
    try:
        tree = "" if text.startswith("#!") or asked.path.suffix == ".sh" else load(text)
    except ConfigError as error:
        problem = error
        if is_yaml:
            raise
    if isinstance(tree, str) and not is_yaml:
        source = _script(text, dialect, behind, asked, problem)
    elif asked.line or asked.arguments:
        raise ConfigError("--line, and arguments behind --, belong to a launch script")
    else:
        source = Said({}, tree)
    if not isinstance(source.tree, Mapping):
        content = "it is empty" if source.tree is None else f"got {shown(source.tree)}"
        raise ConfigError(f"{content}; expected a yaml of {dialect.name}'s, or a launch script")
    unread = tuple(dialect.unread_bases(source.tree))
    notes = (f"not read: {base}; those that count go behind the file." for base in unread)
    return replace(source, notes=(*source.notes, *notes), skipped=(*source.skipped, *unread))


def _script(text: str, dialect: Dialect, behind: set[str], asked: Asked, problem: ConfigError | None) -> Said:
    """What a launch script says; `problem` is why the text is no yaml."""
    try:
        source = read(text, dialect, behind, asked)
    except ConfigError as error:
        raise ConfigError(f"{problem}; as a launch script: {cut(str(error), 300)}" if problem else str(error)) from None
    if problem and not source.starts:
        raise problem
    return source


def read(text: str, dialect: Dialect, behind: set[str], asked: Asked) -> Said:
    """Read the settings of the one start of a training in a script; those of `behind` the user gives, and they win.

    It raises ConfigError of several starts with different settings, a part that is no bash, and a key that no start is
    given. It raises it too of another trainer alone, and without the parser of bash.
    """
    reading = Reading(len(text.encode()), "the script")
    commands = Commands(dialect, asked.path, reading)
    commands.run_script(text, asked.arguments)
    commands.check_bash()
    starts = list(dict.fromkeys(commands.found))
    if commands.others and not starts and not commands.scripts:
        words = commands.others[0]
        other = " ".join(word.source for word in words)
        if any(HOLE in word.text for word in words):
            raise ConfigError(f"`{other}`: which command runs is not known; say behind -- how you start the script")
        raise ConfigError(f"nothing to translate: `{other}`; {dialect.name} corrects with {dialect.corrects} alone")
    start = _chosen(starts, dialect, behind, asked.line) if starts else None
    tree, remarks, lost = commands.named_yaml(start.file, start) if start and start.file else ({}, [], [])
    refused, skipped = commands.unread_keys({path.rpartition(".")[2] for path in behind})
    if refused:
        unread = [f"{word} in line {_lines(other)}" for other in starts for word in (*other.unset, *other.unread)]
        sources = "; not read: ".join(["", *reading.unread.values(), *unread])
        raise ConfigError(
            f"no start of {dialect.name} that can be read is given {listed(refused)}; put the values that count behind "
            f"the file{sources}"
        )
    if start is None:
        unread = (f"settings in {script}, if it has any: give that script itself" for script in commands.scripts)
        return Said({}, skipped=(*skipped, *unread), starts=False)
    _check_words(start, reading)
    merged = _merged(start, dialect, behind)
    for path in merged:
        if path.startswith("~"):
            raise ConfigError(f"{path}: cannot be translated; drop it and give each key behind the file")
    if not merged:
        skipped += [f"settings in line {_lines(other)}" for other in starts if _merged(other, dialect, behind)]
    idle = [f"not read, since it does not count: {place}." for place in skipped]
    return Said(merged, tree, (*remarks, *_notes(start, reading), *idle), (*skipped, *lost))


def _chosen(starts: Sequence[Start], dialect: Dialect, behind: set[str], line: int | None) -> Start:
    """The start that the user asks for, or the one whose settings all others have too."""
    asked = [start for start in starts if line in (None, *start.lines)]
    files = [start.file and (start.file.text, start.file.source, start.written) for start in asked]
    own = {start: (_merged(start, dialect, behind), file) for start, file in zip(asked, files, strict=True)}
    if asked and all(settings == own[asked[0]] for settings in own.values()):
        return asked[0]
    in_words = "; ".join(f"line {_lines(each)}{_branch(each.branch)}: {_listed(each, dialect)}" for each in starts)
    by_line = "choose one by --line N, " if len({start.lines for start in starts}) == len(starts) else ""
    raise ConfigError(
        f"{len(starts)} starts of {dialect.name} with different settings; {by_line}start the script as you do, behind "
        f"--, or put the values that count behind the file: {in_words}"
    )


def _branch(branch: str | None) -> str:
    return f", only if {branch}" if branch else ""


def _lines(start: Start) -> str:
    return ", ".join(dict.fromkeys(map(str, reversed(start.lines))))


def _listed(start: Start, dialect: Dialect) -> str:
    own = [(path, word.source if word else "true") for path, word in start.settings if dialect.reads(path)]
    settings = [f"{path}: {source}" for path, source in own if source != path]
    settings += [f"the yaml {start.file.source}"] if start.file else []
    return listed(settings) or "nothing of the correction"


def _check_words(start: Start, reading: Reading) -> None:
    """Refuse words of a start that may hold settings, where only running the script would tell."""
    if start.script:
        raise ConfigError(
            f"line {_lines(start)} starts {start.script}, which may hold settings and is not read; give that script, "
            "and behind -- what this one starts it with"
        )
    sources = _sources(reading)
    unread = [*start.unread, *(start.unset if sources else ())]
    if unread:
        raise ConfigError(
            f"only running the script would tell {listed(unread)} (line {_lines(start)}), which may hold settings; "
            "write them out in its place, or give a variable behind --, as NAME=VALUE"
            + "; not read: ".join(["", *sources])
        )


def _sources(reading: Reading) -> list[str]:
    """The files, texts and names of variables in a script that are not known."""
    return [text for text in reading.unread.values() if text.partition(" ")[0] in ("source", ".", "eval", *DECLARES)]


def _merged(start: Start, dialect: Dialect, behind: set[str]) -> dict[str, Any]:
    """The value of each setting that is read; `Open` where the words leave it open."""
    values_by_path: dict[str, list[Value]] = {}
    for path, value in start.settings:
        if dialect.reads(path.lstrip("~")) and path.lstrip("~") not in behind:
            values_by_path[path] = [*values_by_path.pop(path, []), value]  # Hydra applies them in this order
            if path in dialect.blocks and len(values_by_path[path]) > 1:
                raise ConfigError(f"{path}: stands twice, and Hydra joins both mappings; give it once")
    return {path: _value(values) for path, values in values_by_path.items()}


def _value(values: list[Value]) -> str | bool:
    sure = [place for place, value in enumerate(values) if value is None or not value.branch]
    if sure:
        values = values[sure[-1] :]
    texts = dict.fromkeys(True if value is None else value.text for value in values)
    labels = {value.branch for value in values if value is not None}
    if len(texts) == 1 and (None in labels or not labels or any(f"not: {label}" in labels for label in labels)):
        value = values[0]
        return True if value is None else value.text if value.is_known else Open(value.source)
    ways = ("true" if value is None else f"{value.source} ({value.place}{_branch(value.branch)})" for value in values)
    return Open(" or ".join(dict.fromkeys(ways)))


def _notes(start: Start, reading: Reading) -> Iterator[str]:
    if reading.assumed:
        sources = "".join(f"; not read, and may set them: {place.partition(': ')[0]}" for place in _sources(reading))
        yield f"taken for granted: {listed(list(reading.assumed))}; other values go behind --, as NAME=VALUE{sources}."
    if start.unset:
        unset = f"{listed(start.unset)} (line {_lines(start)})"
        yield f"taken for granted: {unset}, which the script does not set, gives nothing."


class Commands(Shell):
    """The commands of a script that start a training, and which literals reach them.

    found: what a command gives to a training.
    scripts: other shell scripts that it starts.
    others: trainers of the framework that it starts and that correct nothing.
    read: by number of the text, begin and end of the literals that a start is given.
    elsewhere: the paths of those literals that name a key of the framework, and set something else.
    changed: by name, without a folder, what a command may have changed a file to; by "", every file.
    """

    def __init__(self, dialect: Dialect, path: Path, reading: Reading):
        super().__init__(path, reading)
        self.dialect = dialect
        self.scripts: list[str] = []
        self.others: list[tuple[Word, ...]] = []
        self.read: set[tuple[int, int, int]] = set()
        self.elsewhere: dict[tuple[int, int, int], str] = {}
        self.changed: dict[str, Text] = {}
        self.callers: list[int] = []

    def call(self, node: Node, words: list[Text]) -> None:
        line = self.lines(node)[0]
        with self.now(callers=[*self.callers, line] if line else self.callers):
            given = [word_of(word) for word in words]
            begins = any(self._is_setting(path) for path, _ in self.dialect.settings(given[:1]))
            is_whole = node.parent and node.parent.parent is None and node.parent.named_child_count == 1
            if given and is_whole and (begins or given[0].text.startswith("--")):  # settings without their start
                self._launch(node, words)
            elif begins:
                why = "begins with a setting; does the line above lack its backslash, or hold a comment?"
                self.reading.unread.setdefault(line, f"{cut(one_line(node))}: {why}")
            else:
                super().call(node, words)

    def _is_setting(self, path: str) -> bool:
        return self.dialect.reads(path.lstrip("~"))

    def may_start(self, source: str) -> bool:
        return any(map(self.dialect.starts, source.split()))

    def _launch(self, node: Node, words: list[Text]) -> None:
        given = [word_of(word) for word in words]
        if given and given[0].text.rpartition("/")[2] in (*LEAVES_FILES, *COPIES, *EDITS):
            self._other(node, words)
            return
        if other := self.dialect.other(given):
            self.others.append(other)
            self._give(words)
            return
        script = _script_of(given, self.dialect)
        self.scripts += [script] if script and script not in self.scripts else []
        paths = [path for path, _ in self.dialect.settings(given)]
        if any(map(self._is_setting, paths)) or any(self.dialect.starts(word.text) for word in no_values(given)):
            self.found.append(replace(self._start(given), script=script))
            self._give(words)
        else:
            self._may_change(node, given)

    def _may_change(self, node: Node, given: Sequence[Word]) -> None:
        """Note the yamls that a command may change: those that its words or its code name, or any that `sed` finds."""
        whole = node.parent if node.parent is not None and node.parent.type == "redirected_statement" else node
        behind = [word.text.rpartition("/")[2] for word in given[1:]]
        edits = given and given[0].text in FINDS and set(EDITS) & set(behind)
        for name in [""] if edits else filter(None, YAMLS.findall(" ".join([says(whole), *behind]))):
            self._change(name, hole(one_line(node)))

    def write(self, file: str, text: Text, adds: bool = False) -> None:
        super().write(file, text, adds)
        if known(text) is None and PATTERN.search(file):
            self._change("", text)

    def _change(self, name: str, text: Text) -> None:
        """Forget what files of this name hold, in whatever folder; without a name, what every file holds."""
        self.reading.spend(1 + len(self.reading.files))
        self.changed[name] = text
        for file in self.reading.files:
            if name in ("", file.rpartition("/")[2]):
                self.reading.files[file] = text

    def _give(self, words: Sequence[Text]) -> None:
        """Note the literals that a start is given; a word that is no setting holds one behind a blank, or as a part."""
        for text in words:
            word = word_of(text)
            paths = [path for path, _ in self.dialect.settings([word])]
            parts = {part for path in paths for part in path.replace("@", ".").split(".")}
            is_lost = bool(word.text.split()[1:]) or not parts.isdisjoint(self.dialect.keys)
            if not is_lost or any(map(self._is_setting, paths)):
                self.read |= {piece.at for piece in text if piece.at}
            elif paths:
                self.elsewhere |= {piece.at: paths[0] for piece in text if piece.at}

    def _start(self, given: Sequence[Word]) -> Start:
        texts = enumerate(itertools.pairwise(["", *(word.text for word in given)]))
        starts = self.dialect.starts
        program = next((i for i, (x, text) in texts if x == "-m" or text.endswith(".py") or starts(text)), 0)
        open_words = [
            word.source
            for before, word in itertools.pairwise(given[program:])
            if _may_be_settings(word) and not (before.text.startswith("--") and "=" not in before.text)
        ]
        unset = tuple(word for word in open_words if self._is_never_set(word))
        unread = tuple(dict.fromkeys(word for word in open_words if word not in unset))
        settings, file, folder = tuple(self.dialect.settings(given)), self.dialect.file(given), self.working_folder()
        name = from_start(folder, file.source) if file else ""
        changed = self.changed.get(name.rpartition("/")[2], self.changed.get("", ()))
        written = self.reading.files.get(name, changed) if name else ()
        if file and _is_sure(file) and known(written) is not None:
            self.read |= {piece.at for piece in written if piece.at}
        return Start(tuple(self.callers), self.branch, settings, file, unset, unread, folder=folder, written=written)

    def named_yaml(self, word: Word, start: Start) -> tuple[Any, list[str], list[str]]:
        """The yaml that a start names, what to tell of it, and what stays unread.

        The script writes the file itself, or it lies in the script's folder or one above. It raises ConfigError
        where the file is no yaml.
        """
        name, is_sure = from_start("", word.source), _is_sure(word)
        text = known(start.written) if start.written and is_sure else None
        where = f"{word.source}, which the script writes"
        if is_sure and not start.written:
            here = self.path.resolve().parent
            above = (here / start.folder, here, *here.parents)
            file = next((path for root in above if os.path.isfile(path := root / name)), None)
            text, where = (text_of(file), f"{file}, as it is now") if file else (None, "")
        if text is None:
            why = "which the script writes or changes" if start.written else "a yaml that is not here"
            lost = f"settings in {word.source}{_branch(word.branch)}, {why}"
            return {}, [f"not read: {lost}; those that count go behind the file."], [lost]
        try:
            return load(text), [f"read too: {where}."], []
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _is_never_set(self, source: str) -> bool:
        name = source.strip('"${}').partition("[")[0].partition("+")[0].rstrip(":")
        return (name.isidentifier() or name.isdigit()) and name not in self.variables

    def evaluate(self, text: Text, shares: bool = False) -> None:
        self.read |= {piece.at for piece in text if piece.at and not piece.branch}
        super().evaluate(text, shares)

    def unread(self, node: Node, why: str) -> None:
        """A part that is not read may set any variable."""
        super().unread(node, why)
        for name, value in self.variables.items():
            lost = f"${{{name}[@]}}" if isinstance(value, list) else f"${name}"
            if name != "@":
                self.variables[name] = [hole(lost)] if isinstance(value, list) else hole(lost)

    # The proof that no key was lost.

    def check_bash(self) -> None:
        """Refuse a script with a part that the parser does not know."""
        for root in self.texts:
            wrong = next(_errors(root), None)
            if wrong is not None:
                line = wrong.start_point[0] + 1
                raise ConfigError(f"line {line}: {cut(one_line(wrong) or wrong.type)}: no bash that the parser knows")

    def unread_keys(self, behind: set[str]) -> tuple[list[str], list[str]]:
        """Places of keys that no start of a training is given: those to refuse, and those that do not count."""
        refused: dict[str, dict[str, None]] = {}
        skipped: dict[str, dict[str, None]] = {}
        reads = sorted(self.read)
        for number, root in enumerate(self.texts):
            text = b" " * root.start_byte + (root.text or b"")  # the tree leaves out what is blank before it
            for begin, key in _places(text, self.dialect.keys):
                self.reading.spend()
                before = reads[: bisect_right(reads, (number, begin, len(text)))][-1:]
                is_read = any(last[0] == number and begin < last[2] for last in before)
                chain = [] if is_read or key in behind else _chain(root, begin)
                if not chain or _is_harmless(chain):
                    continue
                dead = (at for at in self.replaced - self.used if at[0] == number and at[1] <= begin < at[2])
                is_dead = next(dead, None) is not None
                idle = ", which is set anew" if is_dead else self._idle(number, root, chain, set())
                paths = (path for at, path in self.elsewhere.items() if at[0] == number and at[1] <= begin < at[2])
                named = f"{key} but as {path}" if not idle and (path := next(paths, "")) else key
                (skipped if idle else refused).setdefault(f"{_place(number, chain)}{idle}", {})[named] = None
        sentences = ([f"{', '.join(keys)} in {place}" for place, keys in part.items()] for part in (refused, skipped))
        return next(sentences), next(sentences)

    def _idle(self, number: int, root: Node, chain: Sequence[Node], seen: set[str]) -> str:
        """Why a place does not count: it does not run, or it sets a variable that nothing reads; empty where it may."""
        above = next((i for i in reversed(range(len(chain))) if chain[i].type in SUBSTITUTIONS), 0)
        statements = [(i, node) for i, node in enumerate(chain[above:-1], above) if node.type in RUN]
        never = [i for i, node in statements if (number, node.id) not in self.ran]
        if never:
            return "" if chain[never[-1] + 1].type == "function_definition" else ", which does not run"
        if any((number, node.id) in self.unused for node in chain):
            return ", which gives nothing"
        for node in chain:
            name = node.child_by_field_name("name") if node.type == "variable_assignment" else None
            if name is not None and not (node.parent and one_line(node.parent).startswith(("export", "declare -x"))):
                is_used = self._is_used(number, root, one_line(name).partition("[")[0], seen)
                return "" if is_used else ", which nothing reads"
        return ""

    def _is_used(self, number: int, root: Node, name: str, seen: set[str]) -> bool:
        """Whether a part that runs reads a variable, other than to print it or to make up one that nothing reads."""
        if name in seen:
            return False
        for node in _named(root, name):
            self.reading.spend()
            chain = _chain(root, node.start_byte)
            if not _is_harmless(chain[1:]) and not self._idle(number, root, chain[1:], seen | {name}):
                return True
        return False


def _is_sure(file: Word) -> bool:
    """Whether a word surely names a file, other than by a variable that is not known."""
    name = from_start("", file.source)
    return not file.branch and "$" not in name and "`" not in name


def _script_of(words: Sequence[Word], dialect: Dialect) -> str:
    """The shell script that a command starts, if no word behind it names a program that trains."""
    script = ""
    for before, word in itertools.pairwise([Word("", ""), *words]):
        if word.text.startswith("-") and word.text != "-m" or "=" in word.text:
            continue
        if word.text == "-m" or word.text.endswith(".py") or dialect.starts(word.text):
            return ""
        if word.text.endswith(".sh") or before.text.rpartition("/")[2] in SHELLS:
            script = script or word.source
    return script


def _may_be_settings(word: Word) -> bool:
    key, equals, _ = word.text.partition("=")
    return HOLE in key and (bool(equals) or key.startswith("--") or not key.strip(HOLE))


def _errors(root: Node) -> Iterator[Node]:
    """Parts of a text that are no bash."""
    if root.type == "ERROR" or root.is_missing:
        yield root
    elif root.has_error:
        for child in root.children:
            yield from _errors(child)


def _places(source: bytes, keys: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Where each key stands in a text as a word of its own, and the key that it leads to, as in `KEY.LAST`."""
    for key in keys:
        name = key.replace("_", "[-_]")
        word = rf"{name}(?<!\w{name})(?![\w-])(\.\w*)?"  # begins with a letter, which is found fast
        for place in re.finditer(word.encode(), source):
            tail, before = (place[1] or b"").decode(), source[place.start() - 1 : place.start()]
            is_path = before == b"/" and source[place.end() : place.end() + 1] in ENDS_A_PATH or tail in LOCATED
            if not is_path:
                yield place.start(), tail[1:] or key


def _chain(root: Node, begin: int) -> list[Node]:
    """The node at a byte, and all that it stands in."""
    return list(around(root.descendant_for_byte_range(begin, begin + 1)))


def _named(root: Node, name: str) -> Iterator[Node]:
    """Every place that reads a variable."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        nodes += node.named_children
        is_target = node.parent is not None and node.parent.child_by_field_name("name") == node
        if node.type == "variable_name" and one_line(node) == name:
            if not (is_target and node.parent and node.parent.type == "variable_assignment"):
                yield node


def _is_harmless(chain: Sequence[Node]) -> bool:
    """Whether a place can set nothing: a comment, a variable's own name, a condition, or text that is only printed."""
    if any(node.type in ("comment", "variable_name", "test_command", "heredoc_start") for node in chain):
        return True
    if any(parent.type == "case_item" and child in parent.children_by_field_name("value")
           for child, parent in itertools.pairwise(chain)):  # fmt: skip
        return True
    kinds = {node.type for node in chain}
    statement = next((node for node in chain if node.type in ("redirected_statement", "command")), None)
    if statement is None or kinds & {"pipeline", *SUBSTITUTIONS}:
        return False
    outer = next((node for node in chain if node.type == "redirected_statement"), statement)
    if next(parts_of(outer, "pipeline"), None):
        return False
    files = [one_line(child) for child in parts_of(outer, "file_redirect")]
    is_idle = "heredoc_body" in kinds and re.match(r":? *<<", one_line(outer))  # a comment over some lines
    prints = is_idle or one_line(outer).split(" ")[0] in PRINTS
    return prints and all(">&" in file or "/dev/" in file for file in files)


def _place(number: int, chain: Sequence[Node]) -> str:
    """A place for an error: its line, and what stands there."""
    node = next((node for node in chain if node.type in RUN), chain[0])
    line = chain[0].start_point[0] + 1
    where = f"line {line}" if number == 0 else f"line {line} of a sourced or evaluated text"
    return f"{where} ({cut(one_line(node), 60)})"

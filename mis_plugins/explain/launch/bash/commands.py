"""Commands of a script in bash: starts of train.py, functions, other shells and texts that it runs."""

import os.path
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path

from mis_plugins.config.file import text_of
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.bash.builtins import DECLARES, FILLS, NAMES_TRAIN, PRINTS, Builtins, pair
from mis_plugins.explain.launch.bash.grammar import ENDS_ROUND, Node, one_line, parsed, says
from mis_plugins.explain.launch.bash.texts import EXPORTED, FOLDER, LEFT, PUSHED, Value, as_words, depends
from mis_plugins.explain.launch.reader import HERE, PACKAGES, SCRIPTS, Ended, Launch, Returned, from_start, is_train
from mis_plugins.explain.launch.words import HOLE, Piece, Text, hole, known, literal, shown, spaced, word_of

BREAKS_LINES = re.compile("\r\n|\\A\ufeff(?!#)")  # letters to bash; a BOM before a comment does no harm
SHELLS = ("bash", "sh", "zsh", "dash")
STARTS_NOTHING = (":", "true", "pkill", "pgrep", "grep", "ps", "kill")
# Commands that start nothing and write no file that they name, and those that write one.
LEAVES_FILES = ("ls", "test", "chmod", "mkdir", "touch", "head", "tail", "less", "vim", "wc", "diff", "stat", "git",
                "basename", "dirname", "realpath", "which")  # fmt: skip
COPIES, EDITS = ("cp", "mv", "ln", "rm", "install", "rsync", "scp", "tee"), ("sed", "yq", "perl", "wget", "curl")
CHANGES_WORDS = {"nocasematch", "nullglob", "failglob", "expand_aliases"}
# What gives a shell the variables that the script exports, but for some flags; of other commands that is not known.
READS = ("xargs", "parallel")
HANDS_ON = ("env", "exec", "nohup", "nice", "timeout", "setsid", "stdbuf", "srun", *READS)
LETS_GO = ("-i", "-u", "--ignore", "--unset", "--export")
# What starts a program in Python, wherever it stands before train.py.
PYTHON = re.compile(r"(i?python|pypy)[\d.]*|torchrun|accelerate|deepspeed|uv|poetry")
# The folder in which Ray, Slurm or Docker starts a program.
WORKS_IN = re.compile(r"""(?:--(?:working-dir|chdir|workdir)[ =]|"working_dir": *)"?([^\s"]+)""")
# The folder in which Slurm starts a script.
BATCH_FOLDER = re.compile(r"^#SBATCH\s+(?:--chdir[= ]|-D\s*)(\S+)", re.M)
# What sets up a shell, and no variable of a training.
OF_A_SHELL = re.compile(r"\$\((?:[^\s()]*/)?(?:conda|mamba|micromamba|pyenv|ssh-agent)\s[^()]*\)")
# A part of an evaluated text that is known but for its branch: words that need no quotes.
PLAIN_WORDS = re.compile(r"( [\w./:=,@+-]+)+ *")


class RoundEnded(Ended):
    """A round of a loop ends, and the loop with it or not."""

    def __init__(self, ends_loop: bool):
        self.ends_loop = ends_loop


class Commands(Builtins):
    """What the commands of a script do.

    is_sure_round: whether what is read runs for sure in a round of the loop that is read round by round.
    may_have_ended: whether a branch of which only running the script would tell may have ended such a round.
    """

    is_sure_round = may_have_ended = False

    def run_text(self, script: str) -> None:
        if (odd := BREAKS_LINES.search(script)) and not self.texts:
            line = script.count("\n", 0, odd.start()) + 1
            raise ConfigError(f"line {line}: bash takes a CR or BOM for a letter of a word; save with LF, without BOM")
        root, lost = parsed(script, self.reading.clock.is_over)
        if not self.texts and (named := BATCH_FOLDER.search(script)):
            self.variables[FOLDER] = literal(f"{named[1]}/")
        self.texts.append(root)
        for keyword in lost:
            self.unread(keyword, "the parser of bash loses the branch before it; write one assignment a line")
        self.run_all(root.children)

    def call(self, node: Node, words: list[Text]) -> None:
        name = word_of(words[0]).text if words else ""
        if name in self.functions:
            body, source = self.functions[name]
            own: dict[str, Value | None] = {}
            with self.now(locals=own), self._kept(own):
                self._within(words[1:], source, lambda: self.run(body))
        elif name.startswith("--"):
            self.unread(node, "a command that begins with a flag; does the line above lack its backslash?")
        elif name in COMMANDS:
            COMMANDS[name](self, node, words[1:])
        elif name == "tee":
            self._tee(words, hole("tee"))
        elif name == "printf" and [known(word) for word in words[1:2]] == ["-v"]:
            self._fill(node, words[1:])
        elif name not in STARTS_NOTHING and name not in PRINTS:
            at, text = shell_of(words, "c")
            if text < len(words):
                given = fed(words, at)
                if is_unknown(given[text]):
                    Builtins.unread(self, node, "its text is not known")
                self._other_shell(given[:at], given[text], [*given[text + 1 :], *given[len(words) :]])
            else:
                self._launch(node, words)

    def _other_shell(self, before: Sequence[Text], text: Text, given: Sequence[Text]) -> None:
        """Read a text as another shell: it sees what the script exports, and the NAME=VALUE words `before` it."""
        starts = [shown(word) for word in before]
        is_given = not before or starts[0] in HANDS_ON and not any(word.startswith(LETS_GO) for word in starts)
        own: dict[str, Value] = {FOLDER: self._folder(), "@": list(given[1:])}
        for name, value in self.variables.items():
            mark = self.variables.get(f"-x {name}", hole("-a") if "-a" in self.variables else ())
            is_array = isinstance(value, list) and not any(map(depends, value))  # bash exports none
            if mark and name.isidentifier() and name != "IFS" and not is_array:
                is_sure = is_given and mark == EXPORTED
                shared = value if is_sure and not isinstance(value, list) else hole(f"${name}")
                own |= {name: shared, f"-x {name}": hole("-x") if known(shared) is None else EXPORTED}
        for word in before:
            name, value = pair(word)
            others = {assigned: hole(shown(word)) for assigned in re.findall(r"(\w+)=", shown(word))}
            own |= {name: value, f"-x {name}": EXPORTED} if name else others
        own_name = next(iter(given), hole("$0"))
        exported = {key: body for key, body in self.functions.items() if is_given and self.variables.get(f"-x {key}")}
        with self.now(variables=own, functions=exported, locals=None, own_name=own_name):
            self.attempt(lambda: self.evaluate(text))

    def _within(self, positional: list[Text], source: int, work: Callable[[], object], shares: bool = False) -> None:
        """Run a function, a sourced file or a text. With `shares`, its `set` and `shift` act on the script."""
        with self.deeper(), self.now(positional=positional, source=source, returned=[]):
            with suppress(Returned):
                work()
            for branch, state in self.returned:
                self.join(state, self.variables, branch)
            positional = self.positional
        self.positional = positional if shares else self.positional

    def _launch(self, node: Node, words: list[Text]) -> None:
        texts = [word_of(word).text for word in words]
        at = next((place for place, text in enumerate(texts) if is_train(text)), None)
        programs = [text.rpartition("/")[2] for text in texts[:at] if text[:1] != "-"]
        before = programs[-1] if programs else HOLE
        starts = any(map(PYTHON.fullmatch, programs)) or HOLE in before or before in HANDS_ON
        if at is None or not starts or programs[:1] and programs[0] in (*LEAVES_FILES, *COPIES, *EDITS):
            self._other(node, words)
            return
        words = fed(words, at)
        name, arguments = node.child_by_field_name("name"), node.children_by_field_name("argument")
        ends = [child.end_byte for child in arguments if says(child) not in ('"$@"', "$@")]
        if not ends and name is not None and not re.match(r'"?\$\{?[@*\d]', says(name)):
            ends = [name.end_byte]
        place = (0, 0) if self.source or not ends else (ends[-1], ends[-1])
        parts = {part.lower() for word in words for part in shown(word).replace(":", "/").split("/")}
        given, hosts, folder = tuple(map(word_of, words[at + 1 :])), frozenset(parts & PACKAGES), self.working_folder()
        if (named := WORKS_IN.search(shown(spaced(words[:at])))) and named[1] not in HERE:
            folder = os.path.join(folder, named[1], "")
        self.found.append(Launch(self.lines(name or node)[0], given, hosts, place, self.branch, folder=folder))

    def _other(self, node: Node, words: Sequence[Text]) -> None:
        """A command that is no start: what it may write, and what it may start out of sight."""
        name, *given = [shown(word) for word in words if known(word) != "sudo"] or [""]
        name = name.rpartition("/")[2]
        if name in LEAVES_FILES:
            return
        names = {part for word in given for part in re.split("[= ]", word)}
        self.reading.handed |= names | set(map(os.path.basename, names))
        if name in (*COPIES, *EDITS):
            within = (os.path.normpath(f"{given[-1]}/{os.path.basename(word)}") for word in given[:-1])
            is_edit = any(re.match(r"-\w*[iOo]|--in|--out", word) for word in given)
            changed = given if name in ("mv", "rm") else given[-1:]
            for file in [*changed, *within] if name in COPIES else given if is_edit else []:
                self.write(file, hole(one_line(node)))
            return
        shell, _ = shell_of(words, "c")
        is_hidden = self.source == 0 and words and all(map(is_unknown, words))
        handed = {key for key in self.functions if name == "trap" or self.variables.get(f"-x {key}")}
        is_hidden = is_hidden or any(map(self._starts, sorted(names & handed)))
        if is_hidden or NAMES_TRAIN.search(f"{says(node)} {' '.join(given)}"):
            self.unread(node, "may start train.py too")
        elif shell in (0, *range(len(given))) and words or any(word.endswith(SCRIPTS) for word in (name, *given)):
            self.unread(node, "runs another script, which is not read")

    def _starts(self, function: str) -> bool:
        """Whether a function starts a training. It is only tried, and leaves nothing behind."""
        functions, files, ended = dict(self.functions), dict(self.reading.files), self.reading.ended
        body, source = functions.pop(function)  # which may hand itself on
        with self.now(variables=dict(self.variables), functions=functions, found=[]):
            self.attempt(lambda: self._within([], source, lambda: self.run(body)))
            self.reading.files, self.reading.ended = files, ended
            return bool(self.found)

    def _exit(self, node: Node, words: list[Text]) -> None:
        self.reading.ended = f": the script exits in line {self.lines(node)[0]}"
        raise Ended

    def _exec(self, node: Node, words: list[Text]) -> None:
        """A command in the shell's place, behind which nothing runs; without a command it redirects alone."""
        self.call(node, words)
        if words:
            self._exit(node, words)

    def _end_round(self, node: Node, words: list[Text]) -> None:
        if self.is_sure_round:
            raise RoundEnded(says(node).startswith("break"))
        self.may_have_ended = True

    def _return(self, node: Node, words: list[Text]) -> None:
        if self.depth:  # at the top of a script it fails, and bash goes on
            raise Returned(dict(self.variables))

    def _source(self, node: Node, words: list[Text]) -> None:
        """Read a file that the script sources, as the script writes it, or where it can be found."""
        name_given, folder = (known(word) or "" for word in (words[0] if words else (), self._folder()))
        name = next((path for path in (os.path.join(folder, name_given), name_given) if os.path.isfile(path)), None)
        written = self.reading.files.get(from_start(self.working_folder(), shown(spaced(words[:1]))))
        text = text_of(Path(name)) if written is None and name else known(written or hole(""))
        if text is None:
            return self.unread(node, "the file is not here" if written is None else "what it holds is not known")
        self.reading.spend(len(text))
        self._within(words[1:] or self.positional, len(self.texts), lambda: self.run_text(text))

    def _past_functions(self, node: Node, words: list[Text]) -> None:
        """`command` and `builtin`: what stands behind, as if the script had no function of this name."""
        given = [*dropwhile(lambda word: known(word) in ("-p", "--"), words)]
        name = word_of(given[0]).text if given else "-v"
        if name in DECLARES or name.startswith("-") and name[1:2] not in ("v", "V"):
            self.unread(node, "which variables it sets is not known")
        elif not name.startswith("-"):  # `command -v` looks a program up
            held = {name: self.functions.pop(name)} if name in self.functions else {}
            self.call(node, given)
            self.functions |= held

    def _trap(self, node: Node, words: list[Text]) -> None:
        signals, text = {str(known(word)).upper() for word in words[1:]}, known(spaced(words[:1])) or "="
        sets = "=" in text or any(name in self.functions for name in text.split())
        if text != "-" and ("DEBUG" in signals or sets and signals & {"ERR", "RETURN"}):
            self.unread(node, "it runs between commands")
        self._launch(node, [literal("trap"), *words])

    def _time(self, node: Node, words: list[Text]) -> None:
        if any(pair(word)[0] or known(word) == "{" for word in words[:1]):
            self.unread(node, "a variable that is set behind time is not read")
        self.call(node, words)

    def _shopt(self, node: Node, words: list[Text]) -> None:
        """Keep options, as `lastpipe`, and tell of those that change what words mean."""
        options = set(map(known, words))
        if options & {"-s", "-u"}:
            self.variables |= {f"-O {option}": EXPORTED if "-s" in options else () for option in options}
        if "-s" in options and options & CHANGES_WORDS:
            Builtins.unread(self, node, "which words and patterns fit from here on is not known")

    def _cd(self, node: Node, words: list[Text]) -> None:
        """Keep the folder, in which the files that are sourced are looked for first, and the one before."""
        to, before = words[-1] if words else hole("cd"), self._folder()
        there = (*(() if shown(to).startswith("/") else before), *to, Piece("/"))
        self.variables[FOLDER] = self.variables.get(LEFT, hole("-")) if shown(to) == "-" else there
        self.variables[LEFT] = before

    def _pushd(self, node: Node, words: list[Text]) -> None:
        """`cd` that keeps the folder before, to which `popd` goes back."""
        self.variables[PUSHED] = [*as_words(self.variables.get(PUSHED, ())), self._folder()]
        self._cd(node, words)

    def _popd(self, node: Node, words: list[Text]) -> None:
        *kept, last = as_words(self.variables.get(PUSHED, ())) or [hole("popd")]
        self.variables |= {PUSHED: kept, LEFT: self._folder(), FOLDER: last}

    def _eval(self, node: Node, words: list[Text]) -> None:
        self.evaluate(spaced(words), shares=True)
        if known(spaced(words)) is None and not OF_A_SHELL.fullmatch(shown(spaced(words))):
            self.unread(node, "its text is not known")

    def evaluate(self, text: Text, shares: bool = False) -> None:
        """Read a text as a script, a variable for each unknown part. With `shares` the script keeps what it sets."""
        with self.now(variables=self.variables if shares else dict(self.variables)):
            script = "".join(map(self._evaluated, self.reading.paid(text)))
            self._within(self.positional, len(self.texts), lambda: self.run_text(script), shares)

    def _evaluated(self, piece: Piece) -> str:
        """A part of a text that is evaluated; words that a branch adds stay words, and blanks part words for sure."""
        if piece.text is not None and not (piece.branch and piece.text.strip()):
            return piece.text
        are_words = piece.text is not None and PLAIN_WORDS.fullmatch(piece.text)
        script = ""
        for word in (piece.text or "").split() if are_words else [piece.text]:
            name = f"unknown_{len(self.variables)}"
            self.variables[name] = (replace(piece, text=word, span=None),)
            script += f"{' ' if are_words else ''}${{{name}}}"
        return script


OF_BASH = ("source", "eval", "exec", "exit", "return", "trap", "cd", "pushd", "popd", "set", "shift", "shopt")
COMMANDS: dict[str, Callable[[Commands, Node, list[Text]], None]] = {
    **{name: getattr(Commands, f"_{name}") for name in OF_BASH},
    ".": Commands._source,
    "time": Commands._time,
    **dict.fromkeys(ENDS_ROUND, Commands._end_round),
    **dict.fromkeys(FILLS, Commands._fill),
    **dict.fromkeys(("command", "builtin"), Commands._past_functions),
}


def is_unknown(word: Text) -> bool:
    """Whether nothing of a word is known."""
    return bool(word) and all(piece.text is None for piece in word)


def shell_of(words: Sequence[Text], switch: str) -> tuple[int, int]:
    """The places of a shell and of the text behind its switch, as in `bash -c TEXT`; the number of words for none."""
    texts = [word_of(word).text for word in words]
    at = next((i for i, text in enumerate(texts) if text.rpartition("/")[2] in SHELLS), len(texts))
    is_entry = any("--entrypoint" in text for text in texts[: at + 1])  # of Docker, whose image stands behind it
    pairs = enumerate(pairwise(texts[at:]), at + 2)
    ends = ("o", "O", "--rcfile", "--init-file")  # of options that take the next word
    own = takewhile(lambda pair: is_entry or pair[1][1][:1] in ("-", "+", HOLE) or pair[1][0].endswith(ends), pairs)
    return at, next((i for i, (_, text) in own if re.fullmatch(f"-[A-Za-z]*{switch}", text)), len(texts))


def fed(words: Sequence[Text], count: int) -> list[Text]:
    """The words of a command with a part that is not known wherever `xargs`, `parallel` or `find` puts what it reads.

    One of the first `count` words may be such a program.
    """
    before = [word_of(word).text for word in words[:count]]
    programs = [word.rpartition("/")[2] for word in before]
    readers = [hole(f"what {name} reads") for name in programs if name in READS]
    if not readers and "find" not in programs:
        return [*words]
    named = re.findall(r" (?:-I ?|--replace=)(\S+)", " ".join(before))
    mark = re.escape(named[-1]) if named else r"(?<!\$)\{[^{}\s]*\}"
    own = takewhile(lambda word: readers or known(word) not in (";", "+"), words)
    whole = ((replace(word[0], text=known(word)),) if known(word) else word for word in own)
    return [*(tuple(part for piece in word for part in _marked(piece, mark)) for word in whole), *readers]


def _marked(piece: Piece, mark: str) -> Text:
    """A part of a word, with a part that is not known wherever the mark stands."""
    cut = [replace(piece, text=part, span=None) for part in re.split(f"({mark})", piece.text or "")]
    parts = (hole(part.text or "", piece.lines)[0] if place % 2 else part for place, part in enumerate(cut))
    return tuple(parts) if cut[1:] else (piece,)

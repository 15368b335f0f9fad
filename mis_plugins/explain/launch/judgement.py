"""What one start of train.py would load of this pack, what it lacks, and what cannot be told from the script."""

import ast
import base64
import itertools
import os.path
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mis_plugins.config.file import INLINE, keys_of
from mis_plugins.config.loading import file_of, read_keys
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import is_read
from mis_plugins.config.view import BACKENDS
from mis_plugins.errors import UserError
from mis_plugins.explain.launch.reader import PACKAGES, Launch, Reading, from_start
from mis_plugins.explain.launch.words import HOLE, Word, flags_of, known
from mis_plugins.explain.words import flags as flags_for
from mis_plugins.hosts.arguments import NEWER, Kind, kinds, near, recorded
from mis_plugins.hosts.arguments import flags as recorded_flags
from mis_plugins.hosts.checkout import Folder
from mis_plugins.hosts.checks import REPLAY
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.ownership import OURS

CONFIG, TIS, LOSS = "--custom-config-path", "--custom-tis-function-path", "--custom-loss-function-path"
SWITCHES = {"--use-tis": "use_tis", "--get-mismatch-metrics": "get_mismatch_metrics"}
LOSS_TYPE, BACKEND = "--loss-type", "--train-backend"
DECIDES = {*SWITCHES, CONFIG, TIS, LOSS, LOSS_TYPE, BACKEND}
ANY = "Miles, slime or vime"
PACK = Path(__file__).parents[3]
OUR_LOSS = "mis_plugins.mis.policy_loss"
HOSTS_OWN = "train_infer_mismatch_helper"
ABOVE = 6  # folders above a script in which a file of its host is looked for
NEVER = (
    "never: neither --use-tis nor --get-mismatch-metrics is set, by a flag or in a config file; the host calls no "
    "correction hook, nothing is corrected, and its log has no mis_ metric"
)


@dataclass(frozen=True)
class Flag:
    """A flag of the command with its last value."""

    word: Word
    value: Word | None = None

    def says(self, text: str) -> bool:
        return self.value is not None and self.value.text == text


ABSENT = Flag(Word("", ""))
BY_DEFAULT = Flag(Word("", ""), Word("megatron", "megatron, by default"))


@dataclass(frozen=True)
class Given:
    """The config file that a command names.

    source: its path as the script says it; None where no flag names one.
    keys: its top-level keys; None where it could not be read.
    problem: why it could not be read.
    missing: whether there is no such file.
    """

    source: str | None = None
    keys: Mapping[str, Any] | None = None
    problem: str | None = None
    missing: bool = False


@dataclass(frozen=True)
class Want:
    """A flag that has to be there: its value, the word that it replaces, and why."""

    flag: str
    value: str | None
    instead: Word | None
    why: str


@dataclass
class Judgement:
    """What was found of one start of train.py.

    lines: sentences for the user.
    wants: flags that have to change.
    unsure: what cannot be told from the script, where it decides what loads.
    is_apart: whether it trains by another loss than a policy's, as a start of SFT does, and asks for no correction.
    """

    host: Host | None
    lines: list[str] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    keys: Mapping[str, Any] | None = None
    source: str | None = None
    is_apart: bool = False


def judge(launch: Launch, reading: Reading, path: Path, asked: Host | None, preset: str | None) -> Judgement:
    """Judge one start of train.py; raises ConfigError of a config that the hooks would refuse.

    Without `asked` the script tells the host. Without `preset` its own config corrects, or `tis` if it has none.
    """
    own_flags = _flags(launch.words)
    other = _other_trainer(asked, own_flags)
    host = _host(launch, own_flags) if asked is None or other and BACKEND in own_flags else asked
    given = _config(own_flags.get(CONFIG), reading, path, launch.folder)
    flags = _with_keys(own_flags, given.keys or {})
    where = f"(line {launch.line})" if launch.line else "(in a file that the script sources, or a text that it runs)"
    only = f", only if this holds: {launch.branch}" if launch.branch else ""
    unread = list(_unread(launch, host))
    never = f"{NEVER}{'; what is not read may say otherwise' if unread else ''}"
    lines = [
        f"starts: train.py of {host.title if host else ANY} {where}{only}",
        *([f"warning: --host {asked.name}: the script trains with {other.source}"] if asked and other else []),
        *_loads(flags),
        f"config: {_said(given, flags)}",
        f"called: {_called(flags, given.keys or {}) or never}",
        *_unknown_flags(own_flags, host),
        *unread,
    ]
    unsure = [*_unsure(launch, flags, host), *([] if preset else _unsure_config(given))]
    judgement = Judgement(host, lines, unsure=unsure)
    is_asked = flags.keys() & {*SWITCHES, TIS, CONFIG}
    judgement.is_apart = len(judgement.unsure) == 1 and _other_loss(flags) is not None and not is_asked
    if not judgement.unsure:
        _want(judgement, own_flags, given, preset)
    return judgement


def _other_trainer(asked: Host | None, flags: Mapping[str, Flag]) -> Word | None:
    """What the script trains with, where that is no trainer of the host of Miles that the user names."""
    trainer = flags.get(BACKEND, BY_DEFAULT).value
    if asked is None or asked.package != "miles" or trainer is None or not trainer.is_known:
        return None
    return None if trainer.text == (asked.name if asked.name in BACKENDS else "megatron") else trainer


def _with_keys(flags: Mapping[str, Flag], keys: Mapping[str, Any]) -> dict[str, Flag]:
    """The flags with what the config file says in place of some: the host sets its keys last."""
    merged = dict(flags)
    for key, value in keys.items():
        name = f"--{key.replace('_', '-')}"
        if name in DECIDES - {CONFIG, *SWITCHES} or name.endswith("-path") and name != CONFIG:
            word = Word(str(value), str(value), in_config=True)
            merged[name] = Flag(word, word) if value else ABSENT
    return {name: flag for name, flag in merged.items() if flag is not ABSENT}


def _unsure_config(given: Given) -> Iterator[str]:
    """Why the script's own config cannot be judged."""
    if given.source is not None and given.keys is None and not given.missing:
        yield f"config: {given.problem}"
    elif given.keys is not None and not any(is_read(key, value) for key, value in given.keys.items()):
        yield (
            f"config: {given.source} says nothing of a correction; write the key mis: into it, which "
            "`python -m mis_plugins config show tis` prints"
        )


def arguments(launch: Launch, host: Host) -> dict[str, Any]:
    """The command's flags as the host's parser names them, with values of its types; of others nothing."""
    taken = kinds(host)
    values: dict[str, Any] = {}
    for name, flag in _flags(launch.words).items():
        key = name.removeprefix("--").replace("-", "_")
        if taken.get(key) == "switch":
            values[key] = True
        elif key in taken and flag.value is not None and flag.value.is_known:
            values[key] = _number(flag.value.text) if taken[key] == "number" else flag.value.text
    if values.get(REPLAY):
        values["use_routing_replay"] = True  # the host derives it from a flag, as it cannot from a file
    return values


def _number(text: str) -> float | int | str:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        return text


def _flags(words: Sequence[Word]) -> dict[str, Flag]:
    """The last of each flag; argparse takes nothing behind `--` for one."""
    count = next((i for i, word in enumerate(words) if word.text == "--"), len(words))
    return {name: Flag(word, value) for name, word, value in flags_of(words[:count])}


def _host(launch: Launch, flags: Mapping[str, Flag]) -> Host | None:
    """The host whose folder or package the script names, else the one that alone has all flags that any host has."""
    hosts = recorded()
    for backend in BACKENDS:
        if flags.get(BACKEND, ABSENT).says(backend):
            return hosts[backend]
    if len(launch.hosts) == 1:
        return hosts[next(iter(launch.hosts))]
    theirs = {name: _taken(hosts[name]) for name in PACKAGES}
    given = flags.keys() & set().union(*theirs.values())
    only = [name for name in theirs if given <= theirs[name]]
    return hosts[only[0]] if len(only) == 1 else None


def _unsure(launch: Launch, flags: Mapping[str, Flag], host: Host | None) -> Iterator[str]:
    for word in launch.words:
        if not word.is_known and any(flag in word.source for flag in DECIDES):
            yield f"({word.place}): one of {word.source}"
    decides = DECIDES if host and host.name in BACKENDS else {BACKEND}
    for name, flag in flags.items():  # argparse completes a flag but where Megatron parses
        for whole in sorted(decides - {name}):
            if len(name) > 2 and whole.startswith(name) and name not in _taken(host):
                yield f"{name} ({flag.word.place}): Miles may take it for {whole}; write it out"
        if name in SWITCHES and (value := flag.value) is not None and value.is_known:
            yield f"{name} ({flag.word.place}): takes no value, and the host's parser refuses {value.source!r}; drop it"
    loss = _other_loss(flags)
    if loss is not None:
        yield (
            f"{loss} runs in place of the host's policy loss, which alone calls the TIS hook; whether that loss "
            "corrects is its own matter"
        )
    for name, flag in flags.items():
        unsure = [word for word in (flag.word, flag.value) if word is not None and word.branch]
        if name in DECIDES and unsure:
            yield f"{name} ({unsure[0].place}): there only if this holds: {unsure[0].branch}"
        value = flag.value
        if name in DECIDES - {CONFIG} and value is not None and not value.is_known and name not in SWITCHES:
            yield f"{name} ({flag.word.place}): only running the script would tell its value, {value.source}"


def _taken(host: Host | None, kind: Kind | None = None) -> set[str]:
    """The flags of a host, or of every host, where their parsers were recorded; of one kind alone, as switches."""
    hosts = [host] if host else recorded().values()
    return {flag for each in hosts for record in each.records for flag in recorded_flags(record, kind)}


def _loads(flags: Mapping[str, Flag]) -> Iterator[str]:
    """Each function of this pack, of the host's example or of the user that the command loads for a correction."""
    for name, flag in flags.items():
        if flag.value is None or not name.endswith("-path"):
            continue
        value = flag.value.source
        if value.startswith(OURS):
            whose = "a hook of this pack" if _is_held(value) else "mis-plugins has no such function"
            whose = whose if flag.value.is_known else "only running the script would tell which"
            yield f"loads: {name} {value} ({flag.value.place}): {whose}"
        elif name in (TIS, LOSS):
            whose = "the host's own example" if HOSTS_OWN in value else "no hook of this pack"
            yield f"loads: {name} {value} ({flag.value.place}): {whose}"
    if TIS not in flags and "--use-tis" in flags and not _loss(flags) and not _other_loss(flags):
        yield "loads: the host's own truncated weights: --use-tis without --custom-tis-function-path"


def _is_held(path: str) -> bool:
    """Whether this pack has the function of a dotted path, by the source of its module."""
    owner, _, name = path.rpartition(".")
    module = Folder(PACK).module(owner)
    names = {} if module is None else module.names
    lazy = names.get("ELSEWHERE")  # of mis.py: hooks that lie in another file
    return name in names or (isinstance(lazy, ast.Assign) and name in ast.literal_eval(lazy.value))


def _config(flag: Flag | None, reading: Reading, path: Path, folder: str) -> Given:
    if flag is None:
        return Given()
    word = flag.value
    if word is None:
        return Given("", None, f"{CONFIG} ({flag.word.place}): no file behind it", True)
    if (written := reading.files.get(from_start(folder, word.source))) is not None:
        text = known(written)
        if text is None:
            return Given(word.source, None, f"{word.source}: the script writes it, with parts that are not known")
        return _read(word.source, f"{INLINE}{base64.b64encode(text.encode()).decode()}")
    if not word.is_known:
        return Given(word.source, None, f"not known: {word.source} ({word.place})")
    if word.text.startswith(INLINE):
        return _read("FILE", word.text)
    there = os.path.normpath(os.path.join(os.path.expanduser(folder), word.text))  # as `cd ..` goes up in a name
    file = Path(there) if os.path.isfile(there) else _located(word.text, path)
    if folder and file is not None and file != Path(there):
        why = f"{word.text}: the script changes to {folder}, where it is not; {file} may be another"
        return Given(word.text, None, why)
    if file is None and not reading.handed.isdisjoint((word.text, os.path.basename(word.text))):
        return Given(word.text, None, f"{word.text}: not here, and something that the script calls may write it")
    if file is None:
        return Given(word.text, None, f"{word.text}: no such file, here or in a folder above the script", True)
    return _read(str(file), file)


def _located(name: str, path: Path) -> Path | None:
    """The file as a job would find it: from here, or from a folder above the script, as its host's root is."""
    folders = [Path(), *path.absolute().parents[:ABOVE]]
    return next((folder / name for folder in folders if os.path.isfile(folder / name)), None)


def _read(source: str, file: Path | str) -> Given:
    try:
        return Given(source, keys_of(file))
    except (UserError, OSError, yaml.YAMLError) as error:
        return Given(source, None, f"{source}: {error}")


def _said(given: Given, flags: Mapping[str, Flag]) -> str:
    if given.source is None:
        return f"none: {CONFIG} is not given"
    if given.problem:
        return given.problem
    word = flags[CONFIG].value or flags[CONFIG].word
    return f"{'written in the script' if given.source == 'FILE' else given.source} ({word.place})"


def _called(flags: Mapping[str, Flag], keys: Mapping[str, Any]) -> str | None:
    """What makes the host call a correction hook, or None; keys of the file win over flags."""
    if _loss(flags) == OUR_LOSS:
        return f"in each step, by --loss-type custom_loss ({flags[LOSS].word.place})"
    if other := _other_loss(flags):
        return f"never, as far as the host goes: {other} runs in place of its policy loss"
    for flag, key in SWITCHES.items():
        if key in keys and keys[key]:
            return f"in each step, by {key}: true of the config"
        if key not in keys and flag in flags:
            return f"in each step, by {flag} ({flags[flag].word.place})"
    return None


def _loss(flags: Mapping[str, Flag]) -> str | None:
    """The loss that runs in place of the host's policy loss, which calls the TIS hook."""
    loss = flags.get(LOSS, ABSENT).value
    return loss.text if loss and flags.get(LOSS_TYPE, ABSENT).says("custom_loss") else None


def _other_loss(flags: Mapping[str, Flag]) -> str | None:
    """What names a loss that is neither the host's policy loss nor of this pack; None without one."""
    loss, kind = _loss(flags), flags.get(LOSS_TYPE, ABSENT).value
    if loss is not None:
        return None if loss.startswith(OURS) else f"{LOSS} {loss}"
    if kind is None or not kind.is_known or kind.text == "policy_loss":
        return None
    return f"{LOSS_TYPE} {kind.source} ({kind.place})"


def _unknown_flags(flags: Mapping[str, Flag], host: Host | None) -> Iterator[str]:
    """Flags that the host's recorded parsers do not know; without a host, flags that nearly spell one that decides."""
    taken = _taken(host)
    count = DECIDES | {name for name in taken if name.endswith("-path")}
    for name, flag in flags.items():
        is_open = not flag.word.is_known or name.startswith("--eval-sglang-") or len(name) < 3
        meant = "" if name in taken or is_open else near(name, count, 0.8)
        if meant or host and name not in taken and not is_open:
            why = meant or "; a function that the command loads may add it"
            title = host.title if host else ANY
            yield f"warning: {name} ({flag.word.place}): no flag of {title} where its parser was recorded{why}"


def _unread(launch: Launch, host: Host | None) -> Iterator[str]:
    """Parts of the command that may hold further flags."""
    switches = _taken(host, "switch") | recorded_flags(NEWER, "switch")
    for before, word in itertools.pairwise((ABSENT.word, *launch.words)):
        takes = before.text.startswith("--") and "=" not in before.text and before.text not in switches
        is_open = set(word.text) == {HOLE} or "--" in word.text and HOLE in word.text.partition("=")[0]
        if is_open and not takes:
            yield f"not read: ({word.place}): {word.source} may give more flags"
        if word.text == "--":
            yield f"not read: ({word.place}): the host takes nothing behind -- for a flag"


def _want(judgement: Judgement, flags: Mapping[str, Flag], given: Given, preset: str | None) -> None:
    """Compare the command with the flags that its config needs, or that of the preset."""
    name, flag = "tis" if preset is None else preset, flags.get(CONFIG, ABSENT)
    value = f"$(python -m mis_plugins config path {shlex.quote(name)})"
    judgement.keys, judgement.source = given.keys, given.source
    if preset is not None or judgement.keys is None:
        judgement.keys, judgement.source = keys_of(file_of(name)), value
    config = read_keys(judgement.keys)
    pairs = itertools.pairwise([*shlex.split(flags_for(config, judgement.host)), "--"])
    needed = {word: None if after.startswith("--") else after for word, after in pairs if word.startswith("--")}
    flags = _with_keys(flags, judgement.keys)
    if _loss(flags) == OUR_LOSS:
        needed = {name: value for name, value in needed.items() if name not in (TIS, *SWITCHES)}
    for want in _lacking(needed, flags, judgement.keys, config):
        key = want.flag[2:].replace("-", "_")
        if key not in judgement.keys or judgement.keys[key] is True:
            judgement.wants.append(want)
        else:
            judgement.unsure.append(f"{key} of {given.source} is set last, whatever {want.flag} says; drop the key")
    if judgement.source is value and not flag.says(str(file_of(name).absolute())):
        why = given.problem or (f"--preset {name}" if preset else "no config says how to correct")
        judgement.wants.append(Want(CONFIG, value, flag.value, why))
    judgement.unsure += _not_held(flags, {want.flag for want in judgement.wants})


def _not_held(flags: Mapping[str, Flag], changed: set[str]) -> Iterator[str]:
    """Flags that stay, and name a function of this pack that it lacks."""
    for name, flag in flags.items():
        path = flag.value.source if flag.value and flag.value.is_known and name not in changed else ""
        if path.startswith(OURS) and name.endswith("-path") and not _is_held(path):
            yield f"{name} ({flag.word.place}): mis-plugins has no function {path}"


def _lacking(
    needed: Mapping[str, str | None], flags: Mapping[str, Flag], keys: Mapping[str, Any], config: CorrectionConfig
) -> Iterator[Want]:
    for name, value in needed.items():
        flag = flags.get(name, ABSENT)
        if name == "--get-mismatch-metrics" and "--use-tis" in flags and not config.corrects:
            why = "the config corrects nothing, and --use-tis needs one that does"
            yield Want(name, None, flags["--use-tis"].word, why)
        elif name in SWITCHES:
            if not _called(flags, keys):
                yield Want(name, None, None, "without it the host never calls the hook")
        elif name not in flags:
            yield Want(name, value, None, "the config needs it")
        elif value is not None and not flag.says(value):
            source = flag.value.source if flag.value else "no value"
            yield Want(name, value, flag.value, f"the script says {source} there")

"""What a foreign config becomes, with the user's own words beside each setting."""

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from mis_plugins.config import reading, writing
from mis_plugins.config.file import StrictLoader, parsed
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError, cut, shown
from mis_plugins.explain.words import flags
from mis_plugins.shared.terminal import printable

COLUMNS = 100
LONGEST_VALUE = 80  # letters of a value within a comment
LONGEST_OPEN = 200  # letters of a value within an error
MOST_NAMES = 20  # within a sentence
OVER_RESPONSES = "averages each response and then all, as the hosts do without --calculate-per-token-loss"
OVER_TOKENS = "averages over all tokens, as the hosts do with --calculate-per-token-loss"
"""A foreign framework's way to average a loss, in the hosts' flags."""
BY_ENTROPY = (1.0, "keeps tokens of high entropy alone in the policy loss; nothing here does.")
NO_TRUNCATED = (False, "drops truncated responses from the loss; nothing here does.")
"""What masks the loss and nothing here reads: the framework's default, and what another value does."""
WIDTH = 0.2  # of PPO's clip, in every framework and in the hosts
NUMBER = re.compile(r"[-+]?(?!0\d)(\d[\d_]*)?\.?(\d[\d_]*)?(e[-+]?\d[\d_]*)?", re.IGNORECASE)
OF_YAML = re.compile(r"""[!&*|>]|[^'"\[{].*\s#""", re.DOTALL)  # a tag, an anchor, a block or a comment, to YAML alone
HELD = re.compile(r"""'[^']*'|"[^"]*"|\$\{[^}]*\}|\\.""")  # what hides a comma from Hydra
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")  # what a backslash takes for a letter in Hydra's text without quotes
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")  # of Hugging Face's parser


@dataclass(frozen=True)
class Translation:
    """A config under `mis:` and where each part of it comes from.

    given: the user's keys and values.
    mis: what they mean.
    sources: by the path of a setting (`weight.upper`, `reject[0]`), the framework's keys that decide it; a
        key that the user did not give has the framework's default.
    notes: what differs, what has no counterpart, what to pass beside the file.
    remarks: by the path of a setting, a comment in place of the one made from `sources`.
    """

    origin: str
    given: Mapping[str, Any]
    mis: Mapping[str, Any]
    sources: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> CorrectionConfig:
        """The config, checked; a ConfigError quotes the user's keys."""
        try:
            return reading.from_mapping(self.mis)
        except ConfigError as error:
            raise ConfigError(self._quoted(str(error))) from None

    def text(self) -> str:
        """The file: notes, then the settings, each with the user's own key and value."""
        notes = map(printable, self.notes)  # a line break within a value would end the comment
        wrapped = [textwrap.wrap(note, COLUMNS, break_on_hyphens=False) for note in notes]
        needs = f"needs: {flags(self.config())} --custom-config-path FILE, where FILE holds this text"
        header = [f"from {self.origin}", needs, *(line for note in wrapped for line in note)]
        stated = {key: f"{key}: {as_written(value)}" for key, value in self.given.items()}
        comments = {at: ", ".join(stated[key] for key in keys if key in stated) for at, keys in self.sources.items()}
        comments = {path: printable(comment) for path, comment in (comments | dict(self.remarks)).items()}
        return "\n".join([*(f"# {line}" for line in header), writing.to_yaml(self.mis, comments)])

    def _quoted(self, message: str) -> str:
        for path in sorted(self.sources, key=len, reverse=True):
            keys = [key for key in self.sources[path] if key in self.given]
            if keys:
                message = message.replace(f"mis.{path}", " / ".join(keys))
        return message


class Unquoted(str):
    """Text that YAML would read as an unintended number: `0.5_5` without quotes is 0.55."""


class Open(str):
    """A value that only the launch decides, as a script says it."""


class _Loader(StrictLoader):
    def number(self, node: yaml.ScalarNode) -> Any:
        if "_" in node.value:
            return Unquoted(node.value)
        construct = self.construct_yaml_int if node.tag.endswith("int") else self.construct_yaml_float
        return construct(node)


class _OfCommand(_Loader):
    """Reads a value of a command line: what is a number to YAML alone stays text."""

    def scalar(self, node: yaml.ScalarNode) -> Any:
        is_number = node.style is None and NUMBER.fullmatch(node.value)
        is_read = is_number and ("_" in node.value or not node.tag.endswith("str"))
        return self.number(node) if is_read else node.value


for kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{kind}", _Loader.number)
for kind in ("int", "float", "str"):
    _OfCommand.add_constructor(f"tag:yaml.org,2002:{kind}", _OfCommand.scalar)


def load(text: str, loader: type[StrictLoader] = _Loader) -> Any:
    """YAML, with numbers that hold an underscore as `Unquoted` text, and with texts as the keys of every mapping."""
    return _by_text(parsed(text, loader))


def of_command(text: str) -> Any:
    """A value of a command line, read as YAML; a number to YAML alone (010, 0x10) or a value with `#` stays text."""
    return text if OF_YAML.match(text) else load(text, _OfCommand)


def of_hydra(text: str) -> Any:
    """A value of Hydra's command line, `{key:value}` too."""
    text = text if text[:1] in ("'", '"') else ESCAPED.sub(r"\1", text)
    return of_command(text.replace(":", ": ") if text.startswith("{") else text)


def of_script(path: str, text: str, read: Callable[[str], Any] = of_hydra) -> Any:
    """The value of an override in a script; raises ConfigError for a comma with which Hydra sweeps over values."""
    if not text.startswith(("[", "{")) and "," in HELD.sub("", text):
        raise ConfigError(
            f"{path}={cut(text)}: Hydra refuses a comma that no quotes hold, and with --multirun starts a run for each "
            f"part; write \"{path}='{cut(text)}'\", or put one value behind the file"
        )
    return read(text)


def _by_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _by_text(inner) for key, inner in value.items()}
    return [_by_text(inner) for inner in value] if isinstance(value, list) else value


def places(tree: Any, keys: Collection[str], above: str = "") -> Iterator[str]:
    """Where keys stand in a yaml, at any depth, with a value other than null and false; or within a text of it."""
    if isinstance(tree, str) and (named := set(re.findall(r"\w+", re.sub(r"\$\{[^}]*\}", "", tree))) & set(keys)):
        yield f"{above.rstrip('.')} ({', '.join(sorted(named))})"
    for place, value in enumerate(tree if isinstance(tree, list) else ()):
        yield from places(value, keys, f"{above}{place}.")
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        inner = list(places(value, keys, f"{above}{key}."))
        yield from inner or ([f"{above}{key}"] if key in keys and _is_set(value) else ())


def _is_set(value: Any) -> bool:
    return any(map(_is_set, value.values())) if isinstance(value, Mapping) else value not in (None, False)


def as_written(value: Any) -> str:
    """A value as the user wrote it, or nearly; a long one by its beginning."""
    return cut(writing.flow(value), LONGEST_VALUE)


def listed(names: Sequence[object]) -> str:
    """Keys of the user in one sentence, of many keys the first."""
    first = ", ".join(map(str, names[:MOST_NAMES]))
    return first if len(names) <= MOST_NAMES else f"{first} and {len(names) - MOST_NAMES} more"


def is_open(value: Any) -> bool:
    """Whether only the launch decides a value: `Open`, or text with an interpolation."""
    return isinstance(value, Open) or isinstance(value, str) and "$" in value


def refuse_open(given: Mapping[str, Any], spelled: Mapping[str, str]) -> None:
    """Refuse values that only the launch decides, all at once; `spelled` has the keys that an override spells out."""
    left = {key: value for key, value in given.items() if is_open(value)}
    if left:
        left_open = listed([f"{key}: {cut(value, LONGEST_OPEN)}" for key, value in left.items()])
        asked = " ".join(f"{spelled.get(key, key)}=VALUE" for key in left)
        raise ConfigError(f"only the launch decides {left_open}; put the values behind the file, as {asked}")


def flag_of(name: str) -> str:
    """The key of a flag, whose words may be joined by dashes or by underscores."""
    return name.lstrip("-").replace("-", "_")


def whole(key: str, names: Iterable[str]) -> list[str]:
    """The names that a flag may be short for, as argparse takes it; two letters of one name alone, of one word."""
    may = [name for name in names if name.startswith(key)]
    return may if len(key) > 2 or len(key) == 2 and len(may) == 1 and "_" not in may[0] else []


def check_keys(
    package: str,
    keys: Iterable[str],
    read: Collection[str],
    own: Sequence[str],
    families: tuple[str, ...],
    free: Collection[str],
) -> None:
    """Refuse a key of a family that is not the package's own, and a flag short for another.

    A key of `free` may be short for another, and of a family where it shares no third word with a key of `own`.
    """
    for key in keys:
        is_near = key not in free or any(len({*key.split("_")} & {*name.split("_")}) > 2 for name in own)
        if key.startswith(families) and key not in own and is_near:
            raise ConfigError(f"{cut(key)}: no key of {package}'s; known are {', '.join(own)}")
        if (may := whole(key, read)) and key not in (*read, *free):
            raise ConfigError(f"{key}: short for {may[0]} where no other flag of the script begins so; write it out")


def settings_behind(
    words: Iterable[str],
    expected: str,
    reads: Callable[[str], bool],
    spelled: Callable[[str], str] = flag_of,
    value: Callable[[str], Any] = of_command,
    options: str = "option is --line N",
) -> Iterator[tuple[str, Any]]:
    """The path and the value of each setting behind a file.

    Args:
        expected, options: the settings and the options of the command, in the words of an error.
        reads: whether a path is read.
        spelled: the path that a setting's name means.
        value: reads the text behind `=`.

    Raises:
        ConfigError: a word is neither a setting nor an option of the command.
    """
    for word in words:
        name, equals, text = word.partition("=")
        path = spelled(name)
        if not equals or not reads(path):
            raise ConfigError(f"override {shown(word)}: expected {expected}; the command's own {options}")
        yield path, value(text)


def clip_flags(given: Mapping[str, Any], keys: Sequence[str], of_ratio: bool = False) -> Iterator[str]:
    """The hosts' flags for the widths of a clip that a file sets.

    Args:
        keys: the framework's for the lower width, the upper one, and the largest ratio of a negative advantage.
        of_ratio: CISPO, where the upper width is the largest ratio itself, and no ratio is too small.
    """
    if any(is_open(given.get(key)) for key in keys):
        return
    widths = {key: number(given[key], key) for key in keys if given.get(key) is not None}
    low = widths.get(keys[0], WIDTH)
    high = widths.get(keys[1], low)
    if of_ratio and keys[1] not in widths:
        yield f"{keys[1]} is not in it: CISPO then cuts every ratio at {keys[0]}, {high:g}; ScaleRL's paper has 5."
    if of_ratio and high < 1:
        yield f"No --eps-clip-high of the hosts caps ratios at {high:g}, below 1; put {keys[1]}=VALUE behind the file."
        return
    low, high = (1.0, high - 1) if of_ratio else (low, high)
    largest = widths.get(keys[2])
    delta = math.inf if of_ratio else widths.get("delta", math.inf)
    if delta < 1:
        yield f"delta: no flag of the hosts cuts ratios at {delta:g}, below 1; the loss of the hosts has no such bound."
        largest = None
    elif delta < 1 + high:
        high, largest = delta - 1, 1 + high  # delta bounds a ratio of a positive advantage, the clip of a negative
    dual = "" if largest is None else f" --eps-clip-c {largest:g}"
    if widths or of_ratio:
        yield f"{', '.join(widths) or keys[0]}: pass --eps-clip {low:g} --eps-clip-high {high:g}{dual}."


def beside(given: Mapping[str, Any], unserved: Mapping[str, tuple[Any, str]], clips: Sequence[str]) -> Iterator[str]:
    """Notes on keys that nothing here reads: their open values, and values other than the default."""
    for key in (*clips, *unserved):
        value = given.get(key)
        if is_open(value):
            yield f"{key}: {as_written(value)} is for the launch to decide; put {key}=VALUE behind the file."
        elif key in unserved and value is not None:
            default, why = unserved[key]
            read = {bool: truth, float: number}.get(type(default))
            means = read(value, key) if read else value
            if means != default:
                yield f"{key}: {as_written(means)} {why}"


def truth(value: Any, key: str) -> bool:
    """Truth value of a text, as the parser of TRL and ms-swift reads it."""
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise ConfigError(f"{key}: got {shown(value)}; expected true or false")
    return text in TRUE


def choice(value: Any, key: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{key}: got {shown(value)}; choose one of {', '.join(choices)}")
    return value

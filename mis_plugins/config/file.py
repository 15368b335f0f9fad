"""A file for --custom-config-path, read as a host reads it, and refused where the host would swallow what it says.

A host calls `yaml.safe_load` and makes an argument of every top-level key. Where a key stands twice, the last
one wins. A rule that stands beside `mis:`, and not under it, becomes an argument that nobody reads.
"""

import base64
import dataclasses
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import LARGEST_FILE, stamp
from mis_plugins.errors import ConfigError, MisError, cut, shown

STDIN = "-"
DEEPEST = 64  # levels of mappings and lists in one another
LARGEST_TREE = 2**18  # values and their letters, counted at every place where an alias puts them
LONGEST_KEY = 200  # letters
LONGEST_PROBLEM = 200  # letters of what a parser says
TOO_DEEP = f"nested more than {DEEPEST} levels deep, which no config is"
MERGE = "tag:yaml.org,2002:merge"  # the tag of `<<`, a key that may stand twice
SWITCHES = ("use_tis", "get_mismatch_metrics")  # the host's own flags
OURS = {field.name for field in dataclasses.fields(CorrectionConfig)}
OUR_NUMBERS = re.compile("mis$|tis_|rs_")  # keys that hold numbers of ours
# Numbers that YAML 1.1 alone reads as numbers: 0.5_5, 1:30, 010.
REWRITTEN = re.compile(r"[-+]?(0[0-9]|[0-9.]*[_:])[-+0-9._:eE]*")


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a repeated key, and a value that does not exist, such as the date 2024-02-31.

    It is PyYAML's own parser, as the hosts': libyaml, ten times faster, takes tabs that PyYAML refuses.
    """

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.level += 1
        if self.level > DEEPEST + 1:  # a scalar stands one level below its mapping
            raise ConfigError(f"{_line(self.peek_event())}{TOO_DEEP}")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _extent(node, {}).size > LARGEST_TREE:
            raise ConfigError(f"aliases (*name) repeat more than {LARGEST_TREE} values and letters; write them out")
        if isinstance(node, yaml.MappingNode):
            self.flatten_mapping(node)  # what `<<` puts in is a key of the file too
            _check_numbers(node)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # a hexadecimal may have more digits than Python writes
            return value
        except MisError:
            raise
        except (ValueError, LookupError, AttributeError, OverflowError):  # none is an error of YAML's own
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise ConfigError(
                f"{_line(node)}{shown(node.value)} reads as YAML's {kind} and is none that "
                "exists; correct it, or quote it as text"
            ) from None


class Extent(NamedTuple):
    """How much a tree of YAML holds, counted at every place where an alias puts it."""

    size: int  # values and their letters
    depth: int  # levels of mappings and lists


def _extent(node: yaml.Node, extents: dict[int, Extent | None]) -> Extent:
    """The extent of a tree, root included; `extents` holds those that are known, and None while one is measured."""
    if isinstance(node, yaml.ScalarNode):
        return Extent(1 + len(node.value), 0)
    if id(node) in extents:
        if (extent := extents[id(node)]) is None:
            raise ConfigError(f"{_line(node)}an alias (*name) stands within its own value; write the value out")
        return extent
    extents[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    children = [_extent(child, extents) for child in _children(node)]
    depth = 1 + max((child.depth for child in children), default=0)
    if depth > DEEPEST:
        raise ConfigError(f"{_line(node)}{TOO_DEEP}")
    extents[id(node)] = extent = Extent(1 + sum(child.size for child in children), depth)
    return extent


def _line(place: Any) -> str:
    """Where a node or an event begins, as the beginning of an error."""
    return f"line {place.start_mark.line + 1}: "


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_keys(node: yaml.MappingNode) -> None:
    """Refuse a key that stands twice, before `<<` puts in keys that others may override."""
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if len(key.value) > LONGEST_KEY:
            raise ConfigError(f"{_line(key)}{shown(key.value)} is a longer key than any config has")
        if name in lines:
            raise ConfigError(f"{key.value}: in line {lines[name]} and again in line {line}; drop one of them")
        lines[name] = line


def _check_numbers(root: yaml.MappingNode) -> None:
    """Refuse a number of ours that YAML makes another one of: verl's pair 0.5_5 reads as 0.55."""
    ours = (value for key, value in root.value if OUR_NUMBERS.match(str(key.value)))
    for node in (scalar for value in ours for scalar in _scalars(value)):
        if node.tag.endswith((":int", ":float")) and REWRITTEN.fullmatch(node.value):
            reading = f"{shown(node.value)} reads as {yaml.safe_load(node.value)}"
            raise ConfigError(f"{_line(node)}{reading}; write the number plainly")


def _scalars(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    for child in _children(node):
        yield from _scalars(child)


def parsed(text: str, loader: type[StrictLoader] = StrictLoader) -> Any:
    """Parse YAML text into Python values.

    Raises:
        ConfigError: no YAML, a key twice, a value that does not exist, more nesting or aliases than any config has.
    """
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # the second for half a surrogate pair
        raise ConfigError(_no_yaml(error)) from None


def _no_yaml(error: Exception) -> str:
    """What the parser says in one line: its own text quotes the file at length."""
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{place}no YAML: {cut(problem, LONGEST_PROBLEM)}"


def keys_of(file: Path | str) -> dict[str, Any]:
    """The top-level keys of a config file.

    Raises:
        ConfigError: no mapping; a key that stands twice, or where nobody reads it; what `parsed` and `text_of` refuse.
        OSError: no such file.
    """
    keys = parsed(text_of(file))
    if not isinstance(keys, dict):
        content = "it is empty" if keys is None else f"got {shown(keys)}"
        raise ConfigError(f"{content}; expected a mapping with the key `mis:` or Miles's flat keys")
    for key, value in keys.items():
        if key in OURS:
            raise ConfigError(f"{key}: stands beside `mis:`, where no one reads it; indent it under `mis:`")
        if key in SWITCHES and not isinstance(value, bool):
            raise ConfigError(f"{key}: got {shown(value)}; expected true or false")
    return {str(key): value for key, value in keys.items()}


_GIVEN: dict[str, list[tuple[Any, dict[str, Any]]]] = {}  # versions of a file by its path, the newest first


def keys_given(path: str) -> list[dict[str, Any]]:
    """The keys of a file that a host was given, and of its earlier versions that this process has read.

    A host asks for each micro-batch: a file is read again only where it may have changed. A file that has become
    unreadable since keeps its earlier versions; where there are none, a ConfigError names the file and this node.
    """
    versions, stamped = _GIVEN.setdefault(path, []), stamp(path)
    if not versions or stamped not in (None, versions[0][0]):
        try:
            versions.insert(0, (stamped, keys_of(path)))
        except ConfigError as error:
            if not versions:
                raise ConfigError(f"{short(path)}: {error}") from error
        except OSError as error:
            if not versions:
                raise ConfigError(
                    f"node {socket.gethostname()} cannot read {short(path)} ({error}); give the whole path of a file "
                    "that every node has"
                ) from error
    return [keys for _, keys in versions]


def short(path: str) -> str:
    """A path in full, or the beginning of a file's content, which Miles passes in base64."""
    return f"{path[:40]}..." if path.startswith(INLINE) and len(path) > 40 else path


INLINE = "base64:"  # prefix of a path of Miles that holds the file's content itself


def text_of(file: Path | str) -> str:
    """Read a text file; `-` is the standard input, and a path `base64:...` of Miles holds the text itself.

    Raises:
        ConfigError: no base64, no UTF-8, or far more than a config.
        OSError: no such file.
    """
    content = _beginning(file)
    if len(content) > LARGEST_FILE:
        raise ConfigError(
            f"more than {LARGEST_FILE} bytes, which no config has; give the part that says how to correct"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8 ({error.reason}); save it as plain text") from None


def _beginning(file: Path | str) -> bytes:
    """Bytes of a file; reading stops one byte beyond the largest config."""
    if str(file).startswith(INLINE):
        try:
            return base64.b64decode(str(file).removeprefix(INLINE), validate=True)
        except ValueError as error:
            raise ConfigError(f"{INLINE} no base64 behind it ({error})") from None
    if str(file) == STDIN:
        return sys.stdin.buffer.read(LARGEST_FILE + 1)
    with open(file, "rb", opener=_opened) as stream:
        return stream.read(LARGEST_FILE + 1)


def _opened(path: str, flags: int) -> int:
    """Open a file; a pipe into which nobody writes is an empty file, and does not wait for a writer."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor

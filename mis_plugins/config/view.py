"""One read-only view of a host's arguments, whatever object the host hands to its hooks.

A host may hand a Namespace, a frozen pydantic model, a dataclass, an object with `__slots__` or a mapping. `vars` reads
the first alone: it finds nothing in a model whose arguments are extra fields.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from pathlib import Path, PurePath
from stat import S_ISREG
from types import NoneType, SimpleNamespace
from typing import Any, TypeVar

from mis_plugins.errors import ConfigError, InputError

Made = TypeVar("Made")
NAMESPACES = (Namespace, SimpleNamespace)
PLAIN = frozenset({str, int, float, bool, NoneType, list, tuple, set})
EXTRAS = "__pydantic_extra__"
HOOK = {"path", "config"}  # what a hook's argument holds where a host gives a hook its own config
LARGEST_FILE = 2**17  # bytes; the largest of verl's own files has 38,000, and 4 MB take PyYAML's own parser 50 s
CLOCK_STEP = 2_000_000_000  # ns; the coarsest clock by which a file system tells when a file was written
BACKENDS = ("fsdp", "torchtitan")  # Miles's beside Megatron, each a host of its own
FILES = ("custom_config_path", "config")  # arguments that name a file of keys; the second is that of BACKENDS


class MissingArgument(ConfigError, AttributeError):
    """A hook reads an argument that the host's arguments lack."""


class View(Mapping[str, Any]):
    """The arguments by name, as attributes and as items.

    An argument that holds a hook's path and its config reads as the path. The keys of the config read as arguments
    where no argument of that name has a value.

    Attributes of the host's object that are no arguments, such as properties, are reached as attributes alone.
    """

    __slots__ = ("_given", "_stated", "_hooks", "_configs", "_made", "_reached", "_held", "_nested", "_around")

    def __init__(self, given: Any, stated: Mapping[str, Any]) -> None:
        nested = tuple(name for name, value in stated.items() if type(value) not in PLAIN)
        hooks = tuple(name for name in nested if _is_hook(stated[name]))
        configs = tuple(_config(stated[name]) for name in hooks)
        values = _with_configs(stated, hooks, configs) if hooks else stated
        held = (given, values, hooks, configs, {}, {}, dict(stated), nested, _around(stated, nested))
        for name, value in zip(self.__slots__, held, strict=True):
            object.__setattr__(self, name, value)

    def __getitem__(self, name: str) -> Any:
        return self._stated[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stated)

    def __len__(self) -> int:
        return len(self._stated)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._stated:
            return self._stated[name]
        if not isinstance(self._given, Mapping) and hasattr(self._given, name):
            value = getattr(self._given, name)
            self._reached[name] = _inside(value)
            return value
        raise MissingArgument(f"{name}: missing in the host's arguments ({type(self._given).__name__}); add it")

    def __setattr__(self, name: str, *_: Any) -> None:
        raise AttributeError(f"{name}: the host's arguments are read, and never written")

    __delattr__ = __setattr__


LAST: list[View] = []  # the view of the arguments that a hook was handed last


def view(args: Any) -> View:
    """The arguments of a host as a read-only mapping; a view is returned as it is.

    An object that was read last, and says the same still, has the same view, with all that was made `once` of it. It
    raises InputError where no argument can be read.
    """
    if isinstance(args, View):
        return args
    stated = _stated(args)
    if not stated and type(args) not in NAMESPACES and not isinstance(args, Mapping):
        raise InputError(
            f"the host's arguments are a {type(args).__module__}.{type(args).__qualname__}, in which no argument can "
            "be read: neither attributes, fields, slots nor items; hand on a Namespace, a dataclass or a mapping"
        )
    for last in LAST:
        if last._given is args and _says_the_same(last, stated):
            return last
    LAST[:] = [made := View(args, stated)]
    return made


def _says_the_same(last: View, stated: Mapping[str, Any]) -> bool:
    """Whether each argument is the object that it was, and neither its content nor anything around it has changed."""
    held = last._held
    same = list(stated) == list(held) and all(map(is_, stated.values(), held.values()))
    if not same or _around(stated, last._nested) != last._around:
        return False
    return all(_inside(getattr(last._given, name, None)) == inside for name, inside in last._reached.items())


def _around(stated: Mapping[str, Any], nested: Iterable[str]) -> tuple[object, ...]:
    """What may change while the arguments are the same objects: mappings in them, files of keys, loaded modules."""
    inside = [_inside(stated[name]) for name in nested]
    return inside, [stamp(stated.get(name)) for name in FILES], len(sys.modules)


def _inside(value: Any) -> object:
    """A value by its content, so that two calls answer unequally where the value or something in it has changed.

    A mapping that holds itself, or that raises where a value is missing, counts as changed at every call.
    """
    try:
        if _is_hook(value):
            return repr((_path(value), plain(_config(value))))
        tells = type(value) in PLAIN or isinstance(value, Mapping) or hasattr(value, "__float__")
        return repr(plain(value)) if tells else value
    except Exception:
        return object()


def plain(value: Any) -> Any:
    """A value of a config in the types of YAML, whatever mapping or sequence a host has made of it."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def stamp(path: Any) -> tuple[object, ...] | None:
    """What changes with a file's content; None for a file that is gone, and for content in a path.

    Times of a file are steps of a clock, and two versions within one step may be of one size: of a file that has just
    been written the content counts too.
    """
    try:
        status = os.stat(path)
        just_written = time.time_ns() - status.st_mtime_ns < CLOCK_STEP
        is_config = S_ISREG(status.st_mode) and status.st_size <= LARGEST_FILE
        content = Path(path).read_bytes() if just_written and is_config else None
    except (OSError, ValueError, TypeError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, content


def once(args: View, make: Callable[[View], Made]) -> Made:
    """What a function makes of a view, made once for as long as the arguments say the same."""
    if make not in args._made:
        args._made[make] = make(args)
    return args._made[make]


def original(args: Any) -> Any:
    """The object that the host handed over, for a function of the host's own."""
    return args._given if isinstance(args, View) else args


def is_untyped(args: View) -> bool:
    """Whether the arguments may have names that no class declares."""
    return type(args._given) in NAMESPACES or isinstance(args._given, Mapping)


def kind(args: View) -> str:
    """What the host's arguments are, in words."""
    return f"{len(args)} arguments in a {type(args._given).__name__}"


def of_hooks(args: View) -> dict[str, Any]:
    """What the configs beside hooks' paths say."""
    return {name: value for config in args._configs for name, value in config.items()}


def contradicted(args: View) -> set[str]:
    """Names to which the configs of two hooks give two values."""
    last = of_hooks(args)
    return {name for config in args._configs for name, value in config.items() if value != last[name]}


def hooks_of(args: View) -> tuple[str, ...]:
    """Names of the arguments that hold a hook's path beside the hook's own config."""
    return args._hooks


def _stated(args: Any) -> Mapping[str, Any]:
    if type(args) in NAMESPACES:
        return vars(args)
    if isinstance(args, Mapping):
        return args
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(args).__mro__)
    names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
    held = {name: getattr(args, name) for name in names if name[:1] != "_" and hasattr(args, name)}
    extras = (getattr(args, EXTRAS) if hasattr(type(args), EXTRAS) else None) or {}
    shown = {name: value for name, value in getattr(args, "__dict__", {}).items() if name[:1] != "_"}
    return {**held, **shown, **extras}


def _is_hook(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() >= HOOK
    return isinstance(getattr(value, "path", None), str | PurePath) and hasattr(value, "config")


def _path(hook: Any) -> str:
    return str(hook["path"] if isinstance(hook, Mapping) else hook.path)


def _config(hook: Any) -> Mapping[str, Any]:
    config = hook["config"] if isinstance(hook, Mapping) else hook.config
    return {} if config is None else _stated(config)


def _with_configs(
    stated: Mapping[str, Any], hooks: tuple[str, ...], configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The arguments with the path of each hook in place of the hook's object, and the keys of its config."""
    values = dict(stated)
    for name, config in zip(hooks, configs, strict=True):
        values[name] = _path(stated[name])
        for key, value in config.items():
            if values.get(key) is None:
                values[key] = value
    return values

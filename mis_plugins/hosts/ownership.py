"""The class with which our hooks claim the keys of a config file, where a host's parser demands an owner of each.

A newer Miles reads the attribute `config_class` of each function of its arguments, and refuses a key that neither the
parser nor such a class has. Its commits are named in `hosts/records/newer.txt`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from mis_plugins.config import reading

R = TypeVar("R")

BASE = ("miles.utils.args.schema", "BaseConfig")  # what a `config_class` must inherit
NAME = "MisPluginsConfig"
KEYS = ("mis", "bitwise", *reading.FLAT_KEYS, *reading.AREAL_KEYS)  # `use_tis` and `tis_clip` are the host's own


class Hook(functools.partial[R]):
    """A function that a host loads by its dotted path, with the attribute that names the keys of ours.

    All hooks have one class: a parser that meets it a second time adds nothing, and hands its values to each.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        functools.update_wrapper(self, function)

    def __reduce__(self) -> str:  # type: ignore[override]
        return self.func.__qualname__  # pickled by its dotted path, as a function is

    @property
    def config_class(self) -> type | None:
        """The class of our keys; None where no parser is loaded that would ask."""
        base = getattr(sys.modules.get(BASE[0]), BASE[1], None)
        return None if base is None else _inheriting(base)


@functools.cache
def _inheriting(base: type) -> type:
    from pydantic import create_model  # a host with such a parser brings it

    fields: dict[str, Any] = dict.fromkeys(KEYS, (Any, None))
    return create_model(NAME, __base__=base, __module__=__name__, **fields)


def __getattr__(name: str) -> Any:
    """The class under its own name, with which a host pickles the values for its workers."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _inheriting(getattr(import_module(BASE[0]), BASE[1]))


def notice() -> str:
    """Say to whom the keys of a file belong."""
    return (
        "keys: Miles 31f1ca9 and slime 624b824 make an argument of every key; a newer Miles asks who owns a key, and "
        "any hook of ours on its command line owns mis, bitwise and the flat keys"
    )

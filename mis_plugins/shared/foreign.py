"""Read files of `torch.save` that others wrote, which may name any class: nothing that a file names is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mis_plugins.shared.archive import Archive, Stored
from mis_plugins.shared.budget import DEPTH, VALUES, RecordError
from mis_plugins.shared.opened import read
from mis_plugins.shared.restricted import Opaque, Restricted


def load_foreign(path: Path, strict: bool = False) -> Any:
    """Load a file of `torch.save` without importing or calling anything that it names. Tensors stay `Stored`.

    Args:
        strict: refuse a file that names a class that is not known.

    Raises:
        RecordError: the file is damaged, or no archive of torch 1.6 or later, or asks for more than its budget.
    """

    def load() -> Any:
        archive = Archive(path)
        tree = Restricted(archive, archive.read("data.pkl"), strict).load()
        values, _ = extent(tree, {})
        VALUES.check(values, archive.opened.size, path)
        return tree

    return read(path, load)


CONTAINERS = {dict, list, tuple, str, bytes, Tensor, Stored, Opaque}


def extent(value: Any, extents: dict[int, tuple[int, int]], level: int = 0) -> tuple[int, int]:
    """Number of values in a tree, and its depth. What stands at several places counts at each of them.

    Args:
        extents: extents by the identity of an object; (-1, 0) while it is being measured.

    Raises:
        RecordError: the tree holds itself, or is nested too deep.
    """
    if isinstance(value, Stored | Tensor):
        return value.numel if isinstance(value, Stored) else value.numel(), 0
    if isinstance(value, str | bytes):
        return 1 + len(value) // 16, 0
    if id(value) in extents:
        values, depth = extents[id(value)]
        if values < 0:
            raise RecordError("holds a list or dict that holds itself")
        DEPTH.check(level + depth, 0, "the pickle")
        return extents[id(value)]
    DEPTH.check(level, 0, "the pickle")
    extents[id(value)] = (-1, 0)
    children = _children(value)
    below = [extent(child, extents, level + 1) for child in children if type(child) in CONTAINERS]
    measured = (1 + len(children) + sum(size for size, _ in below), 1 + max((deep for _, deep in below), default=0))
    extents[id(value)] = measured
    return measured


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [value.arguments, value.state] if isinstance(value, Opaque) else [*value]


def tensor_of(value: Any) -> Any:
    """The tensor of a `Stored`, and any other value itself."""
    return value.read() if isinstance(value, Stored) else value


def load_pt(path: Path) -> Any:
    """Load a file of `torch.save` that holds tensors, numbers, texts, lists, dicts and arrays of numpy alone."""
    return _with_tensors(load_foreign(path, strict=True))


def _with_tensors(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_with_tensors, value))
    if type(value) is dict:
        return {key: _with_tensors(item) for key, item in value.items()}
    return tensor_of(value)

"""Change modules of a host as they are imported, and serve modules that are missing; nothing on disk changes.

Each Python process of the host runs `install` before its own first line. A process that never imports a
changed module pays one dictionary look-up for each import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def install() -> None:
    """Have every later import of this process pass through the bends."""
    from lab.in_host.bends import BENDS

    changes: dict[str, list[Change]] = {}
    for bend in BENDS:
        changes.setdefault(bend.module, []).append(bend.change)
    missing = {name: bend.stand_ins for bend in BENDS for name in bend.serves}
    sys.meta_path.insert(0, _Changing(changes))
    sys.meta_path.append(_Missing(missing))


class _Changing(importlib.abc.MetaPathFinder):
    """Finds the modules that a bend names where they really are, and changes each once its own code has run."""

    def __init__(self, changes: Mapping[str, Sequence[Change]]):
        self._changes = dict(changes)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self._changes:
            return None
        changes = self._changes.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves modules that no earlier finder knows, with names that nothing calls on a CPU."""

    def __init__(self, served: Mapping[str, Sequence[str]]):
        self._served = served

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self._served:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name in self._served[module.__name__]:
            setattr(module, name, type(name, (), {}))

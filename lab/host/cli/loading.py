"""Hooks by their dotted path, as the hosts load them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mis_plugins.errors import ConfigError


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The function at `package.module.name`.

    Raises:
        ConfigError: it cannot be imported; the message quotes `flag`.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot load {path!r} ({error}); give package.module.function") from error

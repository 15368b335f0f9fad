"""Find the results that an experiment need not measure again: made by equal code from equal settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mis_plugins.local.report import write_json

STAMP = "made_of.json"


def made_of(folder: Path, settings: Mapping[str, Any], code: str | None) -> bool:
    """Whether a folder is complete, and of these settings and this code; never of code without a name."""
    path = folder / STAMP
    return code is not None and path.is_file() and json.loads(path.read_text()) == _stamp(settings, code)


def stamp(folder: Path, settings: Mapping[str, Any], code: str | None) -> None:
    """Say what a complete folder is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STAMP, _stamp(settings, code))


def unstamp(folder: Path) -> None:
    """Remove the stamp of a folder before it is made anew: an interrupt must not leave an old stamp on a new part."""
    (folder / STAMP).unlink(missing_ok=True)


def _stamp(settings: Mapping[str, Any], code: str | None) -> dict[str, Any]:
    return json.loads(json.dumps({"settings": settings, "code": code}))

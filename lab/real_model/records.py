"""Records of units: a json each, taken over where its settings are the same, refused where they are others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mis_plugins.errors import UserError

Record = Mapping[str, Any]


def path_of(runs: Path, arm: str, seed: int) -> Path:
    return runs / f"{arm}-seed{seed}.json"


def finished(path: Path, settings: Mapping[str, Any]) -> Record | None:
    """The record of a finished unit; None where there is none.

    Raises:
        UserError: the record is of other settings.
    """
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    there, here = record["settings"], json.loads(json.dumps(settings))
    if other := sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key)):
        told = "; ".join(f"{key}: {there.get(key)} there, {here.get(key)} here" for key in other)
        raise UserError(
            f"--runs {path.parent}: {path.name} is a record of other settings ({told}); "
            "remove the file, or name another folder"
        )
    return record

"""Records of units: a record is taken over where its settings are the same, and refused where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mis_plugins.errors import UserError

Record = Mapping[str, Any]


def name_of(arm: str, seed: int) -> str:
    return f"{arm}-seed{seed}"


def finished(there: Mapping[str, Record], name: str, settings: Mapping[str, Any]) -> Record | None:
    """Take a finished unit's record from the records that are there; None where the unit has none.

    Raises:
        UserError: the record is of other settings.
    """
    record = there.get(name)
    if record is None:
        return None
    made, here = record["settings"], json.loads(json.dumps(settings))
    if other := sorted(key for key in made.keys() | here.keys() if made.get(key) != here.get(key)):
        told = "; ".join(f"{key}: {made.get(key)} there, {here.get(key)} here" for key in other)
        raise UserError(
            f"--runs: {name} has a record of other settings ({told}); remove {name}.json, or name another folder"
        )
    return record

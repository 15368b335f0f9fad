"""What `verify` lets a user choose, and whether a model can be verified, without torch: refused in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from true_on_policy.contract.families import covered, proven, tiny_models
from true_on_policy.errors import ModelError

BackendName = Literal["native", "tile"]
DtypeName = Literal["fp32", "bf16"]
Side = Literal["engine", "trainer"]


def check_model(name: str) -> None:
    """See that `--model` names a tiny model, or a folder with a checkpoint of a family that is proven.

    Raises:
        ModelError: it does not.
    """
    if name in tiny_models():
        return
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise ModelError(
            f"--model: got {name!r}; choose one of {', '.join(tiny_models())}, or a folder of a checkpoint"
        )
    family = _family(folder / "config.json")
    if family not in proven():
        raise ModelError(f"--model {name}: {family}; the contract covers {covered()} alone")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"--model {name}: no *.safetensors there")


def _family(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--model: {file}: no model_type can be read: {error!r}") from error

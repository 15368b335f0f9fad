"""What `verify` lets a user choose, and whether a model can be verified, without torch: refused in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from true_on_policy.errors import ModelError

BackendName = Literal["native", "tile"]
DtypeName = Literal["fp32", "bf16"]
Side = Literal["engine", "trainer"]

TINY_NAMES = ("tiny-qwen3", "tiny-qwen3-tied")
FAMILY = "qwen3"


def check_model(name: str) -> None:
    """See that `--model` names a tiny model, or a folder with a Qwen3 checkpoint.

    Raises:
        ModelError: it does not.
    """
    if name in TINY_NAMES:
        return
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise ModelError(
            f"--model: got {name!r}; choose one of {', '.join(TINY_NAMES)}, or a folder of a checkpoint"
        )
    family = _family(folder / "config.json")
    if family != FAMILY:
        raise ModelError(f"--model {name}: {family}; the contract covers dense Qwen3 alone")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"--model {name}: no *.safetensors there")


def _family(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--model: {file}: no model_type can be read: {error!r}") from error

"""The choices of `verify` and its checks of a model, without torch, so that a refusal is immediate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from true_on_policy.contract.families import covered, proven, tiny_models
from true_on_policy.contract.model_config import departure, text_of
from true_on_policy.contract.pretrained import PRETRAINED
from true_on_policy.errors import ModelError

BackendName = Literal["native"]
DtypeName = Literal["fp32", "bf16"]
Side = Literal["engine", "trainer"]


def check_model(name: str) -> None:
    """Check that `--model` names a tiny or pretrained model, or a checkpoint's folder of a proven family.

    Raises:
        ModelError: the name is none of the three, or the folder lacks a readable config.json or weights.
    """
    if name in tiny_models() or name in PRETRAINED:
        return
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise ModelError(
            f"--model: got {name!r}; choose one of {', '.join((*tiny_models(), *PRETRAINED))}, or a checkpoint's folder"
        )
    check_config(f"--model {name}", _stated(folder / "config.json"))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"--model {name}: no *.safetensors there")


def check_config(where: str, stated: Mapping[str, Any]) -> None:
    """Check that a config.json describes a model of a proven family, and nothing beyond the family's record.

    Raises:
        ModelError: the family is not proven, or a field of the config departs from the family.
    """
    if stated["model_type"] not in proven():
        sees = " is a vision-language model of no proven family" if "vision_config" in stated else ""
        raise ModelError(f"{where}: {stated['model_type']}{sees}; the contract covers {covered()} alone")
    family, _ = proven()[stated["model_type"]]
    if refusal := departure(family, text_of(stated)):
        raise ModelError(f"{where}: {refusal}")


def _stated(file: Path) -> dict[str, Any]:
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        return stated | {"model_type": str(stated["model_type"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"--model: {file}: no model_type can be read: {error!r}") from error

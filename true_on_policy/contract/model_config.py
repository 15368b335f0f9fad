"""Read family and sizes of a model from the config of its Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from true_on_policy.contract.gpu import FAMILIES, NOT_COVERED, Family, Size
from true_on_policy.errors import ContractError


def checkpoint_family(config: Path) -> tuple[Family, Size]:
    """Return family and sizes of a Hugging Face checkpoint, from its config.json.

    Raises:
        ContractError: the file cannot be read, or no contract covers the model that it states.
    """
    stated = _stated(config)
    architectures = stated.get("architectures") or ()
    known = [family for family in FAMILIES.values() if set(family.architectures) & set(architectures)]
    if not known:
        moe = any("Moe" in name for name in architectures)
        covered = ", ".join(name for family in FAMILIES.values() for name in family.architectures)
        why = f"MoE: {'; '.join(NOT_COVERED['MoE'])}" if moe else f"covered are {covered}"
        raise ContractError(
            f"{config}: {', '.join(architectures) or 'no architecture'} is not covered; {why}"
        )
    text = stated.get("text_config", stated)
    if _rope(text) != "default":
        raise ContractError(
            f"{config}: rope of type {_rope(text)!r} is not covered: {NOT_COVERED['scaled rope'][0]}"
        )
    try:
        return known[0], stated_size(text)
    except KeyError as error:
        raise ContractError(f"{config}: states no {error.args[0]}") from error


def _stated(config: Path) -> dict[str, Any]:
    try:
        stated = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ContractError(
            f"hf_checkpoint: {config} cannot be read ({error}); --hf-checkpoint takes a folder of this machine"
        ) from error
    if not isinstance(stated, dict):
        raise ContractError(f"hf_checkpoint: {config} is no model's config")
    return stated


def _rope(stated: Mapping[str, Any]) -> str:
    """Return the type of rope from a text model's config, as transformers 5 or 4 writes it."""
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def stated_size(stated: dict[str, Any]) -> Size:
    """Return the sizes of a model from its config, as Hugging Face writes it."""
    heads = stated["num_attention_heads"]
    fallback = {"head_dim": stated["hidden_size"] // heads, "num_key_value_heads": heads}
    return Size(**{name: stated.get(name) or fallback[name] for name in Size.__dataclass_fields__})

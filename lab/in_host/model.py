"""The tiny model that a run trains: a checkpoint with a tokenizer of bytes, and prompts for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from true_on_policy.engines.server import named

MODEL, SEED, PROMPTS = "tiny-qwen3", 0, 64


def write(folder: Path, name: str = MODEL, seed: int = SEED) -> Path:
    """Write the checkpoint once in Hugging Face's format, with a tokenizer, and the prompts beside it."""
    import torch

    from true_on_policy.models.tiny import checkpoint

    done = folder / "prompts.jsonl"
    if not done.exists():
        checkpoint(name, folder, torch.bfloat16, seed)
        write_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
        done.write_text("".join(json.dumps({"prompt": _prompt(i), "label": ""}) + "\n" for i in range(PROMPTS)))
    return folder


def _prompt(number: int) -> str:
    return f"Number {number}: " + "count on, " * (number % 4)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with an id for each byte, so that every id which the model samples is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<end>"]
    names = special + letters + [f"<{i}>" for i in range(vocabulary - len(letters) - len(special))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", bos_token="<pad>"
    ).save_pretrained(folder)


def shape_flags(folder: Path) -> list[str]:
    """State the checkpoint's sizes as Megatron's flags, which win over the launch script's flags."""
    config = json.loads((folder / "config.json").read_text())
    flags = {
        "num-layers": config["num_hidden_layers"],
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": config["num_attention_heads"],
        "num-query-groups": config["num_key_value_heads"],
        "kv-channels": config["head_dim"],
        "vocab-size": config["vocab_size"],
        "rotary-base": int(config["rope_parameters"]["rope_theta"]),
    }
    untied = [] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]
    experts = _expert_flags(config) if "num_experts_per_tok" in config else []
    return [*named(flags), *untied, *experts]


def _expert_flags(config: Mapping[str, Any]) -> list[str]:
    """State the experts' number and sizes, and a router without a loss of its own."""
    sizes = {"num-experts": "num_local_experts", "moe-router-topk": "num_experts_per_tok",
             "moe-ffn-hidden-size": "moe_intermediate_size"}  # fmt: skip
    return [
        *named({flag: config[key] for flag, key in sizes.items()}),
        "--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type", "alltoall",
    ]  # fmt: skip

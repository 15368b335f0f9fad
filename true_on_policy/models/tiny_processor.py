"""The tokenizer and the processor of images of a tiny vision-language model, which engines load with the model.

The tokenizer knows bytes; the last tokens of the vocabulary stand for images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PLACEHOLDERS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Fields of a config.json, each with the token whose id it states."""


def placeholders(vocabulary: int) -> dict[str, int]:
    """The fields of a config.json that state which tokens stand for images: the last of the vocabulary."""
    return {name: vocabulary - len(PLACEHOLDERS) + index for index, name in enumerate(PLACEHOLDERS)}


def write(folder: Path, vocabulary: int) -> None:
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

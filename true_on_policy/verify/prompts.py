"""Prompts of real text for a verification, as the model's own tokenizer and chat template write them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mis_plugins.errors import UserError
from true_on_policy.contract.families import IMAGES

BUILTIN = "builtin"
IMAGE_KEYS = {"image", "images", "image_url", "input_image", "video", "videos", "video_url"}
LONGEST = 1024  # tokens; a continued sequence and its responses come on top


class PromptsError(UserError):
    """A file of prompts that cannot be used, or a model without a tokenizer."""


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and where they come from.

    name: the name of the file, or `builtin`.
    sha256: SHA-256 of the file.
    tokens: the token ids of each prompt.
    """

    name: str
    sha256: str
    tokens: Sequence[tuple[int, ...]] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "count": len(self.tokens)}


def prompt_lines(source: str) -> tuple[Path, list[str]]:
    """Read the prompts of `--prompts`, one a line; empty lines are left out.

    Raises:
        PromptsError: the file cannot be read, holds no prompt, or holds a prompt of JSON with an image.
    """
    path = Path(__file__).parent / "prompts.txt" if source == BUILTIN else Path(source)
    if path.exists() and not path.is_file():
        raise PromptsError(f"--prompts {source}: is no regular file, but a folder, a pipe or a device")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines cuts at U+2028 too, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(
            f"--prompts {source}: cannot be read ({error}); give a text file with one prompt a line, or {BUILTIN}"
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise PromptsError(f"--prompts {source}: holds no prompt; write one a line")
    for prompt in prompts:
        if key := _image(_parsed(prompt)):
            raise PromptsError(_refusal(source, prompt, f"the key or part {key!r}"))
    return path, prompts


def _parsed(prompt: str) -> Any:
    """The value of a line that is JSON, as data sets of chats have it; None where a line is ordinary text."""
    try:
        return json.loads(prompt) if prompt[0] in "{[" else None
    except ValueError:
        return None


def _image(value: Any) -> str | None:
    """Find the key, or the type of a chat's part, that brings an image or a video into a parsed prompt."""
    if isinstance(value, dict):
        brought = [key for key, part in value.items() if key in IMAGE_KEYS and part]
        typed = value.get("type")
        brought += [typed] if isinstance(typed, str) and typed in IMAGE_KEYS else []
        return next(iter(brought), None) or _image([*value.values()])
    if isinstance(value, list):
        return next(filter(None, map(_image, value)), None)
    return None


def _refusal(source: str, prompt: str, what: str) -> str:
    return (
        f"--prompts {source}: {prompt[:40]!r} holds {what}. Images are not certified: {'; '.join(IMAGES)}. Give "
        "prompts of text alone"
    )


def read_prompts(source: str, checkpoint: Path) -> Prompts:
    """Read the prompts of `--prompts`, each as the user's turn of a chat where the model has a chat template.

    Raises:
        PromptsError: `prompt_lines` refuses the file, the checkpoint has no tokenizer, or a prompt has no
            token, more than LONGEST, or one that stands for an image.
    """
    path, prompts = prompt_lines(source)
    tokenizer = _tokenizer(source, checkpoint)
    tokens = [_tokens(tokenizer, prompt) for prompt in prompts]
    # Tokens that stand for an image or a video, by the fields of config.json that state them.
    stated = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    fields = [name for name in ("image_token_id", "video_token_id") if name in stated]
    placeholders = {stated[name]: name for name in fields}
    for prompt, ids in zip(prompts, tokens, strict=True):
        for token in placeholders.keys() & ids:
            what = f"the token {token}, which is {placeholders[token]} in the model's config.json"
            raise PromptsError(_refusal(source, prompt, what))
        if not 0 < len(ids) <= LONGEST:
            raise PromptsError(f"--prompts {source}: {prompt[:40]!r} has {len(ids)} tokens; give 1 to {LONGEST}")
    name = BUILTIN if source == BUILTIN else path.name
    return Prompts(name, hashlib.sha256(path.read_bytes()).hexdigest(), tokens)


def _tokenizer(source: str, checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    if not (checkpoint / "tokenizer.json").exists():
        raise PromptsError(
            f"--prompts {source}: the model has no tokenizer.json; choose --model smollm2-135m or a checkpoint's "
            "folder with its tokenizer, or leave --prompts out for random tokens"
        )
    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


def _tokens(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    text = prompt
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template))

"""Prompts of real text for a verification, as the model's own tokenizer and chat template write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mis_plugins.errors import UserError

BUILTIN = "builtin"
LONGEST = 1024  # tokens; a continued sequence and its responses come on top


class PromptsError(UserError):
    """A file of prompts that cannot be used, or a model without a tokenizer."""


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and where they come from.

    Attributes:
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
        PromptsError: the file cannot be read, or holds no prompt.
    """
    path = Path(__file__).parent / "prompts.txt" if source == BUILTIN else Path(source)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(
            f"--prompts {source}: cannot be read ({error}); give a text file with one prompt a line, or {BUILTIN}"
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise PromptsError(f"--prompts {source}: holds no prompt; write one a line")
    return path, prompts


def read_prompts(source: str, checkpoint: Path) -> Prompts:
    """Read the prompts of `--prompts`, each as the user's turn of a chat where the model has a chat template.

    Raises:
        PromptsError: as `prompt_lines` says; the checkpoint has no tokenizer, or a prompt has too many tokens.
    """
    path, prompts = prompt_lines(source)
    tokenizer = _tokenizer(source, checkpoint)
    tokens = [_tokens(tokenizer, prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, tokens, strict=True):
        if len(ids) > LONGEST:
            raise PromptsError(
                f"--prompts {source}: {prompt[:40]!r} has {len(ids)} tokens; give {LONGEST} at most"
            )
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

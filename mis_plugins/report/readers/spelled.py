"""The text of tokens, from the tokenizer that a host wrote beside its dump.

`tokenizers` reads one file of data; no code of a checkpoint is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mis_plugins.report.readers.source import Problems

LARGEST = 256 * 1024 * 1024  # bytes of a tokenizer
CUT = "\ufffd"  # stands for a part of a character
Token = dict[str, Any]


def spell(tokens: Iterable[Token], file: Path | None, problems: Problems) -> None:
    """Give each token that has an id and no text the text that the tokenizer has for the id."""
    wanted = [token for token in tokens if "text" not in token and "token" in token]
    tokenizer = _load(file, problems) if file is not None and wanted else None
    if tokenizer is None:
        return
    for token in wanted:
        if 0 <= token["token"] < tokenizer.get_vocab_size(with_added_tokens=True):
            token["text"] = _text(tokenizer, token["token"])


def _text(tokenizer: Any, token: int) -> str:
    """Text of an id; the vocabulary's spelling where the id decodes to nothing or to part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return text if text and CUT not in text else tokenizer.id_to_token(token) or text


def _load(file: Path, problems: Problems) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        problems.add(f"{file}: tokens have no text without tokenizers; pip install 'mis-plugins[report]'")
        return None
    if file.stat().st_size > LARGEST:
        problems.add(f"{file}: larger than a tokenizer")
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other kind
        problems.add(f"{file}: no tokenizer: {str(error).partition(chr(10))[0]}")
        return None

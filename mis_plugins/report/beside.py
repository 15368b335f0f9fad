"""What a run leaves beside its dumps: the arguments that name its config, and the tokenizer.

`tokenizers` reads one file of data; no code of a checkpoint is run. It is handed the vocabulary and a plain decoder
alone: an expression of a normalizer or a decoder can be made to run for hours.
"""

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.report.readers import curves
from mis_plugins.report.readers.files import Problems, library, parsed
from mis_plugins.report.record import LONGEST_WORD, printed
from mis_plugins.report.sweep import Candidate, judged
from mis_plugins.shared.budget import LINE, RecordError
from mis_plugins.shared.opened import Opened

SUMMARY = "summary.json"  # of the embedded host, under `arguments`
MOST_RULES = 32  # each token is judged by every rule
LOSS_HOOK = "custom_loss_function_path"


def found_config(files: Iterable[Path], problems: Problems) -> Candidate | None:
    """The config that a run's own arguments say; None where they say none, or switch the correction off."""
    for file in files:
        arguments = problems.read(partial(_arguments, file, problems), file, "the run's arguments") or {}
        named = {name: value for name, value in arguments.items() if name in reading.READ_KEYS}
        if not named or (named.get("use_tis") is False and not arguments.get(LOSS_HOOK)):
            continue
        config = problems.read(partial(_config, named), file, "the run's own config cannot be read")
        if config is not None and judged(config):
            return Candidate(f"the config in {file.name}", config)
    return None


def _arguments(file: Path, problems: Problems) -> Mapping[str, Any]:
    """The arguments in a summary of the embedded host, or in an offline wandb run; none in another file."""
    if file.suffix == ".wandb":
        return curves.wandb_settings(file, problems)
    held = _json(file) if file.name == SUMMARY else {}
    arguments = held.get("arguments") if isinstance(held, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _json(file: Path) -> Any:
    with Opened(file).file as content:
        return parsed(content.read(int(LINE.base) + 1), file)


def _config(arguments: Mapping[str, Any]) -> CorrectionConfig:
    """The config that arguments of a stranger's run say."""
    config = reading.from_args(Namespace(**arguments))
    if len(config.reject) > MOST_RULES:
        raise ConfigError(f"has {len(config.reject)} rules, more than {MOST_RULES}")
    return config


def tokenizer_of(paths: Sequence[Path]) -> Path | None:
    """The first tokenizer beside the dumps: in their folder, or where that is a part of `--dump-details`, above it.

    Both hosts write `tokenizer/tokenizer.json` into the folder of `--dump-details`.
    """
    folders = dict.fromkeys(folder for path in paths for folder in (path, path.parent, path.parent.parent))
    beside = (folder / name for folder in folders for name in ("tokenizer/tokenizer.json", "tokenizer.json"))
    return next((file for file in beside if file.is_file()), None)


CUT = "\ufffd"  # stands for a part of a character
KEPT = ("version", "added_tokens")  # beside the model, whose merges only cut texts into tokens
PLAIN = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "Strip"}
ADDED = 100_000  # added tokens, whose texts `tokenizers` joins into one search
Token = dict[str, Any]


def spell(tokens: Iterable[Token], file: Path | None, problems: Problems) -> None:
    """Give each token that has an id and no text the text that the tokenizer has for the id."""
    wanted = [token for token in tokens if "text" not in token and "token" in token]
    if file is None or not wanted:
        return
    texts = problems.read(lambda: _texts(file, {token["token"] for token in wanted}), file) or {}
    for token in wanted:
        if token["token"] in texts:
            token["text"] = texts[token["token"]]


def _texts(file: Path, ids: set[int]) -> dict[int, str]:
    tokenizer = _load(file)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return {number: _text(tokenizer, number) for number in ids if 0 <= number < size}


def _text(tokenizer: Any, token: int) -> str:
    """Text of an id; the vocabulary's spelling where the id decodes to nothing or to part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return printed(text if text and CUT not in text else tokenizer.id_to_token(token) or text, LONGEST_WORD)


def _load(file: Path) -> Any:
    """The tokenizer of a file, which decodes and does nothing else."""
    tokenizers = library("tokenizers", file, "tokens have no text without tokenizers")
    held = _json(file)
    if not isinstance(held, dict) or not isinstance(held.get("model"), dict):
        raise RecordError(f"{file}: no tokenizer")
    if len(held.get("added_tokens") or ()) > ADDED:
        raise RecordError(f"{file}: adds more than {ADDED:,} tokens")
    model = held["model"] | ({"merges": []} if "merges" in held["model"] else {})
    kept = {name: held[name] for name in KEPT if name in held}
    return tokenizers.Tokenizer.from_str(json.dumps(kept | {"model": model, "decoder": _plain(held.get("decoder"))}))


def _plain(decoder: Any) -> Mapping[str, Any] | None:
    """A decoder without expressions, and without replacements that make a text longer; None where nothing is left."""
    if not isinstance(decoder, dict):
        return None
    if decoder.get("type") == "Sequence":
        parts = [part for part in map(_plain, decoder.get("decoders") or ()) if part is not None]
        return decoder | {"decoders": parts} if parts else None
    return decoder if decoder.get("type") in PLAIN or _replaces_a_letter(decoder) else None


def _replaces_a_letter(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder replaces a text by at most one letter, such as `▁` by a space."""
    pattern, content = decoder.get("pattern"), decoder.get("content")
    plain = isinstance(pattern, dict) and pattern.keys() == {"String"} and bool(pattern["String"])
    return decoder.get("type") == "Replace" and plain and isinstance(content, str) and len(content) <= 1

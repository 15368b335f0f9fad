"""A file for --custom-config-path, read as a host reads it, and refused where the host would swallow what it says.

A host calls `yaml.safe_load` and makes an argument of every top-level key. Of a key that stands twice it keeps the
last; a rule that stands beside `mis:`, and not under it, becomes an argument that nobody reads.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from pathlib import Path
from typing import Any

import yaml

from mis_plugins.config import CorrectionConfig
from mis_plugins.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"  # `<<`, which may stand twice
SWITCHES = ("use_tis", "get_mismatch_metrics")  # of the host
OURS = {field.name for field in dataclasses.fields(CorrectionConfig)}


class StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a mapping has each key once."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        # Not when mappings are built: `<<` has put in keys by then that others may override.
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(
                    f"{key.value}: in line {lines[name]} and again in line {line}; drop one of them"
                )
            lines[name] = line
        return node


def keys_of(file: Path | str) -> dict[str, Any]:
    """The top-level keys of a config file.

    Raises:
        ConfigError: no mapping; a key that stands twice, or where nobody reads it; no UTF-8.
        yaml.YAMLError, OSError: no YAML, no such file.
    """
    keys = yaml.load(text_of(file), StrictLoader)
    if not isinstance(keys, dict):
        said = "it is empty" if keys is None else f"got {keys!r}"
        raise ConfigError(f"{said}; expected a mapping with the key `mis:` or Miles's flat keys")
    for key, value in keys.items():
        if key in OURS:
            raise ConfigError(f"{key}: stands beside `mis:`, where no one reads it; indent it under `mis:`")
        if key in SWITCHES and not isinstance(value, bool):
            raise ConfigError(f"{key}: got {value!r}; expected true or false")
    return {str(key): value for key, value in keys.items()}


INLINE = "base64:"  # what a path begins with that is the file itself, for Miles


def text_of(file: Path | str) -> str:
    """What a text file holds, or Miles's `base64:` payload in place of a path.

    Raises:
        ConfigError: no base64, no UTF-8.
        OSError: no such file.
    """
    try:
        return _inline(file) if str(file).startswith(INLINE) else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"byte {error.start} is not UTF-8 ({error.reason}); save it as plain text"
        ) from None


def _inline(file: Path | str) -> str:
    try:
        return base64.b64decode(str(file).removeprefix(INLINE), validate=True).decode("utf-8")
    except binascii.Error as error:
        raise ConfigError(f"{INLINE} no base64 behind it ({error})") from None

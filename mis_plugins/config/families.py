"""Families of presets: where to start, what a preset does, and the package that it comes from.

`config list` groups presets by what they do, and `config list --family NAME` shows one family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mis_plugins.config.loading import aliases, load
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError

START = ("metrics-only", "tis", "geometric-mis", "geometric-mis-wide", "sequence")
"""The presets among which docs/choose.md lets a newcomer choose, in the order of the page."""

KINDS = {
    "watch": "metrics, the same loss",
    "token": "a weight a token; at most tokens are dropped",
    "sequence": "a weight a segment or a sequence; nothing else is dropped",
    "rejection": "whole segments or sequences are dropped",
    "objective": "the loss hook: another objective, OPSM, segment-wise weights",
}
"""What the presets of each kind do; every preset is of one kind."""


JUDGED = "# Judged by: "


@dataclass(frozen=True)
class Header:
    """What the comments at the top of a preset say: its formula, where it comes from, what it is compared with."""

    formula: str
    source: str
    judged_by: str


def header(name: str, file: Path) -> Header:
    """The first two lines of a preset, and the line that names its judge; of an alias, its own source and judge."""
    lines = file.read_text(encoding="utf-8").splitlines()
    formula, source = (line.removeprefix("# ") for line in lines[:2])
    judged = next((line.removeprefix(JUDGED) for line in lines if line.startswith(JUDGED)), "-")
    if (words := aliases(file).get(name)) is not None:
        source, _, judged = words.partition(" | ")
    return Header(formula, source, judged or "-")


def is_of_peer(name: str, file: Path) -> bool:
    """Whether a preset is another package's; the other names of a file are always other packages'."""
    return name != file.stem or file.parent.name == "peers"


def kind(config: CorrectionConfig) -> str:
    """The kind of a config, a key of `KINDS`."""
    if config.needs_loss_hook:
        return "objective"
    if not config.corrects:
        return "watch"
    if any(rule.over != "token" for rule in config.reject):
        return "rejection"
    return "token" if config.weight is None or config.weight.level == "token" else "sequence"


def families(presets: Mapping[str, Path]) -> dict[str, list[str]]:
    """The names of the presets of each family: `start`, the kinds, then the packages of `yaml/peers/`."""
    by_family: dict[str, list[str]] = {"start": [*START], **{name: [] for name in KINDS}}
    for name, file in presets.items():
        by_family[kind(load(file))].append(name)
        if is_of_peer(name, file):
            by_family.setdefault(package(name), []).append(name)
    return by_family


def package(name: str) -> str:
    """The package that a preset of `yaml/peers/` is named after."""
    hyphenated = ("ms-swift", "nemo-rl", "prime-rl")
    return next((owner for owner in hyphenated if name.startswith(owner)), name.partition("-")[0])


def of_family(name: str, presets: Mapping[str, Path]) -> list[str]:
    """The names of the presets of one family.

    Raises:
        ConfigError: names every family that there is.
    """
    by_family = families(presets)
    if name not in by_family:
        raise ConfigError(f"--family {name}: unknown; choose one of {', '.join(by_family)}")
    return by_family[name]

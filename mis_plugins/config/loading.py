"""Load a config that a user names: a file, the standard input, or a preset.

Presets are grouped by what they do, by the package that they come from, and by where a newcomer starts.
"""

import argparse
import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.file import STDIN, keys_of
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError, shown


def load(file: Path) -> CorrectionConfig:
    """Read a file as the host does: every top-level key becomes an argument.

    The file is read as with `--use-tis`, unless it sets `mis.metrics` alone: a file that corrects nothing
    then fails here, not in the job.
    """
    return read_keys(keys_of(file))


def as_arguments(keys: Mapping[str, Any]) -> argparse.Namespace:
    """The keys of a file as a host's arguments, whatever their names: `self` and `__class__` too."""
    arguments = argparse.Namespace()
    vars(arguments).update(keys)
    return arguments


def read_keys(keys: Mapping[str, Any]) -> CorrectionConfig:
    """Read a file's keys as `load` does; raises ConfigError where none says how to correct or one cannot work."""
    reading.check_areal(keys)
    reading.check_names(keys)
    if not any(reading.is_read(key, value) for key, value in keys.items()):
        others = [
            f"; of a file of {whose} `config {by}` makes one" for key, (whose, by) in FOREIGN.items() if key in keys
        ]
        raise ConfigError(
            "nothing says how to correct: neither the key `mis:` nor one of Miles's flat keys is in it"
            + "".join(others[:1])
        )
    mis = keys.get("mis")
    only_metrics = isinstance(mis, dict) and set(mis) == {"metrics"}
    try:
        return reading.from_args(as_arguments({"use_tis": not only_metrics, **keys}))
    except ConfigError as error:
        problem, looked, _ = error.template.partition(" (looked for in: ")  # of a job's arguments
        problem = problem.removeprefix("--use-tis is set but ")  # nobody has set it for a file that is only read
        raise ConfigError(f"{problem} (the file says {', '.join(keys)})") if looked else error from None


FOREIGN = {
    "algorithm": ("verl's", "from-verl"),
    **dict.fromkeys(("use_vllm", "vllm_importance_sampling_mode"), ("TRL's", "from-trl")),
}
"""By a key that another framework's file has at its top: whose it is, and the command that translates it."""
WATCHING = "metrics-only"
ALSO = "# Also "  # begins a line of a preset's header


def watching(target: str) -> Path:
    """The file with which a run watches that a preset would correct.

    Every preset of the TIS hook says `use_tis: true`, which wins over the command line. A run that watches computes
    metrics alone, whatever the preset, so that one file serves all: a file of this package, which every node has. It
    raises ConfigError for no preset, or for one of the loss hook, which corrects whatever `use_tis` says.
    """
    file = file_of(target)
    if file not in presets().values():
        raise ConfigError(
            "--watch takes the name of a preset; in a file of yours drop use_tis: true, and give --get-mismatch-metrics"
        )
    if load(file).needs_loss_hook:
        raise ConfigError(
            "a preset of the loss hook corrects whatever use_tis says, and has no file that watches; give the TIS hook "
            f"{WATCHING}, or the loss hook a copy of the preset with use_tis: false"
        )
    return preset_path(WATCHING)


def file_of(target: str) -> Path:
    """A file, `-` for the standard input, or the preset of that name."""
    file = Path(target)
    is_file = target == STDIN or not file.is_dir() and (file.exists() or bool(file.suffix) or "/" in target)
    return file if is_file else preset_path(target)


def preset_path(name: str) -> Path:
    """The file of a preset, in a checkout or an installed package; a ConfigError names the nearest that exists."""
    files = presets()
    if name not in files:
        folder = "; it is a folder, and a file is expected" if os.path.isdir(name) else None
        near = folder or reading.suggest(name, files, "; `python -m mis_plugins config list` names all")
        raise ConfigError(f"preset {shown(name)}: unknown{near}")
    return files[name]


def presets() -> dict[str, Path]:
    """The file of every preset by its names, those in its header too; other packages' files lie in `peers/`."""
    files = _preset_folder().rglob("*.yaml")
    return dict(sorted((name, file) for file in files for name in (file.stem, *aliases(file))))


def aliases(file: Path) -> dict[str, str]:
    """Further names of a preset, each with its source and judge: `# Also NAME: SOURCE | JUDGE` in the header."""
    lines = file.read_text(encoding="utf-8").splitlines()
    also = (line.removeprefix(ALSO).partition(": ") for line in lines if line.startswith(ALSO))
    return {name: words for name, _, words in also}


def _preset_folder() -> Path:
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "presets", package.parent / "yaml") if folder.is_dir())


# ------------------------------------------------------------------------------------------------------ families

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


def formula_of(file: Path) -> str:
    """The formula of a preset, which is the first line of its file."""
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


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
    """The names of the presets of one family; a ConfigError names every family that there is."""
    by_family = families(presets)
    if name not in by_family:
        raise ConfigError(f"--family {name}: unknown; choose one of {', '.join(by_family)}")
    return by_family[name]

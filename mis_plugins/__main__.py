"""`python -m mis_plugins config check FILE`: refuse an impossible config before the job starts, not inside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from mis_plugins import reading
from mis_plugins.config import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.errors import ConfigError

REFUSED = 2  # could not compare, could not check: never a pass

WHAT = {
    "token": "the ratio of each token",
    "sequence": "the ratio of the whole sequence (product over its tokens)",
    "geometric": "the geometric mean ratio of the sequence",
}
RULE = {
    "token": "tokens whose ratio",
    "sum": "sequences whose ratio (product over tokens)",
    "mean": "sequences whose geometric mean ratio",
    "min": "sequences with a token whose ratio",
    "max": "sequences whose largest token ratio",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the file is good, 2 it is not."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except (ConfigError, OSError, yaml.YAMLError) as error:
        print(f"{arguments.target}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def check(arguments: argparse.Namespace) -> str:
    """What a file given to --custom-config-path will do, in words."""
    return describe(load(Path(arguments.target)))


def path(arguments: argparse.Namespace) -> str:
    """Where a preset lies."""
    return str(reading.preset_path(arguments.target))


def load(file: Path) -> CorrectionConfig:
    """Read a file as the host does: every top-level key becomes an argument.

    Read for `--use-tis`, unless all it says is `mis.metrics`: a file that corrects nothing fails here, not in the job.
    """
    keys = yaml.safe_load(file.read_text())
    if not isinstance(keys, dict):
        raise ConfigError(f"got {keys!r}; expected a mapping with the key `mis:` or Miles's flat keys")
    mis = keys.get("mis")
    only_metrics = isinstance(mis, dict) and set(mis) == {"metrics"}
    arguments = {"use_tis": not only_metrics} | {str(key): value for key, value in keys.items()}
    return reading.from_args(argparse.Namespace(**arguments))


def describe(config: CorrectionConfig) -> str:
    """The config in words, one line a decision."""
    lines = [_describe_weight(config.weight)] + [_describe_rule(rule) for rule in config.reject]
    return "\n".join([*lines, f"metrics: {config.metrics}"])


def _describe_weight(weight: WeightConfig | None) -> str:
    if weight is None:
        return "weight: none"
    bound = {
        "truncate": f"capped at {weight.ceiling:g}",
        "clip": f"clipped to [{weight.floor:g}, {weight.ceiling:g}]",
        "mask": f"used as it is in [{weight.floor:g}, {weight.ceiling:g}], dropped from the loss outside",
    }[weight.bound]
    line = f"weight: {WHAT[weight.level]}, pi_old / mu, {bound}"
    if weight.normalize:
        over = "valid" if weight.normalize.over == "valid" else "kept"
        unit = "tokens" if weight.level == "token" else "sequences"
        line += (
            f"; divided by its mean over the {over} {unit} of the {weight.normalize.scope.replace('_', ' ')}"
        )
    return line


def _describe_rule(rule: RejectRule) -> str:
    bounds = [f"below {rule.lower:g}"] if rule.lower is not None else []
    bounds += [f"above {rule.upper:g}"] if rule.upper is not None else []
    return f"reject: {RULE[rule.over]} is {' or '.join(bounds)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mis_plugins", description=__doc__)
    groups = parser.add_subparsers(required=True, metavar="config")
    config = groups.add_parser("config", help="check a config file, find a preset")
    commands = config.add_subparsers(required=True, metavar="check|path")
    for run, name, target in ((check, "check", "FILE"), (path, "path", "PRESET")):
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.add_argument("target", metavar=target)
        command.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())

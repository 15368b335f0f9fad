"""Configs from the command line: find one, read what it does, see it at work, bring one over from another framework.

    python -m mis_plugins config list
    python -m mis_plugins config show verl-decoupled-geo-rs
    python -m mis_plugins config check FILE.yaml
    python -m mis_plugins config check - < FILE.yaml
    python -m mis_plugins config from-verl ppo_trainer.yaml algorithm.rollout_correction.rollout_is=token

Exit codes: 0 it is good; 2 it is not, and stderr says which key and what to do; 130 interrupted; 141 nobody reads
what it prints.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("mis_plugins.__main__:main")

import argparse
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mis_plugins.config import reading, writing
from mis_plugins.config.docs import header
from mis_plugins.config.file import STDIN, keys_of, text_of
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError, MisError
from mis_plugins.explain.formula import formula
from mis_plugins.explain.translate import areal, miles, ms_swift, verl, verl_presets
from mis_plugins.explain.words import describe
from mis_plugins.hosts import denominator_checks
from mis_plugins.hosts.abilities import check_served, unserved
from mis_plugins.hosts.arguments import recorded, surprises
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.registry import HOSTS
from mis_plugins.shared.shell import REFUSED, add_version

LEGEND = "r = pi_old/mu, trainer over rollout engine, of each token (pi_theta/mu in bypass)"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the config is good, 2 it is not."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except (MisError, OSError, yaml.YAMLError) as error:
        target = getattr(arguments, "target", "config")
        print(f"{'standard input' if target == STDIN else target}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def show(arguments: argparse.Namespace) -> str:
    """A preset or a file: as it is read, as a formula, in words, and at work on six tokens.

    The numbers come from the functions that the hooks call. Sequence A has two turns of the model around a tool's
    token, with ratios 0.4, 1.25 and 8; in sequence B the engines agree to a thousandth.
    """
    from mis_plugins.explain import six_tokens  # only this command needs torch

    config = load(_file(arguments.target))
    parts = [writing.to_yaml(writing.as_mapping(config)), "\n".join(formula(config)), describe(config)]
    return "\n\n".join([*parts, six_tokens.table(config)])


def check(arguments: argparse.Namespace) -> str:
    """What a file given to --custom-config-path (or a preset) will do, in words.

    With the flags it needs, and warnings of what works as it says and may yet surprise. A file in Miles's flat keys is
    understood too. --host makes the flags that host's, ready to paste, and refuses what it cannot serve.
    """
    file, host = _file(arguments.target), HOSTS.get(arguments.host)
    keys = keys_of(file)  # once: it may be a pipe
    config = _read(keys)
    if host is not None:
        check_served(config, host, reading.spelling(argparse.Namespace(**keys)))
    told = describe(config, host, shlex.quote(str(file.resolve())) if host and file.is_file() else "FILE")
    return "\n".join([told, *(f"warning: {text}" for text in _beside(keys, config, host))])


def _beside(keys: Mapping[str, Any], config: CorrectionConfig, host: Host | None) -> Iterator[str]:
    """What to beware of in the keys that stand beside `mis:`, and on a host that is named."""
    yield from _switched(keys, config)
    yield from surprises(keys, host)
    if host is not None:
        yield from unserved(config, host)
    by_kept = host is not None and host.divides_by_kept(argparse.Namespace())
    split = denominator_checks.other_terms(argparse.Namespace(**keys), config, by_kept)
    if split is not None and not config.needs_loss_hook:
        yield split


def path(arguments: argparse.Namespace) -> str:
    """Where a preset lies, or a file: in full, as a job that starts in another folder needs it."""
    return str(_file(arguments.target).resolve(strict=True))


def names(arguments: argparse.Namespace) -> str:
    """Every preset with its formula."""
    presets = reading.presets()
    width = max(map(len, presets))
    lines = [f"{name:<{width}}  {header(file).formula}" for name, file in presets.items()]
    return "\n".join([LEGEND, "", *lines])


def from_miles(arguments: argparse.Namespace) -> str:
    """Miles's or slime's flat mis.yaml in our spelling.

    The flat file works as it is; ours can say more. Each setting stands beside the key it comes from.
    """
    return miles.translate(keys_of(arguments.target)).text()


def from_verl(arguments: argparse.Namespace) -> str:
    """verl's algorithm.rollout_correction, of 0.9.1 or earlier: a trainer's yaml, a launch script, a preset's name.

    FILE is a yaml or a part of one, a .sh, `-`, or a preset such as decoupled_token_is(). Hydra overrides may follow,
    which win. The output is a file for --custom-config-path: comments say which key of verl's each setting comes
    from, what differs, and which flags it needs.

        python -m mis_plugins config from-verl ppo_trainer.yaml \\
            algorithm.rollout_correction.rollout_is=token > mis.yaml
    """
    target = arguments.target
    named = verl_presets.is_call(target) and not Path(target).exists()
    return verl.translate(target if named else text_of(target), arguments.overrides).text()


def from_ms_swift(arguments: argparse.Namespace) -> str:
    """ms-swift's rollout_importance_sampling_* and off_policy_sequence_mask_delta, from yaml or a launch script.

    Its code is followed where its document says otherwise (sequence_mask).
    """
    return ms_swift.translate(text_of(arguments.target)).text()


def from_areal(arguments: argparse.Namespace) -> str:
    """AReaL's yaml: its blocks `actor:` and `rollout:`, or their keys alone.

    Reads enable_segment_wise_ppo, behav_imp_weight_cap and _floor, use_decoupled_loss and rejection_sampling. Comments
    say which key each setting comes from, and what to pass for the keys that bound the rollout.
    """
    return areal.translate(text_of(arguments.target)).text()


def load(file: Path) -> CorrectionConfig:
    """Read a file as the host does: every top-level key becomes an argument.

    Read for `--use-tis`, unless all it says is `mis.metrics`: a file that corrects nothing fails here, not in the job.
    """
    return _read(keys_of(file))


def _read(keys: Mapping[str, Any]) -> CorrectionConfig:
    if not any(reading.is_read(key, value) for key, value in keys.items()):
        verls = "; of a file of verl's `config from-verl` makes one" if "algorithm" in keys else ""
        raise ConfigError(
            f"nothing says how to correct: neither the key `mis:` nor one of Miles's flat keys is in it{verls}"
        )
    reading.check_names(keys)
    mis = keys.get("mis")
    only_metrics = isinstance(mis, dict) and set(mis) == {"metrics"}
    return reading.from_args(argparse.Namespace(**{"use_tis": not only_metrics, **keys}))


def _switched(keys: Mapping[str, Any], config: CorrectionConfig) -> Iterator[str]:
    """What the file does to the host's own flags: a host sets its keys after it has read the command line."""
    if keys.get("use_tis") is False:
        yield (
            "use_tis: false wins over --use-tis: metrics alone through the loss hook, or with --get-mismatch-metrics, "
            "else nothing at all"
        )
    if (
        keys.get("use_tis") is None
        and keys.get("get_mismatch_metrics")
        and (config.corrects or config.needs_loss_hook)
    ):
        yield "get_mismatch_metrics: true corrects nothing by itself: metrics alone, unless with --use-tis"
    if keys.get("use_tis") and keys.get("get_mismatch_metrics"):
        yield "use_tis and get_mismatch_metrics are both true: the loss is corrected"
    if (idle := reading.idle_rule(keys)) is not None:
        yield idle
    yield from areal.warnings(keys)


def _file(target: str) -> Path:
    """A file, `-` for the standard input, or the preset of that name."""
    file = Path(target)
    return (
        file
        if target == STDIN or file.exists() or file.suffix or "/" in target
        else reading.preset_path(target)
    )


Command = tuple[Callable[[argparse.Namespace], str], str, str | None]  # what it runs, its name, what it takes

COMMANDS: tuple[Command, ...] = (
    (names, "list", None),
    (show, "show", "PRESET_OR_FILE"),
    (check, "check", "PRESET_OR_FILE"),
    (path, "path", "PRESET_OR_FILE"),
    (from_miles, "from-miles", "FILE"),
    (from_verl, "from-verl", "FILE"),
    (from_ms_swift, "from-ms-swift", "FILE"),
    (from_areal, "from-areal", "FILE"),
)


def _parser() -> argparse.ArgumentParser:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m mis_plugins", description=__doc__, formatter_class=as_written
    )
    add_version(parser)
    groups = parser.add_subparsers(required=True, metavar="config")
    config = groups.add_parser("config", help="presets, checks, translations", description=__doc__,
                               formatter_class=as_written)  # fmt: skip
    commands = config.add_subparsers(required=True, metavar="|".join(name for _, name, _ in COMMANDS))
    for run, name, target in COMMANDS:
        text = inspect.cleandoc(run.__doc__ or "")
        command = commands.add_parser(
            name, help=text.partition("\n")[0], description=text, formatter_class=as_written
        )
        command.set_defaults(run=run)
        if target:
            command.add_argument("target", metavar=target)
        if run is check:
            command.add_argument(
                "--host",
                choices=recorded(),
                help="whose arguments and flags (default: Miles or slime on Megatron)",
            )
        if run is from_verl:
            command.add_argument(
                "overrides", nargs="*", metavar="OVERRIDE", help="algorithm.rollout_correction.KEY=VALUE"
            )
    return parser

"""Configs of a correction, reports of a run, and checks of a host, from the command line.

    python -m mis_plugins config list --family start
    python -m mis_plugins config show verl-decoupled-geo-rs
    python -m mis_plugins config check tis --host miles
    python -m mis_plugins config check run.sh > run.patch
    python -m mis_plugins config path tis
    python -m mis_plugins config from-verl ppo_trainer.yaml algorithm.rollout_correction.rollout_is=token > mis.yaml
    python -m mis_plugins config from-ms-swift run.sh rollout_importance_sampling_threshold=3 > mis.yaml
    python -m mis_plugins config from-areal gsm8k_grpo.yaml actor.behav_imp_weight_cap=5 > mis.yaml
    python -m mis_plugins config from-trl grpo.yaml use_vllm=true > mis.yaml
    python -m mis_plugins config from-prime-rl rl.toml trainer.loss.type=ipo > mis.yaml
    python -m mis_plugins config suggest DUMPS > mis.yaml
    python -m mis_plugins report DUMPS
    python -m mis_plugins hosts check ~/miles

Exit codes: 0 it is good; 1 lines of a launch script have to change, or a host has moved and is still served; 2 it is
not good, and stderr says which key and what to do; 3 `report --watch` saw an alarm; 130 interrupted; 141 nobody reads
what it prints; 143 ended by SIGTERM.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("mis_plugins.__main__:main")

import argparse
import inspect
import os.path
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mis_plugins.config import loading, reading, writing
from mis_plugins.config.file import STDIN, keys_of, text_of
from mis_plugins.config.loading import WATCHING, file_of, formula_of, load, presets, read_keys, watching
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError, UserError, cut
from mis_plugins.explain import rungs
from mis_plugins.explain.formula import formula
from mis_plugins.explain.launch import command as launch
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl, verl_presets
from mis_plugins.explain.translate.script import Asked
from mis_plugins.explain.words import describe
from mis_plugins.hosts import checks, ownership
from mis_plugins.hosts.arguments import recorded, surprises
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.registry import every_host
from mis_plugins.shared.numerals import count
from mis_plugins.shared.shell import REFUSED, Gone, add_version, importing, is_foreign, not_installed
from mis_plugins.shared.terminal import print_error, printable

LONGEST_TARGET, LONGEST_ERROR = 300, 2000  # letters; a path of `base64:` holds a whole file
SETTING = re.compile(r"[+~]*[\w.@-]+=")  # how a setting behind a translator's file, or before it, begins
FROM_MILES = (
    "the flat file works as it is: pass it as --custom-config-path FILE, and see what it does with `config check FILE`"
)
LEGEND = "r = pi_old/mu, trainer over rollout engine, of each token (pi_theta/mu in bypass)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names, and return its exit code."""
    own, given = _split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if own[:2] == ["config", "from-miles"]:
        parser.error(f"config from-miles is gone: {FROM_MILES}")
    arguments = parser.parse_args(own)
    arguments.given = given
    try:
        done = arguments.run(arguments)
        if isinstance(done, int):
            return done
        print(done)
    except ModuleNotFoundError as error:
        if not is_foreign(error):
            raise
        print_error(f"error: {not_installed(error, 'report')}")
        return REFUSED
    except (UserError, OSError, yaml.YAMLError) as error:
        target = str(getattr(arguments, "target", getattr(arguments, "checkout", arguments.group)))
        why = cut(_why(error, target, arguments.run in (show, check, path)), LONGEST_ERROR)
        target = cut(target, LONGEST_TARGET)
        print_error(f"{'standard input' if target == STDIN else target}: {why}")
        return REFUSED
    return 0


def _why(error: Exception, target: str, takes_presets: bool) -> str:
    """What an error says: of a file that cannot be opened without its path, of a missing one whether it is a preset."""
    if not isinstance(error, OSError) or str(error.filename) != str(Path(target)):
        return str(error)
    preset = Path(target).stem.lower()
    meant = takes_presets and isinstance(error, FileNotFoundError) and preset in presets()
    return f"{error.strerror}{f'; did you mean the preset {preset}?' if meant else ''}"


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The command's own arguments, and what stands behind --, with which the user starts a launch script."""
    command, own, given = list(argv[:2]), list(argv), []
    if command in [["config", name] for name in ("check", *TRANSLATORS)] and "--" in own:
        at = own.index("--")
        own, given = own[:at], own[at + 1 :]
    return [*command, *_settings(own[2:])] if command in [["config", name] for name in TRANSLATORS] else own, given


def _settings(words: Sequence[str]) -> list[str]:
    """The words behind a translator: its file, flags of TRL, ms-swift and prime-rl as settings, its own options.

    `--a-key=VALUE` and `--a-key VALUE` are the setting a-key=VALUE; `--a-key` alone, or before a file, is true.
    """
    left, settings, options = list(words), list[str](), list[str]()
    while left:
        word = left.pop(0)
        flag, equals, _ = word.partition("=")
        has_value = not equals and bool(left) and not left[0].startswith("--") and not os.path.isfile(left[0])
        if word.startswith("--") and any(own.startswith(flag) for own in OPTIONS):
            options += [word, left.pop(0)] if has_value and OPTIONS[0].startswith(flag) else [word]
        elif equals or not word.startswith("--"):
            settings.append(word.removeprefix("--"))
        else:
            settings.append(f"{flag[2:]}={left.pop(0) if has_value else 'true'}")
    return [*sorted(settings, key=lambda word: SETTING.match(word) is not None), *options]


def show(arguments: argparse.Namespace) -> str:
    """A preset or a file: as it is read, as a formula, in words, and at work on six tokens.

    The numbers come from the functions that the hooks call. Sequence A has two turns of the model around a tool's
    token, with ratios 0.4, 1.25 and 8; in sequence B the engines agree to a thousandth.
    """
    with importing():  # torch, which only this command needs
        from mis_plugins.explain import six_tokens

    config = load(file_of(arguments.target))
    parts = [writing.to_yaml(writing.as_mapping(config)), "\n".join(formula(config)), describe(config)]
    return "\n\n".join([*parts, six_tokens.table(config)])


def check(arguments: argparse.Namespace) -> str | int:
    """What a file given to --custom-config-path (or a preset) will do, in words; or what a launch script would load.

    With the flags it needs, and warnings of what works as it says and may yet surprise. A file in Miles's flat keys is
    understood too. --host makes the flags that host's, ready to paste, and refuses what it cannot serve.

    A script (.sh, .bash, .slurm, .sbatch, or .py as Miles has them) is read and never executed. The output ends with
    the lines to change, as a diff for `patch`; --preset names what shall correct there (default: the script's own
    config, else tis). Behind -- stands what the script is started with: check run.py -- --enable-mis.
    """
    host = every_host().get(arguments.host)
    if launch.is_script(arguments.target):
        text, code = launch.check(arguments.target, arguments.given, host, arguments.preset, _told)
        print(text)
        return code
    if arguments.given or arguments.preset:
        raise ConfigError("--preset, and arguments behind --, belong to a launch script (.sh, .slurm, .py)")
    file = file_of(arguments.target)
    named = shlex.quote(str(file.absolute())) if host and file.is_file() else "FILE"
    return _told(keys_of(file), host, named)  # read once: it may be a pipe


def _told(keys: Mapping[str, Any], host: Host | None, file: str) -> str:
    """What a config does on a host, with the flags that it needs and warnings."""
    config = read_keys(keys)
    checks.refuse("command" if host else "file", keys, config, host or every_host()["unknown"])
    described = describe(config, host, file)
    warnings = (f"warning: {printable(text)}" for text in _beside(keys, config, host))
    return "\n".join([described, *_switch(keys, config), ownership.NOTICE, *warnings])


def _switch(keys: Mapping[str, Any], config: CorrectionConfig) -> Iterator[str]:
    """What decides whether a config of the TIS hook corrects or watches."""
    if config.needs_loss_hook or not config.corrects or keys.get("use_tis") is False:
        return
    if keys.get("use_tis"):
        yield (
            "switch: use_tis: true in the file corrects, whatever the command line says; to watch, give the file that "
            f"`config path {WATCHING}` prints"
        )
    else:
        yield "switch: without use_tis in the file, --use-tis on the command line corrects; a run without it watches"


def _beside(keys: Mapping[str, Any], config: CorrectionConfig, host: Host | None) -> Iterator[str]:
    """Warnings about keys beside `mis:`, the named host, and windows too narrow for a real mismatch."""
    yield from _switched(keys, config)
    yield from surprises(keys, host)
    yield from checks.warnings("command" if host else "file", keys, config, host or every_host()["unknown"])
    yield from rungs.warnings(config)


def path(arguments: argparse.Namespace) -> str:
    """Where a preset lies, or a file: in full, as a job that starts in another folder needs it.

    A preset of the TIS hook says `use_tis: true`, and corrects whatever the command line says. --watch prints the file
    for a run that only watches. A preset of the loss hook has no such key, and no such file.
    """
    file = watching(arguments.target) if arguments.watch else file_of(arguments.target)
    return str(file.resolve(strict=True))


def names(arguments: argparse.Namespace) -> str:
    """Every preset with its formula, by what it does; --family shows one family, for example start, token or verl."""
    files = presets()
    width = max(map(len, files))

    def row(name: str) -> str:
        return f"{name:<{width}}  {formula_of(files[name])}"

    if arguments.family is not None:
        return "\n".join([LEGEND, "", *map(row, loading.of_family(arguments.family, files))])
    grouped = loading.families(files)
    parts = ("\n".join([f"{kind}: {words}", *map(row, grouped[kind])]) for kind, words in loading.KINDS.items())
    return "\n\n".join([LEGEND, f"where to start: {', '.join(loading.START)}", *parts])


def from_verl(arguments: argparse.Namespace) -> str:
    """verl's algorithm.rollout_correction, of 0.7.1 to 0.9.1: a trainer's yaml, a launch script, a preset's name.

    FILE is a yaml or a part of one, a .sh, `-`, or a preset such as decoupled_token_is(). Hydra overrides may follow,
    which win. The output is a file for --custom-config-path: comments say which key of verl's each setting comes
    from, what differs, and which flags it needs.
    """
    target = arguments.target
    named = verl_presets.is_call(target) and not Path(target).exists()
    return verl.translate(target if named else text_of(target), arguments.overrides, _asked(arguments)).text()


def from_ms_swift(arguments: argparse.Namespace) -> str:
    """ms-swift's rollout_importance_sampling_* and off_policy_sequence_mask_delta, from yaml or a launch script.

    Its code is followed where its document says otherwise (sequence_mask), or the document with --as-documented.
    KEY=VALUE may follow, which win.
    """
    asked = _asked(arguments)
    return ms_swift.translate(text_of(arguments.target), arguments.overrides, asked, arguments.as_documented).text()


def from_areal(arguments: argparse.Namespace) -> str:
    """AReaL's yaml: its blocks `actor:` and `rollout:`, or their keys alone.

    Reads enable_segment_wise_ppo, behav_imp_weight_cap and _floor, use_decoupled_loss, use_sapo_loss, m2_threshold and
    rejection_sampling, or the older behave_imp_weight_*. Comments say which key each setting comes from, and what to
    pass for the keys that bound the rollout. KEY=VALUE may follow, which win.
    """
    return areal.translate(text_of(arguments.target), arguments.overrides, _asked(arguments)).text()


def from_trl(arguments: argparse.Namespace) -> str:
    """TRL's GRPOConfig: a yaml, a launch script, or the call GRPOConfig(...) in a Python script, which is never run.

    With `use_vllm: true` TRL corrects by default: the output then holds a correction that the file never names.
    KEY=VALUE may follow, which win.
    """
    return trl.translate(text_of(arguments.target), arguments.overrides, _asked(arguments)).text()


def from_prime_rl(arguments: argparse.Namespace) -> str:
    """prime-rl's toml: its table [trainer.loss], or [loss] of a trainer's own file.

    prime-rl corrects by default, by DPPO's mask. trainer.loss.KEY=VALUE may follow, which win.
    """
    return prime_rl.translate(text_of(arguments.target), arguments.overrides, _asked(arguments)).text()


def _asked(arguments: argparse.Namespace) -> Asked:
    path = Path("script") if arguments.target == STDIN else Path(arguments.target)
    return Asked(path, tuple(arguments.given), arguments.line)


def _switched(keys: Mapping[str, Any], config: CorrectionConfig) -> Iterator[str]:
    """Warnings where the file overrides the host's flags: a host sets its keys after the command line."""
    if keys.get("use_tis") is False:
        yield "use_tis: false wins over --use-tis: metrics by the loss hook or --get-mismatch-metrics, else nothing"
    if keys.get("use_tis") is None and keys.get("get_mismatch_metrics") and (config.corrects or config.needs_loss_hook):
        yield "get_mismatch_metrics: true corrects nothing by itself: metrics alone, unless with --use-tis"
    if (idle := reading.idle_rule(keys)) is not None:
        yield idle


def suggest(arguments: argparse.Namespace) -> int:
    """The config to run with, as yaml, from what a run left: dumps of Miles or slime, or the neutral form.

    Reads what `report` reads, tries the presets of this pack on it, and says why it proposes which. After Ctrl-C it
    proposes from what was read before, says so, and exits with code 130. Where no token can be compared it
    proposes nothing, and exits with code 2.
    """
    with importing():  # torch
        from mis_plugins.report.command import suggest as proposed

    return proposed(arguments)


def report(arguments: argparse.Namespace) -> int:
    """See the mismatch of a run: report.html, report.json and a summary, from what the run left.

    Reads dumps of Miles and slime (--dump-details, --save-debug-train-data), a neutral jsonl or parquet
    (docs/report.md), metrics.jsonl, offline wandb runs and tensorboard files.
    """
    with importing():  # torch
        from mis_plugins.report.command import run

    return run(arguments)


def hosts_check(arguments: argparse.Namespace) -> int:
    """What of a host's source our hooks need: found or not, by hook, with file and line.

    CHECKOUT is the root of a checkout of Miles, slime or vime. Its source is read, and never imported or run. The
    command also names flags of our launch scripts that nothing there defines any more.

    Exit codes: 0 all is found where our own runs found it; 1 something moved, and is served; 2 a hook or a script of
    ours would fail, or there is no checkout.
    """
    from mis_plugins.hosts.checkout import run

    return run(arguments)


Run = Callable[[argparse.Namespace], str | int]
Arguments = dict[str, dict[str, Any]]

NAMED: Arguments = {"target": {"metavar": "PRESET_OR_FILE", "help": "a name of `config list`, or a path"}}
TARGET: Arguments = {"target": NAMED["target"] | {"help": "a name of `config list`, a path, or - for standard input"}}
FILE: Arguments = {"target": {"metavar": "FILE", "help": "what to translate; - is standard input"}}
FAMILY: Arguments = {"--family": {"help": "start, what presets do (token, ...), or a package (verl, ...)"}}
CHECKED: Arguments = TARGET | {
    "--host": {"choices": recorded, "help": "whose arguments and flags (default: Miles or slime on Megatron)"},
    "--preset": {"metavar": "PRESET_OR_FILE", "help": "what shall correct, of a launch script"},
}  # fmt: skip
WATCH: Arguments = {"--watch": {"action": "store_true", "help": "the file with which a run only watches"}}
TRANSLATED: Arguments = FILE | {
    "overrides": {"nargs": "*", "default": [], "metavar": "KEY=VALUE", "help": "settings that win over the file's"},
    "--line": {"type": count, "metavar": "N", "help": "the start of the training to read, of a script with several"},
}
DOCUMENTED: Arguments = {
    "--as-documented": {"action": "store_true", "help": "sequence_mask by ms-swift's document, not by its code"}
}
OPTIONS = ("--line", "--as-documented", "--help")
TRANSLATORS = ("from-verl", "from-ms-swift", "from-areal", "from-trl", "from-prime-rl")
SOURCES: Arguments = {
    "paths": {"nargs": "+", "type": Path, "metavar": "PATH", "help": "dumps, folders of dumps, logs of metrics"},
    "--config": {"metavar": "PRESET_OR_FILE", "help": "what the run was corrected with (default: nothing)"},
    "--sweep": {
        "default": "own", "metavar": "PRESETS",
        "help": "configs to try: own (this pack's presets; default), all, none, or presets and files with commas",
    },
}  # fmt: skip
OUTPUTS: Arguments = {
    "--output": {
        "type": Path, "default": Path("mismatch-report"), "metavar": "DIR",
        "help": "where to write (default: %(default)s)",
    },
    "--against": {
        "action": Gone,
        "successor": "call `report` once for each run, with an --output of its own, and compare the two report.json",
    },
    "--watch": {"action": "store_true", "help": "read again as the run goes on; exit 3 at the first alarm"},
    "--every": {"type": float, "metavar": "SECONDS", "help": "between two looks of --watch (default: 60)"},
}  # fmt: skip
BY_GIT = (
    "in the host's checkout, between `git bisect start BAD GOOD` and `git bisect reset`, git bisect run "
    "python -m mis_plugins hosts check . finds the commit"
)
CHECKOUT: Arguments = {
    "checkout": {"type": Path, "metavar": "CHECKOUT", "help": "the root of the host's source"},
    **dict.fromkeys(("--history", "--since"), {"action": Gone, "successor": BY_GIT}),
}  # fmt: skip
COMMANDS: dict[str, dict[str, tuple[Run, Arguments]]] = {
    "config": {
        "list": (names, FAMILY),
        "show": (show, TARGET),
        "check": (check, CHECKED),
        "path": (path, NAMED | WATCH),
        "from-verl": (from_verl, TRANSLATED),
        "from-ms-swift": (from_ms_swift, TRANSLATED | DOCUMENTED),
        "from-areal": (from_areal, TRANSLATED),
        "from-trl": (from_trl, TRANSLATED),
        "from-prime-rl": (from_prime_rl, TRANSLATED),
        "suggest": (suggest, SOURCES),
    },
    "report": {"": (report, SOURCES | OUTPUTS)},
    "hosts": {"check": (hosts_check, CHECKOUT)},
}
"""By group and command: its function, and its arguments. A command of no name is its group itself."""
GROUPS = {
    "config": "Find, read, check and translate configs.",
    "hosts": "Look through a host's source for what our hooks need.",
}
AS_WRITTEN = argparse.RawDescriptionHelpFormatter


def _words(text: str, called: str) -> str:
    """What a group or a command is for, with the examples of the module's docstring that call it."""
    examples = [line for line in (__doc__ or "").splitlines() if f" mis_plugins {called} " in line]
    return "\n".join([text, "", *examples])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mis_plugins", description=__doc__, formatter_class=AS_WRITTEN)
    add_version(parser)
    groups = parser.add_subparsers(required=True, metavar="|".join(COMMANDS), dest="group")
    for group, commands in COMMANDS.items():
        into = groups
        if group in GROUPS:
            text = GROUPS[group]
            made = groups.add_parser(group, help=text, description=_words(text, group), formatter_class=AS_WRITTEN)
            into = made.add_subparsers(required=True, metavar="|".join(commands))
        for name, (run, arguments) in commands.items():
            text = inspect.cleandoc(run.__doc__ or "")
            first, words = text.partition("\n")[0], _words(text, f"{group} {name}".strip())
            command = into.add_parser(name or group, help=first, description=words, formatter_class=AS_WRITTEN)
            command.set_defaults(run=run)
            for argument, options in arguments.items():
                choices = options.get("choices")  # a function where hosts may be registered later
                late: dict[str, Any] = {"choices": choices()} if callable(choices) else {}
                command.add_argument(argument, **(options | late))
    return parser

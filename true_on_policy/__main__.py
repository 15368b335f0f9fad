"""Prove that trainer and engine agree bit by bit, and search for the first difference.

    python -m true_on_policy verify --engine hf --trainer megatron      a proof on this machine, without a GPU
    python -m true_on_policy diff train_data/7_0.pt                     a host's dump: its engine beside its trainer
    python -m true_on_policy flags --miles --model qwen3-4B             what a launch on GPUs needs
    python -m true_on_policy doctor --engine http://HOST:30000          what both sides really run
    python -m true_on_policy weights --engine http://HOST:30000 --trainer CHECKPOINT

Exit codes: 0 equal; 1 different; 2 not compared, and stderr says why; 130 interrupted; 141 nobody reads the output; 143
ended by SIGTERM. An error is never 1.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("true_on_policy.__main__:main")

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from mis_plugins.errors import UserError
from mis_plugins.shared.shell import INTERRUPTED, add_version, importing, is_foreign, not_installed
from mis_plugins.shared.shell import REFUSED as FAILED
from mis_plugins.shared.terminal import print_error

# Each command is a subpackage; add_parser(subparsers) in its module `command` sets run(arguments) -> code.
COMMANDS = ("verify", "diff", "contract", "flags", "doctor", "weights")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(argv).parse_args(argv)
        return arguments.run(arguments)
    except (UserError, OSError) as error:
        print_error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # uncaught, Python would exit with 1, the code for "different"
        if isinstance(error, ModuleNotFoundError) and is_foreign(error):
            print_error(not_installed(error, "verify"))
        else:
            traceback.print_exc()
    return FAILED


class _Parser(argparse.ArgumentParser):
    """A parser whose description keeps its lines, as do those of its commands."""

    def __init__(self, **settings: Any):
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser with the command that `argv` names, or with every command where `argv` names none.

    A command that `argv` does not name is not imported: its libraries may be missing. `--version` imports no command.
    """
    parser = _Parser(prog="python -m true_on_policy", description=__doc__)
    add_version(parser)
    subparsers = parser.add_subparsers(required=True, metavar="|".join(COMMANDS))
    asked = [command for command in argv[:1] if command in COMMANDS]
    for command in asked or COMMANDS if argv[:1] != ["--version"] else ():
        with importing():
            module = import_module(f"true_on_policy.{command}.command")
        module.add_parser(subparsers)
    return parser

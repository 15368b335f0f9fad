"""Shell scripts, read by a parser of bash and never executed: what each start of train.py is given."""

from collections.abc import Sequence
from pathlib import Path

from mis_plugins.explain.launch.bash.shell import Shell
from mis_plugins.explain.launch.reader import Launch, Reading


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a shell script, which the user starts with `arguments`, NAME=VALUE first.

    It raises ConfigError where the script nests too deep, lines end in CR LF, or the parser of bash is not installed.
    """
    shell = Shell(path, reading)
    shell.run_script(script, arguments)
    return shell.found

"""Shell scripts, read by a parser of bash and never executed: what each start of train.py is given.

Variables, arrays, functions, heredocs and sourced files are followed.
"""

from collections.abc import Sequence
from pathlib import Path

from mis_plugins.explain.launch.bash.shell import Shell
from mis_plugins.explain.launch.reader import Launch, Reading


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a shell script.

    Args:
        path: where the script lies; files that it sources are looked for from there.
        arguments: what the user starts the script with: NAME=VALUE of its environment, then its own arguments.

    Raises:
        ConfigError: the script nests deeper than any launch script does, or the parser of bash is not installed.
    """
    shell = Shell(path, reading)
    shell.run_script(script, arguments)
    return shell.found

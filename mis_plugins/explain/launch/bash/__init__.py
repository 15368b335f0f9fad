"""Shell scripts, read by a parser of bash and never executed: what each start of train.py is given."""

from collections.abc import Sequence
from pathlib import Path

from mis_plugins.explain.launch.bash.shell import Shell
from mis_plugins.explain.launch.reader import Launch, Reading


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a shell script at `path`, from where the files that it sources are looked for.

    `arguments` are what the user starts the script with: NAME=VALUE of its environment, then its own arguments. A
    ConfigError says that the script nests too deep, that lines end in CR LF, or that no parser of bash is installed.
    """
    shell = Shell(path, reading)
    shell.run_script(script, arguments)
    return shell.found

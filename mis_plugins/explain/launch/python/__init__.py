"""Launchers in Python, read as a syntax tree and never executed: the command line that each start of train.py gets."""

import ast
import warnings
from collections.abc import Sequence
from pathlib import Path

from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.python.launcher import Launcher
from mis_plugins.explain.launch.reader import Launch, Reading


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a launcher, to which the user gives a command, where it has several, and options.

    It raises ConfigError where the launcher is no Python, nests deeper than any launcher, or takes no such option.
    """
    try:
        launcher = Launcher(script, path, reading, arguments)
        with warnings.catch_warnings(action="ignore"):  # Python's advice on the style of somebody's launcher
            tree = ast.parse(script.removeprefix("\ufeff"))
            compile(tree, "", "exec")  # refuses a `break` outside of a loop, which the tree alone allows
        for node in ast.walk(tree):  # `async` statements are read as if nothing ran beside them
            if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.TryStar):
                node.__class__ = getattr(ast, type(node).__name__.removeprefix("Async").removesuffix("Star"))
        launcher.run_everything(tree)
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: no Python ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ConfigError("nested deeper than any launcher; give a shell script that starts train.py") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return launcher.found

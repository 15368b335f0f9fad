"""Find the environment that install.sh made for an engine, and choose which variables its processes inherit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from mis_plugins.shared.loopback import on_loopback
from true_on_policy.errors import EngineError

HERE = Path(__file__).parent


def interpreter(engine: str) -> Path:
    """Return the python of an engine's environment: in .venv-ENGINE beside the package, or where ENGINE_VENV says.

    Raises:
        EngineError: the engine is not installed there.
    """
    variable = f"{engine.upper()}_VENV"
    folder = Path(os.environ.get(variable) or HERE.parent.parent / f".venv-{engine}")
    python = folder / "bin" / "python"
    if not python.exists():
        raise EngineError(
            f"{folder}: no {engine} there; run `bash {HERE / 'install.sh'} {engine}`, or set {variable}"
        )
    return python


def versions(engine: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in the engine's environment."""
    folders = [str(folder) for folder in interpreter(engine).parent.parent.glob("lib/python*/site-packages")]
    found = {found.name: found.version for found in distributions(path=folders)}
    return {name: found[name] for name in names}


# PYTHON and VIRTUAL_ lead Python into our environment; TRITON_INTERPRET, which our tests set, emulates a GPU.
WITHHELD = ("PYTHON", "VIRTUAL_", "TRITON_INTERPRET")


def inherited() -> dict[str, str]:
    """Return the variables of an engine on this machine: this process's, with torch.compile off, which changes bits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(WITHHELD)}
    eager = {"TORCH_COMPILE_DISABLE": "1"}
    return (
        kept | eager | on_loopback() | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    )

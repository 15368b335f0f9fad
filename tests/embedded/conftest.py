"""What several files of the embedded host's tests train on. Imports are lazy: Megatron's take seconds."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config under which weights truncate and sequences are dropped."""
    path = tmp_path_factory.mktemp("config") / "mis.yaml"
    path.write_text(
        "mis:\n"
        "  metrics: full\n"
        "  weight: {level: token, bound: truncate, upper: 1.1, normalize: {scope: data_parallel}}\n"
        "  reject: [{over: mean, lower: 0.9, upper: 1.1}]\n"
    )
    return path


@pytest.fixture(scope="session")
def recorded(yaml: Path) -> Any:
    """A rollout of the int3 engine."""
    from test_local_parallel import Grid, drawn, settings

    return drawn(settings(Grid(), yaml), "int3")


@pytest.fixture(scope="session")
def one_rank(yaml: Path, recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank makes of the recorded rollout: metrics and gradient of every step, and the weights at the end."""
    from test_local_parallel import Grid, settings, train

    return train(settings(Grid(), yaml), recorded, tmp_path_factory.mktemp("one"))

"""Tests of rollout engines, which have environments of their own: `bash scripts/test.sh --engines` asks for them."""

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.handover import FOLDER
from true_on_policy.engines.protocol import Engine
from true_on_policy.engines.server import HERE, interpreter
from true_on_policy.models.tiny import read_config

ROOT = Path(__file__).parents[2]
WANTED = bool(os.environ.get("MIS_TEST_ENGINES"))
collect_ignore_glob = [] if WANTED else ["test_*.py"]
MARK = "MIS_TEST_ENGINES_SESSION"
GRACE_SECONDS = 10.0


def pytest_report_header() -> list[str]:
    return [] if WANTED else ["not collected: tests/engines; run bash scripts/test.sh --engines"]


@pytest.fixture(autouse=True, scope="session")
def no_process_outlives_the_session() -> Iterator[None]:
    """What was started here inherited a mark, and so did its children; a process that is gone holds no port."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    yield
    end_helpers()
    deadline = time.monotonic() + GRACE_SECONDS
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not marked(mark), f"processes that nothing ended: {marked(mark)}"


def end_helpers() -> None:
    """Python's own, from which Megatron's ranks are forked; they would end with this process."""
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    resource_tracker._resource_tracker._stop()  # pyright: ignore[reportAttributeAccessIssue]


def marked(mark: str) -> list[str]:
    """Processes whose environment, as they were started, holds the mark; zombies have none."""
    return [_told(path.parent) for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path)]


def _told(process: Path) -> str:
    return f"{process.name}: {_read(process / 'cmdline')}".replace("\0", " ")[:200]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended meanwhile, or is another user's
        return ""


Ran = Callable[..., str]


@pytest.fixture(scope="session")
def ran_in_sglang() -> Ran:
    """ran(program, *arguments, folders=()): what a program of this folder prints in SGLang's own environment."""

    def ran(program: str, *arguments: object, folders: Sequence[Path] = ()) -> str:
        paths = os.pathsep.join(map(str, (ROOT, HERE / "sglang" / "stand_in", *folders)))
        done = subprocess.run(
            [interpreter("sglang"), "-W", "ignore", ROOT / "tests" / "engines" / program, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ran


@pytest.fixture(scope="session")
def engine_dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which engines say what they run, for the doctor."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("engines")
        patch.setenv(FOLDER, str(folder))
        yield folder


@pytest.fixture(scope="session")
def engine(tiny: Path, engine_dump: Path) -> Iterator[Engine]:
    """One pinned server for every test that brings its own requests, and for the verification that would start it."""
    contract = Contract(dtype="bf16", shapes=Shapes.of(read_config(tiny)))
    with closing(ENGINES["sglang"].start(tiny, contract, ORDERS["sglang"])) as engine:
        yield engine


@pytest.fixture(scope="session")
def stock(tiny: Path) -> Iterator[Engine]:
    """The same without our plugin: the control of every verification in bf16."""
    with closing(ENGINES["sglang"].start(tiny, Contract(dtype="bf16"), None)) as engine:
        yield engine

"""Settings every test shares: one thread a process, a repeatable hypothesis in CI, and no silent skips there.

Shapes are checked at run time by jaxtyping's own flag, which `scripts/test.sh` sets:
`--jaxtyping-packages mis_plugins,true_on_policy,shapes.checked`.
"""

import fnmatch
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every child process
# A control runs stock products, which have the pinned ones' bits where AMX makes them and they are short.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import hypothesis
import pytest
import torch
import triton_interpreter  # noqa: F401  (before anything imports triton)
import yaml
from commands import ConfigCommand, ProofCommand
from process_groups import destroy_process_groups
from stand_ins import write  # noqa: F401  (a fixture)

from mis_plugins import errors, mis
from mis_plugins.__main__ import main
from mis_plugins.config import file, view
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.hosts.step_report import Recorder

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
PEERS_INSTALLED = Path(sys.prefix, ".mis-plugins-peers").exists()  # scripts/peers.sh leaves it in what it makes
IN_CI = os.environ.get("CI", "").lower() == "true"
NO_DEVICE = "no CUDA device here: run `pytest -m gpu` where there is one"

# Of half a minute and more, the longest first: two workers that are handed whole files then end together.
LONG_FILES = [
    f"test_{name}.py"
    for name in (
        "sglang verify training vllm break_it readme parallel local_async async_controller local_true_on_policy toys "
        "runner partials gpu_engine real_model gpu_session benchmarks shell trainer_layouts cpu_kernels local_loop "
        "sglang_target in_host"
    ).split()
]

# Two test processes share two cores with forked ranks, so no test may depend on how long one example takes.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)


PEER_TESTS = ["peers/test_peers.py", "peers/test_peer_differences.py"]
collect_ignore = [] if PEERS_INSTALLED else PEER_TESTS


def pytest_report_header() -> list[str]:
    return [] if PEERS_INSTALLED else [f"not collected: {', '.join(PEER_TESTS)}; run bash scripts/peers.sh"]


def pytest_configure() -> None:
    torch.set_num_threads(1)
    hypothesis.settings.load_profile("ci" if IN_CI else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first; tests marked gpu are skipped, and counted among the skipped, where there is no device."""
    items.sort(key=_place)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


def _place(item: pytest.Item) -> int:
    return LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES)


def pytest_sessionstart() -> None:
    """Autograd counts devices once. After fake CUDA tensors a CUDA build finds one, and forked ranks no gradient."""
    if not torch.cuda.is_available():
        torch.zeros(1, requires_grad=True).sum().backward()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip whose reason is not in allowed_skips.txt fails the run."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if not IN_CI or terminal is None or hasattr(session.config, "workerinput"):
        return
    surprises = unexpected_skips([_reason(report) for report in terminal.stats.get("skipped", [])])
    for reason in surprises:
        terminal.write_line(f"skip not allowed in CI: {reason}; list it in tests/{ALLOWED_SKIPS.name}", red=True)
    if surprises:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unexpected_skips(reasons: list[str]) -> list[str]:
    """The reasons that match no line of allowed_skips.txt (shell patterns; `#` starts a comment)."""
    lines = (line.strip() for line in ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines())
    allowed = [line for line in lines if line and not line.startswith("#")]
    return [reason for reason in reasons if not any(fnmatch.fnmatchcase(reason, line) for line in allowed)]


def _reason(report: pytest.TestReport) -> str:
    """Without the `Skipped: ` that pytest puts before the reason."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The metrics of each optimizer step that a host's tracking would get."""
    from mis_plugins.hosts import tracking

    found: list[dict[str, float]] = []
    monkeypatch.setattr(tracking, "log", lambda args, metrics, *_: found.append(dict(metrics)))
    return found


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint."""
    from true_on_policy.models.tiny import checkpoint  # whose imports take seconds, and most tests need none of them

    return checkpoint("tiny-qwen3", tmp_path_factory.mktemp("tiny"), torch.bfloat16, seed=0)


@pytest.fixture(scope="session")
def tiny_fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint in float32."""
    from true_on_policy.models.tiny import checkpoint

    return checkpoint("tiny-qwen3", tmp_path_factory.mktemp("tiny-fp32"), torch.float32, seed=0)


@pytest.fixture
def said_once(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What is warned of once a process: the settings. The step report speaks of the data, and warns each time."""
    caplog.set_level(logging.WARNING, logger="mis_plugins")
    return lambda: [record.getMessage() for record in caplog.records if record.module == "errors"]


@pytest.fixture
def config_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> ConfigCommand:
    """Run `config COMMAND FILE OPTIONS` on a file with this content; what it printed, and it ended with `code`."""

    def run(content: str | dict, *options: str, command: str = "check", code: int = 0):
        file = tmp_path / "my config.yaml"
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        assert main(["config", command, str(file), *options]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def proof_command(capsys: pytest.CaptureFixture[str]) -> ProofCommand:
    """Run `python -m true_on_policy WORDS` in this process; what it printed, and it ended with `code`."""
    from true_on_policy.__main__ import main as proof

    def run(*words: object, code: int = 0):
        try:
            ended = proof([*map(str, words)])
        except SystemExit as stopped:
            ended = stopped.code
        assert ended == code
        return capsys.readouterr()

    return run


@pytest.fixture(autouse=True)
def own_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test records, the next does not read."""
    monkeypatch.setattr(mis, "RECORDER", Recorder())
    monkeypatch.setattr(ROLLOUT, "held", None)
    monkeypatch.setattr(ROLLOUT, "training", None)
    monkeypatch.setattr(file, "_GIVEN", {})
    view.LAST.clear()


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    """A warning that comes once a process comes once a test, in whatever order those run."""
    errors.warn_once.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_outlives_its_file() -> Iterator[None]:
    """Ranks that a later file forks would inherit it."""
    yield
    destroy_process_groups()

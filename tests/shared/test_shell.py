"""How every command ends in a shell: a reader that left, Ctrl-C, a package that is not installed, its version."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from commands import ROOT, ran

import mis_plugins

FILES = [
    file
    for folder in ("mis_plugins", "true_on_policy", "lab")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if '\nif __name__ == "__main__"' in file.read_text()
    and file != ROOT / "lab" / "size.py"  # a plain file, which runs with nothing installed
]
READ = {
    "list": "-m mis_plugins config list",
    "metrics": "-m lab.pages.metrics",
    "contract": "-m true_on_policy contract show qwen3-dense --backend megatron",
    "local help": "-m lab.host --help",
    "an error": "-m mis_plugins config check no-such-preset",
}


def command(words: str) -> list[str]:
    return [sys.executable, *words.split()]


@pytest.mark.parametrize(
    ("words", "unbuffered"), [*((words, "") for words in READ.values()), (READ["list"], "1"), (READ["an error"], "1")]
)
def test_nobody_reads(words: str, unbuffered: str) -> None:
    """Exit code 2 would mean "not good", and 1 "different"."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command(words), cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE)
    if words == READ["an error"]:  # it writes nothing that would go to the pipe
        assert done.returncode == 2 and b"no-such-preset" in done.stderr
    else:
        assert done.returncode == 141
        assert not re.search(b"pipe|Traceback|Exception", done.stderr)
    done = subprocess.run(command(words), cwd=ROOT, env=environment, stdout=writer, stderr=writer)
    assert done.returncode == 141
    os.close(writer)


CLOSED, FULL = (f"error: cannot write the output: {why}" for why in ("the shell has closed it", "No space left on dev"))
SHOW, CONTRACT = "mis_plugins config show tis", "true_on_policy contract show llama"


@pytest.mark.parametrize(
    ("words", "told"),
    [(f"{SHOW} >&-", CLOSED), (f"{CONTRACT} <&- >&-", CLOSED), ("mis_plugins config list --help >&-", CLOSED),
     (f"{SHOW} >/dev/full", FULL), ("true_on_policy --version >/dev/full", FULL), (f"{SHOW} >&- 2>/dev/full", ""),
     ("mis_plugins config check - <&-", "standard input: it is empty"),
     ("true_on_policy diff /none /none >&-", "/none: no such"), ("true_on_policy diff /none /none 2>&-", "")],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_told(words: str, told: str) -> None:
    run, environment = ["bash", "-c", f'"$0" -m {words}', sys.executable], os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(run, cwd=ROOT, capture_output=True, env=environment, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(told) and len(done.stderr.splitlines()) == bool(told), done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_is_full_for_now_is_written_whole(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = "import mis_plugins.shared.shell as s; main = lambda: print('x' * 10**6); s.run_command('__main__:main')"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=writer, env=environment) as done:
        os.close(writer)
        with open(reader) as file:
            assert len(file.read()) == 10**6 + 1
    assert done.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_told_at_once_to_a_file(unbuffered: str, tmp_path: Path) -> None:
    """Containers set PYTHONUNBUFFERED, and progress that stays in a buffer is none."""
    (tmp_path / "slow.py").write_text(
        "import os, sys\n"
        "def main():\n"
        "    print('50%', file=sys.stderr)\n"
        "    os._exit(0)  # nothing is flushed on the way out\n"
    )
    code = "from mis_plugins.shared.shell import run_command; run_command('slow:main')"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, env=environment, check=True)
    assert (tmp_path / "log").read_text() == "50%\n"


OF_MODULES = {
    "another broken pipe": ("def main():\n    raise BrokenPipeError('the engine')\n", 1, "(?s).*the engine"),
    **{f"no memory: {asks}": (f"import torch\ndef main(): {asks}", 2, "error: no memory left: .*ulimit -v")
       for asks in ("bytearray(2**60)", "torch.empty(2**55)")},
    "a missing module of ours": ("import mis_plugins.gone", 1, "(?s).*No module named 'mis_plugins.gone'"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "code", "told"), OF_MODULES.values(), ids=OF_MODULES)
def test_what_a_command_cannot_mend_ends_it(text: str, code: int, told: str, tmp_path: Path) -> None:
    """A broken pipe that is not the reader's, and a missing module of ours, are faults; no memory is told."""
    (tmp_path / "made.py").write_text(text)
    done = ran(
        "-c", "from mis_plugins.shared.shell import run_command; run_command('made:main', 'verify')", folder=tmp_path
    )
    assert done.returncode == code and re.match(told, done.stderr)


def test_a_run_that_nobody_reads_leaves_complete_files(tmp_path: Path) -> None:
    words = f"-m lab.host --smoke --output {tmp_path}/run"
    with subprocess.Popen(command(words), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (141, b"")
    assert '"status": "interrupted"' in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_command_ends_by_the_one_function(file: Path) -> None:
    """It is called before the imports that take seconds, so that Ctrl-C in them is one line."""
    text = file.read_text()
    module = ".".join(file.relative_to(ROOT).parts)
    guard = (
        r'^from __future__ import annotations\n\nif __name__ == "__main__":\n'
        r"    from mis_plugins.shared.shell import run_command\n\n"
        rf'    run_command\("{re.escape(module.removesuffix(".py"))}:\w+"'
    )
    assert re.search(guard, text, re.MULTILINE)


LONG = "-m lab.host --warmup-steps 100000 --context-parallel-size 2 --output"


def imports_torch(pid: int) -> bool:  # before, Python itself starts
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def has_ranks(pid: int) -> bool:
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) == 2


def interrupted(words: str, after: float, once: Callable[[int], bool]) -> tuple[int, str]:
    """Exit code and stderr of a command that gets Ctrl-C so many seconds after it does what `once` says.

    Every process of the command gets it, as from a terminal.
    """
    process = subprocess.Popen(
        command(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a script ignores it
    )
    while not once(process.pid):
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=120)
    assert out == ""
    return process.returncode, error


@pytest.mark.parametrize("after", [0, 0.8, 2.3])
def test_ctrl_c_while_modules_are_imported(after: float, tmp_path: Path) -> None:
    assert interrupted(f"{LONG} {tmp_path}/run --quiet", after, imports_torch) == (130, "interrupted\n")


def test_ctrl_c_while_the_policy_is_warm_started(tmp_path: Path) -> None:
    """The two ranks take a second to join each other; an interrupt waits for that."""
    assert interrupted(f"{LONG} {tmp_path}/run --quiet", 3, has_ranks) == (130, "interrupted\n")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Commands take an interrupt, also where the tests are a background job of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("torch", ("-c", "from mis_plugins.shared.shell import run_command; run_command('torch:main')")),
        ("torch", ("-m", "mis_plugins", "report", ".")),
        ("torch", ("-m", "mis_plugins", "config", "suggest", ".")),
        ("torch", ("-m", "mis_plugins", "config", "show", "mis")),
        ("matplotlib", ("-m", "mis_plugins", "report", "run.jsonl", "--sweep", "none")),
    ],
)
def test_ctrl_c_in_an_import_of_cpp_code_ends_the_process_at_once(
    library: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """A library may turn an exception in its import into a crash, or go on without an end."""
    (tmp_path / "run.jsonl").write_text('{"step": 0, "behavior_log_probs": [-0.5], "proximal_log_probs": [-0.4]}\n')
    (tmp_path / f"{library}.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except BaseException as error:\n"
        "    raise ImportError('recursion') from error\n"
    )
    done = ran(*words, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("module", ["mis_plugins", "lab.host", "lab.demo", "true_on_policy"])
def test_version(module: str) -> None:
    done = ran("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"mis-plugins {mis_plugins.__version__}\n")


HIDE = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.partition(".")[0] in {names} else super().find_spec(name, *rest)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
sys.argv = ["command", *{words}]
from mis_plugins.shared.shell import run_command
run_command({command!r}, {extra!r})
"""
EXTRAS = {"megatron", "numpy", "safetensors", "transformers", "rich", "matplotlib"}
LOCAL, VERIFY = ("lab.host.__main__:main", "verify"), ("true_on_policy.__main__:main", None)
CORRECTS = ("mis_plugins.__main__:main", None)


@pytest.mark.parametrize(
    ("hidden", "program", "words", "extra"),
    [
        (EXTRAS, LOCAL, "--smoke", "verify"),
        ({"matplotlib"}, LOCAL, "--smoke", "verify"),
        (EXTRAS, ("lab.demo:main", "verify"), "--smoke", "verify"),
        (EXTRAS, VERIFY, "verify --engine hf --trainer megatron", "verify"),
        ({"numpy"}, CORRECTS, "config suggest run.jsonl", "report"),
        ({"numpy"}, CORRECTS, "report run.jsonl", "report"),
        ({"matplotlib"}, CORRECTS, "report run.jsonl", "report"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_with_its_extra(
    hidden: set[str], program: tuple[str, str | None], words: str, extra: str, tmp_path: Path
) -> None:
    record = {"step": 0, "behavior_log_probs": [-1.0], "proximal_log_probs": [-1.0], "loss_mask": [1]}
    (tmp_path / "run.jsonl").write_text(json.dumps(record))
    code = HIDE.format(names=hidden, words=words.split(), command=program[0], extra=program[1])
    done = ran("-c", code, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2 and "demo is not" not in done.stderr
    assert re.fullmatch(
        rf"(loading .*\n|error: )?\w+ is not installed; pip install 'mis-plugins\[{extra}\]' .*\n", done.stderr
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("verify --engine hf --trainer hf --model nope", "choose one of tiny-qwen3"),
        ("verify --engine hf --trainer hf --model {folder}", "made-up; the contract covers"),
        ("doctor --model qwen3-9000B", "qwen3-9000B"),
    ],
)
def test_a_wrong_model_is_refused_before_torch_is_imported(words: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "made-up"}')
    given = words.format(folder=tmp_path).split()
    done = ran("-c", HIDE.format(names={"torch"}, words=given, command=VERIFY[0], extra=None))
    assert done.returncode == 2 and why in done.stderr


@pytest.mark.parametrize(
    ("command", "successor"),
    [
        ("mis_plugins report x --against y", "call `report` once for each run"),
        ("mis_plugins hosts check x --history", "git bisect run python -m mis_plugins hosts check ."),
        ("mis_plugins hosts check x --since 2026-03-01", "git bisect run python -m mis_plugins hosts check ."),
        ("true_on_policy verify --engine hf --trainer hf --picture p.png", "lab.certificate_picture FILE"),
    ],
)
def test_an_argument_that_is_gone_names_its_successor(
    command: str, successor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package, *words = command.split()
    flag = next(word for word in reversed(words) if word.startswith("--"))
    with pytest.raises(SystemExit, match="2"):
        import_module(f"{package}.__main__").main(words)
    told = capsys.readouterr().err
    assert f"error: {flag} is gone: " in told and successor in told

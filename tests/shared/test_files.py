"""Files are written whole, whatever ends the process: SIGKILL at every call of the system, a signal, a full disk."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mis_plugins.shared.arrays import save_safetensors
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.files import PREFIX, check_writable, finish_killed, replace_together, replaced, write_text

NAMES = ["report.json", "report.html"]
CALLS = {"open", "fcntl.flock", "tempfile.mkdtemp", *(f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir",
         "chmod", "chown", "listdir", "scandir", "utime"))}  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL leaves the kernel's memory as it is, so that nothing need wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def in_child(work: Callable[[], object]) -> int:
    """Run a function in a forked process, and return its status."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1]


def killed_at(step: int, work: Callable[[], object]) -> int:
    """The status of a process that gets SIGKILL at its call number `step` of open, rename, remove and the like."""
    calls = iter(range(step))

    def count(event: str, _: tuple) -> None:
        if event in CALLS and next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted() -> None:
        sys.addaudithook(count)
        work()

    return in_child(counted)


def kills(work: Callable[[], object]) -> Iterator[None]:
    """Kill a process at its first call, at its second, and so on, until it ends by itself."""
    step = 0
    while killed_at(step, work) == signal.SIGKILL:
        yield
        step += 1
    assert step > 10


def partials(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


def runs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_kill_at_any_call_leaves_files_of_one_run(tmp_path: Path) -> None:
    old, new = dict.fromkeys(NAMES, "old"), dict.fromkeys(NAMES, "new")
    seen = set()
    replace_together(tmp_path, old)
    for _ in kills(lambda: replace_together(tmp_path, new)):
        assert len(set(runs(tmp_path).values())) <= 1
        finish_killed(tmp_path)
        assert partials(tmp_path) == []
        found = runs(tmp_path)
        assert found in (old, new)
        seen.add(found["report.html"])
        replace_together(tmp_path, old)
    assert seen == {"old", "new"} and runs(tmp_path) == new


def test_a_kill_at_any_call_leaves_a_whole_file_behind_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "disk" / "file", tmp_path / "link"
    write_text(file, "old")
    link.symlink_to(file)
    for _ in kills(lambda: write_text(link, "new" * 1000)):
        assert link.is_symlink() and file.read_text() in ("old", "new" * 1000)
        finish_killed(file.parent)
        assert partials(file.parent) == []
        write_text(link, "old")


def test_what_a_live_process_writes_is_left_alone(tmp_path: Path) -> None:
    def clean() -> None:
        finish_killed(tmp_path)
        os._exit(len(partials(tmp_path)))

    with replaced(tmp_path / "file") as partial:
        partial.write_text("whole")
        assert os.waitstatus_to_exitcode(in_child(clean)) == 1
    assert (tmp_path / "file").read_text() == "whole" and partials(tmp_path) == []


def test_what_another_machine_left_goes_after_a_day(tmp_path: Path) -> None:
    young, old, link = (tmp_path / f"{PREFIX}{name}" for name in ("young", "old", "link"))
    for folder in (young, old):
        (folder / "complete").mkdir(parents=True)
        (folder / "complete" / "mine").write_text("a stranger's")
    link.symlink_to(young)
    os.utime(old, (0, 0))
    finish_killed(tmp_path)
    assert sorted(partials(tmp_path)) == [link, young] and not (tmp_path / "mine").exists()


def test_a_link_stays_and_its_target_keeps_its_mode(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    dangling.symlink_to("absent")
    write_text(link, "new")
    write_text(dangling, "made")
    assert link.is_symlink() and target.read_text() == "new" and (tmp_path / "absent").read_text() == "made"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    replace_together(tmp_path, {"link": "newer", "plain": "newer"})
    assert link.is_symlink() and target.read_text() == (tmp_path / "plain").read_text() == "newer"


def test_what_the_shell_holds_open_is_written_into(tmp_path: Path) -> None:
    link, file = tmp_path / "out", tmp_path / "file"
    link.symlink_to("/dev/stdout")
    code = "import sys; from pathlib import Path; from mis_plugins.shared.files import write_text\n"
    code += "write_text(Path(sys.argv[1]), 'text')"
    with file.open("w") as stdout:
        subprocess.run([sys.executable, "-c", code, link], stdout=stdout, check=True)
        assert os.fstat(stdout.fileno()).st_ino == file.stat().st_ino
    assert file.read_text() == "text" and link.is_symlink()


def limited(bytes_a_file: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, bytes_a_file))


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda file: write_text(file, "x" * 9000), "the file takes 9,000 bytes"),
        (lambda file: replace_together(file.parent, {file.name: "x" * 9000}), "the file takes 9,000 bytes"),
        (lambda file: save_safetensors(file, {"a": torch.zeros(3000)}), "12,000 bytes of tensors"),
        (lambda file: pt(file), "a part of it; the file ended after"),
    ],
)
def test_a_full_disk_is_told_with_file_and_bytes(write: Callable, told: str, tmp_path: Path) -> None:
    file, answer = tmp_path / "file", tmp_path / "answer"
    file.write_text("old")

    def work() -> None:
        limited(4096)
        try:
            write(file)
        except RecordError as error:
            answer.write_text(str(error))

    assert in_child(work) == 0
    assert answer.read_text().startswith(f"{file}: ") and told in answer.read_text()
    assert file.read_text() == "old" and partials(tmp_path) == []


def pt(file: Path) -> None:
    with replaced(file) as partial:
        torch.save(torch.zeros(3000), partial)


def test_a_full_device_is_told(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RecordError, match=f"full: .*{os.strerror(errno.ENOSPC)}; the file takes 3 bytes"):
        write_text(tmp_path / "full", "abc")


@pytest.mark.parametrize("name", ["/proc/none", "/proc/file", "/sys/file"])
def test_a_place_where_no_file_can_be_made_is_told(name: str) -> None:
    for write in (lambda: write_text(Path(name, "x"), "a"), lambda: check_writable(Path(name, "x"), "--json")):
        with pytest.raises(RecordError, match=f"{name}/x: (cannot be written|the folder of the file)"):
            write()


WAITING = """
import os, time
from pathlib import Path
from mis_plugins.shared.files import replaced
def main():
    try:
        with replaced(Path("file")) as partial:
            partial.write_text("half")
            os.write(1, b"writing\\n")  # print may be within its flush when the signal comes, and would write again
            time.sleep(60)
    finally:
        print("cleaned")
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated\n"), (signal.SIGINT, 130, "interrupted\n")]
)
def test_a_signal_removes_partial_files(number: int, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    # A shell's job in the background ignores Ctrl-C.
    run = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    run += "from mis_plugins.shared.shell import run_command; run_command('waiting:main')"
    process = subprocess.Popen(
        [sys.executable, "-c", run], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    assert partials(tmp_path)
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("cleaned\n", said) and process.returncode == code
    assert partials(tmp_path) == [] and not (tmp_path / "file").exists()

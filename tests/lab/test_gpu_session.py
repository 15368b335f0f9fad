"""The session for a lent GPU, as far as it can be seen without one: a dry run, and how its sections end."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, ran
from triton_interpreter import UNAVAILABLE

from lab import gpu_session
from lab.gpu import cost, hostile, kernels, receipt, sections, sglang_server
from lab.gpu.machine import Cuda
from lab.gpu.plan import TINY
from lab.gpu.receipt import Result, Section, exit_code
from lab.provenance import provenance
from true_on_policy.errors import NotSeenError, ProbeError

RUN = ROOT / "scripts" / "gpu" / "run.sh"
EQUAL = Result("equal", ("what", "how many"), (("a | b", 3),), True)
HERE: Any = SimpleNamespace(device=torch.device("cpu"))
COST = Result("cost", ("what",), (("d",),))
DIFFERENT = Result("different", ("what",), (("c",),), False)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every section by name, each with its tables by title."""
    folder = tmp_path_factory.mktemp("session")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [
            *("bash", str(RUN), str(folder / "no wheels"), str(folder / "results")),
            *("--dry-run", "--sections", *sections.SECTIONS),
        ],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = receipt.read(folder / "results" / "receipt.json")
    assert found.measured.device == "cpu" and not found.first_difference()
    assert "## cost: done" in receipt.drawn(found)
    return {section.name: asdict(section) for section in found.sections}


def table(section: dict[str, Any], title: str) -> list[dict[str, Any]]:
    found = next(result for result in section["results"] if result["title"].startswith(title))
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


needs_triton = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)


@needs_triton
def test_what_is_demanded_is_compared_and_its_control_differs(dry_run):
    pinned, stock = (table(dry_run["model"], f"A Qwen3 on {name}") for name in ("pinned", "stock"))
    assert [(row["equal"], row["of"]) for row in pinned] == [(10, 10), (6, 6)]
    assert stock[1]["equal"] < stock[1]["of"] == 6
    titles = ("FlashAttention-3: appended", "Findings: appended")
    rows = [row for title in titles for row in table(dry_run["attention"], title)]
    split = {row["call"]: row["different"] for row in rows}
    assert split["one split, causal tiles"] == 0 < split["FA3 chooses the splits"]
    assert split["one split, a lone query"] > 0
    for title in ("Pinned: Megatron-core's mode", "Pinned: DeepGEMM"):
        assert all(row["comparisons"] == row["equal"] == 3 for row in table(dry_run["kernels"], title))
    in_force = {row["setting"]: row["in force"] for row in table(dry_run["kernels"], "The pin")}
    assert in_force["megatron: batch-invariant flag"] == "on"
    assert in_force["flash_attention: FA3 module"] == "fa3_fwd_interface"


@needs_triton
def test_an_engine_is_compared_with_its_trainer_and_its_controls_differ(dry_run):
    """The engine is a stand-in; tests/engines has the section around a real SGLang."""
    links = table(dry_run["engine"], "SGLang's on-policy target")
    assert [(row["equal"], row["of"]) for row in links] == [(14, 14)] * 3
    (deterministic,) = table(dry_run["engine"], "SGLang, deterministic")
    assert deterministic["equal"] == deterministic["of"] == 7
    for title in ("SGLang, stock", "The same trainer on stock kernels"):
        (control,) = table(dry_run["engine"], title)
        assert control["equal"] < control["of"] == 7


def test_a_server_runs_where_the_session_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    served: dict[str, Any] = {}
    monkeypatch.setattr(
        sglang_server.SGLang, "_serve", lambda self, *asked, seeded: served.update(asked=asked, seeded=seeded)
    )
    monkeypatch.setenv("PYTHONPATH", "/the/site")
    for mode, flags in sglang_server.MODES.items():
        sglang_server.OnGpu(tmp_path, mode)
        checkpoint, python, arguments, environment = served["asked"]
        assert (checkpoint, python, served["seeded"]) == (tmp_path, Path(sys.executable), mode != "stock")
        assert arguments[len(arguments) - len(flags) :] == [*flags]
        assert environment["PYTHONPATH"] == "/the/site"
    monkeypatch.delenv("PYTHONPATH")
    sglang_server.OnGpu(tmp_path, "stock")
    assert served["asked"][3]["PYTHONPATH"] == ""


def test_a_machine_without_megatron_is_told_of_and_no_error(monkeypatch: pytest.MonkeyPatch):
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert provenance()["megatron-core"] == "not installed"


def test_without_sglang_or_with_another_attention_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sglang_server.sglang, "version", lambda: None)
    with pytest.raises(NotSeenError, match="no SGLang is installed"):
        sglang_server.start(tmp_path, "stock")
    monkeypatch.setattr(sglang_server.sglang, "version", lambda: "sglang 0.5.17")
    monkeypatch.setattr(sglang_server.flash_attention, "interface", lambda: "fa3_fwd_interface")
    with pytest.raises(NotSeenError, match=r"fa3_fwd_interface, SGLang runs sgl_kernel\.flash_attn"):
        sglang_server.start(tmp_path, "stock")


@needs_triton
def test_the_correction_does_not_wait_and_a_loop_does(dry_run):
    waits = {row["way"]: row["waits for the device"] for row in table(dry_run["correction"], "The correction")}
    ours = [wait for way, wait in waits.items() if way.startswith("ours")]
    assert len(ours) == 6 and {*ours} == {"none"}
    assert "_local_scalar_dense" in waits["a loop, mis.yaml"]


@needs_triton
def test_random_cases_of_both_hooks_are_judged(dry_run):
    for title in ("The TIS hook", "The loss hook"):
        cases = {row["answer"]: row["cases"] for row in table(dry_run["hostile"], title)}
        assert cases["right"] > 0 and sum(cases.values()) == 20


def test_a_wrong_case_is_a_difference_that_a_receipt_names(monkeypatch: pytest.MonkeyPatch):
    answers = iter(["right"] * hostile.A_ROUND)

    def judge(case: Any) -> str:
        if said := next(answers, None):
            return said
        raise AssertionError("weight 0:0: got 1.0, expected 2.0")

    weights = hostile.room("weights")
    monkeypatch.setattr(weights, "judge", judge)
    monkeypatch.setattr(weights, "DEVICE", weights.DEVICE)  # the section sets both for the whole process
    monkeypatch.setattr(weights, "SHRINKS", True, raising=False)
    monkeypatch.setattr(hostile, "ROOMS", {"weights": "The TIS hook"})
    (found,) = hostile.hostile(replace(TINY, hostile=60.0), HERE)
    assert found.holds is False and exit_code([Section("hostile", "done", 0.0, (found,))]) == 1
    wrong = ("wrong", 1, "seed 1: weight 0:0: got 1.0, expected 2.0")
    assert found.rows == (("right", hostile.A_ROUND, ""), wrong)
    assert {*receipt.OPERATIONS_FIRST} - {"compiled"} == {*sections.SECTIONS} - {"ceilings", "cost"}


@needs_triton
def test_every_kernel_has_its_cost(dry_run):
    titles = ("Cost: Kernels", "Cost: Attention", "Cost: A model", "Cost: DeepGEMM")
    rows = [row for title in titles for row in table(dry_run["cost"], title)]
    kernels = {row["kernel"].partition(";")[0] for row in rows}
    assert kernels == {
        *("linear", "RMSNorm", "log_softmax, float32", "prefill", "decode"),
        *("log-prob forward", "training step"),
    }
    for row in rows:
        stock = (row["stock ms"] + row["again ms"]) / 2
        assert row["pinned / stock"] == pytest.approx(row["pinned ms"] / stock)


def section(ended: str, *found: Result) -> Section:
    return Section("model", ended, 1.0, found)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([section("done", EQUAL)], 0),
        ([section("done", EQUAL, DIFFERENT)], 1),
        ([section("crashed", DIFFERENT), section("done", EQUAL)], 1),
        ([section("done", EQUAL), section("crashed", EQUAL)], 2),
        ([section("not seen: no FlashAttention-3 is installed")], 2),
        ([], 2),
        ([section("done", COST)], 2),
        ([section("done", COST), section("done", EQUAL)], 0),
    ],
)
def test_exit_code(found: list[Section], code: int):
    assert exit_code(found) == code


def ends(monkeypatch: pytest.MonkeyPatch, work, seconds: float = 60) -> Section:
    """How a section ends that does this work, in a forked process as on the device."""
    monkeypatch.setattr(sections, "load", lambda name: work)
    return sections.run("model", seconds, dry_run=False)


def raising(error: Exception):
    def work(plan, machine) -> Iterator[Result]:
        yield EQUAL
        raise error

    return work


def test_a_section_that_fails_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch):
    ended = ends(monkeypatch, raising(ValueError("no such shape")))
    assert (ended.ended, ended.results) == ("failed: ValueError: no such shape", (EQUAL,))
    assert ends(monkeypatch, raising(NotSeenError("not seen: no DeepGEMM"))).ended == "not seen: no DeepGEMM"


def test_a_section_that_crashes_or_hangs_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch):
    def crash(plan, machine) -> Iterator[Result]:
        yield EQUAL
        os._exit(139)

    def hang(plan, machine) -> Iterator[Result]:
        yield EQUAL
        time.sleep(600)

    assert ends(monkeypatch, crash).ended == "crashed"
    hung = ends(monkeypatch, hang, seconds=1)
    assert (hung.ended, hung.results) == ("cut off after 1 s", (EQUAL,))
    assert hung.seconds < 30


def test_sections_share_the_seconds_of_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A lent machine is taken back whatever still runs: none gets more than is left."""
    asked: list[float] = []
    monkeypatch.setattr(sections, "run", lambda name, seconds, dry_run: asked.append(seconds) or section("done", EQUAL))
    options = ["--receipt", str(tmp_path / "x.json"), "--dry-run", "--seconds", "50", "--commit", "abc"]
    assert gpu_session.main([*options, "--sections", "ceilings", "cost"]) == 0
    assert asked[0] == sections.SECTIONS["ceilings"] and asked[1] <= 50
    assert receipt.read(tmp_path / "x.json").measured.commit == "abc"


def test_a_place_that_cannot_be_written_to_costs_no_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sections, "run", lambda *asked: pytest.fail("ran"))
    monkeypatch.setattr(sections, "warming", lambda *asked: pytest.fail("warmed"))
    with pytest.raises(OSError):
        gpu_session.main(["--receipt", str(tmp_path / "file" / "x.json"), "--dry-run"])


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_beside_the_sections_and_may_fail(fails: bool, monkeypatch, tmp_path: Path, capfd):
    def warm(plan, machine) -> None:
        (tmp_path / "warm").touch()
        if fails:
            raise RuntimeError("no nvcc")
        time.sleep(600)

    monkeypatch.setattr(kernels, "warm", warm)
    start = time.monotonic()
    with sections.warming(dry_run=False):
        while not (tmp_path / "warm").exists():
            assert time.monotonic() - start < 60
            time.sleep(0.01)
        if fails:
            time.sleep(0.5)
    assert time.monotonic() - start < 60
    assert ("no nvcc" in capfd.readouterr().err) == fails


def test_what_is_compiled_is_what_is_measured(monkeypatch: pytest.MonkeyPatch):
    asked: set[tuple[int, ...]] = set()
    monkeypatch.setattr(kernels, "COLUMNS", 8)
    monkeypatch.setattr(kernels.gpu, "PROBED", TINY.size)
    monkeypatch.setattr(kernels.deep_gemm, "version", lambda: "here")

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        asked.add((len(x), *weight.shape))
        return F.linear(x, weight)

    monkeypatch.setattr(kernels.deep_gemm, "product", product)
    kernels.warm(TINY, HERE)
    warmed, asked = asked, set()
    list(kernels._agreement(TINY, HERE))
    for rows in TINY.timed_rows:
        for case in cost._products(rows, HERE, cost.GEMM, kernels.deep_gemm.product):
            case.make()[1]()
    assert asked and asked <= warmed


def test_without_git_and_nvidia_smi_a_session_still_says_what_it_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = gpu_session.measured_with(gpu_session.parse(["--receipt", "x"]))
    assert (found.commit, found.device) == ("unknown", "cuda")
    assert found.gpu.startswith("not seen: ") and "nvidia-smi" in found.gpu


def test_the_session_asks_cuda_nothing_before_it_forks(monkeypatch: pytest.MonkeyPatch):
    """After a single `torch.cuda.is_available()` torch refuses CUDA to every child."""
    questions = [(torch.cuda, name) for name in ("is_available", "device_count", "_lazy_init")]
    for owner, name in (*questions, (torch.accelerator, "current_accelerator")):
        monkeypatch.setattr(owner, name, lambda *asked, name=name: pytest.fail(f"asked {name}"))
    assert gpu_session.measured_with(gpu_session.parse(["--receipt", "x"])).torch


# Of python3: what it answers when asked for wheels, for the help of the session, and for the session.
PYTHON3 = """#!/bin/sh
case "$*" in
*"pip download"*) exit {fetched} ;;
*--help*) exit {imported} ;;
*lab.gpu_session*) exit {session} ;;
esac
"""


def run_script(folder: Path, wheels: Path, programs: dict[str, str], environment: Mapping[str, str]) -> int:
    """The exit code of run.sh, with these programs first on PATH."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = ["bash", str(RUN), str(wheels), str(folder / "results")]
    return subprocess.run(command, env={**environment, "PATH": f"{folder}:{os.environ['PATH']}"}).returncode


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ({}, 0),
        ({"session": 1}, 1),
        ({"session": 2}, 2),
        ({"session": 137}, 2),
        ({"fetched": 1}, 2),
        ({"imported": 1}, 2),
    ],
)
def test_exit_code_of_the_script(tmp_path: Path, answers: dict[str, int], code: int):
    """Around programs that end as told: 1 is a difference, and nothing else."""
    programs = {"python3": PYTHON3.format(**(dict.fromkeys(("fetched", "imported", "session"), 0) | answers))}
    assert run_script(tmp_path, tmp_path / "no wheels", programs, os.environ) == code


def test_sections_share_what_deep_gemm_compiles_also_without_a_home(tmp_path: Path):
    """DeepGEMM's own choice without HOME is a relative path, from which nvcc finds nothing."""
    told = f'#!/bin/sh\necho "$DG_JIT_CACHE_DIR" >>{tmp_path}/seen\n'
    (tmp_path / "deep_gemm.whl").touch()
    assert run_script(tmp_path, tmp_path, {"python3": told}, {}) == 0
    folders = (tmp_path / "seen").read_text().split()
    assert len(set(folders)) == 1 and Path(folders[0]).is_absolute()


def test_the_script_unpacks_what_was_carried_and_asks_nvcc_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "carried.py").touch()
    (tmp_path / "parts").mkdir()
    subprocess.run(
        "tar -C site -c . | xz | split --bytes=100 --numeric-suffixes=1 --suffix-length=1 - parts/part.",
        shell=True,
        cwd=tmp_path,
        check=True,
    )
    assert len([*(tmp_path / "parts").iterdir()]) > 1
    asks = f"""#!/bin/sh
case "$*" in
*tarfile*) exec {sys.executable} "$@" ;;
*lab.gpu_session*) echo "$CUDA_HOME" >{tmp_path}/cuda; {sys.executable} -c 'import carried' ;;
esac
"""
    nvcc = "#!/bin/sh\necho '#$ _SPACE_= ' >&2\necho '#$ _HERE_=/opt/cuda-13/bin' >&2\n"
    programs = {"python3": asks, "nvcc": nvcc}
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert run_script(tmp_path, tmp_path / "parts", programs, os.environ) == 0
    assert (tmp_path / "cuda").read_text() == "/opt/cuda-13\n"


def test_the_script_says_what_it_lacks():
    done = subprocess.run(["bash", str(RUN), "wheels"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)


@contextmanager
def refusing(contract) -> Iterator[None]:
    raise ProbeError("'megatron' does not hold")
    yield


def test_a_pin_that_does_not_hold_is_a_difference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "pinned", refusing)
    (found,) = kernels._contract()
    assert (found.holds, found.rows) == (False, (("probe", "'megatron' does not hold"),))


def test_the_device_watches_for_waits_and_stops_to(monkeypatch: pytest.MonkeyPatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError, match="synchronizing"), Cuda().without_waits():
        assert modes == ["error"]
        raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == ["error", "default"]


@needs_triton
def test_a_clock_is_asked_for_the_median(monkeypatch: pytest.MonkeyPatch):
    """By Triton's own function, whose arguments are those of the installed version."""
    from triton import testing  # pyright: ignore[reportMissingImports]

    asked: dict[str, Any] = {}
    real = inspect.signature(testing.do_bench)

    def clock(*args, **kwargs) -> float:
        asked.update(real.bind(*args, **kwargs).arguments)
        return 1.5

    monkeypatch.setattr(testing, "do_bench", clock)
    assert Cuda().milliseconds(list, 250) == 1.5
    assert (asked["fn"], asked["rep"], asked["return_mode"]) == (list, 250, "median")


def test_the_parent_never_touches_cuda():
    """A process that forks after CUDA's start leaves its children without it; transformers and Triton may start it."""
    code = "import sys, gpu_session; print({'torch', 'triton', 'transformers', 'megatron'} & set(sys.modules))"
    done = ran("-c", code, PYTHONPATH=f"{ROOT}:{ROOT / 'lab'}")
    assert done.stdout.strip() == "{'torch'}", done.stderr

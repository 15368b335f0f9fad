"""The size of the house beside its goals: lines, files, what the hook loads, tests, bytes, operators.

    python lab/size.py
    python lab/size.py --modules    the modules that a hook loads, the longest first
    python lab/size.py --rooms      what holds the lines of an install, of the lab and of the tests, and why

Runs as a plain file too, from any folder, with nothing of the pack installed. A row whose goal is missed is marked.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mis_plugins", "true_on_policy")
SEQUENCES, LENGTH = 256, 128
Row = tuple[str, int, int | None]  # what is counted, how much there is, the most that there shall be

CLOSURE = """
import logging, sys
from argparse import Namespace
import torch
from mis_plugins import mis

path, sequences, length = sys.argv[1], 2, 3
args = Namespace(use_tis=True, qkv_format="thd", custom_config_path=path, mis={"weight": {"upper": 2.0}},
                 custom_tis_function_path="mis_plugins.mis.compute_mis_weights_with_cp",
                 custom_megatron_before_train_step_hook_path="mis_plugins.mis.report_step")
rows = lambda: [-torch.rand(length) for _ in range(sequences)]
for step in range(2):
    mis.report_step(args, 0, step, None, None, None)
    mis.compute_mis_weights_with_cp(
        args, pg_loss=torch.ones(sequences * length), train_log_probs=rows(), rollout_log_probs=rows(),
        loss_masks=[torch.ones(length)] * sequences, total_lengths=[length + 1] * sequences,
        response_lengths=[length] * sequences,
    )
print(*(name for name in sys.modules if name.split(".")[0] in ("mis_plugins", "true_on_policy", "lab")))
"""


def python_files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def closure() -> dict[str, int]:
    """The lines of each module of ours that a process has loaded after two corrected calls with `report_step`."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "mis.yaml"
        config.write_text("use_tis: true\nmis: {weight: {upper: 2.0}}\n")
        command = [sys.executable, "-c", CLOSURE, str(config)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the hook did not run, so that nothing can be said of what it loads: {done.stderr}")
    return {name: lines([_file_of(name)]) for name in done.stdout.splitlines()[-1].split()}


def _file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_functions() -> int:
    """Functions of tests; a parametrized one counts once."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in python_files("tests"))
    return sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for tree in trees for node in ast.walk(tree)
    )


def cases() -> int:
    """Cases that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return sum("::" in line for line in done.stdout.splitlines())


def bytes_of_tree() -> int:
    """Bytes of the files that git has, as they lie on the disk."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = (ROOT / name for name in listed.stdout.split("\0") if name)
    return sum(file.lstat().st_size for file in files if file.exists())


def bytes_of_wheel() -> int | None:
    """Bytes of the newest wheel in `dist/`; None where none is built."""
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda file: file.stat().st_mtime)
    return wheels[-1].stat().st_size if wheels else None


def calls() -> Iterator[Row]:
    """Operators of a call of the hook, and of the reading of all that it hands back, by the tally."""
    sys.path.insert(0, str(ROOT))
    from lab import peer_cost
    from lab.tallies import tally
    from mis_plugins import mis
    from mis_plugins.hosts.step_report import Recorder

    kwargs = peer_cost.hook_kwargs([LENGTH] * SEQUENCES, 1, 0)
    mis.RECORDER = Recorder(step=(1, 0))
    for metrics, most in (("full", 70), ("all", 250)):
        args = peer_cost.hook_args(metrics)
        call = partial(mis.compute_mis_weights_with_cp, args, **kwargs)
        call()
        counted = tally(call)
        yield f"operators of a call, {SEQUENCES} x {LENGTH}, metrics: {metrics}", counted.operators, most
        yield f"waits of a call, metrics: {metrics}", sum(counted.waits.values()), 0
        if metrics == "all":
            yield f"files that a call moves through, metrics: {metrics}", len(files_entered(call)), 20


def files_entered(call: Callable[[], object]) -> set[str]:
    """The files of mis_plugins in which a function begins while a call runs."""
    package, entered = ROOT / "mis_plugins", set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and package in path.parents:
            entered.add(path.relative_to(package).as_posix())

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def rows() -> Iterator[Row]:
    """Everything that is counted, beside its goal."""
    own, loaded = python_files(*PACKAGES), closure()
    apart = ("mis_plugins.report", "mis_plugins.explain", "lab")
    yield "lines of mis_plugins and true_on_policy", lines(own), 30_000
    yield "files of mis_plugins and true_on_policy", len(own), 259
    yield "lines of true_on_policy", lines(python_files("true_on_policy")), 13_000
    yield "lines that the hook loads", sum(loaded.values()), 7_500
    yield "modules that the hook loads", len(loaded), 58
    yield "modules of report, explain and lab among them", sum(name.startswith(apart) for name in loaded), 0
    yield "lines of lab", lines(python_files("lab")), 17_500
    yield "lines of tests", lines(python_files("tests")), 30_000
    yield "test functions", test_functions(), None
    yield "cases of tests", cases(), None
    yield "bytes of the checked-out tree", bytes_of_tree(), 11_000_000
    if (wheel := bytes_of_wheel()) is not None:
        yield "bytes of the wheel", wheel, 600_000
    yield from calls()


def as_text(row: Row) -> str:
    name, count, most = row
    goal = "" if most is None else f"at most {most:,}" + (" MISSED" if count > most else "")
    return f"{name:<58}{count:>12,}  {goal}".rstrip()


HOLD = {
    "mis_plugins/hosts": "Miles of August and of this autumn, on Megatron, FSDP and torchtitan; slime; vime; checks of "
    "a config against arguments; versions of tokens; ranks that fail, lag or disagree; resplit; routing; baselines",
    "mis_plugins/explain": "launch scripts of bash and of Python, read without being run; files of five frameworks, "
    "each key told; a config as formula, in words, on six tokens",
    "mis_plugins/report": "strangers' files within a budget; curves, dumps of two hosts and ours; causes, proposal",
    "mis_plugins/config": "every refusal that keeps a wrong weight out",
    "mis_plugins/metrics": "over a hundred numbers of a step, merged over micro-batches and ranks",
    "true_on_policy/engines": "SGLang, vLLM and an engine in the process: started, pinned, asked, seen from inside",
    "true_on_policy/kernels": "four libraries on a GPU and tiles on a CPU: pinned, probed, undone",
    "mis_plugins/shared": "budgets for strangers' files, the terminal, spelling",
    "true_on_policy/diff": "two recordings, tensor by tensor, to the first operation that differs",
    "lab/host": "the embedded host, synchronous and asynchronous: README's main job, the demonstration, all ladders",
    "lab/*.py": "commands of one file each: costs beside peers, parity, mutants, the mismatch, walks, sizes, pictures",
    "lab/break_it": "the campaign against hostile input, sixteen rooms with an oracle each, the peers beside",
    "lab/in_host": "Miles's and slime's own loops on a CPU: 81 rows, what each must show, and faults in them",
    "lab/gpu": "the session on an H100 and its receipt",
    "lab/ladder": "mismatch by number format and preset: pages and pictures",
    "lab/parity": "both hosts' mis.py beside ours",
    "lab/pages": "pages that are made of records",
    "lab/experiments": "stale weights beside the on-policy gradient: the command of their page",
    "tests/hosts": "each hook of each host, and ranks that fail, lag or disagree over real processes",
    "tests/support": "float64 oracles that share no code with the product, batches, stand-ins of hosts and GPUs",
    "tests/embedded": "the embedded host",
    "tests/lab": "the lab's proofs, campaigns and records",
    "tests/report": "causes, verdicts and readers on planted runs and hostile files",
    "tests/loss": "the loss and its gradients beside an oracle, score centering",
    "tests/correction": "weights, rules and masks beside the oracle, over ranks",
    "tests/explain": "translators and launch scripts beside bash and the peers' packages",
    "tests/diff": "recordings that differ in one way each, and strangers' files",
    "tests/kernels": "pins and probes on a CPU and on stand-ins of a GPU",
    "tests/documents": "every page, sentence, command and figure",
    "tests/config": "every refusal, in its words",
    "tests/peers": "the peers' own packages as judges",
    "tests/verify": "certificates, and engines that answer wrongly",
}
"""Why a room holds what it holds: what README, docs and open issues promise that stands there and nowhere else."""


def by_room() -> str:
    """The lines of each room of an install, of the lab and of the tests, the largest first, and why it has them.

    The files beside the rooms of a package count as `PACKAGE/*.py`.
    """
    parts = []
    for packages in (PACKAGES, ("lab",), ("tests",)):
        folders = {f"{package}/{folder.name}" for package in packages for folder in (ROOT / package).iterdir()}
        counted = {name: lines(python_files(name)) for name in folders}
        counted |= {f"{package}/*.py": lines((ROOT / package).glob("*.py")) for package in packages}
        ordered = sorted((item for item in counted.items() if item[1]), key=lambda item: -item[1])
        parts.append("\n".join(f"{count:6,}  {name:<28}{HOLD.get(name, '')}".rstrip() for name, count in ordered))
    return "\n\n".join(parts)


def by_module(loaded: Mapping[str, int]) -> str:
    """The modules that the hook loads, the longest first."""
    ordered = sorted(loaded.items(), key=lambda item: -item[1])
    return "\n".join(f"{count:6,}  {name}" for name, count in ordered)


def main() -> int:
    """Print the table; with `--modules` what the hook loads, with `--rooms` what holds the lines."""
    if sys.argv[1:] == ["--modules"]:
        print(by_module(closure()))
        return 0
    if sys.argv[1:] == ["--rooms"]:
        print(by_room())
        return 0
    if sys.argv[1:]:
        print(__doc__, end="", file=sys.stderr)
        return 2
    for row in rows():
        print(as_text(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Would a test notice? One wrong sign, bound or mask at a time, and the tests that execute its line.

    python -m lab.mutation                  300 mutants of the math, the same ones each time; some 30 minutes
    python -m lab.mutation --files opsm.py  every mutant of the files of this name
    python -m lab.mutation --sample 0       every mutant: about two hours
    python -m lab.mutation --rooms packing config metrics hosts --sample 400 --matrix runs/kills.json
                                            other rooms, by file and by operator; which case kills which mutant

A mutant is killed by a test that fails, or that takes too long. Ctrl-C keeps what was found, and the next call goes on.
The first form writes the record lab/results/mutation.json; the others print, unless --results names a folder. A matrix
runs all cases of a mutant, not only up to the first that fails. It holds those of each mutant that fail.

Mutmut 3 and cosmic-ray 8 were tried first. Mutmut changes no function that has a decorator and no lambda of a table,
where much of this math stands. Cosmic-ray writes every mutant into the working tree and starts an interpreter for each,
with one set of tests for all.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.mutation:main", extra="dev")

import hashlib
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import hypothesis  # noqa: F401  (here once, and not in every child)
import jaxtyping  # noqa: F401
import pytest
import torch
import yaml

from lab.mutants import Mutant, mutants
from lab.provenance import as_given, as_markdown, markdown_table, measured_with, parser_of, write_record
from mis_plugins.shared.files import write_text
from mis_plugins.shared.numerals import count, whole
from mis_plugins.shared.provenance import REPOSITORY

MATH = ("correction", "config/terms", "loss", "versions")
ROOMS = (*MATH, "packing", "config", "metrics", "hosts")
GUARDS = ("tests/correction", "tests/terms", "tests/loss", "tests/versions", "tests/metrics", "tests/hosts")
BESIDE = {"config": "tests/config"}
"""Guards of a room beyond those of the math."""

SLOW = ("tests/correction/test_parallel.py", "tests/hosts/test_recorder_exit.py", "tests/metrics/test_slope.py")
RESULTS, SCRATCH = Path("lab/results"), Path("runs/mutation")
ARGUED = Path(__file__).with_name("argued_mutants.yaml")
SEED, SAMPLE = 17, 300
PATIENCE = 60.0
"""Seconds beyond three times what the tests take without a mutant."""

QUIET = ["-q", "-p", "no:cacheprovider"]


@dataclass(frozen=True)
class Guards:
    """Which tests execute a line of the math, and how long each test takes.

    lines: the names of tests, by file and line.
    seconds: the seconds of a test, by its name.
    """

    lines: Mapping[str, list[str]]
    seconds: Mapping[str, float]

    def of(self, mutant: Mutant) -> list[str]:
        """List the tests that may notice a mutant, quickest first; at import time, all tests of the file."""
        if mutant.in_function:
            found = set(self.lines.get(f"{mutant.path}:{mutant.line}", ()))
        else:
            mine = (tests for place, tests in self.lines.items() if place.startswith(f"{mutant.path}:"))
            found = {test for tests in mine for test in tests}
        return sorted(found, key=lambda test: (self.seconds[test], test))


class Tracer:
    """A pytest plugin: records which test executes which line of the math."""

    def __init__(self, files: Sequence[str]) -> None:
        self._names = {str(REPOSITORY / name): name for name in files}
        self._lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item.nodeid
        begun = time.monotonic()
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self._seconds[item.nodeid] = time.monotonic() - begun

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename in self._names else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        self._lines[self._names[frame.f_code.co_filename], frame.f_lineno].add(self._test)
        return self._line

    def write(self, path: Path, key: str) -> None:
        lines = {f"{name}:{line}": sorted(tests) for (name, line), tests in sorted(self._lines.items())}
        _write(path, {"key": key, "lines": lines, "seconds": self._seconds})


class Mutated(Loader):
    """Imports one module from the tree of a mutant, and everything else from its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._module = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, REPOSITORY / self._mutant.path, loader=self)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code(), module.__dict__)

    def code(self) -> CodeType:
        return compile(self._mutant.tree, str(REPOSITORY / self._mutant.path), "exec")


class Failures:
    """A pytest plugin: keeps the names of the cases that fail, or whose fixtures do, in a file."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # an interrupted run leaves its own
        self._path = path
        self._names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._names:
            self._names.append(report.nodeid)
            _write(self._path, self._names)


def in_child(work: Any) -> int:
    """Fork a silent process, in a group of its own, that exits with the result of `work`; return its id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    code = 99
    try:
        code = int(work())
    finally:
        os._exit(code)


def run_tests(tests: Sequence[str], plugins: Sequence[object] = (), to_the_end: bool = False) -> int:
    """Run tests in this process, after forgetting every imported module of this repository.

    Args:
        to_the_end: whether to go on after the first test that fails.
    """
    for name, module in list(sys.modules.items()):
        if _is_ours(getattr(module, "__file__", None)):
            del sys.modules[name]
    os.environ["CI"] = "true"  # hypothesis draws the same examples each time
    torch.set_num_threads(1)
    return pytest.main([*QUIET, *([] if to_the_end else ["-x"]), *tests], list(plugins))


def _is_ours(file: str | None) -> bool:
    """Whether a file is of this repository, and not of an environment within it."""
    path = Path(file or "/")
    return path.is_relative_to(REPOSITORY) and ".venv" not in path.parts


def warm(folders: Sequence[str]) -> None:
    """Import what the tests import, so that no child imports other people's packages again."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence), redirect_stderr(silence):
        run_tests([*folders, "--collect-only"])


def folders_of(rooms: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of tests that guard these rooms."""
    return (*GUARDS, *(folder for room, folder in BESIDE.items() if room in rooms))


def guards(files: Sequence[str], folders: Sequence[str], key: str) -> Guards:
    """Measure which test executes which line, unless a file holds this for the sources and tests of `key`."""
    path = SCRATCH / f"guards-{len(folders)}.json"
    held = json.loads(path.read_text()) if path.is_file() else {}
    if held.get("key") != key:
        print("running the tests once, to learn which executes which line", file=sys.stderr, flush=True)

        def trace() -> int:
            tracer = Tracer(files)
            code = run_tests([*folders, *(f"--ignore={name}" for name in SLOW)], [tracer])
            if code == 0:
                tracer.write(path, key)
            return code

        if _ended(in_child(trace)):
            sys.exit(f"error: the tests fail without a mutant; run python -m pytest {' '.join(folders)}")
        held = json.loads(path.read_text())
    return Guards(held["lines"], held["seconds"])


def _ended(child: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.killpg(child, signal.SIGKILL)
        raise


def start(mutant: Mutant, tests: Sequence[str], failures: Path | None) -> int:
    def work() -> int:
        sys.meta_path.insert(0, Mutated(mutant))  # type: ignore[arg-type]
        plugins = [Failures(failures)] if failures else []
        return run_tests(tests, plugins, to_the_end=failures is not None)

    return in_child(work)


@dataclass
class Running:
    """A child that tries one mutant.

    failures: the file where the child keeps the cases that fail; None where the first one is enough.
    """

    mutant: Mutant
    tests: int
    until: float
    failures: Path | None

    def killers(self) -> dict[str, list[str]]:
        """Return the cases that failed, as an entry of the fate."""
        if self.failures is None:
            return {}
        written = self.failures.is_file()
        names = json.loads(self.failures.read_text()) if written else []
        self.failures.unlink(missing_ok=True)
        return {"killers": names}


def fates(
    mutants: Sequence[Mutant], known: Guards, processes: int, matrix: bool = False
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Try mutants, `processes` at a time, and yield the fate of each as soon as it is known.

    Args:
        matrix: whether a fate names all cases that kill the mutant.
    """
    waiting, running = list(reversed(mutants)), dict[int, Running]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                mutant = waiting.pop()
                tests = known.of(mutant)
                if not tests:
                    yield mutant, {"fate": "survived", "tests": 0} | ({"killers": []} if matrix else {})
                    continue
                limit = PATIENCE + 3 * sum(known.seconds[test] for test in tests)
                failures = SCRATCH / f"failures-{len(waiting)}.json" if matrix else None
                child = start(mutant, tests, failures)
                running[child] = Running(mutant, len(tests), time.monotonic() + limit, failures)
            for child in list(running):
                fate = _fate(child, running[child])
                if fate is not None:
                    one = running.pop(child)
                    yield one.mutant, {"fate": fate, "tests": one.tests, **one.killers()}
            time.sleep(0.05)
    finally:
        for child in running:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fate(child: int, running: Running) -> str | None:
    """Return `killed`, `too slow` or `survived`; None while the child still runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
    if time.monotonic() < running.until:
        return None
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def sources(names: Sequence[str], rooms: Sequence[str] = MATH) -> list[str]:
    """List the files of these rooms, or only the files with the given names.

    Raises:
        SystemExit: no file of the rooms has one of the names.
    """
    paths = [path for room in rooms for path in sorted((REPOSITORY / "mis_plugins" / room).rglob("*.py"))]
    named = (str(path.relative_to(REPOSITORY)) for path in paths if path.name != "__init__.py")
    files = list(dict.fromkeys(named))  # config/terms lies within config
    unknown = [name for name in names if not any(file.endswith(f"/{name}") for file in files)]
    if unknown:
        known = ", ".join(Path(file).name for file in files)
        sys.exit(f"error: --files {' '.join(unknown)}: no such file of {', '.join(rooms)}; choose from {known}")
    return [file for file in files if not names or any(file.endswith(f"/{name}") for name in names)]


def by_file_and_operator(mutants: Sequence[Mutant], size: int) -> list[Mutant]:
    """Draw mutants in turn from each pair of file and operator, so that no long file or common operator fills a sample.

    The draw is seeded, and a smaller sample is the beginning of a larger one.
    """
    drawn = list(mutants)
    random.Random(SEED).shuffle(drawn)
    strata: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in drawn:
        strata[mutant.path, mutant.operator].append(mutant)
    turns = zip_longest(*strata.values())
    return [mutant for turn in turns for mutant in turn if mutant is not None][:size]


def digest(folders: Sequence[str]) -> str:
    """Return a hash of the content of all Python files in these folders."""
    paths = sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def report(
    files: Sequence[str], found: Mapping[str, Mapping[str, Any]], made_with: Mapping[str, str]
) -> dict[str, Any]:
    """Return the result by file, survivors by name, and mutants that `argued_mutants.yaml` argues, with reasons."""
    reasons = yaml.safe_load(ARGUED.read_text()) or {}
    alive = {name: one for name, one in found.items() if one["fate"] == "survived"}
    rows = {}
    for file in files:
        mine = [name for name in found if name.startswith(f"{file} ")]
        lived = [name for name in mine if name in alive]
        excused = [name for name in lived if name in reasons]
        rows[file] = {"mutants": len(mine), "killed": len(mine) - len(lived), "argued": len(excused)}
    return {
        "measured_with": dict(made_with),
        "files": rows,
        "survivors": sorted(name for name in alive if name not in reasons),
        "argued": {name: reasons[name] for name in sorted(alive) if name in reasons},
    }


def score(rows: Mapping[str, Mapping[str, int]]) -> str:
    """Write the share of killed mutants among the mutants that nobody argues."""
    total, killed, argued = (sum(row[key] for row in rows.values()) for key in ("mutants", "killed", "argued"))
    counted = total - argued
    return f"{killed} of {counted} mutants killed, {killed / max(counted, 1):.1%}; {argued} more are argued"


def markdown(content: Mapping[str, Any]) -> str:
    """The table by file, and the survivors."""
    rows = content["files"]
    counted = [(file, *row.values(), row["mutants"] - row["killed"] - row["argued"]) for file, row in rows.items()]
    table = markdown_table(("file", "mutants", "killed", "argued", "survived"), counted)
    lines = [
        "# Mutation score of the math",
        "",
        f"Made by `python -m lab.mutation`. **{score(rows)}.**",
        "A mutant is one wrong operator, constant, branch or call; only the tests that execute its line are asked.",
        "",
        table.rstrip(),
    ]
    lines += ["", "## Survivors", "", *(f"* {name}" for name in content["survivors"] or ["none"])]
    lines += ["", "## Argued: no input tells them apart, or a test that the command leaves out kills them", ""]
    lines += [f"* {name}: {why}" for name, why in content["argued"].items()]
    return "\n".join([*lines, "", as_markdown(content["measured_with"])])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sample", type=whole, default=SAMPLE, help="how many mutants; 0: all (default: %(default)s)")
    parser.add_argument("--files", nargs="+", default=[], metavar="NAME", help="every mutant of these files alone")
    parser.add_argument(
        "--rooms", nargs="+", choices=ROOMS, default=list(MATH), metavar="ROOM", help=f"of {', '.join(ROOMS)}"
    )
    parser.add_argument("--matrix", type=Path, metavar="FILE", help="where the cases that kill are written")
    parser.add_argument("--processes", type=count, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where a record is written")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    of_math = tuple(options.rooms) == MATH
    files, key = sources(options.files, options.rooms), digest(("mis_plugins", "tests"))
    chosen = sampled(files, options, of_math)
    made_with = measured_with(as_given("python -m lab.mutation", sys.argv[1:]), ("mis_plugins", "tests"))
    folders = folders_of(options.rooms)
    warm(folders)
    known = guards(sources([], ROOMS), folders, key)
    path = SCRATCH / f"{key}{'-matrix' if options.matrix else ''}.json"
    found = measure(chosen, known, options.processes, path, matrix=options.matrix is not None)
    if options.matrix:
        _write(options.matrix, {name: fate["killers"] for name, fate in found.items()})
    content = report(files, found, made_with)
    usual = RESULTS if of_math and not options.files and options.sample == SAMPLE else None
    if results := options.results or usual:
        write_record(results / "mutation.json", content, markdown(content))
    print(score(content["files"]), *(f"survived: {name}" for name in content["survivors"]), sep="\n")
    return 0


def sampled(files: Sequence[str], options: Any, of_math: bool) -> list[Mutant]:
    """Return all mutants of the files that are named, or as many as `--sample` says."""
    every = [mutant for file in files for mutant in mutants((REPOSITORY / file).read_text(), file)]
    if options.files or not options.sample:
        return every
    if not of_math:
        return by_file_and_operator(every, options.sample)
    random.Random(SEED).shuffle(every)  # a smaller sample is the beginning of a larger one
    return every[: options.sample]


def measure(
    chosen: Sequence[Mutant], known: Guards, processes: int, path: Path, matrix: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the fate of each mutant, by name; a fate that the file at `path` holds is not found again."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    missing = [mutant for mutant in chosen if mutant.name not in found]
    begun = time.monotonic()
    for number, (mutant, fate) in enumerate(fates(missing, known, processes, matrix), 1):
        found[mutant.name] = fate
        _write(path, found)
        left = (time.monotonic() - begun) / number * (len(missing) - number) / 60
        said = f"{number} of {len(missing)}, {left:.0f} minutes left; {fate['fate']}: {mutant.name}"
        print(said, file=sys.stderr, flush=True)
    return {mutant.name: found[mutant.name] for mutant in chosen}


def _write(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")

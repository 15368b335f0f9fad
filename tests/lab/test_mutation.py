"""The mutation score: which wrong programs are made of a file, which tests are asked, what a sample is."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lab import mutation
from lab.mutants import mutants

SOURCE = '''
"""Text."""
LIMIT = 20.0

def bounded(x: int = 1) -> bool:
    """More text."""
    assert x > 0
    if x < LIMIT:
        return not (x == 3 and x > 2)
    raise ValueError("x" + "y")
'''


def test_every_change_but_annotations_texts_and_assertions() -> None:
    assert [(one.place, one.changed) for one in mutants(SOURCE, "file.py")] == [
        ("module", "`20.0` -> `21.0`"),
        ("bounded", "`1` -> `2`"),
        ("bounded", "`if x < LIMIT:` -> `if not x < LIMIT:`"),
        ("bounded", "`x < LIMIT` -> `x <= LIMIT`"),
        ("bounded", "`not (x == 3 and x > 2)` -> `x == 3 and x > 2`"),
        ("bounded", "`x == 3 and x > 2` -> `x == 3 or x > 2`"),
        ("bounded", "`x == 3` -> `x != 3`"),
        ("bounded", "`3` -> `4`"),
        ("bounded", "`x > 2` -> `x >= 2`"),
        ("bounded", "`2` -> `3`"),
        ("bounded", "`raise ValueError('x' + 'y')` -> `pass`"),
    ]


def test_a_mutant_holds_one_change_and_leaves_the_file_alone() -> None:
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    for one in mutants(SOURCE, "file.py"):
        after = ast.unparse(one.tree).splitlines()
        assert sum(left != right for left, right in zip(before, after, strict=True)) == 1, one.name


def test_equal_changes_of_one_function_are_told_apart() -> None:
    names = [one.name for one in mutants("def f(x):\n    return x * 2 + 2\n", "file.py")]
    assert len(names) == len(set(names)) == 4


def test_what_runs_at_import_asks_every_test_of_the_file() -> None:
    known = mutation.Guards({"a.py:3": ["slow"], "a.py:6": ["quick"], "b.py:1": ["other"]}, {"slow": 2, "quick": 1})
    at_import, default, *_ = mutants("\nX = 1\ndef f(y=2):\n\n\n    return y + 3\n", "a.py")
    *_, in_body = mutants("\nX = 1\ndef f(y=2):\n\n\n    return y + 3\n", "a.py")
    assert known.of(at_import) == known.of(default) == ["quick", "slow"]
    assert known.of(in_body) == ["quick"]


def test_a_mutant_is_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "mis_plugins/config/terms/divergence.py"
    flipped = next(one for one in mutants((mutation.REPOSITORY / path).read_text(), path) if "k1" in one.place)
    monkeypatch.setattr(sys, "meta_path", [mutation.Mutated(flipped), *sys.meta_path])
    module = types.ModuleType("mis_plugins.config.terms.divergence")
    spec = sys.meta_path[0].find_spec("mis_plugins.config.terms.divergence")  # type: ignore[union-attr]
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module)
    assert module.k1(2) == 2 and sys.meta_path[0].find_spec("mis_plugins.config.terms.bounds") is None  # type: ignore[union-attr]


def test_a_survivor_with_a_reason_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.yaml"
    reasons.write_text('"a.py f: b": no input tells\n')
    monkeypatch.setattr(mutation, "ARGUED", reasons)
    found = {f"a.py f: {name}": {"fate": fate} for name, fate in zip("abcd", FATES, strict=True)}
    content = mutation.report(["a.py"], found, {"command": "python"})
    assert content["survivors"] == ["a.py f: d"] and content["argued"] == {"a.py f: b": "no input tells"}
    assert mutation.score(content["files"]) == "2 of 3 mutants killed, 66.7%; 1 more are argued"


FATES = ("killed", "survived", "too slow", "survived")


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(
        SystemExit, match=r"no\.py: no such file of correction, config/terms, .*; choose from m2po\.py, opsm\.py, pipe"
    ):
        mutation.sources(["no.py"])


def test_a_sample_takes_turns_of_files_and_operators() -> None:
    """A file of many mutants of one operator does not fill it, and a smaller one begins a larger one."""
    many = mutants("def f(x):\n" + "".join(f"    x = x + {i}.5\n" for i in range(20)), "many.py")
    every = [*many, *mutants("def g(x):\n    return not x > 1\n", "few.py")]
    drawn = mutation.by_file_and_operator(every, 8)
    assert {one.operator for one in drawn[:5]} == {"BinOp", "Constant", "UnaryOp", "Compare"}
    assert sum(one.path == "few.py" for one in drawn[:5]) == 3
    assert mutation.by_file_and_operator(every, 4) == drawn[:4]


@pytest.mark.parametrize("room", mutation.ROOMS)
def test_a_room_has_files_and_guards(room: str) -> None:
    assert mutation.sources([], [room])
    assert all((mutation.REPOSITORY / folder).is_dir() for folder in mutation.folders_of([room]))


def test_a_run_registers_the_embedded_host_anew(tmp_path: Path) -> None:
    """A run forgets the registry of hosts, and with it the module whose import registers the embedded host."""
    case = tmp_path / "test_case.py"
    case.write_text(
        "import lab.host\nfrom mis_plugins.hosts.registry import every_host\n"
        "def test_a():\n    assert 'embedded' in every_host()\n"
    )
    code = f"import lab.host; from lab import mutation; raise SystemExit(mutation.run_tests([{str(case)!r}]))"
    assert subprocess.run([sys.executable, "-c", code], cwd=mutation.REPOSITORY).returncode == 0


def test_a_matrix_names_every_case_that_kills_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three cases fail on the mutants; a second call asks no mutant whose fate the file holds."""
    (tmp_path / "test_cases.py").write_text(
        "import math\ndef test_a():\n    assert math.pi > 4\ndef test_b():\n    pass\ndef test_c():\n    1 / 0\n"
    )
    names = [f"{tmp_path}/test_cases.py::test_{letter}" for letter in "abc"]
    chosen = mutants("def f(x):\n    return x + 2\n", "file.py")
    known = mutation.Guards({"file.py:2": names}, dict.fromkeys(names, 0.1))
    monkeypatch.setattr(mutation, "SCRATCH", tmp_path)
    record = tmp_path / "found.json"
    (first, *_), found = chosen, {}
    found |= mutation.measure([first], known, 1, record, matrix=True)
    assert [name[-6:] for name in found[first.name]["killers"]] == ["test_a", "test_c"]
    monkeypatch.setattr(mutation, "fates", lambda missing, *_: iter([(one, {"fate": "new"}) for one in missing]))
    again = mutation.measure(chosen, known, 1, record, matrix=True)
    assert again[first.name] == found[first.name] and {fate["fate"] for fate in again.values()} == {"killed", "new"}


def test_cases_that_an_interrupted_run_left_kill_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_case.py").write_text("def test_a():\n    pass\n")
    (tmp_path / "failures-0.json").write_text('["a case of another mutant"]')
    monkeypatch.setattr(mutation, "SCRATCH", tmp_path)
    name = f"{tmp_path}/test_case.py::test_a"
    [mutant, *_] = mutants("def f(x):\n    return x + 2\n", "file.py")
    guards = mutation.Guards({"file.py:2": [name]}, {name: 0.1})
    assert list(mutation.fates([mutant], guards, 1, matrix=True)) == [
        (mutant, {"fate": "survived", "tests": 1, "killers": []})
    ]

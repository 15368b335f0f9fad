"""The mutation score: which wrong programs are made of a file, which tests are asked, what a sample is."""

from __future__ import annotations

import ast
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
    known = mutation.Guards(
        {"a.py:3": ["slow"], "a.py:6": ["quick"], "b.py:1": ["other"]}, {"slow": 2, "quick": 1}
    )
    at_import, default, *_ = mutants("\nX = 1\ndef f(y=2):\n\n\n    return y + 3\n", "a.py")
    *_, in_body = mutants("\nX = 1\ndef f(y=2):\n\n\n    return y + 3\n", "a.py")
    assert known.of(at_import) == known.of(default) == ["quick", "slow"]
    assert known.of(in_body) == ["quick"]


def test_a_mutant_is_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "mis_plugins/config/terms/divergence.py"
    flipped = next(
        one for one in mutants((mutation.REPOSITORY / path).read_text(), path) if "k1" in one.place
    )
    monkeypatch.setattr(sys, "meta_path", [mutation.Mutated(flipped), *sys.meta_path])
    module = types.ModuleType("mis_plugins.config.terms.divergence")
    spec = sys.meta_path[0].find_spec("mis_plugins.config.terms.divergence")  # type: ignore[union-attr]
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module)
    assert module.k1(2) == 2 and sys.meta_path[0].find_spec("mis_plugins.config.terms.bounds") is None  # type: ignore[union-attr]


def test_a_survivor_with_a_reason_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.yaml"
    reasons.write_text('"a.py f: b": no input tells\n')
    monkeypatch.setattr(mutation, "EQUIVALENT", reasons)
    found = {f"a.py f: {name}": {"fate": fate} for name, fate in zip("abcd", FATES, strict=True)}
    content = mutation.report(["a.py"], found, {"command": "python"})
    assert content["survivors"] == ["a.py f: d"] and content["equivalent"] == {"a.py f: b": "no input tells"}
    assert mutation.score(content["files"]) == "2 of 3 mutants killed, 66.7%; 1 more are equivalent"


FATES = ("killed", "survived", "too slow", "survived")


def test_an_unknown_file_is_refused() -> None:
    with pytest.raises(
        SystemExit, match=r"--files no\.py: no such file of the math; choose from opsm\.py, pipeline\.py"
    ):
        mutation.sources(["no.py"])

"""The fuzzer of strangers' files runs a short round of each kind, and its watch sees what no reading does."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import foreign_fuzz


def test_a_short_round_fails_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_fuzz, "ROUND", 20)
    assert foreign_fuzz.main(["--smoke"]) == 0


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_text("x"),
        lambda path: __import__("subprocess").run(["true"], check=True),
        lambda path: __import__("socket").socket().close(),
        lambda path: __import__("this_module_is_not_there"),
        lambda path: [][1],
    ],
)
def test_its_watch_sees(act: foreign_fuzz.Read, tmp_path: Path) -> None:
    assert foreign_fuzz.fault_of(foreign_fuzz.Watch(), tmp_path / "a", act)

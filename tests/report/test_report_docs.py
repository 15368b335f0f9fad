"""docs/report.md is what mis_plugins/report says."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from lab.pages import parts
from lab.pages import report as docs
from mis_plugins.report.causes import CAUSES
from mis_plugins.report.record import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_the_page_is_current() -> None:
    assert parts.current("report.md", docs.part), "python -m lab.pages.report"
    assert parts.named("report.md") == list(docs.PARTS)


def test_the_page_has_every_cause_and_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"\n## {name}\n" in text for name in CAUSES)
    assert all(f"`{name}`" in text for name in KINDS)


@pytest.mark.parametrize("name", ["kept", "metrics", "presets", "receipts", "report", "served"])
def test_the_help_of_a_page_writes_nothing(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        import_module(f"lab.pages.{name}").main()
    assert f"python -m lab.pages.{name}" in capsys.readouterr().out

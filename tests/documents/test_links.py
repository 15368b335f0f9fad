"""Every link of a page leads to a file and a heading that are there, as `bash scripts/docs.sh` asks of the site."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def staging() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_leads_somewhere() -> None:
    files, dead = staging().reached()
    assert dead == [] and len(files) > 60


@pytest.mark.parametrize(
    ("link", "said"), [("[a](none.md)", "no file"), ("[a](README.md#nothing-like-it)", "has no heading")]
)
def test_a_dead_link_is_seen(
    link: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pages = staging()
    (tmp_path / "README.md").write_text(f"# Title\n\n{link}\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "beginning", lambda: [tmp_path / "README.md"])
    assert pages.main(tmp_path / "out") == 1
    assert said in capsys.readouterr().err


def test_the_site_lists_every_page() -> None:
    listed = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f'"docs/{page.name}"' not in listed]
    assert missing == []


def test_every_record_is_listed_with_its_commit() -> None:
    rows = staging().records().splitlines()[2:]
    assert len(rows) == len(list((ROOT / "lab" / "results").glob("*.json")))
    assert "not named" not in " ".join(rows)

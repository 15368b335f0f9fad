"""Every link of a page leads to a file and a heading that are there, as `bash scripts/docs.sh` asks of the site."""

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
    ("link", "said"),
    [("[a](none.md)", "no file"), ("[a](README.md#nothing-like-it)", "has no heading"), ("[a](.)", "is a folder")],
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


def test_every_link_to_a_record_shows_the_commit_that_ran() -> None:
    pages = staging()
    commit, _ = pages.ran(ROOT / "lab" / "results" / "mismatch.json")
    for link in ("[a](../lab/results/mismatch.md)", "![b](../lab/results/mismatch.png)"):
        assert pages.staged(link, "docs/a.md").startswith(link) and f"@{commit[:7]}<" in pages.staged(link, "")
    assert pages.staged("[a](../lab/results/hosts_history.md)", "docs/a.md") == "[a](../lab/results/hosts_history.md)"


def test_records_are_not_searched_and_pages_are() -> None:
    pages = staging()
    assert "exclude: true" in pages.staged("# A", "lab/results/a.md")
    assert pages.staged("# A", "docs/choose.md") == "# A"


def test_formulas_become_mathml_on_one_line() -> None:
    staged = staging().staged("Of $`r_t`$:\n\n```math\n\\min(r_t,\n C)\n```\n\n`$x$`\n", "docs/a.md")
    inline, display, code = (line for line in staged.splitlines() if line)
    assert inline.startswith("Of <math") and 'display="block"' in display and display.endswith("</math>")
    assert code == "`$x$`"


def test_a_dead_link_of_the_built_site_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text('<h2 id="here">x</h2><a href="a/">a</a><a href="https://b.c">b</a>')
    (tmp_path / "a" / "index.html").write_text('<a href="../#here">a</a><img src="/index.html">')
    assert staging().check(tmp_path) == 0
    (tmp_path / "a" / "index.html").write_text('<a href="../#gone">a</a><a href="../yaml">b</a>')
    assert staging().check(tmp_path) == 1
    assert capsys.readouterr().err.split() == ["a/index.html:", "../#gone", "a/index.html:", "../yaml"]


SEARCHED = {
    "my run collapsed": "choose",
    "loss spikes": "choose",
    "fp8": "choose",
    "tis": "algorithms",
    "mis": "algorithms",
    "icepop": "algorithms",
    "sequence": "algorithms",
    "opsm": "algorithms",
    "cis": "algorithms",
}


@pytest.mark.parametrize("words", SEARCHED)
def test_a_heading_has_what_people_type(words: str) -> None:
    page = (ROOT / "docs" / f"{SEARCHED[words]}.md").read_text(encoding="utf-8")
    titles = [line.lower() for line in page.splitlines() if line.startswith("#")]
    assert any(all(word in title for word in words.split()) for title in titles)


def test_no_page_opens_with_the_age_of_its_figures() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if "Figures here are of older" in page.read_text(encoding="utf-8")] == []

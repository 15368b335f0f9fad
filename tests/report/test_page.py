"""The page in a real Chromium: no console error, nothing cut at 400 and 1,400 px, tokens that tell by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_readers import write_lines

from lab.planted_runs import planted
from mis_plugins.__main__ import main

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LACKING = (
    "no Chromium that playwright could drive: apt-get install chromium; pip install 'mis-plugins[browser]'"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        pytest.skip(LACKING)
    if CHROMIUM is None:
        pytest.skip(LACKING)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    records = [
        replace(one, advantages=one.behavior_log_probs.new_ones(one.size) * (place % 2 * 2 - 1))
        for place, one in enumerate(planted("stale-weights", seed=5))
    ]
    write_lines(folder / "a run with a rather long name.jsonl", records[::4])
    (folder / "metrics.jsonl").write_text('{"step": 0, "grad_norm": 1.0}\n{"step": 1, "grad_norm": 2.0}\n')
    assert main(["report", str(folder), "--output", str(folder)]) == 0
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_has_no_error_and_fits(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    told: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert told == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
    context.close()


def test_a_focused_token_shows_both_policies(browser: Any, page_file: Path) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    token = page.locator(".tokens span").first
    token.focus()
    shown = token.evaluate("one => getComputedStyle(one, '::after').content")
    assert "engine" in shown and "trainer" in shown
    page.close()


def test_paper_shows_the_whole_page(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 800, "height": 600})
    page.goto(page_file.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollHeight > one.clientHeight + 2).length"
    assert page.evaluate(cut) == 0
    page.close()

"""The page in a real Chromium: no console error, nothing cut at 390 and 1,280 px, tokens that tell by touch and key."""

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
LACKING = "no Chromium that playwright could drive: apt-get install chromium; pip install playwright"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PHONE, DESK = (390, 844), (1280, 900)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        pytest.skip(LACKING)
    if CHROMIUM is None:
        pytest.skip(LACKING)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
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
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_the_page_has_no_error_and_fits(browser: Any, page_file: Path, size: tuple[int, int], scheme: str) -> None:
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
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


@pytest.fixture
def phone(browser: Any, page_file: Path) -> Iterator[Any]:
    context = browser.new_context(viewport=dict(zip(("width", "height"), PHONE, strict=True)), has_touch=True)
    page = context.new_page()
    page.goto(page_file.as_uri())
    yield page
    context.close()


def test_a_phone_shows_verdict_since_when_and_what_to_do_at_once(phone: Any) -> None:
    shown = [phone.locator("h1"), *phone.locator(".lead").all()]
    assert [one.inner_text().partition(":")[0] for one in shown[1:]] == ["Since when", "What to do"]
    assert max(box["y"] + box["height"] for one in shown if (box := one.bounding_box())) <= PHONE[1]
    assert [one.inner_text() for one in shown if len(one.inner_text()) > 160] == []


@pytest.mark.parametrize("way", ["tap", "focus"])
def test_a_token_shows_both_policies(phone: Any, way: str) -> None:
    token = phone.locator(".tokens span").first
    assert token.evaluate("one => getComputedStyle(one, '::after').content") == "none"
    getattr(token, way)()
    shown = token.evaluate("one => getComputedStyle(one, '::after').content")
    assert "engine" in shown and "trainer" in shown


SCROLLS = "one => one.scrollWidth > one.clientWidth"
SHADOWS = "one => getComputedStyle(one).backgroundAttachment"


@pytest.mark.parametrize("part", ["nav", ".configs .scroll"])
def test_a_part_that_is_wider_than_a_phone_says_that_it_scrolls(phone: Any, part: str) -> None:
    found = phone.locator(part)
    assert found.evaluate(SCROLLS) and found.evaluate(SHADOWS).startswith("local, local, scroll, scroll")


def test_a_config_keeps_its_name_and_what_speaks_against_it_in_sight(phone: Any) -> None:
    first = phone.locator(".configs tbody tr", has_text="geometric-mis").locator("th").last
    assert "keeps " in first.inner_text()
    phone.locator(".configs .scroll").evaluate("one => one.scrollLeft = 400")
    box = first.bounding_box()
    assert box is not None and 0 <= box["x"] < PHONE[0] / 4


def test_paper_shows_the_whole_page(browser: Any, page_file: Path) -> None:
    page = browser.new_page(viewport={"width": 800, "height": 600})
    page.goto(page_file.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollHeight > one.clientHeight + 2).length"
    assert page.evaluate(cut) == 0
    page.close()

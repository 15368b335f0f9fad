"""Pictures of the report's page in a real Chromium: a made-up run, on a phone and a desk, light and dark.

    python -m lab.report_pictures docs/report

writes `docs/report-390-light.png` and its three siblings. It needs Chromium and `pip install playwright`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_pictures:main", extra="dev")

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab.planted_runs import as_line, planted
from lab.provenance import parser_of
from mis_plugins.__main__ import main as mis_plugins
from mis_plugins.report.record import Record

SIZES = ((390, 844), (1280, 900))
SCHEMES = ("light", "dark")
SYLLABLES = (" the", " sum", " of", " two", " is", " so", ",", " we", " add", " and", " get", " a", " digit", ".")


def spelled(record: Record) -> list[str]:
    """Made-up words in place of a record's tokens."""
    return [SYLLABLES[token % len(SYLLABLES)] for token in ([] if record.tokens is None else record.tokens.tolist())]


def report_of_a_made_up_run(folder: Path) -> Path:
    """The page of a run whose engine was left behind at one step."""
    lines = [
        as_line(record, advantages=[place % 2 * 2 - 1] * record.size, text=spelled(record))
        for place, record in enumerate(planted("jump", seed=5))
    ]
    (folder / "run.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if mis_plugins(["report", str(folder / "run.jsonl"), "--output", str(folder)]):
        raise RuntimeError("the made-up run was not read")
    return folder / "report.html"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("prefix", metavar="PREFIX", help="start of the names of the pictures")
    prefix = parser.parse_args().prefix
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = report_of_a_made_up_run(Path(folder))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, height in SIZES:
            for scheme in SCHEMES:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(page_file.as_uri())
                page.screenshot(path=f"{prefix}-{width}-{scheme}.png")
        browser.close()
    return 0

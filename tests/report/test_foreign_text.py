"""A report of files whose names and texts steer a terminal, a browser and matplotlib; its files are of one run."""

from __future__ import annotations

import json
import os
import re
import unicodedata
import warnings
from pathlib import Path
from xml.dom.minidom import parseString

import pytest

from mis_plugins.__main__ import main
from mis_plugins.report import plots

EVIL = "nul\0 esc\x1b[31m rlo\u202e sur\udcff zero\u200b $\\x$ <b>&\"'"
SEEN = r"nul\x00 esc\x1b[31m rlo\u202e sur\udcff zero\u200b $\x$ &lt;b&gt;&amp;&quot;&#x27;"


def write_run(path: Path) -> Path:
    """A run of three steps, all texts of which are hostile."""
    record = {"behavior_log_probs": [-1.0, -0.5], "proximal_log_probs": [-1.1, -0.4], "loss_mask": [1, 1]}
    texts = {"sample": EVIL, "prompt": EVIL, "response": EVIL, "token_texts": [EVIL, EVIL], "tokens": [1, 2]}
    path.write_text("".join(json.dumps(record | texts | {"step": step}) + "\n" for step in range(3)))
    return path


def test_no_control_reaches_page_json_or_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / ("_" + EVIL.replace("\0", "") + ".jsonl"))
    other = write_run(tmp_path / "名\nx: calm.jsonl")
    with warnings.catch_warnings(record=True) as told:
        words = [
            "report",
            str(one),
            "--against",
            str(other),
            "--output",
            str(tmp_path / "out"),
            "--sweep",
            "none",
        ]
        assert main(words) == 0
    printed = capsys.readouterr()
    page, found = ((tmp_path / "out" / name).read_bytes().decode() for name in ("report.html", "report.json"))
    for text in (page, found, printed.out, printed.err):
        assert not [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs") and one != "\n"]
    assert SEEN in page and SEEN.replace(r"nul\x00", "nul") in page and "<b>&" not in page
    assert r"名\nx: calm.jsonl: " in printed.out and json.loads(found)["title"] == os.path.basename(one)
    assert told == []


def test_pictures_draw_foreign_names_as_they_are() -> None:
    names = ["_under", "$\\x$ $y", "", "名", "\0\x1b\u202e\udcff \\$", 'id="a url(#b) #010101', "x" * 300]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = [plots.Line(name, [0, 1], [0.1, 0.2]) for name in names]
        rows = [{"bucket": name, "tokens": 1, "kl_k3": 0.1} for name in [*names, "_under"]]
        drawn = [
            plots.curve(lines, "a"),
            plots.bars(rows, "b"),
            plots.ladder(dict.fromkeys(names, 0.1), "c"),
        ]
    for svg in drawn:
        parseString(svg)
        shown = [text.strip() for text in re.findall("<text[^>]*>(.*?)</text>", svg)]
        shown = [text.removesuffix("0.1").strip() for text in shown]
        expected = ["_under", "$\\x$ $y", "名", r"\x00\x1b\u202e\udcff \$", names[5], "x" * 39 + "…"]
        assert [text for text in shown if text in expected][: len(expected)] == expected
    assert drawn[1].count(">_under<") + drawn[1].count("> _under<") == 2


def test_files_of_an_earlier_report_go(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run.jsonl"), tmp_path / "out"
    out.mkdir()
    for name in ("report.json", "report-2.json", "report-3.json", "report-mine.json", "notes"):
        (out / name).write_text("old")
    assert main(["report", str(run), "--against", str(run), "--output", str(out), "--sweep", "none"]) == 0
    assert sorted(os.listdir(out)) == [
        "notes",
        "report-2.json",
        "report-mine.json",
        "report.html",
        "report.json",
    ]
    assert "old" not in {(out / name).read_text() for name in ("report.json", "report-2.json", "report.html")}

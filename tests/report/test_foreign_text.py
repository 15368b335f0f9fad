"""A report of files whose names and texts steer a terminal, a browser and matplotlib; its files are of one run."""

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
SEEN = r"nul\x00 esc\x1b[31m rlo\u202e sur\udcff zero\u200b $\x$ &lt;b&gt;&amp;&#34;&#39;"


def write_run(path: Path) -> Path:
    """A run of three steps, all texts of which are hostile."""
    record = {"behavior_log_probs": [-1.0, -0.5], "proximal_log_probs": [-1.1, -0.4], "loss_mask": [1, 1]}
    texts = {"sample": EVIL, "prompt": EVIL, "response": EVIL, "text": [EVIL, EVIL], "tokens": [1, 2]}
    path.write_text("".join(json.dumps(record | texts | {"step": step}) + "\n" for step in range(3)))
    return path


def test_no_control_reaches_page_json_or_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / ("_" + EVIL.replace("\0", "") + ".jsonl"))
    other = write_run(tmp_path / "名\nx: calm.jsonl")
    with warnings.catch_warnings(record=True) as told:
        words = ["report", str(one), str(other), "--output", str(tmp_path / "out"), "--sweep", "none"]
        assert main(words) == 0
    printed = capsys.readouterr()
    page, found = ((tmp_path / "out" / name).read_bytes().decode() for name in ("report.html", "report.json"))
    for text in (page, found, printed.out, printed.err):
        assert not [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs") and one != "\n"]
    assert SEEN in page and SEEN.replace(r"nul\x00", "nul") in page and "<b>&" not in page
    names = f"{os.path.basename(one)}, {os.path.basename(other)}"
    assert r"名\nx: calm.jsonl: " in printed.out and json.loads(found)["title"] == names
    assert told == []


def test_pictures_draw_foreign_names_as_they_are() -> None:
    names = ["_under", "$\\x$ $y", "", "名", "\0\x1b\u202e\udcff \\$", 'id="a url(#b) #010101', "x" * 300]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = {name: {0: 0.1, 1: 0.2} for name in names}
        rows = [{"bucket": name, "tokens": 1, "kl_k3": 0.1} for name in [*names, "_under"]]
        drawn = [
            plots.curve(lines, "a"),
            plots.dots(rows, "b", plots.span([rows])),
            *(plots.ladder(one, 0.1, "c") for one in names),
        ]
    expected = ["_under", "$\\x$ $y", "名", r"\x00\x1b\u202e\udcff \$", names[5], "x" * 39 + "…"]
    for svg in drawn:
        parseString(svg)
    for svg in (*drawn[:2], "".join(drawn[2:])):
        shown = [text.strip() for text in re.findall("<text[^>]*>(.*?)</text>", svg)]
        shown = [text.removesuffix("0.1").strip() for text in shown]
        assert [text for text in shown if text in expected][: len(expected)] == expected
    assert drawn[1].count(">_under<") + drawn[1].count("> _under<") == 2

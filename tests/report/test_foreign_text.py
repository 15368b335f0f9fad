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

EVIL = "nul\0 esc\x1b[31m rlo\u202e sur\udcff zero\u200b $\\x$ <b>&\"'"
SEEN = r"nul\x00 esc\x1b[31m rlo\u202e sur\udcff zero\u200b $\x$ &lt;b&gt;&amp;&#34;&#39;"


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


def test_plots_draw_foreign_names_as_they_are(tmp_path: Path) -> None:
    for name in ("_under", "$x$ $y", "名", 'id="a url(#b) &', "x" * 90):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"step": {k}, "kl_k3": 0.{k}}}\n' for k in range(1, 3))
        )
    main(["report", str(tmp_path), "--output", str(tmp_path / "out"), "--sweep", "none"])
    (plot,) = re.findall("<svg.*?</svg>", (tmp_path / "out" / "report.html").read_text(), re.DOTALL)
    parseString(plot)
    for shown in (
        "_under.jsonl",
        "$x$ $y.jsonl",
        "名.jsonl",
        "id=&#34;a url(#b) &amp;.jsonl",
        "x" * 39 + "…",
    ):
        assert f">{shown}</text>" in plot

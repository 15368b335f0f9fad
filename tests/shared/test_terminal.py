"""Foreign text on a terminal: whatever prints it, every character is seen, and rich's own colours stay."""

import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from commands import ROOT, ran
from hypothesis import given, settings
from hypothesis import strategies as st

from mis_plugins.shared.terminal import printable

PARTS = {
    "\0": r"\x00", "\x1b[31m": r"\x1b[31m", "\x9b31m": r"\x9b31m", "\x7f": r"\x7f", "\r": r"\r", "\u202e": r"\u202e",
    "\u2066": r"\u2066", "\u200e": r"\u200e", "\u061c": r"\u061c", "\u200b": r"\u200b", "\ufeff": r"\ufeff",
    "\u2028": r"\u2028", "\udcff": r"\udcff", "\ue000": r"\ue000", "\u3164": r"\u3164", "\U000e0041": r"\U000e0041",
    "\U000e0100": r"\U000e0100",
}  # fmt: skip
EVIL, SHOWN = "a".join(PARTS), "a".join(PARTS.values())
PRINTING = """
import logging, sys, warnings
from mis_plugins.shared.terminal import print_error, print_table
def main():
    evil = {evil!r}
    print(evil)
    sys.stdout.writelines([evil, chr(10)])
    print_table([evil, "[link=http://a]b[/link]"], [["[bold]c[/bold]" + chr(10), evil]])
    print(evil, file=sys.stderr)
    warnings.warn(evil)
    logging.getLogger("mis_plugins").warning("%s", evil)
    print_error(evil + chr(10) + "error: another")
    raise ValueError(evil)
"""
RUN = "from mis_plugins.shared.shell import run_command; run_command('printing:main')"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_a_printable_text_is_one_line_that_can_be_encoded_and_hides_nothing(text: str) -> None:
    shown = printable(text)
    assert len(shown.encode().splitlines()) <= 1 and printable(shown) == shown
    assert not {unicodedata.category(one)[0] for one in shown} & {"C"}
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@pytest.mark.parametrize("text", ["日本語　é ß 😀 שלום مرحبا नमस्ते", "a b", "❤️"])
def test_what_people_write_stays(text: str) -> None:
    assert printable(text) == text


def test_whatever_a_command_prints_is_shown(tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(PRINTING.format(evil=EVIL))
    done = ran("-c", RUN, folder=tmp_path)
    assert done.stdout.count(SHOWN) == 4 and done.stderr.count(SHOWN) == 5
    assert "[link=http://a]b[/link]" in done.stdout and r"[bold]c[/bold]\n" in done.stdout
    assert "\n  error: another" in done.stderr
    assert printable(done.stdout + done.stderr, keep="\n") == done.stdout + done.stderr


def test_on_a_terminal_rich_alone_draws(tmp_path: Path) -> None:
    """The sole escapes are those of the table's title, which is bold."""
    (tmp_path / "printing.py").write_text(PRINTING.format(evil=EVIL))
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "400", "NO_COLOR": ""}
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = b""
        with open(ours, "rb", buffering=0) as screen:
            try:
                while part := screen.read(4096):
                    shown += part
            except OSError:  # EIO: the other side is closed
                pass
    text = shown.decode().replace("\r\n", "\n")
    assert text.count(SHOWN) == 9 and "[link=http://a]b[/link]" in text and "\x1b[1m" in text
    assert re.fullmatch(r"[ -~\n]*", re.sub("\x1b\\[[01]m", "", text))

"""Every command of the README and of docs/ runs, as it stands or with what a comment before its block adds.

<!-- ci: --smoke -->                     each command of the next bash block is run with --smoke added
<!-- ci: syntax only, because REASON --> the next bash block is only parsed
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mis_plugins.__main__ import TRANSLATORS, main
from mis_plugins.hosts.registry import every_host

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:^<!-- ci: (?P<note>.+?) -->\n+)?^```bash\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SYNTAX_ONLY = re.compile(r"syntax only, because \S.*")


@dataclass(frozen=True)
class Block:
    body: str
    note: str
    page: str = ""

    @property
    def parsed_only(self) -> bool:
        return SYNTAX_ONLY.fullmatch(self.note) is not None

    @property
    def script(self) -> str:
        """The block, each of its commands with the arguments of the note."""
        if not self.note or self.parsed_only:
            return self.body
        lines = self.body.replace("\\\n", " ").splitlines()
        return "\n".join(f"{line.split('  #')[0]} {self.note}" for line in lines if line and line[0] != "#")


def blocks(text: str, page: str = "") -> list[Block]:
    return [Block(found["body"], found["note"] or "", page) for found in BLOCK.finditer(text)]


README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README": README} | {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
}
BLOCKS = [block for page, text in PAGES.items() for block in blocks(text, page)]
RUN = [block for block in BLOCKS if not block.parsed_only]


def name(block: Block) -> str:
    return f"{block.page}: {block.body.splitlines()[0][:60]}"


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_command_parses(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_note_is_understood(block: Block) -> None:
    assert block.parsed_only or block.note == "" or block.note.startswith("--")


@pytest.mark.parametrize("block", RUN, ids=name)
def test_command_runs(block: Block) -> None:
    if not (Path(sys.prefix) / ".mis-plugins-install").exists():
        pytest.skip("the pages' commands run in the environment that scripts/test.sh makes")
    environment = {"MIS_VENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.script],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{block.script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_blocks_are_found_with_their_notes() -> None:
    text = (
        "```bash\nls\n```\n\n<!-- ci: --smoke -->\n```bash\na \\\n  b  # why\nc\n```\n"
        "<!-- ci: syntax only, because it is slow -->\n```bash\nd\n```\n```python\ne\n```\n"
    )
    plain, smoke, parsed = blocks(text)
    assert [plain.script, smoke.script] == ["ls\n", "a    b --smoke\nc --smoke"]
    assert [plain.parsed_only, smoke.parsed_only, parsed.parsed_only] == [False, False, True]


MOST_WORDS, MOST_LINES, LONGEST = 1200, 160, 30


def prose(text: str) -> str:
    """A page without its blocks, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^(\||#|!|<!--).*$", "\n", text, flags=re.MULTILINE)


def sentences(text: str) -> list[str]:
    parts = re.split(r"\n\s*\n|\n(?=[*-] |\d\. )|(?<=[.!?:;])\s+", prose(text))
    return [" ".join(part.split()) for part in parts if part.strip()]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS and len(README.splitlines()) <= MOST_LINES


def test_the_readme_shows_what_the_check_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = tmp_path / "run.py"
    launcher.write_text(
        "import miles.utils as U\n\n\ndef execute(train_args):\n    U.execute_train(\n        train_args=train_args,\n"
        "    )\n\n\nexecute('--lr 1')\n"
    )
    assert main(["config", "check", str(launcher)]) == 1
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert shown in capsys.readouterr().out


def test_the_readme_says_who_is_served() -> None:
    """Every host with hooks, and every framework whose files a command translates, has a row."""
    table = README.partition("## Who is served")[2].partition("##")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    hosts = {host.title.split(" ")[0] for host in every_host().values() if host.needs is not None}
    assert all(any(row.startswith(f"| {host}") for row in rows) for host in hosts)
    assert set(re.findall(r"`config (from-\S+)`", table)) == set(TRANSLATORS)


@pytest.mark.parametrize("page", ["README", "choose", "opsm", "index"])
def test_sentences_of_a_page_for_newcomers_are_short(page: str) -> None:
    assert [one for one in sentences(PAGES[page]) if len(one.split()) > LONGEST] == []


def test_a_long_sentence_of_a_page_is_seen() -> None:
    long = " ".join(["word"] * (LONGEST + 1))
    assert [len(one.split()) for one in sentences(f"Short.\n\n* {long}.\n| {long} |\n```\n{long}\n```\n")] == [1, 32]

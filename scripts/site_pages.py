"""Stage what the site shows in the repository's own layout, so that the links of the pages work unchanged.

    python scripts/site_pages.py FOLDER

The README, docs/ and every file that a staged page links to are copied. A link to a file that is not there, or to a
heading that a page lacks, is an error. Pictures of the README stand beside it on the site as they do on a host of git.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def beginning() -> list[Path]:
    """The pages from which every other staged file is reached."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").iterdir())]


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of the repository that a page links to, each with the heading named, or ''."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for target, heading in LINK.findall(text):
        if not target.startswith(("http:", "https:", "mailto:")):
            yield (page.parent / target).resolve() if target else page, heading


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def reached() -> tuple[list[Path], list[str]]:
    """Every file to stage, and every link that leads nowhere."""
    found, waiting, dead = [], beginning(), []
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for target, heading in links(file) if file.suffix == ".md" else ():
            if not target.exists() or not target.is_relative_to(ROOT):
                dead.append(f"{file.relative_to(ROOT)}: no file {target}")
            elif heading and heading not in headings(target):
                dead.append(f"{file.relative_to(ROOT)}: {target.relative_to(ROOT)} has no heading #{heading}")
            else:
                waiting += [target] if target.is_file() else sorted(target.rglob("*.yaml"))
    return found, dead


def records() -> str:
    """A table of every record under lab/results: its page, the commit that ran, and the command."""
    rows = ["| record | commit | command |", "|---|---|---|"]
    for file in sorted((ROOT / "lab" / "results").glob("*.json")):
        held = json.loads(file.read_text(encoding="utf-8"))
        said = held.get("measured_with") or held.get("measured with") or {"command": held.get("command", "")}
        commit = held.get("commit") or said.get("mis-plugins commit", "not named")
        shown = next(
            (page for page in (file.with_suffix(".md"), file.with_suffix(".png")) if page.exists()), file
        )
        rows.append(f"| [{file.stem}](../lab/results/{shown.name}) | {commit} | `{said['command']}` |")
    return "\n".join(rows)


def main(folder: Path) -> int:
    """Stage the files in `folder`, and return the exit code: 1 where a link leads nowhere."""
    files, dead = reached()
    if dead:
        print("\n".join(dead), file=sys.stderr)
        return 1
    files += [file for file in sorted((ROOT / "lab" / "results").iterdir()) if file.is_file()]
    shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    page = folder / "docs" / "results.md"
    page.write_text(page.read_text(encoding="utf-8").replace("<!-- records -->", records()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Stage what the site shows in the repository's own layout, so that the links of the pages work unchanged.

    python scripts/site_pages.py FOLDER          stage the pages there
    python scripts/site_pages.py --check SITE    follow every link of the site that was built of them

The README, docs/ and every file that a staged page links to are copied. A link to a file that is not there, or to a
heading that a page lacks, is an error. Pictures of the README stand beside it on the site as they do on a host of git.
Formulas become MathML, which a browser draws without a script or a font from elsewhere. Records are not searched.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
RECORD = re.compile(r"\]\((?:\.\./)*lab/results/([\w.-]+)\.(?:md|png)(?:#[^)]*)?\)")
FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`([^`\n]+)`\$", re.MULTILINE | re.DOTALL)
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
RECORDS = ("lab/", "scripts/", "docs/results.md", "docs/architecture.md")  # what nobody looks for who has a run


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
            elif target.is_dir():
                dead.append(f"{file.relative_to(ROOT)}: {target.relative_to(ROOT)} is a folder; name a file of it")
            elif heading and heading not in headings(target):
                dead.append(f"{file.relative_to(ROOT)}: {target.relative_to(ROOT)} has no heading #{heading}")
            else:
                waiting.append(target)
    return found, dead


def ran(record: Path) -> tuple[str, str]:
    """The commit of this project that a record was measured with, and the command."""
    held = json.loads(record.read_text(encoding="utf-8"))
    said = held.get("measured_with") or held.get("measured with") or {"command": held.get("command", "")}
    return held.get("commit") or said.get("mis-plugins commit", "not named"), said["command"]


def records() -> str:
    """A table of every record under lab/results: its page, the commit that ran, and the command."""
    rows = ["| record | commit | command |", "|---|---|---|"]
    for file in sorted((ROOT / "lab" / "results").glob("*.json")):
        shown = next((page for page in (file.with_suffix(".md"), file.with_suffix(".png")) if page.exists()), file)
        commit, command = ran(file)
        rows.append(f"| [{file.stem}](../lab/results/{shown.name}) | {commit} | `{command}` |")
    return "\n".join(rows)


def dated(found: re.Match[str]) -> str:
    """A link to a record, and behind it the commit that ran, where the record names one."""
    record = ROOT / "lab" / "results" / f"{found[1]}.json"
    commit = ran(record)[0][:7] if record.exists() else ""
    return f'{found[0]}<small title="the commit that ran"> @{commit}</small>' if commit else found[0]


def staged(text: str, name: str) -> str:
    """A page as the site has it: formulas as MathML, commits behind links to records, records not searched."""
    text = RECORD.sub(dated, text)
    text = FORMULA.sub(lambda found: mathml(found[1] or found[2], display=bool(found[1])), text)
    return UNSEARCHED + text if name.startswith(RECORDS) else text


def mathml(formula: str, display: bool) -> str:
    """A formula in LaTeX as MathML on one line."""
    from latex2mathml.converter import convert

    return " ".join(convert(formula.strip(), display="block" if display else "inline").split())


class Anchors(HTMLParser):
    """Ids and links of a page of the site."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a tag is called and what it links to."""
        for name, value in attrs:
            if name in ("id", "name"):
                self.ids.add(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")


def dead_links(site: Path) -> list[str]:
    """Every link within a built site that leads to no file, or to no id of a page."""
    site = site.resolve()
    pages = {file: Anchors() for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        page.feed(file.read_text(encoding="utf-8"))
    return [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        for link in dict.fromkeys(page.links)
        if not urlparse(link).scheme and not urlparse(link).netloc and not _leads(site, file, link, pages)
    ]


def _leads(site: Path, page: Path, link: str, pages: dict[Path, Anchors]) -> bool:
    parts = urlparse(link)
    path = unquote(parts.path)
    start = site if path.startswith("/") else page.parent  # 404.html names everything from the top
    target = (start / path.lstrip("/")).resolve() if path else page
    target = target / "index.html" if target.is_dir() else target
    known = pages[target].ids if target in pages else {unquote(parts.fragment)}
    return target.exists() and (not parts.fragment or unquote(parts.fragment) in known)


def check(site: Path) -> int:
    """Print the dead links of a built site, and return the exit code: 1 where there is one."""
    dead = dead_links(site)
    if dead:
        print("\n".join(dead), file=sys.stderr)
    return 1 if dead else 0


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
        if file.suffix == ".md":
            text = staged(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())
            copy.write_text(text.replace("<!-- records -->", records()), encoding="utf-8")
        else:
            shutil.copy(file, copy)
    return 0


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[2])) if sys.argv[1] == "--check" else main(Path(sys.argv[1])))

"""The tables of `docs/presets.md`, made from the first lines of the presets; the prose between them is written by hand.

    python -m lab.pages.presets

A table follows a comment that says which files of `yaml/` it lists. A family of presets that no comment names gets a
section of its own at the end of the page.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.presets:main")

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from lab.provenance import parser_of
from mis_plugins.config.loading import aliases, formula_of, is_of_peer, presets

PAGE = Path(__file__).parents[2] / "docs" / "presets.md"
HEAD = "| preset | formula | source | judged by |\n|---|---|---|---|\n"
JUDGED = "# Judged by: "
TABLE = re.compile(r"(<!-- presets: (\S+) -->\n\n?)(?:\|.*\n)*")


def page(text: str) -> str:
    """The page with its tables made anew."""
    text += "".join(map(_section, _families(text)))
    return TABLE.sub(lambda found: f"{found[1]}{_table(_names(found[2]))}", text)


def _families(text: str) -> list[str]:
    """Families, the first words of names, of the presets that no table lists."""
    listed = {name for found in TABLE.finditer(text) for name in _names(found[2])}
    return sorted({name.partition("-")[0] for name in presets() if name not in listed})


def _section(family: str) -> str:
    return f"\n## {family}\n\n<!-- presets: peers/{family}-*.yaml -->\n\n"


def _names(pattern: str) -> list[str]:
    """The presets that lie where a pattern says; another name of a file counts as one of `peers/`."""
    place = {name: "peers/" * is_of_peer(name, file) + f"{name}.yaml" for name, file in presets().items()}
    return [name for name in place if fnmatch(place[name], pattern) and place[name].count("/") == pattern.count("/")]


def _table(names: Iterable[str]) -> str:
    return HEAD + "".join(map(_row, names))


def _row(name: str) -> str:
    file = presets()[name]
    place = file.relative_to(presets()["mis"].parent).as_posix()
    cells = (f"[`{name}`](../yaml/{place})", f"`{formula_of(file)}`", *_source_and_judge(name, file))
    return f"| {' | '.join(cells)} |\n"


def _source_and_judge(name: str, file: Path) -> tuple[str, str]:
    """Where a preset comes from, and what it is compared with: by two lines of its header, or by an alias's own."""
    if (words := aliases(file).get(name)) is not None:
        source, _, judge = words.partition(" | ")
        return source, judge or "-"
    _, source, *lines = file.read_text(encoding="utf-8").splitlines()
    judges = (line.removeprefix(JUDGED) for line in lines if line.startswith(JUDGED))
    return source.removeprefix("# "), next(judges, "-")


def main() -> int:
    """Write the page's tables."""
    parser_of(__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0

"""Pictures of toy experiments, drawn anew from their records, and the page of the report's.

    python -m lab.toys [NAME ...]

What ran an experiment lies in the history (`docs/results.md`).
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.toys.__main__:main", extra="verify")

import importlib
import json
from pathlib import Path

from lab.provenance import parser_of

DRAWN = {name: f"lab.toys.{name}" for name in ("collapse", "experts", "presets", "truly_on_policy")}
DRAWN["async"] = "lab.toys.async_picture"
WRITTEN = {"report_collapse": "lab.toys.report_collapse"}
TOYS = DRAWN | WRITTEN
"""The module that draws or writes each experiment, by the name of its record."""
RESULTS = Path("lab/results")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(sorted(TOYS))} (default: all)"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TOYS]:
        parser.error(f"no experiment {', '.join(unknown)}; choose from {', '.join(sorted(TOYS))}")
    for name in options.names or TOYS:
        toy, record = importlib.import_module(TOYS[name]), RESULTS / f"{name}.json"
        content = json.loads(record.read_text(encoding="utf-8"))
        if name in DRAWN:
            toy.draw(content, record.with_suffix(".png"))
        else:
            record.with_suffix(".md").write_text(toy.markdown(content), encoding="utf-8")
    return 0

"""Pictures of toy experiments, drawn anew from their records.

    python -m lab.toys [NAME ...]

What ran an experiment lies in the history (`docs/results.md`).
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.toys.__main__:main", extra="verify")

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab.provenance import parser_of
from lab.toys import async_picture, endings, presets

RESULTS = Path("lab/results")
DRAWN: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "async": async_picture.draw,
    "collapse": endings.of_collapse,
    "experts": endings.of_experts,
    "presets": presets.draw,
    "truly_on_policy": endings.of_truth,
}
"""What draws each experiment, by the name of its record."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWN)} (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in DRAWN]:
        parser.error(f"no experiment {', '.join(unknown)}; choose from {', '.join(DRAWN)}")
    for name in options.names or DRAWN:
        record = RESULTS / f"{name}.json"
        DRAWN[name](json.loads(record.read_text(encoding="utf-8")), record.with_suffix(".png"))
    return 0

"""Names of the arguments that the parsers of hosts are recorded to make.

The records lie in `hosts/records/`. The first lines name what each was made from: `lab/host_arguments.py` and a
checkout, or single files of a host where no checkout can be had.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "hosts" / "records"


def lines(record: str) -> list[str]:
    """The lines of a record: a name, what the host takes for it, and flags that are not just `--name`."""
    text = (FOLDER / f"{record}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


@cache
def names() -> frozenset[str]:
    """Every recorded name, of all hosts."""
    return frozenset(line.split()[0] for file in FOLDER.glob("*.txt") for line in lines(file.stem) if line)

"""Records of runs: a JSON file each, as runs leave them in a folder, or all of a kind packed into one archive.

python -m lab.records FOLDER ARCHIVE    pack a folder's records, in place of records of equal names
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Records = Mapping[str, Any]
"""Each run's record by the run's name."""


def records(path: Path) -> dict[str, Any]:
    """Read the records of a folder, or of an archive; none where neither is there."""
    return {name: json.loads(text) for name, text in _texts(path).items()}


def pack(folder: Path, archive: Path) -> None:
    """Add a folder's records to an archive, whose bytes follow from its records alone."""
    texts = _texts(archive) | _texts(folder)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for name, text in sorted(texts.items()):
            entry = tarfile.TarInfo(f"{name}.json")
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text))


def _texts(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {file.stem: file.read_bytes() for file in sorted(path.glob("*.json"))}
    if not path.exists():
        return {}
    with tarfile.open(path) as packed:
        files = {Path(entry.name).stem: packed.extractfile(entry) for entry in packed}
        return {name: file.read() for name, file in files.items() if file is not None}


def main(words: list[str]) -> int:
    if len(words) != 2 or not Path(words[0]).is_dir():
        print("usage: python -m lab.records FOLDER ARCHIVE, with a folder of records", file=sys.stderr)
        return 2
    pack(*map(Path, words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

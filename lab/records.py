"""Records of runs: a JSON file each, as runs leave them in a folder, or all of a kind packed into one archive.

python -m lab.records FOLDER ARCHIVE    pack a folder's records, in place of records of equal names
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.records:main")

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.provenance import parser_of

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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of records, a JSON file each")
    parser.add_argument("archive", type=Path, metavar="ARCHIVE", help="a .tar.xz, made where it is missing")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder; name the folder of a run's records")
    pack(options.folder, options.archive)
    return 0

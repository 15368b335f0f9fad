"""The neutral form: jsonl, one object a sequence, or parquet, one row a sequence. `docs/report.md` documents it.

A line is read on its own and forgotten, so that memory holds one line, or one group of rows, and never the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mis_plugins.report.readers.source import Problems
from mis_plugins.report.record import KINDS, Record, from_mapping
from mis_plugins.shared.budget import RecordError

LONGEST_LINE = 256 * 1024 * 1024
ROWS_AT_ONCE = 64
COLUMNS = (*KINDS, "step", "sample", "text", "prompt", "reward", "trainer_version", "truncated")


def is_jsonl(path: Path) -> bool:
    """Whether the first line of a file is an object of the neutral form."""
    return "behavior_log_probs" in first_object(path)


def first_object(path: Path) -> Mapping[str, Any]:
    """The object in the first line of a file; an empty one where there is none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.readline(LONGEST_LINE))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def jsonl(path: Path, problems: Problems) -> Iterator[Record]:
    """Records of a jsonl file, one a line."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            problems.bytes_read += len(line)
            if line.isspace():
                continue
            try:
                yield _record(_object(line), number)
            except (RecordError, ValueError) as error:
                problems.add(f"{path}:{number}: {error}")


def parquet(path: Path, problems: Problems) -> Iterator[Record]:
    """Records of a parquet file, one a row, a group of rows at a time.

    Raises:
        RecordError: pyarrow is not installed.
    """
    number = 0
    for row in _rows(path, problems):
        number += 1
        try:
            yield _record(row, number)
        except (RecordError, ValueError) as error:
            problems.add(f"{path}: row {number}: {error}")


def _rows(path: Path, problems: Problems) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        lacking = "pip install 'mis-plugins[report]'"
        raise RecordError(f"{path}: parquet needs pyarrow, which is not installed; {lacking}") from error
    try:
        file = ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in COLUMNS]
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two kinds
        problems.add(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}")


def _object(line: bytes) -> Mapping[str, Any]:
    if len(line) >= LONGEST_LINE:
        raise RecordError(f"a line longer than {LONGEST_LINE // 1024**2} MB; write one sequence a line")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise RecordError("no object; write one object a line")
    return found


def _record(values: Mapping[str, Any], number: int) -> Record:
    step = values.get("step", 0)
    if not isinstance(step, int):
        raise RecordError(f"step: got {step!r}; give a whole number")
    return from_mapping(values, step, str(values.get("sample", number)))

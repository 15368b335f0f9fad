"""The neutral form: jsonl, one object a sequence, or parquet, one row a sequence. `docs/report.md` documents it.

A line is read on its own and forgotten, so that memory holds one line, or one group of rows, and never the file.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.report.readers.files import Problems, library, limited_memory, objects, size_of
from mis_plugins.report.record import KINDS, REQUIRED, Record, from_mapping, lacking
from mis_plugins.shared.budget import INFLATED, ITEMS, LINE, VALUES, RecordError
from mis_plugins.shared.opened import Opened

ROWS_AT_ONCE = 64
COLUMNS = (*KINDS, "step", "sample", "text", "prompt", "reward", "trainer_version", "truncated")


def jsonl(path: Path, problems: Problems) -> Iterator[Record]:
    """Records of a jsonl file, one a line."""
    for place, mapping in objects(path, problems):
        yield from _record(mapping, path, place, problems)


def parquet(path: Path, problems: Problems) -> Iterator[Record]:
    """Records of a parquet file, one a row, a few rows at a time; a group of rows that is broken is told."""
    parquet_files = library("pyarrow.parquet", path, "parquet needs pyarrow, which is not installed")
    with Opened(path).file as content:
        size = size_of(path)
        with limited_memory(size):
            file = parquet_files.ParquetFile(content, page_checksum_verification=True)
            columns = _columns(file.schema_arrow, path)
        for group in range(file.num_row_groups):
            rows = _group(file, group, columns, path, size, problems)
            yield from problems.each(rows, path, size, f"row group {group + 1}")


def _columns(schema: Any, path: Path) -> list[str]:
    """Columns of the neutral form."""
    columns = [name for name in COLUMNS if name in schema.names]
    if not set(REQUIRED) <= set(columns):
        raise RecordError(f"{path}: {lacking(REQUIRED, schema.names)}")
    for name in columns:
        kind = schema.field(name).type
        if kind.num_fields and "dictionary" in str(kind):
            raise RecordError(f"{path}: {name} is of type {kind}; write plain lists")
    return columns


def _group(file: Any, group: int, columns: list[str], path: Path, size: int, problems: Problems) -> Iterator[Record]:
    """Records of one group of rows. The footer may lie, so that its sizes and those of the rows are checked."""
    held = file.metadata.row_group(group)
    chunks = [held.column(number) for number in range(held.num_columns)]
    chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
    VALUES.check(sum(chunk.num_values for chunk in chunks), size, path)
    INFLATED.check(sum(chunk.total_uncompressed_size for chunk in chunks), size, path)
    batches, number = file.iter_batches(ROWS_AT_ONCE, [group], columns, use_threads=False), 0
    while True:
        with limited_memory(size):
            batch = next(batches, None)
        if batch is None:
            return
        INFLATED.check(batch.nbytes, size, path)
        for row in range(batch.num_rows):
            number += 1
            place = f"row {number}" if not group else f"row group {group + 1}, row {number}"
            values = problems.read(partial(_values, batch.slice(row, 1), path), path, place)
            if values is not None:
                yield from _record(values, path, place, problems)


def _values(row: Any, path: Path) -> Mapping[str, Any]:
    """The values of one row by column."""
    LINE.check(row.nbytes, row.nbytes, path)
    ITEMS.check(sum(map(_count, row.columns)), row.nbytes, path)
    return row.to_pylist()[0]


def _count(array: Any) -> int:
    """Number of values in an array and in the arrays within it."""
    inner = array.flatten() if array.type.num_fields else []
    return len(array) + sum(map(_count, inner if isinstance(inner, list) else [inner]))


def _record(values: Mapping[str, Any], path: Path, place: str, problems: Problems) -> Iterator[Record]:
    """The record of a line or a row; none where it does not fit together, which is told."""
    name = str(values.get("sample", place.rpartition(" ")[2]))
    record = problems.read(lambda: from_mapping(values, values.get("step", 0), name), path, place)
    return iter(() if record is None else (record,))

"""The archive of `torch.save`: one reader lists and finds its records, on one opened file.

The reader is torch's own `PyTorchFileReader`. Python's `zipfile` lists the archive too, and an archive of which the two
lists differ is refused: it would show another reader another content. `torch.load` is not called, because it runs an
archive of TorchScript as a program.
"""

import math
import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.opened import Opened, read

LOCAL_HEADER = struct.Struct("<4s4xH")  # of a record of an archive: its mark, and how the record is compressed
MARK = b"PK\x03\x04"
END, END_SIZE = b"PK\x05\x06", 22  # the last record of an archive without a comment: its mark, and its bytes
Entry = tuple[str, int, int]  # name of a record, place of its header, and size


class Archive:
    """An opened archive of `torch.save`.

    Raises:
        RecordError: the file is no such archive, holds a TorchScript program, or shows other readers another list.
    """

    def __init__(self, path: Path):
        self.opened = Opened(path)
        if self.opened.bytes_at(0, min(self.opened.size, len(MARK)) or 1) != MARK:
            raise RecordError(f"{path}: no archive of torch.save (torch 1.6 or later)")
        self.reader = torch._C.PyTorchFileReader(self.opened.file)
        names = self.reader.get_all_records()
        if self._listed(names) != _listed_by_zipfile(self.opened):
            raise RecordError(f"{path}: shows two readers of archives two lists of records, so neither is believed")
        if any(name.endswith("constants.pkl") for name in names):
            raise RecordError(f"{path}: a TorchScript program, not a dump")
        if "byteorder" in names and self.read("byteorder") != sys.byteorder.encode():
            raise RecordError(f"{path}: was written on a machine with another order of bytes")

    def _listed(self, names: Iterable[str]) -> list[Entry]:
        reader: Any = self.reader
        return sorted((name, reader.get_record_header_offset(name), reader.get_record_size(name)) for name in names)

    def place(self, name: str) -> tuple[int, int]:
        """Offset and size of a record; raises RecordError where it is compressed, or lies beyond the file's end."""
        reader: Any = self.reader  # whose types lack two of its methods
        header = self.opened.bytes_at(reader.get_record_header_offset(name), LOCAL_HEADER.size)
        if LOCAL_HEADER.unpack(header) != (MARK, zipfile.ZIP_STORED):
            raise RecordError(f"{self.opened.path}: {name}: is compressed, and torch.save compresses nothing")
        return reader.get_record_offset(name), reader.get_record_size(name)

    def read(self, name: str) -> bytearray:
        """The bytes of a record."""
        return self.opened.bytes_at(*self.place(name))


def _listed_by_zipfile(opened: Opened) -> list[Entry]:
    """The records as `zipfile` lists them, without the folder that torch puts around all of them."""
    with zipfile.ZipFile(opened.file) as archive:
        entries = archive.infolist()
    folder = entries[0].filename.partition("/")[0] if entries else ""
    return sorted(
        (entry.filename.removeprefix(f"{folder}/"), entry.header_offset, entry.file_size) for entry in entries
    )


def check_whole(opened: Opened) -> None:
    """Check that a file which is a zip archive, as .pt and .npz are, is nothing else.

    Raises:
        RecordError: bytes stand before or behind the archive, such as the end of a longer file below it.
    """
    if not zipfile.is_zipfile(opened.file):
        return
    with zipfile.ZipFile(opened.file) as archive:
        begin = min((record.header_offset for record in archive.infolist()), default=0)
    if begin or opened.bytes_at(opened.size - END_SIZE, len(END)) != END:
        reason = "holds bytes before or behind its archive that no tensor has; write the file anew"
        raise RecordError(f"{opened.path}: {reason}")


@dataclass(frozen=True, eq=False)
class Storage:
    """Numbers of an archive that are not read yet."""

    archive: Archive
    key: str
    dtype: torch.dtype

    def read(self, dtype: torch.dtype) -> Tensor:
        """All numbers, as numbers of `dtype`."""
        offset, size = self.archive.place(f"data/{self.key}")
        return self.archive.opened.tensor_at(offset, size // dtype.itemsize, dtype)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of an archive that is not read yet; `numel` is what the file claims, and `read` checks the claim."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """The tensor; raises RecordError where it does not lie within its storage, or the storage within the file."""
        path = self.storage.archive.opened.path
        return read(path, lambda: _strided(self.storage.read(self.dtype), self))


def _strided(flat: Tensor, spec: Stored) -> Tensor:
    steps = zip(spec.shape, spec.strides, strict=True)
    last = spec.offset + sum((count - 1) * step for count, step in steps)
    if spec.numel and last >= flat.numel():
        raise RecordError(f"a tensor of shape {list(spec.shape)} names numbers beyond its storage")
    return torch.as_strided(flat, spec.shape, spec.strides, spec.offset) if spec.numel else flat.new_empty(spec.shape)

"""Tensors in safetensors and npz files, read from one opened file, without pickled objects."""

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_plugins.shared.budget import INFLATED, ITEMS, LINE, RecordError
from mis_plugins.shared.files import replaced
from mis_plugins.shared.opened import Opened, optional, read

LENGTH = struct.Struct("<Q")  # of the header of a safetensors file
DTYPES: Mapping[Any, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
WRITTEN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # how numpy writes an array


class Safetensors:
    """A safetensors file: its tensors by name, and the header's own texts; raises RecordError where it is damaged."""

    def __init__(self, path: Path):
        self.path, self.opened = path, Opened(path)
        self._told = read(path, self._header)
        self.metadata: Mapping[str, str] = self._told.pop("__metadata__", None) or {}
        is_text = isinstance(self.metadata, dict) and all(isinstance(value, str) for value in self.metadata.values())
        if not is_text or not all(isinstance(value, dict) for value in self._told.values()):
            raise RecordError(f"{path}: has no header of a safetensors file")
        read(path, self._check_cover)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of their bytes."""
        return list(self._told)

    def tensor(self, name: str) -> Tensor:
        """One tensor; raises RecordError where there is none, or its bytes are not those of its shape."""
        return read(self.path, lambda: self._tensor(name))

    def _header(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(self.opened.bytes_at(0, LENGTH.size))
        LINE.check(length, self.opened.size, f"{self.path}: its header")
        self._begin = LENGTH.size + length
        text = self.opened.bytes_at(LENGTH.size, length)
        ITEMS.check(sum(map(text.count, (b",", b"[", b"{"))), self.opened.size, f"{self.path}: its header")
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
        if not isinstance(header, dict):
            raise RecordError(f"{self.path}: has no header of a safetensors file")
        return header

    def _check_cover(self) -> None:
        """Refuse bytes that belong to no tensor or to two; a file that is too short is told where a tensor is read."""
        place = 0
        for begin, end in sorted(entry["data_offsets"] for entry in self._told.values()):
            if begin != place:
                raise RecordError(f"{self.path}: bytes {place} to {begin} belong to no tensor, or to two")
            place = end
        if place < (size := self.opened.size - self._begin):
            raise RecordError(f"{self.path}: bytes {place} to {size} belong to no tensor")

    def _tensor(self, name: str) -> Tensor:
        entry = self._told.get(name)
        if entry is None:
            raise RecordError(f"{self.path}: holds no tensor {name}")
        dtype, shape, (begin, end) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if dtype is None:
            raise RecordError(f"{self.path}: {name}: numbers of the kind {entry['dtype']!r} are not read")
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise RecordError(f"{self.path}: {name}: has a shape or a place that no tensor has")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise RecordError(f"{self.path}: {name}: has {end - begin} bytes, and its shape {shape} needs others")
        return self.opened.tensor_at(self._begin + begin, math.prod(shape), dtype).reshape(shape)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which a name stands once: another reader may take the other of two values."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise RecordError("a name stands twice in one object")
    return mapping


class Npz:
    """An npz file: its arrays by name, as written; raises RecordError where it is damaged or two have one name."""

    def __init__(self, path: Path):
        self.path, self.opened = path, Opened(path)
        self.opened.bytes_at(0, 1)  # refuses an empty file
        self._archive = read(path, lambda: zipfile.ZipFile(self.opened.file))
        self.names = [name.removesuffix(".npy") for name in self._archive.namelist()]
        if len(set(self.names)) != len(self.names):
            raise RecordError(f"{path}: two arrays have one name")

    def tensor(self, name: str) -> Tensor:
        """One array; raises RecordError where there is none, or it is damaged."""
        return read(self.path, lambda: self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        member = self._archive.getinfo(f"{name}.npy")
        if member.compress_type not in WRITTEN:
            raise RecordError(f"{self.path}: {name}: is compressed in a way that numpy does not write")
        if member.compress_type != zipfile.ZIP_STORED:
            INFLATED.check(member.file_size, self.opened.size, f"{self.path}: {name}")
        with self._archive.open(member) as file:
            return _array(file, member.file_size)


def _array(file: Any, size: int) -> Tensor:
    """Read an array behind its header. `size` is that of both, as the archive says."""
    numpy = optional("numpy")
    header = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
    shape, by_columns, dtype = header[numpy.lib.format.read_magic(file)](file)
    if dtype.hasobject:
        raise RecordError("holds pickled objects")
    count = math.prod(shape)
    if not 0 <= count * dtype.itemsize <= size:
        raise RecordError(f"an array of shape {shape} needs more bytes than the archive has")
    flat = numpy.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)
    if flat.size != count or file.read(1):
        raise RecordError(f"an array of shape {shape} has other bytes than its shape needs")
    flat = flat.astype(dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(flat.reshape(shape, order="F" if by_columns else "C"))


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        RecordError: the library is not installed, or failed.
        OSError: the file cannot be made.
    """
    save_file = optional("safetensors.torch").save_file
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in plain.values())
    with replaced(path, size) as partial:
        try:
            save_file(plain, partial, None if header is None else dict(header))
        except Exception as error:
            raise RecordError(f"{path}: {size:,} bytes of tensors cannot be written: {error}") from error

"""Files of tensors: written whole or not at all, and read without trust in what wrote them.

Tensors are mapped, not read, so that a tensor larger than memory can be compared block by block. Reading imports and
calls nothing that a file names (`weights_only`, no pickled objects in numpy arrays). A damaged file is a `RecordError`.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.files import replaced
from mis_plugins.shared.shell import not_installed

T = TypeVar("T")


def optional(module: str) -> ModuleType:
    """Import a library of the extra `verify`, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecordError(not_installed(error, "verify")) from error


def read(path: Path, function: Callable[[], T]) -> T:
    """Call `function`, and turn whatever it raises into a `RecordError` that names the file.

    The libraries raise a dozen kinds of errors on damaged files: the kind depends on the place of the damage.
    """
    try:
        return function()
    except RecordError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RecordError(f"{path}: cannot be read: {reason}") from error


def load_pt(path: Path) -> Any:
    """Load what `torch.save` wrote, if the file holds tensors, numbers, texts, lists, dicts and numpy's arrays alone.

    Arrays of plain numbers become tensors. Single numbers of numpy, and arrays of objects, stay inert stand-ins.
    """

    def load() -> Any:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are no archives and are read whole
        with _numbers_of_numpy():
            return _with_tensors(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))

    return read(path, load)


class _Inert:
    """A stand-in for what numpy makes: reading calls nothing of numpy's, so that a file cannot choose what runs."""

    state: Any = None

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_ins(name: str, *modules: str) -> tuple[type[_Inert], ...]:
    """A class for each module under whose name files of numpy 1 or of numpy 2 ask for `name`."""
    return tuple(type(name, (_Inert,), {"__module__": module}) for module in modules)


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ARRAYS = _stand_ins("_reconstruct", *_MULTIARRAY)
_NUMPY: list[Callable | tuple[Callable, str]] = [
    *_stand_ins("dtype", "numpy"),
    *_stand_ins("ndarray", "numpy"),
    *_stand_ins("scalar", *_MULTIARRAY),
    *_ARRAYS,
]
_DTYPES: dict[Any, torch.dtype] = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64, "c16": torch.complex128,
    "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64, "b1": torch.bool,
    "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
}  # fmt: skip


def _with_tensors(value: Any) -> Any:
    """Give what a file holds with a tensor for each array of plain numbers."""
    if isinstance(value, _ARRAYS):
        return _tensor(value)
    if type(value) in (list, tuple):
        return type(value)(map(_with_tensors, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _with_tensors(one)) for key, one in value.items())
    return value


def _tensor(array: _Inert) -> Any:
    """The array as a tensor; the array itself where it holds anything but plain numbers, in this machine's order.

    Raises:
        RecordError: the bytes are not those of the shape.
    """
    if not isinstance(array.state, tuple) or len(array.state) != 5:
        return array
    _, shape, dtype, by_columns, data = array.state
    order = dtype.state[1] if isinstance(dtype, _Inert) and isinstance(dtype.state, tuple) else None
    known = _DTYPES.get(dtype.arguments[0]) if order in ("<", "|") and dtype.arguments else None
    if known is None or not isinstance(data, bytes):
        return array
    if len(data) != math.prod(shape) * known.itemsize:
        raise RecordError(f"an array of numpy has {len(data)} bytes, and its shape {shape} needs others")
    flat = torch.frombuffer(bytearray(data), dtype=known) if data else torch.empty(0, dtype=known)
    return flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1]) if by_columns else flat.reshape(shape)


@contextmanager
def _numbers_of_numpy() -> Iterator[None]:
    """Let files hold numbers and arrays of numpy, and nothing that a library (Megatron-core) has let torch call."""
    allowed = torch.serialization
    if not hasattr(allowed, "clear_safe_globals"):  # torch before 2.4 cannot read files with numbers of numpy
        yield
        return
    others = allowed.get_safe_globals()
    allowed.clear_safe_globals()
    allowed.add_safe_globals(_NUMPY)
    try:
        yield
    finally:
        allowed.clear_safe_globals()
        allowed.add_safe_globals(others)


def safetensors_names(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the tensors of a safetensors file, and its header."""
    safe_open = optional("safetensors").safe_open

    def names() -> tuple[list[str], dict[str, str]]:
        with safe_open(path, "pt") as file:
            return list(file.keys()), dict(file.metadata() or {})

    return read(path, names)


def load_safetensors(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors file."""
    safe_open = optional("safetensors").safe_open

    def tensor() -> Tensor:
        with safe_open(path, "pt") as file:
            return file.get_tensor(name)

    return read(path, tensor)


def save_safetensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
) -> None:
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


def npz_names(path: Path) -> list[str]:
    """Names of the arrays of an npz file, in the order in which they were written."""

    def names() -> list[str]:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]

    return read(path, names)


def load_npz(path: Path, name: str) -> Tensor:
    """One array of an npz file: mapped where it is stored, read whole where it is compressed."""
    numpy = optional("numpy")

    def array() -> Tensor:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type == zipfile.ZIP_STORED:
                return torch.from_numpy(_mapped(path, member))
            with archive.open(member) as file:
                return torch.from_numpy(numpy.lib.format.read_array(file, allow_pickle=False))

    return read(path, array)


def _mapped(path: Path, member: zipfile.ZipInfo) -> Any:
    """Map a stored array in place. Name and extra field of the local header may be longer than the directory says."""
    numpy = optional("numpy")
    header = struct.Struct("<26xHH")
    with path.open("rb") as file:
        file.seek(member.header_offset)
        file.seek(sum(header.unpack(file.read(header.size))), os.SEEK_CUR)
        major_minor = numpy.lib.format.read_magic(file)
        shape, fortran, dtype = NPY_HEADERS[major_minor](file)
        if dtype.hasobject:
            raise ValueError("holds pickled objects")
        order = "F" if fortran else "C"
        return numpy.memmap(path, dtype, mode="c", offset=file.tell(), shape=shape, order=order)


NPY_HEADERS: dict[tuple[int, int], Callable[[Any], tuple]] = {
    (1, 0): lambda file: optional("numpy").lib.format.read_array_header_1_0(file),
    (2, 0): lambda file: optional("numpy").lib.format.read_array_header_2_0(file),
}

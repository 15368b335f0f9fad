"""Files of tensors: written whole or not at all, read without trusting what wrote them.

Tensors are mapped, not read: one that is larger than memory can be compared block by block. Nothing that a file names
is ever imported or called (`weights_only`, no pickled numpy arrays), and a damaged one is a `RecordError`.
"""

from __future__ import annotations

import importlib
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mis_plugins.errors import UserError
from mis_plugins.shared.shell import not_installed

T = TypeVar("T")


class RecordError(UserError):
    """A record or a dump that cannot be read or written."""


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; takes its name when the block ends well, and is removed when it does not.

    In a folder of its own: ranks of several machines write beside each other, and their process ids may be alike. A
    pipe, a link or /dev/stdout is written to itself: its name is not ours to give away.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    with TemporaryDirectory(dir=path.parent, prefix=".partial-") as folder:
        partial = Path(folder, path.name)
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)


def check_writable(path: Path, flag: str) -> None:
    """Called before work whose outcome goes there.

    Raises:
        RecordError: it could not be written; it names the flag.
    """
    if path.is_dir():
        raise RecordError(f"{flag} {path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{flag} {path}: its folder cannot be made: {error.strerror}") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecordError(f"{flag} {path}: may not be written")


def optional(module: str) -> ModuleType:
    """A library of the extra `verify`, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecordError(not_installed(error, "verify")) from error


def read(path: Path, function: Callable[[], T]) -> T:
    """What `function` returns; whatever it raises becomes a `RecordError` that names the file.

    The libraries raise a dozen kinds of errors on damaged files, and which one depends on where the damage is.
    """
    try:
        return function()
    except RecordError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RecordError(f"{path}: cannot be read: {reason}") from error


def load_pt(path: Path) -> Any:
    """What `torch.save` wrote, if it is made of tensors, numbers, texts, lists and dicts."""

    def load() -> Any:
        mapped = zipfile.is_zipfile(path)  # not so before torch 1.6; such a file is read whole
        with _numbers_of_numpy():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)

    return read(path, load)


class _Number:
    """A number of numpy, unread: nothing of numpy's is called, so that a file cannot choose what runs."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# By the names that numpy 1 and 2 give what makes one of their numbers.
_NUMPY: list[Callable | tuple[Callable, str]] = [
    type(name, (_Number,), {"__module__": module})
    for module, name in (
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
    )
]


@contextmanager
def _numbers_of_numpy() -> Iterator[None]:
    """Let files hold numbers of numpy, and nothing that another library, such as Megatron-core, has torch call."""
    allowed = torch.serialization
    if not hasattr(allowed, "clear_safe_globals"):  # before torch 2.4 such a file cannot be read
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
    with replaced(path) as partial:
        try:
            save_file(plain, partial, None if header is None else dict(header))
        except Exception as error:
            raise RecordError(f"{path}: cannot be written: {error}") from error


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
    """A stored array in place. The local header's name and extra field may be longer than the directory says."""
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

"""Files of tensors: written whole or not at all, and read without trust in what wrote them.

Tensors are mapped, not read, so that a tensor larger than memory can be compared block by block. Reading imports and
calls nothing that a file names (`weights_only`, no pickled numpy arrays). A damaged file is a `RecordError`.
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
    """Yield a partial file beside `path`, which replaces `path` when the block ends well and is removed otherwise.

    The partial file lies in a folder of its own: ranks of several machines may write beside each other, with equal
    process ids. A pipe, a link or /dev/stdout is yielded itself, because a rename would replace it by a file.
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
    """Check, before the work begins, that its outcome can be written to `path`.

    Raises:
        RecordError: `path` cannot be written; the message names the flag.
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
    """Load what `torch.save` wrote, if the file holds tensors, numbers, texts, lists and dicts alone."""

    def load() -> Any:
        mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are no archives and are read whole
        with _numbers_of_numpy():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)

    return read(path, load)


class _Number:
    """A stand-in for a number of numpy: reading calls nothing of numpy's, so that a file cannot choose what runs."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# Stand-ins under the names by which files of numpy 1 and of numpy 2 ask for a number.
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
    """Let files hold numbers of numpy, and nothing that a library such as Megatron-core has allowed torch to call."""
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

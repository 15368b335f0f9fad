"""Read files of `torch.save` that others wrote, which may name any class: nothing that a file names is imported.

Tensors, plain numbers, texts, lists and dicts are read. Every other class that the file names becomes an `Opaque`
object, which takes whatever the file gives it and does nothing. Tensors are mapped, not read.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import _utils

from mis_plugins.shared.storage import RecordError, read

# Functions that put a tensor together from numbers; each checks that it stays within its storage.
REBUILDS = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"}
NUMBERS = {"f8": "d", "f4": "f", "i8": "q", "i4": "i", "b1": "?"}


class Opaque:
    """What a file holds of a class that is not ours to import."""

    def __init__(self, *arguments: Any, **_: Any):
        self.arguments = arguments

    def __setstate__(self, _: Any) -> None:
        """Take the state of a foreign object, and forget it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an entry of a foreign dict, and forget it."""

    def append(self, _: Any) -> None:
        """Take an entry of a foreign list, and forget it."""

    def extend(self, _: Any) -> None:
        """Take entries of a foreign list, and forget them."""


def scalar(dtype: Any, data: Any = b"") -> Any:
    """A number of numpy, read from its bytes without numpy; `Opaque` where the kind of number is unknown."""
    kind = NUMBERS.get(str(dtype.arguments[0])) if isinstance(dtype, Opaque) and dtype.arguments else None
    fits = kind is not None and isinstance(data, bytes) and len(data) == struct.calcsize(f"<{kind}")
    return struct.unpack(f"<{kind}", data)[0] if fits else Opaque(dtype, data)


def encoded(text: Any, _: Any = None) -> Any:
    """Bytes, which old protocols of pickle write as a text of latin letters."""
    return text.encode("latin1") if isinstance(text, str) else Opaque(text)


class Restricted(pickle.Unpickler):
    """An unpickler that knows how to make tensors, and `Opaque` objects of everything else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch._utils" and global_name in REBUILDS:
            return getattr(_utils, global_name)
        if module_name == "collections" and global_name == "OrderedDict":
            return dict
        named = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(named, torch.dtype) or named is torch.Size:
            return named
        if (module_name, global_name) == ("_codecs", "encode"):
            return encoded
        if global_name == "scalar" and module_name.startswith("numpy."):
            return scalar
        return type(str(global_name), (Opaque,), {})


def load_foreign(path: Path) -> Any:
    """Load a file of `torch.save` without importing or calling anything that it names.

    Raises:
        RecordError: the file is damaged, or no archive of torch 1.6 or later.
    """

    def load() -> Any:
        if not zipfile.is_zipfile(path):
            raise RecordError(f"{path}: no archive of torch.save (torch 1.6 or later)")
        with zipfile.ZipFile(path) as archive:
            # torch.load would run such an archive as a program.
            if any(name.endswith("constants.pkl") for name in archive.namelist()):
                raise RecordError(f"{path}: a TorchScript program, not a dump")
        unpickler = SimpleNamespace(__name__="restricted", Unpickler=Restricted)
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=unpickler)

    return read(path, load)

"""Files are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.opened import optional


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
        raise RecordError(
            f"{flag} {path}: the folder of the file cannot be made: {error.strerror}"
        ) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RecordError(f"{flag} {path}: may not be written")


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

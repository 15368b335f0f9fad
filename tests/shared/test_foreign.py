"""Files of strangers run nothing, and ask for no more than their budget."""

import os
import pickle
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mis_plugins.shared import foreign
from mis_plugins.shared.arrays import Npz, Safetensors
from mis_plugins.shared.budget import OBJECTS, RecordError
from mis_plugins.shared.foreign import load_foreign, load_pt, tensor_of

NONE: Mapping[str, bytes] = {}
LIMIT = 10.0  # seconds for any file, however hostile


def archive(
    path: Path, content: bytes, compression: int = zipfile.ZIP_STORED, records: Mapping[str, bytes] = NONE
) -> Path:
    """An archive of `torch.save` around any pickle."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, record in {"data.pkl": content, "version": b"3\n", **records}.items():
            made.writestr(f"a/{name}", record)
    return path


def storage(key: str = "0", count: int = 4) -> bytes:
    """Opcodes that put a storage of floats on the stack."""
    told = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00" + key.encode()
    return told + b"X\x03\x00\x00\x00cpuJ" + struct.pack("<i", count) + b"tQ"


def integer(value: int) -> bytes:
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """Opcodes that put a tensor on the stack."""
    sizes = [b"(" + b"".join(map(integer, numbers)) + b"t" for numbers in (shape, strides)]
    arguments = b"(" + storage() + integer(offset) + b"".join(sizes) + b"\x89}t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def with_second_directory(content: bytes, renamed: Mapping[bytes, bytes]) -> bytes:
    """The archive with a copy of its directory before the end, which names other records of equal length."""
    ends = content.rindex(b"PK\x05\x06")
    size, begin = struct.unpack("<II", content[ends + 12 : ends + 20])
    if 0xFFFFFFFF in (size, begin):
        pytest.fail("torch writes a larger kind of archive now: rebuild this test")
    other = content[begin : begin + size]
    for name, instead in renamed.items():
        other = other.replace(name, instead)
    return content[: begin + size] + other + content[ends:]


FOUR = torch.arange(4.0)
NUMBERS = {"data/0": FOUR.numpy().tobytes()}


def test_what_torch_saves_is_read_alike(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "views": [base[1:3, ::2], base.t(), base[0].expand(3, 6)],
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bool, torch.int64, torch.bfloat16, torch.uint16)],
        "empty": [torch.empty(0), torch.empty(3, 0), torch.tensor(2.5)],
        "state": OrderedDict(weight=torch.nn.Parameter(torch.ones(2))),
        "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), np.int32)), np.float32(1.5),
                   np.float64(0.25), np.int64(-3), np.bool_(True)],
        "plain": [1, 2.5, "text", b"bytes", None, True, (1, 2), 2**70, {1: 2}, torch.float16, torch.Size([2])],
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    found, wanted = load_pt(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=False)
    for name in ("views", "kinds", "empty"):
        for ours, torchs in zip(found[name], wanted[name], strict=True):
            assert ours.dtype == torchs.dtype and torch.equal(ours, torchs)
    assert torch.equal(found["state"]["weight"], torch.ones(2))
    for ours, numpys in zip(found["arrays"][:2], wanted["arrays"][:2], strict=True):
        assert (ours.numpy() == numpys).all()
    assert found["arrays"][2:] == [1.5, 0.25, -3, True]
    assert found["plain"] == [*wanted["plain"][:-1], (2,)]


def test_an_archive_that_shows_two_readers_two_lists_runs_nothing(tmp_path: Path) -> None:
    """zipfile finds the second directory, before the end; torch the first, where the end says that it lies."""
    script = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script)
    renamed = {b"constants.pkl": b"constantz.pkl", b".py": b".pz"}
    (tmp_path / "two.pt").write_bytes(with_second_directory(script.read_bytes(), renamed))
    with zipfile.ZipFile(tmp_path / "two.pt") as seen:
        assert not any(name.endswith("constants.pkl") for name in seen.namelist())
    with pytest.raises(RecordError, match="two lists of records"):
        load_foreign(tmp_path / "two.pt")


GLOBALS = ("posix\nsystem", "builtins\neval", "torch.serialization\nload", "torch\nload", "torch.jit\nload",
           "importlib\nimport_module", "torch.storage\n_load_from_bytes", "numpy\nload", "os\nmkdir",
           "torch._utils\n_rebuild_device_tensor_from_numpy", "torch\n_dynamo", "subprocess\nPopen")  # fmt: skip


@pytest.mark.parametrize("named", GLOBALS)
@pytest.mark.parametrize("call", [b"R", b"\x81", b"}\x92", b"b"])
def test_nothing_that_a_file_names_is_called(
    named: str, call: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = b"c" + named.encode() + b"\n(X\x0f\x00\x00\x00touch ./written" + b"t" + call + b"."
    made = archive(tmp_path / "a.pt", program)
    load_foreign(made)
    with pytest.raises(RecordError, match="holds a"):
        load_foreign(made, strict=True)
    assert os.listdir(tmp_path) == ["a.pt"]


COPIES = b"]q\x00(" + b"X\x00\x00\x01\x00" + b"x" * 65536 + b"q\x01" + b"c_codecs\nencode\nq\x02"
LAUGHS = b"]" + b"".join(b"q%c](h%ch%ce" % (n, n, n) for n in range(48)) + b"."
DEEP = b"]" * 5000 + b"a" * 4999 + b"."
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "memo without end": (lambda path: archive(path, b"]r\xff\xff\xff\x7f."), ""),
    "stride 0": (lambda path: archive(path, tensor((2**33,), (0,)) + b".", records=NUMBERS), "values"),
    "beyond its storage": (lambda path: archive(path, tensor((5,), (1,)) + b".", records=NUMBERS), "its storage"),
    "a negative stride": (lambda path: archive(path, tensor((2,), (-1,), 1) + b".", records=NUMBERS), "no tensor has"),
    "a negative offset": (lambda path: archive(path, tensor((2,), (1,), -1) + b".", records=NUMBERS), "no tensor has"),
    "an endless shape": (lambda path: archive(path, tensor((2**61, 2**61), (0, 0)) + b".", records=NUMBERS), "values"),
    "inflates": (lambda path: archive(path, bytes(10**8), zipfile.ZIP_DEFLATED), "compressed"),
    "a billion laughs": (lambda path: archive(path, LAUGHS), "values"),
    "holds itself": (lambda path: archive(path, b"]q\x00h\x00a."), "holds itself"),
    "5,000 levels": (lambda path: archive(path, DEEP), "levels of nesting"),
    "lists alone": (lambda path: archive(path, b"(" + b"]" * 20_000 + b"l."), "objects"),
    "classes alone": (lambda path: archive(path, b"(" + b"ca\nb\n" * 20_000 + b"l."), "objects"),
    "copies of a text": (lambda path: archive(path, COPIES + b"h\x02(h\x01tR" * 2000 + b"e."), "values"),
    "keys of one hash": (lambda path: archive(path, _one_hash(30_000)), "whole number"),
    "a list as a key": (lambda path: archive(path, b"}]K\x01s."), "as a key"),
    "dicts alone": (lambda path: archive(path, b"(" + b"}K\x00Ns" * 20_000 + b"l."), "objects"),
    "a shape of a list": (lambda path: archive(path, b"ctorch\nSize\n(](" + b"K\x01" * 99 + b"etR."), "dimensions"),
    "no pickle": (lambda path: archive(path, b""), "cannot be read"),
    "another order of bytes": (lambda path: archive(path, b"]."  , records={"byteorder": b"big"}), "order of bytes"),
    "no archive": (lambda path: _written(path, b"PK\x03\x04" + b"x" * 99), "cannot be read"),
    "old torch": (lambda path: _written(path, pickle.dumps({})), "no archive of torch.save"),
    "empty": (lambda path: _written(path, b""), "is empty"),
    "a pipe": (lambda path: _pipe(path), "no regular file"),
    "a folder": (lambda path: _folder(path), "no regular file"),
}  # fmt: skip


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _one_hash(count: int) -> bytes:
    return b"}(" + b"".join(integer(number * (2**61 - 1)) + b"N" for number in range(count)) + b"u."


def test_keys_of_other_kinds_hide_no_other_entry(tmp_path: Path) -> None:
    torch.save({"a": 1, "b": {(1, "x"): 2, 0.5: 3, b"c": 4}}, tmp_path / "a.pt")
    found = load_foreign(tmp_path / "a.pt")
    assert found["a"] == 1
    assert {str(key): value for key, value in found["b"].items()} == {"(1, 'x')": 2, "0.5": 3, "b'c'": 4}


def test_numbers_in_another_order_of_bytes_are_read(tmp_path: Path) -> None:
    wanted = np.array([[1.5, -2.0]])
    torch.save({"a": wanted.astype(">f4"), "b": np.array(2 + 1j, ">c16")[()]}, tmp_path / "a.pt")
    found = load_pt(tmp_path / "a.pt")
    assert (found["a"].numpy() == wanted).all() and found["b"] == 2 + 1j
    np.savez(tmp_path / "a.npz", x=wanted.astype(">f8"))
    assert (Npz(tmp_path / "a.npz").tensor("x").numpy() == wanted).all()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as made, pytest.warns(UserWarning, match="Duplicate"):
        for value in (b"1", b"2"):
            made.writestr("x.npy", npy_of("|u1", "(1,)", value))
    with pytest.raises(RecordError, match="two arrays have one name"):
        Npz(tmp_path / "a.npz")
    one = b'"x":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    header = b"{" + one % (0, 1) + b"," + one % (1, 2) + b"}"
    with pytest.raises(RecordError, match="a name stands twice"):
        Safetensors(safetensors(tmp_path / "a.safetensors", header, b"12"))


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(100_000)}, file)
    held = load_foreign(file)["a"]
    os.truncate(file, 2000)
    with pytest.raises(RecordError, match=r"a\.pt: .*shorter"):
        held.read()


def test_a_large_tensor_lies_in_a_copy_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mis_plugins.shared.opened.IN_MEMORY", 1000)
    file, wanted = tmp_path / "a.pt", torch.arange(1000.0)
    torch.save(wanted, file)
    found = load_pt(file)
    os.truncate(file, 0)
    assert torch.equal(found, wanted)


def safetensors(path: Path, header: bytes, content: bytes = b"", length: int | None = None) -> Path:
    return _written(path, struct.pack("<Q", len(header) if length is None else length) + header + content)


HEADERS: dict[str, tuple[bytes, str]] = {
    "no header": (b"[]", "no header"),
    "no JSON": (b"{", "cannot be read"),
    "deep": (b"[" * 200_000, "cannot be read"),
    "a shape beyond": (b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,16]}}', "needs others"),
    "beyond the end": (b'{"x":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}', "beyond its end"),
    "negative": (b'{"x":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}', "no tensor has"),
    "a text as a size": (b'{"x":{"dtype":"F32","shape":["4"],"data_offsets":[0,16]}}', "no tensor has"),
    "unknown numbers": (b'{"x":{"dtype":"Z9","shape":[4],"data_offsets":[0,16]}}', "Z9"),
    "no such key": (b'{"x":{"shape":[4]}}', "cannot be read"),
    "a hole before": (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', "bytes 0 to 8 belong to no tensor"),
    "a hole behind": (b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "bytes 8 to 16 belong to no tensor"),
    "a hole between": (b'{"y":{"dtype":"U8","shape":[4],"data_offsets":[12,16]},'
                       b'"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "bytes 8 to 12 belong to no tensor"),
    "bytes of two": (b'{"y":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
                     b'"x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}', "or to two"),
    "no tensor at all": (b'{}', "bytes 0 to 16 belong to no tensor"),
    "no dict": (b'{"x":[]}', "no header"),
}  # fmt: skip


def npy(header: bytes, content: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def npy_of(kind: str, shape: str, content: bytes) -> bytes:
    return npy(f"{{'descr':'{kind}','fortran_order':False,'shape':{shape}}}".encode(), content)


ARRAYS: dict[str, tuple[bytes, int, str]] = {
    "a shape beyond": (npy_of("<f4", "(10**12,)", bytes(16)), 0, "cannot be read"),
    "a large shape": (npy_of("<f4", "(1000000000000,)", bytes(16)), 0, "more bytes"),
    "objects": (npy_of("|O", "(1,)", pickle.dumps([1])), 0, "pickled objects"),
    "inflates": (npy_of("|u1", "(400000000,)", bytes(4 * 10**8)), 8, "inflated bytes"),
    "another compression": (npy_of("|u1", "(1,)", b"1"), 14, "numpy does not write"),
    "more bytes": (npy_of("|u1", "(1,)", b"12"), 0, "other bytes"),
}  # fmt: skip


def npz(path: Path, array: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("x.npy", array)
    return path


READ: dict[str, Callable[[Path], object]] = {
    "a.pt": lambda file: tensor_of(load_foreign(file)),
    "a.safetensors": lambda file: Safetensors(file).tensor("x"),
    "a.npz": lambda file: Npz(file).tensor("x"),
}
LONG_HEADER = partial(safetensors, header=b"{}", length=2**62), "bytes of one line|beyond its end"
FILES: dict[tuple[str, str], tuple[Callable[[Path], Path], str]] = {
    **{("a.pt", name): case for name, case in HOSTILE.items()},
    **{("a.safetensors", name): (partial(safetensors, header=header, content=bytes(16)), told)
       for name, (header, told) in HEADERS.items()},
    ("a.safetensors", "a header longer than the file"): LONG_HEADER,
    **{("a.npz", name): (partial(npz, array=array, compression=compression), told)
       for name, (array, compression, told) in ARRAYS.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", FILES, ids=" ".join)
def test_a_hostile_file_is_refused_soon(case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "OBJECTS", replace(OBJECTS, base=10_000))  # checking types takes its time
    make, message = FILES[case]
    made, begun = make(tmp_path / case[0]), time.monotonic()
    if message:
        with pytest.raises(RecordError, match=message) as told:
            READ[made.name](made)
        assert str(made) in str(told.value)
    else:
        READ[made.name](made)
    assert time.monotonic() - begun < LIMIT

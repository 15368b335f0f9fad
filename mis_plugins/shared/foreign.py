"""Read files of `torch.save` that others wrote, by an unpickler that imports and calls nothing that a file names.

Numbers, texts, lists and dicts are read, and a tensor becomes a `Stored`. Every other class that the file names becomes
an `Opaque`, which takes whatever the file gives it and does nothing.
"""

import math
import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_plugins.shared.archive import Archive, Storage, Stored
from mis_plugins.shared.budget import DEPTH, OBJECTS, VALUES, Clock, RecordError
from mis_plugins.shared.opened import read

MOST_DIMENSIONS = 64
LONGEST_KEY = 100  # letters
DICT = 4  # objects that a dict counts for, with the entry that makes it larger
NAME = 64  # objects that a name of a class counts for; a pickler writes each name once
# The numbers of torch's classes of storages, and of numpy's kinds of numbers.
STORAGES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip
NUMPYS: Mapping[Any, torch.dtype] = {
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64, "c16": torch.complex128,
    "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64, "b1": torch.bool,
    "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
}  # fmt: skip


class Opaque:
    """What a file holds of a class that is not ours to import, or the class; `name` has the class's module and name."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()):
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arguments: Any) -> Any:
        """An object of the class."""
        return Opaque(self.name, arguments)

    def append(self, *_: Any) -> None:
        """Take entries of a foreign list or dict, and forget them."""

    extend = __setitem__ = append


def _rebuild(
    storage: Any, offset: Any, shape: Any, strides: Any, _: Any = None, __: Any = None, marks: Any = None
) -> Stored | Opaque:
    """`torch._utils._rebuild_tensor` and `_v2`: numbers of the kind that the storage's class is named after."""
    return _stored(storage, storage.dtype, offset, shape, strides, marks)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _: Any, __: Any, dtype: Any, marks: Any = None
) -> Stored | Opaque:
    """`torch._utils._rebuild_tensor_v3`: numbers that no class of storages is named after."""
    return _stored(storage, dtype, offset, shape, strides, marks)


def _stored(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any, marks: Any) -> Stored | Opaque:
    is_plain = len(shape) == len(strides) <= MOST_DIMENSIONS
    if not is_plain or any(type(n) is not int or not 0 <= n < 2**62 for n in (offset, *shape, *strides)):
        raise RecordError("holds a tensor of a shape or with strides that no tensor has")
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise RecordError("holds a tensor without numbers")
    if marks:
        return Opaque("torch.Tensor that is a conjugate or negative view")
    return Stored(storage, dtype, offset, tuple(shape), tuple(strides))


def _number(dtype: Any, data: Any = b"") -> Any:
    """A number of numpy, read from its bytes without numpy; `Opaque` where the kind of number is unknown."""
    kind = _kind(dtype)
    if kind is None or not isinstance(data, bytes) or len(data) != kind.itemsize:
        return Opaque("a number of numpy")
    return _flat(data, dtype, kind).item()


def _flat(data: bytes, dtype: Any, kind: torch.dtype) -> Tensor:
    """The numbers of numpy's bytes; a dtype may say that the largest part of a number comes first."""
    if not data:
        return torch.empty(0, dtype=kind)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype.state[1] == ">":
        part = kind.itemsize // (2 if kind.is_complex else 1)
        numbers = numbers.reshape(-1, part).flip(1).reshape(-1)
    return numbers.view(kind)


def _kind(dtype: Any) -> torch.dtype | None:
    """The kind of numbers that a dtype of numpy names; None where it is no plain one."""
    is_numpys = isinstance(dtype, Opaque) and dtype.name == "numpy.dtype" and isinstance(dtype.state, tuple)
    order = dtype.state[1] if is_numpys and len(dtype.state) > 1 else None
    return NUMPYS.get(dtype.arguments[0]) if order in ("<", ">", "|") and dtype.arguments else None


def array_of(array: Opaque) -> Any:
    """The array of numpy as a tensor; the array itself where it holds anything but plain numbers.

    Raises:
        RecordError: the bytes are not those of the shape.
    """
    _, shape, dtype, by_columns, data = array.state
    kind = _kind(dtype)
    if kind is None or not isinstance(data, bytes):
        return array
    if len(data) != math.prod(shape) * kind.itemsize:
        raise RecordError(f"an array of numpy has {len(data)} bytes, and its shape {shape} needs others")
    flat = _flat(data, dtype, kind)
    return flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1]) if by_columns else flat.reshape(shape)


def _size(numbers: Any) -> tuple[Any, ...]:
    if len(numbers) > MOST_DIMENSIONS:
        raise RecordError(f"holds a shape of {len(numbers)} dimensions")
    return tuple(numbers)


ARRAY = "numpy._reconstruct"
NUMPYS_OWN = {("numpy", "dtype"), ("numpy", "ndarray")} | {
    (module, name)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("scalar", "_reconstruct")
}
PLAIN = Opaque("torch.Tensor")  # the class of a tensor with attributes, such as a buffer of `torch.nn.Buffer`
CALLED: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda call, kind, given, _: call(*given) if kind is PLAIN else kind(),
    ("torch", "Tensor"): PLAIN,
    ("torch", "Size"): _size,
    ("torch", "device"): lambda kind, *_: kind,
    ("collections", "OrderedDict"): lambda: {},
    ("builtins", "complex"): complex,
    ("builtins", "set"): lambda items=(): items,
    ("builtins", "frozenset"): lambda items=(): items,
}
"""What may be called for a class or a function that a file names. None copies a list or a text of the file."""


class Restricted(pickle._Unpickler):
    """An unpickler that makes numbers, texts, lists, dicts and `Stored` tensors, and `Opaque` objects of all else.

    Python's own unpickler in C allots a place for each number that an object may be called by: a few bytes take
    gigabytes. The one in Python keeps a dict.

    strict: refuse a class that is not known, in place of an `Opaque`.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, archive: Archive, content: bytearray, strict: bool):
        super().__init__(BytesIO(content), encoding="utf-8")
        self.archive, self.strict = archive, strict
        self.objects = self.copied = self.next_look = 0
        self.size = len(content)
        self.clock = Clock(archive.opened.size, archive.opened.path)

    def find_class(self, module: str, name: str, /) -> Any:
        module = module.replace("__builtin__", "builtins")
        if (module, name) in CALLED:
            return CALLED[module, name]
        if (module, name) == ("_codecs", "encode"):
            return self.encoded
        if (module, name) in NUMPYS_OWN:
            return _number if name == "scalar" else Opaque(f"numpy.{name}")
        if module in ("torch", "torch.storage"):
            named = STORAGES.get(name, vars(torch).get(name))
            if isinstance(named, torch.dtype):
                return named
        if self.strict:
            kind = "a tensor without plain bytes" if module.startswith("torch") else "a foreign object"
            raise RecordError(f"holds {kind} ({module}.{name})")
        return Opaque(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise RecordError("names a storage in a way that torch.save does not")
        return Storage(self.archive, key, dtype)

    def count(self, weight: int) -> None:
        """Count an object, which takes far more memory than its bytes in the file."""
        self.objects += weight
        if self.objects >= self.next_look:
            self.next_look = self.objects + 4096
            OBJECTS.check(self.objects, self.size, self.archive.opened.path)
            self.clock.check()

    def copy(self, letters: int) -> None:
        """Count letters of a copy: a file may ask for any number of copies of one text."""
        self.copied += letters
        VALUES.check(self.copied, self.size, self.archive.opened.path)

    def encoded(self, text: str, _: Any = None) -> bytes:
        """Bytes, which old protocols of pickle write as a text of latin letters."""
        self.copy(len(text))
        return text.encode("latin1")

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, Opaque):
            built.state = state
        elif not isinstance(built, dict):  # the dict of a module's weights has attributes, which nobody needs
            raise RecordError(f"gives a state to a {type(built).__name__}")
        if isinstance(built, Opaque) and built.name == ARRAY:
            self.copy(len(state[-1]))
            self.stack[-1] = array_of(built)

    def load_new(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)

    def load_new_with_keywords(self) -> None:
        self.stack.pop()
        self.load_new()

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)})


def _key(key: Any) -> Any:
    """A key of a dict; an `Opaque` in place of a key of a kind whose hashes a file could make equal."""
    if isinstance(key, tuple) and len(key) <= MOST_DIMENSIONS and all(map(_is_short, key)):
        return Opaque(repr(key))
    if isinstance(key, float | bytes):
        return Opaque(repr(key)[:LONGEST_KEY])
    if not isinstance(key, str | int | None | Opaque) or (isinstance(key, int) and key.bit_length() > 63):
        raise RecordError(f"holds a dict with a {type(key).__name__} as a key; expected a text or a whole number")
    return key


def _is_short(part: Any) -> bool:
    if isinstance(part, str | bytes):
        return len(part) <= LONGEST_KEY
    return isinstance(part, float | None) or (isinstance(part, int) and part.bit_length() <= 63)


Step = Callable[[Any], None]


def _counted(step: Step, weight: int) -> Step:
    def counting(unpickler: Restricted) -> None:
        unpickler.count(weight)
        step(unpickler)

    return counting


def _steps() -> dict[int, Step]:
    """What each opcode of a pickle does here."""
    plain: dict[int, Step] = dict(pickle._Unpickler.dispatch)
    for refused in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER):
        del plain[refused[0]]
    ours = {
        pickle.BUILD: Restricted.load_build,
        pickle.REDUCE: Restricted.load_new,
        pickle.NEWOBJ: Restricted.load_new,
        pickle.NEWOBJ_EX: Restricted.load_new_with_keywords,
        pickle.SETITEM: Restricted.load_setitem,
        pickle.SETITEMS: Restricted.load_setitems,
        pickle.DICT: Restricted.load_dict,
        pickle.EMPTY_SET: plain[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS: plain[pickle.APPENDS[0]],
        pickle.FROZENSET: plain[pickle.LIST[0]],
    }
    plain |= {opcode[0]: step for opcode, step in ours.items()}
    large = (
        pickle.EMPTY_LIST, pickle.LIST, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
        pickle.EMPTY_SET, pickle.FROZENSET, pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.PUT, pickle.BINPUT,
        pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.MARK,
    )  # fmt: skip
    weights = {**dict.fromkeys(large, 1), **dict.fromkeys((pickle.EMPTY_DICT, pickle.DICT), DICT),
               **dict.fromkeys((pickle.GLOBAL, pickle.STACK_GLOBAL), NAME)}  # fmt: skip
    return plain | {opcode[0]: _counted(plain[opcode[0]], weight) for opcode, weight in weights.items()}


Restricted.dispatch = _steps()


def load_foreign(path: Path, strict: bool = False) -> Any:
    """Load a file of `torch.save` without importing or calling anything that it names. Tensors stay `Stored`.

    Args:
        strict: refuse a file that names a class that is not known.

    Raises:
        RecordError: the file is damaged, or no archive of torch 1.6 or later, or asks for more than its budget.
    """

    def load() -> Any:
        archive = Archive(path)
        tree = Restricted(archive, archive.read("data.pkl"), strict).load()
        values, _ = extent(tree, {})
        VALUES.check(values, archive.opened.size, path)
        return tree

    return read(path, load)


CONTAINERS = {dict, list, tuple, str, bytes, Tensor, Stored, Opaque}


def extent(value: Any, extents: dict[int, tuple[int, int]], level: int = 0) -> tuple[int, int]:
    """Number of values in a tree, and its depth. What stands at several places counts at each of them.

    Args:
        extents: extents by the identity of an object; (-1, 0) while it is being measured.

    Raises:
        RecordError: the tree holds itself, or is nested too deep.
    """
    if isinstance(value, Stored | Tensor):
        return value.numel if isinstance(value, Stored) else value.numel(), 0
    if isinstance(value, str | bytes):
        return 1 + len(value) // 16, 0
    if id(value) in extents:
        values, depth = extents[id(value)]
        if values < 0:
            raise RecordError("holds a list or dict that holds itself")
        DEPTH.check(level + depth, 0, "the pickle")
        return extents[id(value)]
    DEPTH.check(level, 0, "the pickle")
    extents[id(value)] = (-1, 0)
    children = _children(value)
    below = [extent(child, extents, level + 1) for child in children if type(child) in CONTAINERS]
    measured = (1 + len(children) + sum(size for size, _ in below), 1 + max((deep for _, deep in below), default=0))
    extents[id(value)] = measured
    return measured


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [value.arguments, value.state] if isinstance(value, Opaque) else [*value]


def tensor_of(value: Any) -> Any:
    """The tensor of a `Stored`, and any other value itself."""
    return value.read() if isinstance(value, Stored) else value


def load_pt(path: Path) -> Any:
    """Load a file of `torch.save` that holds tensors, numbers, texts, lists, dicts and arrays of numpy alone."""
    return _with_tensors(load_foreign(path, strict=True))


def _with_tensors(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_with_tensors, value))
    if type(value) is dict:
        return {key: _with_tensors(item) for key, item in value.items()}
    return tensor_of(value)

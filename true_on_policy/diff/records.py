"""A recording lists recorded tensors in the order in which they were computed.

A recording is a file, or a folder of files:

    step=0___rank=0___dump_index=12___name=NAME___layer_id=2.pt   SGLang's dumper, and our module_recorder.py
    *.pt, *.pth, *.bin, *.ckpt   a tensor, or lists and dicts of tensors or numbers, by torch.save
    *.safetensors
    *.npz
    a dump of Miles or slime, of a rollout or a training step: its log-probs alone
    a record of log-probs (log_prob_record.py)

A key identifies a tensor: rank, name, layer, whether activation checkpointing recomputed it, and its
occurrence. The occurrence numbers tensors whose other fields are equal: a module that several layers share
keeps one name, and so does a module that runs again in the next step.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_plugins.shared.archive import Stored, check_whole
from mis_plugins.shared.arrays import Npz, Safetensors
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import Opaque, load_foreign, tensor_of
from mis_plugins.shared.opened import Opened, natural, read
from true_on_policy.diff.log_prob_record import FORMAT, LogProbRecord, host_samples, log_prob_records

NON_INTRUSIVE = "non_intrusive__"  # SGLang's prefix for the values that its hooks record
LOG_PROBS = "log_probs"
BEHAVIOR = "rollout_log_probs"  # the engine's log-probs in a host's dump

Value = Any  # a tensor, a LogProbRecord, or a text or number recorded beside tensors
Reader = Callable[[Path], Iterator[tuple[str, Callable[[], Value]]]]


@dataclass(frozen=True)
class Key:
    """A key identifies a recorded tensor: two tensors with equal keys are counterparts.

    `layer_id` is empty where `name` contains the layer.
    """

    name: str
    occurrence: int = 1
    layer_id: str = ""
    rank: int = 0
    recompute: bool = False

    def __str__(self) -> str:
        parts = (
            f" layer {self.layer_id}" if self.layer_id else "",
            f" rank {self.rank}" if self.rank else "",
            " recomputed" if self.recompute else "",
            f" #{self.occurrence}" if self.occurrence > 1 else "",
        )
        return self.name + "".join(parts)


@dataclass(frozen=True)
class Entry:
    """An entry is one recorded value that is not loaded yet.

    `load` returns a tensor, a log-prob record, or a text or number. An unreadable value raises
    RecordError.
    """

    key: Key
    load: Callable[[], Value]


@dataclass(frozen=True)
class Recording:
    """All entries of a file or folder, in execution order."""

    path: Path
    entries: tuple[Entry, ...]
    masked: int = 0  # how many tokens the loss mask of a host's dump leaves out

    @property
    def names(self) -> frozenset[str]:
        return frozenset(entry.key.name for entry in self.entries)


def read_recording(path: Path | str) -> Recording:
    """List the entries of a file or a folder; a tensor is loaded when it is compared.

    Raises:
        RecordError: there is no such file or folder, or it holds nothing that can be compared.
    """
    path = Path(path)
    files = sorted(_files(path), key=natural)
    items = [item for file in files for item in _items(file, alone=file == path)]
    items.sort(key=lambda item: item[0])
    if twice := [entry.key for (place, entry), (other, _) in pairwise(items) if place == other and not place[0]]:
        why = "has step, rank and dump_index of another dump: two recordings lie here; record into an empty folder"
        raise RecordError(f"{path}: {twice[0]} {why}")
    entries = [entry for _, entry in items]
    chosen = (entry for index in sorted(path.glob("*.index.json")) for entry in _chosen(index, entries))
    return Recording(path, numbered([*entries, *chosen]))


def engine_and_trainer(dump: Recording) -> tuple[Recording, Recording]:
    """Split a host's dump into the engine's log-probs and the trainer's, 0 where no engine sampled: outside the mask.

    Raises:
        RecordError: the dump lacks one of the two, or its loss mask leaves every token out.
    """
    loads, sides = {entry.key.name: entry.load for entry in dump.entries}, (BEHAVIOR, LOG_PROBS)
    if lacking := [name for name in sides if name not in loads]:
        for entry in dump.entries[:1]:
            entry.load()  # a file that cannot be read says why
        raise RecordError(f"{dump.path}: holds no {' and no '.join(lacking)}, so it needs a B to compare with")
    values, masked = [loads[name]() for name in sides], 0
    if (mask := getattr(values[0], "mask", None)) is not None:
        if not mask.any():
            raise RecordError(f"{dump.path}: the loss mask of the dump leaves every token out")
        values, masked = (
            [replace(side, log_probs=side.log_probs.where(mask, 0)) for side in values],
            int((~mask).sum()),
        )
    engine, trainer = (
        Recording(dump.path, (Entry(Key(LOG_PROBS), lambda side=side: side),), masked) for side in values
    )
    return engine, trainer


def numbered(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Number the occurrences of equal keys from 1, in the order of the entries."""
    counts, with_numbers = Counter[Key](), []
    for entry in entries:
        unnumbered = replace(entry.key, occurrence=0)
        counts[unnumbered] += 1
        with_numbers.append(replace(entry, key=replace(unnumbered, occurrence=counts[unnumbered])))
    return tuple(with_numbers)


_Item = tuple[tuple, Entry]  # a key to sort by, and an entry whose occurrence is not counted yet


def _files(path: Path) -> list[Path]:
    if path.exists() and not path.is_dir():
        if path.suffix not in READERS:
            raise RecordError(f"{path}: expected a folder, or a file that ends in {', '.join(READERS)}")
        return [path]
    if not path.is_dir():
        raise RecordError(f"{path}: no such file or folder")
    files = [file for file in path.iterdir() if file.suffix in READERS and file.name != ARGUMENTS]
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    below = list(filter(_may_hide_tensors, folders))
    if not files:
        hint = f"; there are some in {', '.join(map(str, below[:5]))}" if below else ""
        raise RecordError(f"{path}: holds no {', '.join(READERS)}{hint}")
    others = {file for file in path.iterdir() if _holds_tensors(file) and not file.is_dir()}
    shards = (read(index, partial(_shards, index)) for index in path.glob("*.index.json"))
    missing = (file for held in shards for file in held.values() if not file.exists())
    return [*{*files, *below, *others, *missing}]


def _holds_tensors(file: Path) -> bool:
    """Whether a file's name is that of tensors, read or not: `MODEL.PT`, `x.pt.gz` and a part of a download too."""
    if file.name == ARGUMENTS:
        return False
    name = Path(file.name.lower())
    name = name.with_suffix("") if name.suffix in PACKED else name
    return name.suffix in READERS or name.suffix in UNREAD


def _may_hide_tensors(folder: Path) -> bool:
    """Whether a folder holds files of tensors, or cannot be looked through."""
    unread: list[OSError] = []
    names = [name for _, _, names in os.walk(folder, onerror=unread.append) for name in names]
    return bool(unread) or any(_holds_tensors(Path(name)) for name in names)


def _shards(index: Path) -> dict[str, Path]:
    """Read in which shard an index says that each weight of a checkpoint is.

    An index of shards beside a checkpoint of the other format alone is left over from a download, and says nothing.
    """
    opened = Opened(index)
    held = json.loads(opened.bytes_at(0, opened.size))
    named = held.get("weight_map") if isinstance(held, dict) else None
    shards = {name: index.parent / str(shard) for name, shard in named.items()} if isinstance(named, dict) else {}
    formats = {file.suffix for file in index.parent.iterdir() if file.name != ARGUMENTS} & {".bin", ".safetensors"}
    return {name: shard for name, shard in shards.items() if not formats or shard.suffix in formats}


def _chosen(index: Path, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield what an index of a checkpoint decides: which shards are loaded, and which copy of a weight counts."""
    held, shards = {entry.key.name: entry.load for entry in entries}, _shards(index)
    stems = {shard.stem for shard in shards.values()}
    prefixes = [f"{stem}." for stem in stems]
    copies = Counter(name[len(prefix) :] for name in held for prefix in prefixes if name.startswith(prefix))
    if shards:
        yield Entry(Key(index.name), lambda: ", ".join(sorted(stems)))
    for name, shard in shards.items():
        load = held.get(f"{shard.stem}.{name}")
        if shard.stem not in held and (load is None or copies[name] > 1):
            lacking = RecordError(f"{index}: {name} is not in {shard.name}; save the checkpoint again")
            yield Entry(Key(f"{index.name}.{name}"), load or partial(_raise, lacking))


def _items(file: Path, alone: bool) -> list[_Item]:
    """List the items of a file; an unreadable file is one item that fails to load, so it hides no other file."""
    try:
        return read(file, lambda: list(_listed(file, alone)))
    except RecordError as error:
        return [((1, natural(file.name)), Entry(Key(file.stem), partial(_raise, error)))]


def _listed(file: Path, alone: bool) -> Iterator[_Item]:
    if file.is_dir():
        raise RecordError(f"{file}: may hold tensors, and is not read beside files; name this folder alone")
    if file.suffix not in READERS:
        raise RecordError(f"{file}: may hold tensors, and is of a kind that is not read")
    if file.suffix != ".safetensors":
        check_whole(Opened(file))
    tags = parse_tags(file)
    if tags:
        yield _dumped(file, tags)
        return
    for name, load in READERS[file.suffix](file):
        prefix = "" if alone or not name else f"{file.stem}."
        order = (1, natural(file.name), natural(name) if file.suffix == ".safetensors" else [])
        key = Key(prefix + name or ("value" if alone else file.stem))
        yield order, Entry(key, partial(read, file, load))


def parse_tags(file: Path) -> dict[str, str]:
    """Read the tags from a name like `step=0___rank=0___dump_index=1___name=x.pt`; empty for any other name."""
    tags: dict[str, str] = {}
    for piece in file.name.removesuffix(file.suffix).split("___"):
        tag, equals, value = piece.partition("=")
        if equals and tag.isidentifier():
            tags[tag] = value
        elif tags:  # the recorded name itself may hold three underscores
            last = next(reversed(tags))
            tags[last] += f"___{piece}"
    return tags if {"name", "dump_index"} <= tags.keys() else {}


def _dumped(file: Path, tags: Mapping[str, str]) -> _Item:
    numbers = {tag: tags.get(tag, "0") for tag in ("dump_index", "rank")}
    for tag, number in numbers.items():
        if not number.isdecimal():
            raise RecordError(f"{file}: {tag}={number} in its name is no number")
    index, rank = int(numbers["dump_index"]), int(numbers["rank"])
    name, layer_id = tags["name"].removeprefix(NON_INTRUSIVE), tags.get("layer_id", "")
    key = Key(
        name=name,
        layer_id="" if f".layers.{layer_id}." in f".{name}." else layer_id,
        rank=rank,
        recompute=tags.get("recompute_status") == "recompute",
    )
    return (0, index, rank, natural(tags.get("step"))), Entry(
        key, partial(read, file, partial(_dumped_alone, READERS[file.suffix], file))
    )


def _dumped_pt(file: Path) -> Value:
    """Load the value of a dump, with or without the `{"value": ..., "meta": ...}` around it."""
    value = load_foreign(file, strict=True)
    if isinstance(value, dict) and "value" in value:
        value = value["value"]
    leaves = () if isinstance(value, Tensor | Stored | Opaque) or _are_numbers(value) else _leaves(value)
    if any(isinstance(leaf, Tensor | Stored | Opaque) or _are_numbers(leaf) for _, leaf in leaves):
        raise RecordError(f"{file}: holds a {type(value).__name__} of tensors; dump each under its own name")
    return _loaded(value, file)


def _pt(file: Path) -> Iterator[tuple[str, Callable[[], Value]]]:
    loaded = load_foreign(file, strict=True)
    samples = host_samples(loaded)
    if samples is not None:
        for name, record in log_prob_records(samples):
            yield name, lambda record=record: record
        return
    leaves = [*_leaves(loaded)]
    if len({name for name, _ in leaves}) < len(leaves):
        raise RecordError(f"{file}: two values have one path, so that neither can be told from the other")
    for name, leaf in leaves:
        yield name, partial(_loaded, leaf, file)


EXACT = {torch.int64: 2**63, torch.float64: 2**53}  # below these a dtype holds every whole number
MISSING = 0x7FF8_0000_0000_0001  # the bits of a NaN that no computation gives: None is none of its NaNs


def _loaded(leaf: Any, file: Path) -> Value:
    """Load a leaf of a file of `torch.save`: numbers become a tensor; a text, for example, stays what it is."""
    if isinstance(leaf, Opaque):
        raise RecordError(f"{file}: holds {leaf}, of a kind that is not read")
    if isinstance(leaf, Tensor | Stored):
        return _comparable(tensor_of(leaf), file)
    if type(leaf) in NUMBERS:
        return _of_numbers([leaf]).squeeze()
    return _of_numbers(leaf) if _are_numbers(leaf) else leaf


def _of_numbers(numbers: Sequence[float | None]) -> Tensor:
    """Build a tensor of int64 where all numbers are whole, else of float64; a missing number has the bits MISSING.

    Truth values alone become bools. Where they stand beside numbers, or neither dtype holds every whole number exactly,
    the tensor has the letters of the numbers.
    """
    types = {*map(type, numbers)}
    if types == {bool}:
        return torch.tensor(numbers)
    whole = [number for number in numbers if isinstance(number, int)]
    kind = torch.int64 if all(number is None or isinstance(number, int) for number in numbers) else torch.float64
    if bool in types or not all(-EXACT[kind] <= number < EXACT[kind] for number in whole):
        return torch.frombuffer(bytearray(repr(list(numbers)).encode()), dtype=torch.uint8)
    missing = torch.tensor([number is None for number in numbers])
    values = torch.tensor([0 if number is None else number for number in numbers], dtype=kind)
    values.view(torch.int64)[missing] = MISSING
    return values


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested dicts and lists that holds no other, under its path; a list of numbers is one."""
    if not isinstance(value, dict | list | tuple) or not value or _are_numbers(value):
        yield name, value
        return
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


NUMBERS = {int, float, bool}


def _are_numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, some of which may be missing, such as log-probs of a user's own script."""
    kinds = set(map(type, value)) if isinstance(value, list | tuple) else set()
    return bool(kinds & NUMBERS) and kinds <= {*NUMBERS, type(None)}


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], Value]]]:
    file = Safetensors(path)
    if file.metadata.get("format") == FORMAT:
        yield LOG_PROBS, partial(LogProbRecord.load, path)
        return
    for name in file.names:
        yield name, lambda name=name: _comparable(file.tensor(name), path)


def _dumped_alone(reader: Reader, file: Path) -> Value:
    """Load the only tensor of a file that is named like a dump of one tensor."""
    if reader is _pt:
        return _dumped_pt(file)
    (_, load), *more = list(reader(file)) or [("", lambda: None)]
    if more:
        raise RecordError(f"{file}: is named like a dump of one tensor but holds {1 + len(more)}")
    return load()


def _npz(file: Path) -> Iterator[tuple[str, Callable[[], Value]]]:
    npz = Npz(file)
    for name in npz.names:
        yield name, partial(npz.tensor, name)


def _comparable(x: Tensor, file: Path) -> Tensor:
    if x.layout != torch.strided or x.is_quantized or x.is_meta:
        raise RecordError(f"{file}: holds a tensor without plain bytes ({x.layout}, {x.dtype}, {x.device})")
    return x.detach()


def _raise(error: RecordError) -> Value:
    raise error


SAVED = (".pth", ".bin", ".ckpt")  # other endings of what torch.save writes
READERS: dict[str, Reader] = {".pt": _pt, ".safetensors": _safetensors, ".npz": _npz, **dict.fromkeys(SAVED, _pt)}
ARGUMENTS = "training_args.bin"  # of Hugging Face's Trainer, beside a checkpoint: the arguments of the run alone
# Endings of files that hold tensors too, and what stands behind the ending of one that is packed, cut or put aside.
UNREAD = set(".npy .gguf .distcp .h5 .hdf5 .pkl .pickle .joblib .nemo .onnx .msgpack .parquet .arrow .feather".split())
PACKED = set(".gz .zst .bz2 .xz .zip .part .tmp .incomplete .bak .old .orig .1".split())

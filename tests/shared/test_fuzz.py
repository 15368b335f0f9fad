"""Strangers' files that hypothesis makes are read as `report` and `diff` read them, under a watch of what Python does.

A file fails where its reading opens a file for writing, starts a process, opens a socket or imports a module other
than Python's codecs. A file also fails by an error that is not ours, and after ten seconds.
"""

import json
import os
import pickle
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_foreign import integer, npy, with_second_directory

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import UserError
from mis_plugins.report.readers.files import Problems
from mis_plugins.report.readers.paths import find
from mis_plugins.report.survey import Survey, report
from mis_plugins.shared.arrays import Npz, Safetensors
from mis_plugins.shared.foreign import load_pt

LIMIT = 10.0  # seconds for one file
EXAMPLES = 20  # of a kind; `lab/results/foreign_fuzz.md` has a run of ten minutes
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = ("subprocess.", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.", "ctypes.dlopen", "import")

NAMES = ("posix\nsystem", "builtins\neval", "torch\nload", "torch.jit\nload", "torch.storage\n_load_from_bytes",
         "importlib\nimport_module", "torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_tensor_v3",
         "torch._utils\n_rebuild_parameter", "torch\nSize", "torch\nFloatStorage", "torch\nfloat32", "numpy\ndtype",
         "numpy\nndarray", "numpy._core.multiarray\n_reconstruct", "numpy._core.multiarray\nscalar",
         "collections\nOrderedDict", "_codecs\nencode", "builtins\nset", "builtins\ncomplex",
         "antigravity\nx")  # fmt: skip
RECORDS = st.sampled_from(["data/0", "version", "constants.pkl", "byteorder", "x"])
WHOLE = st.one_of(st.sampled_from([0, 1, 2, 4, 7, -1, 2**31, 2**33, 2**62, 2**63, 2**64]), st.integers(-300, 70_000))


class Watch:
    """Fails a file whose reading does what no reading does."""

    def __init__(self) -> None:
        self.on, self.seen = False, ""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "import" and arguments[0].startswith("encodings."):
            return  # Python's own codec, which decodes a name for the first time in this process
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if writes or event.startswith(STARTS):
            self.seen = self.seen or f"{event} {arguments!r}"[:300]

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.on, self.seen = True, ""
        try:
            yield
        finally:
            self.on = False


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


PIECES = st.one_of(
    st.sampled_from(list("()]}NtelasubR0.2Q\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94")).map(
        lambda opcode: opcode.encode("latin1")
    ),
    st.sampled_from(NAMES).map(lambda name: b"c" + name.encode() + b"\n"),
    WHOLE.map(integer),
    st.floats().map(lambda value: b"G" + struct.pack(">d", value)),
    st.text(max_size=8).map(text),
    st.integers(0, 8).map(lambda place: b"h" + bytes([place])),
    st.integers(0, 8).map(lambda place: b"q" + bytes([place])),
    st.sampled_from([0, 300, 2**20, 2**31 - 1]).map(lambda place: b"r" + struct.pack("<I", place)),
    st.binary(max_size=6),
    st.just(b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"),
)


@st.composite
def programs(draw: st.DrawFn) -> bytes:
    """A pickle: pieces in any order, or an honest one with a few bytes changed."""
    if draw(st.booleans()):
        return b"".join(draw(st.lists(PIECES, max_size=40))) + b"."
    honest = pickle.dumps({"rollout_id": 1, "rank": 0, "rollout_data": {"response_lengths": [2]}}, 2)
    return changed(draw, honest, 4)


def changed(draw: st.DrawFn, content: bytes, most: int) -> bytes:
    """The content with up to `most` bytes that are others, cut out, or put in."""
    made = bytearray(content)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, max(0, len(made) - 1)))
        made[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(made)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """An archive of torch.save's shape with any pickle, records, directories and damage."""
    file = BytesIO()
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(file, "w", method) as made:
        made.writestr("a/data.pkl", draw(programs()))
        for name in draw(st.lists(RECORDS, max_size=4)):
            made.writestr(f"{draw(st.sampled_from(['a', 'a', 'b']))}/{name}", draw(st.binary(max_size=40)))
    content = file.getvalue()
    if draw(st.booleans()):
        content = with_second_directory(content, {b"constants": b"constantz", b"data/0": b"data/1"})
    return changed(draw, content, draw(st.sampled_from([0, 0, 3])))


JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), WHOLE, st.floats(), st.text(max_size=6), st.binary(max_size=6),
        st.just(10**12), st.just(torch.ones(3)), st.just(torch.ones(2, 2, dtype=torch.int64)), st.just(torch.tensor(1)),
        st.just(torch.zeros(1).expand(9)),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


def honest(host: str) -> dict[str, Any]:
    """A training dump of a host, with all columns."""
    columns = {
        "tokens": [torch.arange(5), torch.arange(4)], "response_lengths": [3, 2], "total_lengths": [5, 4],
        "loss_masks": [torch.ones(3), torch.ones(2)], "rollout_log_probs": [-torch.ones(3), -torch.ones(2)],
        "log_probs": [-torch.ones(3), -torch.ones(2)], "advantages": [torch.ones(3), torch.ones(2)],
        "sample_indices": [0, 1], "rewards": [1.0, 0.0], "weight_versions": [["1"], ["1"]], "truncated": [0, 1],
        "rollout_mask_sums": [3.0, 2.0],
    }  # fmt: skip
    layout = {"num_microbatches": [1], "micro_batch_indices": [[0, 1]]}
    if host == "miles":
        return {"rollout_id": 1, "rank": 0, "cp_size": 1, "cp_rank": 0,
                "rollout_data": {**columns, **layout, "num_rollouts": [2]}}  # fmt: skip
    samples = [
        {name: column[place] for name, column in columns.items()} | {"rollout_position": place, "data_parallel_rank": 0}
        for place in range(2)
    ]
    shard = {"data_parallel_rank": 0, "partition": [0, 1], **layout, "global_batch_sizes": [2]}
    return {"format_version": 2, "rollout_id": 1, "rank": 0, "samples": samples, "dp_shards": [shard]}


@st.composite
def dumps(draw: st.DrawFn) -> bytes:
    """A host's dump in which a few values are of other kinds."""
    content = honest(draw(st.sampled_from(["miles", "slime"])))
    for _ in range(draw(st.integers(1, 3))):
        at: Any = content
        while True:
            keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else []
            key = draw(st.sampled_from(list(keys))) if keys else None
            inner = at[key] if key is not None else None
            if key is None or not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                break
            at = inner
        if key is not None:
            at[key] = draw(JUNK)
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


KEYS = st.sampled_from(["behavior_log_probs", "proximal_log_probs", "loss_mask", "tokens", "step", "sample", "text",
                        "advantages", "versions", "turns", "reward", "prompt", "truncated", "trainer_version", "self",
                        "__class__", "kl_k3", "rollout"])  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), WHOLE, st.floats(), st.text(max_size=5), st.lists(st.floats(-3, 0), max_size=3)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=5,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=9)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A jsonl file: objects, other values of JSON, and damage."""
    good = json.dumps({"behavior_log_probs": [-1.0, -2.0], "proximal_log_probs": [-1.0, -2.0]})
    told = [good, *(json.dumps(value) for value in draw(st.lists(st.one_of(OBJECTS, VALUES), max_size=4)))]
    return changed(draw, "\n".join(draw(st.permutations(told))).encode("utf-8", "surrogatepass"), 3)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A safetensors file with a header of any kind."""
    numbers = st.lists(WHOLE, max_size=3)
    entry = st.fixed_dictionaries(
        {"dtype": st.sampled_from(["F32", "I64", "U8", "X", 3]), "shape": numbers, "data_offsets": numbers}
    )
    header = json.dumps(draw(st.dictionaries(st.text(max_size=4), st.one_of(entry, VALUES), max_size=3))).encode()
    length = draw(st.sampled_from([len(header), len(header), len(header), 2**62, 0]))
    return changed(draw, struct.pack("<Q", length) + header + bytes(32), 2)


@st.composite
def npz(draw: st.DrawFn) -> bytes:
    """An npz file with an array of any header."""
    header = repr({
        "descr": draw(st.sampled_from(["<f4", "|O", "<i8", "|V8", ">f8", [("a", "<f4")]])),
        "fortran_order": draw(st.booleans()), "shape": tuple(draw(st.lists(WHOLE, max_size=3))),
    }).encode()  # fmt: skip
    file, array = BytesIO(), npy(header, draw(st.binary(max_size=32)))
    with zipfile.ZipFile(file, "w", draw(st.sampled_from([0, zipfile.ZIP_DEFLATED]))) as made:
        made.writestr("x.npy", array)
    return changed(draw, file.getvalue(), draw(st.sampled_from([0, 0, 2])))


def reported(path: Path) -> None:
    """Read a file as `report` does."""
    problems = Problems()
    survey = Survey.of(CorrectionConfig(), [])
    found = find([path], problems)
    for source in found.sources:
        survey.add_all(source.records(problems))
    found.read_curves(problems)
    report(survey)


def opened(path: Path) -> None:
    """Read every tensor of a file as `diff` does."""
    if path.suffix == ".pt":
        load_pt(path)
    elif path.suffix == ".npz":
        npz = Npz(path)
        for name in npz.names:
            npz.tensor(name)
    else:
        file = Safetensors(path)
        for name in file.names:
            file.tensor(name)


SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
Read = Callable[[Path], None]
KINDS: dict[str, tuple[st.SearchStrategy[bytes], str, tuple[Read, ...]]] = {
    "archives": (archives(), ".pt", (reported, opened)),
    "dumps of other types": (dumps(), ".pt", (reported,)),
    "lines": (lines(), ".jsonl", (reported,)),
    "safetensors": (headers(), ".safetensors", (opened,)),
    "npz": (npz(), ".npz", (opened,)),
}


def fault_of(watch: Watch, path: Path, read: Read) -> str:
    """What is wrong with the reading of a file; "" where nothing is."""
    begun, raised = time.monotonic(), ""
    with watch.watching():
        try:
            read(path)
        except UserError:
            pass
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    late = f"took {time.monotonic() - begun:.1f} s" if time.monotonic() - begun > LIMIT else ""
    return watch.seen or raised or late


@pytest.fixture(scope="module")
def watch() -> Watch:
    """The one watch of this process, since an audit hook stays."""
    return Watch()


@pytest.mark.filterwarnings("ignore:Duplicate name")  # of zipfile, while an archive is made
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_does_what_no_reading_does(kind: str, watch: Watch, tmp_path: Path) -> None:
    strategy, suffix, reads = KINDS[kind]
    path, faults = tmp_path / f"a{suffix}", list[str]()

    @seed(0)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=SLOW)
    @given(strategy)
    def read_one(content: bytes) -> None:
        path.write_bytes(content)
        faults.extend(filter(None, (fault_of(watch, path, read) for read in reads)))

    read_one()
    faults.clear()  # a first reading imports what later ones use
    read_one()
    assert faults == []


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_text("x"),
        lambda path: __import__("subprocess").run(["true"], check=True),
        lambda path: __import__("socket").socket().close(),
        lambda path: __import__("this_module_is_not_there"),
        lambda path: __import__("encodings_of_mine.cp437"),
        lambda path: [][1],
    ],
)
def test_the_watch_sees(act: Read, watch: Watch, tmp_path: Path) -> None:
    assert fault_of(watch, tmp_path / "a", act)


def test_a_codec_of_python_is_no_fault(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zipfile decodes names by cp437, whose module Python imports when a process first does so."""
    monkeypatch.delitem(sys.modules, "encodings.cp437", raising=False)
    assert not fault_of(watch, tmp_path, lambda path: __import__("encodings.cp437"))

"""The diff command on folders and files as SGLang's dumper, a trainer and an engine leave them, and as accidents do."""

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from commands import ProofCommand, ran
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from mis_plugins.shared.budget import RecordError
from true_on_policy.__main__ import COMMANDS, main
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS, NormOrder
from true_on_policy.contract.specs import at
from true_on_policy.diff import tensors as comparison
from true_on_policy.diff.log_prob_record import FORMAT, LogProbRecord, digest, provenance
from true_on_policy.diff.module_recorder import record
from true_on_policy.diff.names import PARTS, Heads, correspondence, regrouped
from true_on_policy.diff.records import Key, parse_tags, read_recording
from true_on_policy.diff.tensors import Report, compare
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import checkpoint
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron

Capture = pytest.CaptureFixture[str]
X = torch.arange(6.0).reshape(2, 3)
Y = X + torch.eye(2, 3)


def dump(folder: Path, index: int, name: str, value: object, **tags: object) -> Path:
    """One file as SGLang's dumper 0.5.23 names and writes it."""
    all_tags = {"step": 0, "rank": 0, "dump_index": index, "name": name, "recompute_status": "disabled"} | tags
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("___".join(f"{tag}={text}" for tag, text in all_tags.items()) + ".pt")
    torch.save({"value": value, "meta": {**all_tags, "world_size": 1, "tokenizer_path": None}}, file)
    return file


def dump_all(folder: Path, values: Mapping[str, object]) -> Path:
    for index, (name, value) in enumerate(values.items(), 1):
        dump(folder, index, f"non_intrusive__{name}", value)
    return folder


def diff(*words: object) -> int:
    return main(["diff", *map(str, words)])


def report(a: Path, b: Path, map_file: Path | None = None, heads: Heads | None = None) -> Report:
    left, right = read_recording(a), read_recording(b)
    return compare(left, right, correspondence(left.names, right.names, map_file), heads)


# ----------------------------------------------------------------------------------------------------- exit codes

BASE = {"embed.output": X, "layers.0.mlp.output": X, "rids": ["request 7"]}
CASES: dict[str, tuple[Any, int, str]] = {
    "the same": (BASE, 0, "equal"),
    "another value": (BASE | {"layers.0.mlp.output": Y}, 1, "different"),
    "minus zero": (BASE | {"embed.output": torch.where(X == 0, -0.0, X)}, 1, "different"),
    "another dtype": (BASE | {"embed.output": X.to(torch.bfloat16)}, 2, "other dtype"),
    "another shape": (BASE | {"embed.output": X.T.contiguous()}, 2, "other shape"),
    "one too few": ({"embed.output": X, "rids": []}, 2, "missing in B"),
    "one too many": (BASE | {"more.output": X}, 2, "missing in A"),
    "a dict of tensors": (BASE | {"embed.output": {"hidden": X}}, 2, "not comparable"),
    "no tensor": (BASE | {"embed.output": "x"}, 2, "not comparable"),
    "a number": (BASE | {"embed.output": 3}, 2, "other dtype"),
    "different and missing": ({"embed.output": Y}, 1, "different"),
}


@pytest.mark.parametrize("case", CASES)
def test_exit_code(case: str, tmp_path: Path, proof_command: ProofCommand):
    values, code, status = CASES[case]
    a, b = dump_all(tmp_path / "a", BASE), dump_all(tmp_path / "b", values)
    printed = proof_command("diff", a, b, "--json", tmp_path / "out.json", code=code).out
    document = json.loads((tmp_path / "out.json").read_text())
    assert status in {row["status"] for row in document["rows"]}
    assert document["verdict"] == ("equal", "different", "not comparable")[code]
    assert printed.rstrip().endswith(document["verdict"])


def test_long_texts_with_one_beginning_are_told_apart(tmp_path: Path, proof_command: ProofCommand):
    a, b = (dump_all(tmp_path / side, {"said": "y" * 600 + side, "x.output": X}) for side in "ab")
    assert ", from letter 601" in proof_command("diff", a, b, code=1).out


@pytest.mark.parametrize("mapped", [False, True])
def test_bookkeeping_is_left_out(mapped: bool, tmp_path: Path):
    """Request ids and slots differ from run to run."""
    sides = {"a": {"rids": ["7"], "req_pool_indices": torch.tensor([1])}, "b": {"req_pool_indices": torch.tensor([2])}}
    a, b = (dump_all(tmp_path / side, {"x.output": X, **held}) for side, held in sides.items())
    (tmp_path / "map.yaml").write_text("x.output: x.output")
    found = report(a, b, tmp_path / "map.yaml" if mapped else None)
    assert (found.exit_code, found.left_out) == (0, 3)


HF = {"input_ids": torch.tensor([[1, 2]]), "model.language_model.layers.0.self_attn.q_proj.output": X}


@pytest.mark.parametrize(
    ("hf", "other"),
    [
        (HF, {"language_model.decoder.layers.0.mlp.output": Y}),
        (HF, {"language_model.model.layers.0.self_attn.qkv_proj.output": Y}),
        ({"input_ids": HF["input_ids"], "base_model.model.model.layers.0.self_attn.q_proj.output": X},
         {"language_model.model.layers.0.self_attn.qkv_proj.output": Y}),
    ],
)  # fmt: skip
def test_what_a_model_was_handed_is_no_tensor_that_it_computed(
    hf: dict[str, Tensor], other: dict[str, Tensor], tmp_path: Path, capsys: Capture
):
    """The names of a vision-language model, or of PEFT's, are not in the table: the ids alone have a counterpart."""
    a = dump_all(tmp_path / "hf", hf)
    b = dump_all(tmp_path / "other", {"input_ids": HF["input_ids"].flatten(), **other})
    assert diff(a, b) == diff(b, a) == 2
    assert "no tensor that a model computed was compared; --map FILE pairs other names" in capsys.readouterr().out
    handed = {"input_ids": X, "model.inputs.position_ids": X}
    assert diff(dump_all(tmp_path / "c", handed), dump_all(tmp_path / "d", handed)) == 2


def test_the_command_line(tmp_path: Path):
    a, b = dump_all(tmp_path / "a", BASE), dump_all(tmp_path / "b", CASES["another value"][0])
    done = ran("-m", "true_on_policy", "diff", a, b)
    assert (done.returncode, done.stderr) == (1, "")
    assert "first divergence: layers.0.mlp" in done.stdout
    pair = "0 (0x00000000) against 1 (0x3f800000), 1065353216 ulp apart"
    assert f"2 of 6 values differ, first at [0, 0]: {pair}" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("unforeseen"), 2), (KeyboardInterrupt("interrupted"), 130)]
)
def test_an_error_is_never_different(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof_command: ProofCommand
):
    """An unforeseen exception would leave Python with exit code 1."""
    a = dump_all(tmp_path / "a", BASE)
    monkeypatch.setattr(comparison, "first_mismatch", Mock(side_effect=error))
    assert proof_command("diff", a, a, code=code).err.endswith(f"{error}\n")


@pytest.mark.parametrize("target", [".", "/proc/none/out.json"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_compared(
    target: str, tmp_path: Path, proof_command: ProofCommand
):
    read = proof_command("diff", tmp_path / "missing", tmp_path / "missing", "--json", target, code=2)
    assert read.err.startswith(f"--json {target}: ")


def test_another_command_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof_command: ProofCommand
):
    """It stops nobody from comparing; asked for, it is an error, and an error is never "different"."""
    commands = {"gone": at("true_on_policy.gone:add_parser"), "diff": COMMANDS["diff"]}
    monkeypatch.setattr("true_on_policy.__main__.COMMANDS", commands)
    a = dump_all(tmp_path / "a", BASE)
    assert diff(a, a) == 0
    assert "true_on_policy.gone" in proof_command("gone", code=2).err


# --------------------------------------------------------------------------------------- order, names, occurrences


@given(st.permutations(range(1, 13)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
def test_the_first_in_execution_order(tmp_path_factory: pytest.TempPathFactory, order: list[int]):
    """By dump_index as a number, whatever the names and the order of the files: 2 comes before 10."""
    folder = tmp_path_factory.mktemp("order")
    for index in order:
        dump(folder / "a", index, f"module{order[index - 1]}.output", X)
        dump(folder / "b", 20 + index, f"module{order[index - 1]}.output", Y if index >= 3 else X)
    first = report(folder / "a", folder / "b").first
    assert first is not None and first.operation == f"module{order[2]}"
    assert [int(row.key.name[6:-7]) for row in report(folder / "a", folder / "b").rows] == order


def test_the_nth_occurrence(tmp_path: Path):
    """A decode runs each module once a step; the steps of the two sides need not have the same numbers."""
    for side, steps, values in (("a", (0, 1, 2), (X, Y, X)), ("b", (5, 7, 9), (X, Y, Y))):
        for index, (step, value) in enumerate(zip(steps, values, strict=True)):
            dump(tmp_path / side, 10 + index, "model.norm.output", value, step=step)
    found = report(tmp_path / "a", tmp_path / "b")
    assert [row.status for row in found.rows] == ["equal", "equal", "different"]
    assert found.first is not None and str(found.first.key) == "model.norm.output #3"


def test_a_shared_module_is_told_by_its_layer(tmp_path: Path):
    """SGLang's layers share one rotary_emb, which keeps the name that it has in layer 0."""
    shared = "non_intrusive__model.layers.0.self_attn.rotary_emb.output"
    for side, layers in (("a", (0, 1, 2)), ("b", (0, 2))):
        for index, layer in enumerate(layers):
            dump(tmp_path / side, index, shared, X + layer, layer_id=layer)
    found = report(tmp_path / "a", tmp_path / "b")
    assert {str(row.key): row.status for row in found.rows} == {
        "model.layers.0.self_attn.rotary_emb.output": "equal",
        "model.layers.0.self_attn.rotary_emb.output layer 1": "missing in B",
        "model.layers.0.self_attn.rotary_emb.output layer 2": "equal",
    }


def test_ranks_and_recomputation_are_kept_apart(tmp_path: Path):
    dump(tmp_path / "a", 1, "x.output", X)
    dump(tmp_path / "a", 2, "x.output", Y, recompute_status="recompute")
    dump(tmp_path / "a", 1, "x.output", Y, rank=1)
    keys = {entry.key for entry in read_recording(tmp_path / "a").entries}
    assert keys == {Key("x.output"), Key("x.output", recompute=True), Key("x.output", rank=1)}


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("rank=1___dump_index=9___name=a.output.pt", {"rank": "1", "dump_index": "9", "name": "a.output"}),
        ("dump_index=9___name=a=b.pt", {"dump_index": "9", "name": "a=b"}),
        ("dump_index=9___name=a___b___layer_id=2.pt", {"dump_index": "9", "name": "a___b", "layer_id": "2"}),
        ("dump_index=9.pt", {}),
        ("weights.pt", {}),
    ],
)
def test_tags_of_a_file_name(name: str, tags: dict[str, str]):
    assert parse_tags(Path(name)) == tags


def test_what_feeds_an_operation(tmp_path: Path):
    values = {
        "l.norm.output": X, "l.attn.q.inputs.0": X, "l.attn.q.output": X, "l.attn.k.inputs.0": X, "l.attn.k.output": X,
        "l.attn.o.inputs.0": X, "l.attn.o.inputs.1": X, "l.attn.o.output": X, "l.post.inputs.0": X, "l.post.output": X,
    }  # fmt: skip
    branch = ["l.attn.q.output", "l.attn.k.output"]
    expected = {
        "l.attn.k.output": ["l.attn.k.inputs.0"],  # its own input
        "l.attn.o.inputs.0": branch,  # attention, which is no module
        "l.attn.o.inputs.1": branch,  # nor did the other input make this one
        "l.post.inputs.0": ["l.norm.output", *branch, "l.attn.o.output"],  # a residual sum
        "l.norm.output": [],
    }
    a = dump_all(tmp_path / "a", values)
    for number, (name, feeds) in enumerate(expected.items()):
        found = report(a, dump_all(tmp_path / f"b{number}", values | {name: Y}))
        assert found.first is not None and found.first.key.name == name
        assert [row.key.name for row in found.feeds] == feeds


# ------------------------------------------------------------------------------------------------- kinds of files


def as_pt(file: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save({"model": tensors, "step": 3}, file.with_suffix(".pt"))
    return file.with_suffix(".pt")


def as_safetensors(file: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file.with_suffix(".safetensors"))
    return file.with_suffix(".safetensors")


def as_npz(file: Path, tensors: dict[str, Tensor], write: Any = np.savez, order: Any = "C") -> Path:
    arrays = {name: np.asarray(tensor.numpy(), order=order) for name, tensor in tensors.items()}
    write(file.with_suffix(".npz"), **arrays)
    return file.with_suffix(".npz")


WRITERS = {
    "pt": as_pt,
    "safetensors": as_safetensors,
    "npz": as_npz,
    "compressed npz": partial(as_npz, write=np.savez_compressed),
    "Fortran's npz": partial(as_npz, order="F"),
}
every_format = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@every_format
def test_files_of_many_tensors(write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path):
    a = write(tmp_path / "a", {"w.2": X, "w.10": X, "b": torch.arange(3)})
    same = write(tmp_path / "same", {"w.2": X, "w.10": X, "b": torch.arange(3)})
    other = write(tmp_path / "other", {"w.2": Y, "w.10": Y, "b": torch.arange(3)})
    assert diff(a, same) == 0
    assert diff(a, other) == 1
    first = report(a, other).first
    assert first is not None and first.key.name.endswith("w.2")
    assert first.mismatch is not None and first.mismatch.coordinate == (0, 0)


def test_files_beside_dumps_come_last(tmp_path: Path):
    dump(tmp_path, 2, "b.output", X)
    dump(tmp_path, 1, "c.output", X)
    torch.save(X, tmp_path / "a.pt")
    assert [entry.key.name for entry in read_recording(tmp_path).entries] == ["c.output", "b.output", "a"]


def huge(file: Path, last: float) -> Path:
    """A safetensors file of one float32 tensor of half a gigabyte: a hole of zeros, then one value."""
    size = 1 << 29
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)
        stream.seek(-4, os.SEEK_END)
        stream.write(struct.pack("<f", last))
    return file


MEMORY = """
import sys, threading, time
from pathlib import Path
from typing import Any
from true_on_policy import diff  # torch and all: what its import takes is its own
from true_on_policy.__main__ import main

def private():  # kB that are not pages of a file
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1])

most, before = 0, private()
def watch():
    global most
    while True:
        most = max(most, private())
        time.sleep(0.01)

threading.Thread(target=watch, daemon=True).start()
code = main(["diff", *sys.argv[1:]])
print("MB", (most - before) >> 10)
sys.exit(code)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to measure memory")
def test_a_gigabyte_of_files_is_not_loaded(tmp_path: Path):
    a, b = huge(tmp_path / "a.safetensors", 1.0), huge(tmp_path / "b.safetensors", 2.0)
    done = ran("-c", MEMORY, a, b)
    assert done.returncode == 1, done.stderr
    assert f"1 of {1 << 27} values differ, first at [{(1 << 27) - 1}]" in done.stdout
    assert int(done.stdout.split()[-1]) < 300


# ----------------------------------------------------------------------------------------- accidents and malice


@every_format
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_a_truncated_file_is_not_comparable(
    write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path, data: st.DataObject
):
    good = write(tmp_path / "good", {"w": X, "b": torch.arange(3)})
    whole = good.read_bytes()
    cut = tmp_path / f"cut{good.suffix}"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert diff(good, cut) == 2


class Malice:
    def __reduce__(self) -> tuple:
        return (os.mkdir, (os.environ["MALICE"],))


def test_nothing_in_a_dump_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a pickle, in a value next to a tensor, and in a pickled numpy array."""
    monkeypatch.setenv("MALICE", str(tmp_path / "executed"))
    good = dump_all(tmp_path / "good", {"x.output": X})
    pickled = np.array([Malice()], dtype=object)
    for number, value in enumerate((Malice(), [X, Malice()], pickled)):
        bad = dump_all(tmp_path / f"bad{number}", {"x.output": value})
        assert diff(good, bad) == 2
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "bad.npz", x=pickled)
        assert diff(tmp_path / "bad.npz", tmp_path / "bad.npz") == 2
    assert not (tmp_path / "executed").exists()


def in_a_subfolder(folder: Path) -> None:
    (folder / "rank1").mkdir()
    torch.save(X, folder / "rank1" / "x.pt")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "b.safetensors").symlink_to("/nowhere/b"),
        lambda folder: (folder / "b.npz").symlink_to("b.npz"),
        lambda folder: os.mkfifo(folder / "b.pt"),
        lambda folder: os.mkfifo(folder / "step=0___rank=0___dump_index=9___name=b.pt"),
        lambda folder: (folder / "b.pt").mkdir(),
        in_a_subfolder,
    ],
)
def test_a_file_that_is_not_reached_is_not_compared(spoil: Callable[[Path], object], tmp_path: Path):
    """On both sides alike, beside others that are equal."""
    for side in "ab":
        spoil(dump_all(tmp_path / side, BASE))
    assert diff(tmp_path / "a", tmp_path / "b") == 2
    dump(tmp_path / "b", 7, "non_intrusive__embed.output", Y)
    next((tmp_path / "b").glob("*index=1_*")).unlink()
    assert diff(tmp_path / "a", tmp_path / "b") == 1, "it hides no other"


def test_an_unreadable_file_does_not_hide_the_others(tmp_path: Path):
    a, b = dump_all(tmp_path / "a", {"x.output": X, "y.output": X}), dump_all(tmp_path / "b", {"y.output": Y})
    next(a.glob("*x.output*")).write_bytes(b"PK")
    dump(b, 9, "x.output", X)
    found = report(a, b)
    assert {row.key.name: row.status for row in found.rows} == {"x.output": "not comparable", "y.output": "different"}
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), r"holds no \.pt, \.safetensors, \.npz"),
        (lambda path: dump_all(path / "dump_7", {"x": X}), r"there are some in .*dump_7"),
        (os.mkfifo, "expected a folder, or a file that ends in"),
        (lambda path: path.write_text("x"), "expected a folder, or a file that ends in"),
        (lambda path: (dump_all(path, BASE) / "model.bin.index.json").write_text("{"), "index.json: cannot be read"),
        (lambda path: (path.mkdir(), (path / "dump_index=one___name=x.pt").write_bytes(b"")), "dump_index=one"),
        (lambda path: dump(dump_all(path, BASE), 2, "old.output", X), "two recordings lie here"),
        (lambda path: (path.mkdir(), torch.save(X.to_sparse(), path / "x.pt")), "without plain bytes"),
        (lambda path: (path.mkdir(), torch.save(X.to("meta"), path / "x.pt")), "without plain bytes"),
        (lambda path: (path.mkdir(), torch.save({"a": {"b": X}, "a.b": X}, path / "x.pt")), "two values have one path"),
        (
            lambda path: (path.mkdir(), torch.save(X, path / "x.pt", _use_new_zipfile_serialization=False)),
            r"no archive of torch\.save \(torch 1\.6 or later\)",
        ),
    ],
)
def test_what_cannot_be_read_says_why(
    build: Callable[[Path], object], message: str, tmp_path: Path, proof_command: ProofCommand
):
    build(tmp_path / "a")
    said = proof_command("diff", tmp_path / "a", tmp_path / "a", code=2)
    assert re.search(message, said.out + said.err)


def test_no_control_characters_reach_the_terminal(tmp_path: Path, proof_command: ProofCommand):
    a, b = dump_all(tmp_path / "a", {"x\x1b[2J.output": X}), dump_all(tmp_path / "b", {"x\x1b[2J.output": Y})
    assert "\x1b" not in proof_command("diff", a, b, code=1).out


# ------------------------------------------------------------------------------------------ records of log-probs

TOKENS, LOG_PROBS = [[5, 6, 7], [], [8, 9]], [[-0.5, -0.25, -3.0], [], [-1.0, -2.0]]


def save(file: Path, tokens: list[list[int]] = TOKENS, log_probs: object = LOG_PROBS, **more: object) -> Path:
    LogProbRecord.from_sequences(tokens, log_probs, **more).save(file)  # type: ignore[arg-type]
    return file


def test_a_record_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+a.build")  # which its distribution may not name
    contract = Contract(dtype="bf16")
    made = LogProbRecord.from_sequences(TOKENS, LOG_PROBS, [[0, 0, 1], [], [1, 1]], provenance(contract))
    made.save(tmp_path / "r.safetensors")
    found = LogProbRecord.load(tmp_path / "r.safetensors")
    for name, tensor in made.tensors.items():
        assert torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
    assert found.versions.tolist() == [0, 0, 1, 1, 1] and found.cu_seqlens.tolist() == [0, 3, 3, 5]
    environment = json.loads(found.metadata["environment"])
    assert environment["packages"]["torch"] == torch.__version__ and environment["threads"] == torch.get_num_threads()
    assert json.loads(found.metadata["contract"])["dtype"] == "bf16"
    assert json.loads(found.metadata["sha256"])["log_probs"] == digest(made.log_probs)


RECORDS: dict[str, tuple[Any, int, str]] = {
    "the same": ({}, 0, "equal"),
    "one log-prob": ({"log_probs": [[-0.5, -0.25, -3.0], [], [-1.0, -2.0000002384185791]]}, 1, "[2, 1]"),
    "one log-prob, and none": ({"log_probs": [[-0.5, None, -3.0], [], [-1.0, -9.0]]}, 1, "[2, 1]"),
    "no log-prob": ({"log_probs": [[-0.5, None, -3.0], [], [-1.0, -2.0]]}, 2, "first at [0, 1]"),
    "another token": ({"tokens": [[5, 6, 7], [], [8, 8]]}, 2, "not the same tokens"),
    "other sequences": ({"tokens": [[5, 6], [7], [8, 9]], "log_probs": [[-0.5, -0.25], [-3.0], [-1.0, -2.0]]},
                        2, "not the same cu_seqlens"),
    "another version": ({"versions": 1}, 2, "not the same versions"),
    "another dtype": ({"dtype": torch.float64}, 2, "dtype"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_records_compared(case: str, swapped: bool, tmp_path: Path, proof_command: ProofCommand):
    change, code, said = RECORDS[case]
    files = [save(tmp_path / "a.safetensors"), save(tmp_path / "b.safetensors", **change)]
    assert said in proof_command("diff", *(files[::-1] if swapped else files), code=code).out


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_records_in_eight_bits(dtype: torch.dtype, tmp_path: Path):
    rows = [[[-0.5, -0.25, -3.0], [], [-1.0, last]] for last in (-2.0, -3.0, None)]
    records = [LogProbRecord.load(save(tmp_path / "r", log_probs=row, dtype=dtype)) for row in rows]
    found = [comparison.compare_log_probs(Key("log_probs"), records[0], other).status for other in records]
    assert found == ["equal", "different", "not comparable"]


def test_a_hosts_dump_is_read_as_the_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture):
    """Sequence 0 differs in its second token, which the mask leaves out of the metrics; sequence 1 is equal."""
    engine = [torch.tensor([-0.5, -1.0]), torch.tensor([-2.0])]
    sides = {"rollout_log_probs": engine, "log_probs": [torch.tensor([-0.5, -3.0]), engine[1]]}
    masks = [torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    (tmp_path / "train_data").mkdir()
    torch.save({"rank": 0, "rollout_data": sides | {"loss_masks": masks}}, tmp_path / "train_data/7_0.pt")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "diff.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "load_pt" in block)
    exec(code, {})
    said = capsys.readouterr().out
    assert "0 1 of 2 values differ, first at [1]" in said and "1 equal" in said
    assert "\nk3_kl 0.0\n" in said and "\nrollout_log_ppl 1.25\n" in said


# Dumps of hosts


def miles_dump(shift: int = 0, off: float = 0.0, **columns: Any) -> dict[str, Any]:
    """What a rank of Miles writes with --save-debug-train-data: two samples of three and two tokens."""
    data = {
        "tokens": [torch.tensor([1, 2, 3]) + shift, torch.tensor([4, 5])],
        "response_lengths": [2, 1],
        "loss_masks": [torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)],
        "rollout_log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
        "log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]) + off],
        "advantages": [torch.zeros(2), torch.zeros(1) + off],
    }
    return {"rollout_id": 7, "rank": 0, "rollout_data": data | columns, "cp_size": 1}


def slime_dump(shift: int = 0, off: float = 0.0) -> dict[str, Any]:
    """What slime writes: one dict a sample."""
    data = miles_dump(shift, off)["rollout_data"]
    samples = [{name: column[index] for name, column in data.items()} for index in range(2)]
    return {"format_version": 2, "rollout_id": 7, "samples": samples, "dp_shards": [{"rank": 0}]}


def rollout_dump(shift: int = 0, off: float = 0.0) -> dict[str, Any]:
    """What both hosts write of a rollout: lists, and no trainer yet."""
    samples = [
        {"tokens": [1, 2, 3 + shift], "response_length": 2, "rollout_log_probs": [-1.0, -2.0 + off], "log_probs": None}
    ]
    return {"rollout_id": 7, "metadata": {}, "samples": samples}


def saved(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("written", [miles_dump, slime_dump, rollout_dump])
def test_of_a_hosts_dump_log_probs_are_compared_and_never_token_ids(
    written: Callable[..., dict], tmp_path: Path, proof_command: ProofCommand
):
    a, like, off, shifted = (
        saved(tmp_path / f"{number}.pt", written(*values)) for number, values in enumerate([(), (), (0, 2**-10), (8,)])
    )
    assert diff(a, like) == 0
    printed = proof_command("diff", a, off, code=1).out
    assert re.search(r"log_probs: 1 of \d values differ, first at \[\d, \d\]: -\d", printed)
    told = proof_command("diff", a, shifted, code=2).out
    assert "log_probs" in told and "not the same tokens" in told and "ulp" not in told
    assert "loss_masks" not in told and "advantages" not in told


def test_the_two_sides_of_one_hosts_dump(tmp_path: Path, proof_command: ProofCommand):
    assert diff(saved(tmp_path / "a.pt", miles_dump())) == 0
    read = proof_command("diff", saved(tmp_path / "b.pt", miles_dump(off=2**-10)), code=1)
    assert "log_probs: 1 of 3 values differ, first at [1, 0]: -3 (" in read.out
    read = proof_command("diff", saved(tmp_path / "c.pt", rollout_dump()), code=2)
    assert "c.pt: holds no log_probs, so it needs a B to compare with" in read.err


@pytest.mark.parametrize(
    ("masks", "code", "said"),
    [
        ([[1, 0], [1]], 0, "left out: masked tokens  1"),
        ([[0, 0], [1]], 0, "left out: masked tokens  2"),
        ([[0.0, 1.0], [True]], 1, "1 of 3 values differ, first at [0, 1]: 0 ("),
        ([None, [1]], 1, "first at [0, 1]"),
        ([[0, 0], [0]], 2, "the loss mask of the dump leaves every token out"),
        ([[1], [1]], 2, "loss masks of [1, 1] values for responses of [2, 1] tokens"),
        (torch.ones(2, 2), 2, "loss masks of [2, 2] values for responses of [2, 1] tokens"),
        ([[1, 0]], 2, "loss_masks: not one entry for each of 2 samples"),
    ],
)
def test_a_token_that_no_engine_sampled_is_left_out(
    masks: Any, code: int, said: str, tmp_path: Path, proof_command: ProofCommand
):
    """Hosts give a tool's tokens the log-prob 0; two runs are compared with the tokens outside the mask."""
    engine = [torch.tensor([-1.0, 0.0]), torch.tensor([-3.0])]
    a = saved(tmp_path / "a.pt", miles_dump(loss_masks=masks, rollout_log_probs=engine))
    read = proof_command("diff", a, code=code)
    assert said in read.out + read.err
    b = saved(tmp_path / "b.pt", miles_dump(loss_masks=[[1, 0], [1]]))
    whole = saved(tmp_path / "c.pt", miles_dump(loss_masks=[[1, 0], [1]], log_probs=engine))
    assert diff(b, whole) == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rollout_log_probs": None, "log_probs": None}, "a host's dump without log-probs"),
        ({"log_probs": [torch.zeros(1), torch.zeros(1)]}, "a rank of context parallelism dumps its own part alone"),
        ({"log_probs": [torch.zeros(2), torch.zeros(1).bfloat16()]}, "log_probs: of several dtypes"),
        ({"response_lengths": None}, "a sample without response_lengths"),
        (
            {"response_lengths": [2, 3], "log_probs": [torch.zeros(2), torch.zeros(1)]},
            "a sample of 2 tokens, 3 of them",
        ),
        ({"response_lengths": [2, -1]}, "a sample of 2 tokens, -1 of them in its response"),
        ({"tokens": [torch.tensor([9, 2, 3]), torch.tensor([4, 5])]}, "not the same prompts"),
    ],
)
def test_a_hosts_dump_that_cannot_be_compared_says_why(columns: dict, message: str, tmp_path: Path):
    files = [saved(tmp_path / f"{len(more)}.pt", miles_dump(**more)) for more in (columns, {})]
    assert diff(*files, "--json", tmp_path / "r.json") == 2
    assert message in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize("number", [np.float32(1), np.float64(1), np.int64(1), np.bool_(True)])
def test_a_number_of_numpy_hides_nothing_in_a_dump(number: Any, tmp_path: Path, capsys: Capture):
    """A numpy number beside tensors is read as inert: no tensor is made of it, and nothing is called."""
    a = saved(tmp_path / "a.pt", {"x": X, "reward": [number]})
    b = saved(tmp_path / "b.pt", {"x": Y, "reward": [number]})
    assert diff(a, a) == 0
    assert diff(a, b) == 1
    dumped = saved(tmp_path / "step=0___rank=0___dump_index=1___name=x.pt", {"value": number})
    assert diff(dumped, dumped) == 0
    rewards = saved(tmp_path / "m.pt", miles_dump(raw_reward=[number, number]))
    assert diff(rewards) == 0
    assert "Traceback" not in capsys.readouterr().err


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    np.arange(6, dtype=np.int64)[::2],
    np.array([True, False]),
    np.array(0.5),
    np.arange(3, dtype=np.float16),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_an_array_of_numpy_in_a_dump_is_compared(array: np.ndarray, tmp_path: Path):
    """Bit by bit with a tensor of its numbers, and with an array that differs in one of them."""
    folders = [tmp_path / name for name in ("array", "tensor", "other")]
    other = array.copy()
    other.flat[0] = not other.flat[0]
    for folder, value in zip(folders, (array, torch.from_numpy(array.copy()), other), strict=True):
        folder.mkdir()
        saved(folder / "step=0___rank=0___dump_index=1___name=x.pt", {"value": value})
    assert diff(folders[0], folders[1]) == diff(folders[0], folders[0]) == 0
    assert diff(folders[0], folders[2]) == 1


def test_log_probs_of_a_rollout_in_arrays_of_numpy(tmp_path: Path):
    dump = miles_dump()
    of_arrays = miles_dump(rollout_log_probs=[x.numpy() for x in dump["rollout_data"]["rollout_log_probs"]])
    a, b = (saved(tmp_path / f"{name}.pt", x) for name, x in (("a", dump), ("b", of_arrays)))
    assert diff(a, b) == 0


def test_an_npz_that_is_named_like_a_dump(tmp_path: Path, proof_command: ProofCommand):
    file = tmp_path / "step=0___rank=0___dump_index=1___name=x.npz"
    np.savez(file, value=np.float32(1))
    assert diff(tmp_path, tmp_path) == 0
    np.savez(file, a=np.float32(1), b=np.float32(1))
    read = proof_command("diff", tmp_path, tmp_path, code=2)
    assert "is named like a dump of one tensor but holds 2" in read.out


def test_records_of_nothing_are_not_equal(tmp_path: Path):
    LogProbRecord.from_sequences([], []).save(tmp_path / "a.safetensors")
    assert diff(tmp_path / "a.safetensors", tmp_path / "a.safetensors") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_probs": [[-0.5], [], [-1.0, -2.0]]}, r"sequences of \[1, 0, 2\] values for tokens of \[3, 0, 2\]"),
        ({"versions": [[0, 0], [1], [1, 1]]}, r"versions: sequences of \[2, 1, 2\] values for tokens of \[3, 0, 2\]"),
        ({"log_probs": [[-0.1, -0.25, -3.0], [], [-1.0, -2.0]]}, r"-0\.1 is no torch\.float32"),
    ],
)
def test_a_record_that_does_not_fit(arguments: dict, message: str, tmp_path: Path):
    with pytest.raises(RecordError, match=message):
        save(tmp_path / "r.safetensors", **arguments)


@pytest.mark.parametrize("boundaries", [[0, 4], [1, 5], [0, 3, 2, 5], []])
def test_boundaries_that_do_not_fit(boundaries: list):
    with pytest.raises(RecordError, match="cu_seqlens: expected to rise from 0 to 5"):
        LogProbRecord(torch.zeros(5).long(), torch.zeros(5), torch.zeros(5).long(), torch.tensor(boundaries).long())


@pytest.mark.parametrize(
    "change",
    [
        {"versions": torch.zeros(4).long()},
        {"versions": torch.zeros(5)},
        {"cu_seqlens": torch.tensor([[0, 5]])},
        {"log_probs": torch.zeros(5).long()},
        {"tokens": None},
        {"more": torch.zeros(5)},
        {"mask": torch.zeros(2).bool()},
    ],
    ids=str,
)
def test_a_foreign_record_is_refused(change: dict[str, Tensor | None], tmp_path: Path):
    """Whatever a file claims to be."""
    tensors = LogProbRecord.from_sequences(TOKENS, LOG_PROBS).tensors | change
    hashes = json.dumps({name: digest(tensor) for name, tensor in tensors.items() if tensor is not None})
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "r.safetensors",
        {"format": FORMAT, "sha256": hashes},
    )
    with pytest.raises(RecordError, match=r"r\.safetensors"):
        LogProbRecord.load(tmp_path / "r.safetensors")


def test_a_changed_record_is_refused(tmp_path: Path):
    """A byte of the log-probs, which any reader of safetensors would take."""
    file = save(tmp_path / "a.safetensors")
    whole = file.read_bytes()
    at = whole.index(struct.pack("<f", -3.0))
    file.write_bytes(whole[:at] + struct.pack("<f", -3.5) + whole[at + 4 :])
    with pytest.raises(RecordError, match="log_probs is not what was written"):
        LogProbRecord.load(file)
    with pytest.raises(RecordError, match="not a log-prob record"):
        LogProbRecord.load(as_safetensors(tmp_path / "plain", {"x": X}))


# ------------------------------------------------------------------------------------------------------ names


def test_fused_projections_are_taken_apart():
    """Rows of a fused weight are told by number: query head 10 .. 13, keys 20, 21, values 30, 31."""
    heads = Heads(query=4, key_value=2, size=2)
    wide = lambda *numbers: torch.tensor(numbers).repeat_interleave(2)[None]  # noqa: E731
    sglang = wide(10, 11, 12, 13, 20, 21, 30, 31)
    megatron = wide(10, 11, 20, 30, 12, 13, 21, 31)
    for part, expected in (("q", wide(10, 11, 12, 13)), ("k", wide(20, 21)), ("v", wide(30, 31))):
        assert torch.equal(PARTS[part](sglang, heads), expected)
        assert torch.equal(PARTS[f"grouped {part}"](megatron, heads), expected)
    assert torch.equal(PARTS["gate"](wide(1, 2), None), wide(1))
    assert torch.equal(PARTS["up"](wide(1, 2), None), wide(2))


def test_regrouping_keeps_the_order_of_values():
    x = torch.arange(24.0)
    for shape in ((4, 6), (1, 4, 6), (4, 1, 2, 3), (24,), (2, 2, 6), (8, 3)):
        assert regrouped(x.reshape(4, 1, 6), x.reshape(shape)).shape == ((4, 1, 6) if shape != (8, 3) else (8, 3))
    assert regrouped(x.reshape(4, 6), x.reshape(6, 4)).shape == (6, 4)  # a transposed batch is another order


@pytest.mark.parametrize(("batch", "code"), [(2, 2), (3, 1)])
def test_a_batch_of_megatrons_has_its_tokens_first(batch: int, code: int, tmp_path: Path):
    x, ids = torch.randn(batch, 3, 4), torch.arange(batch * 3).view(batch, 3)
    hf = {"input_ids": ids, "model.layers.0.self_attn.q_proj.a": x, "model.layers.0.mlp.output": x}
    a = dump_all(tmp_path / "hf", hf)
    for side, value, wanted in (("equal", x, 0), ("other", x + 1, code)):
        rows = value.transpose(0, 1).contiguous()
        b = dump_all(tmp_path / side, {"input_ids": ids, "decoder.layers.0.mlp.output": rows})
        assert diff(a, b) == wanted


def test_a_map_of_names(tmp_path: Path, capsys: Capture):
    a = dump_all(tmp_path / "a", {"enc.0.proj.output": X, "enc.1.proj.output": X, "only_a": X, "same": X})
    blocks = {"block0.output": X.reshape(2, 1, 3), "block1.output": Y.reshape(2, 1, 3)}
    b = dump_all(tmp_path / "b", blocks | {"only_b": X, "same": X})
    names = tmp_path / "names.yaml"
    names.write_text("enc.*.proj.output: block*.output\nonly_a: null\nonly_b: null\n")
    assert diff(a, b, "--map", names) == 1
    found = report(a, b, names)
    assert {row.key.name: row.status for row in found.rows} == {
        "block0.output": "equal", "block1.output": "different", "same": "equal",
    }  # fmt: skip
    assert found.left_out == 2
    names.write_text("enc.*.proj.output: block*.output\n")
    assert report(a, b, names).counts["missing in A"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected lines of `name in A: name in B`"),
        ("a: [b]", r"a: got \['b'\]"),
        ("a[w]: b", "no part 'w'; choose one of q, k, v"),
        ('a: ""', "a: got ''; expected a name in B, or null"),
        ("a: b: c", "cannot be read"),
        ('"*.*": x', "a pattern holds it once"),  # its search may never end
        ('"x(.0)(.0)": x', "a pattern holds it once"),
        ("zz: zz", "no line names a tensor of A, such as embed.output"),
        ("z: null", "no line names a tensor of A, such as embed.output"),
    ],
)
def test_a_map_that_cannot_be_used(text: str, message: str, tmp_path: Path, proof_command: ProofCommand):
    a = dump_all(tmp_path / "a", BASE)
    (tmp_path / "names.yaml").write_text(text)
    read = proof_command("diff", a, a, "--map", tmp_path / "names.yaml", code=2)
    assert re.search(message, read.err)


def test_fused_names_need_the_heads(tmp_path: Path):
    a = dump_all(tmp_path / "a", {"model.layers.0.self_attn.qkv_proj.output": torch.zeros(3, 16)})
    widths = {"q": 8, "k": 4, "v": 4}
    parts = {f"model.layers.0.self_attn.{x}_proj.output": torch.zeros(3, widths[x]) for x in widths}
    b = dump_all(tmp_path / "b", parts)
    assert report(a, b, heads=Heads(4, 2, 2)).exit_code == 0
    for heads, message in ((None, "--model"), (Heads(8, 4, 2), "tensor parallelism")):
        found = report(a, b, heads=heads)
        assert found.exit_code == 2 and message in found.rows[0].detail


def test_heads_of_a_checkpoint(tmp_path: Path):
    config = tmp_path / "config.json"
    for text, heads in (
        ('{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}', Heads(4, 2, 32)),
        ('{"num_attention_heads": 4, "hidden_size": 64}', Heads(4, 4, 16)),
        ('{"text_config": {"num_attention_heads": 4, "hidden_size": 64}, "vision_config": {}}', Heads(4, 4, 16)),
    ):
        config.write_text(text)
        assert Heads.of(tmp_path) == Heads.of(config) == heads
    config.write_text("{}")
    with pytest.raises(RecordError, match="--model .*num_attention_heads"):
        Heads.of(config)


# ------------------------------------------------------------------------------------------------ the recorder


class Toy(nn.Module):
    """Layers that share one module, one of them recomputed in the backward."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.ModuleDict({"shared": shared}) for _ in range(2))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        for layer in self.layers:
            x = recomputed(layer["shared"], x, use_reentrant=False)  # type: ignore[index]
        return {"y": x * scale, "z": x}


def test_the_recorder_leaves_the_model_as_it_was(tmp_path: Path):
    model = Toy()
    hooks = lambda: [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]  # noqa: E731
    before = hooks()
    with pytest.raises(RuntimeError), record(model, tmp_path / "a"):
        assert hooks() != before
        model(torch.ones(2, 4))
    assert hooks() == before
    with pytest.raises(RecordError, match="holds a recording already"), record(model, tmp_path / "a"):
        pass


def test_ranks_record_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whichever begins first; only its own recording is in a rank's way."""
    for rank in (1, 0, 10):
        monkeypatch.setattr("true_on_policy.diff.module_recorder._rank", lambda rank=rank: rank)
        with record(Toy(), tmp_path / "a") as recorder:
            recorder.write("x", X)
    assert {entry.key.rank for entry in read_recording(tmp_path / "a").entries} == {0, 1, 10}
    with pytest.raises(RecordError, match="holds a recording already"), record(Toy(), tmp_path / "a"):
        pass


def test_the_recorder_names_and_orders(tmp_path: Path):
    model = Toy()
    with record(model, tmp_path / "a") as recorder:
        model(X.clone().requires_grad_(), scale=2.0)["y"].sum().backward()
        recorder.write("loss", X)
    recording = read_recording(tmp_path / "a")
    assert [str(entry.key) for entry in recording.entries] == [
        "x", "layers.0.shared.inputs.0", "layers.0.shared.output",
        "layers.0.shared.inputs.0 #2", "layers.0.shared.output #2", "output.y", "output.z",
        # torch ends a recomputation as soon as it has what the backward needs, here before the module returns
        "layers.0.shared.inputs.0 recomputed", "layers.0.shared.inputs.0 recomputed #2", "loss",
    ]  # fmt: skip


def test_files_stand_by_their_numbers_whatever_zeros_lead_them(tmp_path: Path):
    in_order = ["step00008", "step0008", "step008", "step08", "step8", "step09", "step10"]
    for name in reversed(in_order):
        torch.save(X, tmp_path / f"{name}.pt")
    assert [entry.key.name for entry in read_recording(tmp_path).entries] == in_order


# ------------------------------------------------------------------------------------------------- real models


IDS = torch.randint(2, 320, (3, 9), generator=torch.Generator().manual_seed(1))


def recorded(trainer: HuggingFace, folder: Path, ids: Tensor) -> Path:
    """The first sequence of a batch."""
    with torch.no_grad(), record(trainer.model, folder, lambda x: x[:1]) as recorder:
        logits = trainer.model(input_ids=ids).logits
        log_probs = logits.log_softmax(-1)[0].gather(-1, ids[0][:, None])[:, 0]
        recorder.log_probs(LogProbRecord.from_sequences([ids[0].tolist()], [log_probs.tolist()]))
    return folder


def test_a_batch_of_three_on_stock_kernels_first_differs_in_a_linear(tiny_fp32: Path, tmp_path: Path):
    """One token: a product of one row takes another kernel than one of three."""
    model = HuggingFace(tiny_fp32, "fp32")
    alone, again, batch = (
        recorded(model, tmp_path / name, ids)
        for name, ids in (("alone", IDS[:1, :1]), ("again", IDS[:1, :1]), ("batch", IDS[:, :1]))
    )
    assert diff(alone, again) == 0
    assert diff(alone, batch) == 1
    found = report(alone, batch)
    assert found.first is not None and found.first.mismatch is not None
    modules = dict(model.model.named_modules())
    assert isinstance(modules[found.first.operation], nn.Linear)
    assert found.first.is_output
    assert [row.key.name for row in found.feeds] == [f"{found.first.operation}.inputs.0"]
    assert found.counts["missing in A"] == found.counts["missing in B"] == 0


def both_recorded(model: Path, folder: Path, dtype: str = "fp32", order: NormOrder | None = None) -> Megatron:
    """Record the first sequence of both trainers on pinned kernels, in `hf` and in `megatron`."""
    hf, megatron = HuggingFace(model, dtype, order), Megatron(model, dtype, order)
    with torch.no_grad(), pinned(Contract(dtype=dtype)):
        with record(hf.model, folder / "hf"):
            hf.model(input_ids=IDS[:1])
        with record(megatron.model, folder / "megatron"):
            megatron.logits([IDS[0].tolist()])
    assert diff(folder / "hf", folder / "megatron", "--model", model) == 0
    return megatron


@pytest.mark.parametrize(
    ("family", "dtype", "order", "rows"),
    [
        *((family, "fp32", None, 3 * 14 + 5) for family in ("tiny-llama", "tiny-qwen2.5")),  # without two of the norms
        ("tiny-qwen3-moe", "bf16", ORDERS["sglang"], 3 * 12 + 5),  # without the four inside an MLP
    ],
)
def test_other_families_are_paired_too(family: str, dtype: str, order: NormOrder | None, rows: int, tmp_path: Path):
    model = checkpoint(family, tmp_path / "model", DTYPES[dtype], seed=0)
    both_recorded(model, tmp_path, dtype, order)
    found = report(tmp_path / "hf", tmp_path / "megatron", heads=Heads.of(model))
    assert len(found.rows) == rows and any(row.key.name == "model.layers.2.mlp.output" for row in found.rows)


def test_hugging_face_and_megatron(tiny_fp32: Path, tmp_path: Path):
    """Under pinned kernels every tensor of the table is equal, so the table pairs what belongs together."""
    megatron = both_recorded(tiny_fp32, tmp_path)
    assert diff(tmp_path / "megatron", tmp_path / "hf", "--model", tiny_fp32) == 0
    found = report(tmp_path / "hf", tmp_path / "megatron", heads=Heads.of(tiny_fp32))
    assert len(found.rows) == 3 * 16 + 5  # three layers; ids, embedding, last norm's input and output, logits
    with torch.no_grad(), record(megatron.model, tmp_path / "stock"):
        megatron.logits([IDS[0].tolist()])
    assert report(tmp_path / "hf", tmp_path / "stock", heads=Heads.of(tiny_fp32)).exit_code == 1

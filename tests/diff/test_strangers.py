"""The diff command on strangers' files: names, layouts and values that mean harm, or nothing."""

import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from commands import ProofCommand
from safetensors.torch import save_file
from test_diff import Capture, X, diff, dump, dump_all, miles_dump, report

from true_on_policy.diff.names import Heads

NAMES = (
    "step=..___nonsense.pt", "___=___.pt", "name=___dump_index=1.pt", "dump_index=___name=.pt",
    "step=0___rank=x___dump_index=1___name=x.pt", f"step=0___rank=0___dump_index={'9' * 200}___name=x.pt",
    f"step=0___rank={'9' * 150}___dump_index=1___name=y.pt", "\x1b[2J.pt", "a\nb.pt", "\u202etxt.pt", "$\\x$.pt",
    os.fsdecode(b"\xff\xfe.pt"), os.fsdecode(b"step=0___rank=0___dump_index=2___name=\xff.pt"),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of one tensor that is equal to itself."""
    return dump_all(tmp_path / "a", {"z.output": X})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_strangers_hides_no_other_file_and_steers_no_terminal(
    name: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    for file in ("good.pt", name):
        (folder / file).write_bytes(bytes_of(X))
    diff(folder, folder, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {"z.output", "good"} <= {row["name"] for row in rows if row["status"] == "equal"} and len(rows) == 3
    read = capsys.readouterr()
    assert "Traceback" not in read.err
    assert all(character.isprintable() or character == "\n" for character in read.out + read.err)


def bytes_of(value: object) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


NESTED: list = []
for _ in range(300):
    NESTED = [NESTED]
ODD: dict[str, object] = {
    "columns of numbers": {"rollout_data": {"tokens": [1, 2], "log_probs": [1, 2], "response_lengths": [1, "x"]}},
    "tokens that are a number": {"samples": [{"tokens": 5, "log_probs": 3, "response_length": 1}]},
    "tokens of many digits": {"samples": [{"tokens": [10**30], "log_probs": [-1.0], "response_length": 1}]},
    "log-probs in words": {"samples": [{"tokens": [1], "log_probs": ["a"], "response_length": 1}]},
    "a dict of log-probs": {"samples": [{"tokens": [1], "log_probs": {"a": 1}, "response_length": 1}]},
    "a length of many digits": {"samples": [{"tokens": [1], "log_probs": [-1.0], "response_length": 10**400}]},
    "a length in words": {"samples": [{"tokens": [1], "log_probs": [-1.0], "response_length": "one"}]},
    "matrices": {"samples": [{"tokens": X, "log_probs": X, "response_length": X}]},
    "names that are numbers": {"samples": [{"tokens": [1], "log_probs": [-1.0], "response_length": 1, 3: 4}]},
    "lists in lists": NESTED,
    "a text": "x",
}


@pytest.mark.parametrize("case", ODD)
def test_a_file_of_odd_values_hides_no_other(case: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (folder / "odd.pt").write_bytes(bytes_of(ODD[case]))
    code = diff(folder, folder, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert ("z.output", "equal") in {(row["name"], row["status"]) for row in rows}
    assert (code == 0) == all(row["status"] == "equal" for row in rows)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("numbers", [2**64 - 1, [2**70, None], [0.5, 2**53 + 1]], ids=str)
def test_numbers_that_no_dtype_holds_are_compared_exactly(numbers: Any, folder: Path, tmp_path: Path) -> None:
    others = numbers - 1 if isinstance(numbers, int) else [x if x in (None, 0.5) else x - 1 for x in numbers]
    copies = [copytree(folder, tmp_path / name) for name in ("same", "other")]
    for copied, seed in zip((folder, *copies), (numbers, numbers, others), strict=True):
        (copied / "seed.pt").write_bytes(bytes_of({"seed": seed}))
    assert [diff(folder, copied) for copied in copies] == [0, 1]


def test_tensors_without_values_are_nothing_that_was_computed(tmp_path: Path) -> None:
    a = dump_all(tmp_path / "a", {"z.output": torch.zeros(0, 3)})
    assert diff(a, a) == 2
    both = dump_all(tmp_path / "b", {"z.output": torch.zeros(0, 3), "x.output": X})
    assert diff(both, both) == 0


@pytest.mark.parametrize(
    "config",
    ["[" * 100_000, "null", "[]", '{"num_attention_heads": 0, "hidden_size": 4}',
     '{"num_attention_heads": 4, "head_dim": -3}', '{"num_attention_heads": 1e400, "head_dim": 3}',
     f'{{"num_attention_heads": {"9" * 5000}}}'],
)  # fmt: skip
def test_a_config_without_heads_is_refused(
    config: str, folder: Path, tmp_path: Path, proof_command: ProofCommand
) -> None:
    (tmp_path / "config.json").write_text(config)
    read = proof_command("diff", folder, folder, "--model", tmp_path, code=2)
    assert "no config.json with attention heads" in read.err


@pytest.mark.parametrize(("part", "shape"), [("q", ()), ("gate", ()), ("grouped k", ())])
def test_a_part_of_a_tensor_without_that_part_hides_no_other(part: str, shape: tuple, tmp_path: Path) -> None:
    folder = dump_all(tmp_path / "a", {"z.output": X, "y.output": torch.zeros(shape)})
    (tmp_path / "map.yaml").write_text(json.dumps({"z.output": "z.output", f"y.output[{part}]": "y.output"}))
    rows = report(folder, folder, tmp_path / "map.yaml", Heads(1, 1, 1)).rows
    assert {row.key.name: row.status for row in rows} == {"z.output": "equal", "y.output": "not comparable"}


@pytest.mark.parametrize(
    "layout",
    [{"rids": ["a"], "positions": torch.tensor([0]), "seq_lens": torch.tensor([10**15])},
     {"rids": 5, "positions": X, "seq_lens": X},
     {"rids": ["HEALTH_CHECK"] * 3, "positions": torch.tensor([0, 1, 2]), "seq_lens": torch.tensor([2**62] * 3)},
     {"positions": "x", "rids": ["a"], "seq_lens": torch.tensor([3])},
     {"input_ids": torch.tensor([0.5, 1.5])},
     {"input_ids": "x"}],
)  # fmt: skip
def test_a_layout_that_is_none_is_refused_in_words(layout: dict, tmp_path: Path, proof_command: ProofCommand) -> None:
    values = {"input_ids": torch.tensor([1, 2, 3])} | layout
    for index, (name, value) in enumerate((values | {"z.output": X}).items()):
        dump(tmp_path / "a", index, name, value)
    read = proof_command("diff", tmp_path / "a", tmp_path / "a", "--by-token", code=2)
    assert "Traceback" not in read.err


@pytest.mark.parametrize("value", [torch.conj(torch.tensor([1 + 1j])), np.longdouble(1), np.array(["a"])])
def test_a_value_that_is_not_read_is_never_equal(value: object, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2), "odd": value}, tmp_path / "a.pt")
    found = report(tmp_path / "a.pt", tmp_path / "a.pt")
    assert [row.status for row in found.rows] == ["equal", "not comparable"] and found.exit_code == 2


@pytest.mark.parametrize("column", [torch.full((3, 5), -9.0), [torch.full((5,), -9.0)] * 2])
def test_a_column_of_log_probs_is_compared_or_refused(column: object, tmp_path: Path) -> None:
    for name, log_probs in (("a", [torch.full((5,), -1.0)] * 3), ("b", column)):
        data = {"tokens": torch.arange(21).view(3, 7), "response_lengths": torch.tensor([5] * 3)}
        data |= {"rollout_log_probs": [-torch.ones(5)] * 3, "log_probs": log_probs}
        torch.save({"rollout_id": 1, "rank": 0, "rollout_data": data}, tmp_path / f"{name}.pt")
    assert report(tmp_path / "a.pt", tmp_path / "b.pt").exit_code in (1, 2)
    alike = report(tmp_path / "b.pt", tmp_path / "b.pt").exit_code
    assert alike == (0 if isinstance(column, torch.Tensor) else 2)


@pytest.mark.parametrize("ending", ["bin", "pth", "ckpt"])
def test_files_of_torch_save_of_any_ending_are_compared(ending: str, tmp_path: Path) -> None:
    for name, other in (("a", X), ("b", X + 1)):
        folder = dump_all(tmp_path / name, {"z.output": X})
        (folder / f"model.{ending}").write_bytes(bytes_of({"x": other}))
        torch.save(torch.nn.Identity(), folder / "training_args.bin")  # an object of Hugging Face's, without tensors
    found = report(tmp_path / "a", tmp_path / "b")
    assert [(row.key.name, row.status) for row in found.rows] == [("z.output", "equal"), ("model.x", "different")]
    assert report(tmp_path / "a", tmp_path / "a").exit_code == 0


INDEX = {"weight_map": {"z": "model-1.safetensors", "y": "model-1.safetensors"}}  # a shard that nobody has
KINDS = [f"model.{kind}" for kind in "npy gguf distcp h5 pkl pickle PT pt.gz safetensors.part pt.bak parquet".split()]


@pytest.mark.parametrize("name", [*KINDS, "model.safetensors.index.json"])
def test_tensors_that_are_not_read_are_never_equal(name: str, folder: Path) -> None:
    (folder / name).write_text(json.dumps(INDEX))
    (folder / "config.json").write_text("{}")
    found = report(folder, folder)
    of_index = ["equal"] * name.endswith(".index.json")  # the names of its shards
    assert [row.status for row in found.rows] == ["equal", "not comparable", *of_index]
    assert found.exit_code == 2


@pytest.mark.parametrize("ending", ["pt", "npz"])
@pytest.mark.parametrize("joined", [lambda one: one + b"0", lambda one: one + bytes(30), lambda one: b"0" + one])
def test_bytes_around_an_archive_are_never_equal(ending: str, joined: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / f"a.{ending}"
    torch.save({"x": X}, file) if ending == "pt" else np.savez(file, x=X.numpy())
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / file.name
    other.write_bytes(joined(file.read_bytes()))
    assert report(file, file).exit_code == 0
    assert report(file, other).exit_code == report(other, other).exit_code == 2


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [([-1.5, -2.0], [-1.5, -3.0], 1),
     ([-1.5, -2.0], [-1.5, None], 1),
     ([-1.5, -2.0], [-1.5], 2),
     ([-1.5, -2.0], (-1.5, -2), 0),
     ([True, True], [True, False], 1),
     ([True, True], [1, 1], 2),
     ([True, 1, None], [1, 1, None], 2),
     (True, 1, 2),
     ([-1.5, None], [-1.5, math.nan], 1),
     ([-1.5, None], [-1.5, 0.0], 1),
     ([1, None], [1, 0], 1),
     (1e-3, 1e-4, 1),  # a learning rate
     (3, 3.0, 2),
     (["text", 1.0], ["text", 2.0], 1),
     ({"a": ["text", {"c": 1}]}, {"a": ["text", {"c": 2}]}, 1),
     ("cosine", 1.0, 2),
     ("cosine", "linear", 1),
     (["a", "b"], ["a", "c"], 1),
     (b"a", b"b", 1),
     (1j, 2j, 1),
     (torch.float32, torch.float16, 1),
     ("cosine", None, 2),
     ([], {}, 2),
     ([], [1.0], 2)],
)  # fmt: skip
def test_what_stands_beside_a_tensor_is_compared(one: object, other: object, code: int, tmp_path: Path) -> None:
    for name, values in (("a.pt", one), ("b.pt", other)):
        torch.save({"x": X, "values": values, "names": ["a"]}, tmp_path / name)
    found = report(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.exit_code == code and found.rows[0].status == found.rows[-1].status == "equal"
    for name in ("a.pt", "b.pt"):
        assert report(tmp_path / name, tmp_path / name).exit_code == 0


def test_a_buffer_is_read(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"x": torch.nn.Buffer(X + number)}, tmp_path / f"{number}.pt")
    assert [report(tmp_path / "0.pt", tmp_path / f"{number}.pt").exit_code for number in range(2)] == [0, 1]


def test_whole_numbers_of_a_hosts_dump_lose_no_fraction(tmp_path: Path) -> None:
    dumps = miles_dump(tokens=[[1.5, 2.5, 3.5], [4.5, 5.5]]), miles_dump(response_lengths=[2.5, 1])
    for number, held in enumerate(dumps):
        torch.save(held, tmp_path / f"{number}.pt")
        assert diff(tmp_path / f"{number}.pt") == 2


def test_an_index_of_another_format_is_left_over(tmp_path: Path) -> None:
    folder = tmp_path
    save_file({"x": X}, folder / "model.safetensors")
    shards = {"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(shards))
    assert report(folder, folder).exit_code == 0
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(bytes_of({"x": X}))
    assert report(folder, folder).exit_code == 2


@pytest.mark.parametrize(
    ("first", "stated", "code"),
    [(X, {"w": 1}, 1),  # the copies of w differ, and the other index chooses shard 2
     (X + 1, {"w": 1}, 0),
     (X, {"w": 2}, 0),
     (X, {"v": 1}, 2),  # shard 1 holds no v
     (X, {"v": None, "w": 1, "u": 1}, 1)],  # shard 2 is not loaded
)  # fmt: skip
def test_an_index_chooses_among_equal_files(first: torch.Tensor, stated: dict, code: int, tmp_path: Path) -> None:
    maps = {"u": 1, "v": 2, "w": 2}, {"u": 1, "v": 2, "w": 2} | stated
    for name, shards in zip("ab", maps, strict=True):
        (tmp_path / name).mkdir()
        save_file({"u": X, "w": first.clone()}, tmp_path / name / "m-1.safetensors")
        save_file({"v": X, "w": X + 1}, tmp_path / name / "m-2.safetensors")
        weights = {weight: f"m-{shard}.safetensors" for weight, shard in shards.items() if shard}
        (tmp_path / name / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert report(tmp_path / "a", tmp_path / "b").exit_code == report(tmp_path / "b", tmp_path / "a").exit_code == code


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "map.yaml"])
def test_a_pipe_is_waited_for_by_nobody(name: str, folder: Path, proof_command: ProofCommand) -> None:
    os.mkfifo(folder / name)
    mapped = ["--map", folder / name] if name == "map.yaml" else []
    assert name in proof_command("diff", folder, folder, *mapped, code=2).err


def test_files_of_one_index_are_read_in_one_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for step in range(12):
            dump(tmp_path / name, 1, "x.output", X + step, step=step)
    assert report(tmp_path / "a", tmp_path / "b").exit_code == 0
    dump(tmp_path / "a", 1, "x.output", X + 12, step=12)
    assert {row.status for row in report(tmp_path / "a", tmp_path / "b").rows[:12]} == {"equal"}


def test_a_folder_that_cannot_be_opened_is_never_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir
    (folder / "deep" / "closed").mkdir(parents=True)
    assert report(folder, folder).exit_code == 0

    def refusing(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert report(folder, folder).exit_code == 2


@pytest.mark.parametrize("number", [-9999.0, -1e9, float("-inf"), 1.0])
def test_a_number_that_stands_in_for_a_log_prob_is_never_equal(number: float, tmp_path: Path) -> None:
    sample = {"tokens": [1, 2], "response_length": 2, "log_probs": [-1.0, number]}
    torch.save({"samples": [sample]}, tmp_path / "a.pt")
    found = report(tmp_path / "a.pt", tmp_path / "a.pt")
    assert found.exit_code == 2 and "without a log-prob: A 1, B 1 of 2 tokens" in found.rows[0].detail


def test_bytes_of_no_tensor_are_never_equal(tmp_path: Path) -> None:
    held = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    for name, rest in (("a", b"1234"), ("b", b"5678")):
        header = json.dumps(held).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(4) + rest
        (tmp_path / f"{name}.safetensors").write_bytes(content)
    found = report(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.exit_code == 2 and "bytes 4 to 8 belong to no tensor" in found.rows[0].detail

"""Readers: every format yields the same records, foreign classes are never imported, and a broken file is named."""

import json
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pyarrow import Table, parquet
from report_dumps import write_miles, write_rollout, write_slime, write_vime

from lab.planted_runs import as_line
from mis_plugins.__main__ import main
from mis_plugins.errors import InputError
from mis_plugins.report.readers.files import Problems
from mis_plugins.report.readers.paths import find
from mis_plugins.report.record import Record, from_mapping
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import load_foreign


def some_records(step: int = 3, lengths: Sequence[int] = (7, 1, 30)) -> list[Record]:
    generator = torch.Generator().manual_seed(step)
    return [
        Record(
            step,
            str(place),
            -torch.rand(size, generator=generator),
            -torch.rand(size, generator=generator),
            torch.rand(size, generator=generator) < 0.8,
            torch.arange(size),
            advantages=torch.ones(size),
        )
        for place, size in enumerate(lengths)
    ]


def read(*paths: Path) -> tuple[list[Record], list[str]]:
    problems = Problems()
    found = find(paths, problems)
    return [record for source in found.sources for record in source.records(problems)], list(map(str, problems.kept))


def reported(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report.json of a report that tries no config, written into `out` beside the path."""
    output = path.parent / "out"
    code = main(["report", str(path), "--sweep", "none", "--output", str(output), *flags])
    return code, json.loads((output / "report.json").read_text())


def assert_alike(found: Sequence[Record], wanted: Sequence[Record]) -> None:
    assert [record.sample for record in found] == [record.sample for record in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.step == other.step
        for name in ("behavior_log_probs", "proximal_log_probs", "loss_mask", "tokens", "advantages"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change what a file of torch holds, in place."""
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)


Written = Callable[[Path, Sequence[Record]], None]


def miles_where(change: Callable[[dict[str, Any]], object]) -> Written:
    """Writes a dump of Miles, the columns of whose ranks are changed."""

    def write(folder: Path, records: Sequence[Record]) -> None:
        write_miles(folder, records, 1)
        for file in (folder / "train_data").iterdir():
            edit(file, lambda content: change(content["rollout_data"]))

    return write


def slime_where(change: Callable[[dict[str, Any]], object]) -> Written:
    """Writes a dump of slime, each of whose samples is changed."""

    def write(folder: Path, records: Sequence[Record]) -> None:
        write_slime(folder, records)
        edit(folder / "train_data" / "3.pt", lambda content: [change(sample) for sample in content["samples"]])

    return write


WRITERS = {
    "slime": write_slime, "vime": write_vime, **{f"miles-cp{cp}": partial(write_miles, cp=cp) for cp in (1, 2, 4)},
    **{f"a version {text[:9]}": slime_where(lambda sample, text=text: sample.update(weight_versions=[text]))
       for text in ("\u00b2", "9" * 400)},
}  # fmt: skip


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_hosts_dump_is_read_whole(tmp_path: Path, write: Written) -> None:
    write(tmp_path, some_records())
    found, told = read(tmp_path)
    assert_alike(found, some_records())
    assert not told


def test_lengths_that_end_before_the_last_sample_lose_none(tmp_path: Path) -> None:
    miles_where(lambda columns: columns["response_lengths"].pop())(tmp_path, some_records())
    assert_alike(read(tmp_path)[0], some_records())


def miles_without_ranks(folder: Path, records: Sequence[Record]) -> None:
    write_miles(folder, records, 2)
    for rank in (3, 4, 5):
        (folder / "train_data" / f"3_{rank}.pt").unlink()


LOST: dict[str, tuple[Written, str]] = {
    "a rank": (miles_without_ranks, "of 1 of 2 context-parallel ranks"),
    "an end of tokens": (
        slime_where(lambda sample: sample.update(tokens=sample["tokens"][:0])),
        "tokens has 0 values, fewer than log_probs",
    ),
    **{f"the end of {name}": (
        miles_where(lambda columns, name=name: columns.update({name: []})),
        f"{name} has 0 entries, fewer than the rank has samples",
    ) for name in ("loss_masks", "log_probs", "rollout_log_probs")},
    **{f"the fractions of {name}": (
        slime_where(lambda sample, name=name: sample.update({name: sample[name].long()})),
        "numbers of another kind (torch.int64)",
    ) for name in ("log_probs", "rollout_log_probs")},
}  # fmt: skip


@pytest.mark.parametrize(("write", "why"), LOST.values(), ids=LOST)
def test_a_dump_without_what_its_samples_need_is_told(tmp_path: Path, write: Written, why: str) -> None:
    write(tmp_path, some_records())
    found, told = read(tmp_path)
    assert not found and told and all(why in one for one in told)


@pytest.mark.parametrize("write", [write_miles, write_slime])
def test_samples_that_share_an_index_stay_apart(tmp_path: Path, write) -> None:
    """An agent's responses to one prompt are copies of one sample: they have its index, and tokens of their own."""
    records = [replace(one, sample="0") for one in some_records(lengths=(4, 4, 9))]
    records = [replace(one, tokens=torch.arange(one.size) + place) for place, one in enumerate(records)]
    write(tmp_path, records)
    write_rollout(tmp_path, records)
    found, told = read(tmp_path)
    assert_alike(found, records)
    assert [record.reward for record in found] == [0.0, 1.0, 2.0] and not told


@pytest.mark.parametrize("write", [write_miles, write_slime])
def test_samples_with_equal_tokens_keep_what_they_agree_on(tmp_path: Path, write) -> None:
    records = [replace(one, sample="0", tokens=torch.arange(4)) for one in some_records(lengths=(4, 4))]
    write(tmp_path, records)
    write_rollout(tmp_path, records)
    found, told = read(tmp_path)
    assert [record.reward for record in found] == [0.0, 0.0] and not told  # the host's own column
    assert all(record.versions is not None and set(record.versions.tolist()) == {3} for record in found)
    assert [record.truncated for record in found] == [None, None]


def test_many_samples_that_share_an_index_are_read_in_linear_time(tmp_path: Path) -> None:
    records = [replace(one, sample="0") for one in some_records(lengths=[512] * 256)]
    records = [replace(one, tokens=torch.arange(512) + place) for place, one in enumerate(records)]
    write_slime(tmp_path, records)
    write_rollout(tmp_path, records)
    found, told = read(tmp_path)
    assert [record.reward for record in found] == [float(place) for place in range(256)] and not told


def test_a_sample_without_an_index_is_read(tmp_path: Path) -> None:
    miles_where(lambda columns: columns["sample_indices"].__setitem__(1, None))(tmp_path, some_records())
    found, told = read(tmp_path)
    assert [record.sample for record in found] == ["0", "(0, 1)", "2"] and not told


def test_an_evaluations_dump_is_not_taken_for_the_rollouts(tmp_path: Path) -> None:
    write_miles(tmp_path, some_records())
    write_rollout(tmp_path, some_records())
    file = tmp_path / "rollout_data" / "3.pt"
    other = file.with_name("of_eval_3.pt")  # as by a template of one's own
    other.write_bytes(file.read_bytes())
    edit(other, lambda content: [one.update(reward=100.0, tokens=[1, 2, 3]) for one in content["samples"]])
    assert [record.reward for record in read(tmp_path)[0]] == [0.0, 1.0, 2.0]
    other.replace(file)  # other tokens are another sample's
    assert [record.reward for record in read(tmp_path)[0]] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["{}.pth", "{}", "a.{}"])
def test_a_dump_is_known_by_what_it_holds_and_not_by_its_name(tmp_path: Path, name: str) -> None:
    write_miles(tmp_path, some_records())
    for file in tmp_path.glob("**/*.pt"):
        file.rename(file.with_name(name.format(file.stem)))
    shard = next(tmp_path.glob("train_data/*")).read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(shard + shard)  # of a distributed checkpoint: one archive after another
    (tmp_path / "a.jsonl").write_text('{"prompt": "/data.pkl", "behavior_log_probs": [0], "proximal_log_probs": [0]}')
    records, problems = read(tmp_path)
    assert len(records) == 4 and not problems


def test_shards_with_the_same_indices_stay_apart(tmp_path: Path) -> None:
    one, other = (replace(record, sample="0") for record in some_records(lengths=(4, 4)))
    other = replace(other, tokens=torch.arange(4, 8))
    write_miles(tmp_path, [one], cp=2)
    write_miles(tmp_path, [other], cp=2, first_rank=6)
    found, told = read(tmp_path)
    assert_alike(found, [one, other])
    assert not told


@pytest.mark.parametrize("write", [write_miles, write_slime])
def test_the_rollouts_own_dump_adds_what_it_knows(tmp_path: Path, write) -> None:
    write(tmp_path, some_records())
    write_rollout(tmp_path, some_records(), foreign=numpy.zeros((3, 2), dtype=numpy.int32))
    found, told = read(tmp_path)
    assert not told
    assert [record.truncated for record in found] == [False, True, True]
    assert [record.reward for record in found] == [0.0, 1.0, 2.0]
    assert all(record.versions is not None and set(record.versions.tolist()) == {3} for record in found)


@pytest.mark.parametrize("beside", [False, True])
def test_versions_that_this_pack_carries_are_those_of_each_token(tmp_path: Path, beside: bool) -> None:
    """A response that was retracted is gone on with by newer weights: `convert_with_versions` notes who wrote what."""
    if beside:  # the rollout's own dump says version 3 of whole samples
        write_rollout(tmp_path, some_records())
    notes = iter([[9, 0, 4, 3, 5, 4], [9, 1, 6, 1], [9, 2, 4, 29]])  # the last one is a token short
    slime_where(lambda sample: sample.update(weight_versions=next(notes)))(tmp_path, some_records())
    first, second, third = read(tmp_path)[0]
    assert first.versions is not None and first.versions.tolist() == [4, 4, 4, 5, 5, 5, 5]
    assert first.ages is not None and first.ages.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert second.versions is not None and second.versions.tolist() == [6]
    assert (third.versions is None) == (not beside)


def test_rollouts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        write_slime(tmp_path, some_records(step))
    assert list(dict.fromkeys(record.step for record in read(tmp_path)[0])) == [2, 9, 10]


class Hostile:
    """Pickles as a call that leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists()  # as trusted pickle would have it
    trace.unlink()
    write_slime(tmp_path, some_records())
    write_rollout(tmp_path, some_records(), foreign=Hostile(trace))
    assert_alike(read(tmp_path)[0], some_records())
    assert not trace.exists()


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    with pytest.raises(RecordError, match="a TorchScript program, not a dump"):
        load_foreign(file)


def write_lines(path: Path, records: Sequence[Record], *more: str) -> None:
    first, *others = map(as_line, records)
    path.write_text("\n".join([first, *more, *others]) + "\n")


def test_a_broken_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    write_lines(file, some_records(), "{broken", '{"behavior_log_probs": [0.0], "proximal_log_probs": [0.0, 1.0]}')
    found, told = read(file)
    assert_alike(found, some_records())
    assert f"{file}: line 2" in told[0] and "proximal_log_probs has 2 values, and behavior_log_probs 1" in told[1]


def test_parquet(tmp_path: Path) -> None:
    write_lines(tmp_path / "run.jsonl", some_records())
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "run.parquet")
    assert_alike(read(tmp_path / "run.parquet")[0], some_records())


def test_a_damaged_page_of_parquet_is_told_by_its_checksum(tmp_path: Path) -> None:
    file = tmp_path / "run.parquet"
    rows = [{"behavior_log_probs": [-1 - place / 64] * 9, "proximal_log_probs": [-1.0] * 9} for place in range(64)]
    parquet.write_table(
        Table.from_pylist(rows), file, write_page_checksum=True, compression="none", use_dictionary=False
    )
    content = bytearray(file.read_bytes())
    content[content.index(numpy.float64(-1.5).tobytes()) + 6] ^= 1
    file.write_bytes(content)
    found, told = read(file)
    assert not found and "CRC" in told[0]


def test_ages_follow_the_trainers_version_or_the_newest_token() -> None:
    given = {"behavior_log_probs": [0.0, 0.0], "proximal_log_probs": [0.0, 0.0], "versions": [3, 4]}
    for values, ages in ((given, [1, 0]), (given | {"trainer_version": 6}, [3, 2])):
        found = from_mapping(values, 0, "a").ages
        assert found is not None and found.tolist() == ages


def test_verl_is_told_that_it_writes_no_log_probs(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps({"input": "a", "output": "b", "score": 1.0, "step": 1}) + "\n")
    found, told = read(tmp_path)
    assert not found and "holds texts and scores, and no log-probs" in told[0]


def test_a_path_without_anything(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], [])
    with pytest.raises(InputError, match="no such file or folder"):
        read(tmp_path / "missing")


def curves(path: Path) -> tuple[dict, list[str]]:
    problems = Problems()
    (curve,) = find([path], problems).read_curves(problems)
    return dict(curve.values), list(map(str, problems.kept))


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    head = bytes([value & 127 | (128 if value > 127 else 0)])
    return head + (varint(value >> 7) if value > 127 else b"")


def framed(content: bytes) -> bytes:
    """A record of a tensorboard file."""
    return struct.pack("<Q", len(content)) + bytes(4) + content + bytes(4)


def event(step: int, name: str, value: float) -> bytes:
    tag = field(1, name.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value)
    return framed(field(2, step) + field(5, field(1, tag)))


def logged(content: bytes, kind: int = 1, size: int | None = None) -> bytes:
    """A piece of wandb's log; a whole record is of kind 1."""
    return struct.pack("<IHB", zlib.crc32(content), len(content) if size is None else size, kind) + content


def wandb_record(step: int, value: float) -> bytes:
    item = field(2, b"train/mis_k3_kl") + field(16, json.dumps(value).encode())
    content = field(2, field(1, item) + field(2, field(1, step)))
    return logged(content)


LINES = b"""{"rollout": 0, "k3_kl": 0.5, "seconds": 1.0}
{"rollout": 1, "rollout_corr/k3_kl": 0.25}
{"step": 2, "mis_step/kl_k3": 0.125}
"""
CUT = event(300, "train/mis_step/kl_k3", 0.5) + event(301, "train/mis_step/kl_k3", 0.25)[:-3]
OF_VERL = b'{"step": 1, "data": {"rollout_corr/k3_kl": 0.5}}\n{"step": 2, "data": {"rollout_corr/k3_kl": 0.25}}'
OF_SWIFT = (b'{"rollout_correction/k3_kl": 0.5, "global_step/max_steps": "1/9"}\n'
            b'{"rollout_correction/k3_kl": 0.25, "iteration": "2/9"}')  # fmt: skip
OF_TEXT = (b'{"step": 1, "kl_k3": "5e-1"}\n{"train/global_step": 2, "kl_k3": "0.25"}\n'
           b'{"step": 3, "train/mis_k3_kl": "0,125"}')  # fmt: skip
OF_TWO = b"\n".join(
    b'{"step": %d, "kl_k3": %s, "train/mis_k3_kl": %s}' % row
    for row in ((1, b"NaN", b"0.5"), (2, b"0.25", b"NaN"), (3, b'{"_type": "histogram"}', b"0.125"))
)
OFFLINE = b":W&B" + bytes(3) + wandb_record(1, 0.5) + wandb_record(2, 0.25)


CUT_OFF = "tensorboard is damaged after step 300: the end of the file is cut"


@pytest.mark.parametrize(
    ("name", "content", "wanted", "told"),
    [
        ("metrics.jsonl", LINES, {0: 0.5, 1: 0.25, 2: 0.125}, ""),
        ("run-a.wandb", OFFLINE, {1: 0.5, 2: 0.25}, ""),
        ("verl.jsonl", OF_VERL, {1: 0.5, 2: 0.25}, ""),
        ("logging.jsonl", OF_SWIFT, {1: 0.5, 2: 0.25}, ""),
        ("text.jsonl", OF_TEXT, {1: 0.5, 2: 0.25}, "line 3: train/mis_k3_kl: got '0,125'; give a number"),
        ("two.jsonl", OF_TWO, {1: 0.5, 2: 0.25, 3: 0.125}, ""),
        ("events.out.tfevents.1.host", CUT, {300: 0.5}, CUT_OFF),
    ],
)
def test_curves_have_our_names(tmp_path: Path, name: str, content: bytes, wanted: dict[int, float], told: str) -> None:
    (tmp_path / name).write_bytes(content)
    values, problems = curves(tmp_path / name)
    assert {step: row["kl_k3"] for step, row in values.items()} == wanted
    assert told in "".join(problems) and bool(told) == bool(problems)

"""Files of strangers: a bad file or record is told and hides no good one, and what measures nothing is exit code 2."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import tokenizers
import torch
from pyarrow import parquet
from test_readers import event, field, framed, logged, read, reported, some_records, varint, wandb_record

from mis_plugins.__main__ import main
from mis_plugins.report import survey
from mis_plugins.report.beside import spell
from mis_plugins.report.changes import changes
from mis_plugins.report.readers import curves, files, neutral
from mis_plugins.report.readers.files import Problems
from mis_plugins.report.record import from_mapping
from mis_plugins.report.survey import Survey
from mis_plugins.shared import budget

SIZE = 20


pytestmark = pytest.mark.usefixtures("no_pictures")

GOOD = {
    "step": 1,
    "behavior_log_probs": [-0.5] * SIZE,
    "proximal_log_probs": [*[-0.51] * (SIZE - 1), -0.52],
    "tokens": list(range(SIZE)),
}
LINE = json.dumps(GOOD)


def with_step(text: str) -> str:
    return LINE.replace('"step": 1', f'"step": {text}')


def with_values(**values: object) -> str:
    return json.dumps(GOOD | values)


BAD_LINES = {
    **{f"step {text[:9]}": with_step(text) for text in (
        "Infinity", "NaN", "1e400", "true", '"3"', "[1]", '{"a": 1}', "-1", "1.5", "9" * 400, "9" * 5000, "null",
    )},
    "brackets": "[" * 200_000, "braces": '{"a":' * 200_000, "a number": "5", "a text": '"hello"', "no json": "{",
    "a zip": "\x1f\x8b\x08\x00\x01", "a version that is text": with_values(trainer_version="abc"),
    "a version beyond 64 bits": with_values(trainer_version=2**70),
    "versions beyond": with_values(versions=[2**70] * SIZE),
    "likelier than certain": with_values(behavior_log_probs=[5.0] * SIZE, proximal_log_probs=[5.0] * SIZE),
    "nested": with_values(behavior_log_probs=[[-0.5, -0.5]] * 10),
    "ragged": with_values(behavior_log_probs=[[-0.5], [1, 2]]),
    "digits": with_values(behavior_log_probs=["1"] * SIZE), "text": with_values(behavior_log_probs="1" * SIZE),
    "a mapping": with_values(behavior_log_probs={"a": 1}), "ids of half": with_values(tokens=[0.5] * SIZE),
    "a name twice": LINE[:-1] + f', "behavior_log_probs": {[-0.51] * SIZE}}}',
    "a huge reward": LINE[:-1] + f', "reward": {"9" * 400}}}',
}  # fmt: skip
UNUSABLE = {
    "NaN": LINE.replace("-0.5,", "NaN,").replace("-0.5]", "NaN]"),
    "1e39": LINE.replace("-0.5,", "-1e39,").replace("-0.5]", "-1e39]"),
    "no token": json.dumps({name: [] for name in GOOD} | {"step": 1}),
    "all masked": with_values(loss_mask=[0] * SIZE),
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_told_and_hides_no_good_one(tmp_path: Path, line: str) -> None:
    run = tmp_path / "run.jsonl"
    run.write_text(f"{line}\n{LINE}\n")
    found, told = read(run)
    assert [one.size for one in found] == [SIZE]
    assert len(told) == 1 and told[0].startswith(f"{run}: line 1: ") and len(told[0]) < 600


def table(**columns: object) -> Callable[[Path], object]:
    """Writes a parquet of these columns."""
    return lambda folder: parquet.write_table(pyarrow.table(columns), folder / "run.parquet")


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


NOTHING: dict[str, Callable[[Path], object]] = {
    **{name: text("run.jsonl", line + "\n") for name, line in UNUSABLE.items()},
    "brackets": text("run.jsonl", BAD_LINES["brackets"]), "junk": text("run.jsonl", "junk\n" * 9),
    "blank": text("run.jsonl", " \n\n"), "no byte": text("run.jsonl", ""), "no file": lambda _: None,
    "another file": text("notes.txt", "hello"), "a cut tensorboard": text("a.tfevents", "\0" * 11),
    "a pipe": lambda folder: os.mkfifo(folder / "run.jsonl"), "no wandb": text("a.wandb", "junk"),
    "an empty parquet": table(behavior_log_probs=[], proximal_log_probs=[]), "another parquet": table(a=[1, 2]),
    "no parquet": text("run.parquet", "PAR1" + "x" * 99 + "PAR1"),
    **{f"curves of {values}": text("metrics.jsonl", f"{{{values}}}\n") for values in (
        '"step": 1, "kl_k3": -5', '"step": 1, "kl_k3": NaN', '"step": 1, "kl_k3": "0,1"', '"step": 1, "loss": 2',
        '"step": true, "kl_k3": 0', '"step": 1e400, "kl_k3": 0', '"step": {"a": 1}, "kl_k3": 0',
        '"step": 1, "ess_ratio": 7',
    )},
}  # fmt: skip


@pytest.mark.parametrize("write", NOTHING.values(), ids=NOTHING)
def test_nothing_measured_is_never_calm(
    tmp_path: Path, write: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write(run)
    code, told = reported(run)
    assert code == 2 and not told["verdict"]["measured"] and told["verdict"]["level"] == "alarm"
    printed = capsys.readouterr()
    assert "nothing was read that measures the mismatch" in printed.err and "calm" not in printed.out
    assert told["problems"] or "step" in told or "curves" in told
    for problem in told["problems"]:
        assert problem["file"].startswith(str(run)) and problem["reason"]


def test_watch_reads_on_where_nothing_was_read_and_ctrl_c_then_is_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = tmp_path / "run.jsonl", []

    def sleep(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    run.write_text("5\n")
    assert reported(run, "--watch")[0] == 2 and len(looks) == 2
    looks.clear()
    run.write_text(LINE + "\n")
    assert reported(run, "--watch")[0] == 130


@pytest.mark.parametrize(
    "line",
    [
        with_step("3.0"), "\ufeff" + LINE, LINE + "\r",
        with_values(sample="\ud800", prompt="\ud800", text=["\ud800"] * SIZE),
        with_values(**{"self": 1, "__class__": 2}), with_values(advantages=[1e300] * SIZE),
        with_values(text=5, reward="x"),
        with_values(tokens=[2**50] * SIZE, turns=[-5] * SIZE, versions=[-(2**50)] * SIZE, trainer_version=2**50),
        with_values(behavior_log_probs=[-1e38, *[-0.5] * (SIZE - 1)]),
        LINE + "\n" + json.dumps({name: [] for name in GOOD} | {"step": 1}),
    ],
)  # fmt: skip
def test_odd_values_are_read(tmp_path: Path, line: str) -> None:
    """Writers of JSON that know no whole numbers write 3.0 for 3."""
    run = tmp_path / "run.jsonl"
    run.write_text(line + "\n")
    code, told = reported(run)
    assert code == 0 and told["whole"]["tokens"] == SIZE and not told["problems"]
    assert told["steps"][-1]["step"] == (3 if "3.0" in line else 1)


def test_whatever_is_no_regular_file_is_told_and_blocks_nothing(tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"run\xff\n\x1b[31m")
    (run / "tokenizer").mkdir(parents=True)
    (run / "\u00b23.jsonl").write_text(LINE)
    for name in ("a.jsonl", "a.pt", "a.wandb", "summary.json", "tfevents", "a.parquet", "tokenizer/tokenizer.json"):
        os.mkfifo(run / name)
    (run / "zero.jsonl").symlink_to("/dev/zero")
    (run / "loop").symlink_to(run)
    (run / "gone.jsonl").symlink_to(run / "nothing")
    found, told = read(run)
    assert [one.size for one in found] == [SIZE] and len(told) == 9
    assert main(["report", str(run), "--sweep", "none", "--output", str(tmp_path / "out")]) == 0


def test_a_file_that_goes_or_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(LINE)
    once = files.Opened

    def gone(path: Path):
        if path.name == "a.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return once(path)

    monkeypatch.setattr(files, "Opened", gone)
    found, told = read(tmp_path / "b.jsonl")
    assert len(found) == 1 and not told
    problems = Problems()
    assert not list(problems.each(neutral.jsonl(tmp_path / "a.jsonl", problems), tmp_path / "a.jsonl", 1))
    assert list(map(str, problems.kept)) == [f"{tmp_path / 'a.jsonl'}: Permission denied"]


def test_an_error_of_ours_is_no_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard around a reader passes what its caller raises."""
    (tmp_path / "run.jsonl").write_text(LINE)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Survey, "add", broken)
    with pytest.raises(ZeroDivisionError):
        reported(tmp_path / "run.jsonl")


GOOD_EVENT = event(1, "kl_k3", 1e-3)
WANDB = b":W&B" + bytes(3)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tfevents", GOOD_EVENT + struct.pack("<Q", 2**63) + bytes(99)),
        ("a.tfevents", framed(b"\xff" * 1000) + GOOD_EVENT),
        ("a.tfevents", framed(varint(5 << 3 | 3)) + GOOD_EVENT),
        ("a.tfevents", event(2**64 - 5, "kl_k3", 1e-3) + GOOD_EVENT),
        ("a.tfevents", framed(field(2, 1) + field(5, field(1, field(1, b"a") + field(2, b"abc")))) + GOOD_EVENT),
        ("a.wandb", WANDB + wandb_record(1, 1e-3) + logged(b"abc", 1, 60_000)),
        ("a.wandb", WANDB + logged(field(2, field(1, field(16, b"[" * 9000)))) + wandb_record(1, 1e-3)),
        ("a.wandb", WANDB + wandb_record(2**64 - 1, 1e-3) + wandb_record(1, 1e-3)),
        ("metrics.jsonl", b'{"step": 1, "kl_k3": 1e-3}\n{"step": NaN}\n{"step": 1, "loss": ' + b"9" * 400 + b"}\n"),
    ],
)  # fmt: skip
def test_a_bad_record_of_curves_is_told_and_hides_no_good_one(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    code, told = reported(tmp_path / name)
    assert code == 0 and told["verdict"]["level"] == "watch" and told["problems"]
    (curve,) = told["curves"]
    assert list(curve["values"]) == ["1"] and curve["values"]["1"]["kl_k3"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "arguments",
    ['{"use_tis": true, "tis_upper_bound": Infinity}', '{"use_tis": true, "mis": {"weight": {"upper": {"self": 1}}}}',
     '{"use_tis": true, "mis": "\\ud800"}', '{"use_tis": true, "tis_upper_bound": ' + "9" * 4000 + "}", "[" * 9000,
     json.dumps({"use_tis": True, "mis": {"weight": None, "reject": [{"upper": 2 + i} for i in range(99)]}})],
)  # fmt: skip
def test_hostile_arguments_leave_the_numbers(tmp_path: Path, arguments: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.jsonl").write_text(LINE)
    (run / "summary.json").write_text(f'{{"arguments": {arguments}}}')
    code, told = reported(run)
    assert code == 0 and told["whole"]["tokens"] == SIZE and "own_config" not in told
    assert [problem["file"] for problem in told["problems"]] == [str(run / "summary.json")]


def bomb(path: Path, lies: bool) -> None:
    """A parquet of 1 KB with two columns of 3 million numbers each, of which the footer may say 64."""
    size = 3_000_000
    values = pyarrow.array(torch.full((size,), -0.5).numpy())
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, size], type=pyarrow.int32()), values)
    table = pyarrow.table({name: column for name in ("behavior_log_probs", "proximal_log_probs")})
    parquet.write_table(table, path, compression="zstd")
    if lies:
        held = path.read_bytes()
        footer = len(held) - 8 - struct.unpack("<I", held[-8:-4])[0]
        said, lie = varint(2 * size), bytes([0x80, 0x81, 0x80, 0])  # of one length: 3 million, and 64
        assert held[footer:].count(said) >= 2
        path.write_bytes(held[:footer] + held[footer:].replace(said, lie))


@pytest.mark.parametrize(("lies", "why"), [(False, "6,000,000 values"), (True, "inflated bytes")])
def test_a_parquet_that_inflates_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: bool, why: str
) -> None:
    monkeypatch.setattr(neutral, "INFLATED", budget.Budget("inflated bytes", 2**20, 0, ""))
    bomb(tmp_path / "a.parquet", lies)
    (tmp_path / "b.jsonl").write_text(LINE)
    found, told = read(tmp_path)
    assert [one.size for one in found] == [SIZE]
    assert len(told) == 1 and told[0].startswith(f"{tmp_path / 'a.parquet'}: row group 1: ") and why in told[0]


def test_a_library_gets_no_more_memory_than_the_budget() -> None:
    with pytest.raises(MemoryError), files.limited_memory(0):
        bytearray(2**30)
    bytearray(2**30)


@pytest.mark.parametrize(
    ("name", "most", "line"),
    [("LINE", 400, LINE.replace(" ", "  " * 20)), ("ITEMS", 100, with_values(text=["a"] * SIZE, turns=[0] * SIZE))],
)
def test_a_line_beyond_its_budget_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int, line: str
) -> None:
    limit = budget.Budget(getattr(budget, name).what, most, 0, "")
    monkeypatch.setattr(files, name, limit)
    run = tmp_path / "run.jsonl"
    good = json.dumps({"behavior_log_probs": [-1, -2], "proximal_log_probs": [-1, -2]})
    run.write_text(f"{line}\n{good}\n")
    found, told = read(run)
    assert [one.size for one in found] == [2] and "line 1: asks for" in told[0] and limit.what in told[0]


@pytest.mark.parametrize("name", ["STEPS", "CHANGES"])
def test_steps_beyond_the_budget_end_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(survey, name, budget.Budget(getattr(budget, name).what, 3, 0, ""))
    run = tmp_path / "run.jsonl"
    run.write_text("".join(with_step(str(step)) + "\n" for step in range(9)))
    code, told = reported(run)
    assert code == 0 and [one["step"] for one in told["steps"]] == [0, 1, 2]
    assert "asks for 4 " in told["problems"][0]["reason"]


def test_a_reader_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SECONDS", budget.Budget("processor seconds of reading", 0.05, 0, ""))
    problems = Problems()
    for _ in problems.each(iter(int, 1), "a file", 0):
        time.sleep(0.001)
    assert "a file: asks for 0 processor seconds of reading" in str(problems.kept[0])


def test_levels_that_change_without_end_are_no_deep_recursion() -> None:
    assert len(changes(range(6000), [10.0 ** (step // 3 % 9) for step in range(6000)])) <= 8


def test_a_tokenizer_decodes_by_nothing_but_its_vocabulary(tmp_path: Path) -> None:
    """A decoder's expression could run for hours, and a replacement could make a text of gigabytes."""
    word = "a" * 1000
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: 0}, unk_token=word))
    held = json.loads(made.to_str())
    for pattern, content in (({"Regex": "(a+)+$"}, ""), ({"String": "a"}, "b" * 9)):
        held["decoder"] = {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": pattern, "content": content}],
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(held))
        token, problems = {"token": 0}, Problems()
        spell([token], tmp_path / "tokenizer.json", problems)
        assert token["text"] == word[:200] and not problems.kept


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("versions", torch.tensor([0.5, 1, 2]), "holds a number that is not whole"),
        ("advantages", torch.ones(3, dtype=torch.complex64), "holds numbers of another kind"),
        ("behavior_log_probs", [False] * 3, "holds numbers of another kind"),
    ],
)
def test_other_kinds_of_numbers_are_refused_by_name(name: str, value: object, why: str) -> None:
    with pytest.raises(budget.RecordError, match=f"{name}: {why}"):
        from_mapping(vars(some_records(lengths=(3,))[0]) | {name: value}, 0, "a")


def test_the_end_of_a_wandb_record_without_its_beginning_is_told(tmp_path: Path) -> None:
    """A reader that kept the record before would hand it out once more for each such piece."""
    pieces = b"".join(logged(b"\x08\x00", kind) for kind in (2, 4, 4, 4))
    (tmp_path / "a.wandb").write_bytes(b":W&B\0\0\0" + pieces)
    problems = Problems()
    curves.curve([tmp_path / "a.wandb"], "wandb", problems)
    assert "without its beginning" in str(problems.first()[0])

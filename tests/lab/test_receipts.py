"""A receipt of a GPU is read as a stranger's file, proves what its counts say, and stands on its page."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lab.gpu import probes
from lab.gpu.receipt import Measured, Receipt, Result, Section, drawn, main, read, write
from lab.pages import parts
from lab.pages.receipts import FOLDER, NONE, part, proof
from mis_plugins.shared.budget import RecordError

COLUMNS = ("kernel", "shape", "comparisons", "equal", "first difference")
HOLDS = Result("Pinned", COLUMNS, (("linear", "8 x 8", 3, 3, ""),), True)
BROKEN = Result("DeepGEMM", COLUMNS, (("mean", "8", 3, 3, ""), ("linear", "8 x 8", 3, 2, "1 ulp")), False)
CONTROL = Result("Stock", COLUMNS, (("linear", "8 x 8", 3, 0, "2 ulp"),))
LINKS = Result("A Qwen3", ("link", "equal", "of", "first difference"), (("decode", 1, 2, "3 ulp"),), False)
COST = Result("Cost", ("kernel", "pinned / stock"), (("linear", 1.25),))


def receipt(*results: Result, name: str = "kernels", **measured: Any) -> Receipt:
    on = Measured("run", "0123456789ab", "3.12", "a CPU", "cuda", "an H100", "570", "80 GB", "2.11", "13.0", {})
    sections = (Section("model", "done", 1.0, (LINKS,) * (BROKEN in results)), Section(name, "done", 2.0, results))
    return Receipt(1, replace(on, **measured), {"pins": "megatron"}, sections)


def written(folder: Path, found: Receipt, change: Callable[[Any], object] = lambda held: None) -> Path:
    """A receipt on the disk, changed as JSON."""
    held = json.loads(json.dumps(asdict(found)))
    change(held)
    (folder / "a.json").write_text(json.dumps(held))
    return folder / "a.json"


def test_a_receipt_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = receipt(HOLDS, BROKEN, CONTROL, COST)
    write(tmp_path / "made" / "receipt.json", found)
    assert read(tmp_path / "made" / "receipt.json") == found


KERNELS = ("sections", 1, "results", 0)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("receipt",), 2, "receipt: Input should be 1"),
        (("measured", "gpu"), None, "measured.gpu: Input should be a valid string"),
        (("measured", "gpu"), ..., "measured.gpu: Field required"),
        (("measured", "host"), "x", "measured.host: Unexpected keyword argument"),
        (("measured", "device"), "tpu", "measured.device: Input should be 'cuda' or 'cpu'"),
        (("sections", 1, "seconds"), "2", "sections.1.seconds: Input should be a valid number"),
        (("sections", 1, "seconds"), float("nan"), "sections.1.seconds: Input should be a finite number"),
        ((*KERNELS, "holds"), 1, "results.0.holds: Input should be a valid boolean"),
        ((*KERNELS, "rows", 0, 2), [[]], "rows.0.2"),
        ((*KERNELS, "rows", 0, 3), 2, "kernels: Pinned: is said to hold, and its rows do not say so"),
        ((*KERNELS, "rows", 0, 4), "1 ulp", "kernels: Pinned: is said to hold"),
        ((*KERNELS, "rows"), [], "kernels: Pinned: is said to hold"),
        ((*KERNELS, "rows", 0), ["linear"], "kernels: Pinned: a row has other columns than kernel"),
    ],
)
def test_what_no_receipt_holds_is_refused_in_words(
    place: tuple[Any, ...], value: Any, said: str, tmp_path: Path
) -> None:
    def change(held: Any) -> None:
        *way, last = place
        for key in way:
            held = held[key]
        held.pop(last) if value is ... else held.__setitem__(last, value)

    with pytest.raises(RecordError) as refused:
        read(written(tmp_path, receipt(HOLDS), change))
    assert str(refused.value).startswith(str(tmp_path / "a.json")) and said in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"receipt": 1}', "\x00"])
def test_a_file_that_is_no_receipt_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RecordError, match="a.json: "):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (receipt(HOLDS, CONTROL, COST), 0, "1 of 1 demands hold. First operation that differs: none."),
        (receipt(HOLDS, BROKEN), 1, "differs: kernels: DeepGEMM: linear, 8 x 8: 1 ulp."),
        (receipt(BROKEN, name="other"), 1, "differs: model: A Qwen3: decode, 1: 3 ulp."),
        (receipt(replace(BROKEN, title="X"), name="other"), 1, "differs: other: X: linear, 8 x 8: 1 ulp."),
        (receipt(COST), 2, "nothing was demanded."),
        (receipt(HOLDS, device="cpu"), 2, "No proof. device: cpu"),
        (receipt(HOLDS, gpu="not seen: no nvidia-smi"), 2, "No proof. gpu: not seen"),
        (receipt(HOLDS, commit="0123456789ab (modified)"), 2, "No proof. commit: "),
    ],
)
def test_the_reader_draws_and_judges(
    found: Receipt, code: int, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["receipt", str(written(tmp_path, found))])
    assert main() == code
    assert said in capsys.readouterr().out


def test_the_page_is_current_and_its_receipts_hold(tmp_path: Path) -> None:
    assert parts.named("receipts.md") and parts.current("receipts.md", part), "python -m lab.pages.receipts"
    assert not any(proof(file).first_difference() for file in FOLDER.glob("*"))
    assert part("receipts", tmp_path) == NONE


def test_the_page_tells_proofs_from_dry_runs_and_other_files(tmp_path: Path) -> None:
    write(tmp_path / "good.json", receipt(HOLDS, BROKEN, gpu="<b>|[an H100](x)`"))
    write(tmp_path / "dry.json", receipt(HOLDS, device="cpu"))
    (tmp_path / "a (1).json").touch()
    (tmp_path / "broken.json").touch()
    head, _, row, _, *refused = part("receipts", tmp_path).splitlines()
    assert (
        "[good.json](../lab/results/receipts/good.json) | 0123456789ab | &lt;b&gt;&#124;[an H100]&#40;x)&#96; |" in row
    )
    assert row.count(" | ") == head.count(" | ") and "1 of 3 demands hold" in row
    assert [line.partition(": ")[0] for line in refused] == [
        f"- `{name}` is refused" for name in ("a (1).json", "broken.json", "dry.json")
    ]
    assert "device: cpu" in refused[2] and str(tmp_path) not in "".join(refused)


def test_a_text_of_a_receipt_steers_nothing() -> None:
    text = drawn(receipt(replace(HOLDS, title="\x1b[2J<script>\n# A", note="![x](http://y)")))
    assert "\x1b" not in text and "<script>" not in text and "\n# A" not in text and "](http" not in text


CASE = '<testsuite><testcase name="{0}">{1}</testcase></testsuite>'


@pytest.mark.parametrize(
    ("inside", "row", "holds"),
    [
        ("", ("a", "passed", ""), True),
        ('<failure message="x&#10;y"/>', ("a", "failed", "x"), False),
        ('<error message="x"/>', ("a", "failed", "x"), False),
        ('<skipped message="no GPU"/>', ("a", "skipped: no GPU", ""), None),
    ],
)
def test_a_test_on_the_device_is_a_row(
    inside: str, row: tuple[str, str, str], holds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(command: list[str], **_: Any) -> None:
        file = next(word for word in command if word.startswith("--junitxml=")).partition("=")[2]
        Path(file).write_text(CASE.format("a", inside))

    monkeypatch.setattr(probes.subprocess, "run", ended)
    (found,) = probes.probes(None, None)  # pyright: ignore[reportArgumentType]
    assert (found.rows, found.holds) == ((row,), holds)

"""What a run leaves: whole lines, whole files, a picture of every run, sentences true to the numbers."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from mis_plugins.local import report
from mis_plugins.local.report import (
    COLORS,
    METRICS,
    LiveTable,
    MetricsLog,
    Summary,
    plot_curves,
    summarize,
    three_sentences,
    write_json,
)


def records(final: float, count: int = 40, **more: float) -> list[dict[str, float]]:
    """A run whose trainer reward goes from 0.9 to `final` in a line, evaluated every second rollout."""
    made = []
    for rollout in range(count):
        reward = 0.9 + (final - 0.9) * rollout / (count - 1)
        record = {"rollout": rollout, "k3_kl": 0.5, "kept_fraction": 0.75, "seconds": 0.25, **more}
        made.append(record | ({} if rollout % 2 else {"eval_trainer": reward, "eval_rollout": reward / 2}))
    return made


def log(folder: Path, lines: list[dict[str, float]]) -> Path:
    folder.mkdir()
    for record in lines:
        MetricsLog(folder / METRICS).append(record)
    return folder


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / METRICS)
    assert metrics.read() == []
    for record in records(0.5):
        metrics.append(record)
    assert metrics.read() == records(0.5)


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / METRICS)
    metrics.append({"rollout": 0, "loss": float("nan"), "grad_norm": float("inf"), "k3_kl": 0.5})
    assert metrics.read() == [{"rollout": 0, "loss": None, "grad_norm": None, "k3_kl": 0.5}]
    assert summarize(metrics.read())["k3_kl"] == 0.5


def test_a_line_cut_short_by_a_crash_is_left_out_and_truncation_mends_it(tmp_path: Path) -> None:
    metrics = MetricsLog(log(tmp_path / "run", records(0.5, count=5)) / METRICS)
    with metrics.path.open("a") as file:
        file.write('{"rollout": 5, "k3')
    assert [record["rollout"] for record in metrics.read()] == [0, 1, 2, 3, 4]
    metrics.truncate(after=2)
    metrics.append({"rollout": 3})
    assert [record["rollout"] for record in metrics.read()] == [0, 1, 2, 3]


def test_an_interrupt_leaves_whole_lines(tmp_path: Path) -> None:
    """A process that only appends is interrupted; every byte of its file belongs to a whole line."""
    program = (
        "import pathlib, signal, sys; from mis_plugins.local.report import MetricsLog\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "log = MetricsLog(pathlib.Path(sys.argv[1])); print('ready', flush=True)\n"
        "for rollout in range(10**9): log.append({'rollout': rollout, 'text': 'x' * 2000})"
    )
    path = tmp_path / METRICS
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(report.__file__).parents[2])},
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while not path.exists() or path.stat().st_size < 100_000:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait()
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line)["rollout"] for line in lines] == list(range(len(lines)))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"rollouts": 3})
    with pytest.raises(TypeError):
        write_json(path, {"rollouts": object()})
    assert json.loads(path.read_text()) == {"rollouts": 3}


@pytest.mark.parametrize(("final", "collapsed"), [(0.1, True), (0.4, True), (0.46, False), (0.9, False)])
def test_a_run_has_collapsed_when_its_last_tenth_is_below_half_its_start(
    final: float, collapsed: bool
) -> None:
    summary = summarize(records(final, grad_cosine=0.5))
    last = [0.9 + (final - 0.9) * rollout / 39 for rollout in (36, 38)]
    assert summary["collapsed"] is collapsed
    assert summary["trainer_start"] == 0.9 and summary["rollout_start"] == 0.45
    assert summary["trainer_final"] == pytest.approx(sum(last) / 2)
    assert summary["rollout_final"] == pytest.approx(sum(last) / 4)
    assert (summary["rollouts"], summary["seconds"]) == (40, 10.0)
    assert (summary["k3_kl"], summary["kept_fraction"], summary["grad_cosine"]) == (0.5, 0.75, 0.5)


def test_a_run_without_evaluations_has_not_collapsed() -> None:
    summary = summarize([{"rollout": 0, "seconds": 1.0}])
    assert summary["trainer_final"] is None and not summary["collapsed"]
    assert summarize([])["rollouts"] == 0


def run(start: float, final: float, cosine: float | None = None) -> Summary:
    return Summary(
        rollouts=200,
        seconds=60.0,
        trainer_start=start,
        trainer_final=final,
        rollout_start=0.61,
        rollout_final=0.62,
        collapsed=final < start / 2,
        k3_kl=0.43,
        kept_fraction=0.52,
        grad_cosine=cosine,
    )


def sentences(text: str) -> list[str]:
    return text.removesuffix(".").split(". ")


@pytest.mark.parametrize(
    ("uncorrected", "corrected", "second", "third"),
    [
        (
            run(0.95, 0.2),
            run(0.94, 0.85),
            "Without correction the trainer policy collapsed: its held-out reward went from 0.95 to 0.20, "
            "the rollout policy's from 0.61 to 0.62",
            "With correction the trainer policy kept at least half of its reward: its held-out reward went "
            "from 0.94 to 0.85, the rollout policy's from 0.61 to 0.62",
        ),
        (
            run(0.95, 0.2),
            run(0.94, 0.1),
            "Without correction the trainer policy collapsed",
            "With correction the trainer policy collapsed: its held-out reward went from 0.94 to 0.10",
        ),
        (
            run(0.95, 0.9),
            run(0.94, 0.1),
            "Without correction the trainer policy kept at least half of its reward",
            "With correction the trainer policy collapsed",
        ),
        (
            run(0.95, 0.9, cosine=0.44),
            run(0.94, 0.85, cosine=0.73),
            "Nothing collapsed in these 200 rollouts: without correction the trainer policy's held-out "
            "reward went from 0.95 to 0.90",
            "Shown instead is the direction of the gradient: its mean cosine to an on-policy gradient was "
            "0.44 without correction and 0.73 with it",
        ),
        (
            run(0.95, 0.9),
            run(0.94, 0.85),
            "Nothing collapsed",
            "The direction of the gradient was not recorded",
        ),
    ],
)
def test_three_sentences_say_what_the_numbers_say(uncorrected, corrected, second: str, third: str) -> None:
    said = sentences(three_sentences(uncorrected, corrected))
    assert len(said) == 3
    assert said[0] == (
        "Rollout and trainer policy differed by a mean k3 KL per token of 0.43 in the uncorrected run and "
        "0.43 in the corrected run, which kept 52% of its tokens"
    )
    assert said[1].startswith(second) and said[2].startswith(third)


def test_the_picture_shows_every_run(tmp_path: Path) -> None:
    runs = {
        "uncorrected": log(tmp_path / "one", records(0.1, grad_cosine=0.4)),
        "two seeds": [log(tmp_path / "two", records(0.8)), log(tmp_path / "three", records(0.7))],
        "not begun": tmp_path / "none",
    }
    plot_curves(runs, tmp_path / "curves.png")
    pixels = (imread(tmp_path / "curves.png")[..., :3] * 255).round().astype(int)
    for color in COLORS[:2]:
        assert (pixels == [int(color[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum() > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "one", "three", "two"]


def test_a_single_number_is_seen_and_rollouts_are_whole() -> None:
    """A gradient compared once, in a run of three rollouts."""
    axis = Figure().subplots()
    report._draw(axis, report.PANELS[-1], {"smoke": [[{"rollout": 0, "grad_cosine": 0.8}, {"rollout": 2}]]})
    report._dress(axis, report.PANELS[-1], empty=False)
    axis.set_xlim(0, 2)
    assert [line.get_marker() for line in axis.lines] == ["None", "o"]
    assert all(tick == round(tick) for tick in axis.get_xticks())


def test_a_picture_of_nothing_says_so(tmp_path: Path) -> None:
    plot_curves({"not begun": tmp_path / "none"}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.filterwarnings("error")
def test_a_picture_of_a_mismatch_that_is_zero_throughout(tmp_path: Path) -> None:
    plot_curves({"equal": log(tmp_path / "equal", records(0.8, k3_kl=0.0))}, tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").ndim == 3


def test_the_live_table_is_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with LiveTable("uncorrected", total=3, console=Console(file=stream, force_terminal=False)) as table:
        for record in records(0.5, count=3):
            table.add(record)
    title, headings, *rows = stream.getvalue().splitlines()
    assert title == "uncorrected"
    assert headings.split() == "rollout reward trainer reward rollout k3 KL kept seconds".split()
    assert [row.split() for row in rows] == [
        ["0", "0.900", "0.450", "5.00e-01", "0.750", "0.25"],
        ["1", "-", "-", "5.00e-01", "0.750", "0.25"],
        ["2", "0.500", "0.250", "5.00e-01", "0.750", "0.25"],
    ]
    assert len({len(row) for row in (headings, *rows)}) == 1


def test_the_live_table_on_a_terminal_shows_the_last_rollouts_and_the_progress() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=40, color_system=None)
    with LiveTable("uncorrected", total=40, completed=20, console=console) as table:
        for record in records(0.5)[20:]:
            table.add(record)
    final = stream.getvalue().rsplit("rollout  ", 1)[-1]
    assert "40/40" in final and " 39 " in final and " 20 " not in final


def test_the_table_is_left_on_an_interrupt() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), LiveTable("uncorrected", total=3, console=console) as table:
        table.add(records(0.5)[0])
        raise KeyboardInterrupt
    assert not table._live.is_started

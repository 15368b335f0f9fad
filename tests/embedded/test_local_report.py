"""What a run leaves: whole lines, whole files, a picture of every run, a sentence true to the numbers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from lab.host import report
from lab.host.folders import METRICS
from lab.host.report import MetricsLog, draw_histories, in_words, summarize


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


def test_what_is_appended_is_read_back_and_a_number_that_is_not_finite_as_null(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / METRICS)
    assert metrics.read() == []
    for record in records(0.5):
        metrics.append(record)
    assert metrics.read() == records(0.5)
    metrics = MetricsLog(tmp_path / "not-finite.jsonl")
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
        "import pathlib, signal, sys; from lab.host.report import MetricsLog\n"
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


@pytest.mark.parametrize(("final", "collapsed"), [(0.1, True), (0.4, True), (0.46, False), (0.9, False)])
def test_a_run_has_collapsed_when_its_last_tenth_is_below_half_its_start(final: float, collapsed: bool) -> None:
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
    assert "policy was not evaluated" in in_words("x", summary)
    assert "policy had no reward to lose" in in_words("x", summary | {"trainer_start": 0.0})
    assert summarize([])["rollouts"] == 0


@pytest.mark.parametrize(("final", "fate"), [(0.2, "collapsed"), (0.85, "kept at least half of its reward")])
def test_a_run_in_words_says_what_the_numbers_say(final: float, fate: str) -> None:
    said = in_words("corrected", summarize(records(final)))
    assert f"the trainer policy {fate}" in said and "from 0.90 to" in said and "75% of the tokens" in said


@pytest.mark.filterwarnings("error")
def test_a_picture_of_a_mismatch_that_is_zero_throughout(tmp_path: Path) -> None:
    draw_histories({"equal": records(0.8, k3_kl=0.0)}, tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").ndim == 3


def test_a_row_of_a_rollout_stands_below_its_headings() -> None:
    _, heads = report.headings("uncorrected", 40).split("\n")
    row = report.row_of({"rollout": 7, "k3_kl": 0.5, "kept_fraction": None, "seconds": 1.5})
    assert len(row) == len(heads) and row.split() == ["7", "-", "-", "5.00e-01", "-", "1.50"]

"""Verdicts: never calm about nothing, since when, limits as the pages say, and the first cause of planted runs."""

import gzip
import html
import json
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from report_dumps import write_miles, write_rollout, write_slime
from test_readers import event, read, reported, some_records, write_lines
from test_report import PLAIN, surveyed

from lab import planted_runs as plants
from lab.planted_runs import IN_RECORDINGS, as_line, clean, drawn, planted_in_recording, recorded, records, sampled
from mis_plugins.__main__ import main
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import InputError
from mis_plugins.explain.limits import FIRST, LIMITS, ROWS, row
from mis_plugins.explain.rungs import record
from mis_plugins.report.causes import CAUSES
from mis_plugins.report.changes import changes, smallest_rise
from mis_plugins.report.command import run
from mis_plugins.report.evidence import as_normal
from mis_plugins.report.lists import Lists
from mis_plugins.report.places import PLACES
from mis_plugins.report.proposal import NOTHING, propose
from mis_plugins.report.readers.files import Curve, Problems
from mis_plugins.report.readers.paths import find
from mis_plugins.report.record import Record, from_mapping, lacking
from mis_plugins.report.survey import Survey, report
from mis_plugins.report.sweep import Candidate, candidates, load
from mis_plugins.report.verdict import (
    ALARM,
    AS_MUCH,
    CALM,
    WATCH,
    beyond,
    in_words,
    nearest,
    of_curves,
    verdict,
    were_rejected,
)
from mis_plugins.shared.budget import STEPS, RecordError

ROOT = Path(__file__).parents[2]
NEEDED = BEHAVIOR, PROXIMAL = "behavior_log_probs", "proximal_log_probs"
without_pictures = pytest.mark.usefixtures("no_pictures")


# Never calm about nothing.


def run_of_bf16(folder: Path, name: str = "good.jsonl") -> Path:
    """A run that is calm, beside which a test writes what is not."""
    folder.mkdir(exist_ok=True, parents=True)
    write_lines(folder / name, BF16)
    return folder


BROKEN_FILES: dict[str, tuple[str, bytes | None]] = {
    "an end that is cut": ("b.jsonl", b'{"behavior_log_probs": [-1], "proximal_log_probs": [-1]}\n{"behav'),
    "a line that is cut": ("b.jsonl", b'{"step": 1, "behavior_log_probs": [-0.1'), "zeros": ("b.jsonl", bytes(99)),
    "a damaged gzip": ("b.jsonl.gz", b"\x1f\x8b\x08" + bytes(50)), "no parquet": ("b.parquet", b"PAR1" + bytes(50)),
    "no dump": ("b.pt", b"PK" + bytes(50)), "a broken link": ("b.jsonl", None),
    "an empty file": ("b.jsonl", b""), "blank lines": ("b.jsonl", b"\n\n"),
    "a broken link of a dump": ("b.pt", None), "an empty gzip": ("b.jsonl.gz", gzip.compress(b"")),
}  # fmt: skip


@without_pictures
@pytest.mark.parametrize(("name", "content"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_beside_good_ones_is_never_calm(name: str, content: bytes | None, tmp_path: Path) -> None:
    bad = run_of_bf16(tmp_path / "run") / name
    bad.symlink_to(tmp_path / "gone") if content is None else bad.write_bytes(content)
    code, told = reported(bad.parent, "--sweep", "own")
    assert (
        code == 0 and told["verdict"]["level"] == WATCH and str(bad) in told["verdict"]["parts"]["Not read to the end"]
    )
    assert told["proposal"]["name"] == NOTHING and "calm" not in told["proposal"]["why"][0]


def test_a_proposal_tells_at_how_many_places_a_run_was_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_bf16(tmp_path / "run")
    for place in ("zeros", "a damaged gzip", "no parquet", "no dump"):
        name, content = BROKEN_FILES[place]
        (run / name).write_bytes(content or b"")
    assert main(["config", "suggest", str(run)]) == 0
    assert "not read at 4 places\n" in capsys.readouterr().out


@without_pictures
@pytest.mark.parametrize("name", [PROXIMAL, "loss_mask"])
def test_a_run_whose_last_steps_hold_nothing_to_compare_is_never_calm(name: str, tmp_path: Path) -> None:
    column = {PROXIMAL: math.nan, "loss_mask": False}[name]
    late = changed([one for one in BF16 if one.step >= 6], name, lambda x: torch.full_like(x, column))
    write_lines(tmp_path / "run.jsonl", [one for one in BF16 if one.step < 6] + late)
    verdict = reported(tmp_path / "run.jsonl")[1]["verdict"]
    words = f"{FIRST} was last known at step 5, and the steps go on to 7."
    assert verdict["level"] != CALM and verdict["parts"]["Not measured to the end"] == words
    assert (words in verdict["headline"]) == (name == "loss_mask")
    write_lines(tmp_path / "run.jsonl", [*BF16, *late[-1:]])  # a response without, beside others of its step
    assert reported(tmp_path / "run.jsonl")[1]["verdict"]["parts"].get("Not measured to the end") is None


def test_another_files_lines_are_told_and_lose_nothing(tmp_path: Path) -> None:
    run = run_of_bf16(tmp_path / "run")
    (run / "events.jsonl").write_text('{"time": 3}\n')
    (run / "wandb.csv").write_text("Step,kl_k3\n1,0.9\n")
    code, told = reported(run)
    assert code == 0 and told["verdict"]["level"] == CALM and len(told["problems"]) == 2


def test_lists_that_are_equal_bit_for_bit_are_told() -> None:
    equal = [replace(one, proximal_log_probs=one.behavior_log_probs) for one in BF16]
    late = verdict(surveyed([*BF16[:96], *equal[96:]]), None)
    assert verdict(surveyed(equal), None).headline.startswith("Both lists are equal bit for bit")
    assert late.level == WATCH and "and the steps go on to 7, where both sides are equal" in late.headline


def read_as_one(path: Path) -> str:
    """What the verdict tells of files that hold the same steps; an empty text where it tells nothing of any."""
    return reported(path)[1]["verdict"]["parts"].get("Read as one run", "")


@without_pictures
@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("a/run.jsonl", "b/run.jsonl")])
def test_files_that_hold_the_same_steps_are_told(
    names: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "run" / name for name in names]
    for file in files:
        run_of_bf16(file.parent, file.name)
    assert " and ".join(map(str, files)) in read_as_one(tmp_path / "run")
    capsys.readouterr()
    main(["config", "suggest", str(tmp_path / "run")])
    assert f"# steps stand twice, or have no number, in {files[0]}" in capsys.readouterr().out
    assert not read_as_one(files[0])
    late = [replace(one, step=step) for step in (0, 2, 1, 3) for one in BF16[:16]]
    write_lines(files[0], late)  # which asynchronous rollouts may be
    assert not read_as_one(files[0])
    write_lines(files[0], [*BF16, *BF16[:64]])  # a run that starts anew, and goes on in one file
    assert str(files[0]) in read_as_one(files[0])


@without_pictures
@pytest.mark.parametrize("write", [write_miles, write_slime])
def test_folders_that_hold_the_same_rollout_are_told(write: Callable[..., None], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "runs" / name, some_records())
    folders = [str(tmp_path / "runs" / name / "train_data") for name in ("a", "b")]
    assert " and ".join(folders) in read_as_one(tmp_path / "runs")
    for file in (tmp_path / "runs" / "b").glob("**/*.pt"):
        file.rename(tmp_path / "runs" / "a" / "train_data" / f"b_{file.name}")  # by another template
    first = min((tmp_path / "runs").glob("a/**/3*.pt"))
    assert f"{first} and {first.with_name(f'b_{first.name}')}" in read_as_one(tmp_path / "runs")


def test_a_folder_for_each_rank_is_one_run(tmp_path: Path) -> None:
    write_miles(tmp_path, some_records())
    for file in (tmp_path / "train_data").glob("*.pt"):
        (tmp_path / file.stem).mkdir()
        file.rename(tmp_path / file.stem / "3.pt")
    assert not read_as_one(tmp_path)


def rows_of(values: Sequence[Any], start: int = 0, name: str = "kl_k3", **more: Any) -> list[dict[str, Any]]:
    """Rows of a log that hold a number at each step from `start` on."""
    return [{"step": step, name: value} | more for step, value in enumerate(values, start)]


def write_log(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "metrics.jsonl"


def judged(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict on a log of these rows alone."""
    return reported(write_log(folder, rows))[1]["verdict"]


RESTARTED = rows_of([*[1e-3] * 60, *[0.2] * 30])  # a run that is started again from step 50
OF_HOOKS = "train/mis_k3_kl"
# Miles's own, prime-rl's, verl's where the actor computes it, and SkyRL's of a loss.
WHOLE_NAMES = (
    "train/train_rollout_kl", "mismatch_kl/all/mean", "actor/rollout_corr/k3_kl", "policy/loss_metrics/is_ratio_mean",
)  # fmt: skip
# Rows, the level where something is measured, how the headline reads, and what the lines hold besides.
LOGS: dict[str, tuple[Sequence[Mapping[str, Any]], str | None, str, str]] = {
    **{f"{text}, which wandb writes as text": (rows_of([*[0.001] * 9, text]), level, ".* at step 9", "")
       for text, level in (("NaN", WATCH), ("Infinity", ALARM))},
    **{f"a small {name} by our hook's name": (
        [row | {f"train/{name}": 0.02} for row in rows_of([1e-3] * 9, name=OF_HOOKS)],
        WATCH, ".* is 0.02, below 0.5, at step 8", "",
    ) for name in ("mis_kept_fraction", "mis_ess_mb", "mis_step/ess")},
    **{f"{first} and {other} by two names of one number, of which the one beyond its limit counts": (
        [{"step": step, "train/mis_step/kl_k3": first, OF_HOOKS: other} for step in range(9)], ALARM, "", "",
    ) for first, other in ((0.3, 1e-3), (1e-3, 0.3))},
    **{f"a package's whole name {name}": (rows_of([1.3] * 9, name=name), level, "Last seen beyond its limit", "")
       for name, level in zip(WHOLE_NAMES, (ALARM, ALARM, ALARM, WATCH), strict=True)},
    **{f"another name with {name} in it": (rows_of([1.3] * 9, name=f"eval/{name}"), None, "", "")
       for name in WHOLE_NAMES},
    # With --use-rollout-logprobs Miles compares the engine's log-probs with themselves.
    "0 by Miles's own name": (rows_of([0.0] * 9, name=WHOLE_NAMES[0]), None, "", ""),
    "0 by both of Miles's own names": (
        rows_of([0.0] * 9, name=WHOLE_NAMES[0], train_rollout_logprob_abs_diff=0.0), None, ".*kl and log_p.* = 0", "",
    ),
    "all tokens kept": (rows_of([1.0] * 9, name="mis_kept_fraction"), None, ".*kept_fraction = 1, as without", ""),
    "log-probs that are 0 alone": (
        rows_of([0.0] * 9, name=OF_HOOKS, train_log_ppl=0.0, rollout_log_ppl=-0.0), None, ".*= 0, as where all", "",
    ),
    "a mismatch that falls to 0": (
        rows_of([*[1e-3] * 9, *[0.0] * 3]), WATCH, ".*was last known at step 8.* to 11, where both sides are", "",
    ),
    "0 by Miles's own name, beside ours": (
        [row | {WHOLE_NAMES[0]: 0.0} for row in rows_of([1e-3] * 9, name=OF_HOOKS)], CALM, "", "kl_k3 is 0.001",
    ),
    "0 by Miles's own name of a run that was on policy": (
        rows_of([*[0.0] * 6, *[1e-3] * 3], name=WHOLE_NAMES[0]),
        WATCH, "Since when: kl_k3 rose from 0 to 0.001 at step 6", "",
    ),
    "no step, so that the names of steps are told": (
        [{"epoch": 1, OF_HOOKS: 0.3}], None, ".*name it by one of rollout, step", "",
    ),
    "rows of their own for two names of a number, as tensorboard writes them": (
        [row for name in ("train/mis_step/kl_k3", OF_HOOKS) for row in rows_of([1e-3] * 9, name=name)], CALM, "", "",
    ),
    "rows of evaluations, which count by their own step": (
        [row | {"_step": place} for place, row in enumerate(
            row for step in range(100)
            for row in ({"train/step": step, OF_HOOKS: 1e-3}, {"eval/step": step, "eval/score": 0.5})
        )], CALM, "", "",
    ),
    "a number of every twentieth step": (
        [{"step": step, "loss" if step % 20 else "kl_k3": 1e-3} for step in range(100)], CALM, "", "",
    ),
    "a mapping beside the numbers of a row": (rows_of([1e-3] * 9, data={"source": "gsm8k"}), CALM, "", ""),
}  # fmt: skip


@without_pictures
@pytest.mark.parametrize(("rows", "level", "headline", "words"), LOGS.values(), ids=LOGS)
def test_a_log_is_judged(
    rows: Sequence[Mapping[str, Any]], level: str | None, headline: str, words: str, tmp_path: Path
) -> None:
    verdict = judged(tmp_path, rows)
    assert (verdict["measured"], verdict["level"]) == (level is not None, level or ALARM)
    assert re.match(headline, verdict["headline"]) and words in " ".join(verdict["lines"])
    assert level != CALM or "Logged again" not in verdict["parts"]


@without_pictures
@pytest.mark.parametrize("steps", [30, 50])
def test_a_run_that_starts_anew_is_judged_by_its_last_start_and_tells_the_first(steps: int, tmp_path: Path) -> None:
    verdict = judged(tmp_path, [*RESTARTED, *rows_of([1e-3] * steps, 50)])
    before = "Beyond its limit before: kl_k3 is 0.2, above 0.01, at step 60 (30 of "
    assert verdict["level"] == WATCH and verdict["headline"].startswith(before)
    assert "numbers of 40 steps from step 50 on give way to later rows" in verdict["parts"]["Logged again"]


def test_a_rise_below_the_limit_beside_calm_tokens_is_calm(tmp_path: Path) -> None:
    run = run_of_bf16(tmp_path / "run")
    write_log(run, rows_of([*[1e-4] * 40, *[2.2e-4] * 20]))
    assert reported(run, "--sweep", "own")[1]["verdict"]["level"] == CALM
    assert "nothing now, but watch kl_k3." in (tmp_path / "out" / "report.html").read_text()


def test_a_log_that_goes_back_at_each_row_costs_little(tmp_path: Path) -> None:
    rows = [{"step": step, "kl_k3": 1e-3} for step in (*range(3000), *range(2998, -1, -1))]
    write_log(tmp_path, rows)
    (log,) = find([tmp_path], Problems()).read_curves(Problems())
    assert len(log.replaced) < len(rows)


def test_the_files_that_one_run_of_tensorboard_writes_are_one_curve(tmp_path: Path) -> None:
    for file, (start, level) in enumerate(((0, 1e-3), (50, 8e-3))):
        events = (event(step, "train/mis_k3_kl", level) for step in range(start, start + 50))
        (tmp_path / f"events.out.tfevents.{file}.host").write_bytes(b"".join(events))
    _, told = reported(tmp_path)
    assert told["verdict"]["headline"].startswith("Since when: kl_k3 rose 8 times at step 50")


def test_a_log_of_more_steps_than_the_budget_is_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mis_plugins.report.readers.curves.STEPS", replace(STEPS, base=50))
    verdict = judged(tmp_path, RESTARTED)
    assert verdict["level"] == WATCH and verdict["headline"].startswith("Not read to the end: ")


def test_calm_tokens_beside_a_curve_that_is_not_are_never_calm(tmp_path: Path) -> None:
    run = run_of_bf16(tmp_path / "run")
    for name in ("a", "b"):
        (run / name).mkdir()
        write_log(run / name, RESTARTED)
    code, told = reported(run, "--watch")
    parts = told["verdict"]["parts"]
    assert (code, told["verdict"]["level"]) == (3, ALARM)
    assert "curves beside call for a look" in told["verdict"]["headline"]
    assert f"at step 89 ({run / 'b' / 'metrics.jsonl'})" in parts["Curves beside"]
    assert "rose 200 times at step 60" in parts["Since when"] and "What to run with" not in parts
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f">{name}/metrics.jsonl<" in page or f"{name}/metrics.jsonl -->" in page for name in ("a", "b"))


@pytest.mark.parametrize(("config", "why"), [("geometric-mis", "ess is 0.3"), ("geometric-rs", "at step ")])
def test_a_run_whose_own_config_harms_is_not_calm(config: str, why: str, tmp_path: Path) -> None:
    rows = records(recorded("int8", 1)) if config == "geometric-mis" else BF16
    shifted = [replace(row, proximal_log_probs=row.behavior_log_probs - 0.02) for row in rows if row.step == 7]
    write_lines(tmp_path / "run.jsonl", [*(row for row in rows if row.step < 7), *shifted])
    _, told = reported(tmp_path / "run.jsonl", "--config", config)
    headline = told["verdict"]["headline"]
    assert told["verdict"]["level"] == WATCH and f"look at the run's own config: {why}" in headline, headline


@pytest.mark.parametrize(("step", "level"), [(3, WATCH), (7, ALARM)])
def test_a_step_that_is_an_alarm_is_told_however_loud_the_others_are(step: int, level: str) -> None:
    made = surveyed(BF16)
    loud = {**made.steps, step: {**made.steps[step], FIRST: 0.06}}
    judged = verdict(replace(made, steps=loud, findings=[], changes=[]), None)
    assert judged.level == level
    assert judged.headline == f"At 1 of 8 steps kl_k3 is above 0.05; the highest is 0.06, at step {step}."


def test_a_cause_of_a_small_part_says_so_in_the_headline(tmp_path: Path) -> None:
    """The first half of each response is an engine's in int6, as where an earlier version wrote it."""
    halves = [
        {name: torch.cat([getattr(old, name)[: old.size // 2], getattr(new, name)]).tolist() for name in NEEDED}
        for new, old in zip(BF16, INT6, strict=True)
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, halves)))
    _, told = reported(tmp_path / "run.jsonl")
    assert told["verdict"]["headline"] == "A cut or changed template (8% of the mismatch)."


def test_a_folder_with_an_evaluation_alone_says_what_its_dump_lacks(tmp_path: Path) -> None:
    write_rollout(tmp_path, some_records())
    (tmp_path / "rollout_data" / "3.pt").rename(tmp_path / "rollout_data" / "eval_3.pt")
    code, told = reported(tmp_path)
    assert code == 2 and "holds the engine's log-probs alone" in told["verdict"]["headline"]


@without_pictures
@pytest.mark.parametrize("kind", ["tokens", "few tokens", "curves", "an empty file"])
def test_a_file_that_the_run_still_writes_raises_no_alarm(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = run_of_bf16(tmp_path / "run"), []
    if kind == "few tokens":
        written = (run / "good.jsonl").read_text().splitlines(keepends=True)
        (run / "good.jsonl").write_text("".join(written[:6]))
    if kind == "an empty file":
        (run / "next.jsonl").write_text("")
    if kind == "curves":
        (run / "good.jsonl").write_text(write_log(tmp_path, rows_of([1e-4] * 300)).read_text() + "\n" + " " * 60)
    (run / "good.jsonl").write_text((run / "good.jsonl").read_text().rstrip()[: -10 if kind == "curves" else -39])

    def sleep(_: float) -> None:
        looks.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr("mis_plugins.report.command.time.sleep", sleep)
    code, told = reported(run, "--watch")
    assert code == 130 and looks and told["verdict"]["level"] == WATCH


def test_shuffled_steps_are_put_in_order(tmp_path: Path) -> None:
    rows = at_steps({8, 9, 10, 11, 12, 13, 14, 15}, 16)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    first, second = surveyed(rows), surveyed([rows[place] for place in order])
    assert [one.step for one in first.changes] == [one.step for one in second.changes] == [8]
    assert [one.name for one in second.findings] == ["jump"] and list(second.steps) == list(range(16))


def test_a_title_of_many_paths_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(99)]
    for file in files:
        write_lines(file, some_records())
    main(["report", *map(str, files), "--output", str(tmp_path), "--sweep", "none"])
    assert "0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl and 95 more: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "renamed"),
    [
        (("behaviour_log_probs", "proximal_log_probs"), ["'behaviour_log_probs' -> behavior_log_probs"]),
        (("logprobs", "tokens"), ["'logprobs' -> behavior_log_probs"]),
        (("log_probs_behavior", "log_probs_proximal"), ["'log_probs_behavior' -> behavior_log_probs",
                                                        "'log_probs_proximal' -> proximal_log_probs"]),
        (("rollout_log_probs", "old_log_probs"), ["'rollout_log_probs' -> behavior_log_probs",
                                                  "'old_log_probs' -> proximal_log_probs"]),
        (("behaviorLogProbs", "proximalLogprobs"), ["'behaviorLogProbs' -> behavior_log_probs",
                                                    "'proximalLogprobs' -> proximal_log_probs"]),
        (("prompt", "messages"), []),
        (("ref_log_probs", "teacher_logprobs"), []),
    ],
)  # fmt: skip
def test_a_missing_key_is_told_beside_the_nearest_spelling(keys: Sequence[str], renamed: list[str]) -> None:
    said = lacking(NEEDED, keys)
    assert said.startswith("no behavior_log_probs") and all(repr(key) in said for key in keys)
    _, _, advice = said.partition("; rename ")
    assert [one for one in advice.split(", ") if one] == renamed


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_that_are_all_rejected_are_no_verdict(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"behaviour_log_probs": [-0.5] * 20, "proximal_log_probs": [-0.5] * 20, "step": 0}] * 24
    run = tmp_path / f"run.{ending}"
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), run)
    else:
        run.write_text("".join(json.dumps(one) + "\n" for one in rows))
    code, made = reported(run)
    assert code == 2 and not made["verdict"]["measured"]
    assert (were_rejected(24, 24) in made["verdict"]["headline"]) == (ending == "jsonl")
    assert "'behaviour_log_probs' -> behavior_log_probs" in made["problems"][0]["reason"]
    assert "calm" not in capsys.readouterr().out


BROKEN = '{"behavior_log_probs": [0.0], "proximal_log_probs": [0.0, 1.0]}'
CLEAN = records(recorded("bf16", 1))
OF_CURVES = [json.dumps({"train/step": step, f"train/mis_step/{FIRST}": 1e-3}) for step in range(300)]


def torn(file: Path, lines: Iterable[str], size: int) -> None:
    """Write the first bytes of packed lines."""
    file.write_bytes(gzip.compress("\n".join(lines).encode())[:size])


def rejected_beside_curves(run: Path) -> None:
    (run / "run.jsonl").write_text(f"{BROKEN}\n" * 24)
    (run / "metrics.jsonl").write_text('{"step": 0, "kl_k3": 0.001}\n')


def torn_dump(run: Path) -> None:
    write_slime(run, CLEAN)
    (whole,) = run.glob("**/*.pt")
    (run / "9.pt").write_bytes(whole.read_bytes()[:5000])


AGREES = "What was read agrees as well as a healthy run, but "
IN_PART: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "rejected records beside curves": (
        rejected_beside_curves, "Tokens were not read: 24 of 24 records were rejected.", ""
    ),
    "rejected records beside others": (
        lambda run: write_lines(run / "run.jsonl", CLEAN, *[BROKEN] * 40),
        f"{AGREES}40 of 168 records were rejected.", "Not read: 40 of 168 records were rejected",
    ),
    "torn lines": (
        lambda run: torn(run / "run.jsonl.gz", map(as_line, CLEAN), 60_000),
        f"{AGREES}a file broke off, or is empty.", "Not read to the end: ",
    ),
    "a torn dump": (torn_dump, f"{AGREES}a file broke off, or is empty.", "Not read to the end: "),
    "torn curves": (lambda run: torn(run / "metrics.jsonl.gz", OF_CURVES, 412), "Not read to the end: ", ""),
    "torn rows of curves": (
        lambda run: (run / "metrics.jsonl").write_text(
            "\n".join(row if at % 6 == 0 else row[:20] for at, row in enumerate(OF_CURVES))
        ), "Not read: 250 of 300 rows of the curves.", "",
    ),
}  # fmt: skip


@without_pictures
@pytest.mark.parametrize(("write", "headline", "line"), IN_PART.values(), ids=IN_PART)
def test_what_was_read_in_part_is_not_calm(
    tmp_path: Path, write: Callable[[Path], object], headline: str, line: str
) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run")
    code, made = reported(tmp_path / "run")
    assert code == 0 and made["verdict"]["level"] == WATCH
    assert made["verdict"]["headline"].startswith(headline)
    assert any(one.startswith(line) for one in made["verdict"]["lines"]) and "Why" not in made["verdict"]["parts"]
    if line:
        assert "mend the files and records that were not read" in (tmp_path / "out" / "report.html").read_text()


@without_pictures
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", b"", "holds no line"),
        ("a.jsonl", b"a story\nof two lines\n", "line 1: Expecting value"),
        ("a.jsonl", b"\xff{}", "line 1: byte 0 is not UTF-8 (invalid start byte); holds nothing"),
        ("a.csv", b'\xef\xbb\xbf"Step";"kl_k3"\r\n1;"0,9"\r\n', "a table of csv or tsv is not read; write one JSON "),
        ("a.tsv", b"step\tkl_k3\n1\t0.9\n", "a table of csv or tsv is not read; write one JSON object a line"),
        ("a.json", b"[1, 2]", "line 1: holds list, no object; write one object a line"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:12], "Compressed file ended before"),
    ],
)
def test_a_file_of_which_nothing_is_read_says_what_is_wrong(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, made = reported(tmp_path / name)
    start = f"Nothing was read that measures the mismatch: {tmp_path / name}: {why}"
    assert code == 2 and made["verdict"]["headline"].startswith(start)


COLUMNS = {"rollout_log_probs": "rollout_logprobs", "log_probs": "old_log_probs"}


@without_pictures
@pytest.mark.parametrize(
    ("write", "key", "misspelt"),
    [
        *((write, *both) for write in (write_miles, write_slime) for both in COLUMNS.items()),
        (write_miles, "response_lengths", "respose_lengths"),
        (write_slime, "samples", "sampels"),
    ],
)
def test_a_misspelt_key_of_a_hosts_dump_is_told_beside_the_nearest_spelling(
    tmp_path: Path, write: Callable[..., None], key: str, misspelt: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write(run, some_records())
    for file in run.glob("**/*.pt"):
        torch.save(renamed(torch.load(file, weights_only=False), {key: misspelt}), file)
    code, made = reported(run)
    assert code == 2 and f"rename {misspelt!r} -> {key}" in made["verdict"]["headline"]


def renamed(value: Any, keys: Mapping[str, str]) -> Any:
    """A tree with some keys of its dictionaries renamed."""
    if isinstance(value, dict):
        return {keys.get(key, key): renamed(inner, keys) for key, inner in value.items()}
    return [renamed(inner, keys) for inner in value] if isinstance(value, list) else value


@without_pictures
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_packed_lines_are_read(tmp_path: Path, ending: str) -> None:
    write_lines(tmp_path / "run.jsonl", records(recorded("fp8", 1)))
    plain = (tmp_path / "run.jsonl").read_bytes()
    packed = gzip.compress(plain) if ending == "gz" else pyarrow.compress(plain, codec="zstd", asbytes=True)
    run = tmp_path / f"packed.jsonl.{ending}"
    run.write_bytes(packed)
    _, wanted = reported(tmp_path / "run.jsonl")
    code, made = reported(run)
    assert code == 0 and not made["problems"] and made["whole"] == wanted["whole"]


def test_packed_lines_that_inflate_beyond_the_budget_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mis_plugins.report.readers import files

    monkeypatch.setattr(files, "INFLATED", replace(files.INFLATED, base=1000, per_byte=0))
    write_lines(tmp_path / "rows.jsonl", some_records())
    (tmp_path / "run.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes() * 9))
    _, made = reported(tmp_path / "run.jsonl.gz")
    assert any("inflated bytes" in one["reason"] for one in made["problems"])


# Since when.


def test_two_dumps_a_factor_of_ten_apart_are_a_rise() -> None:
    rows = [replace(one, step=0) for one in records(recorded("bf16", 1))]
    later = [replace(one, step=1) for one in records(recorded("fp8", 1))]
    made = surveyed([*rows, *later])
    (since,) = (line for line in verdict(made, None).lines if line.startswith("Since when"))
    assert re.fullmatch(r"Since when: kl_k3 rose 10\.\d times at step 1, from 0\.0022 to 0\.023\.", since)
    assert made.findings[0].name == "jump" and verdict(made, None).level == ALARM


def test_a_last_step_beyond_the_noise_of_the_steps_before_is_a_change() -> None:
    """The move to the last step is no noise of the moves beside it."""
    steps = [2.58, 1.97, 2.19, 3.17, 2.35, 2.34, 1.93, 1.69, 3.25, 1.99, 2.35, 2.05, 3.53, 2.01, 1.72, 62.13]
    assert [change.step for change in changes(range(16), steps)] == [15]


@pytest.mark.parametrize("steps", [2, 3, 6, 8, 20])
def test_a_steady_rise_is_told_with_its_size(steps: int) -> None:
    (*_, found) = changes(range(steps), [1e-3 * 188 ** (step / (steps - 1)) for step in range(steps)])
    assert found.factor > (100 if steps < 8 else 1.5) and found.sudden == (steps == 2)


@pytest.mark.parametrize("steps", [2, 5, 6, 12, 40])
def test_a_level_is_told_with_the_smallest_rise_that_would_have_shown(steps: int) -> None:
    noise = torch.rand(steps, generator=torch.Generator().manual_seed(1)).tolist()
    level = [1e-3 * (1 + 0.1 * x) for x in noise]
    least = smallest_rise(level)
    assert not changes(range(steps), level)
    risen = [x * (1.25 * least if step >= steps // 2 else 1) for step, x in enumerate(level)]
    assert changes(range(steps), risen)
    curve = Curve("a run", {step: {FIRST: x} for step, x in enumerate(level)})
    assert f"over {steps} steps; a lasting rise of {least:.2g} times would show" in of_curves([curve]).lines[1]


# Limits: one record, which the pages say too.


def spans(page: str) -> list[tuple[float, float, str]]:
    """The rows of a page's table of presets: kl_k3 from, to, and the preset."""
    found = []
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        low_high = re.search(r"k3 (?:below ([\d.e-]+)|of ([\d.e-]+) to ([\d.e-]+))", cells[0])
        preset = re.search(r"`([\w-]+)`", cells[1]) if len(cells) == 3 else None
        if low_high and preset and "k3 x n" not in cells[0]:
            below, low, high = low_high.groups()
            found.append((float(low or 0), float(below or high), preset[1]))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/choose.md"])
def test_the_reports_advice_is_the_pages_row_at_each_rung(page: str) -> None:
    rows = spans(page)
    assert len(rows) >= 4
    for rung in record().steps:
        found = row(rung.k3)
        assert found is not None
        assert found.preset in [preset for low, high, preset in rows if low <= rung.k3 < high], rung.name
    assert {one.below for one in ROWS} <= {high for _, high, _ in rows}
    assert row(ROWS[-1].below) is None


def test_a_number_just_beyond_its_limit_is_shown_with_the_digits_that_tell_it() -> None:
    assert beyond({"ratio_mean": 1.0213}) == ["ratio_mean is 1.021, above 1.02"]
    assert beyond({"kept_fraction": 0.4999999}) == ["kept_fraction is 0.4999999, below 0.5"]


def test_limits_of_k3_are_those_of_the_pages() -> None:
    (line,) = re.findall(r"^\| `mis_k3_kl` \| KL .*$", (ROOT / "docs/choose.md").read_text(), re.MULTILINE)
    limits = LIMITS[FIRST]
    assert f"above {limits.high:.0e}".replace("e-0", "e-") in line
    assert f"above {limits.alarm:.0e}".replace("e-0", "e-") in line


@pytest.mark.parametrize(
    ("rung", "level"),
    [("bf16", CALM), ("int8", CALM), ("fp8", WATCH), ("int6", ALARM), ("int4", ALARM), ("int3", ALARM)],
)
def test_size_alone_warns_and_alarms(rung: str, level: str) -> None:
    """An int3 engine differs more at the first tokens, as any coarse engine does, but 3% of the mismatch lies there."""
    made = surveyed(records(recorded(rung, 1)))
    assert verdict(made, None).level == level and bool(made.findings) == (level != CALM)
    assert {one.name for one in made.findings} <= {"precision", "other-weights"}


# A mismatch beside the real model's: nothing between two rungs is claimed.

RUNGS = record().steps


FINEST, COARSEST = RUNGS[0], RUNGS[-1]
TOLD_OF_K3 = {
    **{rung.k3: f"A real model shows as much ({rung.k3:.2g}) with an engine in {rung.words}." for rung in RUNGS},
    **{(low.k3 * high.k3) ** 0.5: "The mismatch lies between what a real model shows with an engine in "
       f"{low.name} ({low.k3:.2g}) and in {high.name} ({high.k3:.2g})."
       for low, high in pairwise(RUNGS) if high.k3 > 1.2 * AS_MUCH**2 * low.k3},
    FINEST.k3 / 10: f"The mismatch is 10 times less than a real model shows with an engine in {FINEST.name}.",
    10 * COARSEST.k3: f"The mismatch is 10 times what a real model shows with an engine in {COARSEST.name}.",
}  # fmt: skip


@pytest.mark.parametrize(("k3", "said"), TOLD_OF_K3.items())
def test_a_mismatch_is_told_beside_the_rungs_and_neither_of_two_far_ones_is_named(k3: float, said: str) -> None:
    assert in_words(k3) == said


def test_a_rung_is_nearest_to_itself_and_no_mismatch_is_none_to_correct() -> None:
    assert "nothing to correct" in in_words(0.0)
    assert [nearest(rung.k3, RUNGS) for rung in RUNGS] == list(RUNGS)


# Causes.


@pytest.mark.parametrize("rung", ["bf16", "fp8"])
@pytest.mark.parametrize(("plant", "cause"), IN_RECORDINGS.items())
def test_a_cause_planted_in_a_recording_is_named_first(plant: str, cause: str, rung: str) -> None:
    made = surveyed(planted_in_recording(plant, 3, rung))
    assert made.findings[0].name == cause and verdict(made, None).level != CALM


@pytest.mark.parametrize("seed", range(8))
def test_a_clean_run_is_calm(seed: int) -> None:
    made = surveyed(clean(seed))
    assert made.whole[FIRST] < 1e-2 and verdict(made, None).level == CALM, made.findings


def test_the_first_two_causes_say_what_speaks_against_them() -> None:
    made = surveyed(planted_in_recording("template", 3, "int6", 2))
    first, second = made.findings[:2]
    assert (first.name, second.name) == ("template", "precision")
    assert re.fullmatch(
        r"The cause leaves \d+% of the mismatch unexplained\. The rival, an engine .* accounts for \d+%\.",
        first.against,
    )
    assert "The rival, a cut or changed template, accounts for" in second.against


def test_a_cause_alone_says_whether_another_sign_shows() -> None:
    (precision,) = surveyed(records(recorded("fp8", 1))).findings
    assert precision.against == f"No sign of any of the {len(CAUSES) - 1} other causes shows."
    columns = recorded("int6", 1)
    swapped = replace(columns, behavior=columns.proximal, proximal=columns.behavior)
    (found,) = surveyed(records(swapped)).findings
    assert found.name == "swapped" and found.against == (
        "The sign of another cause shows too (tokens were not sampled from the reported log-probs), and follows from "
        "this cause."
    )


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("scope", ["by response", "across the join of two sequences", "by turn"])
def test_lists_of_different_tokens_are_told_with_the_shift_that_restores_them(shift: int, scope: str) -> None:
    columns = recorded("int8", 4)
    sizes = columns.lengths.tolist()
    turns = [torch.arange(one) // 20 for one in sizes]
    moved = columns.proximal.roll(shift)
    if scope == "by response":
        moved = torch.cat([one.roll(shift) for one in columns.proximal.split(sizes)])
    if scope == "by turn":
        parts = zip(columns.proximal.split(sizes), turns, strict=True)
        moved = torch.cat([one[turn == k].roll(shift) for one, turn in parts for k in turn.unique()])
    rows = records(replace(columns, proximal=moved))
    if scope == "by turn":
        rows = [replace(one, turns=turn) for one, turn in zip(rows, turns, strict=True)]
    made = surveyed(rows)
    (found,) = made.findings
    way = f"{abs(shift)} place{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
    assert found.name == "different-tokens" and f"read {way}, {scope}, it is 1.00." in found.evidence


# Kinds of runs, from their files.


def lines(folder: Path, rows: Sequence[Record]) -> None:
    write_lines(folder / "run.jsonl", rows)


def resumed(folder: Path, rows: Sequence[Record]) -> None:
    """Dumps of a run that went back to an earlier step, and dumped some steps twice."""
    for name, part in (("first", rows), ("again", rows[len(rows) // 2 :])):
        for step in {one.step for one in part}:
            write_slime(folder / name, [one for one in part if one.step == step])


def short(rows: Sequence[Record], places: int = 0) -> list[Record]:
    """Responses of ten tokens, which cannot be judged alone; the trainer's list may lie some places on."""
    return [
        replace(one, behavior_log_probs=one.behavior_log_probs[:10], loss_mask=one.loss_mask[:10],
                proximal_log_probs=one.proximal_log_probs[places : places + 10])
        for one in rows if one.size > 11
    ]  # fmt: skip


def in_turns(rows: Sequence[Record]) -> list[Record]:
    """Turns of ten tokens, of which every second one is a tool's answer that the engine has no log-prob of."""
    turns = [torch.arange(one.size) // 10 for one in rows]
    masks = [turn % 2 == 0 for turn in turns]
    return [
        replace(one, turns=turn, loss_mask=mask, behavior_log_probs=torch.where(mask, one.behavior_log_probs, 0))
        for one, turn, mask in zip(rows, turns, masks, strict=True)
    ]  # fmt: skip


def mixed(fresh: Sequence[Record], old: Sequence[Record]) -> list[Record]:
    """Responses that an older version goes on with, as a resumed or a partial rollout has them."""
    rows = []
    for one, other in zip(fresh, old, strict=True):
        both = {name: torch.cat([getattr(one, name), getattr(other, name)]) for name in (*NEEDED, "loss_mask")}
        versions = torch.tensor([3] * one.size + [2] * other.size)
        rows.append(replace(one, **both, versions=versions, trainer_version=3))
    return rows


def coarser(rows: Sequence[Record], factor: float) -> list[Record]:
    """Responses of which every log ratio is larger by a factor."""
    ratios = [one.proximal_log_probs - one.behavior_log_probs for one in rows]
    behavior = [one.proximal_log_probs - factor * ratio for one, ratio in zip(rows, ratios, strict=True)]
    return [replace(one, behavior_log_probs=mu) for one, mu in zip(rows, behavior, strict=True)]


BF16, INT6 = records(recorded("bf16", 3)), records(recorded("int6", 3))
KINDS = {
    "short responses": (lines, short(BF16), ""),
    "short lists of other tokens": (lines, short(BF16, 1), "different-tokens"),
    "a mixture of experts": (lines, planted_in_recording("route", 3, "bf16", 0), "route"),
    "turns with a tool's answers": (lines, in_turns(BF16), ""),
    "a tool's answers in the loss": (
        lines, [replace(one, loss_mask=torch.ones_like(one.loss_mask)) for one in in_turns(BF16)], "placeholder",
    ),
    "a resumed run": (resumed, BF16, ""),
    "versions that are mixed": (lines, mixed(BF16, INT6), "stale-weights"),
    "a part of the response in another version": (lines, mixed(BF16, BF16), ""),
    "an age that adds less than its factor": (lines, mixed(BF16, coarser(BF16, 1.2)), ""),
    "two first tokens of the next step, far apart": (
        lines,
        [*BF16, *(from_mapping({BEHAVIOR: [-1.0], PROXIMAL: [x]}, 8, "new") for x in (-1.4, -0.5))], "",
    ),
    "versions of an engine that agrees to the bit": (
        lines, [replace(one, behavior_log_probs=one.proximal_log_probs) for one in mixed(BF16, BF16)], "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("write", "rows", "cause"), KINDS.values(), ids=KINDS)
def test_a_kind_of_run_is_judged_by_its_files(
    tmp_path: Path, write: Callable[..., None], rows: Sequence[Record], cause: str
) -> None:
    write(tmp_path, rows)
    found, problems = read(tmp_path)
    made = surveyed(found)
    assert not problems and len(found) >= len(rows)
    assert next((one.name for one in made.findings), "") == cause
    assert verdict(made, None).level == (ALARM if cause else CALM)


def test_what_stands_in_for_a_log_prob_is_counted_by_its_name(tmp_path: Path) -> None:
    behavior = [-9999, None, None, float("nan"), -1e9, *[-0.5] * 95]
    row = {"behavior_log_probs": behavior, "proximal_log_probs": [*[-0.5] * 99, -65504.0], "loss_mask": [1] * 100}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"loss_mask": [0] * 100}))
    _, made = reported(tmp_path / "run.jsonl")
    named = {"-9999": 1, "None": 2, "nan": 1, "-1e+09": 1}
    assert made["absent"] == {"behavior_log_probs": named, "proximal_log_probs": {"-65504": 1}}
    (found,) = made["causes"]
    assert found["name"] == "non-finite" and "behavior_log_probs: None (2), -9999 (1)" in found["evidence"]
    assert found["evidence"] in html.unescape((tmp_path / "out" / "report.html").read_text())


@pytest.mark.parametrize(("tokens", "level"), [(1, WATCH), (99, WATCH), (100, CALM)])
def test_too_few_tokens_tell_nothing(tokens: int, level: str) -> None:
    proximal = torch.full((tokens,), -0.5)
    for behavior in (proximal, proximal - 0.18):  # the latter has a kl_k3 above the limit
        row = Record(0, "a", behavior, proximal, torch.ones(tokens, dtype=torch.bool))
        found = verdict(surveyed([row]), None)
        few = f"{tokens} token{'s' * (tokens > 1)} can be compared, too few to tell anything by."
        assert (found.headline == few) == (level == WATCH) and found.level in (level, WATCH)


@pytest.mark.parametrize(("rows", "level"), [(BF16, CALM), (records(recorded("fp8", 3)), WATCH)])
def test_padding_in_the_loss_is_told_and_hides_no_mismatch(rows: Sequence[Record], level: str) -> None:
    fills = dict.fromkeys(NEEDED, torch.zeros(400)) | {"loss_mask": torch.ones(400, dtype=torch.bool)}
    padded = [
        replace(one, **{name: torch.cat([getattr(one, name), fill]) for name, fill in fills.items()}) for one in rows
    ]
    judged = verdict(surveyed(padded), None)
    assert judged.level == level and f"{400 * len(rows)} of " in judged.parts["Certain on both sides"]
    assert f"of the others is {surveyed(rows).whole[FIRST]:.3g}" in judged.parts["Certain on both sides"]
    assert judged.level == CALM or "differ more than a healthy run" in judged.headline


def test_a_shift_that_restores_little_is_none() -> None:
    """The lists correlate by 0.17 with a shift of one, which is far beyond its error and far from one list."""
    dice = torch.Generator().manual_seed(0)
    rows = []
    for number in range(60):
        behavior, other = -3 * torch.rand(2, 200, generator=dice)
        proximal = 0.85 * other + 0.15 * behavior.roll(1)
        rows.append(Record(0, str(number), behavior, proximal, torch.ones(200, dtype=torch.bool)))
    (cause,) = [finding for finding in surveyed(rows).findings if finding.name == "different-tokens"]
    assert "no shift of up to two tokens restores it" in cause.evidence


def test_responses_without_a_token_in_the_loss_are_told() -> None:
    masked = changed(BF16[1:], "loss_mask", torch.zeros_like)
    assert verdict(surveyed([BF16[0], *masked]), None).parts["Nothing in the loss"].startswith(f"{len(masked)} of ")


def test_zeros_alone_are_no_log_probs() -> None:
    zeros = changed(changed(BF16, BEHAVIOR, torch.zeros_like), PROXIMAL, torch.zeros_like)
    found = verdict(surveyed(zeros), None)
    assert not found.measured and found.headline.startswith("Nothing was measured: all log-probs of the ")


# Proposal.


def proposed(rows: Sequence[Record], sweep: str = "own", advantages: bool = False):
    if advantages:
        rows = [replace(one, advantages=torch.full((one.size,), place % 2 * 2.0 - 1)) for place, one in enumerate(rows)]
    tried = candidates(sweep, None)
    survey = Survey.of(CorrectionConfig(), tried)
    survey.add_all(rows)
    made = report(survey)
    assert made is not None
    calm = verdict(made, None).level == CALM
    found = propose(tried, made.outcomes, made.whole, made.steps, made.usable / made.sequences, calm)
    assert found is not None
    return found


def test_nothing_is_proposed_for_a_calm_run() -> None:
    assert proposed(records(recorded("bf16", 1)), advantages=True).name == NOTHING


@pytest.mark.parametrize("rung", ["fp8", "int6", "int5"])
def test_without_advantages_readmes_row_is_proposed(rung: str) -> None:
    found, wanted = (proposed(records(recorded(rung, 1))), row(next(r.k3 for r in record().steps if r.name == rung)))
    assert wanted is not None and found.name == wanted.preset and found.trusted
    assert any("write the column `advantages`" in line for line in found.why)


def test_with_advantages_equals_are_shown_as_equal() -> None:
    found = proposed(records(recorded("fp8", 1)), advantages=True)
    assert found.name == "tis" and any(line.startswith("as good within the interval: ") for line in found.why)


def test_a_runs_own_file_that_is_readmes_row_is_judged_as_the_row() -> None:
    found = propose([Candidate("mis.yaml", load("tis"))], {"mis.yaml": PLAIN}, {FIRST: 0.02}, {})
    assert found is not None and found.name == "mis.yaml" and "of the tokens are kept" in found.why[0]


def test_beyond_readmes_table_the_engine_is_repaired_first() -> None:
    found = proposed(records(recorded("int4", 1)))
    assert not found.trusted and found.why[0].startswith("repair the engine first: kl_k3 is 0.79, above 0.25")


def test_a_ranking_beats_readmes_row_beyond_its_interval_alone() -> None:
    numbers = {name: value for name, value in PLAIN.items() if name != "response_cosine"}
    tried = candidates("tis,cis", None)

    def among(cis: float, spread: float):
        without = [cis + spread * (-1) ** part for part in range(16)]
        better = numbers | {"coefficient_cosine": cis, "coefficient_cosine_without": without}
        plain = numbers | {"coefficient_cosine": 0.9, "coefficient_cosine_without": [0.9] * 16}
        outcomes = {"none": plain, "tis": plain, "cis": better}
        found = propose(tried, outcomes, {FIRST: 0.02}, {})
        assert found is not None
        return found

    why = "; ".join(among(0.95, 0.0).why)
    assert among(0.95, 0.0).name == "cis" and "is `tis`; the row has 0.900, cis has 0.950" in why
    assert why.count("row") == 2
    assert among(0.95, 0.02).name == "tis" and "as good within the interval: cis" in among(0.95, 0.02).why[-1]
    assert among(0.902, 0.0).name == "tis"


# What an adversary's runs were told wrongly.

INT5, FP8 = records(recorded("int5", 3)), records(recorded("fp8", 3))
TEMPERED = records(sampled(plants._temperature(drawn(7, "bf16"), 0.7)))
MADE = records(sampled(drawn(8, "bf16")))


def made_with(plant: str, size: float) -> list[Record]:
    """The made-up run with one of `OF_LOGITS`, of this size."""
    plant_in, _ = plants.OF_LOGITS[plant]
    return records(sampled(plant_in(drawn(8, "bf16"), size)))


TEMPERED_MADE = made_with("temperature", 0.7)
FEW = [
    replace(one, **{name: getattr(one, name)[-60:] for name in (*NEEDED, "loss_mask")})
    for one in BF16 if one.size >= 60
][:16]  # fmt: skip


def changed(rows: Sequence[Record], name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Record]:
    """Responses with one column changed."""
    return [replace(one, **{name: change(getattr(one, name).clone())}) for one in rows]


def ended_in(number: float, places: int = 3) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda column: torch.cat([column[:-places], torch.full((places,), number)])


def less(nats: float, places: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is so much lower at the last places."""
    return lambda column: torch.cat([column[:-places], column[-places:] - nats])


def in_part(rows: Sequence[Record], others: Sequence[Record], every: int = 8) -> list[Record]:
    """Responses of which every `every`-th one is another's."""
    return [others[place] if place % every == 0 else one for place, one in enumerate(rows)]


def shifted_behind_a_tool(rows: Sequence[Record], share: float = 0.5) -> list[Record]:
    """Responses of two turns with a masked token between them, whose second turn is a place late in the trainer's."""
    middle = [int(one.size * (1 - share)) for one in rows]
    masks = [torch.arange(one.size) != place for one, place in zip(rows, middle, strict=True)]
    late = [
        torch.cat([one.proximal_log_probs[: place + 1], one.proximal_log_probs[place + 1 :].roll(1)])
        for one, place in zip(rows, middle, strict=True)
    ]
    return [replace(one, loss_mask=mask, proximal_log_probs=x) for one, mask, x in zip(rows, masks, late, strict=True)]


def at_steps(bad: set[int], steps: int) -> list[Record]:
    """A run whose engine is int5 at some steps alone."""
    at = [place * steps // len(BF16) for place in range(len(BF16))]
    return [replace((INT5 if step in bad else BF16)[place], step=step) for place, step in enumerate(at)]


FAR_APART = from_mapping({BEHAVIOR: [-1.0, -1.0, -1.0, -1.5], PROXIMAL: [-3.0] * 4}, 8, BF16[0].sample)


def in_one_place() -> list[Record]:
    """The trainer's log-probs are lower from position 60 on."""
    noise = torch.Generator().manual_seed(2)
    late = lambda size: torch.randn(size, generator=noise).abs() * (torch.arange(size) >= 60)  # noqa: E731
    return changed(BF16, PROXIMAL, lambda column: column - 0.8 * late(len(column)))


def of_versions() -> list[Record]:
    """Every second response by an older version, and no word of the trainer's own version."""
    rows = in_part(INT5, BF16, 2)
    ages = [torch.full((one.size,), one.step + 3 * (1 - place % 2)) for place, one in enumerate(rows)]
    return [replace(one, versions=age) for one, age in zip(rows, ages, strict=True)]


def with_flips(share: float = 0.03) -> list[Record]:
    noise, rows = torch.Generator().manual_seed(5), []
    for one in BF16:
        flips = torch.rand(one.size, generator=noise) < share
        moved = one.proximal_log_probs + flips * 2 * torch.randn(one.size, generator=noise)
        rows.append(replace(one, route_differs=flips, proximal_log_probs=moved.clamp(max=-1e-6)))
    return rows


def with_one_permuted(rows: Sequence[Record]) -> list[Record]:
    order = torch.randperm(rows[3].size, generator=torch.Generator().manual_seed(1))
    return [*rows[:3], *changed(rows[3:4], "proximal_log_probs", lambda column: column[order]), *rows[4:]]


def sampled_at(precision: str, temperature: float, mass: float = 1.0) -> list[Record]:
    """Responses of an engine that samples at a temperature, from the likeliest tokens of so much probability."""
    run = plants._temperature(drawn(8, precision), temperature)
    return records(sampled(run if mass == 1 else plants._top_p(run, mass)))


def of_likeliest(count: int) -> list[Record]:
    run = drawn(21, "bf16")
    least = run.engine.topk(count, -1).values[:, -1:]
    return records(sampled(replace(run, engine=run.engine.masked_fill(run.engine < least, -torch.inf))))


TEMPERED_AT = {at: sampled(plants._temperature(drawn(8, "bf16"), at)) for at in (0.8, 0.9)}
TOLD: dict[str, tuple[Callable[[], list[Record]], Sequence[str]]] = {
    "one bad step of sixteen": (lambda: at_steps({7}, 16), ["jump"]),
    "a step of few tokens between two levels": (
        lambda: [*at_steps({*range(8, 16)}, 16)[:128], FAR_APART, *at_steps({*range(8, 16)}, 16)[128:]], ["jump"]
    ),
    "a bad first step": (lambda: at_steps({0}, 16), ["jump"]),
    "a bad last step": (lambda: at_steps({15}, 16), ["jump"]),
    "a temperature and, at the engine's least likely tokens of five responses, placeholders": (
        lambda: [*changed(TEMPERED[:5], BEHAVIOR, lambda column: column.index_fill(0, column.argmin(), 0.0)),
                 *TEMPERED[5:]],
        ["temperature", "placeholder"],
    ),
    "a temperature and a changed response": (lambda: with_one_permuted(TEMPERED), ["temperature", "changed-response"]),
    "a temperature and a template": (
        lambda: records(sampled(plants._template(plants._temperature(drawn(8, "bf16"), 0.9), 0.25))),
        ["temperature", "template"],
    ),
    "a temperature and missed routes": (
        lambda: records(plants._route(TEMPERED_AT[0.9], 0.4)), ["temperature", "route"]
    ),
    "a temperature and many placeholders": (
        lambda: records(plants._placeholder(TEMPERED_AT[0.8], 100)), ["temperature", "placeholder"]
    ),
    "a temperature and lists that are shifted": (
        lambda: records(plants._shifted(TEMPERED_AT[0.8], 4)), ["different-tokens", "temperature"]
    ),
    "a temperature and changed responses": (
        lambda: records(plants._changed(TEMPERED_AT[0.8], 10)), ["changed-response", "temperature"]
    ),
    "one shifted response of 64, as of one rank": (
        lambda: records(plants._shifted(sampled(drawn(8, "bf16")), 64)), ["different-tokens"]
    ),
    "a temperature above 1 and a little top-p": (lambda: sampled_at("bf16", 1.3, 0.95), ["temperature", "top-p"]),
    "a temperature above 1 and much top-p": (lambda: sampled_at("bf16", 1.6, 0.7), ["temperature", "top-p"]),
    "top-k alone": (lambda: of_likeliest(20), ["top-p"]),
    "a temperature of 0.3": (lambda: sampled_at("fp8", 0.3), ["temperature"]),
    "a temperature of 0.3 at int6": (lambda: sampled_at("int6", 0.3), ["temperature"]),
    "a temperature of 0.3 and top-p": (lambda: sampled_at("bf16", 0.3, 0.95), ["temperature", "top-p"]),
    "a temperature of 0.5 and top-p at fp8": (lambda: sampled_at("fp8", 0.5, 0.9), ["temperature", "top-p"]),
    "a nucleus of one token at most places": (
        lambda: sampled_at("bf16", 0.3, 0.7), ["top-p", "differing-weights"]
    ),
    "a slight template at int6": (lambda: planted_in_recording("template", 3, "int6", 0), ["template", "precision"]),
    "slight routes at int6": (lambda: planted_in_recording("route", 1008, "int6", 0), ["route", "precision"]),
    "one number for every trainer's log-prob": (
        lambda: changed(BF16, PROXIMAL, lambda column: torch.full_like(column, -1.0)), ["placeholder"]
    ),
    "one number for every engine's log-prob": (
        lambda: changed(BF16, BEHAVIOR, lambda column: torch.full_like(column, -1.0)), ["placeholder"]
    ),
    "the engine's padding of -1": (lambda: changed(BF16, BEHAVIOR, ended_in(-1.0)), ["placeholder"]),
    "ten zeros in one response of tokens that are likely as any": (
        lambda: [*changed(changed(FEW[:1], BEHAVIOR, ended_in(0.0, 10)), PROXIMAL, ended_in(-0.6, 10)), *FEW[1:]],
        ["placeholder"],
    ),
    "ends that half of few responses lost": (
        lambda: in_part(FEW, changed(FEW, PROXIMAL, less(10.0, 1)), 2), ["end-token"]
    ),
    "ends of which the trainer is as good as certain that they do not come": (
        lambda: made_with("end-token", 32.0), ["end-token"]
    ),
    "ends that an eighth of the responses lost": (
        lambda: in_part(MADE, made_with("end-token", 12.0)), ["end-token"]
    ),
    "the last two tokens of a template": (lambda: changed(BF16, PROXIMAL, less(8.0, 2)), ["end-token"]),
    "a template in an eighth of the responses": (lambda: in_part(MADE, made_with("template", 0.8)), ["template"]),
    "few routes that differ": (lambda: with_flips(0.01), ["route"]),
    "raw log-probs": (lambda: made_with("raw-log-probs", 0.6), ["raw-log-probs"]),
    "raw log-probs of every second response": (
        lambda: in_part(MADE, made_with("raw-log-probs", 0.6), 2), ["raw-log-probs"]
    ),
    "a turn behind a tool's answer, shifted in a quarter of the responses": (
        lambda: in_part(BF16, shifted_behind_a_tool(BF16), 4), ["different-tokens"]
    ),
    "a last turn of a fifth, shifted in a quarter of the responses": (
        lambda: in_part(BF16, shifted_behind_a_tool(BF16, 0.2), 4), ["different-tokens"]
    ),
    "short lists of which a third is of other tokens": (
        lambda: in_part(short(BF16), short(BF16, 1), 3), ["different-tokens"]
    ),
    "short responses that lost their ends": (lambda: changed(short(BF16), PROXIMAL, less(8.0, 1)), ["end-token"]),
    "a temperature in every second response": (lambda: in_part(MADE, TEMPERED_MADE, 2), ["temperature"]),
    "a temperature in one replica of eight": (lambda: in_part(MADE, TEMPERED_MADE), ["temperature"]),
    "logarithms to base 2 in one replica of eight": (
        lambda: in_part(BF16, changed(BF16, BEHAVIOR, lambda column: column / math.log(2))), ["unit"]
    ),
    "a multiple that is nearly ln 2": (lambda: changed(BF16, BEHAVIOR, lambda column: column / 0.7), ["temperature"]),
    "a multiple in few tokens": (lambda: changed(FEW[:8], BEHAVIOR, lambda column: column / 0.6), ["temperature"]),
    "logarithms to base 2 in few tokens": (
        lambda: changed(FEW[:8], BEHAVIOR, lambda column: column / math.log(2)), ["unit"]
    ),
    "a temperature in few tokens": (lambda: TEMPERED[:5], []),
    "an early list, filled with 0": (
        lambda: changed(BF16, BEHAVIOR, lambda column: torch.cat([column[1:], torch.zeros(1)])),
        ["different-tokens", "placeholder"],
    ),
    "the trainer's zeros": (lambda: changed(BF16, PROXIMAL, torch.zeros_like), ["placeholder"]),
    "the engine's zeros": (lambda: changed(BF16, BEHAVIOR, torch.zeros_like), ["placeholder"]),
    "the trainer's padding of 0": (lambda: changed(BF16, PROXIMAL, ended_in(0.0, 4)), ["placeholder"]),
    "the trainer's padding of -100": (lambda: changed(BF16, PROXIMAL, ended_in(-100.0)), ["placeholder"]),
    "the engine's padding of -20 in few responses of each step": (
        lambda: in_part(BF16, changed(BF16, BEHAVIOR, ended_in(-20.0, 1))), ["placeholder"]
    ),
    **{f"entropies in place of the trainer's log-probs, {where}": (
        lambda rows=rows: changed(rows, PROXIMAL, lambda x: -0.1 * torch.arange(1, len(x) + 1).sin().square()),
        ["different-tokens"],
    ) for where, rows in (("recorded", BF16), ("made up", MADE))},
    "copies of the engine's lists in seven responses of eight": (
        lambda: in_part([replace(one, proximal_log_probs=one.behavior_log_probs) for one in FP8], FP8), []
    ),
    "the engine's padding of -20": (lambda: changed(BF16, BEHAVIOR, ended_in(-20.0)), ["placeholder"]),
    "padding of -100 on both sides": (
        lambda: changed(changed(BF16, BEHAVIOR, ended_in(-100.0)), PROXIMAL, ended_in(-100.0)), ["placeholder"]
    ),
    "logarithms to base 2": (lambda: changed(BF16, BEHAVIOR, lambda column: column / math.log(2)), ["unit"]),
    "logarithms to base 10": (lambda: changed(INT5, PROXIMAL, lambda column: column / math.log(10)), ["unit"]),
    "routes that differ, with a heavy tail": (with_flips, ["route"]),
    "older versions without the trainer's": (of_versions, ["stale-weights"]),
    "a mismatch from position 60 on": (in_one_place, []),
    "a mismatch of every eighth response": (lambda: in_part(BF16, INT5), ["precision"]),
    "one engine of sixteen, which leaves kl_k3 below its limit": (lambda: in_part(BF16, INT6, 16), ["precision"]),
    "one engine of sixteen, whose responses are all cut at one length": (
        lambda: in_part(*([one for one in rows if one.size == 128] for rows in (BF16, INT6)), every=16), ["precision"]
    ),
    "one engine of sixteen in fp8": (lambda: in_part(BF16, FP8, 16), ["precision"]),
    "one engine of sixteen, whose few responses are all long": (
        lambda: in_part(records(recorded("bf16", 0)), records(recorded("int6", 0)), 16), ["precision"]
    ),
    "one engine of sixteen with other weights": (
        lambda: in_part(MADE, made_with("other-weights", 1.0), 16), ["other-weights"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "names"), TOLD.values(), ids=TOLD)
def test_what_is_told_of_a_run_is_so(rows: Callable[[], list[Record]], names: Sequence[str]) -> None:
    made = surveyed(rows())
    assert [one.name for one in made.findings] == list(names)
    assert verdict(made, None).level != CALM and not (names == [] and "evenly" in "".join(verdict(made, None).lines))


def noisy(responses: int, tokens: int, steps: int, older: float = 1.0, seed: int = 0) -> list[Record]:
    """Responses whose mismatch has a size of its own, and is larger by a factor in every second, older one."""
    noise, rows = torch.Generator().manual_seed(seed), []
    for place in range(responses):
        size = 0.04 * math.exp(0.7 * float(torch.randn((), generator=noise))) * (older if place % 2 else 1)
        mu = -2 * torch.rand(tokens, generator=noise) - 0.01
        pi = mu + size * torch.randn(tokens, generator=noise) - size**2 / 2
        versions, mask = torch.full((tokens,), 3 - place % 2), torch.ones(tokens, dtype=torch.bool)
        rows.append(Record(place * steps // responses, "", mu, pi, mask, versions=versions, trainer_version=3))
    return rows


OF_ONE_AGE = [(3, 5000, 1, 1.0, 4), *((8, 2000, 4, 1.0, seed) for seed in (5, 8, 10))]  # that look old, or like a rise


@pytest.mark.parametrize("case", [*OF_ONE_AGE, (40, 100, 4, 4.0, 0), (160, 100, 4, 2.0, 1)])
def test_old_responses_are_told_and_a_noise_of_each_one_is_not(case: tuple[int, int, int, float, int]) -> None:
    assert [one.name for one in surveyed(noisy(*case)).findings][:1] == ["stale-weights"] * (case[3] > 1)


def test_an_error_over_responses_is_that_of_plain_loops() -> None:
    rows, survey = noisy(12, 50, 3, 2.0), Survey.of(CorrectionConfig(), [])
    survey.add_all(rows)
    sizes = [float((one.proximal_log_probs - one.behavior_log_probs).abs().mean()) for one in rows]
    fresh, old = torch.tensor(sizes[::2]).double(), torch.tensor(sizes[1::2]).double()
    t = float((old.mean() / fresh.mean()).log() / sum(x.var() / x.mean() ** 2 / 6 for x in (old, fresh)) ** 0.5)
    beyond = torch.arange(len(PLACES["age"].labels)) > 0
    assert survey.tables.errors("age", beyond, ~beyond) == pytest.approx(as_normal(t, 5), rel=1e-4)


def test_contexts_that_later_steps_repeat_are_no_sign_of_weights() -> None:
    noise = torch.Generator().manual_seed(1)
    rows = [replace(one, tokens=(300 * torch.rand(one.size, generator=noise) ** 2).long()) for one in BF16[:16]]
    again = changed(rows * 8, PROXIMAL, lambda x: (x + 1e-3 * torch.randn(len(x), generator=noise)).clamp(max=-1e-7))
    made = surveyed([replace(one, step=place // 16) for place, one in enumerate(again)])
    assert "differing-weights" not in [one.name for one in made.findings]


def test_a_cause_in_a_part_of_the_responses_tells_in_which() -> None:
    first, *_ = surveyed(in_part(MADE, TEMPERED_MADE)).findings
    where, _, evidence = first.evidence.partition(", which have ")
    count = int(where.removeprefix("In ").removesuffix(f" of {len(MADE)} responses"))
    assert len(MADE) // 8 <= count < len(MADE) // 4
    assert re.match(r"8\d% of the mismatch: log pi_old follows", evidence)


@pytest.mark.parametrize(("temperature", "mass"), [(1.1, 0.8), (1.3, 0.7), (1.6, 0.5), (1.1, 0.9)])
def test_of_a_temperature_beside_top_p_one_says_that_it_may_hide_the_other(temperature: float, mass: float) -> None:
    made = surveyed(sampled_at("bf16", temperature, mass))
    first, *others = made.findings
    hidden = {"temperature": "top-p, top-k, min-p or penalties", "top-p": "a temperature or penalties"}[first.name]
    assert f"{first.cause.title}, which may hide {hidden}" in verdict(made, None).headline
    assert f"The cause may hide {hidden}." in first.against
    assert all("another setting of sampling" in one.evidence for one in others)


def test_responses_that_the_engine_is_certain_of_belong_to_no_other_tokens() -> None:
    """The engine is certain of a third of the responses, and the trainer nearly so."""
    noise = torch.Generator().manual_seed(5)
    sure = changed(BF16, BEHAVIOR, torch.zeros_like)
    sure = changed(sure, PROXIMAL, lambda column: -0.05 * torch.randn(len(column), generator=noise).abs())
    found = {one.name for one in surveyed(in_part(BF16, sure, 3)).findings}
    assert not found & {"changed-response", "different-tokens", "pairing"}


@pytest.mark.parametrize("turns", [1, 2])
def test_a_turn_of_several_is_of_other_tokens_at_half_the_correlation_alone(turns: int) -> None:
    x, noise = (-torch.rand(40, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    lists = Lists()
    lists.add(torch.stack([x, 0.4 * x + 0.6 * noise]), torch.zeros(40).long(), torch.arange(40) * turns // 40, 1)
    assert lists.broken(0.003).tolist() == [turns == 1]


def test_a_level_that_dips_at_one_step_is_no_jump() -> None:
    dipped = [replace(one, proximal_log_probs=one.behavior_log_probs + 1e-4) for one in BF16[40:48]]
    rows = [replace(one, step=place // 8) for place, one in enumerate([*BF16[:40], *dipped, *BF16[48:]])]
    assert not surveyed(rows).findings


def test_a_file_is_read_once_and_what_was_read_twice_is_told(tmp_path: Path) -> None:
    lines(tmp_path, BF16)
    (tmp_path / "latest.jsonl").symlink_to("run.jsonl")
    assert len(read(tmp_path)[0]) == len(BF16)
    assert "Read twice" in verdict(surveyed([*BF16, *BF16[64:]]), None).told


@pytest.mark.parametrize(
    "row",
    [
        {"behavior_log_probs": torch.full((40,), -0.5).cumsum(0).tolist(), "proximal_log_probs": [-0.5] * 40},
        {"behavior_log_probs": [-0.5] * 3, "proximal_log_probs": [-0.5] * 3, "loss_mask": [1, 0.5, 1]},
        {"behavior_log_probs": [-0.5] * 3, "proximal_log_probs": [-0.5] * 3, "loss_mask": [1, -1, 1]},
        {"behavior_log_probs": [-0.5] * 16, "proximal_log_probs": [-0.4] * 16},
        {"behavior_log_probs": [-0.5], "proximal_log_probs": [-0.5], "versions": [4], "trainer_version": 3},
    ],
)
def test_what_is_no_log_prob_or_mask_is_refused(row: Mapping[str, Any]) -> None:
    with pytest.raises(RecordError, match="running sum|other than 0 and 1|one number|no token is newer"):
        from_mapping(row, 0, "a")


def test_a_sample_that_is_no_object_is_rejected_alone(tmp_path: Path) -> None:
    write_slime(tmp_path, CLEAN)
    (file,) = tmp_path.glob("**/*.pt")
    dump = torch.load(file, weights_only=False)
    torch.save(dump | {"samples": [None, *dump["samples"]]}, file)
    found, problems = read(tmp_path)
    assert len(found) == len(CLEAN) and len(problems) == 1


@pytest.mark.parametrize(
    ("needed", "key"),
    [
        ("rollout_log_probs", "rollout_position"),
        ("response_lengths", "total_lengths"),
        ("proximal_log_probs", "train/mis_k3_kl"),
    ],
)
def test_a_key_of_another_thing_is_no_misspelling(needed: str, key: str) -> None:
    assert "rename" not in lacking([needed], [key])


def test_an_output_that_is_a_file_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "x").touch()
    assert main(["report", "missing", "--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == f"report: --output {tmp_path / 'x'}: is a file; name a folder\n"


@pytest.mark.parametrize("every", ["-1", "nan", "inf", "5"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(every: str, tmp_path: Path) -> None:
    why = "--every: got 5, and without --watch" if every == "5" else "--every: got .*; give seconds from 0"
    with pytest.raises(InputError, match=why):
        run(Namespace(every=float(every), watch=False, output=tmp_path))

"""Asynchronous runs from the command line: equal to the synchronous one, right in every token, alive and clean."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from teacher_forcing import teacher_forced
from test_local_loop import LOSS_HOOK, configured, launched, records, small
from tolerances import FP32_LOG_PROB

from lab.host import report
from lab.host.__main__ import main
from lab.host.asynchronous.measure import asynchronous_summary
from lab.host.asynchronous.pool import Pool, recompute
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.scoring import Scoring
from lab.host.asynchronous.source import ages as token_ages
from lab.host.cli import arguments
from lab.host.cli.arguments import parse_args
from lab.host.loop import Loop
from lab.host.model.engine import DecodeEngine
from lab.host.rollout.sampler import Rollout, draw
from lab.host.train.parallel import initialize, launch
from mis_plugins.metrics.staleness import COLUMNS

LEARNS = "--advantage-estimator reinforce --reward-shift -1 --lr 1e-3"  # failures push: --smoke never succeeds
DUMP = f"--rollout-data-postprocess-path {__name__}.dump"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warm-start")


@pytest.fixture
def segment_wise(tmp_path: Path) -> str:
    return loss_hook(tmp_path)


def loss_hook(folder: Path) -> str:
    """Write a config with segment-wise weights; return the flags of the loss hook that reads it."""
    return f"{LOSS_HOOK} {configured(folder / 'mis.yaml', '{segment_wise: {}}')}"


def settings(flags: str, output: Path, warm: Path, rollouts: int = 3) -> Namespace:
    return small(f"{LEARNS} --warmup-cache {warm} {flags}", output, num_rollout=rollouts)


def run(flags: str, output: Path, warm: Path, rollouts: int = 3) -> int:
    return launched(settings(flags, output, warm, rollouts))


def dump(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """A --rollout-data-postprocess-path hook: keeps what it was handed, on every rank."""
    rank = torch.distributed.get_rank()
    torch.save(dict(rollout_data), Path(args.output) / f"rollout-{rollout_id}-{rank}.pt")


def dumps(output: Path) -> dict[str, dict[str, Any]]:
    return {path.name: torch.load(path) for path in sorted(output.glob("rollout-*.pt"))}


def versions_of_a_run(engine: str, tmp_path: Path) -> None:
    """Run asynchronously, and see that each token has a version, and each older one log pi_{v+1} from a recompute.

    Args:
        engine: the flags that choose the rollout engine.
    """
    flags = f"{loss_hook(tmp_path)} {engine} --async --max-head-offpolicyness 2 --rollout-steps-per-update 1"
    assert run(f"{flags} {DUMP}", tmp_path / "run", tmp_path, rollouts=4) == 0
    last = dumps(tmp_path / "run")["rollout-3-0.pt"]
    versions, recomputed = (torch.cat(last[key]) for key in ("output_versions", "recomputed_log_probs"))
    assert {1, 2, 3} <= set(versions.tolist()) and not recomputed[versions == 1].isnan().any()
    assert sum(record["recompute/tokens"] for record in records(tmp_path / "run")) > 0


def same_bytes(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bytes(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same_bytes, left, right))
    return left == right


# --- bit for bit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["--data-parallel-size 2", "--context-parallel-size 2"])
def test_with_an_offpolicyness_of_0_it_is_the_synchronous_run(
    ranks: str, tmp_path: Path, warm: Path, segment_wise: str
) -> None:
    """The same tokens, log-probs, rewards, metrics, parameters and moments, to the bit."""
    synchronous, asynchronous = tmp_path / "synchronous", tmp_path / "asynchronous"
    common = f"{segment_wise} {ranks} {DUMP}"
    assert run(f"{common} --save {synchronous}", synchronous, warm) == 0
    bound = "--async --max-head-offpolicyness 0"
    assert run(f"{common} {bound} --save {asynchronous}", asynchronous, warm) == 0
    expected, found = dumps(synchronous), dumps(asynchronous)
    assert len(expected) >= 3 and same_bytes(found, expected)
    lengths = {length for data in expected.values() for length in data["response_lengths"]}
    assert len(lengths) > 2, "responses that all end together would say nothing of the batches"
    saved = [torch.load(folder / "checkpoint.pt") for folder in (synchronous, asynchronous)]
    assert same_bytes(saved[1], saved[0])
    first, *_, last = (torch.cat(data["rollout_log_probs"]) for data in expected.values())
    assert not torch.equal(first[:8], last[:8])
    for ours, theirs in zip(records(asynchronous), records(synchronous), strict=True):
        shared = {name for name in theirs if "seconds" not in name}
        assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
        assert ours["staleness/avg"] == 0 and ours["grad_norm"] > 0


# --- every token ----------------------------------------------------------------------------------------------

BOUND = 3
CHECKED_ROLLOUTS = 8


@pytest.mark.parametrize(("mode", "ranks"), [("in_place", ""), ("abort", ""), ("retract", "--context-parallel-size 2")])
def test_versions_and_recomputed_log_probs_are_what_the_weights_of_then_give(
    mode: str, ranks: str, tmp_path: Path, warm: Path, segment_wise: str
) -> None:
    """With random delays: no token is older than the bound, each has the log-probs of its version and of the next."""
    flags = (
        f"{segment_wise} {ranks} --async --max-head-offpolicyness {BOUND} --pause-generation-mode {mode} "
        "--rollout-weights fp32 --rollout-steps-per-update 3 --recompute-token-budget 200"
    )
    args = settings(flags, tmp_path, warm, CHECKED_ROLLOUTS)
    assert launch(args.world_size, lambda: check_every_token(args)) == 0


def check_every_token(args: Namespace) -> None:
    loop = Loop(args, initialize(args.tensor_model_parallel_size, args.context_parallel_size))
    delays, weights, rollouts = random.Random(5), [loop.trainer.weights()], []
    sampled = loop.sampled

    def noted(rollout_id: int) -> Rollout:
        rollouts.append(sampled(rollout_id))
        return rollouts[-1]

    loop.sampled = noted
    try:
        while loop.next_rollout < args.num_rollout:
            time.sleep(delays.choice([0, 0, 0.05, 0.2]))
            loop.one_rollout()
            weights.append(loop.trainer.weights())
    finally:
        loop.close()
    engines = [DecodeEngine(loop.reference.config, "fp32") for _ in weights]
    for version, (engine, one) in enumerate(zip(engines, weights, strict=True)):
        engine.update_weights(one, version)
    ages: Counter[int] = Counter()
    for version, rollout in enumerate(rollouts):
        ages += check_rollout(loop, engines, version, rollout)
    assert set(ages) == set(range(BOUND + 1)), ages
    mixed = [sample for rollout in rollouts for sample in rollout.samples if len(sample.weight_versions) > 1]
    assert len(mixed) > 20


def check_rollout(loop: Loop, engines: list[DecodeEngine], current: int, rollout: Rollout) -> Counter[int]:
    args = loop.args
    assert rollout.version == current
    problems, _ = draw(args, loop.task, (args.seed, "rollout", current), {p.prompt for p in loop.held_out})
    prompts = [sample.tokens[: -sample.response_length] for sample in rollout.samples]
    assert prompts == [list(problem.prompt) for problem in problems], "each once, in their order"
    ages: Counter[int] = Counter()
    for sample in rollout.samples:
        versions, stored = sample.output_versions, sample.recomputed_log_probs
        assert versions is not None and stored is not None and sample.rollout_log_probs is not None
        assert versions == sorted(versions) and 0 <= current - versions[-1] and current - versions[0] <= BOUND
        ages.update(current - version for version in versions)
        score = [teacher_forced(engine, [sample.tokens], [sample.response_length])[0].tolist() for engine in engines]
        for place, version in enumerate(versions):
            if args.pause_generation_mode != "in_place" or version == versions[0]:
                behavior = sample.rollout_log_probs[place]
                assert behavior == pytest.approx(score[version][place], abs=FP32_LOG_PROB)
            value = stored[place]
            assert value is not None or current - version < 2, "old enough to need it"
            if value is not None:
                assert value == pytest.approx(score[version + 1][place], abs=FP32_LOG_PROB)
    return ages


def test_data_parallel_ranks_share_the_recompute_to_the_bit(tmp_path: Path, warm: Path, segment_wise: str) -> None:
    """Whatever their number every batch holds the same; each of them scores about its part of the batches."""
    found, shares = {}, {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        ranks = f"--context-parallel-size 2 --data-parallel-size {size}"
        args = settings(f"{segment_wise} {ranks}", folder, warm)
        assert launch(args.world_size, lambda args=args: recompute_a_pool(args)) == 0
        found[size] = torch.load(folder / "recomputed.pt")
        shares[size] = {path.name: torch.load(path) for path in sorted(folder.glob("batches-*"))}
    assert len(found[1]) == 24 and all(len(values) == 9 and None not in values for values in found[1])
    assert same_bytes([torch.tensor(one) for one in found[2]], [torch.tensor(one) for one in found[1]])
    (whole,) = {tuple(sizes) for sizes in shares[1].values()}
    assert len(whole) > 4
    for path, sizes in shares[2].items():
        assert tuple(sizes) in (whole[0::2], whole[1::2]), path
    assert len({tuple(sizes) for sizes in shares[2].values()}) == 2


def recompute_a_pool(args: Namespace) -> None:
    """Score responses of many lengths; leave what was stored, and the sizes of the batches of each rank."""
    loop = Loop(args, initialize(args.tensor_model_parallel_size, args.context_parallel_size))
    drawn, pool, rank = random.Random(3), Pool(), torch.distributed.get_rank()
    for _ in range(24):
        prompt = tuple(drawn.choices(range(10), k=drawn.randint(2, 20)))
        pool.add(Response(prompt).append(drawn.choices(range(10), k=9), [-1.0] * 9, 3))
    sizes, log_probs = [], loop.trainer.log_probs

    def noted(data: dict[str, Any], micro_batch_size: int | None = None) -> list[torch.Tensor]:
        assert micro_batch_size == len(data["tokens"]), "one forward pass"
        sizes.append(sum(len(one) for one in data["tokens"]))
        return log_probs(data, micro_batch_size)

    loop.trainer.log_probs = noted
    scoring = Scoring(loop.trainer, loop.state)
    with scoring.serving():
        if rank == 0:
            recompute(pool, 4, 60, scoring, ranks=loop.state.effective_dp.size)
    torch.save(sizes, Path(args.output) / f"batches-{rank}")
    if rank == 0:
        torch.save([one.recomputed for one in pool.snapshot().values()], Path(args.output) / "recomputed.pt")
    loop.close()


def ages(row: dict[str, Any]) -> list[int]:
    prefix = "staleness/tokens/age_"
    return [int(name.removeprefix(prefix)) for name in row if name.startswith(prefix) and row[name]]


# --- interrupted, resumed --------------------------------------------------------------------------------------


def long_run(flags: str, output: Path) -> None:
    """The command, with a run without an end in sight, in a process group of its own; leaves what it says."""
    os.setsid()
    sys.stderr = (output / "stderr").open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    arguments.SMOKE["num_rollout"] = 100000
    sys.argv = ["lab.host", *f"--smoke --quiet --output {output} --save {output} {flags}".split()]
    sys.exit(main())


def wait_for(path: Path, lines: int, limit_s: float = 180.0) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline, f"{path} did not grow to {lines} lines"
        time.sleep(0.05)


def test_interrupted_by_ctrl_c_it_leaves_complete_files_and_no_process(tmp_path: Path, warm: Path) -> None:
    """Sent to the whole foreground group, as a terminal sends it."""
    flags = f"--async --rollout-step-seconds 0.01 --context-parallel-size 2 --warmup-cache {warm}"
    process = multiprocessing.get_context("fork").Process(target=long_run, args=(flags, tmp_path))
    process.start()
    assert process.pid is not None
    try:
        wait_for(tmp_path / "metrics.jsonl", lines=3)
        os.killpg(process.pid, signal.SIGINT)
        process.join(timeout=120)
    finally:
        process.kill()
    assert process.exitcode == 130
    assert "interrupted" in (said := (tmp_path / "stderr").read_text()) and "Traceback" not in said
    assert not group(process.pid)
    rows = records(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["rollouts"] == len(rows)
    assert summary["behav_imp_weight/var/segment_wise"] >= 0
    assert (tmp_path / "curves.png").stat().st_size > 0
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["next_rollout"] == len(rows) == rows[-1]["rollout"] + 1


def group(leader: int) -> dict[int, str]:
    """The processes of a group that run, zombies left out, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(pgrp) == leader and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def test_across_a_resume_no_sample_is_lost_or_counted_twice(tmp_path: Path, warm: Path) -> None:
    """With weights that stand still all samples are those of the synchronous run; what was under way has no token of
    the versions before the checkpoint.
    """
    still = f"--lr 0 --rollout-weights fp32 {DUMP}"
    synchronous, resumed = tmp_path / "synchronous", tmp_path / "resumed"
    assert run(still, synchronous, warm, rollouts=5) == 0
    pace = f"{still} --async --max-head-offpolicyness 2 --rollout-steps-per-update 2 --save {resumed}"
    interrupted = f"--rollout-data-postprocess-path {__name__}.interrupt_at_rollout_1"
    assert run(f"{pace} {interrupted}", resumed, warm, rollouts=5) == 130
    assert [row["rollout"] for row in records(resumed)] == [0, 1], "two rollouts more were under way"
    assert run(f"{pace} --load {resumed}", resumed, warm, rollouts=5) == 0
    assert [row["rollout"] for row in records(resumed)] == [0, 1, 2, 3, 4]
    expected, found = dumps(synchronous), dumps(resumed)
    assert expected.keys() == found.keys() and len(found) == 5
    for name, data in expected.items():
        assert same_bytes(found[name]["tokens"], data["tokens"]) and found[name]["rewards"] == data["rewards"]
    versions = {name: torch.cat(data["output_versions"]) for name, data in found.items()}
    assert [int(versions[f"rollout-{rollout}-0.pt"].min()) for rollout in range(5)] == [0, 0, 2, 2, 2]


def interrupt_at_rollout_1(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """A --rollout-data-postprocess-path hook: dumps, and at rollout 1 does what Ctrl-C does."""
    dump(args, rollout_id, rollout_data)
    if rollout_id == 1:
        os.kill(os.getpid(), signal.SIGINT)


# --- what is recorded -----------------------------------------------------------------------------------------


def test_log_and_summary_hold_both_variances_by_age(tmp_path: Path, warm: Path, segment_wise: str) -> None:
    pace = "--async --max-head-offpolicyness 3 --rollout-steps-per-update 3"
    assert run(f"{segment_wise} {pace}", tmp_path, warm, rollouts=6) == 0
    rows, summary = records(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    last = rows[-1]
    for name in ("avg", "std", "min", "max", "ess", "var/segment_wise", "var/standard"):
        assert {f"behav_imp_weight/{name}", f"behav_imp_weight/{name}/age_2"} <= last.keys()
    assert {"behav_kl/avg", "behav_kl/avg/age_1", "recompute/seconds", "loglinear/error/rms/age_2"} <= last.keys()
    assert last["staleness/tokens"] == sum(last[f"staleness/tokens/age_{age}"] for age in ages(last))
    assert last["staleness/unknown"] == 0
    assert 0 < summary["recompute/share"] < 1 and summary["recompute/tokens"] > 0
    for age in (2, 3):
        wise, standard = (summary[f"behav_imp_weight/var/{kind}/age_{age}"] for kind in ("segment_wise", "standard"))
        assert 0 < wise < standard
        assert summary[f"recompute/seconds/age_{age}"] > 0
    name = "behav_imp_weight/var/standard"
    tokens = [row["staleness/tokens"] for row in rows]
    mean = sum(row[name] * count for row, count in zip(rows, tokens, strict=True)) / sum(tokens)
    assert summary[name] == pytest.approx(mean)
    assert summary["behav_imp_weight/var/segment_wise/age_1"] == summary[f"{name}/age_1"]


def test_switched_off_nothing_is_recomputed_and_the_standard_weights_are_measured(tmp_path: Path, warm: Path) -> None:
    config = configured(tmp_path / "mis.yaml", "{segment_wise: {enabled: false}}")
    assert run(f"{LOSS_HOOK} {config} --async --max-head-offpolicyness 2", tmp_path, warm, rollouts=4) == 0
    names = {name for row in records(tmp_path) for name in row}
    assert not [name for name in names if name.startswith(("recompute", "loglinear"))]
    assert {"behav_imp_weight/avg", "behav_imp_weight/std/age_2", "behav_imp_weight/var/standard"} <= names
    assert "behav_imp_weight/var/segment_wise" not in names
    assert "staleness/tokens/age_2" in names, "ages are of the rollout, not of its weights"


def test_ages_share_the_columns_of_the_weights() -> None:
    """What is far behind is counted once, under the name that its weights have."""
    responses = [Response((1,)).append([2, 3], [-1.0, -1.0], 0).append([4], [-1.0], 3)]
    found = token_ages(18, responses, {})
    assert found == {"staleness/tokens/age_15": 1, f"staleness/tokens/{COLUMNS[-2]}": 2, "stale_cache_tokens": 0}
    assert COLUMNS[-2] == "age_16_up"


def test_the_summary_weighs_by_tokens_and_skips_what_is_missing() -> None:
    rows = [
        {"behav_kl/avg/age_2": 1.0, "staleness/tokens/age_2": 10, "seconds": 2.0, "recompute/seconds": 1.0},
        {"behav_kl/avg/age_2": None, "staleness/tokens/age_2": 5, "seconds": 2.0},
        {"behav_kl/avg/age_2": 4.0, "staleness/tokens/age_2": 20, "seconds": 4.0, "recompute/seconds": 1.0},
    ]
    found = asynchronous_summary(rows)
    assert found["behav_kl/avg/age_2"] == pytest.approx(3.0)
    assert found["staleness/tokens/age_2"] == 35
    assert (found["recompute/seconds"], found["recompute/share"]) == (2.0, 0.25)
    assert asynchronous_summary([{"rollout": 0, "seconds": 1.0, "k3_kl": 0.1}]) == {}, "of a synchronous run"
    assert "behav_kl/avg" not in report.summarize([{"rollout": 0, "seconds": 1.0}])


# --- errors ---------------------------------------------------------------------------------------------------


NOTES = "MIS_TEST_HOOK_NOTES"


def note(point: str) -> None:
    with open(os.environ[NOTES], "a", encoding="utf-8") as file:
        file.write(f"{point}\n")


POINTS = ("pre_pause", "post_pause", "pre_resume", "post_resume")
note_pre_pause, note_post_pause, note_pre_resume, note_post_resume = (partial(note, x) for x in POINTS)


def broken() -> None:
    raise RuntimeError("no disk")


def test_hooks_of_the_user_run_around_every_update(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, and two of one, by their dotted path."""
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    paths = [f"--{point.replace('_', '-')}-hook-path {__name__}.note_{point}" for point in (*POINTS, "pre_pause")]
    assert run(f"--async --max-concurrent-rollouts 3 {' '.join(paths)}", tmp_path, warm) == 0
    once = ["pre_pause", *POINTS]
    found = (tmp_path / "notes").read_text().split()
    assert len(found) >= 2 * len(once) and found == once * (len(found) // len(once))


def test_a_hook_of_the_user_that_raises_ends_the_run_by_its_name(
    tmp_path: Path, warm: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run(f"--async --post-resume-hook-path {__name__}.broken", tmp_path, warm) != 0
    assert f"post_resume hook {__name__}.broken raised RuntimeError: no disk" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_concurrent_rollouts: 4", {"max_concurrent_rollouts": 4}),
        ("pre_pause_hook_path: os.getpid", {"pre_pause_hook_path": "os.getpid"}),
        ("max_head_offpolicyness: 4", {"max_head_offpolicyness": 4}),
        # AReaL's block counts places in prompts, each with its samples.
        ("rollout: {max_head_offpolicyness: 4, max_concurrent_rollouts: 2}",
         {"max_head_offpolicyness": 4, "max_concurrent_rollouts": 16}),
    ],
)  # fmt: skip
def test_settings_may_stand_in_the_yaml(text: str, said: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "async.yaml").write_text(text)
    words = f"--async --n-samples-per-prompt 8 --custom-config-path {tmp_path / 'async.yaml'}"
    assert said.items() <= vars(parse_args(words.split())).items()

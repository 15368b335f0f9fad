"""The recorder: what it adds up, when it reads, what it says, and that it neither waits nor grows."""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slope_simulation as simulation
import stand_in_hosts
import torch
import torch.distributed as dist
from batches import Batch, make_batch, ratio_batch
from launch import run_ranks
from stand_in_hosts import LAYOUTS
from test_partials import corrected

from lab import tallies
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.errors import ConfigError, MisError
from mis_plugins.hosts import tracking
from mis_plugins.hosts.batch import HostBatch
from mis_plugins.hosts.rank_agreement import can_add_up
from mis_plugins.hosts.step_report import Recorded, Recorder
from mis_plugins.metrics.partials import partials, watch
from mis_plugins.metrics.sequences import multiplies
from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.packing.ragged import Ranks

ARGS = SimpleNamespace(rollout_batch_size=4, n_samples_per_prompt=4, global_batch_size=8)
EVERYTHING = {"weight": {"upper": 2.0}, "metrics": "all"}
VETO = {"weight": None, "reject": [{"over": "min", "lower": 0.1}]}


def micro_batch(ratios: list[list[float]], config: dict) -> Correction:
    return corrected(ratio_batch(ratios), from_mapping(config))


def in_steps(*steps: tuple[tuple[int, int], Correction], loss: torch.Tensor | None = None) -> None:
    """A run of one micro-batch a step, each with the number of its rollout and its own, reported to the last."""
    recorder = Recorder()
    for number, correction in steps:
        recorder.report(ARGS, *number)
        recorder.record(correction, loss)
    recorder.flush(ARGS)


def test_threads_add_up_all_their_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that adds while another one does would lose the other's micro-batch."""
    recorder, merge = Recorder(step=(0, 0)), Recorded.merge

    def slow(self: Recorded, other: Recorded) -> Recorded:
        time.sleep(0.01)
        return merge(self, other)

    monkeypatch.setattr(Recorded, "merge", slow)
    each = micro_batch([[1.0, 2.0]], EVERYTHING)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(recorder.record, [each] * 8))
    (recorded,) = recorder.pending.values()
    assert recorded.sums["micro_batches"] == 8 and recorded.sums["valid"] == 16


@pytest.mark.parametrize("take", [lambda x: x.report(ARGS, 0, 1), lambda x: x.report(ARGS, 0, 0), Recorder.at_exit])
def test_a_report_waits_for_a_thread_that_adds(take: Callable[[Recorder], None]) -> None:
    """A report that took the records while a thread adds one would have the step after it count them again."""
    recorder = Recorder(step=(0, 0), args=ARGS)
    recorder.record(micro_batch([[1.0, 2.0]], EVERYTHING))
    with ThreadPoolExecutor(1) as threads:
        with recorder.lock:
            taken = threads.submit(take, recorder)
            time.sleep(0.05)
            assert recorder.pending and not taken.done()
        taken.result()
    assert not recorder.pending


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, float]]:
    """What slime's tracking gets."""
    return stand_in_hosts.load(LAYOUTS["slime"], monkeypatch).logged


# ------------------------------------------------------------------------------------------------------------- steps


def test_a_step_is_reported_at_the_next(tracked: list[Mapping[str, float]]):
    """Both micro-batches of it, under its own number, in the host's tracking."""
    recorder = Recorder()
    recorder.report(ARGS, 3, 1)
    recorder.record(micro_batch([[1.0, 2.0]], EVERYTHING), torch.ones(2))
    recorder.record(micro_batch([[4.0]], EVERYTHING), torch.ones(1))
    assert tracked == []
    recorder.report(ARGS, 4, 0)
    (logged,) = tracked
    assert logged["train/step"] == 3 * 2 + 1
    assert logged["train/mis_step/tokens"] == 3.0
    assert logged["train/mis_step/ratio_max"] == pytest.approx(4.0)
    assert logged["train/mis_step/weight_max"] == 2.0
    assert logged["train/mis_step/loss_original_denominator"] == pytest.approx(5 / 3)


BOUNDED = ("ratio", "k1", "k2", "k3", "binary_kl", "abs_prob_diff")
LOOKED_AT = [
    {"weight": None, "reject": [{"statistic": name, "over": over, "upper": 0.5} | unit for name in BOUNDED]}
    for over in ("token", "sum", "mean", "min", "max")
    for unit in ({"unit": "sequence"}, {"unit": "segment"})[: 1 + (over != "token")]
]
BOUNDING = [{"weight": {"level": level, "bound": "clip"}} for level in ("token", "segment", "sequence", "geometric")]
LOWEST = torch.finfo(torch.float32).min  # engines clamp -inf to it


@pytest.mark.parametrize("value", [-800.0, -1e19, -1e30, LOWEST])
@pytest.mark.parametrize("side", ["proximal", "behavior"])
@pytest.mark.parametrize("config", BOUNDING + LOOKED_AT, ids=str)
def test_no_log_prob_is_too_small_for_a_step(value: float, side: str, config: dict, tracked: list[Mapping[str, float]]):
    """e^800 is no float, nor is the square of -1e30: what cannot be shown must not stop the job either."""
    batch = ratio_batch([[0.5, 3.0, 0.7], [1.2, 1.1]])
    getattr(batch, side)[0][2] = value
    in_steps(((0, 0), corrected(batch, from_mapping(config | {"metrics": "all"}))), loss=torch.ones(5))
    assert [name for name, value in tracked[0].items() if not math.isfinite(value)] == []


@pytest.mark.parametrize("metrics", ["all", "full"])
@pytest.mark.parametrize("has_tracker", [True, False])
def test_the_metrics_of_all_go_to_the_log_and_to_the_hosts_tracking(
    has_tracker: bool, metrics: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
):
    """The hosts' tracking writes nothing where neither wandb nor tensorboard is on; their log has every step."""
    tracked = request.getfixturevalue("tracked") if has_tracker else []
    recorder = Recorder()
    with caplog.at_level(logging.INFO, "mis_plugins"):
        recorder.report(ARGS, 3, 1)
        recorder.record(micro_batch([[1.0]], EVERYTHING | {"metrics": metrics}))
        recorder.report(ARGS, 4, 0)
    told = [x.getMessage() for x in caplog.records if x.levelno == logging.INFO]
    assert [text.startswith("step 7: {") and "'train/mis_step/tokens': 1.0" in text for text in told] == (
        [True] if metrics == "all" else []
    )
    assert [f"step 7: {row}" for row in tracked] == (told if has_tracker else [])


def test_a_recompute_inside_a_backward_adds_nothing(tracked: list[Mapping[str, float]]):
    recorder, again = Recorder(), micro_batch([[1.0]], EVERYTHING)

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            recorder.record(again)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            recorder.record(again)
            return grad

    recorder.report(ARGS, 0, 0)
    Recomputed.apply(torch.ones(1, requires_grad=True)).sum().backward()
    recorder.flush(ARGS)
    assert [row["train/mis_step/tokens"] for row in tracked] == [1.0]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (vars(ARGS), 2),
        ({"num_steps_per_rollout": 5, "global_batch_size": 8}, 5),
        ({}, 1),
        (vars(ARGS) | {"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 2}, 1),
    ],
)
def test_the_number_of_a_step_is_the_hosts(given: dict, steps: int):
    """Miles's --use-dynamic-global-batch-size makes one step of a rollout, whatever the other flags say."""
    assert tracking.steps_per_rollout(SimpleNamespace(**given)) == steps


def test_the_last_step_of_a_rollout_tells_how_many_it_had(tracked: list[Mapping[str, float]]):
    """A rollout function of the user's may return more samples than the flags promise, or fewer."""
    in_steps(*((number, micro_batch([[1.0]], EVERYTHING)) for number in [(3, 1), (3, 2), (4, 0), (5, 0)]))
    promised, three_steps, one_step, at_the_end = 3 * 2 + 1, 3 * 3 + 2, 4 * 1, 5 * 2
    assert [row["train/step"] for row in tracked] == [promised, three_steps, one_step, at_the_end]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_attempt_that_the_host_repeats_is_forgotten(
    lost: int, tracked: list[Mapping[str, float]], caplog: pytest.LogCaptureFixture
):
    """Miles repeats a step where a cell was lost, or its rollout, under the number that it had; the last one counts."""
    recorder, config = Recorder(), EVERYTHING | {"reject": VETO["reject"], "on_all_rejected": "raise"}
    for step, ratio in ((lost, 0.01), (0, 2.0)):
        recorder.report(ARGS, 0, step)
        recorder.record(micro_batch([[ratio]], config))
    recorder.report(ARGS, 1, 0)
    assert [row["train/mis_step/ratio_mean"] for row in tracked] == [pytest.approx(2.0)]
    assert "was rejected" not in caplog.text


# ---------------------------------------------------------------------------------------------------------- warnings


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def run_steps(config: dict, *steps: list[list[float]]) -> None:
    in_steps(*(((i, 0), micro_batch(ratios, config)) for i, ratios in enumerate(steps)))


FEW, MOST, LONG = [[1.0], [0.01] * 19], [[1.0], [1.0]], [[1.001] * 2000]
PRODUCTS = "|sum of log ratios| has a mean of 2.00 over {} of them; for 0.0% it is above 20"
# The config, the steps, what is looked for, and how often it is told.
TOLD: dict[str, tuple[dict, list[list[list[float]]], str, int]] = {
    "all rejected, every time": (VETO, [[[0.01], [0.02]], [[1.0]], [[0.01]]],
                                 "every sequence of 1 of 1 micro-batches was rejected", 2),
    "a weight alone rejects nothing": ({"weight": {"upper": 2.0}}, [[[0.01], [3.0]]], "rejected", 0),
    "few kept, when that begins": (VETO, [FEW, FEW, MOST, FEW],
                                   "5.0% of 20 tokens are kept, less than mis.keep_floor: 10%", 2),
    "a keep floor of zero": (VETO | {"keep_floor": 0.0}, [FEW], "are kept", 0),
    "products of sequences, once": ({"weight": {"level": "sequence"}}, [LONG, LONG], PRODUCTS.format(1), 1),
    "products of segments": ({"weight": {"level": "segment"}}, [LONG], PRODUCTS.format(1), 1),
    "above and below 1": ({"weight": {"level": "sequence"}}, [[*LONG, [1 / 1.001] * 2000]], PRODUCTS.format(2), 1),
    "a rule over the product": ({"weight": None, "reject": [{"over": "sum", "upper": 5.0}]}, [[[1.02] * 2000]],
                                "for 100.0% it is above 20", 1),
    **{f"no product at level {level}": ({"weight": {"level": level}}, [[[1.02] * 2000]], "multiplied", 0)
       for level in ("geometric", "token", "segment_geometric")},
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_a_warning_is_told_as_often_as_it_helps(name: str, caplog: pytest.LogCaptureFixture):
    config, steps, words, times = TOLD[name]
    run_steps(config, *steps)
    assert said(caplog, words) == times
    found = [record.getMessage() for record in caplog.records if words in record.getMessage()]
    assert all(re.match(r"rollout \d, step 0: ", text) for text in found)


@pytest.mark.parametrize("metrics", ["full", "all"])
@pytest.mark.parametrize(("weight", "weighs"), [({"upper": 2.0}, True), (None, False)])
def test_log_probs_that_are_no_numbers_are_told_when_that_begins(
    caplog: pytest.LogCaptureFixture, metrics: str, weight: dict | None, weighs: bool
):
    config = {"weight": weight, "metrics": metrics}
    none, all_of_them, sound = [[math.nan, 1.0]], [[math.nan] * 3], [[1.0, 1.0]]
    run_steps(config, none, none, sound, all_of_them)
    assert said(caplog, "1 of 2 tokens have a log-prob that is NaN or infinite") == 1
    assert said(caplog, "3 of 3 tokens have a log-prob that is NaN or infinite") == 1
    assert said(caplog, "A token without a finite ratio weighs 0") == 2 * weighs


TOKENS = {"over": "token", "upper": 10.0}
PRODUCT = {"over": "sum", "upper": 1e6}


@pytest.mark.parametrize("metrics", ["full", "all"])
@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({"reject": [TOKENS, PRODUCT | {"aggregate": "kept"}]}, False),
        ({"reject": [TOKENS, PRODUCT]}, True),
        ({"reject": [TOKENS, PRODUCT], "aggregate": "kept"}, False),
        ({"reject": [TOKENS, {"over": "mean", "upper": 9}, PRODUCT | {"aggregate": "valid"}],
          "aggregate": "kept"}, True),
        ({"reject": [TOKENS, PRODUCT | {"aggregate": "kept"}, PRODUCT | {"lower": 1e-6}]}, True),
        ({"reject": [TOKENS, PRODUCT | {"aggregate": "kept", "unit": "segment"}]}, False),
        ({"reject": [TOKENS, PRODUCT | {"aggregate": "kept", "unit": "segment"}],
          "weight": {"level": "sequence"}}, True),
    ],
)  # fmt: skip
def test_products_are_of_the_tokens_that_the_rule_looks_at(
    caplog: pytest.LogCaptureFixture, config: dict, warned: bool, metrics: str
):
    """One token of ratio 100, which a rule over tokens drops, beside one of 1."""
    run_steps({"weight": None, "metrics": metrics} | config, [[100.0, 1.0]])
    assert said(caplog, "|sum of log ratios| has a mean of 4.61 over 1 of them") == warned
    assert said(caplog, "|sum of log ratios|") == warned


@pytest.mark.parametrize(
    ("config", "product"),
    [
        ({"weight": {"level": "token"}}, None),
        ({"weight": {"level": "segment"}}, ("segment", "valid")),
        ({"weight": {"level": "sequence"}, "reject": [TOKENS], "aggregate": "kept"}, ("sequence", "kept")),
        ({"weight": None, "reject": [TOKENS, PRODUCT | {"unit": "segment"}, PRODUCT | {"aggregate": "kept"}]},
         ("sequence", "kept")),
    ],
)  # fmt: skip
def test_of_several_products_the_longest_is_watched(config: dict, product: tuple[str, str] | None):
    assert multiplies(from_mapping(config)) == product


@cache
def scaled_batch() -> Batch:
    """One sequence of an engine whose log-probs were divided by a temperature."""
    proximal, behavior = simulation.simulate("mixed", simulation.Error(temperature=0.8))
    return Batch([proximal], [behavior], [torch.ones(len(proximal), dtype=torch.int32)], [1])


@pytest.mark.parametrize(("metrics", "started", "times"), [("all", (3, 1), 1), ("full", (10, 0), 1),
                                                           ("full", (10, 1), 0), ("full", (3, 0), 0),
                                                           ("core", (10, 0), 0)])  # fmt: skip
@pytest.mark.parametrize("weight", [{"upper": 2.0}, None])
def test_scaled_log_probs_are_told_once(
    caplog: pytest.LogCaptureFixture, weight: dict | None, metrics: str, started: tuple[int, int], times: int
):
    """Under `all` at any step, under `full` at the first of every tenth rollout, be it corrected or only watched."""
    correction = corrected(scaled_batch(), from_mapping({"weight": weight, "metrics": metrics}))
    in_steps((started, correction), (started, correction))
    assert said(caplog, "the rollout engine's log-probs alone were divided by a temperature of 0.9") == times


# --------------------------------------------------------------------------------------------------- circuit breaker


def test_an_exit_is_asked_for_once(monkeypatch: pytest.MonkeyPatch):
    """By the step hook or the rollout-data hook, whichever comes first; each further time would report once more."""
    asked: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: asked.append(call))
    for first in ("report", "check_rollout"):
        recorder = Recorder()
        for rollout in range(3):
            getattr(recorder, first)(ARGS, rollout, *((0,) if first == "report" else (Ranks(),)))
        assert [call[1]() for call in asked] == [recorder]
        asked.clear()


def test_raise_comes_at_the_next_step():
    recorder, config = Recorder(), VETO | {"on_all_rejected": "raise"}
    recorder.report(ARGS, 7, 2)
    recorder.record(micro_batch([[1.0]], config))
    recorder.record(micro_batch([[0.01]], config))
    with pytest.raises(MisError, match=r"every sequence of 1 of 2 micro-batches was rejected .*rollout 7, step 2"):
        recorder.report(ARGS, 7, 3)
    recorder.report(ARGS, 7, 4)  # it is told once
    with pytest.raises(ConfigError, match=r"mis\.on_all_rejected: raise needs --custom-megatron-before-train-step"):
        Recorder().record(micro_batch([[1.0]], config))


# -------------------------------------------------------------------------------------------------- without the hook


def test_without_the_hook_warnings_come_one_late_and_nothing_grows(caplog: pytest.LogCaptureFixture):
    recorder, one = Recorder(), micro_batch([[0.01]], VETO)
    recorder.record(one)
    assert said(caplog, "was rejected") == 0
    for count in range(1, 4):
        recorder.record(one)
        assert said(caplog, "every sequence of 1 of 1 micro-batches was rejected") == count
        assert not recorder.pending and recorder.copy is not None


def test_without_the_hook_a_copy_that_is_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    """What is recorded meanwhile adds up, in as much memory as one."""
    recorder, one = Recorder(), micro_batch([[0.01]], VETO)
    recorder.record(one)
    monkeypatch.setattr("mis_plugins.hosts.step_report.Arrival.ready", False)
    for _ in range(3):
        recorder.record(one)
    (pending,) = recorder.pending.values()
    assert pending.partials.named_sums["micro_batches"] == 3.0
    assert pending.partials.names == watch(one).names


def test_without_the_hook_metrics_all_says_what_is_missing(caplog: pytest.LogCaptureFixture):
    recorder = Recorder()
    recorder.record(micro_batch([[1.0]], EVERYTHING))
    assert said(caplog, "mis.metrics: all needs --custom-megatron-before-train-step-hook-path") == 1
    assert recorder.copy is not None and "histograms" not in recorder.copy.recorded.partials.added


def test_metrics_alone_leave_samples_to_count_and_without_metrics_nothing():
    recorder = Recorder()
    recorder.record(micro_batch([[1.0]], {"weight": None, "metrics": "none"}))
    assert not recorder.pending and recorder.copy is None
    recorder.record(micro_batch([[1.0]], {"weight": None}))
    assert recorder.copy is not None
    counts = {"valid", "kept", "usable", "micro_batches", "all_rejected", "sequences", "any_valid"}
    assert set(recorder.copy.wait().sums) == counts


# -------------------------------------------------------------------------------------------------------------- cost

CONFIGS = {
    "mis": {"weight": {"upper": 2.0, "normalize": {}}, "reject": [{"over": "token", "lower": 0.5}, {"over": "min",
            "lower": 1e-4}]},
    "geometric": {"weight": {"upper": 2.0}, "reject": [{"over": "mean", "lower": 0.99, "upper": 1.01}]},
    "sequence": {"weight": {"level": "sequence"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_operators_do_not_grow_with_the_sequences_and_none_waits(name: str):
    counts = []
    for sequences in (2, 50):
        c = micro_batch([[1.0, 1.5, 0.7]] * sequences, CONFIGS[name])
        loss, ages = torch.ones(3 * sequences), torch.zeros(3 * sequences, dtype=torch.long)
        c.keep  # noqa: B018  (the hook has made it already)
        asked = partial(partials, c, loss, ages), partial(watch, c), partial(watch, c, relates=True)
        found = list(map(tallies.tally, asked))
        assert not any(tally.waits or tally.copies or tally.collectives for tally in found)
        counts.append([tally.operators for tally in found])
    assert counts[0] == counts[1]
    assert counts[0][0] <= 190, "of the 261 of metrics: all, the rest being the hook's own"
    assert counts[0][1] <= 10, "beside those of metrics: full"
    assert counts[0][2] <= counts[0][1] + 18, "the same, in one step of ten rollouts"


# ------------------------------------------------------------------------------------------------------------- ranks


def corrected_on(batch: Batch, cp: int, cp_rank: int, ranks: Ranks, config: dict) -> Correction:
    """The correction of a rank's part of a batch."""
    local, _ = batch.shard(cp, cp_rank, None)
    layout = (
        whole(batch.response_lengths) if cp == 1 else zigzag(batch.total_lengths, batch.response_lengths, cp, cp_rank)
    )
    host = HostBatch(local.proximal, local.behavior, batch.loss_masks, layout, ranks)
    return correct(host.proximal, host.behavior, host.place(), from_mapping(config))


def of_process() -> tuple[list[dict], Ranks, Recorder]:
    """What the host's tracking gets in this process, the process's groups, and a recorder."""
    from megatron.core import parallel_state as mpu

    def several(group: Any) -> dist.ProcessGroup | None:
        return group if group.size() > 1 else None

    logged: list[Any] = stand_in_hosts.load(LAYOUTS["slime"], pytest.MonkeyPatch()).logged
    ranks = Ranks(several(mpu.get_context_parallel_group()), several(mpu.get_data_parallel_group()))
    return logged, ranks, Recorder()


def of_rank(rank: int, records: Sequence[tuple[Batch, dict]], cp: int) -> tuple[list[dict], str]:
    """One step of a rank, which records these batches under these configs: what is tracked, and what was raised."""
    logged, ranks, recorder = of_process()
    recorder.report(ARGS, 0, 0, ranks)
    for batch, config in records:
        recorder.record(corrected_on(batch, cp, rank % cp, ranks, config))
    try:
        recorder.flush(ARGS, ranks)
    except MisError as error:
        return logged, f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return logged, ""


RANK_BATCHES = [
    make_batch(
        [([-1.0, -2.0, -0.5, -1.5, -0.1], [-1.1, -1.0, -0.5, -2.0, -0.1], [1, 1, 0, 1, 1]), ([-3.0], [-2.0], [1])]
    ),
    make_batch([([-0.2, -0.4, -0.6], [-0.3, -0.1, -0.9], [1, 1, 1]), ([-1.0] * 4, [-1.0] * 4, [0, 0, 0, 0])]),
]


def test_ranks_report_what_one_process_does(tmp_path: Path, tracked: list[Mapping[str, float]]):
    """Two data-parallel ranks times two context-parallel ones."""
    config = {"weight": {"upper": 1.5}, "reject": [{"over": "mean", "lower": 0.5, "upper": 2.0}], "metrics": "all"}
    found = run_ranks(4, 2, lambda rank: of_rank(rank, [(RANK_BATCHES[rank // 2], config)], 2), tmp_path)
    assert [len(logged) for logged, _ in found] == [1, 0, 0, 0]
    alone = Recorder()
    alone.report(ARGS, 0, 0)
    for batch in RANK_BATCHES:
        alone.record(corrected(batch, from_mapping(config)))
    alone.flush(ARGS)
    assert found[0][0][0] == pytest.approx(tracked[0], rel=1e-12, abs=1e-12)
    assert "train/mis_step/turn_2_kl_k3" in tracked[0]


def test_of_ranks_that_hold_the_same_sequences_one_counts_them():
    """The others add their tokens alone."""
    c = micro_batch([[0.01, 1.0], [1.0, 1.2]], VETO | {"weight": {"level": "sequence"}})
    first, other = (watch(c, counts_sequences=counts).named_sums for counts in (True, False))
    assert {name: value for name, value in other.items() if value} == {"valid": 4.0, "kept": 2.0, "usable": 4.0}
    assert first.items() >= {"valid": 4.0, "kept": 2.0, "micro_batches": 1.0, "product_count": 2.0}.items()


def test_every_rank_raises_for_one(tmp_path: Path):
    batches = [ratio_batch([[1.0, 1.0]]), ratio_batch([[0.01, 1.0]])]
    config = VETO | {"on_all_rejected": "raise", "metrics": "full"}
    found = run_ranks(4, 2, lambda rank: of_rank(rank, [(batches[rank // 2], config)], 2), tmp_path)
    assert all("every sequence of 1 of 2 micro-batches" in error for _, error in found)


def joined(rank: int, groups_changed: bool, on_all_rejected: str) -> tuple[list[dict], list[str]]:
    """Rank 1 is new in the second step; what the tracking got in two steps, and what was warned of or raised."""
    logged, ranks, recorder = of_process()
    words, handler = list[str](), logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("mis_plugins").addHandler(handler)
    config = VETO | {"metrics": "all", "on_all_rejected": on_all_rejected}

    def record(ratio: float, among: Ranks) -> None:
        recorder.record(corrected_on(ratio_batch([[ratio, 1.0]]), 1, 0, among, config))

    if rank == 0:
        recorder.step = (0, 0)  # of the rank that is lost by now
        record(0.01, Ranks() if groups_changed else ranks)
    try:
        recorder.report(ARGS, 1, 0, ranks)
    except MisError as error:
        words.append(f"raised: {error}")
    record(1.0 + rank, ranks)
    recorder.flush(ARGS, ranks)
    dist.barrier()
    return logged, words


@pytest.mark.parametrize(("groups_changed", "on_all_rejected"), [(False, "skip"), (True, "raise")])
def test_a_rank_that_joins_has_nothing_to_add(tmp_path: Path, groups_changed: bool, on_all_rejected: str):
    """The others report the step before it each for itself, and the next one all together."""
    work = partial(joined, groups_changed=groups_changed, on_all_rejected=on_all_rejected)
    (logged, words), (nothing, silence) = run_ranks(2, 1, work, tmp_path)
    assert [(row["train/step"], row["train/mis_step/tokens"]) for row in logged] == [(2, 4.0)]
    assert nothing == silence == []
    assert any("rollout 0, step 0, this rank: every sequence of 1 of 1 micro-batches" in x for x in words)
    assert any("rollout 0, step 0: the step's metrics are not logged" in x and "joined or left" in x for x in words)
    assert any("raised: " in x and "on this rank" in x for x in words) == (on_all_rejected == "raise")


def odd_one_out(rank: int) -> list[list[bool]]:
    """On a grid of two by two, in turn one has joined, or been moved; then all have two configs, or all are new."""
    _, ranks, _ = of_process()
    one, none, of_rank = [from_mapping(VETO)], list[CorrectionConfig](), [rank == odd for odd in range(4)]
    two = [*one, from_mapping(EVERYTHING)]
    return [
        [can_add_up(none if odd else one, not odd, True, ranks) for odd in of_rank],
        [can_add_up(one, True, not odd, ranks) for odd in of_rank],
        [can_add_up(two if rank else two[::-1], True, True, ranks), can_add_up(none, False, True, ranks)],
    ]


def test_what_one_rank_of_the_grid_knows_all_ranks_heed(tmp_path: Path):
    """Over both groups: neither alone reaches the rank that is of another sequence and holds another part of it."""
    assert run_ranks(4, 2, odd_one_out, tmp_path) == [[[False] * 4, [False] * 4, [True, True]]] * 4
    assert [can_add_up([], True, same, Ranks()) for same in (True, False)] == [True, False]


def test_ranks_that_corrected_differently_do_not_wait_for_each_other(tmp_path: Path):
    configs = [EVERYTHING, EVERYTHING | {"reject": VETO["reject"]}]
    work = lambda rank: of_rank(rank, [(ratio_batch([[1.0]]), configs[rank])], 1)  # noqa: E731
    for _, error in run_ranks(2, 1, work, tmp_path):
        said = "InputError: ranks corrected under different mis configs, this rank under [CorrectionConfig("
        assert error.startswith(said)


def test_two_configs_that_ranks_met_in_another_order_are_not_mixed(tmp_path: Path):
    """As micro-batches with rollout log-probs and without, which come as they come."""
    records = [(ratio_batch([[1.0] * n]), EVERYTHING | {"keep_floor": floor}) for n, floor in ((1, 0.1), (10, 0.2))]
    work = lambda rank: of_rank(rank, records[:: 1 - 2 * rank], 1)  # noqa: E731
    (first, _), (second, _) = run_ranks(2, 1, work, tmp_path)
    assert [row["train/mis_step/tokens"] for row in first] == [2.0, 20.0] and second == []


def test_two_configs_in_one_step(tracked: list[Mapping[str, float]]):
    """The second hides nothing of the first."""
    recorder = Recorder(step=(0, 0))
    strict = EVERYTHING | {"reject": [{"over": "mean", "upper": 0.01}], "on_all_rejected": "raise"}
    recorder.record(micro_batch([[1.0]], strict))
    recorder.record(micro_batch([[1.0]], EVERYTHING))
    with pytest.raises(MisError, match="every sequence of 1 of 1 micro-batches was rejected"):
        recorder.flush(ARGS)


# ------------------------------------------------------------------------------------------------------- lost ranks


class Plain(dist.ProcessGroup):
    """A group of torch's own, which tells no error. This many of its collectives succeed; then a rank is lost."""

    def __init__(self, succeed: int, aborts: bool = False):
        super().__init__(0, 2)  # type: ignore[call-arg]
        self.left, self.aborts = succeed, aborts

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> None:  # type: ignore[override]
        self.left -= 1
        if self.left < 0 and not self.aborts:
            raise RuntimeError("Connection closed by peer")
        if self.left < 0:
            tensors[0].fill_(7)


class Cells(Plain):
    """A group of torchft's, which tells its error; `rank()` is 0 in each cell."""

    def errored(self) -> Exception | None:
        return RuntimeError("aborted") if self.left < 0 else None


def lose_a_cell(config: dict, cells: Plain) -> None:
    """One step, at whose report a cell is lost."""
    recorder, ranks = Recorder(step=(0, 0)), Ranks(dp=cells)
    recorder.record(corrected_on(ratio_batch([[0.01, 1.0]]), 1, 0, ranks, config))
    recorder.report(ARGS, 1, 0, ranks)


@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("succeed", [0, 1, 2])
def test_where_a_rank_is_lost_the_others_report_alone(
    tracked: list[Mapping[str, float]], caplog: pytest.LogCaptureFixture, succeed: int, aborts: bool
):
    """At the first question, or in the sums, or in the maxima; on a GPU torchft aborts without an exception."""
    lose_a_cell(VETO | {"metrics": "all"}, Cells(succeed, aborts))
    assert tracked == []
    assert "rollout 0, step 0, this rank: every sequence of 1 of 1 micro-batches was rejected" in caplog.text
    said = "aborted" if aborts else "Connection closed by peer"
    assert f"the step's metrics are not logged, which takes all ranks: a rank was lost ({said})" in caplog.text


@pytest.mark.parametrize("succeed", [0, 1, 2])
def test_without_fault_tolerance_an_error_of_a_collective_is_raised(succeed: int):
    """This rank alone may have met it (no memory left, say), and going on would leave the others waiting for it."""
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        lose_a_cell(VETO | {"metrics": "all"}, Plain(succeed))


def test_where_no_rank_is_lost_they_report_together_and_a_survivor_raises_where_the_config_says_so(
    tracked: list[Mapping[str, float]],
):
    lose_a_cell(VETO | {"metrics": "all"}, Cells(3))
    assert len(tracked) == 1
    with pytest.raises(MisError, match="was rejected .*, in rollout 0, step 0, on this rank"):
        lose_a_cell(VETO | {"on_all_rejected": "raise", "metrics": "full"}, Cells(0))


@pytest.mark.parametrize(("cell", "tp", "cp"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_under_miles_one_rank_of_one_cell_logs(cell: int, tp: int, cp: int, monkeypatch: pytest.MonkeyPatch):
    host = stand_in_hosts.load(LAYOUTS["August"], monkeypatch)
    of_two = lambda rank, group=None: SimpleNamespace(rank=rank, size=2, group=group)  # noqa: E731
    vars(host.state).update(cp=of_two(cp), effective_dp=of_two(cell, Cells(3)), tp=of_two(tp))
    lose_a_cell(VETO | {"metrics": "all"}, Cells(3))
    assert len(host.logged) == ((cell, tp, cp) == (0, 0, 0))

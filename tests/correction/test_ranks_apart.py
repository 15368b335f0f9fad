"""One rank raises, dies or lags at each of the places where our hooks meet other ranks.

No other rank waits longer than the time-out of its group, and none answers otherwise than without the fault.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rollout_process
import stand_in_hosts
import test_baselines
import test_centered_hook
import test_resplit
import torch
from batches import host_args
from faults import LONGEST_S, Fault, Said, Started, judge, started
from launch import run_ranks, told
from rollout_process import drawn
from stand_in_hosts import LAYOUTS
from test_parallel import Case, correct_on_rank, random_batch
from test_recorder import ARGS, corrected_on
from test_versions_carried import carried
from test_versions_carried import rollout as rollout_of
from torch.distributed.distributed_c10d import _get_default_store

from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import InputError
from mis_plugins.hosts.rank_agreement import check_agreement, check_everywhere
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.hosts.versions import rollouts
from mis_plugins.packing.roll_call import together
from true_on_policy.hosts import watch, weights

AT_ONCE = 5  # cases whose ranks run beside each other: nearly all of their time they wait
RULES: dict[str, Any] = {"weight": {"level": "sequence", "upper": 1.4}, "reject": [{"over": "token", "upper": 1.7}]}


def case_of(normalize: dict[str, str], **more: Any) -> Case:
    """Two micro-batches, one a data-parallel rank, whose weights are divided by a mean."""
    config = {**RULES, "weight": {**RULES["weight"], "normalize": normalize}, **more}
    return Case(config, (random_batch(1), random_batch(2)))


def weighed(rank: int) -> Any:
    """The TIS hook: sums over sequences and over data-parallel ranks, M2PO, and the masks."""
    return correct_on_rank(case_of({"scope": "data_parallel", "over": "kept"}, m2_threshold=0.1), 2, None)


def of_a_rollout(rank: int) -> Any:
    """The rollout-data hook, which keeps the mean weight of the rollout, and the TIS hook after it."""
    return correct_on_rank(case_of({"scope": "rollout"}), 2, None)


def reported(rank: int) -> Any:
    """The step hook: what ranks recorded, added up."""
    ranks, recorder = mis.current(host_args()).parallel()[0], Recorder()
    recorder.report(ARGS, 0, 0, ranks)
    recorder.record(corrected_on(random_batch(rank // 2), 2, rank % 2, ranks, RULES | {"metrics": "core"}))
    recorder.flush(ARGS, ranks)


def scored(rank: int) -> Any:
    """The trainer that scores the waiting tokens: rank 0 asks for them, all ranks hand theirs to all."""
    patch = pytest.MonkeyPatch()
    with rollout_process.fresh(patch) as numbering:
        host = stand_in_hosts.load(LAYOUTS["slime"], patch)
        actor, kept = carried(host)
        waiting, actor.version = drawn(numbering, [1, 1]), 2
        kept.before_training(actor, 0, rollout_of(host, numbering, drawn(numbering, [2])))
        assert waiting is not None
        return [log_probs.tolist() for [one] in kept.scores._of.values() for log_probs in [one.log_probs]]


def rebased(rank: int) -> Any:
    """Baselines of groups, whose samples lie on both ranks."""
    whole = test_baselines.rollout([3.0, 0.0, 1.0, 1.0, 9.0, 2.0, 2.0, 0.0], {0, 4})
    data = {name: column[rank::2] for name, column in whole.items()}
    mis.count_samples(test_baselines.arguments("grpo"), 3, data)
    return data["advantages"]


def scored_twice(rank: int) -> Any:
    """The second log-prob pass of a rollout."""
    return test_resplit.of_rollout(stand_in_hosts.load(LAYOUTS["slime"], pytest.MonkeyPatch()))[0]


def centered(rank: int) -> Any:
    """The loss hook with score centering, over tensor- and context-parallel ranks."""
    return test_centered_hook.run(test_centered_hook.Batch(5), test_centered_hook.args(), 2, 2)[:2]


def proven(rank: int) -> Any:
    """The two ways in which `bitwise` meets other ranks."""
    return weights._on_rank_0(lambda: "told", ""), weights._shared(rank), watch._anywhere(rank == 1)


PLACES: dict[str, tuple[Callable[[int], Any], int, dict[str, int]]] = {
    "TIS hook": (weighed, 4, {"context_parallel_size": 2}),
    "rollout-data hook": (of_a_rollout, 4, {"context_parallel_size": 2}),
    "step hook": (reported, 4, {"context_parallel_size": 2}),
    "trainer that scores": (scored, 2, {}),
    "group_baseline": (rebased, 2, {}),
    "resplit_every": (scored_twice, 2, {}),
    "center": (centered, 4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "bitwise": (proven, 2, {}),
}
SHORT = ("TIS hook", "step hook", "trainer that scores")


def begun(place: str, fault: Fault) -> Started:
    work, world, sizes = PLACES[place]
    return started(world, work, fault, **sizes)


def same(first: Any, second: Any) -> bool:
    """Whether two answers are equal in every bit and word: tensors, and what holds them beside numbers and texts."""
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and torch.equal(first.nan_to_num(1e30), second.nan_to_num(1e30))
    return first == second or first != first and second != second


@pytest.mark.parametrize("place", SHORT)
def test_one_rank_raises_dies_or_lags_at_each_meeting(place: str) -> None:
    """The kinds take turns; `python -m lab.break_it --room ranks` draws place, kind, rank and meeting."""
    healthy = begun(place, Fault()).ended()
    assert all(isinstance(one, Said) and not one.error for one in healthy), healthy
    answers, meetings = [one.answer for one in healthy if one], healthy[1].met if healthy[1] else ()
    planned = [Fault(("raises", "dies", "lags")[at % 3], at=at) for at in range(len(meetings))]
    assert len(planned) > 3
    for first in range(0, len(planned), AT_ONCE):
        running = [begun(place, fault) for fault in planned[first : first + AT_ONCE]]
        for one in running:
            ends = judge(one.fault, one.ended(), answers, same)
            assert (ends == "answered") == (one.fault.kind == "lags"), one.fault


# -------------------------------------------------------------------------------- what a rank says, others hear at once


def failing(work: Callable[[], Any], fails: bool) -> Callable[[], Any]:
    def run() -> Any:
        if fails:
            raise InputError("planted")
        return work()

    return run


def of_a_subject(rank: int) -> list[str]:
    """One rank fails, all do, none does; in turn, on one store."""
    found = []
    for fails in (rank == 1, True, False):
        found.append(told(lambda fails=fails: together("subject", failing(lambda: None, fails))))
    return found


def test_the_others_hear_of_an_error_and_go_on(tmp_path: Path) -> None:
    quoted = "subject: rank 1: InputError: planted"
    assert run_ranks(3, 1, of_a_subject, tmp_path) == [
        [quoted, "planted", "no error"], ["planted", "planted", "no error"], [quoted, "planted", "no error"],
    ]  # fmt: skip


def of_a_trainer(rank: int) -> list[str]:
    """In turn: no notes on rank 1, nobody to ask on rank 0, tokens that nobody scored on rank 1, and all is well."""
    patch, found = pytest.MonkeyPatch(), []
    with rollout_process.fresh(patch) as numbering:
        host = stand_in_hosts.load(LAYOUTS["slime"], patch)
        actor, kept = carried(host)
        for turn in range(4):
            actor.version = 2
            waiting = drawn(numbering, [1, 1])
            data = rollout_of(host, numbering, drawn(numbering, [0 if turn == 2 and rank else 2]))
            if turn == 0 and rank:
                data.pop(host.layout.needs.notes)
            with pytest.MonkeyPatch.context() as here:
                if turn == 1:
                    here.setattr(rollouts, "waiting", lambda *_: failing(lambda: None, True)())
                found.append(told(lambda data=data, turn=turn: kept.before_training(actor, turn, data)))
            assert waiting is not None
    return found


def test_a_fault_of_one_trainer_is_told_on_all(tmp_path: Path) -> None:
    on_0, on_1 = run_ranks(2, 1, of_a_trainer, tmp_path)
    assert "none in this rollout" in on_1[0] and on_1[0] in on_0[0] and "notes of the samples: rank 1" in on_0[0]
    assert on_0[1] == "planted" and "asking which tokens wait: rank 0: InputError: planted" in on_1[1]
    assert "token 0: version 0" in on_1[2] and "columns: rank 1" in on_0[2]
    assert on_0[3] == on_1[3] == "no error"


# ------------------------------------------------------------------------------- other configs, other micro-batches


def of_a_grid(rank: int) -> list[str]:
    """Configs of the loss hook; what the step hook of another stage was given; a hook that rank 3 lacks."""
    _get_default_store().set_timeout(timedelta(seconds=1))
    config = from_mapping({**RULES, "weight": {"upper": 9.0 if rank == 3 else 2.0}})
    said = {"resplit_every": 2} if rank == 1 else None
    return [
        told(lambda: check_agreement(config, mis.current(host_args()).parallel()[0])),
        told(lambda: check_everywhere("report_step", said)),
        told(lambda: check_everywhere("report_step", {"weight": math.inf})),
        "" if rank == 3 else told(lambda: check_everywhere("count_samples", None)),
    ]


def test_the_key_that_differs_is_named_on_every_rank(tmp_path: Path) -> None:
    """On two data-parallel ranks of two context-parallel ones, of which the last alone has another bound."""
    for rank, (config, stage, alike, lacking) in enumerate(run_ranks(4, 2, of_a_grid, tmp_path)):
        assert config.startswith("ranks have different mis configs: mis.weight.upper is 2.0 on rank 0, 9.0 on rank 3;")
        assert "mis is None on rank 0, resplit_every on rank 1;" in stage and alike == "no error"
        assert rank == 3 or "as count_samples was given it: waited 1 s" in lacking and "for rank 3: " in lacking


def test_one_stage_of_a_pipeline_with_another_config(tmp_path: Path) -> None:
    """The first stage would not enter the second log-prob pass that the last stage waits in."""

    def work(rank: int) -> str:
        args = host_args(mis=RULES | {"resplit_every": 1 + rank})
        return told(lambda: mis.count_samples(args, 0, {}))

    for said in run_ranks(2, 1, work, tmp_path, pipeline_model_parallel_size=2):
        assert "mis.resplit_every is 1 on rank 0, 2 on rank 1" in said


def of_micro_batches(scope: str, rank: int) -> Any:
    """Rank 0 has three micro-batches, rank 1 has two; then both add up what stands for the gradients."""
    factors = [correct_on_rank(case_of({"scope": scope}), 1, None)["weights"] for _ in range(3 - rank)]
    torch.distributed.all_reduce(torch.ones(3))
    return factors


@pytest.mark.parametrize(("scope", "ends"), [("micro_batch", "answered"), ("data_parallel", "raised")])
def test_no_weight_is_of_another_number_of_micro_batches(scope: str, ends: str) -> None:
    """A mean over data-parallel ranks waits for the micro-batch that rank 1 lacks; no step is trained."""
    said = started(2, partial(of_micro_batches, scope), Fault()).ended()
    for one in said:
        assert one is not None and one.seconds < LONGEST_S and bool(one.error) == (ends == "raised")

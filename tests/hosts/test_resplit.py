"""The trainer against itself: other micro-batches, what differs between two passes, and how each host is asked."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import stand_in_hosts
import test_every_hook
import torch
import torch.distributed as dist
from batches import host_args
from hypothesis import given
from hypothesis import strategies as st
from stand_in_hosts import LAYOUTS, Bodies

from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.explain.words import describe
from mis_plugins.hosts import registry, resplit
from mis_plugins.hosts.registry import every_host
from mis_plugins.hosts.resplit import cut_otherwise, differences
from mis_plugins.packing.ragged import Ranks

HOOK = "mis_plugins.mis.count_samples"
FLAG = f"--rollout-data-postprocess-path {HOOK}"
STEP = st.lists(st.integers(1, 5), min_size=1, max_size=5)


# --------------------------------------------------------------------------------------------------- micro-batches


@given(STEP, st.booleans())
def test_every_sample_is_scored_and_ranks_with_as_many_groups_run_as_many_passes(
    sizes: list[int], halves: bool
) -> None:
    samples = iter(range(sum(sizes)))
    groups = [[next(samples) for _ in range(size)] for size in sizes]
    cut = cut_otherwise(groups, halves)
    assert sorted({sample for group in cut for sample in group}) == list(range(sum(sizes)))
    assert len(cut) == (2 * len(groups) if halves else (len(groups) + 1) // 2)
    assert all(cut)
    if halves:
        assert max(map(len, cut)) <= max(sizes), "no micro-batch needs more memory"
    whole = {tuple(group) for group in groups if len(group) > 1 or not halves and len(groups) > 1}
    assert not {tuple(group) for group in cut[: len(cut) - len(groups) % 2 * (not halves)]} & whole


# ----------------------------------------------------------------------------------------------------- differences


def test_equal_passes_differ_by_0_exactly_and_one_bit_is_seen() -> None:
    first = torch.tensor([-1.0, -2.0, float("nan"), -torch.inf])
    valid = torch.ones(4, dtype=torch.bool)
    sums, largest = differences(first, first.clone(), valid)
    assert (sums.tolist(), float(largest)) == ([4, 0, 0], 0)
    second = first.clone()
    second[1] = torch.nextafter(second[1], torch.tensor(0.0))
    sums, largest = differences(first, second, valid)
    assert sums[1] == 1 and sums[2] == largest == 2.0**-23
    assert differences(first, second, torch.tensor([True, False, True, True]))[0].tolist() == [3, 0, 0]


@pytest.mark.parametrize("lost", [float("nan"), float("-inf")])
def test_a_number_that_is_lost_in_one_pass_differs_by_infinity(lost: float) -> None:
    sums, largest = differences(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, lost]), torch.tensor([True, True]))
    assert sums.tolist() == [2, 1, float("inf")] and float(largest) == float("inf")


def test_the_ranks_that_hold_other_samples_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer has as many tokens and differences, and a larger one."""
    told, again = {}, [torch.tensor([-1.0, -2.5])]
    ranks = Ranks(dp=dist.ProcessGroup(0, 2))  # type: ignore[call-arg]
    asked = {"parallel": lambda: (ranks, (1, 0)), "rescore": lambda *_: again, "reports": lambda ranks: True}
    host = replace(every_host()["slime"], **asked)
    monkeypatch.setattr(resplit, "current", lambda args: host)
    monkeypatch.setattr(
        resplit, "all_reduce", lambda x, _, op=None: x.fill_(9.0) if op == dist.ReduceOp.MAX else x.mul_(2)
    )
    monkeypatch.setattr(resplit.tracking, "log", lambda args, metrics, step: told.update(metrics))
    data = {"log_probs": [torch.tensor([-1.0, -2.0])], "loss_masks": [torch.tensor([1, 1])], "total_lengths": [3],
            "response_lengths": [2]}  # fmt: skip
    resplit.compare(host_args(mis={"weight": {}, "resplit_every": 1}), 0, data)
    assert told == {"resplit_differs": 0.5, "resplit_diff_abs_mean": 0.25, "resplit_diff_abs_max": 9.0}


# ----------------------------------------------------------------------------------- Miles's and slime's own trainer

SAMPLES = 6
Trained = Callable[..., tuple[list[Any], dict[str, float]]]


@pytest.fixture(params=["August", "slime"])
def trained(request: Any, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return partial(of_rollout, stand_in_hosts.load(LAYOUTS[request.param], monkeypatch))


def of_rollout(
    host: Bodies, groups: list[list[int]] | int = 3, numbers: Sequence[int] = (1, 1), rollout: int = 0, **settings: Any
) -> tuple[list[Any], dict[str, float]]:
    """One rollout of six samples: the passes behind the trainer's own, and what they log.

    groups: the samples of each micro-batch, or how many one has; `numbers`: of how many a step is made.
    """
    host.passes.clear()
    host.logged.clear()
    host.cut = (groups, [*numbers])
    samples = [Namespace(tokens=[7, i, i], response_length=2, rollout_log_probs=[-1.0] * 2) for i in range(SAMPLES)]
    hooks = {"use_dynamic_batch_size": isinstance(groups, list), "rollout_data_postprocess_path": HOOK}
    data = stand_in_hosts.data_of(samples)
    test_every_hook.trained(host, data, rollout, mis={"weight": None, "resplit_every": 2}, **hooks, **settings)
    logged = {name.rpartition("/")[2]: value for told in host.logged for name, value in told.items()}
    return host.passes[1:], logged


@pytest.mark.parametrize("groups", [3, [[4, 0, 2], [1, 5, 3]]])
def test_a_dependence_on_the_batch_is_told_and_nothing_where_there_is_none(groups: Any, trained: Trained) -> None:
    passes, told = trained(groups)
    halved = [[0, 1], [2], [3, 4], [5]] if groups == 3 else [[4, 0], [2], [1, 5], [3]]
    assert [one[:2] for one in passes] == [(halved, [2, 2])]
    assert told == {"resplit_differs": 0, "resplit_diff_abs_mean": 0, "resplit_diff_abs_max": 0, "step": 0}
    _, told = trained(groups, leak=0.25)
    assert told["resplit_differs"] == 1
    assert told["resplit_diff_abs_max"] == 0.5, "a sample that is alone, and was one of three"
    assert told["resplit_diff_abs_mean"] == pytest.approx((2 * 0.25 + 0.5) / 3)


def test_micro_batches_of_one_sample_are_joined_and_a_lone_one_is_scored_twice(trained: Trained) -> None:
    passes, told = trained(1, (3, 3), leak=0.25)
    assert [one[:2] for one in passes] == [([[0, 1], [2], [3, 4], [5]], [2, 2])]
    assert told["resplit_differs"] == pytest.approx(4 / 6)
    passes, _ = trained([[3], [0, 1, 2], [4, 5]], (2, 1))
    assert [one[:2] for one in passes] == [([[3], [3], [0, 1], [2], [4], [5]], [4, 2])]


def test_between_the_asked_rollouts_nothing_is_computed(request: Any, trained: Trained) -> None:
    passes, told = trained(rollout=3)
    assert not passes and not told
    passes, told = trained(rollout=4, num_steps_per_rollout=2)
    assert [rollout for *_, rollout in passes] == [4 if "August" in request.node.name else None]
    assert told["step"] == 8


def test_one_split_is_told_and_compares_nothing(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    passes, told = trained(1, [1] * SAMPLES)
    assert not passes and not told
    assert "no two of them that can be joined" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_routing_replay": True}, "--use-routing-replay: what is replayed is queued for one pass"),
        ({"use_rollout_routing_replay": True}, "--use-rollout-routing-replay"),
        ({"keep_old_actor": True}, "--keep-old-actor: the trainer has switched"),
    ],
)
def test_what_makes_a_second_pass_another_pass_is_refused(settings: Any, said: str, trained: Trained) -> None:
    with pytest.raises(ConfigError, match=f"mis.resplit_every with .*{said}"):
        trained(**settings)


def test_a_hook_that_another_function_calls_cannot_ask_the_trainer() -> None:
    data = {"loss_masks": [torch.ones(2)]}
    rescore = every_host()["slime"].rescore
    assert rescore is not None
    with pytest.raises(
        InputError, match="slime.backends.megatron_utils.actor:MegatronTrainRayActor.train_actor does not call this"
    ):
        rescore(host_args(), data, Ranks())


# ---------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "got 0; give at least 1 rollout"), (2.5, "got 2.5; expected a whole number"), ("x", "expected a number")],
)
def test_a_number_of_rollouts_that_cannot_be_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"mis.resplit_every: {said}|mis.resplit_every: got 'x'; {said}"):
        from_mapping({"resplit_every": value})


def test_the_key_without_the_hook_is_refused_by_the_hooks_that_read_it() -> None:
    args = host_args(mis={"weight": {"upper": 2}, "resplit_every": 5})
    with pytest.raises(ConfigError, match=f"mis.resplit_every: 5 needs {FLAG}"):
        mis.config_in_force(args)
    args.rollout_data_postprocess_path = HOOK
    assert mis.config_in_force(args).resplit_every == 5


def test_the_words_and_the_flags_of_a_config() -> None:
    told = describe(from_mapping({"resplit_every": 10}))
    assert "of each 10 rollouts one is scored again" in told and FLAG in told
    rollout = {"weight": {"upper": 2, "normalize": {"scope": "rollout"}}, "resplit_every": 10}
    assert "count_samples" not in describe(from_mapping(rollout)), "its hook does it too"


def test_every_host_that_hands_the_rollout_batch_can_be_asked() -> None:
    for host in registry.every_host().values():
        assert (host.rescore is not None) == host.rollout_batch, host.name

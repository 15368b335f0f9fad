"""Group baselines without the samples that do not train, against a loop over samples in Python."""

import math
import random
import statistics
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import host_args, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_ranks

from lab.host.cli.loading import load_function
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.explain.words import describe
from mis_plugins.hosts import baselines

hook = load_function("mis_plugins.mis.count_samples", "--rollout-data-postprocess-path")
RULE = {"weight": None, "reject": [{"over": "mean", "upper": 2.0}]}
FAR, NEAR = 1.5, 0.1  # log ratios of a sample that the rule drops, and of one that it keeps
SIZE = 4


def arguments(kind: str | None, mis: dict[str, Any] | None = None, **more: Any) -> SimpleNamespace:
    given = {"n_samples_per_prompt": SIZE, "advantage_estimator": "grpo", "grpo_std_normalization": True,
             "rewards_normalization": True, "normalize_advantages": False, "num_steps_per_rollout": 1,
             "rollout_data_postprocess_path": "mis_plugins.mis.count_samples"}  # fmt: skip
    return host_args(mis=(mis or RULE) | {"group_baseline": kind}, **(given | more))


def normalized(raw: list[float], by_deviation: bool) -> list[float]:
    """The hosts' rewards: less the mean of all samples of the group, over their deviation where asked."""
    found = []
    for start in range(0, len(raw), SIZE):
        group = raw[start : start + SIZE]
        mean = statistics.fmean(group)
        deviation = statistics.stdev(group) + 1e-6 if by_deviation else 1.0
        found += [(reward - mean) / deviation for reward in group]
    return found


def rollout(raw: list[float], far: Set[int], masked: Set[int] = frozenset(), by_deviation: bool = True) -> dict:
    """A rollout of two-token responses with the host's advantages."""
    batch = make_batch([
        ([-2.0 + (FAR if i in far else NEAR)] * 2, [-2.0] * 2, [0 if i in masked else 1] * 2) for i in range(len(raw))
    ])  # fmt: skip
    rewards = normalized(raw, by_deviation)
    return {
        "log_probs": batch.proximal, "rollout_log_probs": batch.behavior, "loss_masks": batch.loss_masks,
        "total_lengths": batch.total_lengths, "response_lengths": batch.response_lengths,
        "rewards": rewards, "sample_indices": [40 + i for i in range(len(raw))],
        "advantages": [torch.full((2,), reward) for reward in rewards],
    }  # fmt: skip


def oracle(raw: list[float], out: set[int], kind: str, by_deviation: bool) -> list[float | None]:
    """The advantage of each sample that trains, from raw rewards; None for the others."""
    found: list[float | None] = []
    for i, reward in enumerate(raw):
        start = i - i % SIZE
        others = [raw[j] for j in range(start, start + SIZE) if j not in out and j != i]
        if i in out:
            found.append(None)
        elif not others:
            found.append(0.0)
        elif kind == "rloo":
            found.append(reward - statistics.fmean(others))
        else:
            deviation = statistics.stdev([reward, *others]) if by_deviation else 1.0
            centered = reward - statistics.fmean([reward, *others])
            found.append(centered / deviation if deviation else 0.0)
    return found


def advantages(data: dict[str, Any]) -> list[float]:
    assert all(bool((row == row[0]).all() or row.isnan().all()) for row in data["advantages"])
    return [float(row[0]) for row in data["advantages"]]


def assert_alike(data: dict[str, Any], wanted: list[float | None], before: list[float]) -> None:
    for found, want, host in zip(advantages(data), wanted, before, strict=True):
        assert found == pytest.approx(host if want is None else want, rel=1e-4, abs=1e-4)


@dataclass(frozen=True)
class Case:
    """A rollout of several prompts, drawn by its seed: rewards, samples that a rule drops, and fully masked samples."""

    seed: int
    kind: str
    by_deviation: bool
    prompts: int
    rewards: tuple[float, ...]
    dropped: float
    masked: float


def cases() -> st.SearchStrategy[Case]:
    share = st.sampled_from([0.0, 0.2, 0.5, 1.0])
    rewards = st.sampled_from([(0.0, 1.0), (0.0, 1.0, 5.0), (-1.0, 100.0), (0.5,), (1e-4, -1e4)])
    kinds = st.sampled_from(["grpo", "rloo"])
    return st.builds(Case, st.integers(0, 2**32 - 1), kinds, st.booleans(), st.integers(1, 5), rewards, share, share)


def judge(case: Case) -> str:
    """`right`, or `idle` where every advantage stays."""
    rng = random.Random(case.seed)
    raw = [rng.choice(case.rewards) for _ in range(case.prompts * SIZE)]
    far, masked = ({i for i in range(len(raw)) if rng.random() < share} for share in (case.dropped, case.masked))
    by_deviation = case.by_deviation and case.kind == "grpo"
    data = rollout(raw, far, masked, by_deviation)
    before = advantages(data)
    hook(arguments(case.kind, grpo_std_normalization=by_deviation), 3, data)
    assert_alike(data, oracle(raw, far | masked, case.kind, by_deviation), before)
    return "right" if advantages(data) != before else "idle"


@settings(max_examples=60, deadline=None)
@given(cases())
def test_advantages_are_those_of_what_trains(case: Case):
    judge(case)


WEIGHED = [{"weight": {"level": "sequence", "bound": name, "lower": 0.5, "upper": 2.0}} for name in ("zero", "mask")]


@pytest.mark.parametrize("config", [RULE, *WEIGHED])
@pytest.mark.parametrize(("kind", "wanted"), [("grpo", [-2 / 3, 1 / 3, 1 / 3]), ("rloo", [-1.0, 0.5, 0.5])])
def test_a_reward_of_100_that_is_rejected_or_weighs_nothing_moves_no_sibling(
    kind: str, wanted: list[float], config: dict[str, Any]
):
    """verl#6375: beside it, the host gives a correct answer a large negative advantage."""
    data = rollout([100.0, 0.0, 1.0, 1.0], {0}, by_deviation=False)
    assert advantages(data)[2] == -24.5
    for _ in range(2):  # a function of the user's may call both rollout-data hooks
        hook(arguments(kind, config, grpo_std_normalization=False), 3, data)
        assert advantages(data)[1:] == pytest.approx(wanted, abs=1e-5)
    data = rollout([0.0, 0.0, 1.0, 1.0], {0}, by_deviation=False) | {"rewards": [math.nan, 0.0, 1.0, 1.0]}
    data["advantages"] = [torch.full((2,), reward) for reward in data["rewards"]]
    hook(arguments(kind, config, grpo_std_normalization=False, rewards_normalization=False), 3, data)
    assert advantages(data)[1:] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("more", [{"mis": RULE}, {"use_tis": False}])
def test_it_is_off_by_default_and_where_a_run_only_watches(more: dict[str, Any]):
    data = rollout([100.0, 0.0, 1.0, 1.0], {0})
    before = advantages(data)
    hook(SimpleNamespace(**vars(arguments("grpo")) | more), 3, data)
    assert advantages(data) == before


@pytest.mark.parametrize("by_deviation", [True, False])
def test_rounding_makes_no_other_groups_of_rewards_that_are_equal_or_large(by_deviation: bool):
    """Hosts normalize in float32, where the mean of eight rewards of 0.7 is another number, over 1e-6 then 0.06."""
    raw = torch.tensor([[0.7] * 8, [3e5 * i / 7 for i in range(1, 9)]])
    centered = raw - raw.mean(-1, keepdim=True)
    host = (centered / (raw.std(-1, keepdim=True) + 1e-6) if by_deviation else centered).flatten().tolist()
    data = rollout([0.0] * 16, {0}) | {"rewards": host, "advantages": [torch.full((2,), x) for x in host]}
    hook(arguments("grpo", n_samples_per_prompt=8, grpo_std_normalization=by_deviation), 3, data)
    assert advantages(data) == pytest.approx([host[0], *[0.0] * 7, *host[8:]], rel=1e-4, abs=1e-5)
    with pytest.raises(InputError, match=r"a mean of .*: the groups of the host are others"):
        hook(arguments("grpo", n_samples_per_prompt=10), 3, {name: column[:10] for name, column in data.items()})


@pytest.mark.parametrize("raw", [[1000.0, 1000.001, 1000.001, 1000.0, 1000.002, 1000.0, 1000.001], [0.1] * 5])
def test_rounding_of_close_rewards_or_of_a_group_that_lacks_samples_is_no_other_group(raw: list[float]):
    """A group's mean lies off by the rounding of large rewards, and by that of seven equal ones where two are gone."""
    whole = torch.tensor(raw + raw[:1] * (7 - len(raw)))
    host = (whole - whole.mean())[: len(raw)].tolist()
    data = rollout([0.0] * 8, {0}) | {"rewards": host, "advantages": [torch.full((2,), x) for x in host]}
    args = arguments("grpo", n_samples_per_prompt=7, grpo_std_normalization=False)
    hook(args, 3, {name: column[: len(raw)] for name, column in data.items()})


def test_groups_that_lie_on_two_ranks(tmp_path: Path):
    """Samples of one group on both data-parallel ranks have the advantages of one rank that holds all."""
    raw, far = [3.0, 0.0, 1.0, 1.0, 9.0, 2.0, 2.0, 0.0], {0, 4}

    def work(rank: int) -> list[float]:
        whole = rollout(raw, far)
        data = {name: column[rank::2] for name, column in whole.items()}
        hook(arguments("grpo"), 3, data)
        return advantages(data)

    found = run_ranks(2, 1, work, tmp_path)
    wanted = oracle(raw, far, "grpo", True)
    for i, want in enumerate(wanted):
        assert want is None or found[i % 2][i // 2] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sample_indices": [40, 41, 42, 43, 40, 41, 42, 43]}, "a group has 8 samples by sample_indices // 4, more"),
        ({"sample_indices": [41, 42, 43, 44, 45, 46, 47, 48]}, "a mean of .*: the groups of the host are others"),
        ({"sample_indices": None}, "needs sample_indices of the rollout batch, and rollout_data has none"),
        ({"sample_indices": [40, None] * 4}, "needs sample_indices of the rollout batch, and rollout_data has none"),
        ({"sample_indices": [40, 41, 42, 2**40, 44, 45, 46, 47]}, "span .* groups"),
        ({"rewards": [0.5, -0.5] * 3}, "rewards: 6 sequences, but the batch has 8"),
        ({"advantages": [torch.zeros(2)] * 9}, "advantages: 9 sequences, but the batch has 8"),
        ({"log_probs": None}, "needs log_probs .*with one step give --get-mismatch-metrics"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(change: dict[str, Any], said: str):
    data = rollout([3.0, 0.0, 1.0, 1.0, 9.0, 2.0, 2.0, 0.0], {0}) | change
    with pytest.raises(InputError, match=f"^({baselines.FIELD}.*)?{said}"):
        hook(arguments("grpo"), 3, data)


@pytest.mark.parametrize(
    ("mis", "said"),
    [
        ({"group_baseline": "grpo"}, "mis.group_baseline: grpo has no effect without a weight or a rule"),
        ({"group_baseline": "mean"}, "mis.group_baseline: got 'mean'; choose one of grpo, rloo"),
        (RULE | {"group_baseline": "rloo", "objective": {"surrogate": "clip", "old": "behavior"}},
         "mis.group_baseline: rloo needs to know before training .* mis.objective.old: behavior"),
        ({"segment_wise": {}, "group_baseline": "grpo"}, "drop one of it and mis.segment_wise"),
        (RULE | {"on_all_rejected": "keep", "group_baseline": "grpo"}, "drop one of it and mis.on_all_rejected: keep"),
        (RULE | {"m2_threshold": 0.04, "group_baseline": "grpo"}, "drop one of it and mis.m2_threshold"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused(mis: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        from_mapping(mis)


def test_it_is_told_in_words():
    told = describe(from_mapping(RULE | {"group_baseline": "rloo"}))
    assert "group baseline: rewards less the mean over the group's other samples that train" in told
    assert "--rollout-data-postprocess-path mis_plugins.mis.count_samples" in told


def test_a_baseline_says_what_speaks_against_it_where_versions_are_known():
    """And is described where nobody asks for versions."""
    config = from_mapping({"weight": {}, "opsm": {"delta": 0.1}, "group_baseline": "rloo"})
    with pytest.raises(
        ConfigError, match=r"^mis\.group_baseline: rloo needs .* unless mis\.segment_wise\.enabled: false$"
    ):
        config.where_versions_are_known()
    assert "segment_wise" not in describe(config)

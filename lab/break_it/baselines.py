"""Room `baselines`: advantages from group baselines without rejected samples, against the oracle of `tests/`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st
from test_baselines import SIZE, advantages, arguments, assert_alike, hook, oracle, rollout


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

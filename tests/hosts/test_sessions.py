"""Samples of an agent's sessions through our hooks: Miles's own code made them (`support/record_sessions.py`)."""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import oracle
import pytest
import stand_in_hosts
import torch
from stand_in_hosts import LAYOUTS, VOCABULARY
from test_every_hook import LOSS, TIS, losses, trained

from mis_plugins import mis

RECORDED = json.loads((Path(__file__).parents[1] / "support" / "recorded_sessions.json").read_text())
# Trained tokens of a whole rollout, whose samples share one mean, and of a sample.
SHARED, ALONE = (5, 6, 6), (5, 4, 2)
UPPER = 2.0
CONFIGS: list[dict[str, Any]] = [
    {"weight": {"level": "token", "bound": "truncate", "upper": UPPER}},
    {"weight": {"level": "token", "bound": "truncate", "upper": UPPER},
     "reject": [{"over": "mean", "unit": "segment", "lower": 0.4, "upper": 1.0}]},
]  # fmt: skip


def samples() -> list[Namespace]:
    return [Namespace(**row) for row in RECORDED]


def rollout() -> dict[str, Any]:
    """The three samples that are trained, as `ray/rollout/train_data_conversion.py` of 31f1ca961 hands them on."""
    data = stand_in_hosts.data_of(samples()[:3])
    masks = [torch.tensor(sample.loss_mask, dtype=torch.int) for sample in samples()[:3]]
    return data | {"loss_masks": masks, "rollout_mask_sums": torch.tensor(SHARED).float()}


def right(config: dict[str, Any], divisors: tuple[int, ...]) -> list[float]:
    """Loss of each sample by the oracle: its kept weights, over the tokens that its host divides by."""
    scored = torch.linspace(-1, 1, VOCABULARY).double().log_softmax(0)
    rows = [
        oracle.Sample(scored[row["tokens"][-7:]].tolist(), row["rollout_log_probs"], list(map(bool, row["loss_mask"])))
        for row in RECORDED[:3]
    ]  # fmt: skip
    found = oracle.correct(rows, config)
    kept = zip(found.weights, found.keep, divisors, strict=True)
    return [-sum(w for w, k in zip(weights, keep, strict=True) if k) / n for weights, keep, n in kept]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("backend", "divisors"), [("megatron", SHARED), ("fsdp", ALONE), ("torchtitan", ALONE)])
@pytest.mark.parametrize("hook", [TIS, LOSS], ids=["the TIS hook", "the loss hook"])
def test_turns_are_corrected_and_a_tools_tokens_are_not_seen(
    hook: dict[str, Any], backend: str, divisors: tuple[int, ...], config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A tool's tokens have log-prob 0, and a turn that two leaves share trains in the first of them alone."""
    host = stand_in_hosts.load(LAYOUTS["packages"], monkeypatch)
    first, second, third = right(config, divisors)
    found = losses(trained(host, rollout(), mis=config, **hook, train_backend=backend))
    assert found == pytest.approx([first + second, third], rel=1e-5)
    assert right(config, divisors) != right(CONFIGS[0], divisors) or config is CONFIGS[0]


def test_the_filter_leaves_sessions_and_takes_a_turn_without_log_probs() -> None:
    """An aborted session, which has no log-probs, becomes one that Miles can convert; it is trained on by nobody."""
    whole, broken = samples(), samples()
    mis.drop_broken_samples(Namespace(), [[whole[0], whole[1:3], whole[3]]])
    assert not any(sample.remove_sample for sample in whole) and whole[3].rollout_log_probs == []
    broken[0].rollout_log_probs[3], broken[1].rollout_log_probs[0] = (math.nan, math.nan)  # a tool's token, an engine's
    mis.drop_broken_samples(Namespace(), [broken])
    assert [sample.remove_sample for sample in broken] == [False, True, False, False]

"""The page of the experiment with a real model: intervals, averages, and what is compared with what."""

from __future__ import annotations

from typing import Any

import pytest

from lab.toys.real_model_rl import averaged, interval, summary


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([0.0, -0.1, 0.1], "0.00 [-0.10, 0.10]"),
        ([0.0, -2.0, 2.0], "0.00 [-0.96, 0.96]"),
        ([0.8, 0.44, 1.16], "0.80 [0.10, 0.97]"),  # 0.36 over 1 - 0.8 ** 2 is 1; tanh(log 3 + 1) is 0.97
        ([1.0, 1.0, 1.0], "1.00"),
        (None, "-"),
    ],
)
def test_no_interval_of_a_cosine_passes_one(value: list[float] | None, told: str):
    assert interval(value) == told


def test_directions_are_averaged_over_seeds_and_rollouts_where_all_three_are_there():
    def course(*found: tuple[float, float, float] | None) -> dict[str, Any]:
        keys = ("agreement", "arm", "uncorrected")
        return {
            "directions": [
                dict.fromkeys(keys)
                if one is None
                else {key: [v, v, v] for key, v in zip(keys, one, strict=True)}
                for one in found
            ]
        }

    there = {
        ("int5-tis", 0): course((0.5, 0.6, 0.3), None),
        ("int5-tis", 1): course((0.3, 0.2, 0.1)),
        ("bf16", 0): course((0.4, 0.3, 0.3)),
        ("fp8-tis", 0): course(None),
    }
    told = "\n".join(averaged(there))
    assert (
        "| int5, token TIS | 2 | 0.40 [0.20, 0.60] | 0.40 [0.01, 0.79] | 0.20 [0.00, 0.40] | 0.20 [0.00, 0.40] |"
        in told
    )
    assert "| bf16, none (dense 1) | 1 | 0.40 | 0.30 | 0.30 | 0.00 |" in told and "fp8" not in told


def test_an_arm_is_compared_with_bf16_of_an_equal_seed():
    def record(accuracies: list[float], reward: float, k3: float) -> dict[str, Any]:
        rows = [{"reward": reward, "kept": 0.5, "k3": 0.0}, {"reward": reward + 0.2, "kept": 1.0, "k3": k3}]
        rows = [{**row, "trainer_ppl": 1 + 100 * k3} for row in rows]
        return {"held_out": [{"accuracy": one} for one in accuracies], "rollouts": rows}

    there = {
        ("bf16", 0): record([0.9, 0.2, 0.4], 0.5, 1e-3),
        ("bf16", 1): record([0.9, 0.4, 0.8], 0.5, 2e-3),
        ("int5-tis", 1): record([0.9, 0.5, 0.9], 0.1, 3e-1),
        ("int5-tis", 2): record([0.9, 0.1, 0.3], 0.3, 1e-1),
        ("fp8-tis", 2): record([0.9, 0.1, 0.3], 0.3, 1e-2),
    }
    told = "\n".join(summary(there))
    bf16 = "0.60 [0.40, 0.80] | 0.45 [0.30, 0.60] | 0.60 [0.60, 0.60] | 1.15 [1.10, 1.20] | 0.75 [0.75, 0.75]"
    assert f"| bf16, none (dense 1) | 2 | {bf16} | - | 2.0e-03 |" in told
    int5 = (
        "0.60 [0.30, 0.90] | 0.45 [0.20, 0.70] | 0.30 [0.20, 0.40] | 21.00 [11.00, 31.00] | 0.75 [0.75, 0.75]"
    )
    assert f"| int5, token TIS | 2 | {int5} | +0.10 | 3.0e-01 |" in told
    assert "| fp8, token TIS | 1 | 0.30 | 0.20 | 0.40 | 2.00 | 0.75 | - | 1.0e-02 |" in told

"""Plots of the report: dots of all tables on one axis, and a linear axis from 0 where values lie together."""

from __future__ import annotations

import pytest

from mis_plugins.report import plots

LOW = [{"bucket": "a", "tokens": 3, "kl_k3": 2e-6}, {"bucket": "b", "tokens": 1, "kl_k3": 3e-6}]
HIGH = [{"bucket": "a", "tokens": 4, "kl_k3": 0.2}, {"bucket": "0", "tokens": 0, "kl_k3": 0.0}]


def test_tables_share_one_axis_on_which_every_value_lies() -> None:
    low, high = ends = plots.span([LOW, HIGH[:1]])
    assert low < 2e-6 and 0.2 < high
    drawn = [plots.dots(rows, "kl_k3", ends) for rows in (LOW, HIGH[:1])]
    assert drawn[0].x == drawn[1].x and len(drawn[0].x) > 2
    first, second = (dot["x"] for dot in drawn[0].dots)
    assert plots.LEFT < first < second < drawn[1].dots[0]["x"] < plots.RIGHT
    assert [one["text"] for one in drawn[0].texts] == ["2.0e-06 · 75%", "3.0e-06 · 25%"]


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([2e-3, 4e-3], True, ["0", "0.001", "0.002", "0.003", "0.004"]),
        ([2e-3, 4e-1], True, ["1e-2", "1e-1"]),
        ([0.05, 0.6], True, ["5e-2", "1e-1", "2e-1", "5e-1"]),
        ([0.0, 1.0], True, ["1e-9", "1e-7", "1e-5", "1e-3", "1e-1"]),
        ([0.98, 1.02], False, ["0.98", "0.99", "1", "1.01", "1.02"]),
        ([5.0, 5.0], False, ["0", "2", "4", "6", "8", "10"]),
        ([0.0, 0.0], True, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-200.0, 300.0], False, ["-200", "-100", "0", "100", "200", "300"]),
    ],
)
def test_values_within_a_factor_of_ten_stand_on_an_axis_from_0(
    values: list[float], log: bool, ticks: list[str]
) -> None:
    drawn = plots.curve({"run": dict(enumerate(values))}, "kl_k3", log, marks=[1])
    assert [text for _, text in drawn.y] == ticks and drawn.marks == [plots.RIGHT]
    (line,) = drawn.lines
    (x, y), (later, higher) = line["points"]
    assert x < later and (higher < y) == (values[1] > values[0])  # places count from the top
    assert [text for _, text in drawn.x] == ["0", "1"]
    assert all(plots.TOP <= place <= drawn.height for place, _ in drawn.y)


def test_a_run_stands_on_the_ladder_and_a_long_name_is_cut() -> None:
    for kl_k3 in (0.0, 1e-3, 50.0):
        drawn = plots.ladder("x" * 300, kl_k3, "beside")
        assert plots.TOP <= drawn.dots[0]["x"] <= plots.RIGHT
        assert drawn.texts[-1]["text"] == f"{'x' * 39}…  {kl_k3:.2g}"

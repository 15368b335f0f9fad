"""Pictures of the report: dots of all tables on one axis, and a linear axis from 0 where values lie together."""

import re

from mis_plugins.report import plots

LOW = [{"bucket": "a", "tokens": 3, "kl_k3": 2e-6}, {"bucket": "b", "tokens": 1, "kl_k3": 3e-6}]
HIGH = [{"bucket": "a", "tokens": 4, "kl_k3": 0.2}]


def ticks(svg: str) -> list[str]:
    """Powers of ten that stand at a picture's ticks."""
    return re.findall(r"<!-- \$\\mathdefault\{10\^\{(-?\d+)\}\}\$ -->", svg)


def test_tables_share_one_axis_on_which_every_value_lies() -> None:
    low, high = ends = plots.span([LOW, HIGH])
    assert low < 2e-6 and 0.2 < high
    shown = [ticks(plots.dots(rows, "kl_k3", ends)) for rows in (LOW, HIGH)]
    assert shown[0] == shown[1] != []


def test_a_table_has_a_dot_a_bucket_and_no_bar() -> None:
    svg = plots.dots(LOW, "kl_k3", plots.span([LOW]))
    assert "75%" in svg and "25%" in svg
    assert not re.search(r'<path d="[^"]*z\s*" clip-path[^>]*var\(--first\)', svg)  # a filled patch in the axes


def test_values_within_a_factor_of_ten_stand_on_an_axis_from_0() -> None:
    near, far = {0: 2e-3, 1: 4e-3}, {0: 2e-3, 1: 4e-1}
    assert ">0.000<" in plots.curve({"run": near}, "kl_k3", log=True)
    assert ticks(plots.curve({"run": far}, "kl_k3", log=True)) != []
    assert ticks(plots.curve({"run": near}, "kl_k3", log=True)) == []

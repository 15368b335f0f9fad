"""The benchmark of the report's speed runs, and prints its three figures."""

from __future__ import annotations

import pytest

from lab import report_speed


def test_it_prints_three_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_speed.main(["--smoke"]) == 0
    assert capsys.readouterr().out.count("M tokens/s and core") == 3

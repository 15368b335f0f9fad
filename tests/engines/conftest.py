"""Tests of rollout engines, which have environments of their own: `bash scripts/test.sh --engines` asks for them."""

from __future__ import annotations

import os

WANTED = bool(os.environ.get("MIS_TEST_ENGINES"))
collect_ignore_glob = [] if WANTED else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if WANTED else ["not collected: tests/engines; run bash scripts/test.sh --engines"]

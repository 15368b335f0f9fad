"""Tests that need a rollout engine of its own environment: `bash scripts/test.sh --engines` installs it and asks for them."""

from __future__ import annotations

import os

import pytest

WANTED = bool(os.environ.get("MIS_TEST_ENGINES"))
collect_ignore_glob = [] if WANTED else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if WANTED else ["not collected: tests/engines; run bash scripts/test.sh --engines"]

"""Numbers of a command line: what no tensor and no loop can use is refused in one line, before any work."""

import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest
from commands import ran

from mis_plugins.errors import LARGEST, shown
from mis_plugins.shared.numerals import count, finite, whole

HUGE = "1" + "0" * 400


def test_what_is_read():
    assert (whole("-3"), whole(str(LARGEST)), count("1"), finite("1e-4")) == (-3, LARGEST, 1, 1e-4)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (whole, "x", "got 'x'; expected a whole number"),
        (whole, "1.5", "got '1.5'; expected a whole number"),
        (whole, HUGE, r"\(403 characters\); the largest whole number is"),
        (whole, "1" * 5000, r"\(5002 characters\); expected a whole number"),
        (whole, str(-LARGEST - 1), "the largest whole number is"),
        (count, "0", "got 0; expected at least 1"),
        (finite, "nan", "got 'nan'; expected a finite number"),
        (finite, "1e999", "got '1e999'; expected a finite number"),
        (finite, "wide", "got 'wide'; expected a number"),
    ],
)
def test_what_is_refused(kind: Callable, text: str, message: str):
    with pytest.raises(ArgumentTypeError, match=message):
        kind(text)


def test_a_long_value_is_shown_by_its_beginning():
    assert shown(3) == "3" and shown("a" * 30) == repr("a" * 30)
    assert len(shown("a" * 10**6)) < 70
    assert shown(10**5000) == "an integer of about 5001 digits"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("host_parity --host miles --checkout . --limit 0", "argument --limit: got 0"),
        ("gpu_session --receipt a.json --seconds nan", "argument --seconds: got 'nan'; expected a finite"),
    ],
)
def test_a_benchmark_refuses_a_number_in_one_line(command: str, message: str):
    script, *words = command.split()
    done = ran("-m", f"lab.{script}", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        f"true_on_policy verify --engine hf --trainer hf --tokens {HUGE}",
        f"true_on_policy verify --engine hf --trainer hf --seed {HUGE}",
        f"true_on_policy flags --miles --tp {HUGE}",
        f"lab.host --seed {HUGE}",
        "lab.host --reward-shift nan",
        "lab.host --weight-decay inf",
    ],
)
def test_a_command_refuses_a_number_in_one_line(command: str):
    run = [sys.executable, "-m", *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: argument --" in done.stderr.splitlines()[-1] and len(done.stderr.splitlines()[-1]) < 200

"""Numbers of a command line: what no tensor and no loop can use is refused in one line, before any work."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest
from commands import ran

from lab.host.cli.flags import finite
from mis_plugins.errors import LARGEST, shown
from mis_plugins.shared.numerals import count, whole

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


VERIFY = "true_on_policy verify --engine hf --trainer hf"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("lab.host_parity --host miles --checkout . --limit 0", "--limit: got 0"),
        ("lab.gpu_session --receipt a.json --seconds nan", "--seconds: got 'nan'; expected a finite"),
        (f"{VERIFY} --tokens {HUGE}", "--tokens"),
        (f"{VERIFY} --seed {HUGE}", "--seed"),
        (f"true_on_policy flags --miles --tp {HUGE}", "--tp"),
        (f"lab.host --seed {HUGE}", "--seed"),
        ("lab.host --reward-shift nan", "--reward-shift"),
        ("lab.host --weight-decay inf", "--weight-decay"),
    ],
)
def test_a_command_refuses_a_number_in_one_line(command: str, message: str):
    done = ran("-m", *command.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"error: argument {message}" in last and len(last) < 200

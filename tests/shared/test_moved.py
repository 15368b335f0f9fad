"""Addresses of earlier releases: each import is refused with what took its place, and that exists."""

import importlib
from importlib.util import find_spec

import pytest
from commands import ran

from lab.toys import DRAWN
from mis_plugins.shared.moved import moved

MOVED = moved()


@pytest.mark.parametrize("old, new", MOVED.items())
def test_a_former_address_is_refused_with_what_took_its_place(old: str, new: str):
    with pytest.raises(ModuleNotFoundError, match=f"^{old} is gone: .*{new} takes its place$"):
        importlib.import_module(old)
    module, _, picture = new.removeprefix("python -m ").partition(" ")
    assert find_spec(module) and picture in ("", *DRAWN)


@pytest.mark.parametrize("command", ["mis_plugins.local", "true_on_policy.kernels.exhaustive", "lab.presets"])
def test_each_package_refuses_its_former_commands(command: str):
    told = ran("-m", command)
    assert told.returncode and f"{MOVED[command]} takes its place" in told.stderr


def test_what_never_was_is_found_nowhere():
    assert find_spec("mis_plugins.never") is None

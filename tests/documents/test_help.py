"""What `--help` says: every command has an example that its parser takes, and every argument has words."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from mis_plugins import __main__ as corrects
from true_on_policy import __main__ as removes


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser with those of its commands, but for commands that are gone."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            offered = [choice.dest for choice in action._choices_actions]
            yield from (each for name in offered for each in commands(action.choices[name]))


EVERY = {each.prog: each for top in (corrects._parser(), removes._parser([])) for each in commands(top)}


@pytest.mark.parametrize("prog", EVERY)
def test_every_argument_has_words(prog: str):
    own = [each for each in EVERY[prog]._actions if not isinstance(each, argparse._SubParsersAction)]
    assert [each.option_strings or each.dest for each in own if not each.help] == []


def examples(prog: str) -> list[str]:
    """The lines of a command's help that call a command."""
    return [line.strip() for line in (EVERY[prog].description or "").splitlines() if "    python -m " in line]


@pytest.mark.parametrize("prog", EVERY)
def test_every_command_shows_how_it_is_called(prog: str):
    """The parser takes each example, less the shell's `>` and a comment behind two blanks."""
    assert any(f"{line} ".startswith(f"{prog} ") for line in examples(prog))
    for line in examples(prog):
        _, _, package, *words = shlex.split(re.split(r" [<>] |\s{2,}", line)[0])
        parser = corrects._parser() if package == "mis_plugins" else removes._parser(words)
        assert parser.parse_args(words).run


@pytest.mark.parametrize("group", corrects.GROUPS)
def test_a_group_shows_its_own_commands_alone(group: str):
    shown = examples(f"python -m mis_plugins {group}")
    assert shown and all(f"mis_plugins {group} " in line for line in shown)

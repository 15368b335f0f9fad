"""What `--help` says: every command has an example or a sentence, and every argument has words."""

import argparse
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


@pytest.mark.parametrize("prog", [prog for prog in EVERY if prog.startswith("python -m true_on_policy")])
def test_a_proof_shows_how_it_is_called(prog: str):
    shown = EVERY[prog].description or EVERY[prog.rpartition(" ")[0]].description
    assert shown is not None and "    python -m true_on_policy " in shown


@pytest.mark.parametrize("group", corrects.GROUPS)
def test_a_group_shows_its_own_commands_alone(group: str):
    examples = [
        line for line in (EVERY[f"python -m mis_plugins {group}"].description or "").splitlines() if "    " in line
    ]
    assert examples and all(f"mis_plugins {group} " in line for line in examples)

"""Files that no config is: each is refused quickly, in words, and never by a traceback or the end of the process."""

import io
import re
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import ConfigCommand
from hypothesis import given
from hypothesis import strategies as st

from mis_plugins.__main__ import TRANSLATORS, main
from mis_plugins.config.file import LARGEST_FILE, keys_of, parsed
from mis_plugins.config.loading import presets
from mis_plugins.errors import ConfigError

HUGE = "1" + "0" * 400
BIG = "mis: {weight: {upper: 2}}\n" + "".join(f"key_{i}: [1, 2.5, word, {{a: 1}}]\n" for i in range(120_000))
ALIASES = "a0: &a0 [x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
UNREADABLE = {
    "an integer": (f"mis: {{weight: {{upper: {HUGE}}}}}", "mis.weight.upper: got an integer of about 401 digits"),
    "a flat integer": (f"tis_upper_bound: {HUGE}", "tis_upper_bound: got an integer of about 401 digits"),
    "5000 digits": ("mis: {weight: {upper: " + "1" * 5000 + "}}", "line 1: .* reads as YAML's int and is none"),
    "a month": ("mis: {}\nday: 2024-13-45", "line 2: '2024-13-45' reads as YAML's timestamp and is none"),
    "a day": ("mis: {weight: {upper: 2024-02-30}}", "line 1: '2024-02-30' reads as YAML's timestamp"),
    "no int": ("mis: !!int foo", "line 1: 'foo' reads as YAML's int"),
    "no bool": ("mis: !!bool foo", "line 1: 'foo' reads as YAML's bool"),
    "no date": ("mis: !!timestamp foo", "line 1: 'foo' reads as YAML's timestamp"),
    "brackets": ("mis: " + "[" * 100_000, "nested more than 64 levels"),
    "dashes": ("- " * 60_000, "nested more than 64 levels"),
    "aliases": (ALIASES, "aliases .* repeat more than"),
    "merges": (MERGES, "aliases .* repeat more than"),
    "a pair of verl's": ("mis: {weight: {upper: 0.5_5}}", "line 1: '0.5_5' reads as 0.55; write the number plainly"),
    "minutes": ("a: 010\ntis_upper_bound: 1:30", "line 2: '1:30' reads as 90"),
    "an octal": ("mis:\n  reject: [{over: min, lower: 010}]", "line 2: '010' reads as 8"),
    "a tab": ("mis: {weight: {upper: 1.5}}\t# cap", "line 1, column 28: no YAML: found character '.t'"),
    "a mark": ("{x: a?, mis: {}}", "no YAML: expected ',' or '}', but got '?'"),
    "4 MB": (BIG, f"more than {LARGEST_FILE} bytes, which no config has"),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [*(("check", name) for name in UNREADABLE), *((command, "aliases") for command in ("show", *TRANSLATORS))],
)
def test_every_command_refuses_quickly_and_names_the_place(name: str, command: str, config_command: ConfigCommand):
    text, message = UNREADABLE[name]
    began = time.process_time()
    told = config_command(text, command=command, code=2).err
    assert time.process_time() - began < 5
    assert len(told) < 500, message
    assert command != "check" or re.search(message, told)


def test_a_file_at_the_limit_is_read_in_a_second(tmp_path: Path):
    (tmp_path / "mis.yaml").write_text(BIG[: LARGEST_FILE - 100].rpartition("\n")[0])
    began = time.process_time()
    assert len(keys_of(tmp_path / "mis.yaml")) > 2000
    assert time.process_time() - began < 5


def test_an_alias_within_itself_and_a_key_twice_are_refused():
    with pytest.raises(ConfigError, match=r"line 2: an alias \(\*name\) stands within its own value"):
        parsed("x: 1\na: &a [*a]")
    with pytest.raises(ConfigError, match="upper: in line 2 and again in line 3"):
        parsed("mis:\n  upper: 1\n  upper: 2\n")


@pytest.mark.parametrize("file", presets().values(), ids=lambda file: file.stem)
def test_a_file_reads_as_the_hosts_read_it(file: Path):
    text = file.read_text()
    assert parsed(text) == yaml.safe_load(text)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9), st.dates()
)
trees = st.recursive(scalars, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=6), x, max_size=4))


@given(tree=trees, flow=st.booleans())
def test_a_file_reads_as_the_hosts_read_it_of_anything(tree: object, flow: bool):
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    assert parsed(text) == yaml.safe_load(text)


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_dash_is_the_standard_input(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    texts = {b"use_tis: true\r\ntis_upper_bound: 3.5\r\n": 0, b"mis: {wieght: 1}": 2}
    for text, code in texts.items():
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main(["config", command, "-"]) == code
        told = capsys.readouterr()
        assert told.err.startswith("standard input: mis.wieght: unknown key") if code else "3.5" in told.out

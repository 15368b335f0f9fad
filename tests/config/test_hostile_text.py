"""Files that no config is, and texts made to hang a command, to fill the memory, or to steer what it prints.

Each is refused quickly, in words, and never by a traceback or the end of the process.
"""

import argparse
import base64
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from commands import ConfigCommand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mis_plugins.__main__ import TRANSLATORS, main
from mis_plugins.config import reading
from mis_plugins.config.file import LARGEST_FILE, keys_of, parsed, text_of
from mis_plugins.config.loading import presets
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.translate import areal, ms_swift, prime_rl, trl, verl
from mis_plugins.shared import budget
from true_on_policy.flags.command import groups

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
    "minutes that `<<` puts in": ("a: &a {tis_upper_bound: 1:30}\n<<: *a", "line 1: '1:30' reads as 90"),
    "a tag": ("mis: {weight: {upper: !!float '2_0'}}", "line 1: '2_0' reads as 20"),
    "a tag of what is no number": (
        "mis: {weight: {upper: !!float '1_0: ['}}",
        "line 1: '1_0: \\['? reads as YAML's float",
    ),
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


# ------------------------------------------------------------------------------------------------------ hostile texts

VERL = "main_ppo algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2\n"
SWIFT = "swift rlhf --rollout_importance_sampling_mode token_mask\n"
DOUBLED = "A=xxxxxxxx\n" + "A=$A$A\n" * 60
CHAINED = "A0=xxxxxxxx\n" + "".join(f'A{i}="${{A{i - 1}}}${{A{i - 1}}}"\n' for i in range(1, 60))
GROWN = "A=" + "x" * 30_000 + "\n" + "echo $A\n" * 8000
DEEP = "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000)) + "mis: *a2999\n"
LONG = f"a: &a {'x' * 1000}\nmis: [{'*a,' * 5000}]\n"
REFUSED = {
    "a key of 60,000 letters": ("? " + "k" * 60_000 + "\n: 1\nmis: {}", "line 1: 'kkk.*longer key"),
    "a tag of 60,000 letters": ("mis: !!" + "t" * 60_000 + " x", "line 1, column .*no YAML: .*characters"),
    "a value of 60,000 letters": ("mis: " + "v" * 60_000, "mis: got 'vvv.*60002 characters"),
    "a hexadecimal": ("mis: {weight: {upper: 0x" + "f" * 6000 + "}}", "line 1: '0xfff.* reads as YAML's int"),
    "an empty int": ("mis: {weight: {upper: !!int ''}}", "line 1: '' reads as YAML's int"),
    "an alias within itself": ("mis: &a {weight: *a}", "an alias .* stands within its own value"),
    "levels behind aliases": (DEEP, "line 66: nested more than 64 levels"),
    "letters behind aliases": (LONG, "aliases .* repeat more than"),
    "a number of 64 bits": ("mis: {weight: {upper: 1e+308}}", "upper: got .*1e.308.*32 bits"),
    "rules": (f"mis: {{weight: null, reject: [{'{upper: 2}, ' * 4000}]}}", "mis.reject: got 4000 items"),
    "python/object": ("mis: !!python/object/apply:os.system [x]", "no YAML: could not determine"),
}
ODD_KEYS = "self: 1\n__class__: 1\n__dict__: 1\n? 1\n: 1\nnull: 1\n"
BREAKS = ["\n", "\r", "\r\n", "\x85", "\u2028", "\x00", "\x1b[31m", "\u202e", "' # ", "]\n"]


def ended(text: str, command: str, file: Path, *options: str) -> int:
    """The exit code of `config COMMAND` on a file with this text, which took no ten seconds."""
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    began = time.process_time()
    code = main(["config", command, str(file), *options])
    assert time.process_time() - began < 10
    return code


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_yaml_is_refused_in_words(name: str, config_command: ConfigCommand):
    text, message = REFUSED[name]
    for command in ("from-verl", "from-areal", "check"):
        told = config_command(text, command=command, code=2).err
        assert len(told) < 600
    with pytest.raises(ConfigError, match=message):
        reading.from_mapping(parsed(text)["mis"])


@pytest.mark.parametrize("spelling", ["mis: {weight: {upper: 2}}\n", "tis_upper_bound: 2\n"])
def test_keys_that_python_owns_are_keys(spelling: str, config_command: ConfigCommand):
    told = config_command(ODD_KEYS + spelling).out
    assert "self: no argument of" in told
    assert "__class__: no argument of" in told


def test_of_hundreds_of_unknown_keys_twenty_are_told(config_command: ConfigCommand):
    keys = "".join(f"k{i}: 1\n" for i in range(300))
    told = config_command(keys + "mis: {weight: {upper: 2}}\n").out
    assert "280 more keys" in told


@pytest.mark.timeout(60)
def test_a_pipe_is_read_where_somebody_writes_and_else_blocks_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    assert text_of(pipe) == ""
    holder = os.open(pipe, os.O_RDWR)
    writer = threading.Timer(0.3, lambda: [os.write(holder, b"mis: {}\n"), os.close(holder)])
    writer.start()
    assert text_of(pipe) == "mis: {}\n"


@pytest.mark.parametrize("text", [DOUBLED, CHAINED, GROWN], ids=["doubled", "chained", "grown"])
@pytest.mark.parametrize(("command", "line"), [("from-verl", VERL), ("from-ms-swift", SWIFT)], ids=["verl", "swift"])
def test_variables_that_grow_are_refused(
    text: str, command: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert ended(text[: LARGEST_FILE - 200] + "\n" + line, command, tmp_path / "run.sh") == 2
    assert "asks for" in (told := capsys.readouterr().err)
    assert "values, and a file of" in told


def test_honest_variables_are_expanded():
    text = "A=" + "x" * 200 + "\n" + "run --flag $A\n" * 500 + SWIFT.replace("\n", " --loss_type $A\n")
    assert ms_swift.translate(text).given["loss_type"] == "x" * 200


@pytest.mark.parametrize("translate", [verl.translate, ms_swift.translate, areal.translate])
@pytest.mark.parametrize(
    "piece",
    [" ", "a[", "'\\\"", "( ", "; ", " algorithm.rollout_", "--rollout_importance_sampling_", "x rollout_is=1\n"],
)
def test_a_script_that_repeats_itself_ends_soon(translate: Callable[[str], object], piece: str):
    """The budget here is a second, so that an end soon behind it is one of the budget, and not of the script."""
    began = time.process_time()
    with patch.object(budget, "SECONDS", replace(budget.SECONDS, base=1, per_byte=0)), suppress(UserError):
        translate('A="x"' + piece * (LARGEST_FILE // len(piece)) + "y")
    assert time.process_time() - began < 10


@pytest.mark.parametrize("call", ["decoupled_token_is(" + "-" * 90_000 + "1)", "a" + " " * 90_000 + "!"])
def test_a_preset_of_verl_is_no_program(call: str, tmp_path: Path):
    assert ended(call, "from-verl", tmp_path / "call.txt") == 2


@pytest.mark.parametrize("value", BREAKS, ids=ascii)
def test_what_is_written_reads_back(value: str):
    """No value of a stranger ends the comment in which it stands."""
    said = yaml.safe_dump(f"x{value}mis: 1")
    loss = f"loss_agg_mode: {said}      policy_loss: {{loss_mode: {said.strip()}}}"
    section = "{rollout_correction: {rollout_is: token, rollout_is_threshold: 2}}"
    swift = "rollout_importance_sampling_mode: token_mask"
    block = f"actor:\n  behav_imp_weight_cap: 5\n  prox_logp_method: {said}rollout:\n  max_head_offpolicyness: {said}"
    for made in (
        verl.translate(f"algorithm: {section}\nactor_rollout_ref:\n  actor:\n      {loss}"),
        ms_swift.translate(f"{swift}\nloss_type: {said}"),
        areal.translate(block),
    ):
        assert yaml.safe_load(made.text()) == {"mis": made.mis}
        assert made.text().isprintable() or set(made.text()) - {"\n"} <= set(filter(str.isprintable, made.text()))


LARGE = base64.b64encode(b"x" * (LARGEST_FILE + 1)).decode()


@pytest.mark.parametrize("payload", ["\xe9", "A", "x!", LARGE], ids=lambda payload: ascii(payload[:9]))
def test_a_path_that_is_no_base64_or_holds_more_than_a_config_is_refused(payload: str):
    with pytest.raises(ConfigError, match="which no config has" if payload == LARGE else "no base64 behind it"):
        keys_of(f"base64:{payload}")


@pytest.mark.parametrize("command", ["check", "from-verl", "from-areal"])
def test_a_path_of_100_kilobytes_is_cut_in_the_error(command: str, capsys: pytest.CaptureFixture[str]):
    assert main(["config", command, "base64:" + "A/" * 50_000]) == 2
    assert len(capsys.readouterr().err) < 2500


@pytest.mark.parametrize("text", ["sglang: &a [*a]", "sglang: " + "[" * 90_000, "sglang: 0x" + "f" * 6000])
def test_groups_of_engines_that_cannot_be_read_are_told(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "engines.yaml").write_text(text)
    args = argparse.Namespace(sglang_config=str(tmp_path / "engines.yaml"))
    assert list(groups(args)) == []
    assert "cannot be read here" in caplog.text


MEANT = st.sampled_from(["token", "sequence", "0.5_2.0", "seq_mean_k1", "${x}", "{lower}"])
VALUES = scalars | st.floats() | st.binary(max_size=3) | MEANT
TREES = st.recursive(VALUES, lambda x: st.lists(x, max_size=3) | st.dictionaries(VALUES, x, max_size=3))
PLACES = {
    "check": [*(f"mis.{name}" for name in ("weight.upper", "weight", "reject", "opsm.delta", "a")), "use_tis"],
    "from-verl": [
        *(f"algorithm.rollout_correction.{name}" for name in verl.KNOWN),
        *(f"actor_rollout_ref.actor.{name}" for name in (*verl.WIDTHS, *verl.TAUS)),
        *("actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.loss_agg_mode"),
        *("trainer.use_v1", "distillation.enabled", "distillation.distillation_loss"),
    ],
    "from-ms-swift": [
        *(*ms_swift.KEYS, *ms_swift.OF_KL, *ms_swift.OF_CLIP, *ms_swift.TAUS, *ms_swift.CLIPS, *ms_swift.UNSERVED)
    ],
    "from-areal": [
        *(f"actor.{name}" for name in (*areal.KNOWN, *areal.OF_SAPO, *areal.UNSERVED)),
        *(f"actor.rejection_sampling.{name}" for name in areal.DEFAULTS),
        *("rollout.max_head_offpolicyness", *areal.CLIPS),
    ],
    "from-trl": [*trl.READ],
}


@pytest.mark.parametrize("command", PLACES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_value_gives_a_config_or_an_error_in_words(
    command: str, data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tree: dict = {}
    drawn = data.draw(st.dictionaries(st.sampled_from(PLACES[command]), TREES, min_size=1, max_size=4))
    for place, value in drawn.items():
        *parents, last = place.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node.get(parent, {}), dict) else {}
        node[last] = value
    code = ended(yaml.safe_dump(tree, allow_unicode=True), command, tmp_path / "f.yaml")
    told = capsys.readouterr()
    assert code in (0, 2)
    assert len(told.err) < 900
    if code == 0 and command != "check":
        reading.from_mapping(yaml.safe_load(told.out)["mis"])


@given(text=st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str):
    for read in (parsed, verl.translate, ms_swift.translate, areal.translate, trl.translate, prime_rl.translate):
        try:
            read(text)
        except UserError as error:
            assert str(error)

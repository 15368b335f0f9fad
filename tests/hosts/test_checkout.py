"""`hosts check`: a checkout made from the table of needs, then moved, cut, and committed step by step."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mis_plugins.__main__ import main
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.adapters.slime import SLIME
from mis_plugins.hosts.adapters.vime import VIME
from mis_plugins.hosts.checkout import given_flags
from mis_plugins.hosts.needs import Need
from mis_plugins.hosts.registry import every_host

RAN, NEWEST = None, 0
LOSSES = "miles/backends/training_utils/loss_hub/losses.py"
ACTOR = "miles/backends/megatron_utils/actor.py"
DATA, PARALLEL = (f"miles/backends/training_utils/{name}.py" for name in ("data", "parallel"))
ENDPOINT = "miles/rollout/generate_utils/generate_endpoint_utils.py"


def definition(name: str, need: Need) -> str:
    """The source of a function that has what the need asks of it."""
    keys = "".join(f"{key!r}: 0, " for key in need.hands)
    body = "".join(f"\n    {name} = 0" for name in need.holds) + f"\n    return {{{keys}}}"
    return f"def {name}({', '.join(need.parameters)}):{body}\n"


def write(root: Path, needs: Any, which: int | None) -> Path:
    """A checkout that answers each need where our own runs did, or at its newest address, with our scripts' flags."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for need in sorted(vars(needs).values(), key=lambda need: not need.hands):
        address = need.addresses[need.ran if which is None else which]
        owner, last = ".".join(address.names[:-1]), address.names[-1]
        source = definition(last, need)
        if owner:
            inner = source if need.parameters else f"def set_{last}(self):\n    self.{last} = 0\n"
            source = "".join(f"    {line}\n" for line in inner.splitlines())
        known = modules[address.module].setdefault(owner, f"class {owner}:\n" if owner else "")
        if need.hands or f"def {last}(" not in known:
            modules[address.module][owner] = known + source
        else:  # one function that two needs read
            both = ", ".join(need.parameters)
            modules[address.module][owner] = known.replace(f"def {last}()", f"def {last}({both})")
    for module, parts in modules.items():
        file = root / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(parts.values()))
    package = needs.tracking.addresses[0].module.partition(".")[0]
    given = given_flags(every_host()[package]) if every_host()[package].records else {}
    (root / package / "arguments.py").write_text("\n".join(map(repr, given)))
    return root


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["hosts", "check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("needs", [MILES, SLIME, VIME])
def test_a_checkout_that_has_everything(needs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, write(tmp_path, needs, RAN))
    assert code == 0 and "MISSING" not in text and "moved" not in text
    assert f"{needs.tracking.addresses[0].module.replace('.', '/')}.py:1" in text


def test_a_checkout_whose_modules_moved_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, write(tmp_path, MILES, NEWEST))
    assert code == 1 and "loss/hub/losses.py:1 (moved)" in text
    assert "policy_loss                       works, at a new address" in text


@pytest.mark.parametrize(
    ("file", "was", "becomes", "found"),
    [
        (LOSSES, "def policy_loss_function", "def renamed", "policy_loss_function: not there"),
        (LOSSES, "'parallel_state': 0, ", "", "no keyword parallel_state"),
        (LOSSES, "'parallel_state': 0, ", "}, {'parallel_state': 0, ", "no keyword"),
        (ENDPOINT, "def compute_routing", "if TYPE_CHECKING:\n  def compute_routing", "_routing_headers: not there"),
        (ENDPOINT, "args, input_ids", "args, ids", "no parameter input_ids"),
        (ENDPOINT, "_headers(args, sample)", "_headers(args, sample, worker)", "a new parameter worker, which no hook"),
        (ENDPOINT, "_headers(args, sample)", "_headers(args, sample, *, a=0, worker)", "a new parameter worker, which"),
        (ENDPOINT, "multimodal_inputs)", "multimodal_inputs, worker, **rest)", "a new parameter worker, which no hook"),
        (ACTOR, "store_prefix, ", "store_prefix, witness, ", "compute_log_prob: a new parameter witness, which no"),
        (DATA, "def DataIterator(", "class DataIterator:\n  def __init__(self, pad, ", "a new parameter pad, which no"),
        (PARALLEL, "_state()", "_state(cell)", "get_parallel_state: a new parameter cell, which no hook of ours gives"),
        (ACTOR, "data_iterator = 0", "pass", "no variable data_iterator"),
        ("miles/utils/replay_base.py", "def routing", "def (", ":all_replay_managers: not there"),
        ("miles/arguments.py", "'--use-tis'", "", "--use-tis: given in scripts/run-"),
    ],
)  # fmt: skip
def test_what_a_hook_would_fail_without_or_at_is_named(
    file: str, was: str, becomes: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, MILES, RAN)
    source = (root / file).read_text()
    assert was in source
    (root / file).write_text(source.replace(was, becomes))
    code, text = told(capsys, root)
    assert code == 2 and found in text


@pytest.mark.parametrize(
    ("file", "was", "becomes"),
    [
        (ENDPOINT, "_headers(args, sample)", "_headers(args, sample, worker=None, *more, of=None, **rest)"),
        (ENDPOINT, "multimodal_inputs)", "multimodal_inputs, *, worker)"),  # given by name, by `more_of`
        (ACTOR, "rollout_id, rollout_data", "rollout_id, rollout_data, witness, *, attempt"),
        (ACTOR, "self, args, role", "self, args, role, cell"),
        ("miles/backends/megatron_utils/model.py", "data_iterator, keys", "data_iterator, keys, pad"),
        (LOSSES, "args, batch", "args, state, batch"),
    ],
)
def test_a_new_parameter_that_no_hook_has_to_give(
    file: str, was: str, becomes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, MILES, RAN)
    source = (root / file).read_text()
    assert was in source
    (root / file).write_text(source.replace(was, becomes))
    # The loss hook of `true_on_policy` alone calls the host's loss; the TIS hook is called from within it.
    assert told(capsys, root)[1].count("MISSING") == (file == LOSSES)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("correction.py", "{call}"),
        ("deep/er/__init__.py", "class Loss:\n    @staticmethod\n    {call}"),
        ("correction.py", "async {call}"),
    ],
)
@pytest.mark.parametrize("needs", [MILES, SLIME, VIME])
def test_a_call_of_the_tis_hook_in_another_file_is_served(
    needs: Any, file: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, needs, RAN)
    need = needs.tis_call
    before = root / f"{need.addresses[need.ran].module.replace('.', '/')}.py"
    before.write_text(before.read_text().replace("'pg_loss': 0, ", ""))
    package = needs.tracking.addresses[0].module.partition(".")[0]
    moved = root / package / file
    moved.parent.mkdir(parents=True, exist_ok=True)
    moved.write_text(source.format(call=definition("weighed", need).replace("\n ", "\n     ")))
    code, text = told(capsys, root)
    assert code == 1 and "MISSING" not in text and f"{package}/{file}:" in text and "(moved)" in text
    assert re.search("compute_mis_weights_with_cp +works, at a new address", text)


def test_nothing_of_the_checkout_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path, MILES, RAN)
    for file in root.rglob("*.py"):
        file.write_text(f"raise SystemExit({str(file)!r})\n{file.read_text()}")
    assert told(capsys, root)[0] == 0


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from .elsewhere import log\n", "miles/utils/tracking_utils/elsewhere.py:2"),
        (
            "try:\n    from miles.utils.tracking_utils.elsewhere import write as log\nexcept ImportError:\n    pass\n",
            ":5",
        ),
        ("from .gone import log\n", "MISSING"),
    ],
)
def test_a_name_is_followed_to_where_it_is_defined(
    source: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, MILES, RAN)
    folder = root / "miles/utils/tracking_utils"
    both = "\ndef log(args, metrics, step_key):\n    pass\n\ndef write(args, metrics, step_key):\n    pass\n"
    (folder / "elsewhere.py").write_text(both)
    (folder / "tracking.py").write_text(source)
    assert found in told(capsys, root)[1]


def test_a_folder_without_a_host_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "miles" / "miles").mkdir(parents=True)  # a folder of checkouts
    code, text = told(capsys, tmp_path)
    assert code == 2 and "no root of a checkout, which holds the package miles or slime or vime" in text
    code, text = told(capsys, tmp_path / "absent")
    assert code == 2 and "absent: no such folder" in text

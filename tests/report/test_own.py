"""The run's own config: found in what the run left, and the config whose numbers the report tells."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_readers import field, logged, reported, some_records, write_lines

from mis_plugins.report.beside import found_config
from mis_plugins.report.readers.files import Problems

MIS = {"weight": {"upper": 3.0}}


def summary(folder: Path, **arguments: Any) -> Path:
    file = folder / "summary.json"
    file.write_text(json.dumps({"status": "finished", "arguments": arguments}, indent=1))
    return file


def wandb(folder: Path, **config: Any) -> Path:
    """An offline wandb run: its first record holds the config."""
    items = b"".join(
        field(1, field(2, key.encode()) + field(16, json.dumps(value).encode())) for key, value in config.items()
    )
    content = field(17, field(1, b"name") + field(4, items))
    file = folder / "run-a.wandb"
    file.write_bytes(b":W&B" + bytes(3) + logged(content))
    return file


@pytest.mark.parametrize("write", [summary, wandb])
def test_a_config_is_found_in_what_a_run_left(tmp_path: Path, write) -> None:
    file = write(tmp_path, use_tis=True, mis=MIS, lr=1e-6, use_te=True)
    problems = Problems()
    found = found_config([file], problems)
    assert found is not None and found.name == f"the config in {file.name}" and not problems.kept
    assert found.config.weight is not None and found.config.weight.upper == 3


OF_ARGUMENTS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "no correction": ({"use_tis": False, "mis": MIS}, False, ""),
    "no key of ours": ({"lr": 1.0}, False, ""),
    "a config that cannot be read": ({"use_tis": True, "mis": {"wait": {}}}, False, "config cannot be read"),
    "a file of the machine, which is not opened": (
        {"use_tis": True, "mis": MIS, "custom_config_path": "/", "use_tiss": True}, True, ""
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "is_found", "told"), OF_ARGUMENTS.values(), ids=OF_ARGUMENTS)
def test_what_arguments_say_of_a_config(tmp_path: Path, arguments: dict[str, Any], is_found: bool, told: str) -> None:
    problems, file = Problems(), summary(tmp_path, **arguments)
    assert (found_config([file], problems) is not None) == is_found
    assert [str(one).startswith(f"{file}: the run's own {told}") for one in problems.kept] == [True] * bool(told)


@pytest.mark.usefixtures("no_pictures")
def test_numbers_are_of_the_config_that_is_named(tmp_path: Path) -> None:
    """A window around 1 drops tokens, and the report says whose window it was."""
    summary(tmp_path, use_tis=True, mis={"weight": {"upper": 1.1, "bound": "mask"}})
    write_lines(tmp_path / "run.jsonl", some_records(lengths=(200, 200)))
    code, told = reported(tmp_path)
    assert code == 0 and told["whole"]["kept_fraction"] < 0.9
    assert "the run's config: the config in summary.json" in told["inputs"]

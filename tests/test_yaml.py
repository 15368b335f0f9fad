"""Every preset loads, says what this table says, and is found from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import yaml
from batches import host_args, ratio_batch
from drive import assert_matches_oracle, run

from mis_plugins.__main__ import main
from mis_plugins.config import (
    CorrectionConfig,
    NormalizeConfig,
    RejectRule,
    WeightConfig,
)
from mis_plugins.errors import ConfigError
from mis_plugins.reading import from_args, from_flat, preset_path

FOLDER = Path(__file__).parent.parent / "yaml"
FILES = sorted(FOLDER.glob("*.yaml"))

DOCUMENTED = {
    "tis": CorrectionConfig(WeightConfig("token", "truncate", upper=2.0)),
    "sequence": CorrectionConfig(WeightConfig("sequence", "truncate", upper=5.0)),
    "icepop": CorrectionConfig(WeightConfig("token", "mask", lower=0.5, upper=5.0)),
    "geometric-mis": CorrectionConfig(
        WeightConfig("token", "truncate", upper=2.0, normalize=NormalizeConfig("micro_batch", "kept")),
        (RejectRule(over="mean", lower=0.99, upper=1.001),),
    ),
    "mis": CorrectionConfig(
        WeightConfig("token", "truncate", upper=2.0, normalize=NormalizeConfig("micro_batch", "valid")),
        (RejectRule(over="token", lower=0.5, upper=2.0), RejectRule(over="min", lower=1e-4)),
    ),
}


def keys_of(file: Path) -> dict:
    return yaml.safe_load(file.read_text())


def test_the_table_is_complete():
    assert {file.stem for file in FILES} == DOCUMENTED.keys()
    assert not (FOLDER / "__init__.py").exists(), "it would shadow PyYAML"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_equals_its_documented_config(file: Path):
    assert from_args(host_args(**keys_of(file))) == DOCUMENTED[file.stem]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_form(file: Path):
    """The formula first; short; one key, so that a typo cannot pass; `use_tis` is the user's to set."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# w") and "=" in lines[0]
    assert len(lines) < 25
    assert keys_of(file).keys() == {"mis"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_corrects_as_the_oracle_says(file: Path):
    ratios = [[0.995, 1.0, 1.003], [3.0, 0.9], [0.3, 1.2, 1.1], [1e-5, 1.0], [6.0], [1.0]]
    batch = ratio_batch(ratios)
    config = keys_of(file)["mis"]
    for rule in config.get("reject", []):
        rule.update(
            {side: float(rule[side]) for side in ("lower", "upper") if side in rule}
        )  # 1e-4 is text to YAML
    assert_matches_oracle(run(batch, config), batch, oracle.correct(batch.samples, config))


def test_mis_yaml_is_miless_default():
    """The same as the flat keys of the file that Miles ships."""
    flat = {
        "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.0, "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True,
    }  # fmt: skip
    assert from_args(host_args(**keys_of(FOLDER / "mis.yaml"))) == from_flat(flat)


# ------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_check_passes_and_describes(file: Path, capsys: pytest.CaptureFixture):
    assert main(["config", "check", str(file)]) == 0
    told = capsys.readouterr().out
    weight = DOCUMENTED[file.stem].weight
    assert weight is not None and f"{weight.upper:g}" in told
    assert told.count("reject:") == len(DOCUMENTED[file.stem].reject)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mis: {weight: {levle: token}}", "mis.weight.levle"),
        ("tis_level: seq\ntis_upper_bound: 2.0", "tis_level"),
        ("tis_upper_bound: -1", "tis_upper_bound"),
        ("mis: {weight: {}}\ntis_level: token", "both"),
        ("[1, 2]", "mapping"),
        ("mis: {weight: ", ""),  # not yaml
        ("miss: {weight: {upper: 2.0}}", "nothing says how to correct"),  # a typo of the key itself
        ("tis_level: sequence", "tis_upper_bound"),
        ("{}", "nothing says how to correct"),
    ],
)
def test_check_refuses(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Exit code 2, the key on stderr: the launch scripts stop before the job."""
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 2
    told = capsys.readouterr().err
    assert str(file) in told and message in told


def test_check_passes_a_file_for_metrics_alone(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "metrics.yaml"
    file.write_text("mis: {metrics: core}")
    assert main(["config", "check", str(file)]) == 0
    assert "core" in capsys.readouterr().out


def test_check_refuses_a_missing_file(capsys: pytest.CaptureFixture):
    assert main(["config", "check", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_a_preset_is_found_from_another_folder(tmp_path: Path):
    """What `--custom-config-path $(python -m mis_plugins config path mis)` runs."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    command = [sys.executable, "-m", "mis_plugins", "config", "path", "mis"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).read_text() == (FOLDER / "mis.yaml").read_text()


def test_an_unknown_preset():
    with pytest.raises(ConfigError, match="preset 'miss': unknown; did you mean mis"):
        preset_path("miss")

"""Keys of a file that are ours but for letter case, dots or a missing prefix: a host makes arguments nobody reads."""

from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from batches import ratio_batch
from commands import ConfigCommand

from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.config.flat import from_flat
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.arguments import kinds, recorded

MIS = {"mis": {"weight": {}}}
FLAT = {"tis_upper_bound": 2.0}
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"MIS": {"weight": {}}}, "mis"),
    (MIS, {"Use_TIS": True}, "use_tis"),
    (MIS, {"mis.weight.upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (MIS, {"MIS.reject.upper": 3}, "`mis: {reject: [{upper: ...}]}`"),
    (MIS, {"weight.upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (MIS, {"Reject": []}, "`mis: {reject: ...}`"),
    (MIS, {"upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (FLAT, {"USE_RS": True}, "use_rs"),
    (FLAT, {"RS_Veto_Treshold": 1e-4}, "rs_veto_threshold"),
    (FLAT, {"rs.veto_threshold": 1e-4}, "rs_veto_threshold"),
    (FLAT, {"veto_threshold": 1e-4}, "rs_veto_threshold"),
    (FLAT, {"Veto-Threshold": 1e-4}, "rs_veto_threshold"),
    (FLAT, {"lower_bound": 0.5}, "tis_lower_bound or rs_lower_bound"),
    (FLAT, {"mode": "mask"}, "tis_mode"),
    (FLAT, {"tis": True}, "use_tis"),
    (FLAT, {"use_rss": True}, "use_rs"),
    (FLAT, {"use_masks": False}, "use_mask"),
]


@pytest.mark.parametrize(("given", "other", "meant"), OTHERS)
def test_the_users_key_and_the_right_one_are_named(
    given: dict, other: dict, meant: str, tmp_path: Path, config_command: ConfigCommand
):
    told = f"{next(iter(other))}: nobody reads this key; write {meant}"
    assert told in config_command({**given, **other}, command="check", code=2).err
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**given, **other}))
    args = Namespace(**{"use_tis": True, "custom_config_path": str(file), **given, **other})
    with pytest.raises(ConfigError) as caught:
        mis.compute_mis_weights_with_cp(args, **ratio_batch([[0.9, 1.1]]).hook_kwargs())
    assert str(caught.value) == told


def test_the_file_of_miles_on_fsdp_is_read_too(tmp_path: Path):
    (tmp_path / "fsdp.yaml").write_text("MIS: {}\n")
    args = Namespace(train_backend="fsdp", config=str(tmp_path / "fsdp.yaml"), use_tis=False, **FLAT)
    with pytest.raises(ConfigError, match="^MIS: nobody reads this key; write mis$"):
        reading.from_args(args)


def test_an_argument_of_a_hosts_parser_is_none_of_ours(tmp_path: Path):
    others = {key: value for _, other, _ in OTHERS for key, value in other.items()}
    args = Namespace(**{**others, **FLAT, "use_tis": True})
    assert reading.from_args(args) == from_flat(FLAT)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(FLAT))
    args.custom_config_path = str(tmp_path / "config.yaml")
    assert reading.from_args(args) == from_flat(FLAT)


@pytest.mark.parametrize("given", [MIS, FLAT])
def test_a_file_may_say_any_argument_of_a_host(given: dict):
    names = {*chain(*map(kinds, recorded().values()))}
    reading.check_names([*names, *given, "actor", "rollout", "my_level", "weights", "reward.upper"])


def test_a_word_without_ours_beside_it_is_the_users_own():
    reading.check_names(["level", "mode", "mask", "upper"])

"""The switches of Miles's flat keys, `use_rs` and the blog's `use_mask`, and keys that merely look like ours.

Some are ours but for letter case, dots or a missing prefix: a host makes arguments of them that nobody reads.
"""

import difflib
import re
import socket
from argparse import Namespace
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from batches import host_args, ratio_batch
from commands import ConfigCommand
from drive import same_bytes
from launchers import accepted
from test_loss_hook import drive, flags, hosts, random_step

from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.config.flat import from_flat
from mis_plugins.config.model import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.arguments import kinds, recorded

__all__ = ["hosts"]  # the fixture that stands in for the hosts' modules

BOUNDS = {"rs_level": "token", "rs_lower_bound": 0.7, "rs_upper_bound": 1.5}
FLAT = {"tis_upper_bound": 2.0, **BOUNDS}
HOOKS = {
    "megatron": (mis.compute_mis_weights_with_cp, 1.0),
    "fsdp": (mis.compute_mis_weights_fsdp, 2 / 3),  # two of three tokens are kept, and the host divides by those
}


def hooked(args: Any) -> Any:
    """What the TIS hook returns for one sequence."""
    return mis.compute_mis_weights_with_cp(args, **ratio_batch([[0.9, 1.1]]).hook_kwargs())


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[..., Namespace]:
    """Make a host's arguments beside a file with these keys, whose path is the argument `given_as`."""

    def arguments(keys: dict, *, given_as: str = "custom_config_path", **others: Any) -> Namespace:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
        return Namespace(**others, **{given_as: str(tmp_path / "config.yaml")})

    return arguments


# ------------------------------------------------------------------------------------------------------- use_mask


def test_use_mask_is_a_rule_whose_tokens_stay_in_the_denominator():
    config = from_flat(FLAT | {"use_mask": True})
    rule = RejectRule(lower=0.7, upper=1.5)
    assert config == CorrectionConfig(WeightConfig(upper=2.0), (rule,), "full") and config.denominator == "original"
    assert from_flat(FLAT | {"use_mask": False}).reject == ()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bounds", [{}, {"rs_upper_bound": 3.0}, {"tis_lower_bound": 0.2}])
def test_use_mask_reads_the_bounds_that_use_rs_reads(level: str, bounds: dict):
    keys = {"tis_upper_bound": 2.0, "rs_level": level, **bounds}
    masks, drops = (from_flat(keys | {switch: True}) for switch in ("use_mask", "use_rs"))
    assert masks == drops and masks.reject


@pytest.mark.parametrize("hook", HOOKS)
def test_masked_tokens_get_no_gradient_and_the_batch_keeps_its_structure(hook: str):
    """On FSDP too, where the host divides by what the masks keep, and `use_rs` leaves it at that."""
    batch = ratio_batch([[0.9, 3.0, 1.1], [1.2]])
    function, kept = HOOKS[hook]
    kwargs = batch.hook_kwargs()
    loss_in = kwargs["pg_loss"]
    backend = {"train_backend": "fsdp" if hook == "fsdp" else "megatron"}
    loss, masks, _ = function(host_args(**FLAT, **backend, use_mask=True), **kwargs)
    assert [mask.tolist() for mask in masks] == [[1, 0, 1], [1]]
    applied = torch.tensor([0.9 * kept, 0.0, 1.1 * kept, 1.2])
    torch.testing.assert_close(loss, loss_in * applied)
    dropped, masks, _ = function(host_args(**FLAT, **backend, use_rs=True), **batch.hook_kwargs())
    assert [mask.tolist() for mask in masks] == [[1, 0, 1], [1]]
    torch.testing.assert_close(dropped, loss_in * torch.tensor([0.9, 0.0, 1.1, 1.2]))


def test_the_loss_hook_masks():
    step = random_step(0)
    batch, logits = step.batch(), torch.cat(step.rows("target"))
    losses = [drive(flags(**FLAT, **switch), batch, logits) for switch in ({"use_mask": True}, {"use_mask": False})]
    nested = {"weight": {"upper": 2.0}, "reject": [{"lower": 0.7, "upper": 1.5}]}
    assert same_bytes(losses[0].gradient, drive(flags(mis=nested), batch, logits).gradient)
    assert (losses[0].gradient == 0).sum() > (losses[1].gradient == 0).sum()


def test_check_says_what_use_mask_does(config_command: ConfigCommand):
    told = config_command(FLAT | {"use_mask": True}).out
    assert "reject: tokens whose ratio is below 0.7 or above 1.5" in told
    assert "denominator: a sequence's loss is divided by the tokens before rejection" in told


@pytest.mark.parametrize("lowest", [0, 0.0, -0.5])
@pytest.mark.parametrize("switch", ["use_rs", "use_mask"])
def test_a_lower_bound_of_0_bounds_nothing(switch: str, lowest: float):
    """Miles's mis.py: `weights.clamp(0, upper)` raises nothing, and `weights >= 0` rejects nothing."""
    keys = {switch: True, "tis_upper_bound": 3.0, "tis_lower_bound": lowest}
    unset = keys | {"tis_lower_bound": None}
    for mode in ("clip", "mask"):
        config = from_flat(keys | {"tis_mode": mode})
        assert config.weight is not None and config.weight.floor == 0
        assert config.weight == WeightConfig(bound=mode, lower=0, upper=3)
        assert config.reject == (RejectRule(upper=3.0),)  # falls back to tis_lower_bound, as in mis.py
        assert from_flat(unset | {"tis_mode": mode}).reject == (RejectRule(lower=1 / 3, upper=3),)
    own = from_flat(unset | {"rs_lower_bound": lowest})
    assert own.weight == WeightConfig(upper=3.0) and own.reject == (RejectRule(upper=3.0),)


@pytest.mark.parametrize("name", ["tis_lower_bound", "rs_lower_bound"])
def test_the_way_to_no_lower_bound_is_told(name: str):
    """Advice names 0, because null is 1 / upper."""
    keys = {"use_rs": True, "tis_mode": "mask", "tis_upper_bound": 3.0, name: float("nan")}
    with pytest.raises(ConfigError, match=rf"^{name}: got nan; .* or 0 for no lower bound$"):
        from_flat(keys)


def test_without_use_tis_use_mask_is_named(said_once: Callable[[], list[str]]):
    hooked(host_args(**FLAT, use_mask=True, use_tis=False))
    assert "whatever tis_upper_bound, use_mask say" in said_once()[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_rs": True, "use_mask": True}, r"^use_rs and use_mask are both true: .*; keep one of them$"),
        ({"use_mask": "yes"}, r"^use_mask: got 'yes'; expected true or false$"),
        ({"use_mask": True, "rs_lower_bound": 3.0}, r"^rs_lower_bound: 3 is not below rs_upper_bound: 1\.5$"),
        ({"use_mask": True, "mis": {"weight": {}}}, r"^both `mis:` and the flat key tis_upper_bound are set"),
    ],
)
def test_a_use_mask_that_cannot_be(keys: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        reading.from_args(SimpleNamespace(use_tis=True, **FLAT | keys))


# ------------------------------------------------------------------------------------------------- keys without effect


@pytest.mark.parametrize("switches", [{}, {"use_rs": False}, {"use_rs": False, "use_mask": False}])
@pytest.mark.parametrize("path", ["tis", "loss"])
def test_a_rule_that_nothing_switches_on_is_told_once(switches: dict, path: str, said_once: Callable[[], list[str]]):
    keys: dict[str, Any] = FLAT | {"rs_lower_bound": None} | switches
    for _ in range(2):
        if path == "tis":
            hooked(host_args(**keys))
        else:
            step = random_step(0)
            drive(flags(**keys), step.batch(), torch.cat(step.rows("target")))
    said = "rs_level, rs_upper_bound: without effect, use_rs is off; say use_rs: true, or drop what has no effect"
    assert said_once() == [said]


@pytest.mark.parametrize("switch", ["use_rs", "use_mask", None])
def test_check_tells_of_a_rule_that_nothing_switches_on(switch: str | None, config_command: ConfigCommand):
    told = config_command(FLAT | ({switch: True} if switch else {})).out
    idle = "warning: rs_level, rs_lower_bound, rs_upper_bound: without effect, use_rs is off"
    assert (idle in told) == (switch is None)


# ---------------------------------------------------------------------------------------------------------- near misses

MISSES = [
    ("use-mask", "use_mask"),
    ("tis-level", "tis_level"),
    ("tis_levels", "tis_level"),
    ("rs_upper", "rs_upper_bound"),
]


@pytest.mark.parametrize(("key", "meant"), MISSES)
def test_a_near_miss_is_refused_by_commands_and_by_a_hook(key: str, meant: str, config_command: ConfigCommand):
    said = f"{key}: unknown key; did you mean {meant}?"
    for command, value in product(("check", "show"), (True, False)):
        assert said in config_command({"tis_upper_bound": 2.0, key: value}, command=command, code=2).err
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        hooked(host_args(tis_upper_bound=2.0, **{key: True}))


def test_no_argument_of_a_host_is_a_near_miss():
    names = [
        flag.removeprefix("--").replace("-", "_")
        for flag in accepted(*chain(*(host.records for host in recorded().values())))
    ]
    names += chain(*map(kinds, recorded().values()))
    assert "use_kl_loss" in names
    args = Namespace(**dict.fromkeys([*names, "use_te"], True) | {"use_tis": True, "tis_upper_bound": 2.0})
    args.tis_clip = args.tis_clip_low = 1.0
    assert reading.from_args(args) == from_flat({"tis_upper_bound": 2.0})


def test_an_argument_of_a_newer_host_is_no_near_miss(from_file: Callable[..., Namespace]):
    """The file at hand shows that no file said so."""
    said, next_one = {"tis_upper_bound": 2.0}, {"tis_next": True}
    by_flag = from_file(said, use_tis=True, **said, **next_one)
    assert reading.from_args(by_flag) == from_flat(said)
    by_flag.custom_config_path += ".gone"
    with pytest.raises(ConfigError, match=f"^node {socket.gethostname()} cannot read .*config.yaml.gone"):
        reading.from_args(by_flag)
    with pytest.raises(ConfigError, match="^tis_next: unknown key"):
        reading.from_args(from_file(said | next_one, use_tis=True, **said, **next_one))


def test_keys_of_the_host_in_a_file_are_judged_once(
    from_file: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
):
    """A host asks for each micro-batch, and to look for keys that are near costs more than the whole call."""
    said = {"tis_upper_bound": 2.0, "lr_of_this_test": 1e-6}
    args = from_file(said, **said)
    first = reading.from_args(args)
    monkeypatch.delattr(difflib, "get_close_matches")
    assert reading.from_args(args) is first


FSDP = {"use_tis": False, "tis_hf": True, "custom_config_path": None, "train_backend": "fsdp"}


def test_an_argument_of_a_newer_host_without_a_file_is_no_near_miss():
    args = Namespace(**FSDP | {"train_backend": "megatron", "config": None})
    assert reading.from_args(args) == CorrectionConfig()


def test_an_argument_of_a_newer_miles_on_fsdp_is_a_near_miss_where_its_file_holds_it(
    from_file: Callable[..., Namespace],
):
    args = from_file({"lr": 1e-6}, given_as="config", **FSDP)
    assert reading.from_args(args) == CorrectionConfig()
    with pytest.raises(ConfigError, match="^tis_hf: unknown key"):
        reading.from_args(from_file({"tis_hf": True}, given_as="config", **FSDP))


# ------------------------------------------------------------------------------------------------------ other spellings

MIS = {"mis": {"weight": {}}}
CAP = {"tis_upper_bound": 2.0}
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"MIS": {"weight": {}}}, "mis"),
    (MIS, {"Use_TIS": True}, "use_tis"),
    (MIS, {"mis.weight.upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (MIS, {"MIS.reject.upper": 3}, "`mis: {reject: [{upper: ...}]}`"),
    (MIS, {"weight.upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (MIS, {"Reject": []}, "`mis: {reject: ...}`"),
    (MIS, {"upper": 3}, "`mis: {weight: {upper: ...}}`"),
    (CAP, {"USE_RS": True}, "use_rs"),
    (CAP, {"RS_Veto_Treshold": 1e-4}, "rs_veto_threshold"),
    (CAP, {"rs.veto_threshold": 1e-4}, "rs_veto_threshold"),
    (CAP, {"veto_threshold": 1e-4}, "rs_veto_threshold"),
    (CAP, {"Veto-Threshold": 1e-4}, "rs_veto_threshold"),
    (CAP, {"lower_bound": 0.5}, "tis_lower_bound or rs_lower_bound"),
    (CAP, {"mode": "mask"}, "tis_mode"),
    (CAP, {"tis": True}, "use_tis"),
    (CAP, {"use_rss": True}, "use_rs"),
    (CAP, {"use_masks": False}, "use_mask"),
]


@pytest.mark.parametrize(("given", "other", "meant"), OTHERS)
def test_the_users_key_and_the_right_one_are_named(
    given: dict, other: dict, meant: str, from_file: Callable[..., Namespace], config_command: ConfigCommand
):
    told, keys = f"{next(iter(other))}: nobody reads this key; write {meant}", {**given, **other}
    assert told in config_command(keys, code=2).err
    with pytest.raises(ConfigError) as caught:
        hooked(from_file(keys, **{"use_tis": True, **keys}))
    assert str(caught.value) == told


def test_the_file_of_miles_on_fsdp_is_read_too(from_file: Callable[..., Namespace]):
    with pytest.raises(ConfigError, match="^MIS: nobody reads this key; write mis$"):
        reading.from_args(from_file({"MIS": {}}, given_as="config", train_backend="fsdp", use_tis=False, **CAP))


def test_an_argument_of_a_hosts_parser_is_none_of_ours(from_file: Callable[..., Namespace]):
    given = {key: value for _, other, _ in OTHERS for key, value in other.items()} | CAP | {"use_tis": True}
    for args in (Namespace(**given), from_file(CAP, **given)):
        assert reading.from_args(args) == from_flat(CAP)


@pytest.mark.parametrize("given", [MIS, CAP])
def test_a_file_may_say_any_argument_of_a_host(given: dict):
    names = {*chain(*map(kinds, recorded().values()))}
    reading.check_names([*names, *given, "actor", "rollout", "my_level", "weights", "reward.upper"])


def test_a_word_without_ours_beside_it_is_the_users_own():
    reading.check_names(["level", "mode", "mask", "upper"])

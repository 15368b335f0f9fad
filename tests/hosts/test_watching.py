"""A run that only watches: the loss hook leaves the host's own loss and reports metrics, and says what does not act."""

import base64
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drive import same_bytes
from test_loss_hook import Outcome, assert_same, call, drive, flags, hosts, random_step

from lab.host.cli.arguments import merge_custom_config
from mis_plugins import mis
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import uncorrected
from mis_plugins.hosts.step_report import Recorder

__all__ = ["hosts"]  # the fixture that stands in for the hosts' modules

NESTED = {"mis": {"weight": {"upper": 1.05}, "reject": [{"over": "min", "lower": 0.8}]}}
FLAT = {"tis_upper_bound": 1.5, "tis_mode": "mask", "use_rs": True, "rs_level": "geometric"}
MORE = {"mis": {"opsm": {"delta": 1e-4}, "objective": {"surrogate": "cispo"}, "weight": {"upper": 1.05}}}
BYPASS = {"mis": {"objective": {"old": "behavior"}}}
CORRECTING = [NESTED, FLAT, MORE, BYPASS]


@pytest.fixture(autouse=True)
def step_hook_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(0, 0)))


def from_file(path: Path, keys: dict[str, Any], **settings: Any) -> Namespace:
    """The arguments of a host that has read such a file: each key is set over the default."""
    path.write_text(yaml.safe_dump(keys))
    return Namespace(**vars(flags(custom_config_path=str(path), **settings)) | keys)


def loss_of(args: Namespace) -> Outcome:
    step = random_step(0)
    return drive(args, step.batch(), torch.cat(step.rows("target")))


def watches(args: Namespace) -> bool:
    """Whether the loss is the host's own."""
    return same_bytes(loss_of(args).loss, call(random_step(0)).loss)


@pytest.mark.parametrize("keys", CORRECTING)
def test_the_hosts_loss_is_left_where_a_file_or_a_flag_says_that_the_run_watches(keys: dict, tmp_path: Path):
    plain = call(random_step(0))
    watched = loss_of(from_file(tmp_path / "off.yaml", keys | {"use_tis": False}))
    assert_same(watched, plain)
    assert "mis_k3_kl" in watched.metrics.keys()
    assert_same(loss_of(from_file(tmp_path / "flag.yaml", keys, get_mismatch_metrics=True)), plain)
    assert_same(loss_of(from_file(tmp_path / "said.yaml", keys | {"get_mismatch_metrics": True})), plain)
    assert not watches(from_file(tmp_path / "on.yaml", keys))


@pytest.mark.parametrize("keys", [NESTED, FLAT, MORE])
def test_use_tis_corrects_whatever_watches(keys: dict, tmp_path: Path, said_once: Callable[[], list[str]]):
    both = {"use_tis": True, "get_mismatch_metrics": True}
    corrected = loss_of(Namespace(**vars(flags()) | keys))
    assert not same_bytes(corrected.loss, call(random_step(0), {"metrics": "full"}).loss)
    assert_same(loss_of(from_file(tmp_path / "mis.yaml", keys | both)), corrected)
    assert said_once() == ["--get-mismatch-metrics and --use-tis are both set: the loss is corrected"]


def test_an_argument_whose_default_is_false_is_not_the_users_word(tmp_path: Path):
    corrected = call(random_step(0), NESTED["mis"], use_tis=False, get_mismatch_metrics=False)
    assert not same_bytes(corrected.loss, call(random_step(0)).loss)
    silent = from_file(tmp_path / "mis.yaml", NESTED | {"get_mismatch_metrics": False})
    assert_same(loss_of(silent), corrected)


def test_the_hosts_own_objective_and_opsm_act_all_the_same(tmp_path: Path):
    own: dict[str, Any] = {"use_opsm": True, "opsm_delta": 0.05, "advantage_estimator": "gspo"}
    watched = loss_of(from_file(tmp_path / "mis.yaml", MORE | {"use_tis": False}, **own))
    assert_same(watched, call(random_step(0), **own))
    assert not same_bytes(watched.loss, call(random_step(0)).loss)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (NESTED, "mis.weight, mis.reject"),
        (FLAT, "tis_upper_bound, use_rs"),
        ({"mis": {"segment_wise": {}}}, "mis.segment_wise"),
        ({"mis": {"segment_wise": {}, "weight": {}}}, "mis.weight"),
        (MORE, "mis.weight, mis.opsm, mis.objective"),
        (BYPASS, "mis.objective"),
        ({"use_rs": True}, "use_rs"),
    ],
)
def test_what_does_not_act_is_named_once(keys: dict, named: str, tmp_path: Path, said_once: Callable[[], list[str]]):
    path = tmp_path / "mis.yaml"
    by_file = from_file(path, keys | {"use_tis": False})
    by_flag = Namespace(**vars(flags(get_mismatch_metrics=True)) | keys)
    for args in (by_file, by_file, by_flag, by_flag):
        loss_of(args)
    nothing = f"metrics only, nothing is weighed or rejected, whatever {named} say"
    assert said_once() == [
        f"use_tis: false in --custom-config-path {path}: {nothing}; say true there to correct, or drop it",
        f"--get-mismatch-metrics without --use-tis: {nothing}; give --use-tis to correct",
    ]


def test_a_file_that_this_worker_cannot_read_is_refused(tmp_path: Path):
    """It may have said `use_tis: false`: neither answer is safe."""
    args = from_file(tmp_path / "mis.yaml", NESTED)
    (tmp_path / "mis.yaml").unlink()
    with pytest.raises(
        ConfigError,
        match=r"--custom-config-path .*mis\.yaml: whether it says use_tis: false cannot .* give the whole path",
    ):
        loss_of(args)
    args.use_tis = True
    assert not watches(args)
    args.use_tis, args.get_mismatch_metrics = False, True
    assert_same(loss_of(args), call(random_step(0)))


def test_a_file_is_read_once_a_job(tmp_path: Path):
    """A host asks for each micro-batch, and a file may be gone by then."""
    args = from_file(tmp_path / "mis.yaml", NESTED | {"use_tis": False})
    plain = call(random_step(0))
    assert_same(loss_of(args), plain)
    (tmp_path / "mis.yaml").unlink()
    assert_same(loss_of(args), plain)


@pytest.mark.parametrize(("said", "is_left"), [({"use_tis": False}, True), ({}, False)])
def test_miles_takes_the_file_itself_in_base64(said: dict, is_left: bool):
    payload = base64.b64encode(yaml.safe_dump(NESTED | said).encode()).decode()
    args = flags(custom_config_path=f"base64:{payload}", n_samples_per_prompt=2)
    merge_custom_config(args, args.custom_config_path)
    assert args.mis == NESTED["mis"]
    assert watches(args) == is_left


@pytest.mark.parametrize(("backend", "is_left"), [("fsdp", True), ("megatron", False)])
def test_miles_on_fsdp_has_a_file_of_its_own(backend: str, is_left: bool, tmp_path: Path):
    """`--config` sets defaults there, which the command line overrides; elsewhere it is nobody's word."""
    (tmp_path / "fsdp.yaml").write_text("use_tis: false\nlr: 1.0e-6\n")
    args = flags(config=str(tmp_path / "fsdp.yaml"), train_backend=backend, lr=2e-6, **NESTED)
    assert watches(args) == is_left


def changed(folder: Path) -> Namespace:
    """Arguments of a file that was another when the job read it."""
    args = from_file(folder / "mis.yaml", NESTED)
    from_file(folder / "mis.yaml", {"mis": {"weight": {"upper": 3}}, "use_tis": False})
    return args


# Without a `tis_upper_bound` nobody reads flat keys, and the loss hook would correct nothing.
REFUSED: dict[str, tuple[Callable[[Path], Namespace], str]] = {
    "a file that has changed": (changed, r"mis\.yaml: mis has changed since the job read the file"),
    "no base64": (lambda folder: flags(custom_config_path="base64:mis.yaml", **NESTED),
                  r"^base64:mis\.yaml: base64: no base64 behind it"),
    "no file, which nobody read": (lambda folder: flags(custom_config_path=str(folder / "gone.yaml")),
                                   r"node .* cannot read .*gone\.yaml"),
    "flat keys by flag": (lambda folder: flags(use_rs=True, rs_veto_threshold=1e-4),
                          "^use_rs, rs_veto_threshold: no effect without a tis_upper_bound"),
    "flat keys in a file": (lambda folder: from_file(folder / "mis.yaml", {"tis_level": "token"}),
                            "^tis_level: no effect without a tis_upper_bound"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_be_what_the_user_said_is_refused(case: str, tmp_path: Path):
    make, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        loss_of(make(tmp_path))


def test_the_mean_of_a_rollout_has_no_effect_where_the_loss_hook_watches(tmp_path: Path):
    keys = {"mis": {"weight": {"normalize": {"scope": "rollout"}}}, "use_tis": False}
    args = from_file(tmp_path / "mis.yaml", keys, loss_type="custom_loss")
    with pytest.raises(ConfigError, match="normalize_rollout has no effect without --use-tis"):
        mis.normalize_rollout(args, 0, {})


def test_metrics_keep_their_size(tmp_path: Path):
    keys = {"mis": {"weight": {"upper": 1.05}, "metrics": "core"}, "use_tis": False}
    args = from_file(tmp_path / "mis.yaml", keys)
    left = uncorrected.for_loss_hook(args, mis.reading.from_args(args))
    assert left == mis.CorrectionConfig(metrics="core")

"""Every kind of object that a host may hand as its arguments is read through one view, and the hooks answer alike."""

import base64
import copy
import os
import socket
import sys
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from batches import host_args, ratio_batch
from pydantic import BaseModel, ConfigDict, create_model

from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig, WeightConfig
from mis_plugins.config.view import original, stamp, view
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import registry, uncorrected

KEYS: dict[str, Any] = {
    "use_tis": True, "get_mismatch_metrics": False, "qkv_format": "thd", "mis": {"weight": {"upper": 1.5}},
    "tis_binary_kl_threshold": 5e-3,
}  # fmt: skip


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


Frozen: Any = Extra


class Behind:
    """Slots alone, and a `__dict__` that is a property."""

    __slots__ = ("_values",)

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", MappingProxyType(values))

    @property
    def __dict__(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self._values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def of_fields(**values: Any) -> BaseModel:
    """Declared fields, one of them extra."""
    make: Any = create_model
    fields = {name: (Any, None) for name in list(values)[1:]}
    return make("Arguments", __config__=ConfigDict(frozen=True, extra="allow"), **fields)(**values)


def of_dataclass(**values: Any) -> Any:
    return make_dataclass("Arguments", [(name, Any) for name in values], frozen=True, slots=True)(**values)


KINDS = {
    "Namespace": Namespace,
    "SimpleNamespace": SimpleNamespace,
    "extra fields of pydantic": Frozen,
    "fields of pydantic": of_fields,
    "dataclass": of_dataclass,
    "property": Behind,
    "dict": dict,
    "mapping": lambda **values: MappingProxyType(values),
}


def weights(args: Any) -> torch.Tensor:
    batch = ratio_batch([[0.5, 2.0], [1.2]])
    kwargs = batch.hook_kwargs()
    loss, _, _ = mis.compute_mis_weights_with_cp(args, **kwargs)
    return loss / kwargs["pg_loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_hook_corrects_with_every_kind_of_arguments(kind: str):
    args = KINDS[kind](**KEYS)
    torch.testing.assert_close(weights(args), torch.tensor([0.5, 1.5, 1.2]))
    seen = view(args)
    assert dict(seen) == KEYS and seen.qkv_format == "thd" and original(seen) is args
    assert view(seen) is seen and not hasattr(seen, "absent")
    with pytest.raises(AttributeError, match="^use_tis: the host's arguments are read, and never written$"):
        seen.use_tis = False


def test_arguments_that_say_the_same_are_read_once():
    args = Namespace(**copy.deepcopy(KEYS))
    seen = view(args)
    assert view(args) is seen and view(Namespace(**KEYS)) is not seen
    again = Namespace(**vars(args))
    assert view(args) is not view(again) and original(view(again)) is again, "each has its own view"


@pytest.mark.parametrize("args", [Namespace(), SimpleNamespace(), {}, MappingProxyType({})])
def test_arguments_that_are_none_are_no_object_that_cannot_be_read(args: Any):
    assert dict(view(args)) == {}


CHANGES: dict[str, Callable[[Namespace, Path], Any]] = {
    "an argument": lambda args, file: setattr(args, "mis", {"weight": {"upper": 1.1}}),
    "inside an argument": lambda args, file: args.mis["weight"].update(upper=1.1),
    "another name": lambda args, file: vars(args).update(custom_config=vars(args).pop("custom_config_path")),
    "the file": lambda args, file: file.write_text("use_tis: true\nmis: {weight: {upper: 1.25}}\n"),
    "a module": lambda args, file: sys.modules.pop("made_up_module"),
    "a host": lambda args, file: registry.register(registry.HOSTS["unknown"]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_arguments_are_read_anew_where_something_changes(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the hook answers is never that of the arguments, the file or the host of an earlier call."""
    file = tmp_path / "mis.yaml"
    file.write_text("use_tis: true\nmis: {weight: {upper: 1.5}}\n")
    monkeypatch.setitem(sys.modules, "made_up_module", ModuleType("made_up_module"))
    args = Namespace(**copy.deepcopy(KEYS), custom_config_path=str(file))
    first = weights(args)
    assert torch.equal(weights(args), first)
    seen = view(args)
    CHANGES[what](args, file)
    assert view(args) is not seen
    capped = 1.1 if "argument" in what else 1.5
    torch.testing.assert_close(weights(args), torch.tensor([0.5, capped, min(1.2, capped)]))


class Blind(UserDict[str, Any]):
    """A mapping whose text does not tell what is in it."""

    __repr__ = object.__repr__


class Derived:
    """Arguments of which one is a property, and another an attribute of the class."""

    mis: ClassVar[Any] = {"weight": {"upper": 1.5}}

    def __init__(self) -> None:
        self.get_mismatch_metrics, self._use_tis = False, True

    @property
    def use_tis(self) -> bool:
        return self._use_tis


class Replaced(Derived):
    mis: ClassVar[Any] = {"weight": {"upper": 1.5}}


SWITCHES = {"use_tis": True, "get_mismatch_metrics": False}
UNCORRECTED = torch.tensor([1.0, 1.0, 1.0])
INSIDE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], torch.Tensor]] = {
    "in another order": (
        lambda: {"mis": {"weight": {"upper": 1.5}}, **SWITCHES},
        lambda args: (args.pop("use_tis"), args.update(get_mismatch_metrics=True, use_tis=False)),
        UNCORRECTED,
    ),
    "a mapping of a host's own": (
        lambda: Namespace(**SWITCHES, mis={"weight": Blind(upper=1.5)}),
        lambda args: args.mis["weight"].update(upper=1.1),
        torch.tensor([0.5, 1.1, 1.1]),
    ),
    "a property": (Derived, lambda args: setattr(args, "_use_tis", None), UNCORRECTED),
    "an attribute of a class": (
        Replaced, lambda args: setattr(Replaced, "mis", {"weight": {"upper": 1.1}}), torch.tensor([0.5, 1.1, 1.1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", INSIDE)
def test_what_changes_inside_the_same_arguments_is_read_anew(what: str):
    make, change, expected = INSIDE[what]
    args = make()
    seen = view(args)
    torch.testing.assert_close(weights(args), torch.tensor([0.5, 1.5, 1.2]))
    assert view(args) is seen
    change(args)
    torch.testing.assert_close(weights(args), expected)


def test_the_path_of_a_hook_is_read_anew():
    args = Namespace(**SWITCHES, rollout_function_path=SimpleNamespace(path="made.up", config=None))
    assert view(args).rollout_function_path == "made.up" and view(args) is view(args)
    args.rollout_function_path.path = "made.otherwise"
    assert view(args).rollout_function_path == "made.otherwise"


class Hiding:
    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = Namespace(**KEYS)


class Proxy:
    def __init__(self) -> None:
        self._held = Namespace(**KEYS)


@pytest.mark.parametrize("args", [None, Hiding(), Proxy(), object(), 3])
def test_what_cannot_be_read_is_refused_in_words(args: Any):
    with pytest.raises(InputError, match="in which no argument can be read"):
        view(args)


class Hook(BaseModel):
    model_config = ConfigDict(frozen=True)

    path: str
    config: Any = None


@pytest.mark.parametrize("made", [Hook, SimpleNamespace, dict])
def test_a_hook_may_carry_its_own_config(made: Any):
    """The path reads as text, and the keys of the config as arguments that have no value otherwise."""
    config = Frozen(mis={"weight": {"upper": 1.5}}, tis_level=None)
    hook = made(path="mis_plugins.mis.compute_mis_weights_with_cp", config=config)
    reducer = made(path="mis_plugins.mis.kept_token_mean", config=None)
    flags = {"use_tis": True, "get_mismatch_metrics": False, "qkv_format": "thd", "mis": None}
    args = Frozen(**flags, custom_tis_function_path=hook, custom_pg_loss_reducer_function_path=reducer)
    torch.testing.assert_close(weights(args), torch.tensor([0.5, 1.5, 1.2]))
    seen = view(args)
    assert seen.custom_tis_function_path == "mis_plugins.mis.compute_mis_weights_with_cp"
    assert seen["custom_pg_loss_reducer_function_path"] == "mis_plugins.mis.kept_token_mean"
    kept = Frozen(**dict(args) | {"mis": {"weight": None, "reject": [{"upper": 2}], "denominator": "kept"}})
    with pytest.raises(ConfigError, match="path mis_plugins.mis.kept_token_mean both divide"):
        weights(kept)


# ------------------------------------------------------------------------------------------------- whose a key is

TYPO = "rs_levle"
CORRECTS = CorrectionConfig(WeightConfig(upper=1.5))


NAMED = ("tis_of_the_next_host", "rs_of_the_next_host", "mis_next")
CAPPED = {"weight": {"upper": 100.0}}


def job(folder: Path, said: str | dict[str, Any], inline: bool = False, **given: Any) -> Namespace:
    """The arguments of a host that has read a file, or that made other arguments of it."""
    text = said if isinstance(said, str) else yaml.safe_dump(said)
    (folder / "mis.yaml").write_text(text)
    path = f"base64:{base64.b64encode(text.encode()).decode()}" if inline else str(folder / "mis.yaml")
    keys = {} if isinstance(said, str) else said
    return Namespace(**{"use_tis": True, "custom_config_path": path, **given, **keys})


@dataclass
class HookOf:
    path: str
    config: dict[str, Any]


def class_of(**attributes: Any) -> Any:
    """Arguments that are attributes of a class, beside one of their own."""
    made: Any = type("Arguments", (), {"use_tis": True, **attributes})()
    made.lr = 1e-6
    return made


ASKED = {"use_tis": True, "mis": KEYS["mis"]}
CORRECTED: dict[str, Callable[[Path], Any]] = {
    "a number that a host recorded": lambda folder: Namespace(**ASKED, tis_binary_kl_threshold=5e-3),
    "none of a number that a host recorded": lambda folder: Namespace(
        **ASKED, tis_binary_kl_threshold=None, custom_config_path=None
    ),
    "a name of the host, beside a file": lambda folder: job(folder, {"mis": KEYS["mis"]}, **dict.fromkeys(NAMED, 1)),
    "a name of the host, beside a file in base64": lambda folder: job(
        folder, {"mis": KEYS["mis"]}, True, **dict.fromkeys(NAMED, 1)
    ),
    "a name of a host that reads no file": lambda folder: Namespace(
        **ASKED, custom_config_path=None, rejection_sampling=True, **{TYPO: 1}
    ),
    "attributes of a class": lambda folder: class_of(qkv_format="thd", mis=KEYS["mis"]),
    "numbers that a typed host made of a file's texts": lambda folder: job(
        folder, "tis_clip: 2e1\nmis: {weight: {upper: 1.5}}\n", tis_clip=20.0, mis=KEYS["mis"]
    ),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_what_is_no_key_of_ours_is_left_alone(name: str, tmp_path: Path):
    assert reading.from_args(CORRECTED[name](tmp_path)) == CORRECTS


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_file_a_typo_is_an_error_where_anybody_may_have_written_it(kind: str):
    args = KINDS[kind](**ASKED, **{TYPO: "token"})
    if kind in ("Namespace", "SimpleNamespace", "dict", "mapping"):
        with pytest.raises(ConfigError, match=f"^{TYPO}: unknown key; did you mean rs_level"):
            reading.from_args(args)
    else:
        assert reading.from_args(args) == CORRECTS


def hooked(config: dict[str, Any]) -> Namespace:
    return Namespace(use_tis=True, custom_config_path=None, custom_tis_function_path=HookOf("a.b", config))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{name: (lambda folder, name=name: job(folder, {"mis": KEYS["mis"], name: 1.0}), f"^{name}: unknown key")
       for name in NAMED},
    "in base64": (lambda folder: job(folder, {"mis": KEYS["mis"], NAMED[0]: 1.0}, True), f"^{NAMED[0]}: unknown key"),
    "a rule beside mis": (lambda folder: job(folder, "mis: {weight: {upper: 100}}\nreject: []\n", mis=CAPPED),
                          "stands beside"),
    "a key twice": (lambda folder: job(folder, "mis: {weight: {upper: 100}}\nmis:\n", mis=CAPPED), "again in line 2"),
    "a key that the host lost": (lambda folder: job(folder, "mis: {weight: {upper: 100}}\ntis_clip: 2.0\n", mis=CAPPED),
                                 "says tis_clip"),
    "a switch that the host lost": (lambda folder: job(folder, "use_tis: true\nmis: {}\n", use_tis=False, mis={}),
                                    "says use_tis"),
    "another config": (lambda folder: job(folder, "mis: {weight: {upper: 1.2}}\n", use_tis=False,
                                          mis={"metrics": "core"}), "another mis"),
    "a typed host that lost all keys": (lambda folder: Frozen(**vars(job(folder, "mis: {opsm: {delta: 1.0e-4}}\n",
                                                                         use_tis=False))),
                                        "mis.yaml says mis, and the host has not made arguments of it"),
    "beside a hook, a typo": (lambda folder: hooked({"mis": KEYS["mis"], "tis_uper_bound": 1.2}),
                              "tis_uper_bound: unknown key"),
    "beside a hook, a prefix": (lambda folder: hooked({"mis_weight": {"upper": 1.2}}), "mis_weight: unknown key"),
    "beside a hook, a rule": (lambda folder: hooked({"mis": KEYS["mis"], "reject": []}),
                              "reject: stands beside `mis:`"),
    "two hooks": (lambda folder: Namespace(use_tis=True, a_path=HookOf("a.b", {"mis": KEYS["mis"]}),
                                           b_path=HookOf("c.d", {"mis": CAPPED})),
                  "mis: two hooks' configs give it two values"),
    "nothing in a file": (lambda folder: job(folder, {"lr": 1e-6}),
                          "nothing says how.*arguments in a Namespace.*mis.yaml, which says none"),
    "nothing beside a hook": (lambda folder: Frozen(use_tis=True, custom_tis_function_path=Hook(path="a.b")),
                              "in a Extra.*beside custom_tis_function_path; no --custom-config-path"),
    "nothing in a class": (lambda folder: class_of(), "nothing says how to correct.*1 arguments in a Arguments"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_user_said_and_nobody_reads_is_refused(name: str, tmp_path: Path):
    """A loss hook needs no use_tis, and would leave the loss as it is where its keys were lost."""
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        reading.from_args(make(tmp_path))


def test_a_file_that_this_node_lacks_is_named_with_the_node(tmp_path: Path):
    args = job(tmp_path, {"mis": KEYS["mis"]}, tis_of_the_next_host=1)
    (tmp_path / "mis.yaml").unlink()
    with pytest.raises(ConfigError, match=rf"^node {socket.gethostname()} cannot read .*mis\.yaml"):
        reading.from_args(args)


def test_a_file_is_read_once_and_again_for_another_job(tmp_path: Path):
    first = job(tmp_path, {"mis": KEYS["mis"]}, tis_of_the_next_host=1)
    assert reading.from_args(first) == CORRECTS
    second = job(tmp_path, {"tis_upper_bound": 1.5, "tis_of_the_next_host": 1})
    assert reading.from_args(first) == CORRECTS, "a job goes on with the file that it has read"
    with pytest.raises(ConfigError, match="^tis_of_the_next_host: unknown key"):
        reading.from_args(second)


def test_a_file_that_says_another_weight_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    args = job(tmp_path, "mis: {weight: {upper: 1.2}}\n", mis=CAPPED)
    assert reading.from_args(args) == reading.from_mapping(CAPPED)
    assert "says another mis than the job's arguments" in caplog.text


def test_a_file_edited_for_the_next_job_switches_no_running_job_off(tmp_path: Path):
    args = job(tmp_path, "mis: {weight: {upper: 100}}\n", use_tis=False, mis=CAPPED)
    assert not uncorrected.watches(args)
    (tmp_path / "mis.yaml").write_text("mis: {weight: {upper: 100}}\nuse_tis: false\n")
    assert not uncorrected.watches(args)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [("rollout_log_probs", "samples carry no log-probs of the rollout engine.*--custom-generate-function-path"),
     ("train_log_probs", "neither recomputed nor handed on.*--use-rollout-logprobs: drop it, or give --get-mismatch")],
)  # fmt: skip
def test_log_probs_that_are_none_are_said_plainly(lacks: str, said: str):
    kwargs: dict[str, Any] = ratio_batch([[0.5]]).hook_kwargs() | {lacks: None}
    with pytest.raises(InputError, match=f"^{lacks}: None: .*{said}"):
        mis.compute_mis_weights_with_cp(host_args(mis=KEYS["mis"]), **kwargs)


@pytest.mark.parametrize("stands_still", [True, False])
def test_a_file_that_keeps_its_time_is_read_anew(stands_still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Written twice in one step of the clock; or a copy that keeps the time of its source, as `cp -p` makes."""
    file = tmp_path / "mis.yaml"

    def write(upper: float) -> None:
        file.write_text(f"mis: {{weight: {{upper: {upper}}}}}\n")
        if not stands_still:
            os.utime(file, (10**9, 10**9))

    write(1.5)
    written = file.stat()
    if stands_still:
        monkeypatch.setattr("mis_plugins.config.view.os", SimpleNamespace(stat=lambda path: written))
    first = stamp(file)
    assert stamp(file) == first
    write(1.1)
    assert stamp(file) != first


def test_an_argument_that_cannot_be_compared_is_read_at_every_call():
    class Missing(dict[str, Any]):
        def items(self) -> Any:
            raise LookupError("a mandatory value is missing")

    within: dict[str, Any] = {}
    within["within"] = within
    for other in (Missing(a=1), within):
        args = host_args(mis={"weight": {"upper": 1.5}}, other=other)
        torch.testing.assert_close(weights(args), torch.tensor([0.5, 1.5, 1.2]))
        assert view(args) is not view(args)

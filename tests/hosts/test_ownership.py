"""A parser that demands an owner of each key, as a newer Miles has: a small one of ours, with the signatures read."""

import argparse
import pickle
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import torch
import yaml
from batches import ratio_batch
from pydantic import BaseModel, ConfigDict, SerializeAsAny

from mis_plugins import mis
from mis_plugins.__main__ import main
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import ownership
from true_on_policy import hosts as bitwise_hosts

HOOKS = {
    "custom_tis_function_path": "mis_plugins.mis.compute_mis_weights_with_cp",
    "rollout_data_postprocess_path": "mis_plugins.mis.count_samples",
    "custom_megatron_before_train_step_hook_path": "true_on_policy.hosts.report_step",
}
MIS = {"weight": {"upper": 1.5}}


class Flag:
    """What marks a field that has a flag of its own."""


class Base(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        for name, field in cls.model_fields.items():
            if any(isinstance(mark, Flag) for mark in field.metadata):
                parser.add_argument(f"--{name.replace('_', '-')}", default=field.default)


class Carried(Base):
    model_config = ConfigDict(frozen=True)

    path: str
    config: SerializeAsAny[Base] | None = None


class All(Base):
    use_tis: Annotated[Any, Flag()] = False
    get_mismatch_metrics: Annotated[Any, Flag()] = False
    tis_binary_kl_threshold: Annotated[Any, Flag()] = 5e-3
    qkv_format: Annotated[Any, Flag()] = "thd"
    custom_tis_function_path: Annotated[Any, Flag()] = None
    rollout_data_postprocess_path: Annotated[Any, Flag()] = None
    custom_megatron_before_train_step_hook_path: Annotated[Any, Flag()] = None


class Handed(Base):
    model_config = ConfigDict(extra="allow", frozen=True)


@pytest.fixture(autouse=True)
def schema(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(ownership.BASE[0])
    module.BaseConfig = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ownership.BASE[0], module)


def parse(words: list[str], file: Path) -> All:
    """Flags of hooks are asked for their classes; the file is merged; the classes take their keys; nothing is left."""
    parser = argparse.ArgumentParser()
    All.add_arguments(parser)
    paths = {name: getattr(parser.parse_known_args(words)[0], name) for name in HOOKS}
    functions = {name: pkgutil.resolve_name(path) for name, path in paths.items() if path}
    for kind in {function.config_class for function in functions.values()}:
        kind.add_arguments(parser=parser)
    args = parser.parse_args(words)
    vars(args).update(yaml.safe_load(file.read_text()))
    owned = set()
    for name, function in functions.items():
        kind = function.config_class
        values = {key: getattr(args, key) for key in kind.model_fields if hasattr(args, key)}
        setattr(args, name, Carried(path=paths[name], config=kind.model_validate(values)))
        owned |= kind.model_fields.keys()
    for name in owned & vars(args).keys():
        delattr(args, name)
    if unknown := vars(args).keys() - All.model_fields.keys():
        raise ValueError(f"Parsed arguments have no configuration owner: {sorted(unknown)}")
    return All.model_validate(vars(args))


def flags(**paths: str) -> list[str]:
    return [word for name, path in paths.items() for word in (f"--{name.replace('_', '-')}", path)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mis.yaml"
    path.write_text(yaml.safe_dump({"mis": MIS, "bitwise": {"on_difference": "warn"}, "use_tis": True}))
    return path


def hooked(args: Any) -> torch.Tensor:
    kwargs = ratio_batch([[0.5, 2.0], [1.2]]).hook_kwargs()
    return mis.compute_mis_weights_with_cp(args, **kwargs)[0] / kwargs["pg_loss"]


@pytest.mark.parametrize("merged", [False, True])
def test_three_hooks_at_once_own_the_keys_and_correct(file: Path, merged: bool):
    """The host hands its arguments as they are, or anew for each call, with the hook's config among them."""
    parsed = parse(flags(**HOOKS), file)
    config = parsed.custom_tis_function_path.config
    args = Handed(**dict(parsed), **dict(config)) if merged else parsed
    torch.testing.assert_close(hooked(args), torch.tensor([0.5, 1.5, 1.2]))
    assert bitwise_hosts.BitwiseConfig.from_args(args).on_difference == "warn"


def test_without_a_hook_of_ours_nobody_owns_the_keys(file: Path):
    with pytest.raises(ValueError, match=r"no configuration owner: \['bitwise', 'mis'\]"):
        parse([], file)


def test_values_travel_to_the_workers(file: Path):
    config = parse(flags(**HOOKS), file).custom_tis_function_path.config
    assert pickle.loads(pickle.dumps(config)) == config
    again = Carried(path="a.b", config=type(config).model_validate(config.model_dump()))
    assert again.config == config


EVERY_HOOK = [
    hook for module in (mis, bitwise_hosts) for hook in vars(module).values() if isinstance(hook, ownership.Hook)
] + [getattr(mis, name) for name in mis.ELSEWHERE if name != "turns_checked"]  # wraps a hook of the user's


def test_every_hook_has_the_one_class_and_is_what_its_path_names(monkeypatch: pytest.MonkeyPatch):
    assert len(EVERY_HOOK) == 16
    assert len({hook.config_class for hook in EVERY_HOOK}) == 1
    for hook in EVERY_HOOK:
        assert pickle.loads(pickle.dumps(hook)) is hook
    monkeypatch.delitem(sys.modules, ownership.BASE[0])
    assert {hook.config_class for hook in EVERY_HOOK} == {None}, "no parser asks"


def test_the_list_in_mis_py_names_the_flag_of_each_hook() -> None:
    pairs = re.findall(r"--([a-z-]+) +mis_plugins\.mis\.(\w+)", mis.__doc__ or "")
    listed = {name: flag.replace("-", "_") for flag, name in pairs}
    assert listed == {name: flag for name, flag in ownership.FLAGS.items() if hasattr(mis, name)}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("hook", EVERY_HOOK, ids=lambda hook: hook.func.__name__)
def test_a_hook_under_another_flag_says_so_at_its_first_call(hook: ownership.Hook, by_name: bool) -> None:
    """Whatever the host of that flag hands over, and in arguments of every kind; under its own flag nothing is said."""
    path, own = f"{hook.__module__}.{hook.func.__name__}", ownership.FLAGS[hook.func.__name__]
    assert ownership.under_another_flag({own: path}) is None
    for flag in {*ownership.FLAGS.values()} - {own}:
        for args in (argparse.Namespace(**{flag: path}), {flag: path}, Handed(**{flag: Carried(path=path)})):
            spelled, right = (name.replace("_", "-") for name in (flag, own))
            told = f"^--{spelled} {path}: the host calls {hook.func.__name__} by --{right} alone; give it there"
            with pytest.raises(ConfigError, match=told):
                fresh = ownership.Hook(hook.func)
                fresh(args=args, pg_loss=None) if by_name else fresh(args, 3, None)


def test_config_check_says_which_parsers_ask(file: Path, capsys: pytest.CaptureFixture):
    assert main(["config", "check", str(file), "--host", "slime"]) == 0
    told = capsys.readouterr().out
    assert "keys: Miles 31f1ca9 and slime 624b824 make an argument of every key" in told

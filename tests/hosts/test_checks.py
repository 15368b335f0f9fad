"""Settings that spoil a replay of routes, or a correction, are told before the job starts."""

import itertools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from batches import ratio_batch

from mis_plugins import mis as hook_module
from mis_plugins.__main__ import main
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import checks, loss_hook
from mis_plugins.hosts import routing as hooks
from mis_plugins.hosts.arguments import kinds
from mis_plugins.hosts.checks import Check, Given, every_check
from mis_plugins.hosts.host_checks import BEFORE_STEP, HOST_CHECKS
from mis_plugins.hosts.registry import every_host
from mis_plugins.hosts.versions import samples
from mis_plugins.mis import carry_versions

MEGATRON, ALL = ("miles", "slime"), ("miles", "slime", "fsdp")
REPLAYED = {"use_rollout_routing_replay": True, "use_routing_replay": True}
WEIGHT = {"weight": {"upper": 2}}
ROUTE = {"weight": None, "reject": [{"statistic": "route", "upper": 0.5}]}
BYPASS = {"weight": None, "objective": {"surrogate": "clip", "old": "behavior"}}
OPSM = {"opsm": {"delta": 1.0e-4}}
KEPT_BY_HOOKS = {
    "rollout_top_p": 0.95,
    "rollout_top_k": 16,
    "custom_generate_function_path": "mis_plugins.mis.generate_with_versions",
    "custom_convert_samples_to_train_data_path": "mis_plugins.mis.convert_with_versions",
    "custom_megatron_init_path": "mis_plugins.mis.carry_versions",
}
CENTER = {"center": {}, "objective": {"surrogate": "reinforce", "old": "behavior"}}
Case = tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]
# The conflict, keys beside `mis:`, what `mis:` says, and the hosts that have the conflict.
FOUND: list[Case] = [
    ("fused router", {**REPLAYED, "moe_router_fusion": True}, WEIGHT, MEGATRON),
    ("replay in the file alone", {"use_rollout_routing_replay": True}, WEIGHT, ALL),
    ("replay in the file alone", {**REPLAYED, "use_routing_replay": False}, WEIGHT, ALL),
    ("routes not asked", {"use_rollout_routing_replay": False}, ROUTE, MEGATRON),
    ("routes not asked", {"use_rollout_routing_replay": False}, {**WEIGHT, "routing": {}}, MEGATRON),
    ("hierarchical cache", {**REPLAYED, "sglang_enable_hierarchical_cache": True}, WEIGHT, ALL),
    ("chunked prefill", {**REPLAYED, "sglang_chunked_prefill_size": -1}, WEIGHT, ALL),
    ("chunked prefill", {**REPLAYED, "sglang_chunked_prefill_size": 4096}, WEIGHT, ALL),
    ("chunked prefill", {**REPLAYED, "sglang_chunked_prefill_size": 99, "rollout_max_context_len": 100}, WEIGHT, ALL),
    ("speculation", {**REPLAYED, "sglang_speculative_algorithm": "EAGLE"}, WEIGHT, ALL),
    ("gate dtype", {**REPLAYED, "moe_router_dtype": "fp32"}, WEIGHT, MEGATRON),
    ("gate dtype", {"moe_router_dtype": "fp64"}, ROUTE, MEGATRON),
    ("cache of earlier weights", {"pause_generation_mode": "in_place"}, WEIGHT, ("miles", "fsdp")),
    ("top-p", {"rollout_top_p": 0.95}, WEIGHT, ("miles", "fsdp")),
    ("top-p", {"rollout_top_p": 0.95, "rollout_top_k": 50}, WEIGHT, ("miles", "fsdp")),
    ("top-k", {"rollout_top_k": 50}, WEIGHT, ALL),
    ("top-k", {"rollout_top_k": 50, "rollout_top_p": 1.0}, WEIGHT, ALL),
    ("top-p", {"rollout_top_p": 0.95}, BYPASS, ("miles", "fsdp")),
    ("top-k", {"rollout_top_k": 50}, BYPASS, ALL),
    ("top-p", {"rollout_top_p": 0.95}, OPSM, ("miles", "fsdp")),
    ("top-k", {"rollout_top_k": 50}, OPSM, ALL),
    ("center beside true on policy", {"true_on_policy_mode": True}, CENTER, ("miles",)),
    ("center beside top-p", {"rollout_top_p": 0.95}, CENTER, ("slime",)),
    ("center beside top-p", {**KEPT_BY_HOOKS, "rollout_top_logprobs_num": 32}, CENTER, MEGATRON),
    ("center without a temperature", {"rollout_temperature": 0}, CENTER, MEGATRON),
    ("part of a kept set", {**KEPT_BY_HOOKS, "rollout_top_k": 64}, CENTER, ("miles",)),
    ("corrected twice", {"use_rollout_logprobs": True, "use_tis": True}, WEIGHT, ALL),
    ("corrected twice", {"use_rollout_logprobs": True, "use_tis": True, "get_mismatch_metrics": True}, WEIGHT, ALL),
    ("pass before training skipped", {"skip_actor_forward_only": True, BEFORE_STEP: "a.b"}, WEIGHT, ("miles", "fsdp")),
    ("pass before training skipped", {"skip_actor_forward_only": True, "loss_type": "custom_loss"}, BYPASS, ("miles",
     "fsdp")),
    ("head not asked", {"rollout_top_logprobs_num": 0}, CENTER, MEGATRON),
    ("smaller head", {"rollout_top_logprobs_num": 8}, CENTER, MEGATRON),
]  # fmt: skip
CALM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (REPLAYED, ROUTE),
    ({"sglang_speculative_algorithm": "EAGLE"}, WEIGHT),
    ({"moe_router_fusion": True, "use_rollout_routing_replay": False}, WEIGHT),
    ({"sglang_enable_hierarchical_cache": True, "sglang_chunked_prefill_size": -1}, WEIGHT),
    ({**REPLAYED, "sglang_enable_hierarchical_cache": False, "moe_router_fusion": False}, ROUTE),
    ({**REPLAYED, "sglang_chunked_prefill_size": 8192, "rollout_max_context_len": 8192}, WEIGHT),
    ({"use_rollout_routing_replay": False, "moe_router_dtype": "fp32"}, WEIGHT),
    ({"use_rollout_logprobs": True, "use_tis": True}, BYPASS),
    ({"use_rollout_logprobs": True, "get_mismatch_metrics": True}, WEIGHT),
    ({"pause_generation_mode": "retract"}, WEIGHT),
    ({"pause_generation_mode": "in_place", "sglang_disable_radix_cache": True}, WEIGHT),
    ({"rollout_top_p": 1.0}, WEIGHT),
    ({"rollout_top_k": -1}, WEIGHT),
    ({"rollout_top_k": 50}, {"metrics": "full"}),
    ({"rollout_top_p": 0.95}, {"metrics": "full"}),
    ({"rollout_top_p": 0.95}, {"opsm": {"delta": 1.0e-4, "reference": "proximal"}}),
    (
        {"rollout_top_logprobs_num": 0, "custom_generate_function_path": "mis_plugins.mis.generate_with_versions"},
        CENTER,
    ),
    ({"rollout_top_logprobs_num": 32, "rollout_top_p": 1.0}, CENTER),
]

NAMED = {check.name: check for check in every_check()}
CONFLICTS = [check.name for check in every_check() if check.arguments]


def told(check: Check, host: str) -> str:
    return check.text(Given(view({}), CorrectionConfig(), every_host()[host]))


def checked(keys: dict[str, Any], mis: dict[str, Any], host: str, folder: Path) -> int:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**keys, "mis": mis}))
    return main(["config", "check", str(file), "--host", host])


@pytest.mark.parametrize("host", ALL)
@pytest.mark.parametrize(("name", "keys", "mis", "hosts"), FOUND)
def test_a_conflict_is_told(
    name: str, keys: dict[str, Any], mis: dict[str, Any], hosts: tuple[str, ...], host: str, tmp_path: Path,
    capsys: pytest.CaptureFixture,
):  # fmt: skip
    """Refused, or warned of, on the hosts that have it, and on no other."""
    code, said = checked(keys, mis, host, tmp_path), capsys.readouterr()
    one, here = NAMED[name], host in hosts
    text, refused = told(one, host), one.severity == "refuse"
    assert (text in said.err) == (here and refused)
    assert (f"warning: {text}" in said.out) == (here and not refused)
    if here:
        assert code == (2 if refused else 0)


@pytest.mark.parametrize("host", MEGATRON)
@pytest.mark.parametrize(("keys", "mis"), CALM)
def test_settings_without_a_conflict(
    keys: dict[str, Any], mis: dict[str, Any], host: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert checked(keys, mis, host, tmp_path) == 0
    said = capsys.readouterr().out
    assert not [name for name in CONFLICTS if told(NAMED[name], host) in said]


@pytest.mark.parametrize("name", CONFLICTS)
def test_every_conflict_arises_somewhere_and_quotes_an_argument(name: str):
    """Names are those of the hosts' own parsers; the first word of the text is one of them."""
    one = NAMED[name]
    assert any(kinds(host).keys() >= set(one.arguments) for host in every_host().values() if host.records)
    assert str(one.message).partition(":")[0] in one.arguments
    assert name in [case[0] for case in FOUND]


@pytest.mark.parametrize(("mis", "host", "told"), [
    (ROUTE, "fsdp", "mis.reject: statistic: route needs a hook before each log-prob pass, which Miles on FSDP"),
    ({**WEIGHT, "routing": {}}, "fsdp", "mis.routing needs a hook before each log-prob pass, which Miles on FSDP"),
    ({**WEIGHT, "routing": {}}, "slime", "mis.routing: nothing watches the routers; give --custom-megatron-before-log"),
    (ROUTE, "slime", "mis.reject: statistic: route needs the routes of the trainer's log-prob pass, and none of these"),
])  # fmt: skip
def test_a_job_that_watches_nothing_stops_in_its_first_step(mis: dict[str, Any], host: str, told: str):
    with (
        patch.object(hooks, "current", lambda args: every_host()[host]),
        pytest.raises(hooks.MisError, match=told.replace(".", r"\.")),
    ):
        hooks.Watching().routes(Namespace(mis=mis), from_mapping(mis), None)


def test_a_watch_that_begins_reads_the_arguments_of_the_job():
    """Flags on the command line are no keys of the file: the hook sees them before the first log-prob pass."""
    flags = {**REPLAYED, "moe_router_fusion": True, "num_layers": 2, "use_tis": True}
    with (
        patch.object(hooks, "current", lambda args: every_host()["slime"]),
        pytest.raises(ConfigError, match="moe_router_fusion: the fused router"),
    ):
        hooks.Watching().before_log_probs(Namespace(**flags, mis=WEIGHT), [], "")


CUT = {"rollout_top_p": 0.9}
WATCHED = {"weight": None, "metrics": "core"}
HOOKS = ("compute_mis_weights_with_cp", "policy_loss")


def called(hook: str, host: str, mis: dict[str, Any], **arguments: Any) -> Any:
    """A hook's answer to two tokens, or the error that it raises before it reads the batch of a loss."""
    asked = {
        "use_tis": mis is WEIGHT,
        "get_mismatch_metrics": mis is WATCHED,
        "advantage_estimator": "grpo",
        "use_rollout_logprobs": False,
    }
    args = Namespace(mis=mis, **asked, **arguments)
    with patch.object(hook_module, "current", lambda *_: every_host()[host]):
        if hook == "policy_loss":
            return hook_module.policy_loss(args, {}, torch.zeros(2), lambda x: x)
        function = getattr(hook_module, every_host()[host].tis_hook.rpartition(".")[2])
        return function(args, **ratio_batch([[1.0, 1.0]]).hook_kwargs())


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("host", "cut"),
    [("miles", CUT), ("miles", {"rollout_top_k": 5}), ("slime", {"rollout_top_k": 5}), ("vime", CUT), ("fsdp", CUT),
     ("unknown", CUT)],
)  # fmt: skip
def test_a_correction_of_a_cut_engine_is_refused_by_the_hook_itself(hook: str, host: str, cut: dict[str, Any]):
    """Flags of the command line are in no file that `config check` could read."""
    title = every_host()[host].title
    said = f"{[*cut][0]}: the engine samples from the tokens that top-. leaves, and {title} does not hand them"
    with pytest.raises(ConfigError, match=said):
        called(hook, host, WEIGHT, **cut)


@pytest.mark.parametrize("host", ["miles", "fsdp", "unknown"])
def test_what_is_only_watched_or_not_cut_is_not_refused(host: str):
    called("compute_mis_weights_with_cp", host, WATCHED, **(CUT if host != "unknown" else {}))
    called("compute_mis_weights_with_cp", host, WEIGHT, rollout_top_p=1.0, rollout_top_k=-1)


def test_an_unknown_argument_is_no_conflict():
    checks.refuse("command", {}, from_mapping(ROUTE), every_host()["miles"])
    assert not list(checks.warnings("command", {}, CorrectionConfig(), every_host()["miles"]))


KEPT = {**WEIGHT, "reject": [{"statistic": "ratio", "upper": 2}], "denominator": "kept"}
ORIGINAL = {**KEPT, "denominator": "original"}
ROLLOUT_MEAN = {"weight": {"upper": 2, "normalize": {"scope": "rollout"}}}
REINFORCE = {"objective": {"surrogate": "reinforce", "old": "behavior"}}
BESIDE = {"custom_pg_loss_reducer_function_path": checks.REDUCER}


@pytest.mark.parametrize("hook", ["tis", "loss"])
def test_an_attribute_of_the_class_is_an_argument_too(hook: checks.Hook):
    class Arguments:
        calculate_per_token_loss = True

        def __init__(self) -> None:
            self.mis = KEPT

    with pytest.raises(ConfigError, match="--calculate-per-token-loss divides the whole step"):
        checks.run(hook, Arguments(), from_mapping(KEPT), every_host()["miles"])


GROUP, LEAVE_ONE_OUT = ({**WEIGHT, "group_baseline": kind} for kind in ("grpo", "rloo"))
CARRIED = {"custom_megatron_init_path": "mis_plugins.mis.carry_versions"}
OTHER_SAMPLES = {"custom_convert_samples_to_train_data_path": "mine.convert"}
# The check, who asks, the host's arguments, what `mis:` says (None: flat keys), the host, and a host without the fault.
HELD: list[tuple[str, checks.Hook, dict[str, Any], dict[str, Any] | None, str, str]] = [
    *(("hook under another flag", hook, {"rollout_sample_filter_path": "mis_plugins.mis.report_step"}, WEIGHT, host, "")
      for hook in ("file", "command") for host in MEGATRON),
    ("flags of another objective", "command", {"advantage_estimator": "gspo"}, {"objective": {"surrogate": "sapo"}},
     "miles", ""),
    ("flags of another objective", "file", {"use_opsm": True}, OPSM, "slime", ""),
    ("groups not told", "tis", {}, {"weight": {"normalize": {"scope": "data_parallel"}}}, "unknown", "miles"),
    ("scope without rollout batch", "command", {}, ROLLOUT_MEAN, "unknown", "miles"),
    ("versions unknown", "command", {}, {"segment_wise": {"enabled": True}}, "unknown", "miles"),
    *(("versions not carried", "command", {**CARRIED, flag: True}, mis, host, "fsdp") for host in MEGATRON
      for flag, mis in (("keep_old_actor", WEIGHT), ("use_rollout_routing_replay", {"segment_wise": {}}))),
    ("versions not carried", "command", CARRIED, WEIGHT, "vime", "miles"),
    ("hook never called", "command", {"rollout_data_postprocess_path": "mine.hook"}, WEIGHT, "torchtitan", "miles"),
    ("hook never called", "command", {"custom_megatron_before_train_step_hook_path": "mine"}, WEIGHT, "fsdp", "miles"),
    ("sessions without versions", "command", {"use_session_server": True}, {"segment_wise": {}}, "miles", ""),
    ("samples of a rollout by themselves", "command", {"use_session_server": "v2"}, WEIGHT, "torchtitan", "miles"),
    ("versions by flags", "command", {}, {"segment_wise": {"enabled": True}}, "miles", ""),
    ("head unknown", "command", {}, CENTER, "vime", "miles"),
    ("head by flags", "command", {}, CENTER, "slime", ""),
    ("routers out of reach", "routes", {}, ROUTE, "fsdp", "miles"),
    ("routers out of reach", "command", {}, ROUTE, "fsdp", "slime"),
    ("routers out of reach", "command", {}, {**WEIGHT, "routing": {"on_fault": "raise"}}, "fsdp", "miles"),
    ("no second pass", "command", {}, {**WEIGHT, "resplit_every": 5}, "fsdp", "miles"),
    ("baseline without rollout batch", "command", {}, GROUP, "fsdp", "miles"),
    ("baseline without its hook", "tis", {}, GROUP, "miles", ""),
    ("baseline of another estimator", "loss", {"advantage_estimator": "ppo"}, GROUP, "miles", ""),
    *((f"baseline beside {name}", "tis", {name: True}, GROUP, "slime", "") for name in checks.OTHER_ADVANTAGES),
    ("others' mean in deviations", "tis", {"grpo_std_normalization": True}, LEAVE_ONE_OUT, "miles", ""),
    ("no step to skip", "command", {}, {**ORIGINAL, "on_all_rejected": "raise"}, "fsdp", "miles"),
    ("no step to report", "command", {}, {**WEIGHT, "metrics": "all"}, "fsdp", "miles"),
    ("kept beside a mean over the step", "tis", {"calculate_per_token_loss": True}, KEPT, "miles", ""),
    ("kept beside a mean over the step", "command", {"calculate_per_token_loss": True}, KEPT, "slime", ""),
    ("kept twice", "command", BESIDE, KEPT, "slime", ""),
    ("corrected twice", "tis", {"use_rollout_logprobs": True, "use_tis": True}, WEIGHT, "slime", ""),
    ("kept twice", "loss", BESIDE, KEPT, "miles", ""),
    ("kept replaced", "tis", {"custom_pg_loss_reducer_function_path": "mine.reduce"}, KEPT, "miles", ""),
    ("kept beside other samples", "tis", OTHER_SAMPLES, KEPT, "miles", ""),
    ("reducer beside the loss hook", "loss", BESIDE, {**ORIGINAL, **OPSM}, "miles", ""),
    ("reducer beside use_mask", "tis", {**BESIDE, "use_mask": True}, WEIGHT, "miles", ""),
    ("original beside other samples", "tis", OTHER_SAMPLES, ORIGINAL, "miles", ""),
    ("other terms", "file", {"use_kl_loss": True}, KEPT, "miles", "fsdp"),
    ("mean of a rollout under bypass", "loss", {}, {**ROLLOUT_MEAN, **REINFORCE}, "miles", ""),
    ("two switches", "tis", {"use_tis": True, "get_mismatch_metrics": True}, WEIGHT, "miles", ""),
    ("idle rule", "tis", {"rs_lower_bound": 0.5}, WEIGHT, "miles", ""),
]  # fmt: skip


def names(hook: checks.Hook, args: dict[str, Any], mis: dict[str, Any], host: str) -> list[str]:
    given = Given(view(args), from_mapping(mis), every_host()[host])
    return [check.name for severity in ("refuse", "warn") for check in checks.holding(hook, given, severity)]


@pytest.mark.parametrize(("name", "hook", "args", "mis", "host", "safe"), HELD)
def test_a_check_holds(name: str, hook: checks.Hook, args: dict[str, Any], mis: dict[str, Any], host: str, safe: str,
                       monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    """Where it shall, and neither on a host that serves the settings nor without the arguments that it names."""
    for function, answer in (("is_initialized", True), ("get_world_size", 2)):  # processes without Megatron's groups
        monkeypatch.setattr(torch.distributed, function, lambda answer=answer: answer)
    assert name in names(hook, args, mis, host)
    assert not safe or name not in names(hook, args, mis, safe)
    assert not args or name not in names(hook, {}, mis, host)


FLAGS: dict[str, Any] = {
    "use_tis": True, "get_mismatch_metrics": True, "use_rollout_logprobs": True, "use_opsm": True,
    "advantage_estimator": "gspo", "use_unbiased_kl": True, "calculate_per_token_loss": True,
}  # fmt: skip
OF_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_plugins.mis.policy_loss", "use_kl_loss": True}


def refusal(call: Callable[[], object]) -> str:
    """What the ConfigError of a call says; nothing where none is raised."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flags", [*itertools.combinations(FLAGS, 1), *itertools.combinations(FLAGS, 2)])
@pytest.mark.parametrize("mis", [WEIGHT, KEPT, BYPASS, REINFORCE, OPSM, {"objective": {"unbiased_kl": True}},
                                 {**WEIGHT, "objective": {"surrogate": "cispo"}}, {"segment_wise": {}}])  # fmt: skip
def test_config_check_refuses_what_the_loss_hook_would(mis: dict[str, Any], flags: tuple[str, ...]):
    """With the words of the hook, of which a launch script has all arguments."""
    given = {**OF_LOSS, "mis": mis, **{flag: FLAGS[flag] for flag in flags}}
    unset = {"use_tis": False, "use_rollout_logprobs": False, "advantage_estimator": "grpo", "opsm_delta": 1e-4}
    config, host, args = from_mapping(mis), every_host()["slime"], view(Namespace(**unset | given))
    by_check = refusal(lambda: checks.refuse("command", given, config, host))
    assert by_check == refusal(lambda: loss_hook.config_in_force(args, config, host))


@pytest.mark.parametrize("given", [{"keep_old_actor": True}, {"release_train": True}, REPLAYED,
                                   {"rollout_top_p": 0.9}, {},
                                   {"release_train": True, "get_mismatch_metrics": True}])  # fmt: skip
@pytest.mark.parametrize("method", ["recompute", "loglinear"])
def test_config_check_refuses_what_carry_versions_would(given: dict[str, Any], method: str):
    """With the words of the hook; some arguments matter only where log-probs are recomputed."""
    mis, slime = {"segment_wise": {"method": method}}, every_host()["slime"]
    args = {**CARRIED, **OF_LOSS, **given, "mis": mis}
    with patch.object(samples, "current", lambda *_: slime):
        by_check = refusal(lambda: checks.refuse("command", args, from_mapping(mis), slime))
        by_hook = refusal(lambda: carry_versions(Namespace(**args)))
    assert by_check == ("" if "not called by the init" in by_hook else by_hook)


@pytest.mark.parametrize("value", [None, "50", [1], {"a": 1}])
@pytest.mark.parametrize("name", ["rollout_top_k", "rollout_top_logprobs_num"])
@pytest.mark.parametrize("mis", [WEIGHT, CENTER])
def test_a_count_that_is_no_number_bounds_nothing(mis: dict[str, Any], name: str, value: Any, tmp_path: Path):
    """A file may hold such a value; a warning of the value's type is all that the check says of it."""
    assert checked({name: value, **CARRIED}, mis, "miles", tmp_path) == 0
    assert checked({name: value}, mis, "slime", tmp_path) == 0


def test_a_float_that_counts_cuts_as_a_whole_number_does(tmp_path: Path):
    assert checked({"rollout_top_k": 50.0}, WEIGHT, "miles", tmp_path) == 2
    assert every_host()["miles"].needs.refused(view({"rollout_top_k": 50.0}), scored=True)


@pytest.mark.parametrize(("host", "offers"), [("vime", True), ("fsdp", False)])
def test_a_host_without_heads_is_told_of_its_own_centering(host: str, offers: bool):
    given = Given(view({}), from_mapping(CENTER), every_host()[host])
    (told,) = (
        check.text(given) for check in checks.holding("command", given, "refuse") if check.name == "head unknown"
    )
    assert ("--use-score-centering" in told) == offers


def test_every_check_has_a_case():
    assert {check.name for check in every_check()} == {case[0] for case in FOUND} | {case[0] for case in HELD}
    assert len(NAMED) == len(every_check())
    assert not {hook for check in HOST_CHECKS for hook in check.hooks} & {"tis", "loss"}  # they ask `CHECKS` alone

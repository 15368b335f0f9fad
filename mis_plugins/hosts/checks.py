"""May this config run with these arguments on this host? One table of checks, and one evaluator.

`config check` asks for keys of a file, which leave most arguments unknown. A hook asks at its call, with all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View, view
from mis_plugins.errors import ConfigError, warn_once
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import LOSS_HOOK, Host, has_temperature, whole_number

Hook = Literal["file", "command", "tis", "loss", "watch", "routes"]
Severity = Literal["refuse", "warn"]
REPLAY = "use_rollout_routing_replay"
REDUCER = "mis_plugins.mis.kept_token_mean"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"


@dataclass(frozen=True)
class Given:
    """A config and the arguments of the host that it runs with.

    args: the host's arguments by name; an absent one is unknown, and None or false is a value that the host has.
    config: the correction that runs beside them.
    """

    args: View
    config: CorrectionConfig
    host: Host

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument; an attribute of the arguments' class is one too."""
        return getattr(self.args, name, default)

    def has(self, name: str) -> bool:
        """Whether an argument is known and says yes."""
        return bool(self.get(name))

    def takes(self, name: str) -> bool:
        """Whether the host has this argument: by its record, or by the job's arguments where it has no record."""
        if not self.host.records:
            return hasattr(self.args, name)
        from mis_plugins.hosts.arguments import kinds

        return name in kinds(self.host)

    @property
    def replays(self) -> bool:
        return self.has(REPLAY)

    @property
    def watches(self) -> bool:
        """Whether the host calls the TIS hook for its metrics alone."""
        return self.has("get_mismatch_metrics") and not self.has("use_tis")

    @property
    def in_loss_hook(self) -> bool:
        """Whether the loss hook corrects: the config needs it, or the host's arguments name it."""
        is_named = self.get("custom_loss_function_path") == LOSS_HOOK.split()[-1]
        return self.config.needs_loss_hook or is_named and self.get("loss_type") == "custom_loss"

    @property
    def reads_routes(self) -> bool:
        return self.config.reads_routes or self.config.routing is not None

    @property
    def scope(self) -> str | None:
        """The samples over whose mean weight the weights are divided; None where they are not."""
        normalize = self.config.weight and self.config.weight.normalize
        return normalize.scope if normalize else None

    @property
    def reducer(self) -> Any:
        return self.get("custom_pg_loss_reducer_function_path")


@dataclass(frozen=True)
class Check:
    """Settings that spoil each other.

    hooks: who asks: `file` and `command` are `config check` without and with --host; `tis` and `loss` are our
        hooks; `watch` begins to watch routers, and `routes` reads what was watched.
    name: short, for tests and readers.
    when: whether the settings spoil each other, or what happens where they do.
    message: what happens, and what to change; empty where `when` says that. `{host}` stands for the host's title, and
        `{field}` for what the user calls a field of the config.
    severity: `refuse` where the numbers would be wrong or the job stops; `warn` where they are only worse.
    arguments: names that the host must have for the check to apply.
    """

    hooks: tuple[Hook, ...]
    name: str
    when: Callable[[Given], object]
    message: str | Callable[[Given], str] = ""
    severity: Severity = "refuse"
    arguments: tuple[str, ...] = ()

    def text(self, given: Given) -> str:
        """The message, with the title of the host."""
        text = self.message(given) if callable(self.message) else self.message or str(self.when(given))
        return text.replace("{host}", given.host.title)


def _is_cut(given: Given, name: str) -> bool:
    """Whether the engine samples from a part of the vocabulary that the trainer is not handed."""
    value = given.get(name)
    if not given.config.reads_behavior or given.host.kept_set(given.args):
        return False
    if name == "rollout_top_k":
        return whole_number(value) > 0
    return isinstance(value, int | float) and value < 1


of_weights = partial(Check, ("command", "watch", "tis", "loss"))
UNCUT = {
    "p": "rollout_top_p: 1.0 (Miles hands them on by our hooks of versions and a rollout_top_k above 0: docs/hooks.md)",
    "k": "rollout_top_k: -1 (slime hands them on beside a rollout_top_p below 1, Miles by our hooks of versions: set "
    "all of them in this file; docs/hooks.md)",
}
CUTS = tuple(
    of_weights(
        f"top-{cut}",
        partial(_is_cut, name=f"rollout_top_{cut}"),
        f"rollout_top_{cut}: the engine samples from the tokens that top-{cut} leaves, and {{host}} does not hand them "
        f"to the trainer, so that every importance ratio would be wrong; set {uncut}",
        arguments=(f"rollout_top_{cut}",),
    )
    for cut, uncut in UNCUT.items()
)


def _divides_by_kept(given: Given) -> bool:
    return given.config.denominator == "kept" and not given.watches


def _drops(given: Given) -> bool:
    return given.config.rejects or given.config.opsm is not None


def _other_terms(given: Given) -> list[str]:
    """Flags of terms that the TIS hook is not handed, where the host divides them by another denominator."""
    entropy, config = given.get("entropy_coef", 0), given.config
    flags = ["--use-kl-loss"] * given.has("use_kl_loss") + [f"--entropy-coef {entropy}"] * bool(entropy)
    by_kept = given.host.divides_by_kept(given.args)
    if config.needs_loss_hook or not config.rejects or _divides_by_kept(given) == by_kept:
        return []
    return flags if reading.says_denominator(given.args) else []


def _text_of_other_terms(given: Given) -> str:
    setting, to_keep = f"mis.denominator: {given.config.denominator}", "denominator: kept"
    if given.has("use_mask"):
        setting, to_keep = "use_mask: the denominator of all tokens", "use_rs"
    theirs, instead = "tokens before rejection", f"{LOSS_HOOK} divides every term alike"
    if given.host.divides_by_kept(given.args):
        theirs, instead = "kept tokens", f"use {to_keep}"
    return (
        f"{setting} is that of the policy term alone: the TIS hook is not handed the terms "
        f"of {' and '.join(_other_terms(given))}, which the host divides by the {theirs}; {instead}"
    )


def _corrected_twice(given: Given) -> bool:
    """Whether the host's own surrogate is pi_theta / mu already, and the TIS hook weighs it by pi_old / mu."""
    both = given.has("use_rollout_logprobs") and given.has("use_tis")
    return both and given.config.corrects and not given.in_loss_hook


CONVERTED = "custom_convert_samples_to_train_data_path"
of_losses = partial(Check, ("file", "command", "tis", "loss"))
DENOMINATORS = (
    of_losses(
        "kept beside a mean over the step",
        lambda given: _divides_by_kept(given) and given.has("calculate_per_token_loss"),
        "mis.denominator: kept divides each sequence by its kept tokens, but --calculate-per-token-loss divides "
        "the whole step by a token count that no hook can change; drop the flag, or use original",
    ),
    of_losses(
        "kept twice",
        lambda given: _divides_by_kept(given) and given.reducer == REDUCER,
        f"mis.denominator: kept and {REDUCER_FLAG} {REDUCER} both divide by the kept tokens; keep one of them",
    ),
    of_losses(
        "kept replaced",
        lambda given: _divides_by_kept(given) and given.reducer not in (None, REDUCER),
        lambda given: (
            f"mis.denominator: kept promises a division that {REDUCER_FLAG} {given.reducer} replaces; drop one of them"
        ),
    ),
    of_losses(
        "kept beside other samples",
        lambda given: _divides_by_kept(given) and given.get(CONVERTED) is not None,
        "mis.denominator: kept: behind --custom-convert-samples-to-train-data-path a host may lack "
        "rollout_mask_sums, and then divides by the kept tokens itself; use original",
    ),
    Check(
        ("command", "loss"),
        "reducer beside the loss hook",
        lambda given: _drops(given) and given.reducer == REDUCER and given.in_loss_hook and not given.watches,
        f"{REDUCER_FLAG} {REDUCER}: mis_plugins.mis.policy_loss hands a reducer the masks before rejection, and it "
        "would divide by all their tokens; drop it, and say mis.denominator: kept",
    ),
    Check(
        ("command", "tis"),
        "reducer beside use_mask",
        lambda given: given.has("use_mask") and given.reducer == REDUCER and not given.watches,
        f"use_mask: true counts masked tokens in the denominator, and {REDUCER_FLAG} {REDUCER} divides by the kept "
        "tokens; drop the reducer, or say use_rs in place of use_mask",
    ),
    Check(
        ("tis",),
        "original beside other samples",
        lambda given: (
            given.config.rejects and given.config.denominator == "original" and given.get(CONVERTED) is not None
        ),
        "mis.denominator: original: Miles divides by the kept tokens all the same where its batch lacks "
        "rollout_mask_sums: hand them on from --custom-convert-samples-to-train-data-path",
        "warn",
    ),
    Check(("file", "command", "tis"), "other terms", _other_terms, _text_of_other_terms, "warn"),
)
OBJECTIVES = (
    Check(
        ("file", "command", "tis"),
        "corrected twice",
        _corrected_twice,
        "use_rollout_logprobs: the host's surrogate compares with the engine's log-probs already, and the TIS hook "
        f"would correct for them again; drop it, or use the loss hook ({LOSS_HOOK}) with mis.objective.old: behavior",
        arguments=("use_rollout_logprobs",),
    ),
    Check(
        ("command", "loss"),
        "mean of a rollout under bypass",
        lambda given: given.scope == "rollout" and given.config.bypass,
        "mis.weight.normalize.scope: rollout is computed before training, but with mis.objective.old: behavior "
        "the weights are those of pi_theta, which every step changes; use scope: data_parallel",
    ),
    of_losses(
        "two switches",
        lambda given: given.has("use_tis") and given.has("get_mismatch_metrics"),
        "--get-mismatch-metrics and --use-tis are both set: the loss is corrected",
        "warn",
    ),
    Check(
        ("tis",),
        "groups not told",
        lambda given: given.scope == "data_parallel" and given.host.told_by == "nothing" and megatron.untold(),
        "{weight.normalize.scope}: data_parallel averages over this process alone, unless the hook is handed "
        "parallel_state: nothing tells the groups of these processes; register the host (docs/hosts.md)",
        "warn",
    ),
    Check(("tis", "loss"), "idle rule", lambda given: reading.idle_rule(given.args), severity="warn"),
)


def _names_other_tokens(given: Given) -> bool:
    """Whether the engine names its likeliest tokens of the whole vocabulary, and the trainer scores over kept sets."""
    by_us = getattr(given.host.needs, "keeps_sets", False) and not given.has("rollout_top_logprobs_num")
    cut = given.get("rollout_top_p", 1) != 1 or whole_number(given.get("rollout_top_k")) > 0
    return cut and given.host.kept_set(given.args) and not by_us


def _top_k(given: Given) -> int:
    return 0 if given.config.center is None else given.config.center.top_k


of_centers = partial(Check, ("command", "loss"))
CENTERS = (
    of_centers(
        "center beside true on policy",
        lambda given: given.config.center and given.has("true_on_policy_mode"),
        "true_on_policy_mode: the trainer rounds its logits before it scores the sampled token, and mis.center scores "
        "the engine's likeliest tokens without; drop one of them",
        arguments=("true_on_policy_mode",),
    ),
    of_centers(
        "center beside top-p",
        lambda given: given.config.center and _names_other_tokens(given),
        "rollout_top_p: {host} scores tokens over those that top-p leaves, and mis.center reads the engine's likeliest "
        "tokens of the whole vocabulary; set rollout_top_p: 1.0",
        arguments=("rollout_top_p",),
    ),
    of_centers(
        "center without a temperature",
        lambda given: given.config.center and not has_temperature(given.args),
        "rollout_temperature: mis.center divides logits by it, as the engine does that samples; give a number above 0, "
        "or leave mis.center out",
        arguments=("rollout_temperature",),
    ),
    of_centers(
        "part of a kept set",
        lambda given: 0 < _top_k(given) < whole_number(given.get("rollout_top_k")),
        "rollout_top_k: mis.center.top_k is smaller, so that the head names a part of the tokens that top-k keeps, and "
        "the rest is modelled (center_behavior_mass says how much is named); give both one number",
        "warn",
        ("rollout_top_k",),
    ),
    of_centers(
        "head not asked",
        lambda given: (
            given.config.center
            and given.get("rollout_top_logprobs_num") == 0
            and given.get("custom_generate_function_path") is None
        ),
        "rollout_top_logprobs_num: 0 asks the engine for no token but the sampled ones, and mis.center reads its "
        "likeliest; give --rollout-top-logprobs-num 32",
        arguments=("rollout_top_logprobs_num",),
    ),
    of_centers(
        "smaller head",
        lambda given: 0 < whole_number(given.get("rollout_top_logprobs_num")) < _top_k(given),
        "rollout_top_logprobs_num: the engine names fewer tokens than mis.center.top_k reads; give both one number",
        "warn",
        ("rollout_top_logprobs_num",),
    ),
)


ESTIMATORS = ("grpo", "gspo", "cispo")  # whose advantages are the rewards of a group less its mean
OTHER_ADVANTAGES = {
    "normalize_advantages": "whitens all advantages over the batch",
    "custom_advantage_function_path": "makes the advantages itself",
    "custom_reward_post_process_path": "makes the rewards of a group itself",
}
BASELINES = (
    Check(
        ("tis", "loss"),
        "baseline without its hook",
        lambda given: given.config.group_baseline and given.get("rollout_data_postprocess_path") is None,
        "{group_baseline} needs --rollout-data-postprocess-path mis_plugins.mis.count_samples (normalize_rollout does "
        "it too); without it the host's baselines stay",
    ),
    of_weights(
        "baseline of another estimator",
        lambda given: given.config.group_baseline and given.get("advantage_estimator", "grpo") not in ESTIMATORS,
        lambda given: (
            f"{{group_baseline}} replaces the baseline of {', '.join(ESTIMATORS)}, and advantage_estimator: "
            f"{given.get('advantage_estimator')} has another; leave the key out"
        ),
    ),
    *(
        of_weights(
            f"baseline beside {name}",
            lambda given, name=name: given.config.group_baseline and given.has(name),
            f"{{group_baseline}} moves rewards from one mean to another, and {name} {why}; drop one",
        )
        for name, why in OTHER_ADVANTAGES.items()
    ),
    of_weights(
        "others' mean in deviations",
        lambda given: (
            given.config.group_baseline == "rloo"
            and given.has("grpo_std_normalization")
            and given.get("rewards_normalization", True)
        ),
        "{group_baseline}: rloo divides by no standard deviation, and the host has divided by that of all samples; "
        "give --disable-grpo-std-normalization, or use grpo",
    ),
)
CHECKS: tuple[Check, ...] = (*CUTS, *DENOMINATORS, *OBJECTIVES, *BASELINES, *CENTERS)


def every_check() -> tuple[Check, ...]:
    """All checks; the hooks of a loss never ask for the checks of `host_checks.py`."""
    from mis_plugins.hosts.host_checks import HOST_CHECKS

    return (*HOST_CHECKS, *CHECKS)


def holding(hook: Hook, given: Given, severity: Severity) -> Iterator[Check]:
    """The checks of a hook that hold."""
    for check in CHECKS if hook in ("tis", "loss") else every_check():
        asked = hook in check.hooks and check.severity == severity and all(map(given.takes, check.arguments))
        if asked and check.when(given):
            yield check


def refuse(hook: Hook, args: Any, config: CorrectionConfig, host: Host) -> None:
    """Refuse settings with which a job would stop, or run with wrong numbers."""
    given = Given(view(args), config, host)
    for check in holding(hook, given, "refuse"):
        raise ConfigError(check.text(given)).spelled(reading.spelling(given.args), "mis.")


def warnings(hook: Hook, args: Any, config: CorrectionConfig, host: Host) -> Iterator[str]:
    """Settings that make numbers worse, do less than they say, or may stop the engine."""
    given = Given(view(args), config, host)
    return (check.text(given) for check in holding(hook, given, "warn"))


def run(hook: Hook, args: Any, config: CorrectionConfig, host: Host) -> None:
    """Refuse, and warn once a process."""
    refuse(hook, args, config, host)
    for text in warnings(hook, args, config, host):
        warn_once(text)

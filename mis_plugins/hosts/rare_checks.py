"""Checks of what few configs ask for, loaded where one does: score centering, and another baseline of a group.

Of centering: what a host's engine names, and what its trainer scores the tokens over.
"""

from __future__ import annotations

from functools import partial

from mis_plugins.hosts.checks import Check, Given, of_weights


def _centers(given: Given) -> bool:
    return given.config.center is not None


def _names_other_tokens(given: Given) -> bool:
    """Whether the engine names its likeliest tokens of the whole vocabulary, and the trainer scores over kept sets."""
    by_us = getattr(given.host.needs, "keeps_sets", False) and not given.has("rollout_top_logprobs_num")
    cut = given.get("rollout_top_p", 1) != 1 or (given.get("rollout_top_k") or -1) > 0
    return cut and given.host.kept_set(given.args) and not by_us


def _top_k(given: Given) -> int:
    return 0 if given.config.center is None else given.config.center.top_k


of_centers = partial(Check, ("command", "loss"))
CENTERS = (
    of_centers(
        "center beside true on policy",
        lambda given: _centers(given) and given.has("true_on_policy_mode"),
        "true_on_policy_mode: the trainer rounds its logits before it scores the sampled token, and mis.center scores "
        "the engine's likeliest tokens without; drop one of them",
        arguments=("true_on_policy_mode",),
    ),
    of_centers(
        "center beside top-p",
        lambda given: _centers(given) and _names_other_tokens(given),
        "rollout_top_p: {host} scores tokens over those that top-p leaves, and mis.center reads the engine's likeliest "
        "tokens of the whole vocabulary; set rollout_top_p: 1.0",
        arguments=("rollout_top_p",),
    ),
    of_centers(
        "part of a kept set",
        lambda given: 0 < _top_k(given) < (given.get("rollout_top_k") or -1),
        "rollout_top_k: mis.center.top_k is smaller, so that the head names a part of the tokens that top-k keeps, and "
        "the rest is modelled (center_behavior_mass says how much is named); give both one number",
        "warn",
        ("rollout_top_k",),
    ),
    of_centers(
        "head not asked",
        lambda given: (
            _centers(given)
            and given.get("rollout_top_logprobs_num") == 0
            and given.get("custom_generate_function_path") is None
        ),
        "rollout_top_logprobs_num: 0 asks the engine for no token but the sampled ones, and mis.center reads its "
        "likeliest; give --rollout-top-logprobs-num 32",
        arguments=("rollout_top_logprobs_num",),
    ),
    of_centers(
        "smaller head",
        lambda given: 0 < (given.get("rollout_top_logprobs_num") or 0) < _top_k(given),
        "rollout_top_logprobs_num: the engine names fewer tokens than mis.center.top_k reads; give both one number",
        "warn",
        ("rollout_top_logprobs_num",),
    ),
)


def _has_baseline(given: Given) -> bool:
    return given.config.group_baseline is not None


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
        lambda given: _has_baseline(given) and given.get("rollout_data_postprocess_path") is None,
        "{group_baseline} needs --rollout-data-postprocess-path mis_plugins.mis.count_samples (normalize_rollout does "
        "it too); without it the host's baselines stay",
    ),
    of_weights(
        "baseline of another estimator",
        lambda given: _has_baseline(given) and given.get("advantage_estimator", "grpo") not in ESTIMATORS,
        lambda given: (
            f"{{group_baseline}} replaces the baseline of {', '.join(ESTIMATORS)}, and advantage_estimator: "
            f"{given.get('advantage_estimator')} has another; leave the key out"
        ),
    ),
    *(
        of_weights(
            f"baseline beside {name}",
            lambda given, name=name: _has_baseline(given) and given.has(name),
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

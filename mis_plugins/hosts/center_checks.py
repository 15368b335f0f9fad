"""Checks of score centering: what a host's engine names, and what its trainer scores the tokens over."""

from __future__ import annotations

from mis_plugins.hosts.checks import Check, Given


def _centers(given: Given) -> bool:
    return given.config.center is not None


def _top_k(given: Given) -> int:
    return 0 if given.config.center is None else given.config.center.top_k


CENTERS = (
    Check(
        "center beside true on policy",
        ("command", "loss"),
        lambda given: _centers(given) and given.has("true_on_policy_mode"),
        "true_on_policy_mode: the trainer rounds its logits before it scores the sampled token, and mis.center scores "
        "the engine's likeliest tokens without; drop one of them",
        arguments=("true_on_policy_mode",),
    ),
    Check(
        "center beside top-p",
        ("command", "loss"),
        lambda given: (
            _centers(given) and given.get("rollout_top_p", 1) != 1 and given.host.kept_set(given.args)
        ),
        "rollout_top_p: {host} scores tokens over those that top-p leaves, and mis.center reads the engine's likeliest "
        "tokens of the whole vocabulary; set rollout_top_p: 1.0",
        arguments=("rollout_top_p",),
    ),
    Check(
        "head not asked",
        ("command", "loss"),
        lambda given: (
            _centers(given)
            and given.get("rollout_top_logprobs_num") == 0
            and given.get("custom_generate_function_path") is None
        ),
        "rollout_top_logprobs_num: 0 asks the engine for no token but the sampled ones, and mis.center reads its "
        "likeliest; give --rollout-top-logprobs-num 32",
        arguments=("rollout_top_logprobs_num",),
    ),
    Check(
        "smaller head",
        ("command", "loss"),
        lambda given: 0 < (given.get("rollout_top_logprobs_num") or 0) < _top_k(given),
        "rollout_top_logprobs_num: the engine names fewer tokens than mis.center.top_k reads; give both one number",
        "warn",
        ("rollout_top_logprobs_num",),
    ),
)

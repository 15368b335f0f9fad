"""AReaL's yaml: what its blocks `actor:` and `rollout:` say of the correction.

AReaL's segment-wise branch has `behav_imp_weight_*` and `enable_segment_wise_ppo`, as had its main branch
until `rejection_sampling` took their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mis_plugins.config import reading, writing
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate.translation import Translation, as_written, choice, listed, load
from mis_plugins.shared.numerals import shown

CAP, FLOOR, ENABLE = "behav_imp_weight_cap", "behav_imp_weight_floor", "enable_segment_wise_ppo"
DECOUPLED, REJECTION = "use_decoupled_loss", "rejection_sampling"
KNOWN = (*reading.AREAL_KEYS, REJECTION)
SOURCES = {
    "weight.bound": (CAP, REJECTION),
    "weight.upper": (CAP, REJECTION),
    "weight.lower": (FLOOR, REJECTION),
    "reject[0]": (REJECTION,),
    "segment_wise.enabled": (ENABLE,),
    "segment_wise.fresh_tokens": (ENABLE,),
    "segment_wise.clip_against": (ENABLE,),
    "objective.old": (DECOUPLED,),
}
DEFAULTS: dict[str, Any] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
}
CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
    "agg": ("sum", "mean", "max"),
}
UNSERVED: dict[str, tuple[Any, str]] = {
    "m2_threshold": (None, "M2PO's masking has no counterpart here."),
    "use_sapo_loss": (False, "SAPO's loss has no counterpart here."),
    "prox_logp_method": (
        "recompute",
        "pi_old is always recomputed here; mis.segment_wise.method is about pi_{v+1}.",
    ),
    "importance_sampling_level": (
        "token",
        "the ratio of the clip, here --advantage-estimator gspo or mis.objective.ratio.",
    ),
}
"""Keys of `actor:` that nothing here reads: AReaL's default, and what to know of another value."""


def translate(text: str) -> Translation:
    """Translate AReaL's yaml as AReaL's code reads it, also where its document says otherwise.

    Raises:
        ConfigError: no key of AReaL's, a value that AReaL refuses, or a setting without a counterpart; the
            error quotes the key.
    """
    tree = load(text)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"got {shown(tree)}; expected a mapping with AReaL's actor: and rollout:")
    places = reading.areal_places(tree)
    if not places:
        raise ConfigError(
            f"nothing to translate: none of {', '.join(KNOWN)} in it, nor in its actor: and rollout:"
        )
    where = {key: place for key, (place, _) in places.items()}
    with _placed(where):
        config = _config({key: value for key, (_, value) in places.items()})
    sources = {path: tuple(where[key] for key in keys if key in where) for path, keys in SOURCES.items()}
    said = (*_of_loss(where), *notes(tree))
    return Translation("AReaL", dict(places.values()), writing.as_mapping(config), sources, said)


@contextmanager
def _placed(where: Mapping[str, str]) -> Iterator[None]:
    """Make a ConfigError in the block quote keys by where they stand: `actor.behav_imp_weight_cap`."""
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"\w+", lambda word: where.get(word[0], word[0]), str(error))
        raise ConfigError(message) from None


def _config(keys: Mapping[str, Any]) -> CorrectionConfig:
    for key in keys:
        reading.check_spelling_of_areal(key)
        if key not in KNOWN:
            raise ConfigError(f"{key}: no key that is read here; known are {', '.join(KNOWN)}")
    config = reading.from_areal({key: value for key, value in keys.items() if key != REJECTION})
    if REJECTION not in keys or config.bypass:  # AReaL ignores it in bypass
        return config
    if CAP in keys:
        raise ConfigError(f"{CAP}: rejection_sampling took its place in AReaL; keep one of them")
    said = reading.from_mapping(_rejection(keys[REJECTION]))
    return replace(said, segment_wise=config.segment_wise)


def _rejection(block: Any) -> dict[str, Any]:
    """`rejection_sampling` as it stands under `mis:`."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"{REJECTION}: got {shown(block)}; expected a mapping of {', '.join(DEFAULTS)}")
    for key in block:
        if key not in DEFAULTS:
            raise ConfigError(f"{REJECTION}.{key}: unknown key; known are {', '.join(DEFAULTS)}")
    keys = DEFAULTS | dict(block)
    for key, choices in CHOICES.items():
        choice(keys[key], f"{REJECTION}.{key}", choices)
    lower, upper = _bounds(keys)
    if keys["action"] == "clamp":
        return {"weight": _clamped(keys) | {"lower": lower or 0.0, "upper": upper}}
    by_sequence = keys["level"] == "sequence" and keys["metric"] == "ratio"
    weight = {"level": "geometric" if by_sequence else "token", "bound": "none"}
    over = "token" if keys["level"] == "token" else keys["agg"]
    return {"weight": weight, "reject": [RULES[keys["metric"]](over, lower, upper)]}


def _bounds(keys: Mapping[str, Any]) -> tuple[float | None, float]:
    """Read `lower` and `upper`, and refuse what AReaL refuses."""
    lower = None if keys["lower"] is None else number(keys["lower"], f"{REJECTION}.lower")
    upper = number(keys["upper"], f"{REJECTION}.upper")
    metric = keys["metric"]
    least = {"ratio": 1.0, "kl_k2": 0.0}.get(metric)
    if least is not None and upper <= least:
        raise ConfigError(
            f"{REJECTION}.upper: got {upper:g}; AReaL needs one above {least:g} with metric: {metric}"
        )
    if lower is not None and lower > upper:
        raise ConfigError(f"{REJECTION}.lower: got {lower:g}, which is above {REJECTION}.upper, {upper:g}")
    if metric == "ratio" and lower is not None and lower <= 0:
        raise ConfigError(
            f"{REJECTION}.lower: got {lower:g}; AReaL needs a positive one with metric: ratio, or none"
        )
    return lower, upper


def _clamped(keys: Mapping[str, Any]) -> dict[str, Any]:
    if keys["metric"] != "ratio":
        raise ConfigError(f"{REJECTION}.action: clamp needs metric: ratio, in AReaL as here")
    if keys["level"] == "token":
        return {"level": "token", "bound": "clip"}
    if keys["agg"] != "mean" and keys["lower"]:
        raise ConfigError(
            f"{REJECTION}.agg: {keys['agg']} with action: clamp and a lower bound leaves weights below it in AReaL, "
            "which is not served; use mean, or drop lower"
        )
    return {"level": "geometric", "bound": "clip"}


def _ratio_rule(over: str, lower: float | None, upper: float) -> dict[str, Any]:
    return {"statistic": "ratio", "over": over, "lower": lower, "upper": upper}


def _k1_rule(over: str, lower: float | None, upper: float) -> dict[str, Any]:
    """AReaL's k1 is log pi_old - log mu; ours is its negative."""
    low = None if lower is None else -lower
    return {"statistic": "k1", "over": {"max": "min"}.get(over, over), "lower": -upper, "upper": low}


def _k2_rule(over: str, lower: float | None, upper: float) -> dict[str, Any]:
    low = None if lower is None or lower <= 0 else lower  # no k2 lies below 0
    return {"statistic": "k2", "over": over, "lower": low, "upper": upper}


def _k3_rule(over: str, lower: float | None, upper: float) -> dict[str, Any]:
    raise ConfigError(
        f"{REJECTION}.metric: kl_k3 is 1/r - 1 + log r in AReaL's code, and r - 1 - log r here and in its help; use "
        "kl_k2, or say k3 under `mis:`"
    )


RULES = {"ratio": _ratio_rule, "kl_k1": _k1_rule, "kl_k2": _k2_rule, "kl_k3": _k3_rule}


def _of_loss(where: Mapping[str, str]) -> Iterator[str]:
    if DECOUPLED not in where:
        yield (
            f"{DECOUPLED} is not in the file: AReaL's main branch has it false by default, and then weighs nothing; "
            "here it is read as true."
        )
    elif CAP not in where and REJECTION not in where:
        yield (
            f"{where[DECOUPLED]}: AReaL 1.0.4 weighs nothing without {REJECTION}; here each token has its whole ratio, "
            "without a bound, as in the releases of the segment-wise branch."
        )
    if ENABLE in where:
        yield (
            f"{where[ENABLE]}: a token that the trainer's own version wrote weighs 1, as in AReaL; "
            "fresh_tokens: proximal corrects the engine's rounding there too."
        )
    if REJECTION in where:
        yield f"{where[REJECTION]}: a log-prob that is not finite weighs 1 in AReaL, and 0 here."


def notes(tree: Mapping[Any, Any]) -> Iterator[str]:
    """Notes on keys of AReaL's blocks that bound the rollout or that nothing here reads."""
    actor, rollout = (
        block if isinstance(block := tree.get(name), Mapping) else {} for name in reading.AREAL_BLOCKS
    )
    bound, places = rollout.get("max_head_offpolicyness"), rollout.get("max_concurrent_rollouts")
    if bound is not None:
        told = as_written(bound)
        yield (
            f"rollout.max_head_offpolicyness: {told} bounds the rollout, not the loss: --max-head-offpolicyness "
            f"{told} with --async of lab.host; Miles and slime have bounds of their own (docs/async.md)."
        )
    if places is not None:
        yield (
            f"rollout.max_concurrent_rollouts: {as_written(places)} counts prompts in AReaL; "
            "--max-concurrent-rollouts counts responses, so multiply by the samples of a prompt."
        )
    for key, (default, why) in UNSERVED.items():
        if actor.get(key) not in (None, default):
            yield f"actor.{key}: {as_written(actor[key])}: {why}"


def warnings(tree: Mapping[Any, Any]) -> Iterator[str]:
    """Warnings for a user who gives AReaL's yaml itself to --custom-config-path."""
    if any(place != key for key, (place, _) in reading.areal_places(tree).items()):
        yield from notes(tree)
        others = [
            key for key in tree if key not in (*reading.AREAL_BLOCKS, "mis") and not reading.is_ours(key)
        ]
        if others:
            yield (
                f"a host makes an argument of every top-level key, of {listed(others)} too, and may have one of the "
                "same name: `config from-areal` writes a file of the correction alone"
            )

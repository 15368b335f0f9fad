"""ms-swift's arguments, from its yaml or from a launch script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.translate.translation import Translation, choice, load, number

MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
DELTA, METRICS = "off_policy_sequence_mask_delta", "log_rollout_offpolicy_metrics"
KEYS = (MODE, THRESHOLD, DELTA, METRICS)
DEFAULT_THRESHOLD = 2.0
SOURCES = {
    "weight.bound": (MODE,),
    "weight.upper": (THRESHOLD,),
    "reject[0]": (MODE, THRESHOLD),
    "opsm.delta": (DELTA,),
    "objective.weigh_kl": ("beta",),
    "metrics": (METRICS,),
}
FLAG = re.compile(r"--([\w-]+)(?:[ \t=]+([^\s\\-][^\s\\]*))?")
COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)

# Of a threshold: the weight and what is rejected. `sequence` is the geometric mean; `mask` sets the weight to 0.
MODES = {
    "token_truncate": lambda upper: ({"level": "token", "bound": "truncate", "upper": upper}, []),
    "token_mask": lambda upper: ({"level": "token", "bound": "zero", "lower": 0.0, "upper": upper}, []),
    "sequence_truncate": lambda upper: ({"level": "geometric", "bound": "truncate", "upper": upper}, []),
    "sequence_mask": lambda upper: ({"level": "token", "bound": "none"}, [{"over": "mean", "upper": upper}]),
}


def translate(text: str) -> Translation:
    """The code of ms-swift is followed where its document says otherwise.

    Raises:
        ConfigError: none of its keys; a mode that it has not.
    """
    keys = _keys(text)
    given = {key: keys[key] for key in (*KEYS, "beta") if key in keys}
    if not set(given) & set(KEYS):
        raise ConfigError(f"nothing to translate: none of {', '.join(KEYS)} in it")
    mis = _weighed(given) | _masked(given)
    mis["metrics"] = "full" if mis or given.get(METRICS) else "none"
    return Translation("ms-swift", given, mis, SOURCES, tuple(_notes(given)))


def _weighed(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get(MODE) is None:
        return {}
    upper = number(given.get(THRESHOLD, DEFAULT_THRESHOLD), THRESHOLD)
    weight, reject = MODES[choice(given[MODE], MODE, tuple(MODES))](upper)
    return {"weight": weight} | ({"reject": reject} if reject else {})


def _masked(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get(DELTA) is None:
        return {}
    mis = {"opsm": {"delta": number(given[DELTA], DELTA), "advantage": "sequence", "reference": "behavior"}}
    if _weighs_kl(given):
        mis["objective"] = {"old": "proximal", "surrogate": "clip", "weigh_kl": True}
    return mis


def _notes(given: Mapping[str, Any]) -> Iterator[str]:
    mode = given.get(MODE)
    if mode is None and given.get(DELTA) is None:
        yield "ms-swift corrects nothing with these."
    if mode == "sequence_mask":
        yield (
            "sequence_mask: the code multiplies raw token ratios by the mask; the document's formula is the preset "
            "ms-swift-sequence-mask-as-documented."
        )
    masks = given.get(DELTA) is not None
    if (mode is not None or masks) and _has_kl(given) and not (masks and _weighs_kl(given)):
        yield (
            "ms-swift multiplies its KL term (beta) by the weight too, and a mask drops it; here the hosts weigh the "
            "policy loss alone. objective: {weigh_kl: true} with the loss hook and --use-kl-loss is the same as theirs."
        )
    if given.get(DELTA) is not None:
        yield f"{DELTA}: without rollout log-probs both compare with the trainer before the update."


def _weighs_kl(given: Mapping[str, Any]) -> bool:
    return given.get("beta") is not None and _has_kl(given)


def _has_kl(given: Mapping[str, Any]) -> bool:
    """Of GRPO, unless `beta` is said to be 0: its default is 0.04."""
    return given.get("beta") is None or number(given["beta"], "beta") != 0


def _keys(text: str) -> Mapping[str, Any]:
    """A yaml mapping, with or without dashes before its keys; else the `--key value` of a launch script.

    Its parser takes `--a-key` for `--a_key`.
    """
    if not re.search(r"^\s*(?:[\w/.]+ .*)?--[\w-]+[ =]", text, re.MULTILINE):
        loaded = load(text)
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"got {loaded!r}; expected a yaml mapping or a launch script with --key value")
        return {_underscored(str(key).lstrip("-")): value for key, value in loaded.items()}
    flags = FLAG.findall(COMMENT.sub("", text))
    return {_underscored(key): True if value == "" else load(value) for key, value in flags}


def _underscored(key: str) -> str:
    return key.replace("-", "_")

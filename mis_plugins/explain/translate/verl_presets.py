"""The Python presets of verl 0.9.1, by name: `RolloutCorrectionConfig.decoupled_token_is(threshold=3.0)`."""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mis_plugins.config.reading import suggest
from mis_plugins.errors import ConfigError

CALL = re.compile(r"\s*(?:\w+\.)*(?P<name>\w+)\s*(?P<arguments>\((?!\)\s*[({]).*\))?\s*", re.DOTALL)
LONGEST_CALL = 500  # letters; Python's parser can end the process on what is far longer
CONFIG = "RolloutCorrectionConfig"
BY_DEFAULT = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False,
              "rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False,
              "loss_type": "ppo_clip"}  # fmt: skip
"""The class of the presets, and its own defaults, which weigh sequences; verl's yaml has `rollout_is: null`."""
RULES = {"seq_sum_k1": "0.5_2.0", "seq_mean_k1": "0.999_1.001", "seq_mean_k3": 0.01}  # default thresholds
NOTE = (
    "read as the preset of verl 0.9.1; the presets on ratios of 0.6.1 and 0.7.0 have other bounds, and a veto: give "
    "the keys of such a release."
)


@dataclass(frozen=True)
class Preset:
    """What a class method of verl sets: the level of the weight, the rule, and the loss of the bypass."""

    level: str | None = None
    rule: str | None = None
    loss_type: str | None = None
    icepop: bool = False

    def parameters(self) -> dict[str, Any]:
        """The parameters of the class method, in order, with their defaults."""
        if self.icepop:
            return {"threshold": 5.0, "threshold_lower": 0.5}
        threshold = {"is_threshold" if self.rule else "threshold": 2.0} if self.level else {}
        return threshold | ({"rs_threshold": RULES[self.rule]} if self.rule else {})

    def keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `algorithm.rollout_correction` that the class method sets."""
        value = {**self.parameters(), **given}
        keys: dict[str, Any] = {"rollout_is": self.level, "rollout_rs": self.rule}
        if self.icepop:
            keys["rollout_is_threshold"] = f"{value['threshold_lower']}_{value['threshold']}"
        elif self.level:
            keys["rollout_is_threshold"] = value["is_threshold" if self.rule else "threshold"]
        if self.rule:
            keys["rollout_rs_threshold"] = value["rs_threshold"]
        return keys | ({"bypass_mode": True, "loss_type": self.loss_type} if self.loss_type else {})


WEIGHTS = {"": None, "_seq_tis": "sequence", "_token_tis": "token"}
PRESETS = {
    "decoupled_token_is": Preset("token"),
    "decoupled_seq_is": Preset("sequence"),
    "decoupled_token_icepop": Preset("token", icepop=True),
    "decoupled_seq_is_rs": Preset("sequence", "seq_sum_k1"),
    **{f"decoupled_geo_rs{name}": Preset(level, "seq_mean_k1") for name, level in WEIGHTS.items()},
    **{f"decoupled_k3_rs{name}": Preset(level, "seq_mean_k3") for name, level in WEIGHTS.items()},
    "bypass_ppo_clip": Preset(None, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": Preset(None, "seq_mean_k1", "ppo_clip"),
    "bypass_ppo_clip_k3_rs": Preset(None, "seq_mean_k3", "ppo_clip"),
    "bypass_pg_is": Preset("sequence", None, "reinforce"),
    "bypass_pg_token_icepop": Preset("token", None, "reinforce", icepop=True),
    **{f"bypass_pg_geo_rs{name}": Preset(level, "seq_mean_k1", "reinforce") for name, level in WEIGHTS.items()},
    "disabled": Preset(),
}


def is_call(text: str) -> bool:
    """Whether the text names a preset, or calls something as one calls a preset."""
    match = CALL.fullmatch(text) if len(text) <= LONGEST_CALL else None
    return match is not None and (match["name"] in PRESETS or match["arguments"] is not None)


def keys_of(text: str) -> dict[str, Any]:
    """The keys that a preset sets, or the call of the class itself; raises ConfigError for what verl 0.9.1 refuses."""
    match = CALL.fullmatch(text)
    name = match["name"] if match else text
    if match is not None and name == CONFIG:
        return BY_DEFAULT | _arguments(name, match["arguments"] or "()", tuple(BY_DEFAULT))
    if match is None or name not in PRESETS:
        raise ConfigError(f"{name}: no preset of verl 0.9.1{suggest(name, PRESETS)}")
    preset = PRESETS[name]
    return preset.keys(_arguments(name, match["arguments"] or "()", tuple(preset.parameters())))


def _arguments(name: str, text: str, parameters: tuple[str, ...]) -> dict[str, Any]:
    try:
        call = ast.parse(f"{name}{text}", mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("no call")
        takes = [inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters]
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return inspect.Signature(takes).bind_partial(*map(ast.literal_eval, call.args), **given).arguments
    except (SyntaxError, TypeError, ValueError) as error:
        why = str(error).partition(": <ast")[0]  # Python names a place in memory of what is no literal
        raise ConfigError(
            f"{name}{text}: {why}; {name} takes {', '.join(parameters) or 'nothing'}, as numbers or quoted text"
        ) from None

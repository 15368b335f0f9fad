"""verl's rollout correction, of 0.9.1 and of earlier releases.

Three dialects. Since 0.7.1: `rollout_rs` names statistics (`seq_mean_k1`), whose thresholds bound k1 = -log r, so that
"lo_hi" means a ratio in [1/hi, 1/lo]. 0.6.1 and 0.7.0: `rollout_rs` names a level (`geometric`), with bounds on the
ratio and a veto. 0.6.0: keys of `algorithm` itself, where `rollout_is` is a bool. Before that, one key of the actor:
`tis_imp_ratio_cap`, which truncates weights of tokens.

DPPO is a loss of the actor, `policy_loss.loss_mode`, since 0.7.1; its largest divergences are the actor's clip ratios.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mis_plugins.config.model import BY_DIVERGENCE
from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate import verl_presets
from mis_plugins.explain.translate.script import commands, without_comments
from mis_plugins.explain.translate.translation import (
    OVER_RESPONSES,
    OVER_TOKENS,
    Translation,
    Unquoted,
    as_written,
    choice,
    load,
    switch,
)
from mis_plugins.shared.numerals import cut, shown

SECTION = ("algorithm", "rollout_correction")
COMMON = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
SINCE_0_9 = ("rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type", "_target_")
EARLIER = ("rollout_rs_threshold_lower", "rollout_token_veto_threshold", "use_policy_gradient")
BOOLEAN_DIALECT = (
    "rollout_is_level",
    "rollout_is_mode",
    "rollout_is_threshold_lower",
    "rollout_is_veto_threshold",
)
CAP = "tis_imp_ratio_cap"
OF_0_9 = (*COMMON, *SINCE_0_9[:-1])
LOSS_MODE = "loss_mode"
WIDTHS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
KNOWN = COMMON + SINCE_0_9 + EARLIER + BOOLEAN_DIALECT + (CAP, LOSS_MODE, *WIDTHS)
ACTOR = ("actor_rollout_ref", "actor")
IN_LOSS = (*ACTOR, "policy_loss", "rollout_correction")
PLACES = {CAP: ACTOR, LOSS_MODE: (*ACTOR, "policy_loss"), **dict.fromkeys(WIDTHS, ACTOR)}
OVERRIDE = re.compile(
    r"\+{0,2}(?:(?:algorithm\.)?(?:rollout_correction\.)?|(?:actor_rollout_ref\.)?actor\."
    r"(?:policy_loss\.(?:rollout_correction\.)?)?)(?P<key>\w+)=(?P<value>.*)",
    re.DOTALL,
)
IN_SCRIPT = re.compile(
    r"(?:algorithm\.rollout_|\.rollout_correction\b|\.tis_imp_ratio_cap\b|\.policy_loss\.loss_mode\b)[\w.]{0,80}\s*="
)
BESIDE_IT = re.compile(
    r"\+{0,2}(?P<path>actor_rollout_ref\.(?:actor\.loss_agg_mode|rollout\.calculate_log_probs)|trainer\.use_v1)"
    r"=(?P<value>.*)"
)  # settings outside of the correction that a note is about
WORD = re.compile(r"(?P<mark>~|\+{0,2})(?P<path>\w+(?:\.\w+)+)(?:=(?P<value>.*))?", re.DOTALL)
OF_SCRIPT = re.compile(
    r"algorithm\.rollout_\w+(?:\.\w+)?|actor_rollout_ref\.actor\.(?:tis_imp_ratio_cap|policy_loss\.loss_mode"
    r"|policy_loss\.rollout_correction(?:\.\w+)?|loss_agg_mode|clip_ratio(?:_low|_high|_c)?)|actor_rollout_ref\.rollout\.calculate_log_probs|trainer\.use_v1"
)
HYDRAS_TOO = re.compile(r"true|false|[-+]?(?!0\d)[\d.]+(e[-+]?\d+)?", re.IGNORECASE)

OVER_LEVEL = {"token": "token", "sequence": "sum", "geometric": "mean"}
AGGREGATION = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
OPTIONS = tuple(
    f"{unit}_{k}" for unit in AGGREGATION for k in ("k1", "k2", "k3") if (unit, k) != ("seq_max", "k1")
)
SURROGATE = {"ppo_clip": "clip", "reinforce": "reinforce"}
OTHER_LOSSES = ("vanilla", "bypass_mode")  # losses that an override behind the file may name in place of DPPO
CLIP_RATIO, CLIP_RATIO_C = 0.2, 3.0  # of an actor in verl 0.9.1 that sets none: all three widths, and the cap
BOOLEAN_BOUND = {"truncate": "truncate", "mask": "zero"}
BOOLEAN_LOWER, BOOLEAN_VETO = "rollout_is_threshold_lower", "rollout_is_veto_threshold"
BOOLEAN_VETO_DEFAULT = 1e-4
BOOLEAN_SOURCES = {
    "level": ("rollout_is_level",),
    "bound": ("rollout_is_mode",),
    "lower": (BOOLEAN_LOWER, "rollout_is_threshold"),
    "upper": ("rollout_is_threshold",),
}

TOKENS_LEFT = (
    "denominator: verl divides by the tokens that are left; so does each sequence here. The hosts refuse it with "
    "--calculate-per-token-loss."
)
SEQUENCES_LEFT = (
    "verl leaves rejected sequences out of the number that it averages over; the hosts count them, so that a step "
    "that rejects much is smaller here."
)
AS_0_6_0 = (
    "Read as verl 0.6.0: what mask or veto rejects weighs 0 and stays in the loss mask, and rollout_is: false applies "
    "nothing. verl's main branch before 0.6.1 took rejected tokens out of the mask, with rollout_is: false too, and "
    "had no veto by default: ask for that with rollout_rs and rollout_token_veto_threshold."
)
VETO_OF_0_6_0 = (
    f"{BOOLEAN_VETO}: 1e-4 in verl 0.6.0 where it is not given, null for none. In verl KL and entropy of a vetoed "
    "sequence stay; here they are rejected with the sequence."
)
AS_0_6_1 = (
    "use_policy_gradient: false with bypass_mode is of verl 0.6.1, which neither weighs nor rejects there. Leave "
    "use_policy_gradient out to have it read as in later releases, which reject."
)
VETO_OF_0_6_1 = (
    "rollout_token_veto_threshold: with use_policy_gradient verl 0.6.1 applies it beside rollout_rs alone."
)
V1_TRAINER = (
    "verl's trainer since 0.9.0 (trainer.use_v1: true) takes mu for pi_old in bypass and applies no more of this: "
    "neither weights, nor rules, nor loss_type. Here they act as its documents and use_v1: false have them."
)
OF_CAP = (
    f"{CAP}: verl before 0.6.0 multiplies the policy loss alone by the truncated weights of tokens, as here; 0 and "
    "below is off."
)
OF_LOSS = (
    "actor.policy_loss.rollout_correction is read with policy_loss.loss_mode: bypass_mode alone, in the place of "
    "pi_old with algorithm.rollout_correction.bypass_mode: true; the block is translated as both."
)
MU_BY_BYPASS = (
    "policy_loss.loss_mode: without algorithm.rollout_correction.bypass_mode: true verl compares with pi_old, as this "
    "file does. The paper compares with mu: objective.old: behavior."
)
DPPO_IN_BYPASS = (
    "bypass_mode: verl's trainer since 0.9.0 (trainer.use_v1: true) hands DPPO mu for pi_old, and neither weights nor "
    "rules, as here. The trainer before replaces this loss by that of bypass_mode."
)
NO_LOG_PROBS = (
    "actor_rollout_ref.rollout.calculate_log_probs: false leaves verl without rollout log-probs, and nothing is "
    "corrected; here the rollout engine must return them."
)

BESIDE = {
    "gspo": "; mis.objective.ratio: sequence gives GSPO's ratio",
    "cispo": "; mis.objective.surrogate: cispo gives CISPO's loss",
}
"""What to set for a loss of the actor that the translation leaves out."""
REDUCTIONS = {
    "token-mean": f"{OVER_TOKENS}; the flag refuses denominator: kept.",
    "seq-mean-token-mean": f"{OVER_RESPONSES}.",
}
NO_REDUCTION = "is no host's way: hosts average each response and then all, or over all tokens."
BY_DEFAULT = f"loss_agg_mode: token-mean, verl's default, {REDUCTIONS['token-mean']}"


@dataclass
class Draft:
    """A translation while it is made."""

    given: Mapping[str, Any]
    mis: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)

    def weigh(self, weight: dict[str, Any], sources: Mapping[str, tuple[str, ...]]) -> None:
        self.mis["weight"] = weight
        self.sources |= {f"weight.{name}": keys for name, keys in sources.items()}

    def reject(self, rule: dict[str, Any], *keys: str) -> None:
        self.mis.setdefault("weight", None)
        rules = self.mis.setdefault("reject", [])
        self.sources[f"reject[{len(rules)}]"] = keys
        rules.append(rule)

    def drop(self, part: str, why: str) -> None:
        """Set `weight` or `reject` back to null, and note why."""
        self.mis[part] = None
        self.sources = {path: keys for path, keys in self.sources.items() if not path.startswith(part)}
        self.notes.append(why)


def translate(text: str, overrides: Sequence[str] = ()) -> Translation:
    """A yaml of verl's or a part of one, a launch script, or a preset's name; Hydra overrides win over each.

    Raises:
        ConfigError: no such section, an unknown key, a value that verl refuses; it quotes verl's key.
    """
    beside = {
        found["path"]: _of_hydra(found["value"]) for found in map(BESIDE_IT.fullmatch, overrides) if found
    }
    said = _overridden([override for override in overrides if not BESIDE_IT.fullmatch(override)])
    tree = _tree(text, said | {path.rpartition(".")[2]: value for path, value in beside.items()})
    given = _checked(_section(tree) | said)
    _check_loss(given, said)
    try:
        return _translated(Draft(given, notes=_left_out(tree, said)), _merged(tree, _nested(beside)), text)
    except ConfigError as error:
        raise ConfigError(f"{error}{_hint(str(error), given)}") from None


def _translated(draft: Draft, tree: Any, text: str) -> Translation:
    given = draft.given
    is_dppo = given.get(LOSS_MODE) in BY_DIVERGENCE
    if is_dppo:
        _check_release(given)
    if verl_presets.is_call(text):
        draft.notes.append(verl_presets.NOTE)
    if CAP in given:
        _translate_cap(draft)
    elif isinstance(given.get("rollout_is"), bool) or any(key in given for key in BOOLEAN_DIALECT):
        _translate_boolean(draft)
    else:
        _translate_weight(draft)
        _translate_rejection(draft)
        _translate_dppo(draft, tree) if is_dppo else _translate_bypass(draft, tree)
        _translate_normalization(draft)
        _translate_denominator(draft)
    _finish(draft, tree)
    translation = Translation(
        "verl's rollout correction", given, draft.mis, draft.sources, tuple(draft.notes), draft.remarks
    )
    translation.config()
    return translation


def _hint(message: str, given: Mapping[str, Any]) -> str:
    """What to do where the error is about a value that only the launch decides."""
    for key, value in given.items():
        if isinstance(value, str) and "$" in value and message.startswith(key):
            return _by_launch(key)
    return ""


def _by_launch(key: str) -> str:
    place = f"{'.'.join(PLACES.get(key, SECTION))}.{key}"
    return f"; only the launch decides it: put its value behind the file, as {place}=VALUE"


# Reading the user's settings.


def _tree(text: str, said: Mapping[str, Any]) -> Any:
    """The file as verl's tree of settings, whichever way the user says it."""
    if verl_presets.is_call(text):
        return {"rollout_correction": verl_presets.keys_of(text)}
    if IN_SCRIPT.search(without_comments(text)):
        return _of_script(text, said)
    loaded = load(text)
    if isinstance(loaded, str) and re.search(r"\bverl\b|main_ppo", text):
        return {}  # a script without these settings
    return loaded or {}


def _of_script(text: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The Hydra overrides of a launch script that bear on the correction, as a tree."""
    found: dict[str, Any] = {}
    reads_widths = said.get(LOSS_MODE) in BY_DIVERGENCE or any(mode in text for mode in BY_DIVERGENCE)
    for words in commands(text, IN_SCRIPT):
        for word in filter(None, map(WORD.fullmatch, words)):
            path = word["path"]
            if not OF_SCRIPT.fullmatch(path):
                continue
            if word["mark"] == "~" or word["value"] is None:
                raise ConfigError(
                    f"{cut(word[0])}: cannot be translated; drop it and give each key behind the file"
                )
            if path.rpartition(".")[2] in WIDTHS and not reads_widths:
                continue
            value = _of_hydra(word["value"])
            if path.rpartition(".")[2] not in said and found.get(path, value) != value:
                raise ConfigError(
                    f"{cut(path)}: got {shown(found[path])} and {shown(value)}; put the one that counts behind the file"
                )
            found[path] = value
    return _nested(found)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    f"{cut(path)}: stands beside a value for all of {cut(parent)}; give one of them"
                )
        node[last] = value
    return tree


def _merged(tree: Any, over: Any) -> Any:
    """A tree with the settings of another in the place of its own."""
    if not isinstance(tree, Mapping) or not isinstance(over, Mapping):
        return over
    return {**tree, **{key: _merged(tree.get(key), value) for key, value in over.items()}}


def _section(tree: Any) -> dict[str, Any]:
    """The settings of the correction, from wherever a release of verl keeps them."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"got {shown(tree)}; expected a mapping with {'.'.join(SECTION)}")
    actor = _actor(tree)
    cap = {CAP: actor[CAP]} if isinstance(actor, Mapping) and CAP in actor else {}
    section, in_loss = _of_algorithm(tree, bool(cap)), _at(actor, *IN_LOSS[2:])
    if in_loss is not None:
        section = _with_loss(section, in_loss, _at(actor, "policy_loss", "loss_mode"))
    idle = all(section.get(key) in (None, False) for key in ("rollout_is", "rollout_rs"))
    return (cap if cap and idle else section | cap) | _dppo_of(actor)


def _actor(tree: Any) -> Any:
    return _at(tree, *ACTOR) or _at(tree, "actor") or {}


def _left_out(tree: Any, said: Mapping[str, Any]) -> list[str]:
    """A note on the actor's loss, where it is neither PPO's clip nor translated."""
    mode = said.get(LOSS_MODE, _at(_actor(tree), "policy_loss", LOSS_MODE))
    if mode in (None, *OTHER_LOSSES, *BY_DIVERGENCE) or "$" in str(mode):
        return []
    return [f"policy_loss.loss_mode: {as_written(mode)} is not translated{BESIDE.get(str(mode), '')}."]


def _dppo_of(actor: Any) -> dict[str, Any]:
    """The actor's loss and its widths, where the loss is DPPO or only the launch decides which it is."""
    mode = _at(actor, "policy_loss", LOSS_MODE)
    if mode not in BY_DIVERGENCE and "$" not in str(mode):
        return {}
    return {LOSS_MODE: mode} | {key: actor[key] for key in WIDTHS if key in actor}


def _check_loss(given: dict[str, Any], said: Mapping[str, Any]) -> None:
    """Take a loss that is not DPPO out of the settings.

    Raises:
        ConfigError: widths behind the file without DPPO, or a loss there that has no translation.
    """
    if LOSS_MODE in said:
        choice(said[LOSS_MODE], LOSS_MODE, (*BY_DIVERGENCE, *OTHER_LOSSES))
    mode = given.get(LOSS_MODE)
    if mode in BY_DIVERGENCE:
        return
    for key in WIDTHS:
        if key in said:
            raise ConfigError(
                f"{key}: read with policy_loss.loss_mode: {' or '.join(BY_DIVERGENCE)} alone; give --eps-clip or "
                "--eps-clip-high to the host"
            )
        given.pop(key, None)
    if mode is not None and "$" not in str(mode):
        del given[LOSS_MODE]
    if not given:
        raise ConfigError(
            f"nothing to translate: no {'.'.join(SECTION)}, and {LOSS_MODE}: {as_written(mode)}"
        )
    if given.keys() == {LOSS_MODE}:
        raise ConfigError(f"{LOSS_MODE}: got {shown(mode)}{_by_launch(LOSS_MODE)}")


def _of_algorithm(tree: Mapping[Any, Any], has_cap: bool) -> dict[str, Any]:
    """`algorithm.rollout_correction` of a whole file, the earliest keys under `algorithm`, or the file itself."""
    algorithm = tree.get("algorithm") or {}
    if not isinstance(algorithm, Mapping):
        raise ConfigError(f"algorithm: got {shown(algorithm)}; expected a mapping with {SECTION[1]}")
    for holder in (algorithm, tree):
        section = holder.get("rollout_correction")
        if isinstance(section, Mapping):
            return dict(section)
        if isinstance(section, str):
            if "$" in section or not verl_presets.is_call(section):
                raise ConfigError(f"rollout_correction: got {shown(section)}; write its keys behind the file")
            return verl_presets.keys_of(section)
    if "algorithm" in tree:
        ours = [key for key in algorithm if key in KNOWN or str(key).startswith("rollout_")]
        return {key: algorithm[key] for key in ours if key != SECTION[1]}
    return {} if has_cap or any(name in tree for name in WHOLE) else dict(tree)


WHOLE = ("actor_rollout_ref", "actor", "trainer", "data")  # parts of a whole file of verl's


def _with_loss(section: dict[str, Any], in_loss: Any, mode: Any) -> dict[str, Any]:
    """The settings with those that the bypass loss reads itself."""
    key = ".".join(IN_LOSS[1:])
    if not isinstance(in_loss, Mapping):
        raise ConfigError(f"{key}: got {shown(in_loss)}; expected a mapping")
    if mode not in (None, "bypass_mode"):
        raise ConfigError(
            f"{key}: verl reads it with policy_loss.loss_mode: bypass_mode alone; got {shown(mode)}"
        )
    if section.get("bypass_mode", True) is not True:
        raise ConfigError(
            f"{key}: without algorithm.rollout_correction.bypass_mode: true verl compares with pi_old there, and "
            "corrects no mismatch; set it, or drop this section"
        )
    for name, value in in_loss.items():
        if name not in ("_target_", "bypass_mode") and section.get(name, value) != value:
            raise ConfigError(
                f"{name}: got {shown(section[name])} under {'.'.join(SECTION)} and {shown(value)} under {key}; "
                "verl's trainers differ in which they read, so keep one"
            )
    return {**section, **in_loss, "bypass_mode": True}


def _overridden(overrides: Sequence[str]) -> dict[str, Any]:
    keys = {}
    for override in overrides:
        found = OVERRIDE.fullmatch(override)
        if found is None:
            raise ConfigError(f"override {shown(override)}: expected algorithm.rollout_correction.KEY=VALUE")
        if ".".join(IN_LOSS[2:]) in override.partition("=")[0]:
            raise ConfigError(
                f"override {shown(override)}: verl reads this block in bypass mode alone; put the key into the file, "
                "or give the whole launch script"
            )
        keys[found["key"]] = _of_hydra(found["value"])
    return keys


def _of_hydra(text: str) -> Any:
    """Value of a Hydra override, read as YAML; empty text and spellings of YAML alone (`no`, 010) stay text."""
    value = load(text)
    own = isinstance(value, bool | int | float) and not HYDRAS_TOO.fullmatch(text.strip())
    return text if own or text == "" else value


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    for key in given:
        if key not in KNOWN:
            close = difflib.get_close_matches(str(key), KNOWN, n=1)
            hint = f"did you mean {close[0]}?" if close else f"those of 0.9.1 are {', '.join(OF_0_9)}"
            raise ConfigError(f"{cut(str(key))}: no key of verl's rollout correction; {hint}")
    given.pop("_target_", None)
    if not given:
        raise ConfigError(f"nothing to translate: no {'.'.join(SECTION)}, and no key of it")
    return given


# DPPO.


def _check_release(given: Mapping[str, Any]) -> None:
    """Refuse keys of releases that have no DPPO."""
    earlier = [key for key in (*EARLIER, *BOOLEAN_DIALECT, CAP) if given.get(key) not in (None, False)]
    earlier += ["rollout_rs"] if set(_parts(given.get("rollout_rs"))) & OVER_LEVEL.keys() else []
    earlier += ["rollout_is"] if isinstance(given.get("rollout_is"), bool) else []
    for key in earlier:
        raise ConfigError(
            f"{key}: {as_written(given[key])} is of another verl than policy_loss.loss_mode: {given[LOSS_MODE]}, "
            "which 0.7.1 brought; drop one of them"
        )


def _translate_dppo(draft: Draft, tree: Any) -> None:
    """The surrogate, against pi_old or in bypass against mu; the widths become flags."""
    given, mode = draft.given, draft.given[LOSS_MODE]
    choice(given.get("loss_type", "ppo_clip"), "loss_type", tuple(SURROGATE))
    bypass = switch(given, "bypass_mode")
    if bypass and _at(tree, "trainer", "use_v1") is False:
        raise ConfigError(
            f"{LOSS_MODE}: {mode} never acts in verl with bypass_mode: true and trainer.use_v1: false, which put "
            "the loss of bypass_mode in its place; drop one of them"
        )
    draft.mis["objective"] = {"surrogate": mode, "old": "behavior" if bypass else "proximal"}
    draft.sources |= {"objective.surrogate": (LOSS_MODE,), "objective.old": ("bypass_mode",)}
    draft.notes.append(DPPO_IN_BYPASS if bypass else MU_BY_BYPASS)
    for part in ("weight", "reject"):
        if bypass and draft.mis.get(part):
            draft.drop(part, f"rollout_{'is' if part == 'weight' else 'rs'}: dropped, as verl does there.")
    draft.notes += _widths(given)


def _widths(given: Mapping[str, Any]) -> list[str]:
    """What to pass to the host for DPPO's largest divergences and its largest ratio, as an actor of verl has them."""
    base = number(given.get("clip_ratio", CLIP_RATIO), "clip_ratio")
    ends = {key: given.get(key, CLIP_RATIO) for key in ("clip_ratio_low", "clip_ratio_high")}
    low, high = (base if value is None else number(value, key) for key, value in ends.items())
    cap = number(given.get("clip_ratio_c", CLIP_RATIO_C), "clip_ratio_c")
    if cap <= 1:
        raise ConfigError(f"clip_ratio_c: got {cap:g}; the hosts' --eps-clip-c lies above 1")
    told = [
        f"clip_ratio_low, clip_ratio_high, clip_ratio_c: pass --eps-clip {low:g} --eps-clip-high {high:g} "
        f"--eps-clip-c {cap:g}, DPPO's largest divergences and ratio. An actor of verl that sets none has "
        f"{CLIP_RATIO:g}, {CLIP_RATIO:g} and {CLIP_RATIO_C:g}."
    ]
    if "clip_ratio" in given and base not in (low, high):
        told.append(
            f"clip_ratio: {base:g} has no effect in verl either, whose actor sets clip_ratio_low and clip_ratio_high."
        )
    return told


# Translating the dialects in which `rollout_is` names a level.


def _translate_weight(draft: Draft) -> None:
    level, threshold = draft.given.get("rollout_is"), draft.given.get("rollout_is_threshold", 2.0)
    if level is None or threshold is None:
        return
    choice(level, "rollout_is", ("token", "sequence"))
    lower, upper = _bounds(threshold, "rollout_is_threshold")
    bound = {"bound": "truncate"} if lower is None else {"bound": "zero", "lower": lower}
    by_threshold = {name: ("rollout_is_threshold",) for name in ("bound", "lower", "upper")}
    draft.weigh({"level": level, **bound, "upper": upper}, {"level": ("rollout_is",), **by_threshold})


def _translate_normalization(draft: Draft) -> None:
    if not draft.mis.get("weight") or not switch(draft.given, "rollout_is_batch_normalize"):
        return
    bypass = switch(draft.given, "bypass_mode")
    draft.mis["weight"]["normalize"] = {"scope": "data_parallel" if bypass else "rollout", "over": "valid"}
    draft.sources["weight.normalize"] = ("rollout_is_batch_normalize",)
    whose = "each micro-batch over all ranks" if bypass else "the whole training batch, on one process"
    draft.notes.append(
        f"rollout_is_batch_normalize: verl's mean is over {whose}, rejected tokens and zeroed weights included, as "
        "here."
    )
    if not bypass:
        draft.notes.append(
            "scope: rollout needs its hook, which Miles on FSDP does not call: use scope: data_parallel there, the "
            "mean of each micro-batch over the data-parallel ranks."
        )


def _translate_rejection(draft: Draft) -> None:
    given = draft.given
    names = _parts(given.get("rollout_rs"))
    for name in names:
        choice(name, "rollout_rs", (*OPTIONS, *OVER_LEVEL))
    if len(names) == 1 and names[0] in OVER_LEVEL:
        _reject_level(draft, names[0])
    elif names:
        _reject_options(draft, list(dict.fromkeys(names)), given.get("rollout_rs_threshold"))
    elif given.get("rollout_rs") is not None:
        raise ConfigError(
            f"rollout_rs: got {shown(given['rollout_rs'])}; choose of {', '.join(OPTIONS)}, or null"
        )
    _veto(draft, given.get("rollout_token_veto_threshold"), "rollout_token_veto_threshold")


def _reject_level(draft: Draft, name: str) -> None:
    """The dialect of 0.6.1 and 0.7.0: bounds on the ratio itself."""
    keys = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower")
    if draft.given.get(keys[1]) is None:
        raise ConfigError(f"rollout_rs_threshold: missing; rollout_rs: {name} needs it")
    upper, lower = _positive(draft.given[keys[1]], keys[1]), draft.given.get(keys[2])
    lower = 1 / upper if lower is None else number(lower, keys[2])
    bounds = {"lower": lower, "upper": upper} if lower > 0 else {"upper": upper}  # no ratio is below 0
    draft.reject({"over": OVER_LEVEL[name], **bounds}, *keys)


def _reject_options(draft: Draft, names: list[str], threshold: Any) -> None:
    """The dialect of 0.9.1: bounds on k1, k2 or k3."""
    if draft.given.get("rollout_rs_threshold_lower") is not None:
        raise ConfigError(
            "rollout_rs_threshold_lower: verl 0.9.1 has no such key; with rollout_rs: "
            f"{', '.join(names)} write rollout_rs_threshold: lower_upper"
        )
    specs = _parts(threshold)
    if len(specs) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold: got {len(specs)} for {len(names)} of rollout_rs; give one for each, or one for all"
        )
    for name, spec in zip(names, specs * (len(names) // len(specs)), strict=True):
        unit, k = choice(name, "rollout_rs", OPTIONS).rsplit("_", 1)
        rule = {"over": AGGREGATION[unit]} | (_ratio_rule(spec) if k == "k1" else _divergence_rule(k, spec))
        draft.reject(rule, "rollout_rs_threshold")
        path = f"reject[{len(draft.mis['reject']) - 1}]"
        draft.remarks[path] = f"rollout_rs: {name}, rollout_rs_threshold: {cut(str(spec))}"
        if k == "k1":
            draft.notes.append(
                f"{name}: verl bounds k1 = -log r, so {cut(str(spec))} keeps ratios in [1/upper, 1/lower], written out "
                "below. verl clamps each log ratio to +-20 before it adds them up, here the sum is clamped."
            )


def _ratio_rule(spec: Any) -> dict[str, float]:
    """lower_upper bounds exp(-log r) = 1 / r."""
    key = "rollout_rs_threshold"
    lower, upper = _bounds(spec, key)
    return {"lower": 1 / upper, "upper": upper if lower is None else 1 / lower}


def _divergence_rule(k: str, spec: Any) -> dict[str, Any]:
    if "_" in str(spec):
        raise ConfigError(f"rollout_rs_threshold: got {shown(spec)}; {k} has an upper bound only")
    return {"statistic": k, "upper": number(spec, "rollout_rs_threshold")}


def _translate_bypass(draft: Draft, tree: Any) -> None:
    loss_type = _loss_type(draft)
    if not switch(draft.given, "bypass_mode"):
        return
    draft.mis["objective"] = {"old": "behavior", "surrogate": SURROGATE[loss_type]}
    draft.sources |= {
        "objective.old": ("bypass_mode",),
        "objective.surrogate": ("loss_type", "use_policy_gradient"),
    }
    in_loss = _at(tree, *IN_LOSS) is not None or _at(tree, *IN_LOSS[1:]) is not None
    old_trainer = _at(tree, "trainer", "use_v1") is False or in_loss
    draft.notes += [OF_LOSS] * in_loss
    if draft.given.get("use_policy_gradient") is not None:
        _as_in_0_6_1(draft)
    elif (draft.mis.get("reject") or loss_type == "reinforce") and not old_trainer:
        draft.notes.append(V1_TRAINER)
    if loss_type == "ppo_clip" and draft.mis.get("weight"):
        draft.drop(
            "weight",
            "rollout_is: with loss_type: ppo_clip verl computes these weights for its metrics and does not apply "
            "them; the clipped ratio is pi_theta / mu already.",
        )


def _loss_type(draft: Draft) -> str:
    """Loss type of the bypass. verl 0.6.1 said `use_policy_gradient` for reinforce."""
    given = draft.given
    loss_type = choice(given.get("loss_type", "ppo_clip"), "loss_type", tuple(SURROGATE))
    bypass = switch(given, "bypass_mode")
    if switch(given, "use_policy_gradient"):
        if not bypass:
            raise ConfigError("use_policy_gradient: needs bypass_mode: true, in verl as here")
        return "reinforce"
    if loss_type != "ppo_clip" and not bypass:
        draft.notes.append(f"loss_type: {loss_type} has no effect without bypass_mode, in verl as here.")
    return loss_type


def _as_in_0_6_1(draft: Draft) -> None:
    """Drop rules that verl 0.6.1 ignores: outside its policy gradient all rules, and a veto without `rollout_rs`."""
    if not draft.mis.get("reject"):
        return
    if not draft.given["use_policy_gradient"]:
        draft.drop("reject", AS_0_6_1)
    elif draft.given.get("rollout_rs") is None:
        draft.drop("reject", VETO_OF_0_6_1)


def _translate_denominator(draft: Draft) -> None:
    rules = draft.mis.get("reject") or []
    if any(rule["over"] == "token" for rule in rules):
        draft.mis["denominator"] = "kept"
        draft.notes.append(TOKENS_LEFT)
    elif rules:
        draft.notes.append(SEQUENCES_LEFT)


# Translating `tis_imp_ratio_cap`, the earliest dialect.


def _translate_cap(draft: Draft) -> None:
    """Truncate weights of tokens, where the cap is above 0."""
    for key, value in draft.given.items():
        if key != CAP and value not in (None, False):
            raise ConfigError(
                f"{CAP}: of another verl than {key}: {as_written(value)}, which has no such key; drop one of them"
            )
    cap = number(draft.given[CAP], CAP)
    if cap > 0:
        draft.weigh({"level": "token", "bound": "truncate", "upper": cap}, {"level": (CAP,), "upper": (CAP,)})
        draft.notes.append(OF_CAP)


# Translating the dialect in which `rollout_is` is a bool.


def _translate_boolean(draft: Draft) -> None:
    """In verl 0.6.0 `rollout_is_threshold` switches metrics on, and `rollout_is` the correction too."""
    given = draft.given
    for key in given:
        if key not in (*BOOLEAN_DIALECT, "rollout_is", "rollout_is_threshold") and given[key] not in (
            None,
            False,
        ):
            sign = next(name for name in given if name in BOOLEAN_DIALECT or name == "rollout_is")
            raise ConfigError(
                f"{key}: of another verl than {sign}: {as_written(given[sign])}, whose release would ignore it; write "
                f"rollout_is: token | sequence, as since, or drop {key}"
            )
    if given.get("rollout_is_threshold") is None:
        return
    draft.notes.append(AS_0_6_0)
    if not switch(given, "rollout_is"):
        return
    level = choice(given.get("rollout_is_level", "token"), "rollout_is_level", tuple(OVER_LEVEL))
    mode = choice(given.get("rollout_is_mode", "truncate"), "rollout_is_mode", ("truncate", "mask"))
    bounds = _boolean_bounds(given, mode)
    draft.weigh({"level": level, "bound": BOOLEAN_BOUND[mode], **bounds}, BOOLEAN_SOURCES)
    _veto(draft, given.get(BOOLEAN_VETO, BOOLEAN_VETO_DEFAULT), BOOLEAN_VETO)
    if draft.mis.get("reject"):
        draft.notes.append(VETO_OF_0_6_0)


def _boolean_bounds(given: Mapping[str, Any], mode: str) -> dict[str, float]:
    upper, lower = _positive(given["rollout_is_threshold"], "rollout_is_threshold"), given.get(BOOLEAN_LOWER)
    if mode == "truncate":
        return {"upper": upper}
    return {"lower": 1 / upper if lower is None else max(number(lower, BOOLEAN_LOWER), 0.0), "upper": upper}


def _veto(draft: Draft, threshold: Any, key: str) -> None:
    if threshold is not None:
        draft.reject({"over": "min", "lower": _positive(threshold, key)}, key)


# Notes that every dialect needs.


def _finish(draft: Draft, tree: Any) -> None:
    mis = draft.mis
    for part in ("reject", "weight"):
        if not mis.get(part) and not mis.get("reject"):
            mis.pop(part, None)
    if not mis:
        draft.notes.append("verl corrects nothing with these settings and computes metrics alone.")
    if _at(tree, "actor_rollout_ref", "rollout", "calculate_log_probs") is False:
        draft.notes.append(NO_LOG_PROBS)
    if "$" in str(draft.given.get(LOSS_MODE, "")):
        draft.notes.append(
            f"policy_loss.loss_mode: {as_written(draft.given[LOSS_MODE])} is for the launch to decide; where it is "
            f"{' or '.join(BY_DIVERGENCE)}, put it behind the file, as {'.'.join(PLACES[LOSS_MODE])}.{LOSS_MODE}=VALUE."
        )
    mode = _at(_actor(tree), "loss_agg_mode")
    how = REDUCTIONS.get(str(mode), NO_REDUCTION)
    draft.notes.append(BY_DEFAULT if mode is None else f"loss_agg_mode: {as_written(mode)} {how}")
    mis["metrics"] = "watch"
    draft.notes = list(dict.fromkeys(draft.notes))


def _at(tree: Any, *path: str) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


# Values.


def _parts(value: Any) -> list[Any]:
    """Parts of a list, or of a text with commas; null has none."""
    if isinstance(value, str) and not isinstance(value, Unquoted):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _bounds(spec: Any, key: str) -> tuple[float | None, float]:
    """`lower_upper`, or an upper bound alone, of ratios."""
    if isinstance(spec, Unquoted):
        raise ConfigError(f'{key}: {spec} without quotes is one number to YAML; write "{spec}"')
    lower, separator, upper = str(spec).strip().partition("_") if isinstance(spec, str) else ("", "", spec)
    if not separator:
        return None, _positive(spec, key)
    return _positive(lower, key), _positive(upper, key)


def _positive(value: Any, key: str) -> float:
    ratio = number(value, key)
    if ratio <= 0:
        raise ConfigError(f"{key}: got {ratio:g}; every ratio is above 0, so give a number above 0")
    return ratio

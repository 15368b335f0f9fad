"""AReaL's yaml: what its blocks `actor:` and `rollout:` say of the correction.

AReaL's segment-wise branch has `behav_imp_weight_*` and `enable_segment_wise_ppo`, as had its main branch
until `rejection_sampling` took their place.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

from mis_plugins.config import model, reading, writing
from mis_plugins.config.flat import spelled
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError, shown
from mis_plugins.explain.translate import translation
from mis_plugins.explain.translate.script import ASKED, Asked, Dialect, overrides, tree_or_script
from mis_plugins.explain.translate.translation import Translation, as_written, choice, is_open, of_hydra, of_script

CAP, FLOOR, ENABLE = "behav_imp_weight_cap", "behav_imp_weight_floor", "enable_segment_wise_ppo"
DECOUPLED, REJECTION = "use_decoupled_loss", "rejection_sampling"
SAPO, M2 = "use_sapo_loss", "m2_threshold"
OF_SAPO = (SAPO, "sapo_tau_pos", "sapo_tau_neg", "importance_sampling_level", "recompute_logprob")
"""Keys of `actor:` that AReaL's SAPO reads."""
KNOWN = (*reading.AREAL_KEYS, REJECTION, SAPO, M2)
SOURCES = {
    "weight.bound": (CAP, REJECTION),
    "weight.upper": (CAP, REJECTION),
    "weight.lower": (FLOOR, REJECTION),
    "reject[0]": (REJECTION,),
    "segment_wise.enabled": (ENABLE,),
    "segment_wise.fresh_tokens": (ENABLE,),
    "segment_wise.clip_against": (ENABLE,),
    "objective.old": (DECOUPLED, "recompute_logprob"),
    "objective.surrogate": (SAPO,),
    "objective.tau_pos": ("sapo_tau_pos",),
    "objective.tau_neg": ("sapo_tau_neg",),
    "objective.ratio": ("importance_sampling_level",),
    "m2_threshold": (M2,),
}
DEFAULTS = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
CHOICES = {"level": ("token", "sequence"), "action": ("mask", "clamp"), "agg": ("sum", "mean", "max"),
           "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3")}  # fmt: skip
OLD_CAP, OLD_MODE = "behave_imp_weight_cap", "behave_imp_weight_mode"  # of AReaL before rejection_sampling
OLD_MODES = tuple(f"{level}_{action}" for level in CHOICES["level"] for action in ("mask", "truncate"))
MOVED = (
    f"{OLD_CAP}, {OLD_MODE}: AReaL 1.0.4 refuses both, and names rejection_sampling in their place, which stands here."
)
BINARY = "binary_kl"
KPOP = (
    "binary_kl is AReaL's KPop, the larger binary KL of both directions, and binary_kl here is that of mu to pi_old "
    "alone, which drops other tokens; where one direction is enough, put rejection_sampling.metric=ratio behind the "
    "file, and write {statistic: binary_kl, over: token, upper: UPPER} in its place under `mis:`"
)
CLIPS = ("actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip")
UNSERVED: dict[str, tuple[Any, str]] = {
    "prox_logp_method": ("recompute", "pi_old is always recomputed here; mis.segment_wise.method is about pi_{v+1}."),
    "importance_sampling_level": (
        "token",
        "the clip's ratio, here --advantage-estimator gspo or mis.objective.ratio, of all valid tokens; AReaL's is of "
        "those that rejection leaves.",
    ),
}
"""Keys of `actor:` that nothing here reads: AReaL's default, and what to know of another value."""


def translate(text: str, behind: Sequence[str] = (), asked: Asked = ASKED) -> Translation:
    """Translate AReaL's yaml as AReaL's code reads it; PATH=VALUE of `behind` win over the file, as in a command.

    It raises ConfigError, with the key, for a key or a value that AReaL refuses, or that has no counterpart.
    """
    expected = f"actor.KEY=VALUE, KEY one of {', '.join(KNOWN)}"
    won = list(translation.settings_behind(behind, expected, _is_read, methodcaller("lstrip", "+"), of_hydra))
    source = tree_or_script(text, DIALECT, set(dict(won)), asked)
    own = {path: value if is_open(value) else of_script(path, str(value)) for path, value in source.settings.items()}
    tree = source.tree
    for path, value in [*own.items(), *won]:
        tree = _with(tree, _place(tree, path).split("."), value)
    by_key = _places(tree)
    read = tuple(f"{block}.{key}" for block in reading.AREAL_BLOCKS for key in by_key)
    source = source.beside([place for place in translation.places(tree, KNOWN) if place not in (*by_key, *read)])
    if not by_key:
        source.prove_nothing()
        raise ConfigError(
            f"nothing to translate: none of {', '.join((*KNOWN, OLD_CAP, OLD_MODE))} in it, nor in its actor: and "
            "rollout:"
        )
    blocks = ((at, value if isinstance(value, Mapping) else {"": value}) for at, value in by_key.values())
    leaves = {f"{at}.{key}".rstrip("."): leaf for at, block in blocks for key, leaf in block.items()}
    translation.refuse_open(leaves, {})
    is_old = not {OLD_CAP, OLD_MODE}.isdisjoint(by_key)
    by_key = _renamed(by_key) if is_old else by_key
    where = {key: place for key, (place, _) in by_key.items()}
    config = _placed_config(by_key, where)
    if not config.corrects and not config.needs_loss_hook:
        source.prove_nothing()
    sources = {path: tuple(where[key] for key in keys if key in where) for path, keys in SOURCES.items()}
    remarks = (*source.notes, *([MOVED] if is_old else ()), *_of_loss(where, config), *notes(tree, where))
    return Translation("AReaL", dict(by_key.values()), writing.as_mapping(config), sources, remarks)


def _is_read(path: str) -> bool:
    return (block := path.partition(".")[0]) in reading.AREAL_BLOCKS or _is_areals(block)


def _is_areals(key: str) -> bool:
    return reading.is_areals(key) or key in (SAPO, M2)


def _starts(word: str) -> bool:
    block, *_ = word.lstrip("+").split(".")
    return "=" in word and block in reading.AREAL_BLOCKS or word.partition("=")[0] == "--config"


DIALECT = Dialect("AReaL", KNOWN, overrides, _is_read, _starts, blocks=reading.AREAL_BLOCKS)


def _place(tree: Mapping[str, Any], path: str) -> str:
    """The path of an override of a key, where the tree has the key already."""
    parts = path.split(".")
    key, *rest = parts[1:] if parts[0] in reading.AREAL_BLOCKS and parts[1:] else parts
    for block in ("", *reading.AREAL_BLOCKS) if _is_areals(key) else ():
        within = tree.get(block) if block else tree
        if isinstance(within, Mapping) and key in within:
            return ".".join([*([block] if block else []), key, *rest])
    return path


def _with(tree: Any, parts: Sequence[str], value: Any) -> Any:
    """A tree with another value at a path; a mapping is merged, as Hydra does."""
    own = dict(tree) if isinstance(tree, Mapping) else {}
    if not parts and isinstance(value, Mapping):
        return own | {key: _with(own.get(key), (), inner) for key, inner in value.items()}
    return own | {parts[0]: _with(own.get(parts[0]), parts[1:], value)} if parts else value


def _placed_config(by_key: Mapping[str, tuple[str, Any]], where: Mapping[str, str]) -> CorrectionConfig:
    """The config of keys; an error quotes them by where they stand: `actor.behav_imp_weight_cap`."""
    try:
        return _config({key: value for key, (_, value) in by_key.items()})
    except ConfigError as error:
        message = re.sub(r"\w+", lambda word: where.get(word[0], word[0]), str(error))
        raise ConfigError(message) from None


def _config(keys: Mapping[str, Any]) -> CorrectionConfig:
    for key in keys:
        if key not in (*KNOWN, *OF_SAPO):
            raise ConfigError(f"{key}: no key that is read here; known are {', '.join(KNOWN)}")
    if M2 in keys:
        threshold = reading.convert(float, keys[M2], M2)
        rest = _config({key: value for key, value in keys.items() if key != M2})
        of_sequences = rest.weight is not None and rest.weight.level != "token"
        adds_up = of_sequences or any(rule.over != "token" for rule in rest.reject)
        if not _is_decoupled(keys, rest):  # both policies of its second moment are the same in AReaL then
            return rest
        return replace(rest, m2_threshold=threshold, aggregate="kept" if adds_up else "valid")
    if SAPO in keys:
        return _sapo(keys)
    config = _from_flat({key: value for key, value in keys.items() if key != REJECTION})
    if REJECTION not in keys:
        return config
    if config.bypass:
        _check_same(_filled(keys[REJECTION]))
        return config
    if CAP in keys:
        raise ConfigError(f"{CAP}: rejection_sampling took its place in AReaL; keep one of them")
    return replace(_rejection(keys[REJECTION]), segment_wise=config.segment_wise)


def _is_decoupled(keys: Collection[str], config: CorrectionConfig) -> bool:
    return SAPO not in keys and not config.bypass


def _sapo(keys: Mapping[str, Any]) -> CorrectionConfig:
    """SAPO against the log-probs of the rollout engine, or recomputed ones; without rules or decoupled PPO."""
    reading.convert(bool, keys[SAPO], SAPO)
    for name in (DECOUPLED, CAP, FLOOR, ENABLE):
        if keys.get(name):
            raise ConfigError(
                f"{name}: {as_written(keys[name])} beside use_sapo_loss: true, which AReaL refuses with decoupled "
                "PPO; a config names one objective: drop one of them"
            )
    recomputes = reading.convert(bool, keys.get("recompute_logprob", False), "recompute_logprob")
    level = choice(keys.get("importance_sampling_level", "token"), "importance_sampling_level", CHOICES["level"])
    pos, neg = (reading.convert(float | None, keys.get(key), key) for key in ("sapo_tau_pos", "sapo_tau_neg"))
    with spelled(tau_pos="sapo_tau_pos", tau_neg="sapo_tau_neg"):
        old, ratio = "proximal" if recomputes else "behavior", "sequence" if level == "sequence" else "token"
        objective = model.ObjectiveConfig("sapo", old, ratio, tau_pos=pos, tau_neg=neg)
    return CorrectionConfig(objective=objective)


def _from_flat(keys: Mapping[str, Any]) -> CorrectionConfig:
    """Read AReaL's flat keys: standard or segment-wise decoupled PPO; a token outside the bounds weighs 0.

    As in AReaL, no floor means 0; no cap means no bound on the segment-wise branch, which alone knows
    `enable_segment_wise_ppo`, and else no weight. `enable_segment_wise_ppo: true` takes AReaL's rules for fresh tokens,
    `behavior_at_age_0`, and for PPO's ratio, `clip_against: proximal`. Without the key the host decides, as without
    `mis.segment_wise`. `use_decoupled_loss: false` compares pi_theta with mu itself, and has no weight.
    """
    cap, floor = (reading.convert(float | None, keys.get(key), key) for key in (CAP, FLOOR))
    asked, decoupled = (reading.convert(bool | None, keys.get(key), key) for key in (ENABLE, DECOUPLED))
    if decoupled is False:
        if asked:
            raise ConfigError("enable_segment_wise_ppo: true contradicts use_decoupled_loss: false")
        off = model.SegmentWiseConfig(enabled=False)
        return CorrectionConfig(objective=model.ObjectiveConfig(old="behavior"), segment_wise=off)
    if cap is None and floor is not None:
        raise ConfigError(f"behav_imp_weight_floor: {floor:g} alone is not served; give a behav_imp_weight_cap too")
    with spelled(lower=FLOOR, upper=CAP):
        unbounded = None if asked is None else model.WeightConfig(bound="none")
        weight = unbounded if cap is None else model.WeightConfig("token", "zero", floor or 0.0, cap)
    # AReaL never scores what the current version wrote: such a token keeps the weight 1 that it starts with.
    areals = model.SegmentWiseConfig(fresh_tokens="behavior_at_age_0", clip_against="proximal")
    chosen = {None: None, False: model.SegmentWiseConfig(enabled=False), True: areals}
    return CorrectionConfig(weight, segment_wise=chosen[asked])


def _places(tree: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """AReaL's keys that are set, unknown ones too, at the top level or in its blocks: where each stands, and its value.

    It raises ConfigError where two places contradict each other.
    """
    blocks = {f"{name}.": tree[name] for name in reading.AREAL_BLOCKS if isinstance(tree.get(name), Mapping)}
    keys: dict[str, tuple[str, Any]] = {}
    for prefix, block in {"": tree, **blocks}.items():
        for key, given in block.items():
            if given is None or not _is_areals(key) or (key == SAPO and given is False):
                continue
            place, value = keys.setdefault(key, (f"{prefix}{key}", given))
            if value != given:
                raise ConfigError(
                    f"{prefix}{key}: {shown(given)} contradicts {place}: {shown(value)}; keep one of them"
                )
    if SAPO in keys:
        read = {key: (f"{at}{key}", block[key]) for at, block in blocks.items() for key in OF_SAPO if key in block}
        keys |= {key: place for key, place in read.items() if place[1] is not None}
    else:
        _check_decoupled(keys, (tree, *blocks.values()))
    return keys


def _renamed(keys: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Keys of an earlier AReaL as `rejection_sampling`, by the mapping that AReaL's own error gives."""
    (_, cap), (mode_at, mode) = keys.get(OLD_CAP, (OLD_CAP, 5.0)), keys.get(OLD_MODE, (OLD_MODE, "token_mask"))
    place = keys.get(OLD_CAP, (mode_at,))[0]
    if REJECTION in keys:
        raise ConfigError(f"{place}: {keys[REJECTION][0]} took its place in AReaL; keep one of them")
    level, _, action = choice(mode, mode_at, (*OLD_MODES, "disabled")).partition("_")
    rest = {key: value for key, value in keys.items() if key not in (OLD_CAP, OLD_MODE)}
    block = {"level": level, "action": "mask" if action == "mask" else "clamp", "upper": cap}
    return rest | ({} if mode == "disabled" else {REJECTION: (place, block)})


def _check_decoupled(keys: Mapping[str, tuple[str, Any]], blocks: Iterable[Mapping[str, Any]]) -> None:
    """Refuse plain PPO on recomputed log-probs, which weighs nothing in AReaL."""
    if keys.get(DECOUPLED, ("", None))[1] is not False:
        return
    recomputed = (block.get("recompute_logprob") or False for block in blocks)
    if any(reading.convert(bool, value, "recompute_logprob") for value in recomputed):
        raise ConfigError(
            "use_decoupled_loss: false with recompute_logprob: true is PPO on recomputed log-probs, uncorrected: the "
            "hosts do that without a hook, so drop both keys"
        )


def _filled(block: Any) -> dict[str, Any]:
    """The keys of `rejection_sampling`, with AReaL's defaults."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"{REJECTION}: got {shown(block)}; expected a mapping of {', '.join(DEFAULTS)}")
    for key in block:
        if key not in DEFAULTS:
            raise ConfigError(f"{REJECTION}.{key}: unknown key; known are {', '.join(DEFAULTS)}")
    keys = DEFAULTS | dict(block)
    if keys["action"] == "clamp" and keys["metric"] != "ratio":
        raise ConfigError(f"{REJECTION}.action: clamp needs metric: ratio, in AReaL as here")
    return keys


def _check_same(keys: Mapping[str, Any]) -> None:
    """Refuse bounds that leave out equal policies, as both are in AReaL without the decoupled loss."""
    if keys["metric"] != BINARY:
        _check_choices(keys)
    (lower, upper), same = _bounds(keys), float(keys["metric"] == "ratio")
    if upper < same or lower is not None and lower > same:
        bound = "upper" if upper < same else "lower"
        raise ConfigError(
            f"{REJECTION}.{bound}: {as_written(keys[bound])} acts on every token in AReaL, for which both policies are "
            f"the same without use_decoupled_loss: true, and the {keys['metric']} is {same:g}; drop {REJECTION}"
        )


def _rejection(block: Any) -> CorrectionConfig:
    """What `rejection_sampling` means."""
    keys = _filled(block)
    if keys["metric"] == BINARY:
        raise ConfigError(f"{REJECTION}.metric: {KPOP}")
    _check_choices(keys)
    lower, upper = _bounds(keys)
    with spelled(lower=f"{REJECTION}.lower", upper=f"{REJECTION}.upper"):
        if keys["action"] == "clamp":
            return CorrectionConfig(model.WeightConfig(_clamped(keys), "clip", lower or 0.0, upper))
        by_sequence = keys["level"] == "sequence" and keys["metric"] == "ratio"
        over = "token" if keys["level"] == "token" else keys["agg"]
        rule = _rule(keys["metric"], over, lower, upper)
        return CorrectionConfig(model.WeightConfig("geometric" if by_sequence else "token", "none"), (rule,))


def _check_choices(keys: Mapping[str, Any]) -> None:
    for key, choices in CHOICES.items():
        choice(keys[key], f"{REJECTION}.{key}", choices)


def _bounds(keys: Mapping[str, Any]) -> tuple[float | None, float]:
    """Read `lower` and `upper`, and refuse what AReaL refuses."""
    lower = None if keys["lower"] is None else number(keys["lower"], f"{REJECTION}.lower")
    upper = number(keys["upper"], f"{REJECTION}.upper")
    metric = keys["metric"]
    least = {"ratio": 1.0, "kl_k2": 0.0}.get(metric)
    if least is not None and upper <= least:
        raise ConfigError(f"{REJECTION}.upper: got {upper:g}; AReaL needs one above {least:g} with metric: {metric}")
    if lower is not None and lower > upper:
        raise ConfigError(f"{REJECTION}.lower: got {lower:g}, which is above {REJECTION}.upper, {upper:g}")
    if metric == "ratio" and lower is not None and lower <= 0:
        raise ConfigError(f"{REJECTION}.lower: got {lower:g}; AReaL needs a positive one with metric: ratio, or none")
    return lower, upper


def _clamped(keys: Mapping[str, Any]) -> model.Level:
    """The level of a weight that the bounds clamp."""
    if keys["level"] == "token":
        return "token"
    if keys["agg"] != "mean" and keys["lower"]:
        raise ConfigError(
            f"{REJECTION}.agg: {keys['agg']} with action: clamp and a lower bound leaves weights below it in AReaL, "
            "which is not served; use mean, or drop lower"
        )
    return "geometric"


def _rule(metric: str, over: model.Over, lower: float | None, upper: float) -> model.RejectRule:
    """A rule of `rejection_sampling` over tokens, or over a sum, mean or largest value."""
    if metric == "kl_k3":
        raise ConfigError(
            f"{REJECTION}.metric: kl_k3 is 1/r - 1 + log r in AReaL's code, and r - 1 - log r here and in its help; "
            "use kl_k2, or say k3 under `mis:`"
        )
    if metric == "kl_k1":  # log pi_old - log mu in AReaL, and its negative here
        high = None if lower is None else -lower
        return model.RejectRule("k1", "min" if over == "max" else over, -upper, high)
    if metric == "kl_k2" and lower is not None and lower <= 0:
        lower = None  # no k2 lies below 0
    return model.RejectRule(metric.removeprefix("kl_"), over, lower, upper)


def _of_loss(where: Mapping[str, str], config: CorrectionConfig) -> Iterator[str]:
    is_decoupled = _is_decoupled(where, config)
    if not is_decoupled and (idle := [where[key] for key in (M2, REJECTION, CAP, FLOOR) if key in where]):
        yield f"{', '.join(idle)}: without use_decoupled_loss: true nothing comes of it in AReaL, nor here."
    elif M2 in where:
        yield (
            f"{where[M2]}: of each micro-batch in AReaL as here; the hosts cut micro-batches of their own, and divide "
            "by all valid tokens."
        )
    yield f"AReaL {translation.OVER_TOKENS}."
    if not is_decoupled:
        return
    if DECOUPLED not in where:
        yield (
            f"{DECOUPLED} is not in the file: AReaL's main branch has it false by default, and then weighs nothing; "
            "here it is read as true."
        )
    elif CAP not in where and REJECTION not in where:
        yield (
            f"{where[DECOUPLED]}: AReaL 1.0.4 weighs nothing without {REJECTION}; AReaL's segment-wise branch, by "
            f"which a file with {ENABLE} is read, gives each token its whole ratio: weight: {{bound: none}}."
        )
    if config.segment_wise and config.segment_wise.enabled:
        yield (
            f"{where[ENABLE]}: a token that the trainer's own version wrote weighs 1, as in AReaL; "
            "fresh_tokens: proximal corrects the engine's rounding there too."
        )
    if REJECTION in where:
        yield f"{where[REJECTION]}: a log-prob that is not finite weighs 1 in AReaL, and 0 here."


def notes(tree: Mapping[Any, Any], where: Collection[str] = ()) -> Iterator[str]:
    """Notes on keys of AReaL's blocks that bound the rollout or that nothing here reads."""
    actor, rollout = (block if isinstance(block := tree.get(name), Mapping) else {} for name in reading.AREAL_BLOCKS)
    bound, places = rollout.get("max_head_offpolicyness"), rollout.get("max_concurrent_rollouts")
    if bound is not None:
        written = as_written(bound)
        yield (
            f"rollout.max_head_offpolicyness: {written} bounds the rollout, not the loss: --max-head-offpolicyness "
            f"{written} with --async of lab.host; Miles and slime have bounds of their own (docs/async.md)."
        )
    if places is not None:
        yield (
            f"rollout.max_concurrent_rollouts: {as_written(places)} counts prompts in AReaL; "
            "--max-concurrent-rollouts counts responses, so multiply by the samples of a prompt."
        )
    if isinstance(tree.get("teacher"), Mapping):
        yield "teacher: AReaL adds a teacher's loss, by distill_loss_weight beside rl_loss_weight; nothing here does."
    for key, (default, why) in UNSERVED.items():
        if actor.get(key) not in (None, default) and key not in where:
            yield f"actor.{key}: {as_written(actor[key])}: {why}"
    if SAPO not in where:  # which clips nothing
        placed = {f"actor.{key}": value for key, value in actor.items()}
        yield from translation.clip_flags(placed, CLIPS)
        yield from translation.beside(placed, {}, CLIPS)

"""ms-swift's arguments, from its yaml or from a launch script."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError, shown
from mis_plugins.explain.launch.words import Word
from mis_plugins.explain.translate import script, translation
from mis_plugins.explain.translate.script import ASKED, Asked, Dialect, Said, flags, tree_or_script
from mis_plugins.explain.translate.translation import Translation, as_written, choice, is_open, truth

MODE, THRESHOLD = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"
COMMANDS = ("pt", "sft", "infer", "merge-lora", "web-ui", "deploy", "rollout", "sample", "export", "eval", "app")
"""Commands of `swift` and `megatron` that start something else than `rlhf`, the one trainer that corrects."""
TYPE, GRPO = "rlhf_type", "grpo"
READ_AS = f"{TYPE} is read as {GRPO} here; ms-swift's default is dpo, which reads none of this."
USE_VLLM, REAL = "use_vllm", "real"  # a `loss_type` that reads no weights
DELTA, METRICS = "off_policy_sequence_mask_delta", "log_rollout_offpolicy_metrics"
TAUS, LOSS, LEVEL = ("tau_pos", "tau_neg"), "loss_type", "importance_sampling_level"
OWN = {"sapo": TAUS, "cispo": ()}
"""By values of `loss_type` that are surrogates here: the keys that they alone read."""
KEYS = (MODE, THRESHOLD, DELTA, METRICS)
FAMILIES = ("rollout_importance", "off_policy")  # argparse takes shorter flags too
KL_IN_REWARD, SCALE = "kl_in_reward", "scale_rewards"
OF_KL = ("beta", KL_IN_REWARD, "advantage_estimator", SCALE)
CLIPS = ("epsilon", "epsilon_high", "delta")
UNSERVED = {
    "top_entropy_quantile": translation.BY_ENTROPY,
    "overlong_filter": translation.NO_TRUNCATED,
    **dict.fromkeys(
        ("teacher_model", "teacher_model_server"), (None, "changes the advantages of tokens; nothing here does.")
    ),
    "advantage_reweight": (None, "weighs the advantages of tokens by a teacher; nothing here does."),
    "chord_sft_dataset": ([], "adds a supervised loss to the policy's (CHORD); nothing here does."),
    "sdar_loss_coef": (0.0, "of a teacher's loss beside the policy's; nothing here adds one."),
}
"""Keys of the loss that nothing here reads: ms-swift's default, and what another value does."""
OF_CLIP = {"loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"), "importance_sampling_level": ("token",)}
READ = (TYPE, *KEYS, USE_VLLM, *OF_KL, *OF_CLIP, *TAUS, *CLIPS, *UNSERVED)
BESIDE = {
    "loss_type": dict.fromkeys(("grpo", "sapo"), translation.OVER_RESPONSES)
    | dict.fromkeys(("bnpo", "dapo", "cispo"), translation.OVER_TOKENS),
    "importance_sampling_level": {
        "token": "is what the hosts' policy loss does",
        "sequence": "is --advantage-estimator gspo of the hosts",
    },
}
"""The user's objective in the hosts' flags: a correction holds nothing of it."""
SOURCES = {
    "weight.bound": (MODE,),
    "weight.upper": (THRESHOLD,),
    "reject[0]": (MODE, THRESHOLD),
    "opsm.delta": (DELTA,),
    "objective.weigh_kl": ("beta",),
    "objective.surrogate": (LOSS,),
    "objective.ratio": (LEVEL,),
    **{f"objective.{key}": (key,) for key in TAUS},
    "metrics": (METRICS,),
}
MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "zero"),
    "sequence_truncate": ("geometric", "truncate"),
    "sequence_mask": ("token", "none"),
}
"""By mode: level and bound of the weight; `sequence` is the geometric mean, `mask` sets the weight to 0."""


def translate(text: str, behind: Sequence[str] = (), asked: Asked = ASKED, as_documented: bool = False) -> Translation:
    """Translate ms-swift's arguments as its code reads them, or `as_documented` where its document says otherwise.

    KEY=VALUE of `behind` win over the file. It raises ConfigError for no key of ms-swift's, an unknown mode, or a value
    that only the launch decides.
    """
    expected, options = f"KEY=VALUE, KEY one of {', '.join(KEYS)}", "options are --line N and --as-documented"
    won = dict(translation.settings_behind(behind, expected, _is_ours, options=options))
    source = _said(text, set(won), asked)
    keys = {**source.settings, **won}
    if (kind := keys.get(TYPE, GRPO)) != GRPO and not is_open(kind):
        raise ConfigError(f"nothing to translate: {TYPE}: {as_written(kind)}; ms-swift corrects with {GRPO} alone")
    losses = keys.get(LOSS)
    losses = losses.split() if isinstance(losses, str) and re.fullmatch(r"\w+( \w+)*", losses) else losses
    if isinstance(losses, list):
        if len(losses) != 1:
            raise ConfigError(f"{LOSS}: got {shown(losses)}; ms-swift takes one with {TYPE}: {GRPO}, so give one")
        keys[LOSS] = losses[0]
    translation.check_keys("ms-swift", keys, READ, KEYS, FAMILIES, source.tree)
    own = (*OF_CLIP, *OWN[str(keys[LOSS])]) if _has_own_loss(keys) else ()
    read = dict.fromkeys((*KEYS, USE_VLLM, *OF_KL, *OF_CLIP, *own, *CLIPS, *UNSERVED))
    given = {key: keys[key] for key in read if key in keys}
    if given.get(MODE) is None and is_open(given.get(THRESHOLD)):
        del given[THRESHOLD]  # without effect
    masks, weighs = (given.get(key) is not None for key in (DELTA, MODE))
    decide = (*KEYS, USE_VLLM, *own, *(OF_KL if masks else ()), *(() if masks or weighs else (LOSS,)))
    translation.refuse_open({key: value for key, value in given.items() if key in decide}, {})
    if not set(given) & set(KEYS) and not own:
        source.prove_nothing()
        raise ConfigError(f"nothing to translate: none of {', '.join(KEYS)} in it")
    if as_documented and given.get(MODE) != "sequence_mask":
        raise ConfigError(
            f"--as-documented has no effect without {MODE}: sequence_mask, of which alone document and code differ"
        )
    mis = _weighed(given, as_documented) | _masked(given) | _objective(given)
    if not mis:
        source.prove_nothing()
    unsaid = (READ_AS,) if mis and keys.get(TYPE) != GRPO else ()
    mis["metrics"] = "watch" if mis or truth(given.get(METRICS, False), METRICS) else "none"
    return Translation("ms-swift", given, mis, SOURCES, (*source.notes, *unsaid, *_notes(given, as_documented)))


def _weighed(given: Mapping[str, Any], as_documented: bool) -> dict[str, Any]:
    if given.get(MODE) is None or _idle(given):
        return {}
    upper = number(given.get(THRESHOLD, 2.0), THRESHOLD)
    level, bound = MODES[choice(given[MODE], MODE, tuple(MODES))]
    if as_documented:  # the geometric mean of a kept sequence weighs it, and not each ratio
        level, bound = "geometric", "zero"
    if bound == "none":  # a rule over sequences bounds what it leaves whole
        return {"weight": {"level": level, "bound": bound}, "reject": [{"over": "mean", "upper": upper}]}
    lower = {"lower": 0.0} if bound == "zero" else {}
    return {"weight": {"level": level, "bound": bound, **lower, "upper": upper}}


def _masked(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get(DELTA) is None:
        return {}
    reference = "proximal" if USE_VLLM in _idle(given) else "behavior"
    return {"opsm": {"delta": number(given[DELTA], DELTA), "advantage": "sequence", "reference": reference}}


def _idle(given: Mapping[str, Any]) -> str:
    """The key that leaves the weights without effect, with its value; empty where they act."""
    if not truth(given.get(USE_VLLM, True), USE_VLLM):
        return f"{USE_VLLM}: {as_written(given[USE_VLLM])}"
    return f"{LOSS}: {REAL}" if given.get(LOSS) == REAL else ""


def _has_own_loss(given: Mapping[str, Any]) -> bool:
    return isinstance(given.get(LOSS), str) and given[LOSS] in OWN


def _objective(given: Mapping[str, Any]) -> dict[str, Any]:
    """SAPO, CISPO, or PPO's clip where a mask hits the KL term, which no flag of the hosts says."""
    weighs_kl = {"weigh_kl": True} if given.get(DELTA) is not None and _weighs_kl(given) else {}
    if not _has_own_loss(given):
        return {"objective": {"old": "proximal", "surrogate": "clip"} | weighs_kl} if weighs_kl else {}
    level = choice(given.get(LEVEL, "token"), LEVEL, ("token", "sequence"))
    own = {key: number(given[key], key) for key in OWN[given[LOSS]] if key in given}
    return {"objective": {"old": "proximal", "surrogate": given[LOSS], "ratio": level} | own | weighs_kl}


BY_DOCUMENT = "sequence_mask: as the document says; the code multiplies raw token ratios by the mask."
BY_CODE = (
    "sequence_mask: the code multiplies raw token ratios by the mask; --as-documented gives the document's formula, "
    "the preset ms-swift-sequence-mask-as-documented."
)


def _notes(given: Mapping[str, Any], as_documented: bool) -> Iterator[str]:
    mode = given.get(MODE)
    has_own = _has_own_loss(given)
    if mode is not None and (idle := _idle(given)):
        yield f"{MODE}: {as_written(mode)} does nothing in ms-swift with {idle}."
        mode = None
    elif mode is not None and USE_VLLM not in given:
        yield (
            f"{USE_VLLM} is not in it: `swift rlhf` weighs nothing then, by its default; here it is read as true, the "
            "default of `megatron rlhf`."
        )
    if mode is None and given.get(DELTA) is None and not has_own:
        yield "ms-swift corrects nothing with these arguments."
    if mode == "sequence_mask":
        yield BY_DOCUMENT if as_documented else BY_CODE
    masks = given.get(DELTA) is not None
    if (mode is not None or masks) and _has_kl(given) and not (masks and _weighs_kl(given)):
        yield (
            "ms-swift multiplies its KL term (beta) by the weight too, and a mask drops it; here the hosts weigh the "
            "policy loss alone. The loss hook weighs KL too with objective: {weigh_kl: true} and --use-kl-loss."
        )
    if (mode is not None or masks or has_own) and not is_open(beta := given.get("beta")):
        coefficient, of_default = (0.04, " is 0.04 by default") if beta is None else (number(beta, "beta"), "")
        if _has_kl(given):
            yield f"beta{of_default}: pass --use-kl-loss --kl-loss-coef {coefficient:g} --kl-loss-type low_var_kl."
        elif coefficient:
            yield f"beta{of_default}: ms-swift takes KL off the reward; nothing here does."
    if masks:
        yield f"{DELTA}: without rollout log-probs ms-swift and the hook compare with the trainer before the update."
    if masks and given.get(LOSS) == "bnpo":
        yield f"{LOSS}: bnpo: ms-swift divides by the tokens that its mask leaves, and the hosts by all valid ones."
    if mode is not None or masks:
        if given.get(LOSS) in (None, *OF_CLIP[LOSS]):
            yield from translation.clip_flags(given, CLIPS)
        yield from translation.beside(given, UNSERVED, (*OF_KL, *OF_CLIP, *CLIPS))
    if given.get(LOSS) == "cispo":
        yield from translation.clip_flags(given, CLIPS, of_ratio=True)
    yield from _of_loss(given, has_own, masks and _weighs_kl(given) and not has_own)


def _of_loss(given: Mapping[str, Any], has_own: bool, replaces_loss: bool) -> Iterator[str]:
    """What each key of the policy loss means here, and which of them the objective that is written replaces."""
    for key, words in BESIDE.items():
        if given.get(key) is not None and not is_open(given[key]) and not (has_own and key == LEVEL):
            means = words.get(str(given[key]), "has no flag in the hosts; their loss stays")
            yield f"{key}: {as_written(given[key])} {means}."
    for key, clips in OF_CLIP.items():
        own = given.get(key, clips[0])
        if replaces_loss and own not in clips and not is_open(own):
            yield (
                f"{key}: {as_written(given[key])} is another policy loss than the objective written, PPO's clip of "
                "token ratios."
            )


def _weighs_kl(given: Mapping[str, Any]) -> bool:
    return given.get("beta") is not None and _has_kl(given)


def _has_kl(given: Mapping[str, Any]) -> bool:
    """Whether the loss has a KL term: not with `beta: 0` (default 0.04), else by `kl_in_reward` or GRPO."""
    given = {key: value for key, value in given.items() if not is_open(value)}
    if given.get("beta") is not None and number(given["beta"], "beta") == 0:
        return False
    if given.get(SCALE) == "gdpo":  # ms-swift switches kl_in_reward off
        return True
    if given.get(KL_IN_REWARD) is None:
        return given.get("advantage_estimator", "grpo") == "grpo"
    return not truth(given[KL_IN_REWARD], KL_IN_REWARD)


def _said(text: str, behind: set[str], asked: Asked) -> Said:
    """The flags of a launch script, or a yaml mapping whose keys may begin with dashes; `--a-key` is `--a_key`."""
    source = tree_or_script(text, DIALECT, behind, asked)
    of_yaml = {translation.flag_of(key): value for key, value in source.tree.items()}
    for key in source.settings.keys() & of_yaml.keys() - behind if "--config" in text else ():
        if _is_ours(key) and str(source.settings[key]) != str(of_yaml[key]):
            raise ConfigError(
                f"{key}: {as_written(source.settings[key])} contradicts {as_written(of_yaml[key])} in the yaml that "
                f"the script names; releases with --config take the second: put {key}=VALUE behind the file"
            )
    strays = [place for place in translation.places(source.tree, KEYS) if place not in source.tree]
    return replace(source, settings={**of_yaml, **source.settings}).beside(strays)


def _is_ours(key: str) -> bool:
    return key.startswith(FAMILIES) or bool(translation.whole(key, READ))


def _starts(word: str) -> bool:
    return word == "rlhf" or word.endswith("rlhf.py")


def _file(words: Sequence[Word]) -> Word | None:
    """The yaml or json behind `rlhf`, or behind --config of earlier releases."""
    behind = next((after for word, after in itertools.pairwise(words) if _starts(word.text)), None)
    is_named = behind and behind.text.endswith((".yaml", ".yml", ".json"))
    return behind if is_named else script.setting_of(words, "--config")


OTHER = partial(script.other_of, programs=("swift", "megatron"), commands=COMMANDS)
DIALECT = Dialect("ms-swift", KEYS, flags, _is_ours, _starts, _file, corrects="rlhf", other=OTHER)

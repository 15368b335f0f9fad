"""TRL's GRPOConfig, as release 1.16 reads it: a yaml, a command line, or the call in a Python script.

With `use_vllm: true` TRL corrects unless it is told otherwise: the product of the ratios of a sequence, 0 above 3.
GMPOConfig, which has a Python call alone, inherits every key; GMPOTrainer's loss reads no weight and no mask.
"""

import ast
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mis_plugins.config.reading import number
from mis_plugins.errors import ConfigError, cut
from mis_plugins.explain.launch.words import Word
from mis_plugins.explain.translate import translation
from mis_plugins.explain.translate.script import ASKED, Asked, Dialect, Said, Value, flags, other_of, tree_or_script
from mis_plugins.explain.translate.translation import Translation, as_written, beside, choice, listed, truth

FAMILY = "vllm_importance_sampling_"
USE_VLLM, CORRECTION, MODE = "use_vllm", f"{FAMILY}correction", f"{FAMILY}mode"
CLIP_MAX, CLIP_MIN, CAP = f"{FAMILY}clip_max", f"{FAMILY}clip_min", f"{FAMILY}cap"
DELTA, UNBIASED = "off_policy_mask_threshold", "use_bias_correction_kl"
KEYS = (USE_VLLM, CORRECTION, MODE, CLIP_MAX, CLIP_MIN, CAP, DELTA)
FAMILIES = ("vllm_importance", "no_vllm_importance", "off_policy")  # argparse takes shorter flags too
OF_LOSS = ("beta", UNBIASED, "loss_type", "importance_sampling_level")
CLIPS = ("epsilon", "epsilon_high", "delta")
DEFAULTS: dict[str, Any] = {CORRECTION: True, MODE: "sequence_mask", CLIP_MAX: 3.0}
OFF = tuple(f"no_{key}" for key in (CORRECTION, UNBIASED))  # flags of TRL's parser, for switches that are on
OTHERS = ("rloo", "dpo", "sdpo", "gold", "sdft", "iw_opd", "distillation", "sft", "kto")  # trainers beside GRPO's
OTHER_FILE = re.compile(rf"(?<![a-z])({'|'.join(OTHERS)})(?![a-z]|.*grpo)[^/]*\.py$")
COMMANDS = (*OTHERS, "reward", "vllm-serve", "serve")  # beside `trl grpo`, and of `vllm`
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
OWN = {
    "cispo": {},
    "sapo": {f"tau_{sign}": f"sapo_temperature_{sign}" for sign in ("pos", "neg")},
    "vespo": {name: f"vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
"""Values of `loss_type` that are surrogates here: by our setting, TRL's key."""
OWN_KEYS = tuple(key for keys in OWN.values() for key in keys.values())
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", *OWN)
LEVELS = ("token", "sequence")
CONFIG, GMPO = "GRPOConfig", "GMPOConfig"  # the second is a `loss_type` here, as TRL's own does nothing there
NO_BOUND = 1e9  # above every ratio of the hooks, which is at most e^20
AVERAGES = {
    **dict.fromkeys(("grpo", "sapo", GMPO), translation.OVER_RESPONSES),
    **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), translation.OVER_TOKENS),
    "dr_grpo": "divides by max_completion_length, which no flag of the hosts does; their average stays",
    "luspo": "multiplies each sequence by its length, which no flag of the hosts does; their average stays",
}
UNSERVED = {
    "top_entropy_quantile": translation.BY_ENTROPY,
    "mask_truncated_completions": translation.NO_TRUNCATED,
    "entropy_coef": (0.0, "of an entropy bonus is --entropy-coef of the hosts."),
    "use_adaptive_entropy": (False, "moves entropy_coef by the entropy of each step; nothing here does."),
}
"""Keys of the loss that nothing here reads: TRL's default, and what another value does."""
READ = (*KEYS, *OF_LOSS, *OWN_KEYS, *CLIPS, *UNSERVED)
FLAGS = (*READ, *OFF)
SETS = ("replace", "update", "dict")  # functions whose keywords may set keys of a config that exists
SOURCES = {
    "weight.level": (MODE,),
    "weight.bound": (CORRECTION, MODE),
    "weight.lower": (CLIP_MIN,),
    "weight.upper": (CLIP_MAX, CAP),
    "opsm.delta": (DELTA,),
    "opsm.reference": (USE_VLLM,),
    "objective.surrogate": ("loss_type",),
    "objective.ratio": ("importance_sampling_level",),
    "objective.unbiased_kl": ("beta", UNBIASED),
    **{f"objective.{ours}": (key,) for keys in OWN.values() for ours, key in keys.items()},
}


def translate(text: str, behind: Sequence[str] = (), asked: Asked = ASKED) -> Translation:
    """Translate TRL's arguments as its code reads them; KEY=VALUE of `behind` win over the file.

    It raises ConfigError for no key of TRL's, a value that TRL refuses or the launch decides, or a loss unlike ours.
    """
    expected = f"KEY=VALUE, KEY one of {', '.join(READ)}"
    won = dict(translation.settings_behind(map(_switched_off, behind), expected, _is_read))
    source = _said(text, set(won), asked)
    keys = {**source.settings, **won}
    translation.check_keys("TRL", keys, FLAGS, KEYS, FAMILIES, source.tree)  # a yaml may hold any key
    nothing = ("none", "null")  # to TRL's parser
    given = {key: None if str(keys[key]).lower() in nothing else keys[key] for key in READ if key in keys}
    if not given.keys() & set(KEYS) and given.get("loss_type") not in (*OWN, GMPO):
        source.prove_nothing()
        raise ConfigError(
            f"nothing to translate: none of {', '.join(KEYS)} in it; TRL corrects by default with {USE_VLLM}: true, so "
            f"put {USE_VLLM}=true behind the file if the script sets it"
        )
    translation.refuse_open({key: given[key] for key in given if key in (*KEYS, *OF_LOSS, *OWN_KEYS)}, {})
    weight = _weight(given)
    mis = ({"weight": weight} if weight else {}) | _masked(given)
    if not mis:
        source.prove_nothing()
    mis |= _objective(given, weight)
    sources = {path: keys for path, keys in SOURCES.items() if path.partition(".")[0] in mis}
    notes = (*source.notes, *_of_correction(given, weight), *_of_loss(given, mis))
    name = GMPO if _is_gmpo(given) else CONFIG
    return Translation(f"TRL's {name}", given, mis | {"metrics": "watch"}, sources, notes)


# What the settings mean.


def _has_engine(given: Mapping[str, Any]) -> bool:
    """Whether vLLM samples; a part of a file that says how to correct is read as if it did."""
    return truth(given.get(USE_VLLM, any(key.startswith(FAMILY) for key in given)), USE_VLLM)


def _is_gmpo(given: Mapping[str, Any]) -> bool:
    return given.get("loss_type") == GMPO


def _weight(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The importance weight: of a token, or the product over a sequence; `mask` sets it to 0 outside the bounds."""
    if _is_gmpo(given) or not _has_engine(given) or not truth(given.get(CORRECTION, True), CORRECTION):
        return None
    mode = choice(given.get(MODE, DEFAULTS[MODE]), MODE, MODES)
    lower, upper = _bound(given, CLIP_MIN), _bound(given, CLIP_MAX)
    if given.get(CAP) is not None:  # as in TRL, the retired key wins
        upper = _bound(given, CAP)
    level, _, action = mode.partition("_")
    if lower is None and upper is None:
        if action == "truncate":
            raise ConfigError(f"{CLIP_MAX}: null without {CLIP_MIN}: TRL refuses {MODE}: {mode} without a bound")
        return {"level": level, "bound": "none"}
    most = {"upper": NO_BOUND if upper is None else upper}
    if action == "mask":
        return {"level": level, "bound": "zero", "lower": lower or 0.0, **most}
    bound = {"bound": "truncate"} if lower is None else {"bound": "clip", "lower": lower}
    return {"level": level, **bound, **most}


def _bound(given: Mapping[str, Any], key: str) -> float | None:
    value = given.get(key, DEFAULTS.get(key))
    return None if value is None else number(value, key)


def _masked(given: Mapping[str, Any]) -> dict[str, Any]:
    """OPSM, against the engine, or without one against the trainer before the update."""
    if given.get(DELTA) is None or _is_gmpo(given):
        return {}
    reference = "behavior" if _has_engine(given) else "proximal"
    return {"opsm": {"delta": number(given[DELTA], DELTA), "advantage": "sequence", "reference": reference}}


def _objective(given: Mapping[str, Any], weight: Mapping[str, Any] | None) -> dict[str, Any]:
    """CISPO, SAPO, VESPO or GMPO, for which not every host has a flag; other losses are flags, told in notes."""
    if _is_gmpo(given):
        return {"objective": {"surrogate": "gmpo", "old": "proximal"}}
    loss = choice(given.get("loss_type", "dapo"), "loss_type", LOSSES)
    if loss not in OWN:
        return {}
    if loss == "vespo" and weight:
        raise ConfigError(
            "loss_type: vespo: TRL multiplies the bounded ratios into VESPO's weight of a sequence, and here a weight "
            f"multiplies the loss; put {CORRECTION}=false behind the file for VESPO alone, or take the preset vespo, "
            "which compares pi_theta with the engine itself"
        )
    ratio = {"ratio": _level(given, ("token",) if loss == "vespo" else LEVELS)}
    own = {name: number(given[key], key) for name, key in OWN[loss].items() if key in given}
    return {"objective": {"surrogate": loss, "old": "proximal", "unbiased_kl": _unbiased(given)} | ratio | own}


def _unbiased(given: Mapping[str, Any]) -> bool:
    return not _is_gmpo(given) and _coefficient(given) != 0 and truth(given.get(UNBIASED, True), UNBIASED)


def _coefficient(given: Mapping[str, Any]) -> float:
    """TRL's coefficient of the KL term, 0 by default."""
    return number(given.get("beta") or 0.0, "beta")


def _level(given: Mapping[str, Any], levels: tuple[str, ...] = LEVELS) -> str:
    return choice(given.get("importance_sampling_level", "token"), "importance_sampling_level", levels)


# What the file does not hold.


def _of_correction(given: Mapping[str, Any], weight: Mapping[str, Any] | None) -> Iterator[str]:
    if _is_gmpo(given):
        idle = [key for key in given if key in (*KEYS[1:], "importance_sampling_level", UNBIASED)]
        what = ", ".join(idle) or "vLLM's correction"
        yield f"{GMPO}: nothing comes of {what} in TRL, whose GMPO neither weighs nor masks."
        return
    if USE_VLLM not in given:
        then = "here it is read as true" if weight else "so does this file, OPSM aside"
        yield f"{USE_VLLM} is not in it: TRL has it false by default, and then corrects nothing; {then}."
    if weight is None:
        key = CORRECTION if _has_engine(given) else USE_VLLM
        if key in given:
            yield f"{key}: {as_written(given[key])} corrects nothing in TRL."
        return
    stated = {*given, CLIP_MAX} if CAP in given else {*given}
    if unsaid := [f"{key}: {str(value).lower()}" for key, value in DEFAULTS.items() if key not in stated]:
        yield f"TRL 1.16 corrects by default: {', '.join(unsaid)}, where the file says nothing."
    if weight.get("upper") == NO_BOUND:
        yield f"{CLIP_MAX}: null: {NO_BOUND:g} stands for no upper bound, since no ratio of the hooks is above e^20."
    yield "A log-prob that is not a number weighs 1 in TRL, and 0 here."


def _of_loss(given: Mapping[str, Any], mis: Mapping[str, Any]) -> Iterator[str]:
    loss, level = given.get("loss_type"), _level(given)
    by_default = "" if loss else ", TRL's default,"
    loss_name = GMPO if _is_gmpo(given) else f"loss_type: {loss or 'dapo'}{by_default}"
    yield f"{loss_name} {AVERAGES[loss or 'dapo']}."
    if level == "sequence" and "objective" not in mis:
        yield f"importance_sampling_level: {level} is --advantage-estimator gspo of the hosts."
    if coefficient := _coefficient(given):
        unbiased = f" --use-unbiased-kl ({UNBIASED}: true by default)" if _unbiased(given) else ""
        yield f"beta: pass --use-kl-loss --kl-loss-coef {coefficient:g} --kl-loss-type low_var_kl{unbiased}."
        if unbiased and level == "sequence":
            yield f"{UNBIASED}: TRL multiplies the KL term by the ratio of the sequence, and the hosts by each token's."
    if strays := [key for key in OWN_KEYS if key in given and key not in OWN.get(loss or "", {}).values()]:
        yield f"{listed(strays)}: without effect in TRL, and here, with another loss_type."
    if loss not in ("sapo", "vespo"):  # which clip nothing
        by_default = {"epsilon": 0.4} if _is_gmpo(given) else {}
        yield from translation.clip_flags(by_default | dict(given), CLIPS, of_ratio=loss == "cispo")
    yield from beside(given, UNSERVED, CLIPS)


# Reading the user's settings.


def _said(text: str, behind: set[str], asked: Asked) -> Said:
    """The flags of a launch script, a yaml, or the keywords of `GRPOConfig(...)` in a Python script."""
    called = any(f"{name}(" in text for name in (CONFIG, GMPO))
    if asked.path.suffix == ".py" or called and asked.path.suffix not in (".sh", ".yaml", ".yml"):
        return _of_call(text, behind)
    source = tree_or_script(text, DIALECT, behind, asked)
    strays = [place for place in translation.places(source.tree, KEYS) if place not in source.tree]
    return replace(source, settings={**source.tree, **source.settings}).beside(strays)


def _of_call(text: str, behind: set[str]) -> Said:
    """The keywords of the one call `GRPOConfig(...)` or `GMPOConfig(...)` in Python source, which is never run.

    Its first argument may stand without a keyword: `output_dir`. No key of the correction may stand elsewhere.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of the user's own script
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"no Python that can be read: {cut(str(error))}") from None
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in (CONFIG, GMPO)]
    if len(calls) != 1:
        raise ConfigError(
            f"{len(calls)} calls of {CONFIG}(...), of which one is read; give the command or the yaml that starts the "
            "script, or write its keys as a yaml"
        )
    (call,) = calls
    config = _name(call.func)
    elsewhere = [f"{key} (line {line})" for line, key in _keys_in(nodes, call) if key not in behind]
    source = partial(ast.get_source_segment, text)
    more = [f"**{source(word.value)}" for word in call.keywords if word.arg is None]
    first = [argument for argument in call.args[:1] if isinstance(argument, ast.Starred)]
    unread = [*([] if behind else more), *map(source, [*first, *call.args[1:]])]
    if elsewhere or unread:
        raise ConfigError(
            f"only running the script would tell {listed([*unread, *elsewhere])}, beside the keywords of "
            f"{config}(...); put the values that count behind the file"
        )
    keys = {word.arg: _literal(word.value, str(source(word.value))) for word in call.keywords if word.arg}
    notes = (f"not read: {listed(more)}; keys in it that count go behind the file, all of them.",) if more else ()
    return Said(keys | ({"loss_type": GMPO} if config == GMPO else {}), notes=notes)


def _keys_in(nodes: Sequence[ast.AST], call: ast.Call) -> Iterator[tuple[int, str]]:
    """Where Python source names a key outside of the call's own keywords: by line, the key.

    Calls other than those of `SETS` have keywords like `beta` of their own.
    """
    for node in nodes:
        match node:
            case ast.Call(keywords=words) if node is not call:
                keys = READ if _name(node.func) in SETS else KEYS
                yield from ((word.lineno, word.arg) for word in words if word.arg and word.arg in keys)
            case ast.Attribute(attr=key, ctx=ast.Store()) if key in READ:
                yield node.lineno, key
            case ast.Constant(value=str(key)) if key in READ:
                yield node.lineno, key


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _literal(node: ast.expr, source: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return translation.Open(source)


def _switched_off(setting: str) -> str:
    """`--no_KEY`, which stands behind a file as no_KEY=true, as the setting KEY=false."""
    name, _, value = setting.partition("=")
    key = translation.flag_of(name)
    return f"{key[3:]}=false" if key in OFF and value == "true" else setting


def _is_read(key: str) -> bool:
    """Whether a flag is one of `READ`, in full or shortened as argparse takes it, or may be another of its families."""
    return key.startswith(FAMILIES) or key not in OFF and bool(translation.whole(key, FLAGS))


def _flags(words: Sequence[Word]) -> Iterator[tuple[str, Value]]:
    """The settings of a command line of TRL's, with `--no_KEY` as the value false."""
    for key, value in flags(words):
        yield (key[3:], Word("false", f"--{key}")) if key in OFF else (key, value)


def _other(words: Sequence[Word]) -> tuple[Word, ...]:
    """The trainer of TRL's that starts in place of GRPO's: a command of `trl`, or a file that `OTHERS` name."""
    modules = [after for before, after in itertools.pairwise(words) if before.text == "-m"]
    files = [word for word in words if word.text.endswith(".py")]
    is_grpos = any(key in KEYS and key != USE_VLLM for key, _ in _flags(words))
    others = [word for word in (*modules[:1], *files[:1]) if OTHER_FILE.search(word.text.removesuffix(".py") + ".py")]
    return other_of(words, ("trl", "vllm"), COMMANDS) or (() if is_grpos else tuple(others[:1]))


def _starts(word: str) -> bool:
    is_grpos = word.endswith((".py", ".yaml", ".yml")) and "grpo" in word
    return is_grpos or word == "grpo" or word.partition("=")[0] == "--config"


DIALECT = Dialect("TRL", (*KEYS, *OFF), _flags, _is_read, _starts, corrects="grpo", other=_other)

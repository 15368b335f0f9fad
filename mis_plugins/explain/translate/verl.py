"""verl's rollout correction, as releases 0.7.1 to 0.9.1 read it.

`rollout_rs` names statistics (`seq_mean_k1`). Their thresholds bound k1 = -log r, so that "lo_hi" means a ratio in
[1/hi, 1/lo]. DPPO, SAPO and GMPO are losses of the actor, `policy_loss.loss_mode`; the actor's clip ratios are the
largest divergences of DPPO, and the clip of GMPO.
Settings are read by their full path, whether a yaml, a launch script or a Hydra override says them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mis_plugins.config.reading import convert, number, suggest
from mis_plugins.errors import ConfigError, cut, shown
from mis_plugins.explain.launch.words import Word
from mis_plugins.explain.translate import script, translation, verl_presets
from mis_plugins.explain.translate.script import ASKED, Asked, Dialect, Said, Value, tree_or_script
from mis_plugins.explain.translate.translation import Translation, Unquoted, as_written, beside, choice, is_open

SECTION, ACTOR = "algorithm.rollout_correction", "actor_rollout_ref.actor"
KEYS = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold",
        "bypass_mode", "loss_type")  # fmt: skip
LOSS_MODE = "loss_mode"
WIDTHS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
TAUS = ("tau_pos", "tau_neg")
KNOWN = (*KEYS, LOSS_MODE, *WIDTHS, *TAUS)
IN_LOSS = f"{ACTOR}.policy_loss.rollout_correction"
MODE_PATH, AGGREGATED = f"{ACTOR}.policy_loss.{LOSS_MODE}", f"{ACTOR}.loss_agg_mode"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
USE_V1, LEGACY = "trainer.use_v1", "trainer.use_legacy_worker_impl"  # the second of verl before 0.9.0
KL = tuple(f"{ACTOR}.{key}" for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
KL_TYPES = {"kl": "k1", "mse": "k2", "k3": "low_var_kl"} | {name: name for name in ("k1", "k2", "low_var_kl")}
UNSERVED = {
    f"{ACTOR}.entropy_coeff": (0.0, "of an entropy bonus is --entropy-coef of the hosts."),
    "algorithm.use_kl_in_reward": (False, "is --kl-coef of the hosts, with verl's algorithm.kl_ctrl.kl_coef."),
}
"""Settings beside the correction that are flags of the hosts: verl's default, and what another value is."""
ESTIMATOR, TOKEN_BASELINES = ("algorithm.adv_estimator", ("optimal_token_baseline", "tir_optimal_token_baseline"))
PATHS = {f"{SECTION}.{key}": key for key in KEYS}
PATHS |= {MODE_PATH: LOSS_MODE} | {f"{ACTOR}.{key}": key for key in (*WIDTHS, *TAUS)}
OF_NAME, OF_FOLDER = ("--config-name", "-cn"), ("--config-path", "-cp", "--config-dir", "-cd")
OF_FILE = (*OF_NAME, *OF_FOLDER)  # flags of Hydra's that name a yaml
OWN = ("ppo_trainer", "ppo_megatron_trainer")  # verl's own, which correct nothing
ASYNC, BYPASS = "verl.experimental", f"{SECTION}.bypass_mode"  # the first stands for a start of an async trainer
MAINS = {"fully_async_main": "fully_async", "one_step_off_policy": "one_step_off"}
"""By what an async trainer's module holds: how the names of its own yamls begin, which set `bypass_mode: true`."""
OWN_ASYNC = tuple(f"{name}_{own}" for name in MAINS.values() for own in OWN)
OWN_PARTS = (*OWN, *OWN_ASYNC, "rollout_correction", "rollout", "distillation", "legacy_reward_impl", "dp", "megatron",
             "veomni", "torchtitan", "${model_engine}_actor", "dp_actor", "megatron_actor", "veomni_actor",
             "torchtitan_actor")  # fmt: skip
TEACHER = "distillation"  # whose loss has a `loss_mode` of its own
DISTILLS, OF_TEACHER = f"{TEACHER}.enabled", f"{TEACHER}.distillation_loss"
BESIDE_IT = (AGGREGATED, LOG_PROBS, USE_V1, LEGACY, ASYNC, DISTILLS, f"{OF_TEACHER}.{LOSS_MODE}",
             f"{OF_TEACHER}.use_policy_gradient", *KL, *UNSERVED)  # fmt: skip
"""Settings outside of the correction that a note is about."""
SHORT = {key: path for path, key in PATHS.items()} | {"rollout_correction": SECTION, "actor": ACTOR}
PARENTS = {"algorithm", SECTION, "actor_rollout_ref", ACTOR, f"{ACTOR}.policy_loss", IN_LOSS,
           "actor_rollout_ref.rollout", "trainer", TEACHER, OF_TEACHER}  # fmt: skip
WHOLE = {"algorithm", "rollout_correction", "actor_rollout_ref", "actor", "trainer", "data"}  # a whole file's parts
IDLE = {"rollout_is_threshold": "rollout_is", "rollout_is_batch_normalize": "rollout_is",
        "rollout_rs_threshold": "rollout_rs", "loss_type": "bypass_mode"}  # fmt: skip
"""By key: the key without which it has no effect."""
AGGREGATION = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
OPTIONS = tuple(f"{unit}_{k}" for unit in AGGREGATION for k in ("k1", "k2", "k3") if (unit, k) != ("seq_max", "k1"))
SURROGATE = {"ppo_clip": "clip", "reinforce": "reinforce"}
BY_DIVERGENCE, BY_RESPONSE = ("dppo_tv", "dppo_kl"), ("sapo", "geo_mean")
LOSS_MODES = {mode: (mode, WIDTHS) for mode in BY_DIVERGENCE} | {"sapo": ("sapo", TAUS), "geo_mean": ("gmpo", WIDTHS)}
"""By verl's name of a loss: our surrogate, and the keys of the actor that the loss reads."""
OTHER_LOSSES = ("vanilla", "bypass_mode")  # losses that an override behind the file may name in place of these
SOURCES = {
    "weight.level": ("rollout_is",),
    **{f"weight.{name}": ("rollout_is_threshold",) for name in ("bound", "lower", "upper")},
    "weight.normalize": ("rollout_is_batch_normalize",),
    **{f"reject[{i}]": ("rollout_rs_threshold",) for i in range(len(OPTIONS))},
    "objective.old": ("bypass_mode",),
    **{f"objective.{key}": (key,) for key in TAUS},
}
CLIP_RATIO, CLIP_RATIO_C = 0.2, 3.0  # of an actor in verl 0.9.1 that sets none: all three widths, and the cap
RETIRED = ("rollout_rs_threshold_lower", "rollout_token_veto_threshold", "rollout_is_veto_threshold",
           "use_policy_gradient", "rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower",
           "tis_imp_ratio_cap")  # fmt: skip
"""Keys of releases before 0.7.1."""
INSTEAD = (
    "of verl before 0.7.1; its weights are rollout_is: token or sequence with rollout_is_threshold: upper or "
    "lower_upper, its rules rollout_rs: token_k1, seq_sum_k1 or seq_mean_k1, its loss without a clip loss_type: "
    "reinforce; a veto is the rule {over: min, lower: THRESHOLD} under `mis:` in the file made here"
)
TOKENS_LEFT = (
    "denominator: verl divides by the tokens that are left; so does each sequence here. The hosts refuse it with "
    "--calculate-per-token-loss."
)
SEQUENCES_LEFT = (
    "verl leaves the tokens of rejected sequences out of the number that it divides by; the hosts count them, so that "
    "a step that rejects much is smaller here."
)
ALL_VALID = (
    "verl divides by the tokens that were valid before its rules, in bypass and with trainer.use_v1: true, its default "
    "since 0.9.0; so do the hosts with --calculate-per-token-loss."
)
V1_TRAINER = (
    "verl's trainer since 0.9.0 (trainer.use_v1: true) takes mu for pi_old in bypass and applies no more of this: "
    "neither weights, nor rules, nor loss_type. Here they act as its documents and use_v1: false have them."
)
ASYNC_TRAINER = (
    "verl.experimental: its own yamls set bypass_mode: true, and its trainers apply rules, weights and loss_type as "
    "trainer.use_v1: false does."
)
REPLACED = "policy_loss.loss_mode: {mode} never acts in verl with bypass_mode: true and trainer.use_v1: false."
MU_BY_BYPASS = (
    "policy_loss.loss_mode: without algorithm.rollout_correction.bypass_mode: true verl compares with pi_old, as this "
    "file does. The paper compares with mu: objective.old: behavior."
)
MODE_IN_BYPASS = (
    "bypass_mode: verl's trainer since 0.9.0 (trainer.use_v1: true) hands {mode} mu for pi_old, and neither weights "
    "nor rules, as here. The trainer before, and those of verl.experimental, replace this loss by that of bypass_mode."
)
WEIGHTS_OF_ITS_OWN = (
    "rollout_is: with policy_loss.loss_mode: bypass_mode, and bypass_mode not true, verl's loss is PPO's clip against "
    "pi_old and applies none of these weights."
)
NOT_KNOWN = (
    "denominator: without a value of {open} it is not known whether verl divides by all valid tokens, as this file "
    "does, or by those that its rules leave."
)
OVER_SEQUENCES = f"loss_agg_mode: not read by verl's {{mode}}, which {translation.OVER_RESPONSES}."
GEOMETRIC_RULES = (
    "rollout_rs: verl's geo_mean takes the mean log ratio of the tokens that a rule over tokens leaves, and here that "
    "of all valid tokens."
)
GEOMETRIC_WEIGHTS = (
    "rollout_is: verl's geo_mean multiplies the loss of a sequence by the geometric mean of its weights, and here "
    "w_t multiplies A_t before the mean over the sequence."
)
NO_BASELINE = (
    f"{ESTIMATOR}: {{estimator}} is not translated: the baseline of a token reads the sum of squared probabilities, "
    "and no hook of Miles or slime sees logits before the advantages. verl's rollout_is weights enter the baseline too."
)
NO_LOG_PROBS = (
    "actor_rollout_ref.rollout.calculate_log_probs: false leaves verl without rollout log-probs, and nothing is "
    "corrected; here the rollout engine must return them."
)
LOG_PROBS_UNSAID = f"{LOG_PROBS} is not in it: verl before 0.9.0 has it false by default, and then corrects nothing."
BESIDE = {
    "gspo": "; mis.objective.ratio: sequence gives GSPO's ratio, and verl 0.8 averages each response with it, whatever "
    "loss_agg_mode says",
    "cispo": "; mis.objective.surrogate: cispo gives CISPO's loss",
}
"""What to set for a loss of the actor that the translation leaves out."""
REDUCTIONS = {
    "token-mean": f"{translation.OVER_TOKENS}; the flag refuses denominator: kept.",
    "seq-mean-token-mean": f"{translation.OVER_RESPONSES}.",
}
NO_REDUCTION = "is no host's way: hosts average each response and then all, or over all tokens."
BY_DEFAULT = f"loss_agg_mode: token-mean, verl's default, {REDUCTIONS['token-mean']}"


@dataclass
class Draft:
    """A translation while it is made.

    settings: the user's settings by their full path.
    given: those of the correction, by verl's own key.
    """

    settings: Mapping[str, Any]
    given: Mapping[str, Any]
    mis: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)

    def is_on(self, key: str) -> bool:
        """Whether a switch is on; unset or null is off. Text, be it `${...}` or "false", is a ConfigError."""
        return bool(convert(bool | None, self.given.get(key), key))

    def drop(self, part: str, why: str) -> None:
        """Set `weight` or `reject` back to null, and note why."""
        self.mis[part] = None
        self.notes.append(why)


def translate(text: str, behind: Sequence[str] = (), asked: Asked = ASKED) -> Translation:
    """Translate a yaml of verl's, a part of it, a launch script or a preset's name; Hydra overrides behind it win.

    It raises ConfigError, with verl's key, for no such section, an unknown key, or a value that verl refuses.
    """
    # Hydra's `+` adds a key.
    overrides = translation.settings_behind(
        behind, f"{SECTION}.KEY=VALUE", _is_read, lambda key: _full(key.lstrip("+")), _value
    )
    won = _of_overrides([*overrides])
    source = _said(text, set(won), asked)
    settings = {**source.settings, **won}
    given = _given(settings, won)
    if not given:
        source.prove_nothing()
        beside = f", and {LOSS_MODE}: {as_written(mode)}" if (mode := settings.get(MODE_PATH)) is not None else ""
        raise ConfigError(f"nothing to translate: no {SECTION}, and no key of it{beside}")
    made = _translated(Draft(settings, given, notes=[*source.notes, *_left_out(settings)]), text)
    if not made.config().corrects and not made.config().needs_loss_hook:
        source.prove_nothing()
    return made


def _translated(draft: Draft, text: str) -> Translation:
    given = draft.given
    if verl_presets.is_call(text):
        draft.notes.append(verl_presets.NOTE)
    _weigh(draft)
    _reject(draft)
    if LOSS_MODE in given:
        _of_mode(draft)
    else:
        _bypass(draft)
        _clip(draft)
    _denominator(draft)
    _normalize(draft)
    _finish(draft)
    notes = tuple(dict.fromkeys(draft.notes))
    sources = SOURCES | {"objective.surrogate": (LOSS_MODE if LOSS_MODE in given else "loss_type",)}
    made = Translation("verl's rollout correction", given, draft.mis, sources, notes, draft.remarks)
    made.config()
    return made


# Reading the user's settings.


def _full(path: str) -> str:
    """The full path of a setting that may begin below the root, as in `rollout_correction.rollout_is`."""
    first, dot, rest = path.partition(".")
    return f"{SHORT.get(first, first)}{dot}{rest}"


def _value(text: str) -> Any:
    """A value of Hydra's; empty text and switches of YAML alone (`no`) stay text, which verl does not convert."""
    value = translation.of_hydra(text)
    is_ours = isinstance(value, bool) and text.strip().lower() not in ("true", "false")
    return text if is_ours or text == "" else value


def _said(text: str, behind: set[str], asked: Asked) -> Said:
    """The settings of a preset's name, of a launch script or of a yaml, by their full path."""
    if verl_presets.is_call(text):
        return Said(_of_section(text))
    source = tree_or_script(text, DIALECT, behind, asked)
    tree = {key: value for key, value in source.tree.items() if key not in ("hydra", "defaults")}
    of_yaml, own = _once(_flat(tree, is_whole=not WHOLE.isdisjoint(tree))), _of_script(source.settings)
    is_by_default = own.get(ASYNC) or any(name in str(source.tree.get("defaults")) for name in OWN_ASYNC)
    if is_by_default or "async_training" in tree:
        of_yaml = {ASYNC: True} | ({BYPASS: True} if is_by_default else {}) | of_yaml
    elif ASYNC in own and not tree and BYPASS not in own:
        of_yaml = {BYPASS: translation.Open("a yaml that is not here")}
    seen = {part for path in of_yaml for part in path.split(".")}
    strays = [place for place in translation.places(tree, DIALECT.keys) if place.rpartition(".")[2] not in seen]
    return replace(source, settings={**of_yaml, **own}).beside(strays)


def _once(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The settings of a yaml by path, some begun below the root; raises ConfigError for two values of one."""
    once: dict[str, Any] = {}
    for path, value in settings:
        if (first := once.setdefault(path, value)) is not value and first != value:  # NaN is not itself
            raise ConfigError(f"{path}: {as_written(value)} contradicts {as_written(once[path])}; keep one of them")
    return once


def _of_section(call: str) -> dict[str, Any]:
    return {f"{SECTION}.{key}": value for key, value in verl_presets.keys_of(call).items()}


def _flat(tree: Mapping[str, Any], parent: str = "", is_whole: bool = True) -> Iterator[tuple[str, Any]]:
    """The settings of a yaml that bear on the correction; of a part of a file all settings."""
    for key, value in tree.items():
        path = f"{parent}.{key}" if parent else _full(key)
        if path in PARENTS and isinstance(value, Mapping):
            yield from _flat(value, path)
        elif path == SECTION and isinstance(value, str):
            if is_open(value) or not verl_presets.is_call(value):
                raise ConfigError(f"rollout_correction: got {shown(value)}; write its keys behind the file")
            yield from _of_section(value).items()
        elif path in ("algorithm", SECTION) and value is not None:
            raise ConfigError(f"{path}: got {shown(value)}; expected a mapping with {SECTION}")
        elif not is_whole and path not in PATHS and path not in BESIDE_IT and path not in PARENTS:
            yield f"{SECTION}.{key}", value
        else:
            yield path, value


def _of_script(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of Hydra's overrides in a launch script."""
    if SECTION in settings and settings.keys() - {SECTION, ASYNC}:
        raise ConfigError(f"{SECTION}: stands beside a value for all of it; give one of them")
    values = ((path, x if is_open(x) else translation.of_script(path, x, _value)) for path, x in settings.items())
    return _of_overrides([*values])


def _of_overrides(values: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The settings of Hydra's overrides, of which each may be a mapping; none stands beside one for all of it."""
    blocks = [path for path, _ in values if path in PARENTS]
    for path, value in values:
        if not isinstance(value, Mapping) and not _is_ours(path):
            raise ConfigError(f"{path}: got {shown(value)}; expected a mapping")
        within = [block for block in blocks if f"{path}.".startswith(f"{block}.")]
        if len(within) > (path in PARENTS):  # a block lies within itself
            raise ConfigError(f"{path}: stands beside a value for all of {min(within)}; give one of them")
    return dict(_flat(dict(values)))


def _is_read(path: str) -> bool:
    return _is_ours(path) or path in PARENTS


def _is_ours(path: str) -> bool:
    whole = ("algorithm", *PATHS, *BESIDE_IT)
    return path.startswith(("algorithm.rollout_", IN_LOSS)) or path in whole or _is_retired(path)


def _is_retired(path: str) -> bool:
    parent, _, key = path.rpartition(".")
    return key in RETIRED and parent in ("algorithm", SECTION, ACTOR)


TRAINERS = ("main_ppo", "main_dapo", "fully_async_main")


def _settings(words: Sequence[Word]) -> Iterator[tuple[str, Value]]:
    """The overrides of a command, and whether an async trainer begins with its own yaml."""
    if len(words) > 1 and _own(words) != OWN:
        yield ASYNC, Word("false" if _file(words) else "true", ASYNC)
    yield from script.overrides(words)


def _own(words: Sequence[Word]) -> tuple[str, ...]:
    """Names of verl's own yamls for the trainer of a command; the first is read where the command names none."""
    modules = [word.text for word in script.no_values(words) if "=" not in word.text]
    names = [name for part, name in MAINS.items() if any(part in module for module in modules)]
    return tuple(f"{names[0]}_{own}" for own in OWN) if names else OWN


def _starts(word: str) -> bool:
    """Whether a word tells that its command starts a training: its module, or an override that only a trainer has."""
    is_override = word.lstrip("+~").startswith(("algorithm.", "actor_rollout_ref."))
    name = word.removesuffix(".py").replace("/", ".").rpartition(".")[2]  # the last of a module, or of its file
    return "=" in word and is_override or word.partition("=")[0] in OF_FILE or name in TRAINERS


def _file(words: Sequence[Word]) -> Word | None:
    """The yaml that Hydra reads: a name in a folder, or a name alone in the folder of verl's own."""
    folder, name = (script.setting_of(words, *flags) for flags in (OF_FOLDER, OF_NAME))
    if folder is None and name is None:
        return None
    own = _own(words)
    file = replace(name or Word(own[0], own[0]), branch=(name and name.branch) or (folder and folder.branch))
    is_verls = any(name in word.text.replace("/", ".") for name in ("verl.trainer.", f"{ASYNC}.") for word in words)
    is_own = file.text.removesuffix(".yaml") in own and is_verls
    if is_own and (folder is None or folder.text in ("config", "./config")):
        return None
    suffix = "" if file.text.endswith((".yaml", ".yml")) else ".yaml"
    at = ("", "") if folder is None else (f"{folder.text}/", f"{folder.source}/")
    return replace(file, text=f"{at[0]}{file.text}{suffix}", source=f"{at[1]}{file.source}{suffix}")


DIALECT = Dialect(
    "verl",
    ("rollout_correction", LOSS_MODE, *RETIRED, *(key for key in KEYS if key.startswith("rollout_"))),
    _settings,
    _is_read,
    _starts,
    _file,
    own_yamls=OWN_PARTS,
    blocks=PARENTS,
)


def _given(settings: Mapping[str, Any], behind: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the correction and of a loss of `LOSS_MODES` by verl's keys, all of them checked."""
    if settings.get(SECTION, 0) is None and any(path.startswith(f"{SECTION}.") for path in settings):
        raise ConfigError(f"{SECTION}: null stands beside keys of it; give one of them")
    for path, value in settings.items():
        _check_known(path, value)
    given = {key: settings[path] for path, key in PATHS.items() if path in settings}
    idle = {key for key, other in IDLE.items() if is_open(given.get(key)) and not given.get(other)}
    idle |= {LOSS_MODE} if _replaces_loss(settings) else set()
    given = {key: value for key, value in given.items() if key not in idle}
    mode = given.get(LOSS_MODE)
    if MODE_PATH in behind:
        choice(settings[MODE_PATH], LOSS_MODE, (*LOSS_MODES, *OTHER_LOSSES))
    read = LOSS_MODES[mode][1] if isinstance(mode, str) and mode in LOSS_MODES else ()
    for key in (*WIDTHS, *TAUS):
        if SHORT[key] in behind and key not in (*read, *(WIDTHS if mode in (None, *OTHER_LOSSES) else ())):
            modes = " or ".join(name for name, (_, keys) in LOSS_MODES.items() if key in keys)
            raise ConfigError(f"{key}: read with policy_loss.loss_mode: {modes} alone")
    if not read:
        translation.refuse_open({key: given[key] for key in given if key in KEYS} or {LOSS_MODE: mode}, SHORT)
    given = {key: given[key] for key in given if key in (*KEYS, *read, *([LOSS_MODE] * bool(read)))}
    translation.refuse_open(given, SHORT)
    _check_copy(settings)
    return given


def _check_known(path: str, value: Any) -> None:
    """Refuse a key of an earlier release, and one that verl does not have."""
    key = path.rpartition(".")[2]
    if _is_retired(path) and value not in (None, False):
        raise ConfigError(f"{key}: {INSTEAD}")
    names = (*PATHS, *BESIDE_IT, SECTION, f"{SECTION}._target_")
    if _is_ours(path) and not _is_retired(path) and path not in names and not path.startswith(IN_LOSS):
        near = f"; write {SHORT[key]}" if key in SHORT else suggest(key, KNOWN)
        near += "; a command that stands within a yaml goes into a script of its own" * near.startswith("; known")
        raise ConfigError(f"{cut(path.removeprefix(f'{SECTION}.'))}: no key of verl's rollout correction{near}")


def _check_copy(settings: Mapping[str, Any]) -> None:
    """Refuse a block of the loss that is no copy of the correction in bypass, as verl's trainer makes one."""
    for path, value in settings.items():
        if path.startswith(IN_LOSS) and value not in (None, False):  # as verl's own yaml of a run has them
            twin, is_bypass = f"{SECTION}{path.removeprefix(IN_LOSS)}", settings.get(BYPASS) is True
            is_idle = settings.get(MODE_PATH) != "bypass_mode" and settings.get(twin, BYPASS) == value
            if (path, value) == (IN_LOSS, f"${{{SECTION}}}") if is_bypass else is_idle:
                continue
            if not is_bypass or twin not in settings:
                raise ConfigError(
                    f"{IN_LOSS}: verl reads this block in bypass mode alone, and its trainer fills it; put its keys "
                    f"under {SECTION}, with bypass_mode: true"
                )
            if settings[twin] != value:
                raise ConfigError(
                    f"{path}: {as_written(value)} contradicts {twin}: {as_written(settings[twin])}; put the one that "
                    "counts behind the file, under both"
                )


def _left_out(settings: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the actor's loss, where it is neither PPO's clip nor translated, and on settings that are left open."""
    for path in (MODE_PATH, *BESIDE_IT):
        if is_open(settings.get(path)) and path not in UNSERVED:
            when = f"where it is {' or '.join(LOSS_MODES)}, " if path == MODE_PATH else ""
            setting = f"{path.removeprefix(f'{ACTOR}.')}: {as_written(settings[path])}"
            yield f"{setting} is for the launch to decide; {when}put it behind the file, as {path}=VALUE."
    if (estimator := settings.get(ESTIMATOR)) in TOKEN_BASELINES:
        yield NO_BASELINE.format(estimator=estimator)
    yield from beside(settings, UNSERVED, ())
    yield from _kl(*map(settings.get, KL, (False, 0.001, "low_var_kl")))
    if settings.get(DISTILLS) is True:
        yield f"{DISTILLS}: true adds a teacher's loss to the policy's, or takes its place; nothing here does."
    if ASYNC in settings:
        yield ASYNC_TRAINER
    mode = settings.get(MODE_PATH)
    if _replaces_loss(settings):
        yield from () if mode in (None, *OTHER_LOSSES) else [REPLACED.format(mode=as_written(mode))]
    elif mode not in (None, *OTHER_LOSSES, *LOSS_MODES) and not is_open(mode):
        yield f"policy_loss.loss_mode: {as_written(mode)} is not translated{BESIDE.get(str(mode), '')}."


def _kl(uses: Any, coefficient: Any, kind: Any) -> Iterator[str]:
    """The hosts' flags of a KL term in the loss."""
    if uses is True and not is_open(coefficient) and not is_open(kind) and (scale := number(coefficient, KL[1])):
        means = KL_TYPES.get(str(kind))
        own = f" --kl-loss-type {means}" if means else f"; no host has kl_loss_type: {as_written(kind)}"
        yield f"use_kl_loss: pass --use-kl-loss --kl-loss-coef {scale:g}{own}."


def _is_v1(settings: Mapping[str, Any]) -> bool:
    """Whether verl's trainer since 0.9.0 runs, which hands no loss weights or rules in bypass by itself."""
    return bool(settings.get(USE_V1, LEGACY not in settings)) and ASYNC not in settings


def _replaces_loss(settings: Mapping[str, Any]) -> bool:
    """Whether the loss of bypass_mode takes the place of the actor's, whatever `loss_mode` says."""
    return settings.get(BYPASS) is True and not _is_v1(settings)


# Translating.


def _weigh(draft: Draft) -> None:
    level, threshold = draft.given.get("rollout_is"), draft.given.get("rollout_is_threshold", 2.0)
    if level is None or threshold is None:
        return
    choice(level, "rollout_is", ("token", "sequence"))
    lower, upper = _bounds(threshold, "rollout_is_threshold")
    bound = {"bound": "truncate"} if lower is None else {"bound": "zero", "lower": lower}
    draft.mis["weight"] = {"level": level, **bound, "upper": upper}


def _normalize(draft: Draft) -> None:
    if not draft.mis.get("weight") or not draft.is_on("rollout_is_batch_normalize"):
        return
    bypass = draft.is_on("bypass_mode")
    draft.mis["weight"]["normalize"] = {"scope": "data_parallel" if bypass else "rollout", "over": "valid"}
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


def _reject(draft: Draft) -> None:
    """Rules over k1, k2 or k3, each with its own bounds or all with one."""
    rule_names = draft.given.get("rollout_rs")
    if rule_names is None:
        return
    names = list(dict.fromkeys(choice(name, "rollout_rs", OPTIONS) for name in _parts(rule_names, "rollout_rs")))
    thresholds = _parts(draft.given.get("rollout_rs_threshold"), "rollout_rs_threshold")
    if not names:
        raise ConfigError(f"rollout_rs: got {shown(rule_names)}; choose of {', '.join(OPTIONS)}")
    if len(thresholds) not in (1, len(names)):
        raise ConfigError(
            f"rollout_rs_threshold: got {len(thresholds)} for {len(names)} of rollout_rs; give one for each, or one "
            "for all"
        )
    draft.mis = {"weight": None, **draft.mis, "reject": []}
    for i, (name, spec) in enumerate(zip(names, thresholds * (len(names) // len(thresholds)), strict=True)):
        unit, k = name.rsplit("_", 1)
        rule = _ratio_rule(spec) if k == "k1" else _divergence_rule(k, spec)
        draft.mis["reject"].append({"over": AGGREGATION[unit], **rule})
        draft.remarks[f"reject[{i}]"] = f"rollout_rs: {name}, rollout_rs_threshold: {cut(str(spec))}"
        if k == "k1":
            draft.notes.append(
                f"{name}: verl bounds k1 = -log r, so {cut(str(spec))} keeps ratios in [1/upper, 1/lower], written out "
                "below. verl clamps each log ratio to +-20 before it adds them up, here the sum is clamped."
            )


def _denominator(draft: Draft) -> None:
    """What verl divides by after its rules: of a response by what they leave, of all tokens as its trainer counts."""
    overs = {rule["over"] for rule in draft.mis.get("reject") or ()}
    loss, mode = draft.given.get(LOSS_MODE), draft.settings.get(AGGREGATED) or "token-mean"
    by_response = loss in BY_RESPONSE or mode == "seq-mean-token-mean"
    left_open = [path for path in (AGGREGATED, USE_V1, LEGACY) if is_open(draft.settings.get(path))]
    if overs and left_open and not by_response:
        draft.notes.append(NOT_KNOWN.format(open=", ".join(left_open)))
        return
    by_micro_batch = draft.settings.get(LEGACY, "disable") != "disable"  # whose own mask is all that it counts by
    in_trainer = not _is_v1(draft.settings) and not draft.is_on("bypass_mode")
    counts_left = mode == "token-mean" and (by_micro_batch or in_trainer)
    if "token" in overs and (by_response or counts_left):
        draft.mis["denominator"] = "kept"
        draft.notes += [TOKENS_LEFT, *([GEOMETRIC_RULES] if loss == "geo_mean" else [])]
    elif overs and not by_response and mode == "token-mean":
        draft.notes.append(SEQUENCES_LEFT if counts_left else ALL_VALID)
    if overs and by_micro_batch and loss != "geo_mean" and (by_response or mode != "token-mean"):
        draft.notes.append(SEQUENCES_LEFT)


def _ratio_rule(spec: Any) -> dict[str, float]:
    """lower_upper bounds exp(-log r) = 1 / r."""
    lower, upper = _bounds(spec, "rollout_rs_threshold")
    return {"lower": 1 / upper, "upper": upper if lower is None else 1 / lower}


def _divergence_rule(k: str, spec: Any) -> dict[str, Any]:
    if "_" in str(spec):
        raise ConfigError(f"rollout_rs_threshold: got {shown(spec)}; {k} has an upper bound only")
    return {"statistic": k, "upper": number(spec, "rollout_rs_threshold")}


def _bypass(draft: Draft) -> None:
    given = draft.given
    loss_type = choice(given.get("loss_type", "ppo_clip"), "loss_type", tuple(SURROGATE))
    if not draft.is_on("bypass_mode"):
        if loss_type != "ppo_clip":
            draft.notes.append(f"loss_type: {loss_type} has no effect without bypass_mode, in verl as here.")
        if draft.settings.get(MODE_PATH) == "bypass_mode" and draft.mis.get("weight"):
            draft.drop("weight", WEIGHTS_OF_ITS_OWN)
        return
    draft.mis["objective"] = {"old": "behavior", "surrogate": SURROGATE[loss_type]}
    names_it = draft.settings.get(MODE_PATH) == "bypass_mode"
    is_handed = names_it and any(path.startswith(IN_LOSS) for path in draft.settings)
    if (draft.mis.get("reject") or loss_type == "reinforce") and _is_v1(draft.settings) and not is_handed:
        draft.notes.append(V1_TRAINER)
    if loss_type == "ppo_clip" and draft.mis.get("weight"):
        draft.drop(
            "weight",
            "rollout_is: with loss_type: ppo_clip verl computes these weights for its metrics and does not apply "
            "them; the clipped ratio is pi_theta / mu already.",
        )


def _of_mode(draft: Draft) -> None:
    """The surrogate of a loss of the actor, against pi_old or in bypass against mu; the widths become flags."""
    given, mode = draft.given, draft.given[LOSS_MODE]
    surrogate, read = LOSS_MODES[mode]
    choice(given.get("loss_type", "ppo_clip"), "loss_type", tuple(SURROGATE))
    bypass = draft.is_on("bypass_mode")
    own = {key: number(given[key], key) for key in TAUS if key in given}
    draft.mis["objective"] = {"surrogate": surrogate, "old": "behavior" if bypass else "proximal"} | own
    if bypass:
        draft.notes.append(MODE_IN_BYPASS.format(mode=mode))
    elif mode in BY_DIVERGENCE:
        draft.notes.append(MU_BY_BYPASS)
    if mode == "geo_mean" and draft.mis.get("weight") and not bypass:
        draft.notes.append(GEOMETRIC_WEIGHTS)
    for part in ("weight", "reject"):
        if bypass and draft.mis.get(part):
            draft.drop(part, f"rollout_{'is' if part == 'weight' else 'rs'}: dropped, as verl does there.")
    if read == WIDTHS:
        draft.notes += _widths(given, mode)


def _clip(draft: Draft) -> None:
    """Note the widths of PPO's clip, where verl's loss has it; some may be for the launch to decide."""
    settings, surrogate = draft.settings, draft.mis.get("objective", {}).get("surrogate", "clip")
    paths = [SHORT[key] for key in WIDTHS]
    if settings.get(MODE_PATH) not in (None, *OTHER_LOSSES) or surrogate != "clip":
        return
    left_open = list(beside(settings, {}, paths))
    draft.notes += left_open or _widths({key: settings[SHORT[key]] for key in WIDTHS if SHORT[key] in settings}, "")


def _widths(given: Mapping[str, Any], mode: str) -> list[str]:
    """What to pass to the host for a loss's widths and its largest ratio, as an actor of verl has them."""
    base = number(given.get("clip_ratio", CLIP_RATIO), "clip_ratio")
    ends = {key: given.get(key, CLIP_RATIO) for key in ("clip_ratio_low", "clip_ratio_high")}
    low, high = (base if value is None else number(value, key) for key, value in ends.items())
    cap = given.get("clip_ratio_c", CLIP_RATIO_C)
    cap = CLIP_RATIO_C if cap is None and mode == "geo_mean" else number(cap, "clip_ratio_c")
    if cap <= 1:
        raise ConfigError(f"clip_ratio_c: got {cap:g}; the hosts' --eps-clip-c lies above 1")
    what = "DPPO's largest divergences and ratio" if mode in BY_DIVERGENCE else "PPO's clip"
    if mode == "geo_mean":
        what = "the clip of GMPO's log ratios, which reads no --eps-clip-c; the paper has 0.4 for both"
    widths = [
        f"clip_ratio_low, clip_ratio_high, clip_ratio_c: pass --eps-clip {low:g} --eps-clip-high {high:g} "
        f"--eps-clip-c {cap:g}, {what}. An actor of verl that sets none has "
        f"{CLIP_RATIO:g}, {CLIP_RATIO:g} and {CLIP_RATIO_C:g}."
    ]
    if "clip_ratio" in given and base not in (low, high):
        widths.append(
            f"clip_ratio: {base:g} has no effect in verl either, whose actor sets clip_ratio_low and clip_ratio_high."
        )
    return widths


def _finish(draft: Draft) -> None:
    mis = draft.mis
    for part in ("reject", "weight"):
        if not mis.get(part) and not mis.get("reject"):
            mis.pop(part, None)
    if not mis:
        draft.notes.append("verl corrects nothing with these settings and computes metrics alone.")
    if draft.settings.get(LOG_PROBS) is False:
        draft.notes.append(NO_LOG_PROBS)
    elif LOG_PROBS not in draft.settings and any(path.startswith("actor_rollout_ref.") for path in draft.settings):
        draft.notes += [LOG_PROBS_UNSAID] * bool(mis.get("weight") or mis.get("reject"))
    mode, loss = draft.settings.get(AGGREGATED), draft.given.get(LOSS_MODE)
    if loss in BY_RESPONSE:
        draft.notes.append(OVER_SEQUENCES.format(mode=loss))
    elif not is_open(mode):
        how = REDUCTIONS.get(str(mode), NO_REDUCTION)
        draft.notes.append(BY_DEFAULT if mode is None else f"loss_agg_mode: {as_written(mode)} {how}")
    mis["metrics"] = "watch"


# Values.


def _parts(value: Any, key: str) -> list[Any]:
    """Parts of a text with commas; null has none."""
    if isinstance(value, list):
        raise ConfigError(f"{key}: got {shown(value)}; verl refuses a list: write one text, with commas")
    if isinstance(value, str) and not isinstance(value, Unquoted):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [] if value is None else [value]


def _bounds(spec: Any, key: str) -> tuple[float | None, float]:
    """`lower_upper`, or an upper bound alone, of ratios."""
    if isinstance(spec, Unquoted):
        why = f"{spec} without quotes is one number to YAML"
        raise ConfigError(f'{key}: {why}; write "{spec}", in a shell \'"{spec}"\'')
    lower, separator, upper = str(spec).strip().partition("_") if isinstance(spec, str) else ("", "", spec)
    if not separator:
        return None, _positive(spec, key)
    return _positive(lower, key), _positive(upper, key)


def _positive(value: Any, key: str) -> float:
    ratio = number(value, key)
    if ratio <= 0:
        raise ConfigError(f"{key}: got {ratio:g}; every ratio is above 0, so give a number above 0")
    return ratio

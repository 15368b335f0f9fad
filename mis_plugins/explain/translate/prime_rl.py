"""prime-rl's toml: its table `[trainer.loss]`, as commit 559b447 of August 2026 reads it.

prime-rl corrects by default: its loss compares pi_theta with the rollout engine, and drops tokens whose probability has
moved too far.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mis_plugins.config.reading import number, suggest
from mis_plugins.errors import ConfigError, cut, shown
from mis_plugins.explain.translate.script import ASKED, Asked
from mis_plugins.explain.translate.translation import OVER_TOKENS, Translation, choice, places, settings_behind

TABLES = ("trainer.loss", "loss")
"""Where the settings stand: in the toml of a whole run, and in the trainer's own."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "custom": {"import_path": None, "kwargs": None},
}
"""By `type`: the keys of the loss, and prime-rl's defaults."""
KEYS = ("type", *dict.fromkeys(key for keys in DEFAULTS.values() for key in keys))
RETIRED = ("ratio_type", "mask_ratio_low", "mask_ratio_high", "sequence_mask_ratio_low", "kl_mask_type", "teacher_tau",
           "token_mask_low", "token_mask_high", "geo_mask_low", "geo_mask_high", "sequence_mask_low",
           "sequence_mask_high", "sequence_clip_high", "ipo_mask_low", "ipo_mask_high", "clip_ratio",
           "norm_type")  # fmt: skip
"""Keys of earlier prime-rl, whose losses were others."""
NAMED = re.compile(r"@\s*(\S+\.toml)\b")  # `rl @ FILE`, in a launch script
OF_TRAINER = re.compile(r"--trainer[ =]@\s*(\S+\.toml)\b")
CAP = 1e9  # above every ratio of the hooks: prime-rl bounds none
SOURCES = {"objective.surrogate": ("type",), "objective.kl_tau": ("kl_tau",)}
BESIDE = {
    "max_off_policy_steps": "bounds the age of a rollout, not the loss; the hosts have their own (docs/async.md).",
    "enable_router_replay": "replays the engine's routes: --use-rollout-routing-replay of the hosts.",
}
"""Keys beside the loss that bear on the mismatch, and what to know of them here."""
FIXED = {
    **dict.fromkeys(
        ("opd", "opsd"), "drops tokens whose probability fell by more than 0.2 and trains on the reference's KL"
    ),
    "sft": "trains on the likelihood of the tokens",
    "echo": "adds the likelihood of observed tokens",
}
"""Algorithms whose loss is not, or not only, the one of the table."""


def translate(text: str, behind: Sequence[str] = (), asked: Asked = ASKED) -> Translation:
    """Translate prime-rl's toml as its code reads it; trainer.loss.KEY=VALUE of `behind` win over the file.

    It raises ConfigError for no toml, a key or value that prime-rl refuses, or a loss of the user's own.
    """
    if asked.line or asked.arguments:
        raise ConfigError("--line, and arguments behind --, belong to a launch script; prime-rl's toml has none")
    tree = _tree(text)
    table, loss = _loss(tree)
    if not behind and not ({"loss", "trainer", "orchestrator", "inference"} & tree.keys()):
        raise ConfigError(f"nothing to translate: no table [{'] or ['.join(TABLES)}] in it, and no [trainer]")
    expected = f"{TABLES[0]}.KEY=VALUE, KEY one of {', '.join(KEYS)}"
    won = settings_behind(behind, expected, lambda path: path.rpartition(".")[0] in ("", *TABLES))
    loss |= {path.rpartition(".")[2]: value for path, value in won}
    kind = choice(loss.get("type", "default"), f"{table}.type", tuple(DEFAULTS))
    _check_keys(loss, table, kind)
    if kind == "custom":
        raise ConfigError(
            f"{table}.type: custom: the loss is a function of yours, {shown(loss.get('import_path'))}, and nothing "
            f"here reads it; for prime-rl's own, put {table}.type=default behind the file"
        )
    values = {key: number(loss.get(key, default), f"{table}.{key}") for key, default in DEFAULTS[kind].items()}
    for key, value in values.items():
        if not value >= 0:
            raise ConfigError(f"{table}.{key}: got {value:g}; prime-rl takes numbers from 0 on")
    given = {f"{table}.{key}": value for key, value in loss.items()}
    sources = {path: tuple(f"{table}.{key}" for key in keys) for path, keys in SOURCES.items()}
    notes = (*_of_loss(loss, table, values), *_beside(tree))
    # -A pi_theta / mu of the tokens that are left, and a penalty on the log ratio of every token.
    objective = {"surrogate": "dppo_tv" if kind == "default" else kind, "old": "behavior"}
    objective |= {"kl_tau": values["kl_tau"]} if values["kl_tau"] else {}
    return Translation("prime-rl", given, {"objective": objective, "metrics": "watch"}, sources, notes)


def _of_loss(loss: Mapping[str, Any], table: str, values: Mapping[str, float]) -> Iterator[str]:
    if unsaid := [f"{key}: {value:g}" for key, value in values.items() if key not in loss]:
        kind = "" if "type" in loss else "type: default, "
        yield f"prime-rl corrects by default: {table}.{kind}{', '.join(unsaid)}, where the file says nothing."
    bounds = [key for key in values if key not in ("adv_tau", "kl_tau")]
    low, high = values[bounds[0]], values[bounds[-1]]
    yield (
        f"{', '.join(bounds)}: pass --eps-clip {low:g} --eps-clip-high {high:g} --eps-clip-c {CAP:g} (how far a "
        "token's probability may fall and rise; prime-rl caps no ratio)."
    )
    if values["adv_tau"] != 1:
        yield f"adv_tau: {values['adv_tau']:g} multiplies the advantages, and nothing here does; scale the rewards."
    yield f"prime-rl {OVER_TOKENS}."


def _beside(tree: Mapping[str, Any]) -> Iterator[str]:
    for place in places(tree, tuple(BESIDE)):
        yield f"{place}: {BESIDE[place.rpartition('.')[2]]}"
    for name in dict.fromkeys(_algorithms(tree)):
        if name in FIXED:
            yield f"algo.type: {name}: {FIXED[name]}, whatever [{TABLES[0]}] says, and nothing here does."


def _algorithms(tree: Any) -> Iterator[Any]:
    """Types of the algorithms of a run, and of each of its sources."""
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree if isinstance(tree, list) else ()):
        yield from ([str(value.get("type"))] if key == "algo" and isinstance(value, Mapping) else _algorithms(value))


def _tree(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        if named := NAMED.findall(text):
            own = OF_TRAINER.findall(text) or named
            raise ConfigError(
                f"a launch script, which is not read: give {cut(own[-1])}, with the settings of its command and of "
                f"the files before it ({len(named)} in all; later files win) behind it as {TABLES[0]}.KEY=VALUE "
                f"(as a toml: {cut(str(error), 200)})"
            ) from None
        give = f"; of a command give its toml, or the line [{TABLES[0]}], and its settings as {TABLES[0]}.KEY=VALUE"
        raise ConfigError(f"no toml that can be read: {cut(str(error), 200)}{give}") from None


def _loss(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the one table of the loss stands, and its settings; the text "None" is null to prime-rl."""
    trainer = tree.get("trainer")
    tables = {TABLES[0]: trainer.get("loss") if isinstance(trainer, Mapping) else None, TABLES[1]: tree.get("loss")}
    tables = {name: table for name, table in tables.items() if table is not None}
    if len(tables) > 1:
        raise ConfigError(f"[{'] and ['.join(tables)}] both stand in the file; keep the one that prime-rl reads")
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name}: got {shown(table)}; expected a table [{name}]")
        return name, {key: None if value == "None" else value for key, value in table.items()}
    return TABLES[0], {}


def _check_keys(loss: Mapping[str, Any], table: str, kind: str) -> None:
    for key in loss:
        if key in RETIRED:
            raise ConfigError(
                f"{table}.{key}: of an earlier prime-rl, whose loss was another; today's has {', '.join(KEYS)}"
            )
        if key not in KEYS:
            raise ConfigError(f"{table}.{cut(key)}: no key of prime-rl's{suggest(key, KEYS)}")
        if key not in ("type", *DEFAULTS[kind]):
            raise ConfigError(
                f"{table}.{key}: no key of type: {kind}, which has {', '.join(DEFAULTS[kind])}; prime-rl refuses it"
            )

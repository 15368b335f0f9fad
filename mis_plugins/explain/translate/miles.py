"""Miles's and slime's mis.yaml: the flat keys, in our spelling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mis_plugins.config import reading, writing
from mis_plugins.config.file import as_arguments
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.explain.translate.translation import Translation, listed

SWITCHES = ("use_tis", "use_rs")
SOURCES = {
    "weight.level": ("tis_level",),
    "weight.bound": ("tis_mode",),
    "weight.lower": ("tis_lower_bound",),
    "weight.upper": ("tis_upper_bound",),
    "weight.normalize": ("tis_batch_normalize",),
}
VETO = ("rs_veto_threshold",)


def translate(keys: Mapping[str, Any]) -> Translation:
    """Translate a file of flat keys, read as the hook reads it.

    Raises:
        ConfigError: no flat key, or one that the hook would refuse.
    """
    reading.check_names(keys)
    if not any(key in reading.FLAT_KEYS for key in keys):
        spelled = (
            "the file is in our spelling already" if "mis" in keys else "no key of Miles's mis.yaml in it"
        )
        raise ConfigError(f"nothing to translate: {spelled}")
    config = reading.from_args(as_arguments({**keys, "use_tis": True}))
    rules = [reading.RULE_KEYS] * bool(keys.get("use_rs") or keys.get("use_mask")) + [VETO] * (
        keys.get("rs_veto_threshold") is not None
    )
    sources = SOURCES | {f"reject[{i}]": rule for i, rule in enumerate(rules)}
    return Translation(
        "Miles's flat keys",
        keys,
        writing.as_mapping(config),
        sources,
        tuple(_notes(keys, config)),
        switched_on=bool(keys.get("use_tis")),
    )


def _notes(keys: Mapping[str, Any], config: CorrectionConfig) -> Iterator[str]:
    if not keys.get("use_tis"):
        yield "use_tis is not set: nothing is corrected until --use-tis is passed."
    else:
        yield "use_tis: true stands in this file too; pass --use-tis itself, since the hosts check their flags first."
    if config.weight and not config.weight.record.has_floor and keys.get("tis_lower_bound") is not None:
        yield "tis_lower_bound bounds no weight with tis_mode: truncate; use_rs falls back to it."
    if (idle := reading.idle_rule(keys)) is not None:
        yield f"{idle}."
    if keys.get("use_mask"):
        yield (
            "use_mask: mis.py reads no such key; here masked tokens get no gradient and still count in the denominator."
        )
    if not keys.get("use_rs") and keys.get("rs_veto_threshold") is not None:
        yield "rs_veto_threshold: mis.py reads it with use_rs alone; here the veto needs no switch."
    if config.rejects and not keys.get("use_mask"):
        yield (
            "On Miles's FSDP backend the flat keys leave a sequence's loss divided by its kept tokens. Here "
            "all tokens divide the loss, as on Megatron; write denominator: kept to divide by the kept ones."
        )
    if config.weight and config.weight.normalize:
        yield (
            "tis_batch_normalize: as in mis.py the mean is over the valid tokens of each micro-batch, rejected ones "
            "included, and depends on how a step is split; scope: data_parallel or rollout, over: kept do better."
        )
    others = [str(key) for key in keys if key not in (*reading.FLAT_KEYS, *SWITCHES, "mis")]
    if others:
        yield f"not of the correction, keep them in your file: {listed(others)}."
